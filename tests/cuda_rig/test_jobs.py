"""The real PyTorch and NCCL on the played driver, under commwatch without any setting: what is recorded is what was played."""

from __future__ import annotations

from collections import Counter
from statistics import mean
from typing import Any

import pytest

from commwatch.wire import events as ev
from tests.agent.sources.kernel_sweep import Kernel, sweep
from tests.cuda_rig.played_jobs import Run, timed, wrong
from tests.e2e.torchjob import digest

pytestmark = [pytest.mark.cuda_rig, pytest.mark.timeout(600)]

#: Scenes in which nothing is captured.
PLAIN = (
    *("collectives", "messages", "coalesced", "groups", "sharded", "replicated", "many"),
    *("experts", "tensors", "pipelined", "zero1", "zero2", "zero3"),
)


@pytest.mark.parametrize("hook", ["native", "python"])
def test_coalesced(run: Run, hook: str) -> None:
    """Operations that NCCL runs as one are recorded with the bytes of all; the Flight Recorder has no sizes of them."""
    played = run("coalesced", hook)
    for rank, report in zip(played.ranks, played.reports, strict=True):
        assert rank.lost == 0
        assert [(rank.op(record), record.size_bytes) for record in rank.operations] == [("all_reduce", 4 << 18)] * 12
        assert sum(size * count for (_, size), count in ran(report).items()) == 12 * (4 << 18)


def sized(op: str, size_bytes: int | None) -> tuple[str, int | None]:
    """An operation with its size where both have one: NCCL's barrier is an all_reduce, and of a scatter most ranks have one part."""
    return op, None if op in ("barrier", "scatter") else size_bytes


@pytest.mark.real_gpu
@pytest.mark.parametrize("hook", ["native", "python"])
@pytest.mark.parametrize("scene", [scene for scene in PLAIN if scene != "coalesced"])
def test_every_operation(run: Run, scene: str, hook: str) -> None:
    """Every operation is recorded, with the size that PyTorch's Flight Recorder has, and none is lost or failed."""
    played = run(scene, hook)
    for rank, dump in zip(played.ranks, played.recorder, strict=True):
        assert (rank.lost, dump.cut, dump.unknown) == (0, False, 0)
        expected = Counter(sized(entry.op, entry.size_bytes) for entry in dump.entries if entry.op != "coalesced")
        assert Counter(sized(rank.op(record), record.size_bytes) for record in rank.operations) == expected
        assert not any(record.flags & ev.FAILED for record in rank.operations)


@pytest.mark.real_gpu
@pytest.mark.parametrize("hook", ["native", "python"])
def test_first_messages(run: Run, hook: str) -> None:
    """The first send, the first recv and the first batch make communicators or connections, which is no part of a duration: they have none."""
    for rank in run("messages", hook).ranks:
        untimed = [(rank.op(record), record.seq) for record in rank.operations if record.flags & ev.UNTIMED]
        assert sorted(untimed) == [("recv", 0), ("recv", 1), ("send", 0), ("send", 1)]


@pytest.mark.parametrize("scene", [scene for scene in PLAIN if scene != "pipelined"])
def test_durations(run: Run, scene: str) -> None:
    """A duration is what the driver played, within 2% or 20 µs.

    Not those of a pipeline, whose streams are idle at each launch: PyTorch's start event is then over before the kernel is queued.
    """
    found = timed(run(scene))
    assert found
    assert wrong(found) == []


@pytest.mark.parametrize("hook", ["native", "python"])
@pytest.mark.parametrize("backend", ["nccl2", "nccl-lazy"])
def test_other_backends(run: Run, backend: str, hook: str) -> None:
    """Other backends on NCCL: every operation is recorded, blocking collectives have durations, and others where the backend can have them."""
    for scene in ("collectives", "messages"):
        played, usual = run(scene, hook, BACKEND=backend), run(scene)
        for rank, same in zip(played.ranks, usual.ranks, strict=True):
            assert rank.lost == 0
            expected = Counter((same.op(record), record.size_bytes) for record in same.operations)
            assert Counter((rank.op(record), record.size_bytes) for record in rank.operations) == expected
            by_events = [record for record in rank.operations if record.timing == ev.BY_EVENTS]
            polled = [record for record in rank.operations if record.timing == ev.BY_POLL]
            if backend == "nccl2":
                # The first collective has none, or the first messages: alone, and in a batch.
                assert (len(polled), len(by_events) >= len(rank.operations) - 4) == (0, True)
            else:
                assert all(record.flags & ev.ASYNC or rank.op(record) in ("send", "recv") for record in polled)
                assert not any(record.flags & ev.ASYNC for record in by_events)
    found = timed(run("collectives", hook, BACKEND=backend), polled=False)
    assert len(found) > 60
    assert wrong(found) == []


@pytest.mark.parametrize("hook", ["native", "python"])
def test_several_devices(run: Run, hook: str) -> None:
    """A process with two devices in one group: every operation is recorded, and all but the first on each device have their duration.

    Only the older backend allows that.
    """
    played = run("devices", hook, BACKEND="nccl-legacy")
    for rank in played.ranks:
        assert (rank.lost, len(rank.of("all_reduce"))) == (0, 24)
        assert sum(bool(record.flags & ev.UNTIMED) for record in rank.operations) == 2
    found = timed(played)
    assert len(found) > 20
    assert wrong(found) == []


def test_shares(run: Run) -> None:
    """The communication share of marked steps is what was played, within a point, beside the computation and after it."""
    played = run("steps", PLAYED_NCCL_US="10000")
    steps = digest(played.directory)[0].steps(0, 1 << 62, None, None, 1000)
    for rank, report in zip(played.ranks, played.reports, strict=True):
        marks = [record.launch_ns for record in rank.marks]
        for first in (1, 21, 41):
            true, measured = [], []
            for begin, end in zip(marks[first : first + 18], marks[first + 1 : first + 19], strict=True):
                inside = [k["end"] - k["begin"] for k in report["nccl"] if begin <= k["begin"] < end]
                true.append(sum(inside) / (end - begin))
            for step in steps:
                if step.rank == rank.rank and first < step.seq <= first + 18 and step.comm_share is not None:
                    measured.append(step.comm_share)
            assert len(measured) == 18
            assert mean(measured) == pytest.approx(mean(true), abs=0.01)


@pytest.mark.parametrize(
    "scene",
    [
        "steps",
        *(pytest.param(f"slow_{kind}", marks=pytest.mark.real_gpu) for kind in ("replicated", "sharded", "tensors")),
    ],
)
def test_exposed_shares(run: Run, scene: str) -> None:
    """The exposed share is the share of the time in which NCCL's kernels ran and nothing was computed, within 3 points."""
    played = run(scene, PLAYED_NCCL_US="10000" if scene == "steps" else "3000")
    steps = digest(played.directory)[0].steps(0, 1 << 62, None, None, 1000)
    for rank, report in zip(played.ranks, played.reports, strict=True):
        nccl = [Kernel(kernel["begin"], kernel["end"], communicates=True) for kernel in report["nccl"]]
        ran = [*nccl, *(Kernel(begin, end, communicates=False) for begin, end in report["computed"])]
        marks = [record.launch_ns for record in rank.marks]
        assert all(record.timing == ev.BY_EVENTS for record in rank.marks if record.flags & ev.EXPOSED)
        for first in (1, 21, 41) if scene == "steps" else (1,):
            begin, end = marks[first], marks[first + 18]
            measured = [step for step in steps if step.rank == rank.rank and first < step.seq <= first + 18]
            assert len(measured) == 18
            exposed_s = sum(step.exposed_s for step in measured if step.exposed_s is not None)
            true = sweep(ran, begin, end)[1] / (end - begin)
            assert exposed_s / sum(step.duration_s for step in measured) == pytest.approx(true, abs=0.03)


@pytest.mark.parametrize("hook", ["native", "python"])
def test_captures(run: Run, hook: str) -> None:
    """Captures that begin with an operation in flight are not disturbed."""
    played = run("captured", hook)
    for rank, report in zip(played.ranks, played.reports, strict=True):
        assert (report["captures"], report["captures_ended"], report["captures_disturbed"]) == (2, 2, 0)
        assert (report["disturbed"], report["missing"]) == ({}, {})
        assert Counter(("all_reduce", record.size_bytes) for record in rank.operations) == ran(report)


#: Names of operations in the driver's report.
NCCL_NAMES = {"AllReduce": "all_reduce", "AllGather": "all_gather"}


def ran(report: dict[str, Any]) -> Counter[tuple[str, int]]:
    """Operation and size of each kernel of NCCL's that ran, replayed ones included. The driver counts what one rank sends."""
    operations = [operation.split(":") for kernel in report["nccl"] for operation in kernel["ops"].split()]
    return Counter((NCCL_NAMES[name], int(size) * (2 if name == "AllGather" else 1)) for name, size in operations)


@pytest.mark.parametrize("hook", ["native", "python"])
def test_replays(run: Run, hook: str) -> None:
    """Each replay of a graph counts its operations, with their sizes, and the capture counts none: as many as kernels ran."""
    played = run("replayed", hook)
    for rank, report in zip(played.ranks, played.reports, strict=True):
        assert report["captures_disturbed"] == 0
        recorded = Counter((rank.op(record), record.size_bytes) for record in rank.operations)
        assert recorded == ran(report)
        assert recorded.total() == 3 * (100 + 2)
        assert sorted(record.seq for record in rank.operations) == list(range(recorded.total()))
        assert sum(not record.flags & ev.UNTIMED for record in rank.operations) == 5  # the first has no duration


def of_ours(report: dict[str, Any]) -> Counter[str]:
    """Calls of the driver by our threads."""
    return Counter(
        {
            name: sum(count for thread, count in function["threads"].items() if thread.startswith("commwatch"))
            for name, function in report["functions"].items()
        }
    )


@pytest.mark.parametrize("scene", ["collectives", "sharded", "many"])
def test_what_we_ask_of_the_driver(run: Run, scene: str) -> None:
    """Our threads never synchronize; there are at most two more events for an operation than without us, three for a blocking one, two for a wait.

    A wait is one of a stream for another, as the driver counts them in the job without us. An asynchronous operation's own stream waits once, for
    its inputs; all other waits may be those of the compute stream for communication.
    """
    played, without = run(scene), run(scene, COMMWATCH="0")
    for rank, ours, theirs in zip(played.ranks, played.reports, without.reports, strict=True):
        assert [name for name, calls in of_ours(ours).items() if calls and "Synchronize" in name] == []
        blocking = sum(not record.flags & ev.ASYNC for record in rank.operations)
        inputs = len(rank.operations) - blocking
        waits = sum(theirs["functions"]["cuStreamWaitEvent"]["threads"].values()) - inputs
        more = sum(ours[kind] - theirs[kind] for kind in ("events_plain", "events_timed"))
        assert more <= 2 * len(rank.operations) + blocking + 2 * waits
        assert sum(of_ours(ours).values()) < 100 * len(rank.operations)


def test_what_we_ask_about_an_operation(run: Run) -> None:
    """Of a blocking operation that is over when we look, we ask once whether it is over, and for two times: each question may delay a launch."""
    played = run("queued", PLAYED_NCCL_US="20")
    for rank, report in zip(played.ranks, played.reports, strict=True):
        asked = sum(
            count for name, count in of_ours(report).items() if name.startswith(("cuEventQuery", "cuEventElapsed"))
        )
        assert len(rank.operations) == 1001
        # Some are asked about before they are over.
        assert asked < 5 * len(rank.operations)


def test_events_of_asynchronous_operations(run: Run) -> None:
    """We record no event for an asynchronous operation, once PyTorch's own events have been seen to tell its begin and end.

    PyTorch records its begin for us, and we record events before and after the wait for it.
    """
    played, without = run("alone"), run("alone", COMMWATCH="0")
    for rank, ours, theirs in zip(played.ranks, played.reports, without.reports, strict=True):
        recorded = [sum(report["functions"]["cuEventRecordWithFlags"]["threads"].values()) for report in (ours, theirs)]
        assert len(rank.operations) == 30
        assert recorded[0] - recorded[1] - 3 * len(rank.operations) < 15


def test_destroyed_with_operations_in_flight(run: Run) -> None:
    """A group that is destroyed while operations are in flight: the job ends as without us, and its heartbeat goes on."""
    for rank in run("destroyed").ranks:
        assert len(rank.of("all_reduce")) == 51
