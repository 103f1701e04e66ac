"""The line forms of rings, trees, transports, topology and the tuner: each as the versions print it, whole and torn."""

from __future__ import annotations

import pytest

from commwatch_collectors.nccl import facts as f
from commwatch_collectors.nccl.quiet import is_quiet
from commwatch_collectors.nccl.search import read

#: Versions that print it, text, facts.
Case = tuple[str, str, tuple[f.Fact, ...]]

CHANNELS: list[Case] = [
    ("..2.22.3", "Channel 03/12 :    0   3   2   1", (f.Ring(3, 12, (0, 3, 2, 1)),)),
    ("2.23.4..", "Channel 03/12 : 0 3 2 1", (f.Ring(3, 12, (0, 3, 2, 1)),)),
    ("2.23.4.., wide", "Channel 03/12 :  0  7 10  9", (f.Ring(3, 12, (0, 7, 10, 9)),)),
    ("2.23.4.., cut in a number", "Channel 03/12 :  0  7 10  1...", (f.Ring(3, 12, (0, 7, 10)),)),
    ("2.23.4.., cut between", "Channel 03/12 :  0  7 10 ...", (f.Ring(3, 12, (0, 7, 10)),)),
    ("one rank", "Channel 00/32 :    0", (f.Ring(0, 32, (0,)),)),
    ("RCCL 2.22.3, one rank", "Channel 00/64      0", ()),
    ("torn", "Channel 03/12 :", ()),
    ("torn by foreign text", "Channel 03/12 :    0   3 train:  10%", ()),
    ("2.10.3..", "Ring 05 : 7 -> 0 -> 3", (f.Neighbours(5, 7, 0, 3),)),
    ("2.8.3..", "Tree 5 : -1 -> 0 -> 3/8/-1", (f.Tree(5, -1, 0, (3, 8, -1)),)),
    ("torn", "Tree 5 : -1 -> 0 -> 3/8", ()),
    ("2.8.3..", "Trees [0] 1/-1/-1->0->-1 [1] -1/-1/-1->0->1", (f.Trees("[0] 1/-1/-1->0->-1 [1] -1/-1/-1->0->1"),)),
    ("2.4", "Trees [0] -1->0->1/-1 [1] -1->0->1/-1", (f.Trees("[0] -1->0->1/-1 [1] -1->0->1/-1"),)),
    ("2.5.6..2.7.8", "Trees [0] 1/-1/-1->0->-1|-1->0->1/-1/-1", (f.Trees("[0] 1/-1/-1->0->-1|-1->0->1/-1/-1"),)),
    ("RCCL", "Trees [0] 1/-1/-1->0->-1 comm 0x5a nRanks 02 busId 23000", (f.Trees("[0] 1/-1/-1->0->-1", "0x5a"),)),
    ("cut at 1023", "Trees [0] 1/-1/-1->0->-1 [1] 1/-", (f.Trees("[0] 1/-1/-1->0->-1 [1] 1/-"),)),
    ("2.18.1..2.20.5", "NVLS Trees : 1/-1->0->-1 1/-1->0->-1", ()),
    ("2.18.1..", "NVLS Trees [0] 1/-1/-1->0->-1", ()),
    ("2.7.3..2.16.5", "6 coll channels, 8 p2p channels, 2 p2p channels per peer", (f.Channels(6, None, None, 8, 2),)),
    (
        "2.17.1..2.19.4",
        "6 coll channels, 4 nvls channels, 8 p2p channels, 2 p2p channels per peer",
        (f.Channels(6, None, 4, 8, 2),),
    ),
    (
        "2.20.3..",
        "6 coll channels, 5 collnet channels, 4 nvls channels, 8 p2p channels, 2 p2p channels per peer",
        (f.Channels(6, 5, 4, 8, 2),),
    ),
    ("torn before the last", "6 coll channels, 8 p2p channels, 2 p2p chan", ()),
    ("2.8.3..2.23.4", "Connected all rings", (f.Connected("all rings"),)),
    ("2.24.3..", "Connected all rings, use ring PXN 1 GDR 0", (f.Connected("all rings"),)),
    ("2.8.3..", "Connected all trees", (f.Connected("all trees"),)),
    ("2.18.1..", "Connected NVLS tree", (f.Connected("NVLS tree"),)),
    ("2.23.4..", "Connected binomial trees", (f.Connected("binomial trees"),)),
    ("CollNet", "rank 3 Connected CollNet", (f.Connected("CollNet"),)),
    ("2.24.3..2.26.6", "Check P2P Type intraNodeP2pSupport 1 directMode 0", ()),
    ("2.27.3..", "Check P2P Type isAllDirectP2p 1 directMode 0", ()),
    ("2.17.1..", "NVLS multicast support is available on dev 6", (f.Nvls(True, 6),)),
    ("2.27.3..2.29.7", "NVLS multicast support is not available on dev 6 (NVLS_NCHANNELS 0)", (f.Nvls(False, 6),)),
    ("2.18.1..", "NVLS comm 0x5a headRank 2 nHeads 8 buffSize 1 memSize 2", (f.NvlsUsed(),)),
    ("2.21.5..", "MNNVL 1 cliqueId 7a cliqueSize 72 cliqueRank 4 ", (f.Mnnvl(True, 72),)),
    ("2.20.3..", "MNNVL busId 0x2b000 fabric UUID 0.0 cliqueId 0x0 state 3 healthMask 0x0", ()),
    ("2.x", "threadThresholds 8/8/64 | 16/8/64 | 512 | 512", ()),
    ("2.x", "Setting affinity for GPU 3 to ff,00000000", ()),
    ("2.22.3..", "CC Off, Multi-GPU CC Off, workFifoBytes 1048576", ()),
]


def via(
    kind: str, device: str | None = None, *, direction: str = "", gdr: bool = False, comm: str | None = None
) -> f.Via:
    return f.Via(9, 14, direction, kind, device, gdr, comm)


#: Transport as printed, what it is.
INTRA_NODE = {
    "P2P/IPC": "P2P/IPC",
    "P2P/IPC/read": "P2P/IPC",
    "P2P/IPC/CE": "P2P/IPC",
    "P2P/direct pointer": "P2P/direct pointer",
    "P2P/direct pointer/read": "P2P/direct pointer",
    "P2P/indirect/3[4]/read": "P2P/indirect",
    "P2P/common device": "P2P/common device",
    "P2P/CUMEM": "P2P/CUMEM",
    "P2P/CUMEM/read/CE": "P2P/CUMEM",
    "P2P/MNNVL": "P2P/MNNVL",
    "direct shared memory": "SHM",
    "SHM/direct/direct": "SHM",
    "SHM/CE/direct": "SHM",
    "SHM/direct": "SHM",
}
#: The same, for networks: name, device, with GPUDirect RDMA.
NETS = {
    "NET/IB/3": ("NET/IB", "3", False),
    "NET/Socket/0": ("NET/Socket", "0", False),
    "NET/IB/3/GDRDMA": ("NET/IB", "3", True),
    "NET/IB/3/GDRDMA/Shared": ("NET/IB", "3", True),
    "NET/IB/3/Shared": ("NET/IB", "3", False),
    "NET/IBext_v8/1(12)/GDRDMA": ("NET/IBext_v8", "1", True),
    "NET/IB/3/GDRDMA(PCI)": ("NET/IB", "3", True),
    "NET/AWS Libfabric/7/GDRDMA": ("NET/AWS Libfabric", "7", True),
}

TRANSPORTS: list[Case] = [
    *(("2.3.5..", f"Channel 02 : 9[2b000] -> 14[d1000] via {text}", (via(kind),)) for text, kind in INTRA_NODE.items()),
    *(
        ("2.18.3..", f"Channel 02/1 : 9[1] -> 14[6] [send] via {text}", (via(kind, device, direction="send", gdr=gdr),))
        for text, (kind, device, gdr) in NETS.items()
    ),
    ("2.3.5..2.6.4", "Ring 02 : 9[1] -> 14[6] via P2P/IPC", (via("P2P/IPC"),)),
    ("2.4", "Ring 02 : 9 -> 14 [receive] via NET/IB/0/GDRDMA", (via("NET/IB", "0", direction="receive", gdr=True),)),
    (
        "2.7.3..",
        "Channel 02 : 9[2b000] -> 14[d1000] [receive] via NET/IB/0",
        (via("NET/IB", "0", direction="receive"),),
    ),
    ("RCCL", "Channel 02 : 9[2b000] -> 14[d1000] via P2P/IPC comm 0x5a nRanks 16", (via("P2P/IPC", comm="0x5a"),)),
    (
        "RCCL",
        "Channel 02/0 : 9[2b000] -> 14[d1000] [send] via NET/IB/0/GDRDMA/Shared comm 0x5a nRanks 16",
        (via("NET/IB", "0", direction="send", gdr=True, comm="0x5a"),),
    ),
    ("2.9.6..", "CollNet 01/0 : 9 [send] via COLLNET/SHARP/2/GDRDMA", (f.CollNetVia(9, "send", "SHARP", True),)),
    (
        "2.26.2..",
        "CollNet 01/0 : 9 [receive] via COLLNET/SHARP/2/GDRDMA(PCI)",
        (f.CollNetVia(9, "receive", "SHARP", True),),
    ),
    ("2.6.4..2.8.4", "Coll 01 : 9 [receive] via COLLNET/My Net/2", (f.CollNetVia(9, "receive", "My Net", False),)),
    ("torn behind the kind", "Channel 02/0 : 9[1] -> 14[6] via P2P/CUMEM/reother text", (via("P2P/CUMEM"),)),
    ("torn behind the kind", "Channel 02/0 : 9[1] -> 14[6] [send] via NET/IB/", (via("NET/IB", direction="send"),)),
    ("torn in the kind", "Channel 02/0 : 9[1] -> 14[6] via P2P/CUM", ()),
    ("torn in the net", "Channel 02/0 : 9[1] -> 14[6] [send] via NET/I", ()),
    ("torn head", "nel 02/0 : 9[1] -> 14[6] via P2P/IPC", ()),
    ("orphan tail", "[receive] via NET/IB/8", ()),
    ("torn rank", "Channel 02/0 : 9[1] -> 14[ via P2P/IPC", ()),
    ("torn CollNet", "CollNet 01/0 : 9 [send] via COLLNET/SHA", ()),
]

GRAPH: list[Case] = [
    ("2.14.3..", "=== System : maxBw 48.0 totalBw 240.5 ===", (f.System(48.0, 240.5),)),
    ("2.8.3..2.13.4", "=== System : maxWidth 12.0 totalWidth 132.0 ===", (f.System(12.0, 132.0),)),
    ("2.6.4..2.7.8", "=== System : maxWidth 12.0 ===", (f.System(12.0, None),)),
    ("all", "==========================================", ()),
    ("..2.20.5", "+ NVL[60.0] - GPU/2B000 (3)", ()),
    ("2.21.5..", "CPU/0-1 (1/1/2)", ()),
    ("2.24.3..", "+ NET[50.0] - NET/0-0 (1/abc/1/50.0)", ()),
    (
        "..2.20.5",
        "GPU/1000 :GPU/1000 (0/5000.000000/LOC) GPU/2000 (2/24.000000/PHB) CPU/0 (1/24.0/PHB)",
        (f.Paths("GPU/1000", (("GPU/1000", "LOC"), ("GPU/2000", "PHB"))),),
    ),
    (
        "2.21.5..",
        "GPU/0-1000 :GPU/0-1000 (0/5000.0/LOC) GPU/0-2000 (1/60.0/NVL) NET/0-0 (3/12.0/PXB)",
        (f.Paths("GPU/0-1000", (("GPU/0-1000", "LOC"), ("GPU/0-2000", "NVL"))),),
    ),
    *(
        (versions, text, (f.Pattern(text, 4, 6, 11.0, 22.0, *types),))
        for versions, text, types in (
            (
                "2.14.3..",
                "Pattern 4, crossNic 1, nChannels 6, bw 11.000000/22.000000, type NVL/PXB, sameChannels 0",
                ("NVL", "PXB"),
            ),
            (
                "..2.13.4",
                "Pattern 4, crossNic 1, nChannels 6, speed 11.000000/22.000000, type NVL/PXB, sameChannels 0",
                ("NVL", "PXB"),
            ),
            (
                "2.5.6",
                "Pattern 4, crossNic 1, nChannels 6, speed 11.0/22.0, nvlink 1, type 2, sameChannels 0",
                ("2", None),
            ),
        )
    ),
    ("torn", "Pattern 4, crossNic 1, nChannels 6, bw 11.0/22.0, type NVL/PXB, same", ()),
    ("all", " 0 : NET/0 GPU/0 GPU/1 NET/0", ()),
    ("2.x", "Search 3 : 2 channels loaded from XML graph", ()),
    ("2.x", "Loading topology file /etc/topo.xml", ()),
]

TUNER: list[Case] = [
    ("2.5.7", "1048576 Bytes -> Algo 1 proto 2 time 73", (f.Algo(None, 1048576, "1", "2", None, None),)),
    ("2.6.4..2.22.3", "64 Bytes -> Algo 0 proto 0 time 9.300000", (f.Algo(None, 64, "0", "0", None, None),)),
    ("2.23.4", "AllGather: 64 Bytes -> Algo 6 proto 2 time 9.3", (f.Algo("AllGather", 64, "6", "2", None, None),)),
    (
        "2.24.3..",
        "ReduceScatter: 64 Bytes -> Algo COLLNET_DIRECT proto LL128 channel{Lo..Hi}={1..15}",
        (f.Algo("ReduceScatter", 64, "COLLNET_DIRECT", "LL128", 1, 15),),
    ),
    ("undefined", "64 Bytes -> Algo -1 proto -1 time 0.0", (f.Algo(None, 64, "-1", "-1", None, None),)),
    ("torn in the proto", "ReduceScatter: 64 Bytes -> Algo RING proto SIMP", ()),
    ("torn in the channels", "ReduceScatter: 64 Bytes -> Algo RING proto LL channel{Lo..Hi}={1..", ()),
    (
        "2.27.3..",
        "AllReduce [Symmetric]: 64 Bytes -> Kernel AllReduce_AGxLL_R nchannels 4 nthreads 512",
        (f.Kernel("AllReduce", "Symmetric", 64, "AllReduce_AGxLL_R"),),
    ),
    (
        "2.29.2..",
        "AllGather [Copy Engine]: 64 Bytes -> cudaMemcpyBatchAsync",
        (f.Kernel("AllGather", "Copy Engine", 64, "cudaMemcpyBatchAsync"),),
    ),
    (
        "2.30.7",
        "AllGather [Hierarchical CE]: 64 Bytes -> RMA proxy + CE",
        (f.Kernel("AllGather", "Hierarchical CE", 64, "RMA proxy + CE"),),
    ),
    ("2.5.6..2.17.1", "Latency/AlgBw |    Tree/    LL |    Tree/ LL128 |", ()),
    ("2.18.1..", "  Algorithm   |                            Tree                  |", ()),
    ("2.18.1..", "  Protocol    |             LL |          LL128 |         Simple |", ()),
    ("2.5.6..", " Max NThreads |            512 |            640 |            512 |", ()),
    ("2.5.6..", "AllReduce |     8.4/   3.0 |    12.5/   0.0 |", ()),
    ("2.24.3..", "Enabled NCCL Func/Proto/Algo Matrix:", ()),
]

CALLS: list[Case] = [
    (
        "2.3.7..",
        "AllReduce: opCount 1f sendbuff 0x7a recvbuff 0x7b count 512 datatype 7 op 0 root 0 comm 0x5a [nranks=12] stream 0x9",
        (f.Coll("AllReduce", 512, 7, 0, 0, 12),),
    ),
    (
        "2.7..",
        "Send: opCount a sendbuff 0x7a recvbuff (nil) count 512 datatype 9 op 0 root 3 comm 0x5a [nranks=12] stream 0x9",
        (f.Coll("Send", 512, 9, 0, 3, 12),),
    ),
    (
        "2.28.3..",
        "AlltoAll: opCount 0 sendbuff 0x7a recvbuff 0x7b count 512 datatype 7 op 0 root 0 comm 0x5a [nranks=2] stream (nil)",
        (f.Coll("AlltoAll", 512, 7, 0, 0, 2),),
    ),
    (
        "RCCL",
        "Reduce: opCount 2 sendbuff 0x7a recvbuff 0x7b count 5 datatype 7 op 4 root 1 comm 0x5a [nranks=8] stream 0x9 task 1 globalrank 3",
        (f.Coll("Reduce", 5, 7, 4, 1, 8),),
    ),
    (
        "torn behind the root",
        "Reduce: opCount 2 sendbuff 0x7a recvbuff 0x7b count 5 datatype 7 op 4 root 1 comm 0x5",
        (f.Coll("Reduce", 5, 7, 4, 1, None),),
    ),
    ("torn in the root", "Reduce: opCount 2 sendbuff 0x7a recvbuff 0x7b count 5 datatype 7 op 4 root 1", ()),
    ("2.3.5", "opCount 2 sendbuff 0x7a recvbuff 0x7b size 5 datatype 7 op 4 root 1 comm 0x5a", ()),
    ("2.13.4..", "ncclAllReduce(7a00,7b00,512,7,0,0,0x5a,0x9)", (f.Call("ncclAllReduce"),)),
    ("2.13.4..", "ncclGroupStart()", (f.Call("ncclGroupStart"),)),
    ("2.13.4..", "ncclCommInitRank(0x5a, 12, 0xabc9, 5, 1)", (f.Call("ncclCommInitRank"),)),
]

CASES = CHANNELS + TRANSPORTS + GRAPH + TUNER + CALLS


@pytest.mark.parametrize(("versions", "text", "facts"), CASES, ids=[f"{case[0]}: {case[1][:80]}" for case in CASES])
def test_forms(versions: str, text: str, facts: tuple[f.Fact, ...]) -> None:
    """A text gives exactly the facts that its form holds; a torn one only what is whole in it."""
    assert read(text) == facts, versions


@pytest.mark.parametrize(
    "text", [text for versions, text, facts in CASES if not facts and versions[0] in "2.a"], ids=lambda text: text[:60]
)
def test_known_and_quiet(text: str) -> None:
    """A message that is known to say nothing we keep is not counted as unknown."""
    assert is_quiet(text)
