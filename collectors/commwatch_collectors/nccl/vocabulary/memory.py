"""Warnings about memory: NVLink SHARP, access between GPUs, shared memory, registration, CUDA's and HIP's own errors."""

from __future__ import annotations

from commwatch_collectors.nccl.vocabulary.words import Words

_FABRIC = (
    "Check that the fabric manager runs and has the version of the driver (systemctl status nvidia-fabricmanager), and restart it. "
    "A virtual machine or container needs all GPUs of the NVSwitch partition."
)
_NVLS_OFF = "NCCL_NVLS_ENABLE=0 does without NVLS: all-reduce inside the node becomes slower."
_MNNVL_OFF = "NCCL_MNNVL_ENABLE=0 does without it: traffic between nodes uses the network cards, which are slower."
_IMEX = (
    "Check IMEX on all nodes of the NVLink domain: nvidia-imex-ctl -N, and /dev/nvidia-caps-imex-channels/channel0 in the container "
    "(in Kubernetes, a ComputeDomain)."
)
_IOMMU = (
    "Check nvidia-smi topo -p2p r. On bare metal, switch ACS off in the BIOS or the PCIe switches, and boot with iommu=pt; in a virtual "
    "machine, enable ATS."
)
_AMD = "On AMD, boot with iommu=pt and amd_iommu=on, and set HSA_FORCE_FINE_GRAIN_PCIE=1."
_IPC = "Containers of one node must share the IPC namespace (--ipc=host)."
_P2P_OFF = "NCCL_P2P_DISABLE=1 copies through host memory instead, which is much slower."
_SHM_OFF = "NCCL_SHM_DISABLE=1 does without it: these GPUs then use the network."
_FREE = (
    "Leave room for NCCL: a smaller batch, fewer communicators, or a lower memory fraction of the framework. Smaller buffers "
    "(NCCL_BUFFSIZE, NCCL_MAX_NCHANNELS) cost bandwidth."
)
_REGISTER = (
    "Raise the limit of locked memory (ulimit -l unlimited; docker run --ulimit memlock=-1). For memory of GPUs, load nvidia-peermem, "
    "or use DMA-BUF (open driver, Linux 5.12 or later)."
)
#: Errors of CUDA and HIP that an earlier kernel caused, wherever they are noticed.
_KERNEL = r"(?:illegal|unspecified launch|misaligned|uncorrectable|hardware|launch timed out)"
_OF_FILE = rf"(?i:(?:cuda|hip) failure(?!.{{0,20}}{_KERNEL}))"
_OF_FILE_WITH_MEMORY = rf"(?i:(?:cuda|hip) failure(?!.{{0,20}}(?:out of memory|{_KERNEL})))"

_NVLINK: tuple[Words, ...] = (
    Words(
        "nvlink_sharp",
        r"(?i:NVLink SHARP.{0,80}out of memory)",
        "The GPU has no memory left for NVLink SHARP (NVLS), or the fabric manager did not allow the binding.",
        f"Check the memory in use, and leave room for NCCL. {_FABRIC} {_NVLS_OFF}",
        "error",
    ),
    Words(
        "nvlink_sharp",
        r"(?i:NVLink SHARP|NVLS\) Multicast|multimem pointer requested|Multicast support requested)",
        "The driver could not set up multicast memory for NVLink SHARP (NVLS).",
        f"{_FABRIC} {_NVLS_OFF}",
        "error",
    ),
    Words(
        "nvlink_sharp",
        r"NCCL_NVLS_ENABLE has been set",
        "NVLink SHARP is forced, but several ranks share a GPU, where it cannot work.",
        "Unset NCCL_NVLS_ENABLE, or run one rank per GPU.",
        "error",
    ),
    Words(
        "nvlink_sharp",
        r"MNNVL.{0,80}not working.{0,80}IMEX channel",
        "The GPUs are in one NVLink domain, but this process has no IMEX channel, so nodes cannot share memory.",
        "Create the channel (/dev/nvidia-caps-imex-channels/channel0), and pass it into the container; in Kubernetes, use a "
        f"ComputeDomain. {_MNNVL_OFF}",
        "error",
    ),
    Words(
        "nvlink_sharp",
        r"MNNVL.{0,80}(?:not working|not supported)",
        "The GPUs are in one NVLink domain, but the IMEX service does not connect its nodes.",
        f"Run nvidia-imex-ctl -N on each node, and start nvidia-imex with the same list of nodes on all. {_MNNVL_OFF}",
        "error",
    ),
    Words(
        "nvlink_sharp",
        r"NCCL_MNNVL_ENABLE=0|(?i:cuMem(?:Export\w{0,30}|Import\w{0,30}) ?\(?FABRIC|FABRIC handle not valid)",
        "Nodes cannot share this memory over NVLink.",
        f"{_IMEX} {_MNNVL_OFF}",
        "error",
    ),
    Words(
        "nvlink_sharp",
        r"deregister NVLS",
        "Memory that was registered for NVLink SHARP could not be released.",
        f"If this comes before the end of the job, look for the first error of the process. {_NVLS_OFF}",
    ),
    Words(
        "cuda_error",
        r"(?i:cuda failure.{0,20}out of memory)",
        "The GPU has no memory left for NVLink SHARP (NVLS).",
        f"{_FREE} {_NVLS_OFF}",
        "error",
        r"nvls|multicast",
    ),
    Words(
        "cuda_error",
        _OF_FILE,
        "CUDA refused a call for NVLink SHARP (NVLS): it could not make, bind or map multicast memory.",
        f"{_FABRIC} {_NVLS_OFF}",
        "error",
        r"nvls|multicast",
    ),
    Words(
        "cuda_error",
        _OF_FILE,
        "CUDA refused to share memory between nodes over NVLink (MNNVL).",
        f"{_IMEX} {_MNNVL_OFF}",
        "error",
        r"mnnvl",
    ),
)

_PEERS: tuple[Words, ...] = (
    Words(
        "peer_to_peer",
        r"P2P is disabled between NVLINK",
        "The driver reports no access between two GPUs that NVLink connects, probably because of a fault of the hardware.",
        f"Check nvidia-smi nvlink -s, nvidia-smi topo -p2p n and dmesg (Xid 74), and reset the GPUs. {_IOMMU} NCCL_IGNORE_DISABLED_P2P=1 "
        "goes on at the speed of PCIe.",
    ),
    Words(
        "peer_to_peer",
        r"hipIpc(?:Get|Open)MemHandle",
        "A GPU could not share its memory with another GPU of the node.",
        f"{_AMD} {_P2P_OFF} {_IPC}",
        "error",
    ),
    Words(
        "peer_to_peer",
        r"(?:hipIpc|cudaIpc|IPC handle).{0,120}(?:peer access|mapping of buffer object)",
        "The driver refuses access between two GPUs of the node.",
        f"{_IOMMU} {_P2P_OFF} {_IPC}",
        "error",
    ),
    Words(
        "peer_to_peer",
        r"cudaIpc(?:Get|Open)MemHandle|CUDA IPC handle|[Uu]anble to get IPC handle|Unable to get IPC handle"
        r"|Uanble to get pointer information",
        "A GPU could not share its memory with another GPU of the node.",
        f"NCCL_CUMEM_ENABLE=1 shares memory in another way. {_P2P_OFF} {_IPC}",
        "error",
    ),
    Words(
        "peer_to_peer",
        r"failed to peer with device",
        "The driver refuses access between two GPUs of the node.",
        f"{_IOMMU} {_P2P_OFF}",
        "error",
    ),
    Words(
        "cuda_error",
        r"(?i:(?:cuda|hip) failure.{0,20}(?:peer access|mapping of buffer object))",
        "The driver refuses access between two GPUs of the node.",
        f"{_IOMMU} {_AMD} {_P2P_OFF} {_IPC} Pass all its GPUs to each.",
        "error",
    ),
    Words(
        "cuda_error",
        _OF_FILE_WITH_MEMORY,
        "A GPU could not share its memory with another GPU of the node (P2P).",
        "Let each process see all GPUs of the node (in Slurm, not --gpus-per-task but --gpus-per-node). "
        f"{_IOMMU} {_AMD} {_P2P_OFF} {_IPC}",
        "error",
        r"(?<!net_ib/)\bp2p\.cc",
    ),
    Words(
        "peer_to_peer",
        r"UDS: |[Pp]roxyC(?:all|lient)\w{0,24} call to|Get listenSock fd fails|Failed to get FD from|\[Proxy Service UDS\] Poll",
        "Processes of one node exchange handles of GPU memory over a local socket, and this failed.",
        "Find out whether the other process ended first. In containers, share the network and PID namespaces of the node "
        "(--net=host --pid=host), and check ulimit -n. NCCL_CUMEM_ENABLE=0 does without these sockets.",
    ),
    Words(
        "peer_to_peer",
        r"deregister IPC",
        "Memory that was shared between GPUs could not be released.",
        "If this comes before the end of the job, look for the first error of the process.",
    ),
)

_SHARED: tuple[Words, ...] = (
    Words(
        "shm",
        r"attaching to shared memory|shm_open from non-root|Error: Could not map /dev/shm.{0,120}No such file",
        "A rank could not open the shared memory of another rank of its node: that one has ended, or does not share /dev/shm with it.",
        "Find out whether the other rank failed first. Let the containers of one node share /dev/shm (--ipc=host), or give them "
        f"different host names. {_SHM_OFF}",
        "error",
    ),
    Words(
        "shm",
        r"failed to extend|posix_fallocate|(?:[Ss]hm|shared memory).{0,200}No space left on device",
        "The shared memory of the node or the container (/dev/shm) is too small for NCCL's buffers.",
        "Make it larger (docker run --shm-size=16g; in Kubernetes, an emptyDir with medium: Memory at /dev/shm), and remove the files of "
        f"killed jobs (/dev/shm/nccl-*). {_SHM_OFF}",
        "error",
    ),
    Words(
        "shm",
        r"shared memory|Could not map (?:\S{0,200} size|/|\S{1,200}$)|shm_open|shm (?:close|unlink)|shm_unlink|ShmObject|barrier memory",
        "A segment of /dev/shm could not be made, mapped or removed.",
        "Check its size and owner (df -h /dev/shm, ls -l /dev/shm): docker run --shm-size=16g makes it larger. Remove the files of killed "
        f"jobs (/dev/shm/nccl-*). {_SHM_OFF}",
    ),
    Words(
        "shm",
        r"Call to (?:open|ftruncate|mmap|fallocate|mkstemp) failed",
        "A segment of /dev/shm could not be made or opened.",
        "Check its size and owner (df -h /dev/shm, ls -l /dev/shm), and let the containers of one node share it (--ipc=host) or give them "
        f"different host names. {_SHM_OFF}",
        "error",
        r"(?:^|/)shm\.|shmutils",
    ),
    Words(
        "cuda_error",
        _OF_FILE_WITH_MEMORY,
        "The GPU could not register shared memory of the node.",
        "Check the memory in use, ulimit -l, and that no old job holds the GPU (nvidia-smi). NCCL_CUMEM_HOST_ENABLE=0 uses /dev/shm "
        f"instead of CUDA's own host memory. {_SHM_OFF}",
        "error",
        r"(?:^|/)shm\.cc|shmutils",
    ),
)

_REGISTERED: tuple[Words, ...] = (
    Words(
        "system_error",
        r"libgdrapi|gdrapi|GDRCOPY lib|GDRCopy (?:v2|support)|ncclOsDlsym|initialize GDRCopy|requires GDRCopy",
        "GDRCopy is not installed, or its version is too old.",
        "Install libgdrapi and load the module gdrdrv in the same version, or unset NCCL_GDRCOPY_ENABLE.",
        "info",
    ),
    Words(
        "system_error",
        r"Failed to open|dlsym failed",
        "GDRCopy is not installed, or its version is too old.",
        "Install libgdrapi and load the module gdrdrv in the same version, or unset NCCL_GDRCOPY_ENABLE.",
        "info",
        r"gdrwrap",
    ),
    Words(
        "memory_registration",
        r"gdr_\w{1,24}\(.{0,120}failed|GDRCOPY failure|GDRCopy (?:segment|>=)|gdr_pin_buffer|gdr_map|gdr_unmap|gdr_unpin|gdrcopy worker",
        "GDRCopy could not map memory of the GPU.",
        "Load the module gdrdrv in the version of libgdrapi, and pass /dev/gdrdrv into the container. NCCL_GDRCOPY_ENABLE=0 does without "
        "it: small messages take longer.",
    ),
    Words(
        "memory_registration",
        r"spans? multiple physical|CPU-backed|host-backed|multiple physical cuMem|unsupported location type|NCCL_ELASTIC_BUFFER",
        "This buffer consists of several pieces of memory, or of pieces of the host, which NCCL cannot use in this way.",
        "Allocate it with ncclMemAlloc or torch's NCCL memory pool, or switch expandable segments off in PYTORCH_CUDA_ALLOC_CONF.",
    ),
    Words(
        "memory_registration",
        r"(?i:symmetric register failed|register fails|register userbuff|register sendbuff|symmetric registration requirements"
        r"|deregister \w{1,10} buffer|Window address must be|not in a valid symmetric window)",
        "A buffer could not be registered, or is used after it was given back.",
        f"Register buffers of ncclMemAlloc only, on all ranks and with the same size, and deregister each once. {_REGISTER}",
    ),
    Words(
        "memory_registration",
        r"Unable to use GIN: Peermem|requires DMABUF support",
        "The card cannot read or write the memory of the GPU (GPUDirect RDMA), which this feature needs.",
        "Load nvidia-peermem, or use DMA-BUF (open driver, Linux 5.12 or later).",
    ),
)

_CUDA: tuple[Words, ...] = (
    Words(
        "cuda_error",
        r"(?i:(?:cuda|hip) failure.{0,20}out of memory)|Failed to CUDA (?:malloc|calloc)|Allocation failed\. No suitable space",
        "The GPU has no memory left for NCCL's buffers.",
        _FREE,
        "error",
    ),
    Words(
        "cuda_error",
        r"Failed to CUDA host alloc|Unable to allocated pinned host memory",
        "CUDA could not lock memory of the host.",
        "Raise ulimit -l and the memory limit of the container, and check for other jobs on the node.",
        "error",
    ),
    Words(
        "cuda_error",
        r"(?i:(?:cuda|hip) failure.{0,20}(?:driver version is insufficient|API call is not supported in the installed|forward compatib))"
        r"|(?i:cuda failure (?:35|36|804)\b)",
        "The driver of the node is older than the CUDA that the library or torch was built for.",
        "Upgrade the driver (nvidia-smi shows the CUDA version that it supports), or use builds of torch and NCCL for an older CUDA. In a "
        "container the driver is the host's.",
        "error",
    ),
    Words(
        "cuda_error",
        r"(?i:cuda failure.{0,20}(?:system not yet initialized|system has unsupported))|(?i:cuda failure (?:802|803)\b)",
        "CUDA cannot start on this node: the fabric manager does not run, or does not fit the driver.",
        "Check nvidia-smi, and on machines with NVSwitch systemctl status nvidia-fabricmanager: it needs the version of the driver. Then "
        "start the job again.",
        "error",
    ),
    Words(
        "cuda_error",
        r"(?i:(?:cuda|hip) failure.{0,20}initialization error)",
        "CUDA cannot start in this process: it was forked from one that used CUDA already, or the driver does not answer.",
        "Start workers with spawn instead of fork (torch.multiprocessing), and do not use CUDA before. Check nvidia-smi in the container.",
        "error",
    ),
    Words(
        "cuda_error",
        r"(?i:(?:cuda|hip) failure.{0,20}(?:invalid device(?! function)|no .{0,10}device|device.{0,20}busy|CUDA-capable device))",
        "The process uses a GPU that it does not have, or that another process holds.",
        "Compare CUDA_VISIBLE_DEVICES (AMD: HIP_VISIBLE_DEVICES, ROCR_VISIBLE_DEVICES), LOCAL_RANK and the number of processes per node.",
        "error",
    ),
    Words(
        "cuda_error",
        r"(?i:(?:cuda|hip) failure.{0,20}(?:no kernel image|no binary for|invalid device function|invalid kernel file|shared object initialization"
        r" failed|PTX|device kernel image is invalid))|Failed to get kernel attributes"
        r"|exceeds device/fn maxSharedMem",
        "This build of NCCL or RCCL has no kernels that were compiled for this GPU.",
        "Install a build of NCCL (RCCL), and of PyTorch, for this generation of GPUs. For AMD, compare the architecture (rocminfo: gfx…) with "
        "those that the library was built for, and check HSA_OVERRIDE_GFX_VERSION.",
        "error",
    ),
    Words(
        "cuda_error",
        rf"(?i:(?:cuda|hip) failure.{{0,20}}{_KERNEL})",
        "A kernel failed on this GPU, usually one of the program's; NCCL is often only the first to notice.",
        "Look for Xid errors in dmesg at that time. CUDA_LAUNCH_BLOCKING=1 or compute-sanitizer shows which kernel failed; both make the job slow.",
        "error",
    ),
    Words(
        "cuda_error",
        r"(?i:(?:cuda|hip) failure.{0,20}operation not (?:supported|permitted))",
        "The driver does not allow this kind of memory here, as in WSL2, some virtual machines, or a container without the device.",
        "Try NCCL_CUMEM_ENABLE=0, which gives up registered and symmetric memory, then NCCL_NVLS_ENABLE=0. On machines with NVLink between "
        f"nodes: {_IMEX}",
        "error",
    ),
    Words(
        "cuda_error",
        r"(?i:cuda failure|hip failure)",
        "A kernel or a driver call failed; NCCL is often only the first to notice.",
        "Look for Xid errors in dmesg, and check the memory in use. CUDA_LAUNCH_BLOCKING=1 shows which kernel failed, and makes the job slow.",
        "error",
    ),
    Words(
        "cuda_error",
        r"Retrieve .{1,60} failed with|PFN functions not found",
        "The driver lacks functions that this build of NCCL can use, and NCCL does without them.",
        "Update the driver of the host if NCCL fails afterwards. Otherwise nothing needs to be done.",
        "info",
    ),
    Words(
        "cuda_error",
        r"CUDA Driver version found|CUDA driver < R|CUMEM (?:Host )?(?:is )?not supported prior|requires CUDA driver|old driver, disabling"
        r"|CUDA Runtime library|driver entry point|(?:CUDA|HIP) (?:runtime|driver) version|resolve CUDA function|CUDA runtime symbol"
        r"|CUDA (?:Driver )?library|CUDA missing symbol|load symbol cu|Insufficient driver|installed CUDA driver|support this CUDA version",
        "The driver or the CUDA library is older than this build of NCCL needs, or cannot be found.",
        "Update the driver of the host (nvidia-smi shows its version), or install a build of NCCL for its CUDA version.",
    ),
    Words(
        "cuda_error",
        r"[cC]u(?:da)?[A-Z]\w{2,40} failed|CUDA device count|current CUDA device|Failed to set CUDA (?:device|context)"
        r"|Failed to create CUDA context|CUDA initialization failed|stream capture mode|sync (?:host|device)Stream error|CUDA context; GPU"
        r"|gpu_mem_alloc|h2d copy|DOCA (?:failure|Error)|(?:copy to|restore from) CPU backup",
        "A call of the CUDA driver failed.",
        "Look for the first error of this process, and for Xid errors in dmesg. Check the memory in use and the GPUs that the container has.",
    ),
)

MEMORY: tuple[Words, ...] = (*_NVLINK, *_PEERS, *_SHARED, *_REGISTERED, *_CUDA)
