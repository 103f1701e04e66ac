"""Warnings about memory: NVLink SHARP, access between GPUs, shared memory, registration, CUDA's and HIP's own errors."""

from __future__ import annotations

from commwatch_collectors.nccl.vocabulary.words import Words

_NVLS_OFF = "NCCL_NVLS_ENABLE=0 does without NVLS: all-reduce inside the node becomes slower."
_MNNVL_OFF = "NCCL_MNNVL_ENABLE=0 does without it: traffic between nodes uses the network cards, which are slower."
_P2P_OFF = "NCCL_P2P_DISABLE=1 copies through host memory instead, which is much slower."
_SHM_SIZE = (
    "Give the container more (docker run --shm-size=16g; in Kubernetes an emptyDir with medium: Memory at /dev/shm), and remove "
    "files of killed jobs (/dev/shm/nccl-*)."
)

MEMORY: tuple[Words, ...] = (
    Words(
        "nvlink_sharp",
        r"(?i:Failed to bind NVLink SHARP|NVLS\) Multicast)",
        "The driver could not set up multicast memory for NVLink SHARP (NVLS).",
        "Restart the fabric manager, and check that it has the version of the driver (systemctl status nvidia-fabricmanager, "
        f"nvidia-smi -q -i 0). If its text is 'out of memory', free GPU memory as well. {_NVLS_OFF}",
        "error",
    ),
    Words(
        "nvlink_sharp",
        r"MNNVL.{0,80} not working.{0,80}IMEX channel",
        "The GPUs are in one NVLink domain, but this process has no IMEX channel, so memory cannot be shared between nodes.",
        "Create the channel (/dev/nvidia-caps-imex-channels/channel0) and pass it into the container; in Kubernetes use a "
        f"ComputeDomain. {_MNNVL_OFF}",
        "error",
    ),
    Words(
        "nvlink_sharp",
        r"MNNVL.{0,80} not working",
        "The GPUs are in one NVLink domain, but the IMEX service does not connect its nodes.",
        f"Run nvidia-imex-ctl -N on each node, and start nvidia-imex with the same list of nodes on all. {_MNNVL_OFF}",
        "error",
    ),
    Words(
        "cuda_error",
        r"(?i:cuda failure)",
        "CUDA refused a call for NVLink SHARP (NVLS): multicast memory could not be made, bound or mapped.",
        "Restart the fabric manager, and check that it has the version of the driver (systemctl status nvidia-fabricmanager). "
        f"In a container or virtual machine, all GPUs of the NVSwitch partition must be visible. {_NVLS_OFF}",
        "error",
        r"nvls|multicast",
    ),
    Words(
        "cuda_error",
        r"(?i:cuda failure)",
        "CUDA refused to share memory between nodes over NVLink (MNNVL).",
        f"Check IMEX on all nodes of the NVLink domain: nvidia-imex-ctl -N, /dev/nvidia-caps-imex-channels. {_MNNVL_OFF}",
        "error",
        r"mnnvl",
    ),
    Words(
        "cuda_error",
        r"(?i:(?:cuda|hip) failure)|(?:cuda|hip)IpcGetMemHandle",
        "A GPU could not share its memory with another GPU of the node (P2P).",
        "Check nvidia-smi topo -p2p r, and that containers of one node share the IPC namespace (--ipc=host). On AMD boot with iommu=pt "
        f"(and amd_iommu=on), and set HSA_FORCE_FINE_GRAIN_PCIE=1. With CUDA's own allocators, try NCCL_CUMEM_ENABLE=0. {_P2P_OFF}",
        "error",
        r"(?<!net_ib/)\bp2p\.",
    ),
    Words(
        "peer_to_peer",
        r"(?:cuda|hip)Ipc(?:Get|Open)MemHandle",
        "A GPU could not share its memory with another GPU of the node.",
        "Check that containers of one node share the IPC namespace (--ipc=host). On AMD boot with iommu=pt and amd_iommu=on, and set "
        f"HSA_FORCE_FINE_GRAIN_PCIE=1. {_P2P_OFF}",
        "error",
    ),
    Words(
        "shm",
        r"failed to extend /dev/shm|No space left on device.{0,80}shm|shm.{0,200}No space left on device",
        "/dev/shm is too small for NCCL's buffers: each rank needs some 10 to 100 MB.",
        _SHM_SIZE,
        "error",
    ),
    Words(
        "cuda_error",
        r"(?i:(?:cuda|hip) failure.{0,20}out of memory)|Failed to CUDA (?:host alloc|malloc|calloc)",
        "The GPU has no memory left for NCCL's buffers.",
        "Leave room for NCCL: a smaller batch, fewer communicators, or a lower memory fraction of the framework. Smaller buffers "
        "(NCCL_BUFFSIZE, NCCL_MAX_NCHANNELS) cost bandwidth.",
        "error",
    ),
    Words(
        "cuda_error",
        r"(?i:cuda failure|hip failure)",
        "A kernel or a driver call failed; NCCL is often only the first to notice.",
        "Look for Xid errors in dmesg, and check the memory in use. CUDA_LAUNCH_BLOCKING=1 shows which kernel failed, and makes all slow.",
        "error",
    ),
)
