"""The subsystem of a file or function of NCCL, RCCL or a plug-in, with the remedy for warnings whose words are not known."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import NamedTuple


class Place(NamedTuple):
    """A part of the library."""

    #: A regular expression that is searched in the origin.
    pattern: str
    name: str
    do: str


_NETWORK = "Set NCCL_SOCKET_IFNAME to the interface on which the nodes reach each other, and check firewalls and routes between them."
_FIRST = "Find the first error of this process, or the rank that failed first."
_PROGRAM = "Check the arguments and the order of the calls. TORCH_DISTRIBUTED_DEBUG=DETAIL checks them on all ranks."

#: The first match wins.
PLACES: tuple[Place, ...] = (
    Place(
        r"ofi_|_ofi|fid_|fi_|libfabric|\befa_|platform-aws",
        "the network plug-in for libfabric (aws-ofi-nccl)",
        "Run fi_info -p efa (HPE Slingshot: -p cxi) on the node. Check that plug-in, libfabric and the card's driver have the same versions "
        "on all nodes, and that the security group allows all traffic between its members. NCCL_NET=Socket does without the plug-in, at "
        "a small part of its bandwidth.",
    ),
    Place(
        r"nvls|multicast",
        "NVLink SHARP (NVLS)",
        "Check that the fabric manager runs and has the version of the driver (systemctl status nvidia-fabricmanager). "
        "NCCL_NVLS_ENABLE=0 does without NVLS: all-reduce inside the node becomes slower.",
    ),
    Place(
        r"mnnvl",
        "NVLink between nodes (MNNVL)",
        "Check IMEX on all nodes of the NVLink domain: nvidia-imex-ctl -N, and /dev/nvidia-caps-imex-channels in the container. "
        "NCCL_MNNVL_ENABLE=0 does without it: traffic between nodes uses the network cards.",
    ),
    Place(
        r"\bgin|gin_|gdaki|\brma",
        "device-side and one-sided communication (GIN, RMA)",
        "Check that the network of all ranks supports it (InfiniBand with DOCA, or a plug-in with GIN). NCCL_GIN_ENABLE=0 does without "
        "it, if the program can.",
    ),
    Place(
        r"coll_net|sharp",
        "SHARP (CollNet)",
        "Check that the aggregation manager (sharp_am) runs and has room for the job. NCCL_COLLNET_ENABLE=0 does without it: large "
        "all-reduces between nodes become slower.",
    ),
    Place(
        r"net_ib|ibvwrap|ibvsymbols|mlx5dv",
        "InfiniBand and RoCE (NET/IB)",
        "Check the cards (ibstat, ibv_devinfo), that /dev/infiniband is in the container, ulimit -l, and NCCL_IB_HCA. NCCL_IB_DISABLE=1 "
        "does without them: TCP sockets reach a small part of their bandwidth.",
    ),
    Place(
        r"transport/net\.",
        "connections over the network (NET)",
        f"{_FIRST} Otherwise check the cards of both nodes, and NCCL_NET.",
    ),
    Place(
        r"net_socket",
        "the network over TCP sockets (NET/Socket)",
        _NETWORK,
    ),
    Place(
        r"\bp2p\.|ipcsocket",
        "access between GPUs (P2P)",
        "Check nvidia-smi topo -p2p r (AMD: rocm-smi --showtopo), IOMMU and ACS, and let the containers of one node share the IPC "
        "namespace. NCCL_P2P_DISABLE=1 copies through host memory instead, which is much slower.",
    ),
    Place(
        r"\bshm|shmutils|ShmObject|MsgQueue|CliqueManager",
        "shared memory (SHM)",
        "Check the free space of /dev/shm (df -h /dev/shm), and give the container more (docker run --shm-size=16g; in Kubernetes, an "
        "emptyDir with medium: Memory). NCCL_SHM_DISABLE=1 does without it, over the network.",
    ),
    Place(r"bootstrap", "the first contact between the ranks (bootstrap)", _NETWORK),
    Place(r"socket|os/linux|\bos/", "sockets between the processes", _NETWORK),
    Place(
        r"proxy",
        "NCCL's service threads (proxy)",
        f"{_FIRST} Service threads fail when a peer is gone.",
    ),
    Place(
        r"gdrwrap|gdrcopy",
        "GDRCopy",
        "Load the module gdrdrv in the version of libgdrapi, or unset NCCL_GDRCOPY_ENABLE.",
    ),
    Place(
        r"msccl|npkit",
        "algorithms of MSCCL",
        "RCCL_MSCCL_ENABLE=0 and RCCL_MSCCLPP_ENABLE=0 do without them: small collectives take longer.",
    ),
    Place(
        r"rsmi|rocm|hsa",
        "ROCm's libraries",
        "Run rocm-smi in the container, pass in /dev/kfd and /dev/dri, and use one version of ROCm.",
    ),
    Place(
        r"nvmlwrap|cudawrap|strongstream|cuda",
        "calls of the GPU's driver",
        "Run nvidia-smi, look for Xid errors in dmesg, and check that the driver is new enough for this build of NCCL.",
    ),
    Place(
        r"graph/|\btopo\.|\bxml|\bpaths\.|\brings\.|\btrees\.|\bsearch\.|\btuning\.|\bconnect\.|rome_models",
        "topology and choice of algorithms",
        "Compare lspci and nvidia-smi topo -m with a node that works. Unset NCCL_TOPO_FILE, NCCL_GRAPH_FILE, NCCL_ALGO and NCCL_PROTO. "
        "NCCL_TOPO_DUMP_FILE=FILE writes what NCCL found.",
    ),
    Place(
        r"register|dev_runtime|mem_manager|allocator|sym_kernels|symmetric|devcomm",
        "registered and symmetric memory",
        "Register memory of ncclMemAlloc only, the same on all ranks. NCCL_LOCAL_REGISTER=0, NCCL_GRAPH_REGISTER=0 and NCCL_WIN_ENABLE=0 "
        "do without it: collectives use more copies.",
    ),
    Place(
        r"plugin|tuner|profiler|ucx|\bnet\.cc",
        "plug-ins",
        "Check that NCCL_NET_PLUGIN, NCCL_TUNER_PLUGIN and NCCL_PROFILER_PLUGIN name plug-ins for this version of NCCL; unset them to do "
        "without.",
    ),
    Place(
        r"\bras",
        "NCCL's monitoring (RAS)",
        "NCCL_RAS_ENABLE=0 does without it; communication is not affected.",
    ),
    Place(
        r"argcheck|collectives|enqueue|group|ce_coll|scheduler",
        "calls of the program",
        _PROGRAM,
    ),
    Place(r"init\.|channel\.|transport", "setting up a communicator", _FIRST),
    Place(
        r"param|debug\.|\benv",
        "settings",
        "Check the variables NCCL_… and /etc/nccl.conf.",
    ),
    Place(
        r"[(<]|::",
        "a plug-in",
        "Check that the plug-in is for this version of NCCL, and the same on all nodes; its own log may say more.",
    ),
)
_UNKNOWN = Place(
    "",
    "NCCL",
    "Search NCCL's issue tracker for the words of the line. NCCL_DEBUG=INFO shows what happened before it.",
)
_COMPILED = tuple((place, re.compile(place.pattern, re.IGNORECASE)) for place in PLACES)


@lru_cache(maxsize=4096)
def subsystem(place: str) -> tuple[str, str]:
    """Return a name for people and the remedy for unknown words, of a file (``transport/net_ib.cc:420``) or a plug-in's function."""
    # RCCL prints the path of its build, which has names of its own.
    file = place.rpartition("/src/")[2]
    found = next((known for known, pattern in _COMPILED if pattern.search(file)), _UNKNOWN)
    return found.name, found.do
