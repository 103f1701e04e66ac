"""Warnings about the machine: its topology, its drivers and libraries, and the limits of its operating system."""

from __future__ import annotations

from commwatch_collectors.nccl.vocabulary.words import Words

_TOPOLOGY = (
    "Compare lspci, nvidia-smi topo -m and /sys in the container with a node that works, and pass in all GPUs of the node. "
    "NCCL_TOPO_DUMP_FILE=FILE writes what NCCL found."
)
_SHARP = (
    "Check that the aggregation manager (sharp_am) runs and has room for the job. Otherwise unset NCCL_COLLNET_ENABLE."
)
_MSCCL = "RCCL_MSCCL_ENABLE=0 does without these algorithms: small collectives take longer."

MACHINE: tuple[Words, ...] = (
    Words(
        "other",
        r'Missing "iommu=pt"',
        "The kernel runs without iommu=pt, which can make GPUs of AMD slow or hang.",
        "Boot the node with iommu=pt (and amd_iommu=on).",
        "info",
    ),
    Words(
        "other",
        r"MSCCL\+\+: (?:Cannot enable|Feature not enabled)",
        "RCCL does without MSCCL++. That is not a fault.",
        "Nothing needs to be done. RCCL_MSCCLPP_ENABLE=0 removes the line.",
        "info",
        is_harmless=True,
    ),
    Words(
        "setting",
        r"MSCCL(?!\+\+)|type of buffer is not supported|Incorrect offset set for",
        "A file with algorithms for RCCL (MSCCL) is missing or does not fit this version.",
        f"Install RCCL with its algorithms, or unset MSCCL_ALGO_DIR. {_MSCCL}",
    ),
    Words(
        "setting",
        r"XML (?:Parse|Mismatch|Topology|Graph|Import|Export)|XML parser|XML (?:sub)?nodes|XML graph file|Attribute \S{1,64} of node"
        r"|KV Convert|Error : (?:value|name) .{0,256}too long|system node not found in XML|Could not open XML|not dumping topology",
        "A file that describes the topology or the graphs is missing or not valid.",
        "Unset NCCL_TOPO_FILE and NCCL_GRAPH_FILE, or write them again with this version of NCCL. On a cloud, its plug-in may set them.",
    ),
    Words(
        "topology",
        r"[Cc]ould not find real path",
        "NCCL does not see in /sys where a device is (WSL2, a virtual machine, a container). Old versions give up there; newer ones guess its "
        "place.",
        "Use a newer version of NCCL. Mount /sys of the host into the container. A virtual machine needs NCCL_TOPO_FILE, a description that "
        "its provider has.",
        "info",
    ),
    Words(
        "topology",
        r"could not find CPU|Unknown CPU architecture|find (?:CPU|GPU/CPU|DEV|PCI SW|GPU) |unable to find GPU|Add (?:NVLink|XGMI|PCI Link"
        r"|C2c)|reverse path|rev link|localHostHash|unique busId|parent is NULL even after|busId of child|hwloc|PCI (?:attributes|speed|NIC"
        r"|bridge|tag)|topology|[Tt]opo group|link (?:speed|width)|device property|link properties files|node # \d{1,9}|topo/nodes"
        r"|device index not found|find NIC for rank|local path from gpu|[Nn]o path computed|CPU tag|NIC info|fi_nic|group NICs|num_rails"
        r"|expected index|Bridge is missing",
        "NCCL or a plug-in did not find a device of this machine where it looked: /sys is incomplete, or devices are hidden.",
        _TOPOLOGY,
    ),
    Words(
        "topology",
        r"too many (?:Topo links|nodes|DEV nodes|NICs)|internal maximum|MLOPart|any more virtual devices|physical device \d{1,9}, max",
        "This machine has more devices than this build of NCCL can use.",
        "Use a newer version of NCCL, and name the cards to use with NCCL_IB_HCA.",
    ),
    Words(
        "topology",
        r"No transport found",
        "Two ranks have no way to exchange data: no P2P, no shared memory, and no network.",
        "Look for settings that switch them off (NCCL_P2P_DISABLE, NCCL_SHM_DISABLE, NCCL_NET, NCCL_NET_DISABLE_INTRA), and let the "
        "containers of one node share /dev/shm.",
        "error",
    ),
    Words(
        "system_error",
        r"libnvidia-ml\.so|No NVML,|Failed to load nvml",
        "The driver's library (NVML) is missing, so NCCL does not see the GPUs.",
        "Start the container with the NVIDIA runtime (--gpus all), with utility in NVIDIA_DRIVER_CAPABILITIES.",
        "error",
    ),
    Words(
        "system_error",
        r"nvml\w{3,60}\(.{0,80}failed|NVML failure|from NVML device",
        "The driver's library (NVML) failed: its version differs from the driver's, or a GPU has dropped out.",
        "Run nvidia-smi on the node. A 'version mismatch' needs a reboot or a restart of the container; for a lost GPU look for Xid in dmesg.",
        "error",
    ),
    Words(
        "system_error",
        r"ROCm SMI|ARSMI|rocm_smi|ROCr|HSA |hsa_|ROCm runtime library|rocprofiler|HIP (?:driver|runtime) version",
        "A library of ROCm is missing, too old, or has no access to the GPUs.",
        "Run rocm-smi in the container. Pass in /dev/kfd and /dev/dri (--device, and --group-add video,render), and use one version of ROCm.",
    ),
    Words(
        "system_error",
        r"dlv?sym failed|Failed to (?:open|resolve|load) \S{0,80}\.so",
        "A library is missing, or older than NCCL needs.",
        "Install the library that the line names in the image, or update it.",
    ),
    Words(
        "system_error",
        r"[Ff]ailed to malloc|malloc\(size|Allocation failed$|calloc\(|malloc\(|[Cc]ould not allocate|[Ff]ailed to allocate"
        r"|[Uu]nable to allocate|Couldn't allocate|[Aa]llocation (?:of|failed)|allocation failed|malloc failed|calloc failed"
        r"|[Uu]nable to duplicate|calloc f(?:or|ailure)|Allocation failure|\(re\)allocate|fi_dupinfo|creating duplicate"
        r"|Mutex initialization|system page size|[Mm]emory allocation|[Ff]ailed to calloc|std::bad_alloc",
        "The host has no memory left for this process.",
        "Raise the memory limit of the container or job, and look for the out-of-memory killer in dmesg.",
        "error",
    ),
    Words(
        "system_error",
        r"[Tt]hread (?:creation|join) failed|failed to join thread|pthread_\w{1,30}(?: failed)?|getrlimit|setrlimit|thread for job",
        "The process could not start or join a thread.",
        "Raise ulimit -u and the limit of processes of the container (docker run --pids-limit=-1); check the memory limit.",
        "error",
    ),
    Words(
        "system_error",
        r"sched_[gs]etaffinity",
        "The process could not be bound to the processors near its GPU.",
        "Check the container's cpuset. NCCL_IGNORE_CPU_AFFINITY=1 ignores the launcher's binding.",
    ),
    Words(
        "system_error",
        r"Call to (?:bind|listen)\b.{0,60}failed|Address already in use|Cannot assign requested address",
        "A port is taken, or the address is not of this node.",
        "End processes of an earlier run, give each job its own MASTER_PORT and NCCL_COMM_ID, and check NCCL_SOCKET_IFNAME.",
        "error",
    ),
    Words(
        "system_error",
        r"SHARP coll init error",
        "SHARP could not start a job in the switches, and NCCL does without it.",
        _SHARP,
    ),
    Words(
        "other",
        r"Cannot initialize CollNet|CollNet currently only supports|CollNet is not supported or fails",
        "SHARP (CollNet) cannot be used, and NCCL does without it.",
        _SHARP,
        "info",
    ),
    Words(
        "system_error",
        r"Socket creation failed|Call to (?!recv\b|send\b|nccl_ofi)\S{1,60}(?: \w{1,20}){0,2} ?failed|Poll failed|MsgQueueGetId"
        r"|close failed: |Error opening file|Error reading file|std::random_device|Unable to open \S{1,256}, not dumping",
        "A call to the system failed. The text after it says why.",
        "Check the job's limits (ulimit -n, -u and -l) and devices in the container. If a peer ended before, this is a consequence.",
        "error",
    ),
)
