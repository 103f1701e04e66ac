"""Timing on a GPU, in both hooks, against a simulated GPU in real time that knows how long everything takes."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from commwatch.wire import events as ev
from tests.e2e.torchjob import RankRecords, alone, built_for_torch, read_rings, results, said
from tests.helpers import BOTH_HOOKS

pytestmark = BOTH_HOOKS
#: As in ``jobs/gpu_timing.py``.
COMPUTE_NS, OP_NS = 600_000_000, 200_000_000


@pytest.fixture(scope="session")
def gpu() -> Path:
    """The GPU of ``jobs/fake_gpu.cpp``, built."""
    return built_for_torch("fake_gpu.cpp")


def play(directory: Path, gpu: Path, scene: str, **env: str) -> tuple[dict[str, Any], RankRecords]:
    """Run a scene; returns what the GPU saw of us, and the records."""
    (seen,) = said(alone(directory, "gpu_timing.py", gpu, scene, **{"COMMWATCH": "0", **env}))
    rank = after_first(directory)
    assert {r.flags & ev.ON_DEVICE for r in rank.operations} == {ev.ON_DEVICE}
    # Never is a capture disturbed, a thread on no device, or a Work kept past its end.
    assert (seen["disturbed"], seen["at_home"], seen["works"]) == (0, 0, 0)
    return seen, rank


def after_first(directory: Path) -> RankRecords:
    """The only ring, without the first operation."""
    (rank,) = read_rings(directory)
    return replace(rank, records=[record for record in rank.records if record.size_bytes != 4])


def took(record: ev.Record) -> int:
    """Its duration."""
    return record.end_ns - record.start_ns


def test_gpus_own_clock(hook: str, gpu: Path, tmp_path: Path) -> None:
    """Without any setting, durations are the GPU's own, to 0.1%: without the wait for its inputs, or for what is queued before it."""
    seen, rank = play(tmp_path, gpu, "ops")
    assert rank.identity["timing"]["mode"] == "events"
    assert seen["timed_groups"] == 1
    first, second, blocking = rank.operations
    for record in (first, second, blocking):
        assert ev.TIMING[record.timing] == "events"
        assert took(record) == pytest.approx(OP_NS, rel=1e-3)
    assert first.start_ns - first.launch_ns >= COMPUTE_NS / 2  # it was put on the stream a moment before
    assert first.end_ns <= second.end_ns <= blocking.end_ns


def test_no_timing_events_with_one_queue(hook: str, gpu: Path, tmp_path: Path) -> None:
    """With CUDA_DEVICE_MAX_CONNECTIONS=1 no timing event is ever made; ends are polled for, inputs' wait left out."""
    seen, rank = play(tmp_path, gpu, "ops", CUDA_DEVICE_MAX_CONNECTIONS="1")
    assert rank.identity["timing"]["mode"] == "poll"
    assert seen["timed_groups"] == seen["events"][1] == 0
    assert seen["events"][0] > 0
    first, second, blocking = rank.operations
    for record in (first, second, blocking):
        assert ev.TIMING[record.timing] == "poll"
        assert 0 < took(record) < COMPUTE_NS
    assert first.start_ns - first.launch_ns >= COMPUTE_NS / 2  # it was put on the stream a moment before
    assert second.start_ns >= first.end_ns


@pytest.mark.parametrize("mode", ["events", "poll"])
def test_in_flight(hook: str, mode: str, gpu: Path, tmp_path: Path) -> None:
    """Of the operations of one queue the next one is in flight: first it is queued, then the GPU reaches it."""
    told, _ = said(alone(tmp_path, "gpu_timing.py", gpu, "queued", COMMWATCH="0", COMMWATCH_TIMING=mode))
    assert told["seen"][0] == [1, False]
    assert [number for number, reached in told["seen"] if reached] == [1, 2, 3]


def test_shorter_than_a_poll(hook: str, gpu: Path, tmp_path: Path) -> None:
    """Polling records no duration of an operation that it has never seen running: it would be that of the poll."""
    _, rank = play(tmp_path, gpu, "short", COMMWATCH_TIMING="poll")
    (record,) = rank.operations
    assert (ev.TIMING[record.timing], record.flags & ev.UNTIMED) == ("none", ev.UNTIMED)


@pytest.mark.parametrize("mode", ["events", "poll"])
def test_first_of_a_group(hook: str, mode: str, gpu: Path, tmp_path: Path) -> None:
    """The first operation of a group on a GPU has no duration, because it also makes the communicator."""
    _, rank = play(tmp_path, gpu, "first", COMMWATCH_TIMING=mode)
    assert [ev.TIMING[record.timing] for record in rank.operations] == ["none", mode]


def test_work_that_does_not_answer(hook: str, gpu: Path, tmp_path: Path) -> None:
    """An end is recorded when the device has reported it, not when it was asked; the native hook's heartbeat does not wait for the answer."""
    asked = {"COMMWATCH": "0", "COMMWATCH_TIMING": "events"}
    told, _ = said(alone(tmp_path, "gpu_timing.py", gpu, "slow", **asked))
    (record,) = after_first(tmp_path).operations
    assert record.end_ns >= told["over"]
    assert took(record) == pytest.approx(15 * OP_NS, rel=1e-3)
    assert told["beats"] > (2 if hook == "native" else 0)


def test_wrong_clock(hook: str, gpu: Path, tmp_path: Path) -> None:
    """A duration longer than the time since the launch is not recorded; one message, and no operation has a duration any more."""
    done = alone(tmp_path, "gpu_timing.py", gpu, "wrong_clock", COMMWATCH="0", COMMWATCH_TIMING="events")
    assert done.returncode == 0, done.stderr[-4000:]
    (complaint,) = [line for line in done.stderr.splitlines() if line.startswith("commwatch: ")]
    assert "no longer timed" in complaint
    assert re.search(r"its clock measured 2\d{8} µs for an operation of at most \d+ µs", complaint)
    records = after_first(tmp_path).operations
    assert [(record.timing, record.flags & ev.UNTIMED) for record in records] == [(ev.BY_NONE, ev.UNTIMED)] * 2


def test_counted_only(hook: str, gpu: Path, tmp_path: Path) -> None:
    """With COMMWATCH_TIMING=off the device is left alone: no event is made, operations have no duration."""
    seen, rank = play(tmp_path, gpu, "ops", COMMWATCH_TIMING="off")
    assert (rank.identity["timing"]["mode"], seen["timed_groups"], seen["events"]) == ("off", 0, [0, 0])
    assert [(r.flags & ~ev.ASYNC, r.timing) for r in rank.operations] == [(ev.UNTIMED | ev.ON_DEVICE, ev.BY_NONE)] * 3


@pytest.mark.parametrize("mode", ["events", "poll"])
def test_capture(hook: str, mode: str, gpu: Path, tmp_path: Path) -> None:
    """A graph capture is not disturbed while an earlier operation is looked after; what is captured is counted only."""
    _, rank = play(tmp_path, gpu, "capture", COMMWATCH_TIMING=mode)
    before, captured, after = rank.operations
    assert [ev.TIMING[r.timing] for r in (before, captured, after)] == [mode, "none", mode]


def test_host_far_ahead(hook: str, gpu: Path, tmp_path: Path) -> None:
    """At most 256 MiB of outputs are kept for timing: with the native hook of those that the user has dropped, the oldest go first."""
    _, rank = play(tmp_path, gpu, "ahead")
    timed = [bool(r.flags & ev.UNTIMED) is False for r in sorted(rank.operations, key=lambda r: r.seq)]
    if hook == "native":
        assert timed == [True] * 4 + [False] * 20 + [True] * 16
    else:
        assert timed == [True] * 16 + [False] * 24


def test_graph(hook: str, gpu: Path, tmp_path: Path) -> None:
    """Operations of a CUDA graph are counted at each replay, with their sizes, and not at the capture; then numbers go on."""
    _, rank = play(tmp_path, gpu, "graph")
    *replayed, after = rank.operations
    assert [(r.flags & ev.ASYNC, r.timing, r.flags & ev.UNTIMED) for r in replayed] == [(1, 0, 8), (0, 0, 8)] * 3
    assert {r.size_bytes for r in rank.operations} == {1024}
    assert [r.seq for r in rank.operations] == list(range(1, 8))
    assert ev.TIMING[after.timing] == "events"
    assert took(after) == pytest.approx(OP_NS, rel=0.5)


def test_batches(hook: str, gpu: Path, tmp_path: Path) -> None:
    """Operations of a batch end together, when the batch does; what its user broke off has no end; the next are as ever.

    The first batch with a peer makes a communicator, and has no duration.
    """
    _, rank = play(tmp_path, gpu, "batch")
    *both, blocking, broken, last = rank.operations
    assert [rank.op(r) for r in both] == ["send", "recv", "send"] * 2
    assert [bool(record.flags & ev.UNTIMED) for record in both] == [True] * 3 + [False] * 3
    messages = both[3:]
    for record in messages:
        assert took(record) == pytest.approx(3 * OP_NS, rel=1e-3)
        assert record.start_ns - record.launch_ns >= COMPUTE_NS / 2
    assert len({(record.start_ns, record.end_ns) for record in messages}) == 1
    assert [ev.TIMING[r.timing] for r in (blocking, broken, last)] == ["events", "none", "events"]
    # On an idle stream an operation's inputs are ready at its launch, a moment before it begins.
    assert OP_NS <= min(took(blocking), took(last)) <= max(took(blocking), took(last)) < 2 * OP_NS


@pytest.mark.parametrize("scene", ["broken", "broken_at_once"])
def test_device_that_stops_answering(hook: str, scene: str, gpu: Path, tmp_path: Path) -> None:
    """A device that does not answer is not used any more: one message, its operations counted without durations, the CPU's recorded on."""
    done = alone(tmp_path, "gpu_timing.py", gpu, scene, COMMWATCH="0", COMMWATCH_TIMING="events")
    assert done.returncode == 0, done.stderr[-4000:]
    complaints = [line for line in done.stderr.splitlines() if line.startswith("commwatch: ")]
    assert len(complaints) == 1
    assert "no longer timed" in complaints[0]
    assert "fell off the bus" in complaints[0]
    assert "two lines" not in done.stderr
    assert results(done.stdout)[0]["works"] == int((hook, scene) == ("native", "broken"))
    rank = after_first(tmp_path)
    gpus = [r for r in rank.operations if r.flags & ev.ON_DEVICE]
    assert [(ev.TIMING[r.timing], bool(r.flags & ev.UNTIMED)) for r in gpus] == [("none", True)] * 3
    (on_cpu,) = [r for r in rank.operations if not r.flags & ev.ON_DEVICE]
    assert ev.TIMING[on_cpu.timing] in ("future", "call")
