"""The line forms of errors, and of PyTorch's side of them: each as the versions print it, whole and torn."""

from __future__ import annotations

import pytest

from commwatch_collectors.nccl import facts as f
from commwatch_collectors.nccl.quiet import is_quiet
from commwatch_collectors.nccl.search import read

#: Versions that print it, text, facts.
Case = tuple[str, str, tuple[f.Fact, ...]]

DOG = "Watchdog caught collective operation timeout: WorkNCCL"
NEW_WORK = "(SeqNum=41, OpType=ALLGATHER, NumelIn=64, NumelOut=256, Timeout(ms)=90000)"
CAUGHT = f.Watchdog(3, 41, "ALLGATHER", 64, 256, 90000, 90012)
SCOPED = f.Where(None, "0", "0")

ERRORS: list[Case] = [
    ("..2.30.4", "misc/socket.cc:484 -> 2", (f.Trail("misc/socket.cc:484", 2),)),
    ("strerror", "misc/ibvwrap.cu:63 -> 2 (No such device)", (f.Trail("misc/ibvwrap.cu:63", 2),)),
    ("..2.18.6", "proxy.cc:1119 -> 3 [Proxy Thread]", (f.Trail("proxy.cc:1119", 3),)),
    ("2.19.1..", "group.cc:64 -> 6 [Async thread]", (f.Trail("group.cc:64", 6),)),
    ("2.30.7", "transport/net.cc:77 (sendProxyProgress) -> 6 [Progress Thread]", (f.Trail("transport/net.cc:77", 6),)),
    ("torn", "transport/net.cc:77 -> ", ()),
    ("2.4.2..2.23.4", "Call to connect returned Connection refused, retrying", (f.Retry("Connection refused"),)),
    (
        "2.24.3..",
        "socketPollConnect: connect to 10.0.0.7<4411> returned Connection timed out, retrying (3/34) after sleep for 300 msec",
        (f.Retry("Connection timed out"),),
    ),
    (
        "2.24.3..",
        "socketStartConnect: connect returned Connection refused, retrying (1/34) after sleep for 100 msec",
        (f.Retry("Connection refused"),),
    ),
    ("2.3.5..", "enqueue.cc:88 Cuda failure 'invalid argument'", (f.CudaFailure("invalid argument"),)),
    (
        "2.19.1..",
        "transport/nvls.cc:9 Cuda failure 801 'operation not supported'",
        (f.CudaFailure("operation not supported"),),
    ),
    ("2.30.7", "init.cc:9 (initTransportsRank) Cuda failure 'out of memory'", (f.CudaFailure("out of memory"),)),
    ("RCCL", "HIP failure: 'out of memory'", (f.CudaFailure("out of memory"),)),
    ("torn", "enqueue.cc:88 Cuda failure 'invalid arg", ()),
    (
        "2.24.3..",
        "RAS declaring peer 10.0.0.7<4411> as DEAD; reason: no answer",
        (f.RasDead("declaring peer 10.0.0.7<4411> as DEAD; reason: no answer"),),
    ),
    (
        "2.24.3..",
        "RAS keep-alive timeout warning (5s) on socket connection with 10.0.0.7<4411>",
        (f.RasDead("keep-alive timeout warning (5s) on socket connection with 10.0.0.7<4411>"),),
    ),
    ("2.24.3..", "RAS socket connection with 10.0.0.7<4411> closed by peer on receive; terminating it", ()),
    ("2.30.3..", "[Service thread] Accept failed Success", ()),
]

TORCH: list[Case] = [
    (
        "2.3",
        f"[rank3]:[E ProcessGroupNCCL.cpp:563] [Rank 3] {DOG}{NEW_WORK} ran for 90012 milliseconds before timing out.",
        (CAUGHT._replace(where=f.Where(3)), f.Speaks(3)),
    ),
    (
        "2.4..",
        "[rank3]:[E1003 22:26:03.467 ProcessGroupNCCL.cpp:633] [PG ID 0 PG GUID 0(default_pg) Rank 3] "
        f"{DOG}{NEW_WORK} ran for 90012 milliseconds before timing out.",
        (CAUGHT._replace(where=f.Where(3, "0", "0", "default_pg")), f.Speaks(3)),
    ),
    (
        "2.4..",
        "[rank3]:[E1003 22:26:03.467 ProcessGroupNCCL.cpp:633] [rank5]:[PG ID 1 PG GUID 4(dp) Rank 3] [PG ID 2 PG GUID 5(tp) Rank 3] "
        f"{DOG}{NEW_WORK} ran for 90012 milliseconds before timing out.",
        (CAUGHT, f.Speaks(3), f.Speaks(5)),
    ),
    (
        "2.6..",
        f"[rank9]:[PG ID 2 PG GUID dp:split:1f(dp) Rank 3] {DOG}{NEW_WORK} ran for 90012 milliseconds before timing out.",
        (CAUGHT._replace(where=f.Where(9, "2", "dp:split:1f", "dp")), f.Speaks(9)),
    ),
    (
        "exception",
        "[rank3]: ValueError: no such layer",
        (
            f.Speaks(3),
            f.Raised(3, "ValueError: no such layer"),
        ),
    ),
    (
        "exception",
        "[rank0]: KeyboardInterrupt",
        (
            f.Speaks(0),
            f.Raised(0, "KeyboardInterrupt"),
        ),
    ),
    (
        "exception",
        "[rank3]: torch.distributed.DistBackendError: gone",
        (
            f.Speaks(3),
            f.Raised(3, "torch.distributed.DistBackendError: gone"),
        ),
    ),
    (
        "quoted",
        f"  what():  [PG 0 Rank 3] {DOG}{NEW_WORK} ran for 90012 milliseconds before timing out.",
        (CAUGHT._replace(where=f.Where(None, "0")),),
    ),
    (
        "1.13..2.0",
        f"[Rank 3] {DOG}(SeqNum=41, OpType=ALLREDUCE, TensorShape=[4, 8], Timeout(ms)=90000) ran for 90012 milliseconds",
        (f.Watchdog(3, 41, "ALLREDUCE", None, None, 90000, 90012),),
    ),
    (
        "older",
        f"[Rank 3] {DOG}(OpType=BROADCAST, Timeout(ms)=90000) ran for 90012 milliseconds before timing out.",
        (f.Watchdog(3, None, "BROADCAST", None, None, 90000, 90012),),
    ),
    ("torn", f"[Rank 3] {DOG}(SeqNum=41, OpType=ALLGATHER, Num", ()),
    ("torn rank", f"nk 3] {DOG}{NEW_WORK} ran for 90012 milliseconds", ()),
    (
        "2.3",
        "[Rank 3] Timeout at NCCL work: 41, last enqueued NCCL work: 44, last completed NCCL work: 40.",
        (f.Progress(3, 44, 40, why="time-out", work=41),),
    ),
    (
        "2.5..",
        "[PG ID 0 PG GUID 0 Rank 3]  failure detected by watchdog at work sequence id: 41 PG status: "
        "last enqueued work: 44, last completed work: 40",
        (f.Progress(3, 44, 40, SCOPED, "failure", 41),),
    ),
    (
        "2.4..",
        "[PG 0 Rank 3] Received a dump signal due to a collective timeout from  rank 2 and we will try our best to dump the "
        "debug info. Last enqueued NCCL work: -1, last completed NCCL work: -1.",
        (f.Progress(3, -1, -1, f.Where(None, "0"), "dump", source=2),),
    ),
    (
        "2.4..",
        "[PG 0 Rank 3] Observed flight recorder dump signal from another rank via TCPStore.",
        (f.Relayed(3, f.Where(None, "0")),),
    ),
    (
        "debug detail",
        "ranks [1, 3] are the lagging ranks that caused it",
        (f.Desync("ranks [1, 3] are the lagging ranks that caused it"),),
    ),
    (
        "exception",
        "[rank6]: torch.distributed.DistBackendError: NCCL error in: a.cpp:7, invalid usage (run with ..), NCCL version 2.25.1",
        (
            f.Version("NCCL", "2.25.1", own=False),
            f.TorchError("invalid usage"),
            f.Speaks(6),
            f.Raised(
                6,
                "torch.distributed.DistBackendError: NCCL error in: a.cpp:7, invalid usage (run with ..), NCCL version 2.25.1",
            ),
        ),
    ),
    ("debug detail", "[0, 2] finished collective #40", (f.Desync("[0, 2] finished collective #40"),)),
    (
        "debug detail",
        "Detected mismatch between collectives on ranks. Rank 1 is running another",
        (f.Desync("Detected mismatch between collectives on ranks. Rank 1 is running another"),),
    ),
]

CASES = ERRORS + TORCH


@pytest.mark.parametrize(("versions", "text", "facts"), CASES, ids=[f"{case[0]}: {case[1][:60]}" for case in CASES])
def test_forms(versions: str, text: str, facts: tuple[f.Fact, ...]) -> None:
    """A text gives exactly the facts that its form holds; a torn one only what is whole in it."""
    assert read(text) == facts, versions


@pytest.mark.parametrize(
    "text", [text for versions, text, facts in ERRORS if not facts and versions[0] == "2"], ids=lambda text: text[:60]
)
def test_known_and_quiet(text: str) -> None:
    """A message that is known to say nothing we keep is not counted as unknown."""
    assert is_quiet(text)
