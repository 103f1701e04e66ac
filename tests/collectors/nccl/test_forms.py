"""The line forms of versions, networks, settings and communicators: each as the versions print it, whole and torn."""

from __future__ import annotations

import math
import re

import pytest

from commwatch_collectors.nccl import facts as f
from commwatch_collectors.nccl.forms import FORMS
from commwatch_collectors.nccl.quiet import is_quiet
from commwatch_collectors.nccl.search import read

#: Versions that print it, text, facts.
Case = tuple[str, str, tuple[f.Fact, ...]]

VERSIONS: list[Case] = [
    ("2.3.5..2.21.5", "NCCL version 2.3.5+cuda9.2", (f.Version("NCCL", "2.3.5", "9.2"),)),
    ("2.22.3..", "NCCL version 2.28.7+cuda13.0", (f.Version("NCCL", "2.28.7", "13.0"),)),
    ("vendor", "NCCL version 2.14.3vend0r+cuda11.8", (f.Version("NCCL", "2.14.3vend0r", "11.8"),)),
    ("vendor", "NCCL version 2.27.5-1.el9+cuda12.9", (f.Version("NCCL", "2.27.5-1.el9", "12.9"),)),
    ("quoted", "unhandled error, NCCL version 2.20.5", (f.Version("NCCL", "2.20.5", own=False),)),
    ("RCCL as NCCL", "NCCL version 2.7.8+hip3.9", (f.Version("RCCL", "2.7.8", hip="3.9"),)),
    ("RCCL ..6.2", "RCCL version 2.20.5+hip6.2 HEAD:0a1b2c3d+", (f.Version("RCCL", "2.20.5", hip="6.2"),)),
    ("RCCL 6.3..", "RCCL version : 2.21.5-develop:9f8e7d6", (f.Version("RCCL", "2.21.5"),)),
    ("RCCL 6.3..", "HIP version  : 6.3.42131-fa1d09cbd", (f.Build("HIP", "6.3.42131"),)),
    ("RCCL 6.3..", "ROCm version : 6.3.0.0-39-abc", (f.Build("ROCm", "6.3.0.0-39-abc"),)),
    ("RCCL 6.3..", "Librccl path : /opt/rocm/own.so", (f.Build("librccl", "/opt/rocm/own.so"),)),
    ("RCCL 6.3..", "Hostname     : gpu-a", ()),
    ("others", "HIP version: 6.3.42131", ()),
    ("2.29.2..", "NCCL git version master 1a2b3c4d5e", (f.Build("git", "master 1a2b3c4d5e"),)),
    ("2.13.4..", "cudaDriverVersion 12040", (f.Driver(12040),)),
    ("RCCL", "initialized internal alternative rsmi functionality", (f.Rccl(),)),
    ("RCCL", "/build/rccl/src/misc/argcheck.cc:12 is old", (f.Rccl(),)),
    ("none", "hammersmith and hercclass", ()),
]

NETWORKS: list[Case] = [
    ("2.8.3..2.23.4", "Bootstrap : Using ens5:172.31.0.9<0>", (f.Interfaces("Bootstrap", ("ens5",)),)),
    ("2.24.3..", "Bootstrap: Using bond0.12:172.31.0.9<0>", (f.Interfaces("Bootstrap", ("bond0.12",)),)),
    ("IPv6", "Bootstrap : Using ib1:fe80::a:1%ib1<0>", (f.Interfaces("Bootstrap", ("ib1",)),)),
    ("2.4.2..2.7.8", "Bootstrap : Using [0]ib4:10.4.0.1<0> [1]ib5:10.5.0.1<0>", (f.Interfaces("Bootstrap", ("ib4",)),)),
    ("torn behind the name", "Bootstrap : Using ens5:172.3", (f.Interfaces("Bootstrap", ("ens5",)),)),
    ("torn in the name", "Bootstrap : Using ens", ()),
    (
        "2.23.4..",
        "Bootstrap timings total 3.250000 (create 0.1, send 0.2, recv 2.9, ring 0.05, delay 0.0)",
        (f.BootstrapTime(3.25),),
    ),
    ("old", "NET/Plugin : No plugin found (libnccl-net.so), using internal implementation", ()),
    ("2.19..", "NET/Plugin: Failed to find ncclNetPlugin_v8 symbol.", ()),
    ("2.23.4..", "NET/Plugin: Plugin name set by env to libnccl-net-x.so", ()),
    ("2.19..", "NET/Plugin: Loaded net plugin Some Net v8 (v8)", (f.Plugin("net", "Some Net v8 (v8)"),)),
    ("2.27.3..", "Initialized NET plugin AWS Libfabric", ()),
    ("2.27.3..", "Assigned NET plugin AWS Libfabric to comm", (f.Plugin("NET", "AWS Libfabric"),)),
    ("2.29.2..2.30.4", "Assigned GIN plugin GIN_IB to comm", (f.Plugin("GIN", "GIN_IB"),)),
    ("2.30.7", "GIN/Plugin: Assigned plugin GIN_IB type 2 to comm", (f.Plugin("GIN", "GIN_IB"),)),
    ("2.21.5..", "TUNER/Plugin: Using Fast tuner (v4)", (f.Plugin("TUNER", "Fast tuner (v4)"),)),
    ("2.23.4..", "PROFILER/Plugin: Could not find: libnccl-profiler.so.", ()),
    ("2.28.7..", "ENV/Plugin: Closing env plugin ncclEnvDefault", ()),
    ("SHARP", "P2P plugin v8 IBext_v8", (f.Plugin("P2P", "IBext_v8"),)),
    ("SHARP", "P2P plugin IBext", (f.Plugin("P2P", "IBext"),)),
    ("SHARP", "SHARP rank 0/4 initialized on mlx5_2:1", ()),
    *(
        ("2.6.4..", f"Using network {name}", (f.Network(name),))
        for name in ("IB", "Socket", "IBext_v11", "AWS Libfabric", "FasTrak", "GPUDirectTCPX_v7")
    ),
    ("2.4.2..2.11.4", "NET/IB : Using [0]mlx4_0:2/IB ; OOB ib0:10.0.0.1<0>", (f.Hcas((f.Hca(0, "mlx4_0", 2, "IB"),)),)),
    (
        "2.12.7..",
        "NET/IB : Using [0]mlx5_7:1/IB [1]mlx5_bond_1:1/RoCE [RO]; OOB eth9:10.0.0.1<0>",
        (f.Hcas((f.Hca(0, "mlx5_7", 1, "IB"), f.Hca(1, "mlx5_bond_1", 1, "RoCE"))),),
    ),
    (
        "SHARP",
        "NET/IB : Using [0]mlx5_7:1/IB/SHARP [1]mlx5_8:1/IB/SHARP [RO]; OOB eth9:10.0.0.1<0>",
        (f.Hcas((f.Hca(0, "mlx5_7", 1, "IB"), f.Hca(1, "mlx5_8", 1, "IB"))),),
    ),
    (
        "merged 2.20.3..2.23.4",
        "NET/IB : Using [0]={[0] rd0:1/RoCE, [1] rd1:1/RoCE} [1]={[2] rd2:1/RoCE} [RO]; OOB eth9:10.0.0.1<0>",
        (f.Hcas((f.Hca(0, "rd0", 1, "RoCE"), f.Hca(0, "rd1", 1, "RoCE"), f.Hca(1, "rd2", 1, "RoCE"))),),
    ),
    ("torn in the second", "NET/IB : Using [0]mlx5_7:1/IB [1]mlx5_8:1/Ro", (f.Hcas((f.Hca(0, "mlx5_7", 1, "IB"),)),)),
    ("torn in the first", "NET/IB : Using [0]mlx5", ()),
    ("2.29, no device", "NET/IB : Using [RO]; OOB eth9:10.0.0.1<0>", (f.NoHca("NET/IB : Using no device"),)),
    ("2.4.2..", "NET/IB : No device found.", (f.NoHca("NET/IB : No device found"),)),
    ("2.11.4..", "Failed to open libibverbs.so[.1]", (f.NoHca("Failed to open libibverbs.so"),)),
    (
        "2.24..",
        "NET/IB: [3] mlx5_3:uverbs3:1/RoCE provider=Mlx5 speed=400000 context=0x5 pciPath=/sys/devices/p ar=1",
        (f.Nic("mlx5_3", 1, "RoCE", 400000),),
    ),
    ("before 2.24", "NET/IB: [0] mlx5_1:1/IB ", (f.Nic("mlx5_1", 1, "IB", None),)),
    (
        "2.24.3..",
        "NET/IB : Made virtual device [8] name=mlx5_0+mlx5_1 speed=800000 ndevs=2",
        (f.Nic("mlx5_0+mlx5_1", None, "merged", 800000),),
    ),
    (
        "2.30.7",
        "NET/IB : Made virtual device [8] name=mlx5_0+mlx5_1 speed=800000 ndevs=2 rail=0 plane=1",
        (f.Nic("mlx5_0+mlx5_1", None, "merged", 800000),),
    ),
    (
        "2.4.2..",
        "NET/Socket : Using [0]eth7:10.7.0.1<0> [1]eth8:fe80::8%eth8<0>",
        (f.Interfaces("NET/Socket", ("eth7", "eth8")),),
    ),
    ("2.4.2..", "NET/Socket: Using 2 threads and 8 sockets per thread", ()),
    ("..2.12.12", "NET/IB : GPU Direct RDMA Disabled for HCA 1 'mlx5_1' (no module)", (f.GdrHca(False, "mlx5_1"),)),
    ("2.13.4..", "NET/IB : GPU Direct RDMA Enabled for HCA 0 'mlx5_0'", (f.GdrHca(True, "mlx5_0"),)),
    ("DMA-BUF", "NET/IB : GPU Direct RDMA (DMABUF) enabled for HCA 0 'mlx5_0'", (f.GdrHca(True, "mlx5_0"),)),
    (
        "2.6.4..2.23.4",
        "NET/IB : GPU Direct RDMA Disabled for GPU 2b000 / HCA 4 (distance 5 > 4), read 0",
        (f.GdrGpu(False, "2b000", "4", "distance 5 > 4"),),
    ),
    (
        "2.24.3..2.28.9",
        "NET/IB : GPU Direct RDMA Enabled for GPU 6 / HCA 1 (distance 4 <= 5), read 1 mode Default",
        (f.GdrGpu(True, "6", "1", "distance 4 <= 5"),),
    ),
    (
        "2.29.2..2.29.7",
        "GPU Direct RDMA Enabled for GPU 6 / HCA 1 for a close NIC, read 1",
        (f.GdrGpu(True, "6", "1", "a close NIC"),),
    ),
    ("2.13.4..", "DMA-BUF is available on GPU device 5", ()),
    ("OFI", "NET/OFI Initializing aws-ofi-nccl 1.13.2-aws", (f.Plugin("OFI", "aws-ofi-nccl 1.13.2-aws"),)),
    ("OFI 1.4", "NET/OFI Selected Provider is efa", (f.Provider("efa"),)),
    ("OFI 1.7..1.13", "NET/OFI Selected Provider is cxi (found 8 nics)", (f.Provider("cxi"),)),
    ("OFI later", "NET/OFI Selected provider is efa, fabric is efa-direct (found 16 nics)", (f.Provider("efa"),)),
    ("OFI", "NET/OFI Using transport protocol RDMA (platform set)", ()),
    ("OFI", "NET/OFI Plugin selected platform: AWS", ()),
]

SETTINGS: list[Case] = [
    ("2.3.5..", "NCCL_SOCKET_IFNAME set by environment to ens", (f.Env("NCCL_SOCKET_IFNAME", "ens"),)),
    ("2.3.5..", "NCCL_BUFFSIZE set by environment to 4194304.", (f.Env("NCCL_BUFFSIZE", "4194304"),)),
    (
        "..2.11.4",
        "NCCL_MAX_CTAS set by environment to 18446744073709551615.",
        (f.Env("NCCL_MAX_CTAS", "18446744073709551615"),),
    ),
    ("2.17..", "NCCL_IB_HCA set to rd0:1,^rd1", (f.Env("NCCL_IB_HCA", "rd0:1,^rd1"),)),
    ("2.17..", "NCCL_TUNER_PLUGIN set to ", (f.Env("NCCL_TUNER_PLUGIN", ""),)),
    ("2.17.1..", "Comm config Min CTAs set to 4", (f.CommConfig("Min CTAs", "4"),)),
    ("2.28.7..", "Comm config cgaClusterSize reset to NCCL_CGA=2", (f.CommConfig("cgaClusterSize", "2"),)),
    ("2.16.2..", "P2P Chunksize set to 524288", ()),
    ("torn", "NCCL_IB_TIMEOUT set by envir", ()),
    ("torn", "NCCL_IB_TIMEOUT set by environment t", ()),
]

COMM = "comm 0x7f01 rank 5 nranks 12 cudaDev 1"
INIT = f.Init(False, "0x7f01", 5, 12, cuda_dev=1, bus_id="2b000")
COMM_ID = INIT._replace(comm_id="0xabc9")
NVML = COMM_ID._replace(nvml_dev=3)
SPLIT = NVML._replace(parent="0x6e00", color=2, key=4)
SPLIT_NO_ID = SPLIT._replace(comm_id=None)
TAIL = "cudaDev 1 nvmlDev 3 busId 2b000"

COMMUNICATORS: list[Case] = [
    ("2.3.7", "comm 0x7f01 rank 5 nranks 12 - COMPLETE", (f.Init(False, "0x7f01", 5, 12),)),
    ("2.4", f"{COMM} nvmlDev 3 - Init COMPLETE", (f.Init(False, "0x7f01", 5, 12, cuda_dev=1, nvml_dev=3),)),
    ("2.5.6..2.15.5", f"{COMM} busId 2b000 - Init COMPLETE", (INIT,)),
    ("2.16.2..2.18.1, vendors", f"{COMM} busId 2b000 commId 0xabc9 - Init COMPLETE", (COMM_ID,)),
    ("2.18.3..2.20.5", f"{COMM} nvmlDev 3 busId 2b000 commId 0xabc9 - Init START", (NVML._replace(start=True),)),
    ("2.18.3..2.20.5", f"{COMM} nvmlDev 3 busId 2b000 commId 0xabc9 - Init COMPLETE", (NVML,)),
    *(
        (
            "2.21.5..",
            f"{api} {COMM} nvmlDev 3 busId 2b000 commId 0xabc9 - Init {word}",
            (NVML._replace(start=word == "START"),),
        )
        for api in ("ncclCommInitRank", "ncclCommInitRankConfig", "ncclCommInitAll", "ncclCommInitRank_impl")
        for word in ("START", "COMPLETE")
    ),
    (
        "RCCL 2.22.3",
        f"{COMM} nvmlDev 3 busId 2b000 commId 0xabc9 localSize 96 used 123456 bytes on core 7 - Init COMPLETE",
        (NVML,),
    ),
    (
        "2.21.5..2.22.3",
        f"ncclCommSplit {COMM} nvmlDev 3 busId 2b000 parent 0x6e00 color 2 key 4 commId 0xabc9 - Init COMPLETE",
        (SPLIT,),
    ),
    (
        "2.23.4",
        f"ncclCommSplit {COMM} nvmlDev 3 busId 2b000 parent 0x6e00 color 2 key 4- Init START",
        (SPLIT_NO_ID._replace(start=True),),
    ),
    (
        "2.24.3..2.28.9",
        f"ncclCommSplit {COMM} nvmlDev 3 busId 2b000 parent 0x6e00 splitCount 1 color 2 key 4 - Init COMPLETE",
        (SPLIT_NO_ID._replace(child=1),),
    ),
    (
        "2.29.2..",
        f"[Rank 5] ncclCommShrink {COMM} nvmlDev 3 busId 2b000 parent 0x6e00 childCount 7 color -1 key 4- Init START",
        (SPLIT_NO_ID._replace(start=True, child=7, color=-1),),
    ),
    ("torn before the rank", "nranks 12 cudaDev 1 busId 2b000 - Init COMPLETE", (f.Init(False),)),
    ("torn pointer", f"f01 rank 5 nranks 12 {TAIL} commId 0xabc9 - Init COMPLETE", (NVML._replace(comm=None),)),
    ("torn behind", f"{COMM} nvmlDev 3 busId 2b000 commId 0xabc9 - Init COMPL", ()),
    (
        "2.22.3",
        "Init timings: rank 5 nranks 12 total 2.40 (kernels 0.2, bootstrap 1.1, allgathers 0.1, topo 0.2)",
        (f.InitTime(5, 12, 2.4),),
    ),
    (
        "2.23.4..",
        "Init timings - ncclCommInitRank: rank 5 nranks 12 total 2.40 (kernels 0.2, alloc 0.9, bootstrap 1.1)",
        (f.InitTime(5, 12, 2.4),),
    ),
    ("2.20.3..", "comm 0x7f01 rank 5 nRanks 12 nNodes 3 localRanks 4 localRank 1 MNNVL 0", (f.Layout(12, 3, 4),)),
    ("torn", "comm 0x7f01 rank 5 nRanks 12 nNodes 3 localRa", ()),
    *(
        ("2.12.7..", f"{COMM} busId 2b000 - {how} COMPLETE", (f.End(how, "0x7f01", 5, 12),))
        for how in ("Destroy", "Abort")
    ),
    ("2.28.7..", f"{COMM} busId 2b000 - Revoke COMPLETE, result 0", (f.End("Revoke", "0x7f01", 5, 12),)),
    ("torn before", "busId 2b000 - Destroy COMPLETE", (f.End("Destroy"),)),
    ("2.28.3..", f"{COMM} busId 2b000 - Abort START", ()),
    ("2.28.7..", "CommRevokeAsync START", ()),
    ("2.29.2..", "ncclCommGrow: existing rank creating new communicator with 16 total ranks", ()),
]

CASES = VERSIONS + NETWORKS + SETTINGS + COMMUNICATORS


@pytest.mark.parametrize(("versions", "text", "facts"), CASES, ids=[f"{case[0]}: {case[1][:60]}" for case in CASES])
def test_forms(versions: str, text: str, facts: tuple[f.Fact, ...]) -> None:
    """A text gives exactly the facts that its form holds; a torn one only what is whole in it."""
    assert set(read(text)) == set(facts), versions


@pytest.mark.parametrize(("versions", "text", "facts"), CASES, ids=[f"{case[0]}: {case[1][:60]}" for case in CASES])
def test_forms_behind_other_text(versions: str, text: str, facts: tuple[f.Fact, ...]) -> None:
    """A form is found behind the rest of a torn message, too."""
    assert set(read("3] " + text)) == set(facts), versions


@pytest.mark.parametrize(
    "text", [text for versions, text, facts in CASES if not facts and versions[0] == "2"], ids=lambda text: text[:60]
)
def test_known_and_quiet(text: str) -> None:
    """A message that is known to say nothing we keep is not counted as unknown."""
    assert is_quiet(text)


def test_unknown() -> None:
    """An unknown message gives no fact and is not taken for a known one."""
    text = "Frobnicating 12 widgets on 3 gadgets"
    assert read(text) == ()
    assert not is_quiet(text)


def test_absurd_numbers() -> None:
    """A number that 64 bits do not hold is no fact, however long it is."""
    for digits in (20, 400, 5000):
        number = "9" * digits
        assert read(f"cudaDriverVersion {number}") == ()
        assert read(f"comm 0x1 rank {number} nranks 2 cudaDev 0 busId 1 - Init COMPLETE") == ()
        (time,) = read(f"Bootstrap timings total {number}.5")
        assert isinstance(time, f.BootstrapTime)
        assert math.isfinite(time.total_s)
    assert read("Init timings: rank 0 nranks 2 total 1.2.3 (x)") == (f.InitTime(0, 2, 1.2),)


def test_glued_facts() -> None:
    """Two forms in one text both count."""
    text = "NCCL_ALGO set by environment to Ring. Channel 00/0 : 0[0] -> 1[1] via P2P/IPC"
    assert set(read(text)) >= {f.Via(0, 1, "", "P2P/IPC")}
    double = "Channel 00/0 : 0[0] -> 1[1] via P2P/IPCChannel 01/0 : 0[0] -> 1[1] via P2P/IPC"
    assert read(double) == (f.Via(0, 1, "", "P2P/IPC"),) * 2


def test_needles() -> None:
    """A form's needle is in each text that its pattern matches; otherwise the form could never match."""
    texts = [text for _, text, _ in CASES]
    for form in FORMS:
        for text in texts:
            assert form.needle in text or re.search(form.pattern, text) is None, (form.needle, text)
