"""Reasons: a warning is the reason of the failure that follows it, whatever its words, and causes come before consequences."""

from __future__ import annotations

import re

import pytest

from commwatch_collectors.nccl.account import Account
from commwatch_collectors.nccl.checks.findings import findings
from commwatch_collectors.nccl.checks.fitting import fit
from commwatch_collectors.nccl.checks.order import in_time, time_of
from commwatch_collectors.nccl.last_errors import LastErrors
from commwatch_collectors.nccl.lives import Seen
from commwatch_collectors.nccl.views import Finding

ODD = "the heap of widgets is empty"
WARNS, FAILS = f"ant:1:2 [0] misc/widgets.cc:9 NCCL WARN {ODD}", "ant:1:2 [0] NCCL INFO misc/widgets.cc:19 -> 3"


def found(*lines: str, files: tuple[str, ...] = ()) -> list[Finding]:
    """The findings of lines, of one file or of one for each."""
    account = Account()
    for number, line in enumerate(lines, start=1):
        account.add(line, files[number - 1] if files else "job.log", number)
    return findings(account)


def names(*lines: str, files: tuple[str, ...] = ()) -> list[tuple[str, str]]:
    """Name and severity of each finding, in order."""
    return [(each.name, each.severity) for each in found(*lines, files=files)]


def test_other_messages_between() -> None:
    """A failed call belongs to the last warnings of its thread for some messages, and not to one long before."""
    between = ["ant:1:2 [0] NCCL INFO Setting affinity for GPU 0 to ff"] * 20
    assert names(WARNS, *between, FAILS)[0] == ("nccl_failed", "error")
    assert names(WARNS, *between * 4, FAILS) == [("other_warning", "warning")]


def test_another_thread() -> None:
    """A failed call of another thread or process is no failure of the warning."""
    for other in ("ant:1:3 [0] NCCL INFO misc/x.cc:1 -> 3", "ant:7:2 [0] NCCL INFO misc/x.cc:1 -> 3"):
        assert ("nccl_failed", "error") not in names(WARNS, other)


def test_another_way() -> None:
    """A warning after which the thread completes its init is no reason of a failure."""
    ends = "ant:1:2 [0] NCCL INFO ncclCommInitRank comm 0x5a rank 0 nranks 1 cudaDev 0 nvmlDev 0 busId 1b000 commId 0xa1 - Init COMPLETE"
    assert names(WARNS, FAILS, ends) == [("other_warning", "warning")]


def test_without_a_head() -> None:
    """A warning and a failed call without host and process are of one thread if they follow each other."""
    assert names("[0] misc/widgets.cc:9 NCCL WARN " + ODD, "[0] NCCL INFO misc/widgets.cc:19 -> 3")[0] == (
        "nccl_failed",
        "error",
    )


def test_every_process_has_its_own() -> None:
    """The same warning of several processes is one finding with all of them, and none of them failed silently."""
    lines = [line.replace("ant:1:", f"ant:{pid}:") for pid in (1, 7, 8) for line in (WARNS, FAILS)]
    (one,) = found(*lines)
    assert one.says == f"NCCL: {ODD} (3 times); on 3 processes on ant"


REAL = "Could not find real path of /sys/class/pci_bus/0000:01/../../0000:01:00.0"
NO_PATH = f"ant:1:2 [0] graph/xml.cc:332 NCCL WARN {REAL}"
COMPLETE = "ant:1:2 [0] NCCL INFO comm 0x5a rank 0 nranks 1 cudaDev 0 nvmlDev 0 busId 1b000 commId 0xa1 - Init COMPLETE"
RAISES = "RuntimeError: NCCL error in: ../x.cpp:784, unhandled system error, NCCL version 2.7.8"


def test_hint_that_failed() -> None:
    """A hint is the reason of a call that failed at once or of an exception that quotes it, unless another warning is."""
    assert names(NO_PATH, FAILS) == [("topology", "error")]
    assert names(NO_PATH) == names(NO_PATH, FAILS, COMPLETE) == [("hint", "info")]
    assert names("Last error:", REAL) == [("topology", "error")]
    between = ["ant:1:2 [0] NCCL INFO Setting affinity for GPU 0 to ff"] * 9
    assert names(NO_PATH, *between, FAILS) == [("hint", "info")]
    assert names(NO_PATH, WARNS, FAILS) == [("nccl_failed", "error"), ("hint", "info")]
    verbs = "ant:1:2 [0] misc/ibvwrap.cc:63 NCCL WARN Failed to open libibverbs.so[.1]"
    assert names(verbs, NO_PATH, FAILS) == [("topology", "error")]
    assert names(verbs, FAILS) == [("system_error", "error")]


def test_remark_at_each_init() -> None:
    """What RCCL prints at each init is no reason of a failed call next to it, which failed without a warning."""
    text = 'Missing "iommu=pt" from kernel command line which can lead to system instability or hang!'
    remark = f"ant:1:2 [0] init.cc:179 NCCL WARN {text}"
    assert names(remark, FAILS) == [("silent_failure", "error"), ("hint", "info")]
    assert names(remark, RAISES) == [("torch_error", "error"), ("hint", "info")]
    assert names("Last error:", text)[0][1] == "error"


def test_words_of_an_end_that_failed() -> None:
    """What service threads print is the reason of an exception that quotes it or comes after a failed call; else it is noise."""
    ends = "ant:1:2 [0] misc/x.cc:9 NCCL WARN [Service thread] Could not accept a connection"
    assert names(ends, FAILS) == [("teardown_noise", "info")]
    assert names(RAISES, ends, FAILS)[-1] == ("teardown_noise", "info")
    assert names(ends, FAILS, RAISES) == [("system_error", "error")]


def test_service_thread_in_an_init() -> None:
    """A service thread that could not connect is no noise of an end; it follows from another warning, if there is one."""
    connects = "ant:1:2 [0] proxy.cc:9 NCCL WARN [Service thread] Error encountered progressing operation=Connect, res=3, closing connection"
    assert names(connects, FAILS) == [("system_error", "error")]
    assert names(WARNS, FAILS, connects) == [("nccl_failed", "error")]
    assert names(connects.replace("=Connect", "=Stop")) == [("teardown_noise", "info")]


def test_host_of_the_peer() -> None:
    """The host of the peer, which is in the middle of a long text of the plug-in for EFA, is named."""
    text = "NET/OFI Request 0x7f completed with error. RC: 5. Error: Invalid address My host id: i-0d Peer host id: i-0ce6d3. Completed"
    (one,) = found(f"ant:1:2 [0] ofi_process_cq:1033 NCCL WARN {text}", FAILS)
    assert "; the peer is on i-0ce6d3; on ant pid 1" in one.says


def test_change_of_a_port() -> None:
    """A change of a port is no reason of an exception or of a failed call, but these are failures."""
    text = "NET/IB : mlx5_2:1 Got non-fatal async event: port active(9)"
    event = f"ant:1:3 [0] transport/net_ib.cc:9 NCCL WARN {text}"
    assert names(RAISES, "Last error:", text) == [("torch_error", "error"), ("port_changed", "info")]
    assert names(event, FAILS.replace("1:2", "1:3")) == [("silent_failure", "error"), ("port_changed", "info")]
    assert names(event) == [("port_changed", "info")]


def test_no_remedy_of_a_hint() -> None:
    """Where a call failed, the remedy is not that nothing needs to be done."""
    retry = "ant:1:2 [0] net_fastsocket.cc:785 NCCL WARN Maximum retry reached for accept 3."
    (one,) = found(retry, FAILS)
    assert (one.severity, "Nothing" in one.do, "NCCL_SOCKET_IFNAME" in one.do) == ("error", False, True)
    (one,) = found(retry)
    assert (one.severity, one.do) == ("info", "Nothing needs to be done.")


def test_remedy_of_a_mismatch() -> None:
    """A check of PyTorch that was on is not advised, and for different models the remedy is another one."""
    calls = "Detected mismatch between collectives on ranks. Rank {0} is running collective: CollectiveFingerPrint(OpType={1})"
    (one,) = found(f"RuntimeError: {calls.format(0, 'GATHER')}, but Rank 1 is running collective: ALLREDUCE")
    assert "DETAIL" not in one.do
    (one,) = found("[rank1]:   [0, 2] finished collective #9, but didn't join collective #10 (count from 1)")
    assert "DETAIL" in one.do
    (one,) = found(
        "RuntimeError: DDP expects same model across all ranks, but Rank 0 has 8 params, while rank 1 has inconsistent 6 params."
    )
    assert "same model" in one.do


@pytest.mark.parametrize(
    ("error", "names_", "without"),
    [
        ("invalid usage", "two ranks on one GPU", "shm"),
        ("unhandled system error", "/dev/shm", "two ranks"),
        ("unhandled cuda error", "Xid", "two ranks"),
        ("remote process exited or there was a network error", "ended first", "two ranks"),
        ("unknown thing", "NCCL_DEBUG=WARN", "often"),
    ],
)
def test_remedy_of_an_exception(error: str, names_: str, without: str) -> None:
    """An exception without NCCL's warning has the advice for its error only."""
    (one,) = found(f"RuntimeError: NCCL error in: ../x.cpp:784, {error}, NCCL version 2.17.8")
    assert names_ in one.do
    assert without not in one.do


XID = "[  +0.000007] NVRM: Xid (PCI:0000:03:00): {0}, pid='<unknown>', name=<unknown>, GPU has fallen off the bus."
LAUNCH = "RuntimeError: CUDA error: unspecified launch failure"
LATE = (
    "[E ProcessGroupNCCL.cpp:475] [Rank 1] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=9031, OpType=ALLREDUCE, "
    "NumelIn=1, NumelOut=1, Timeout(ms)=1800000) ran for 1800817 milliseconds before timing out."
)


@pytest.mark.parametrize("number", [48, 74, 79, 94, 95, 119])
def test_after_a_fault_of_a_gpu(number: int) -> None:
    """A kernel that fails, and a collective that times out later, follow from a fault of a GPU's hardware."""
    fault = XID.format(number)
    follow = [("process_failed", "info"), ("watchdog_timeout", "info")]
    assert sorted(names(fault, LAUNCH, LATE)) == sorted([("gpu_fault", "error"), *follow])
    cuda = "ant:1:2 [0] enqueue.cc:9 NCCL WARN Cuda failure 719 'unspecified launch failure'"
    assert names(fault, cuda) == [("gpu_fault", "error"), ("cuda_error", "info")]
    assert names(LAUNCH, fault) == [("gpu_fault", "error"), ("process_failed", "info")]


def test_not_after_a_fault_of_a_gpu() -> None:
    """A program's own faults follow from no hardware, nor does a time-out that came first; and without a cause nothing is information."""
    assert dict(names(XID.format(31), LAUNCH))["process_failed"] == "error"
    access = "RuntimeError: CUDA error: an illegal memory access was encountered"
    assert dict(names(XID.format(79), access))["process_failed"] == "error"
    assert dict(names(LATE, XID.format(79)))["watchdog_timeout"] == "error"
    assert dict(names(XID.format(63), LAUNCH))["process_failed"] == "error"
    dated = "2026-05-02T07:10:{0} n1 {1}"
    late = (dated.format("11", f"[rank0]: {LAUNCH}"), dated.format("12", "kernel: " + XID.format(79)))
    assert dict(names(*late))["process_failed"] == "error"
    assert dict(names(late[1].replace(":12", ":10"), late[0]))["process_failed"] == "info"


@pytest.mark.parametrize(
    ("error", "names_", "without"),
    [
        ("CUDA error: no kernel image is available for execution on the device", "get_arch_list", "VISIBLE_DEVICES"),
        ("HIP error: invalid device function", "gfx", "VISIBLE_DEVICES"),
        ("CUDA error: invalid device ordinal", "VISIBLE_DEVICES", "get_arch_list"),
        ("CUDA error: unknown error", "nvidia-smi", "get_arch_list"),
    ],
)
def test_remedy_of_cuda(error: str, names_: str, without: str) -> None:
    """A build without kernels for the GPU, and a number of a GPU that is not there, have a remedy each."""
    (one,) = found(f"RuntimeError: {error}")
    assert names_ in one.do
    assert without not in one.do


def test_remedy_of_the_version() -> None:
    """A setting that this version of NCCL does not have is not advised; where the version is not known, it is."""
    warns = "ant:1:2 [0] transport/p2p.cc:9 NCCL WARN failed to open CUDA IPC handle : 30 unknown error"
    for version, has in (("2.7.8+cuda11.1", False), ("2.17.1+cuda12.1", False), ("2.18.3+cuda12.1", True)):
        *_, one = found(f"ant:1:2 [0] NCCL INFO NCCL version {version}", warns, FAILS)
        assert ("NCCL_CUMEM_ENABLE" in one.do, "NCCL_P2P_DISABLE=1" in one.do) == (has, True)
    (one,) = found(warns, FAILS)
    assert "NCCL_CUMEM_ENABLE" in one.do
    assert fit("shm", "", "NCCL_CUMEM_ENABLE=0 is all.", ["2.7.8"]) == "NCCL_CUMEM_ENABLE=0 is all."
    assert fit("shm", "", "Try NCCL_CUMEM_ENABLE=0.", ["odd", "2.7.8"]) == "Try NCCL_CUMEM_ENABLE=0."


@pytest.mark.parametrize(
    ("line", "setting"),
    [
        ("ant:1:2 [0] misc/socket.cc:5 NCCL WARN Connect to {0}<41> failed : Connection refused", "NCCL_SOCKET_IFNAME"),
        ("[c10d] The client socket has timed out after 1800s while trying to connect to ({0}, 44737).", "MASTER_ADDR"),
    ],
)
def test_bridge_of_docker(line: str, setting: str) -> None:
    """An address of docker's bridge is named as such, and no other is."""
    (one,) = found(line.format("172.17.0.2"))
    assert re.match(rf"172\.17\.0\.2 is an address of docker's bridge, .*{setting}", one.do)
    for other in ("10.0.0.92", "172.16.0.2", "10.172.17.2", "192.172.17.0"):
        (one,) = found(line.format(other))
        assert "docker" not in one.do


def test_subsystem_by_the_failed_calls() -> None:
    """Where the file that warned shows no subsystem, the files whose calls failed do."""
    cuda = "ant:1:2 [0] misc/cudawrap.cc:9 NCCL WARN Cuda failure 1 'invalid argument'"
    (one,) = found(cuda, "ant:1:2 [0] NCCL INFO transport/nvls.cc:19 -> 1", "ant:1:2 [0] NCCL INFO init.cc:1 -> 1")
    assert "NCCL_NVLS_ENABLE=0" in one.do
    (one,) = found(cuda, "ant:1:2 [0] NCCL INFO init.cc:1 -> 1")
    assert "NCCL_NVLS_ENABLE=0" not in one.do


def test_warning_and_its_quotation() -> None:
    """A warning that an exception quotes is one finding, with the remedy of the file that warned, whichever comes first."""
    warns = "ant:1:2 [0] transport/nvls.cc:9 NCCL WARN Cuda failure 401 'the operation cannot be performed'"
    raises = ["[rank0]: Last error:", "[rank0]: Cuda failure 401 'the operation cannot be performed'"]
    for lines in ([warns, *raises], [*raises, warns]):
        (one,) = found(*lines)
        assert (one.name, one.severity, "NCCL_NVLS_ENABLE=0" in one.do) == ("cuda_error", "error", True)


def test_settings_that_the_remedy_names() -> None:
    """A setting that the remedy names is shown with its value in this log."""
    setting = "ant:1:2 [0] NCCL INFO NCCL_SOCKET_IFNAME set by environment to ens7"
    (one,) = found(
        setting,
        "ant:1:2 [0] bootstrap.cc:98 NCCL WARN Bootstrap : no socket interface found",
        "ant:1:2 [0] NCCL INFO init.cc:5 -> 3",
    )
    assert one.says.endswith("; the log has NCCL_SOCKET_IFNAME=ens7")


def test_consequences() -> None:
    """What follows from a cause in the log is information after it, and an error where the log has no cause."""
    lost = (
        "ant:1:2 [0] misc/socket.cc:5 NCCL WARN Net : Call to recv from 10.0.0.7<44> failed : Connection reset by peer"
    )
    fails = "ant:1:2 [0] NCCL INFO misc/socket.cc:19 -> 6"
    assert names(lost, fails) == [("peer_lost", "error")]
    cause = [line.replace("ant:1:", "bee:9:") for line in (WARNS, FAILS)]
    assert names(lost, fails, *cause) == [("nccl_failed", "error"), ("peer_lost", "info")]


def test_symptoms() -> None:
    """A time-out is noticed of a cause, which comes first although its line came later."""
    late = (
        "[rank0]:[E507 11:22:33.445566 ProcessGroupNCCL.cpp:600] [Rank 0] Watchdog caught collective operation timeout: "
        "WorkNCCL(SeqNum=31, OpType=ALLREDUCE, NumelIn=64, NumelOut=64, Timeout(ms)=90000) ran for 90050 milliseconds before timing out."
    )
    assert [name for name, _ in names(late, WARNS, FAILS)] == ["nccl_failed", "watchdog_timeout"]


def test_first_in_time() -> None:
    """Causes come in the order of their times, across files; in one file without times, in the order of its lines."""
    one = "[2026-05-02 07:10:{0}] ant:1:2 [0] misc/x.cc:9 NCCL WARN Cuda failure 700 'an illegal memory access was encountered'"
    two = "[2026-05-02 07:10:{0}] bee:1:2 [0] misc/x.cc:9 NCCL WARN Call to ibv_modify_qp failed with error No data available"
    for first, second, order in (
        ("11", "12", ["cuda_error", "system_error"]),
        ("12", "11", ["system_error", "cuda_error"]),
    ):
        lines = [one.format(first), two.format(second)]
        for files in (("a", "b"), ("b", "a")):
            assert [name for name, _ in names(*lines, files=files)] == order
    bare = [line.partition("] ")[2] for line in (one, two)]
    assert [name for name, _ in names(*reversed(bare))] == ["system_error", "cuda_error"]
    assert names(*bare, files=("a", "b")) == names(*reversed(bare), files=("a", "b"))


@pytest.mark.parametrize(
    "line",
    [
        "[2026-11-03 18:22:05] ant:1:2 [0] NCCL",
        "2026-11-03T18:22:05.000Z stderr F ant:1:2",
        "[rank4]:[E1103 18:22:05.0 ProcessGroupNCCL.cpp:1914]",
        "2026/11/03 18:22:05 ERROR x",
    ],
)
def test_time(line: str) -> None:
    """A date with a time in front of a message is read in each form; a clock alone is no time, because days are not known."""
    assert time_of(line) == time_of("[2026-11-03 18:22:05] x")
    assert time_of("18:22:05 x") is None


def test_times_of_some() -> None:
    """Where a finding has no time, times order none; between files nothing else does."""
    dated, bare = Seen("a", 9, "[2026-11-03 18:22:05] x"), Seen("b", 3, "x")
    assert in_time([[dated], [bare]]) == [0.0, 0.0]
    assert in_time([[dated], [Seen("a", 3, "x")]]) == [9.0, 3.0]
    assert in_time([[], [bare]]) == [0.0, 3.0]


@pytest.mark.parametrize(
    ("lines", "quoted"),
    [
        (["Last error:", "no way"], [("", "no way")]),
        (["[rank5]: Last error:", "[rank1]: Last error:", "[rank1]: one", "[rank5]: five"], [("rank1", "one"), ("rank5", "five")]),
        (["ERROR 05-02 12:00:00 [core.py:12] Last error:", "ERROR 05-02 12:00:01 [core.py:12] no way"], [("", "no way")]),
        (["RuntimeError('NCCL error in: x.cpp:1\\nLast error:\\nno way\\n')"], [("", "no way")]),
        (["[rank5]: Last error:", "[rank5]: Exception raised from check at x.cpp:1"], []),
        (["[rank5]: Last error:", "[rank5]:"], []),
        (["Last error:"], []),
    ],
)  # fmt: skip
def test_last_error(lines: list[str], quoted: list[tuple[str, str]]) -> None:
    """NCCL's own text follows its announcement in the same line, or in the next of the same origin; PyTorch's text is none."""
    errors = LastErrors()
    assert [each for line in lines if (each := errors.read(line)) is not None] == quoted


def test_announcements_are_bounded() -> None:
    """Announcements without a text are forgotten, and there are never many."""
    errors = LastErrors()
    for number in range(1_000):
        errors.read("x" * number + "Last error:")
    assert len(errors._waiting) <= 64
    for _ in range(60):
        errors.read("(other)")
    assert not errors
