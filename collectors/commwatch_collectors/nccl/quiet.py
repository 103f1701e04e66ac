"""Known messages without a fact, so that the count of unknown messages stays meaningful."""

from __future__ import annotations

import re

#: Beginnings of known messages without a fact: internals, allocation, the search for plug-ins.
_QUIET = re.compile(
    r"\s*(?:NCCL git version|NET/Plugin|P2P plugin|Plugin Path|(?:TUNER|PROFILER|ENV|GIN|NET)/Plugin|TUNER/|Comm config|P2P Chunksize"
    r"|threadThresholds|Setting affinity|Launch mode|Using non-device net|Using internal|DMA-BUF is|PXN Disabled|MNNVL|NVLS"
    r"|CC O|Connect(?:ed|ion) to proxy|New proxy|Allocated|Imported|UDS|\[?Proxy|proxy|ncclPoll|ncclProxy|ncclTopo|resp\.opId|Received and"
    r"|(?:send|recv)Connect|Queuing|Dequeued|[Ss]harp rank|SHARP rank|RAS |TOPO/|TUNER|Retrieving state|Initialized|Assigned|Loading|Loaded|Successfully loaded"
    r"|Check P2P|Bootstrap timings|Mem Realloc|Latency/|Algorithm|Protocol|Max NThreads|Function|(?:Broadcast|Reduce|AllGather|ReduceScatter|AllReduce) \|"
    r"|=+$|\+ |CPU/|GPU/|NET/|PCI/|NIC/|NVS/|\d+ : |Search |Ring \d|NVLS Head|\S+:\d+ (?:Cuda|memory|NCCL)|comm 0x|Enabled NCCL|DMABUF|Dmabuf|dlvsym|dlopen"
    r"|Kernel version|ROCr version|HSA|initialized internal|Hostname|Librccl|\[node_id|Enabled GDRCopy|Trees|NVLink|includes? |Pattern"
    r"|Channel \d+/\d+ +\d|opCount |CommRevoke|ncclCommGrow|\[Rank|\[Service thread\]|Communicator has |Failed to open lib|MSCCL)"
)


def is_quiet(text: str) -> bool:
    """Return whether a message is known to carry no fact."""
    return _QUIET.match(text) is not None
