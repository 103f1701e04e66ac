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


PLACES: tuple[Place, ...] = (
    Place(
        r"ofi|fid_|libfabric|gin_gdaki|efa_|platform-aws",
        "the network plug-in for libfabric (aws-ofi-nccl)",
        "Run fi_info -p efa on the node. Check that the plug-in, libfabric and the driver of the card have the same versions on all "
        "nodes, and that the security group allows all traffic between its members. NCCL_NET=Socket does without the plug-in, at a "
        "small part of its bandwidth.",
    ),
    Place(
        r"nvls|multicast",
        "NVLink SHARP (NVLS)",
        "Check that the fabric manager runs (systemctl status nvidia-fabricmanager) and has the version of the driver. "
        "NCCL_NVLS_ENABLE=0 does without NVLS: all-reduce inside the node becomes slower.",
    ),
    Place(
        r"mnnvl",
        "NVLink between nodes (MNNVL)",
        "Check IMEX on all nodes of the NVLink domain: nvidia-imex-ctl -N, and /dev/nvidia-caps-imex-channels in the container. "
        "NCCL_MNNVL_ENABLE=0 does without it: traffic between nodes uses the network cards.",
    ),
    Place(
        r"(?<!net_ib/)(?<!ib_)\bp2p\.|rocm_smi|alt_rsmi",
        "access between GPUs (P2P)",
        "Check nvidia-smi topo -p2p r (AMD: rocm-smi --showtopo), IOMMU and ACS. NCCL_P2P_DISABLE=1 copies through host memory "
        "instead, which is much slower.",
    ),
    Place(
        r"\bshm\.|shmutils|ShmObject",
        "shared memory (SHM)",
        "Check the free space of /dev/shm (df -h /dev/shm), and give the container more (docker run --shm-size=16g, an emptyDir with "
        "medium: Memory). NCCL_SHM_DISABLE=1 does without it, over the network.",
    ),
    Place(
        r"net_ib|ibvwrap|ibvsymbols|mlx5dv|gdaki",
        "InfiniBand and RoCE (NET/IB)",
        "Check the cards (ibstat, ibv_devinfo), that /dev/infiniband is in the container, ulimit -l, and NCCL_IB_HCA. NCCL_IB_DISABLE=1 "
        "does without them: TCP sockets reach a small part of their bandwidth.",
    ),
    Place(
        r"bootstrap|misc/socket|net_socket|os/linux|ipcsocket",
        "sockets between the processes",
        "Set NCCL_SOCKET_IFNAME to the interface on which the nodes reach each other, and check firewalls and routes between them.",
    ),
)
_UNKNOWN = Place(
    "",
    "NCCL",
    "Search NCCL's issue tracker for the words of the line. NCCL_DEBUG=INFO shows what happened before it.",
)
_COMPILED = tuple((place, re.compile(place.pattern)) for place in PLACES)


@lru_cache(maxsize=4096)
def subsystem(place: str) -> tuple[str, str]:
    """Return a name for people and the remedy for unknown words, of a file (``transport/net_ib.cc:420``) or a plug-in's function."""
    found = next((known for known, pattern in _COMPILED if pattern.search(place)), _UNKNOWN)
    return found.name, found.do
