"""The events of a timeline are a sound Chrome trace, whatever was recorded, with a slice for each operation and an arrow for each dependency."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from commwatch.wire import events as ev
from commwatch_agent.model.cells import GroupInfo
from commwatch_agent.model.views import TraceOperation
from commwatch_agent.report import chrome_trace
from commwatch_agent.report.chrome_trace import ChromeTrace, TraceMark, TraceStep, pid_of
from tests.chrome_trace import Slice, Trace, sound
from tests.helpers import examples

WORLD, PAIR = (
    GroupInfo(name, name, name, "", ranks, len(ranks), True) for name, ranks in (("world", (0, 1, 2)), ("pair", (0, 1)))
)
RANKS = {0: "host", 1: "host", 2: "host"}


def one(op: str, rank: int, start_ns: int, end_ns: int, **more: Any) -> TraceOperation:
    """An operation."""
    usual = {
        "group": WORLD,
        "seq": 0,
        "peer": -1,
        "tag": 0,
        "size": 1 << 20,
        "dtype": "float32",
        "launch_ns": start_ns,
        "flags": 0,
    }
    return TraceOperation(
        **{**usual, "timing": ev.BY_FUTURE, "rank": rank, "op": op, "start_ns": start_ns, "end_ns": end_ns, **more}
    )


def traced(*operations: TraceOperation, ranks: dict[int, str] = RANKS) -> Trace:
    """The trace of operations, read strictly."""
    trace = ChromeTrace(0, ranks)
    events = [*trace.processes(), *trace.of_operations(sorted(operations, key=lambda each: -each.end_ns))]
    found = sound(json.loads(json.dumps(events)), {})
    assert trace.operations == len(operations)
    assert trace.arrows == len(found.arrows)
    return found


def parts(trace: Trace, cat: str) -> list[tuple[int, int, int, str | None]]:
    """Rank, begin, length and surrounding slice of each slice of a category."""
    return sorted((s.rank, s.start_ns, s.end_ns - s.start_ns, s.inside) for s in trace.of(cat))


def test_collective() -> None:
    """The parts of a symmetric collective are slices with size and bandwidth; wait and transfer lie in them, arrows come from the rank that was last."""
    trace = traced(*(one("all_reduce", rank, 1000 * rank, 9000 + rank) for rank in range(3)))
    assert trace.processes == {pid_of(rank): f"rank {rank}" for rank in range(3)}
    assert set(trace.threads.values()) == {"world, 3 ranks"}
    assert parts(trace, "operation") == [(0, 0, 9000, None), (1, 1000, 8001, None), (2, 2000, 7002, None)]
    assert parts(trace, "wait") == [(0, 0, 2000, "all_reduce"), (1, 1000, 1000, "all_reduce")]
    assert parts(trace, "transfer") == [
        (0, 2000, 7000, "all_reduce"),
        (1, 2000, 7001, "all_reduce"),
        (2, 2000, 7002, "all_reduce"),
    ]
    assert sorted(each.args["wait_us"] for each in trace.of("wait")) == [0.999, 1.998], (
        "as it is defined, by the durations"
    )
    assert {each.args["transfer_us"] for each in trace.of("transfer")} == {7.002}
    assert sorted(trace.arrows) == [(2, 0, "all_reduce"), (2, 1, "all_reduce")]
    args = next(each.args for each in trace.of("operation") if each.rank == 2)
    assert (args["size_bytes"], args["seq"], args["group"], args["timing"]) == (1 << 20, 0, "world", "future")
    assert args["busbw_GB_per_s"] == round((1 << 20) * 4 / 3 / 7002, 4)


@pytest.mark.parametrize(
    ("op", "arrows"),
    [
        ("broadcast", [(1, 0), (1, 2)]),
        ("scatter", [(1, 0), (1, 2)]),
        ("reduce", [(0, 1), (2, 1)]),
        ("gather", [(0, 1), (2, 1)]),
    ],
)
def test_operations_with_a_root(op: str, arrows: list[tuple[int, int]]) -> None:
    """Arrows start or end at the root, also if another rank was last; there are no slices for wait and transfer."""
    trace = traced(*(one(op, rank, 1000 * rank, 9000, peer=1) for rank in range(3)))
    assert sorted(trace.arrows) == [(*pair, op) for pair in arrows]
    assert trace.of("wait") == trace.of("transfer") == []
    assert {(each.name, each.start_ns, each.end_ns) for each in trace.of("since")} == (
        {("since rank 1 began", 1000, 9000)} if op in ("broadcast", "scatter") else {("since rank 2 began", 2000, 9000)}
    )


def test_messages() -> None:
    """An arrow leads from each send to its recv, by number and tag; ranks that are not in the trace have none."""
    pair = [
        one("send", 0, 100, 200, peer=1, seq=4, tag=7),
        one("recv", 1, 50, 260, peer=0, seq=4, tag=7),
        one("send", 0, 300, 400, peer=1, seq=5, tag=7),
        one("recv", 1, 270, 460, peer=0, seq=5, tag=8),
        one("recv", 1, 470, 480, peer=5),
    ]
    assert traced(*pair).arrows == [(0, 1, "message")]


def test_messages_that_were_waited_for_late() -> None:
    """Sends whose ends were seen only at the end of the step begin at their launch, so that each has its arrow."""
    late = [one("send", 0, 900, 901 + n, launch_ns=100 + 10 * n, peer=1, seq=n, timing=ev.BY_WAIT) for n in range(3)]
    received = [one("recv", 1, 105 + 10 * n, 108 + 10 * n, peer=0, seq=n) for n in range(3)]
    trace = traced(*late, *received)
    assert trace.arrows == [(0, 1, "message")] * 3
    assert sorted(each.start_ns for each in trace.of("operation") if each.name == "send") == [100, 110, 120]
    by_device = [each._replace(timing=ev.BY_EVENTS) for each in late]
    assert {each.start_ns for each in traced(*by_device).of("operation")} == {900}


@pytest.mark.parametrize(
    "otherwise",
    [
        {"flags": ev.UNALIGNED},
        {"flags": ev.ASYNC, "timing": ev.BY_WAIT},
        {"group": WORLD._replace(ranks=(0, 1, 2, 3), size=4)},
    ],
    ids=["unaligned", "end seen late", "a rank on another node"],
)
def test_waits_that_are_not_known(otherwise: dict[str, Any]) -> None:
    """Where durations cannot be compared, or a rank is not in sight, there is neither wait nor transfer; the parts here have arrows."""
    trace = traced(*(one("all_reduce", rank, 1000 * rank, 9000, **otherwise) for rank in range(3)))
    assert trace.of("wait") == trace.of("transfer") == []
    assert len(trace.arrows) == 2


def test_operations_without_times() -> None:
    """An operation that failed, or has no times, is a moment at its launch, and no slice."""
    trace = traced(
        one("all_reduce", 0, 10, 20, flags=ev.FAILED, launch_ns=5),
        one("all_gather", 0, 30, 30, flags=ev.UNTIMED, launch_ns=30),
    )
    assert sorted((each["name"], each["ts"]) for each in trace.instants) == [
        ("all_gather without times", 0.03),
        ("all_reduce failed", 0.005),
    ]
    assert trace.slices == []


def test_overlapping_operations() -> None:
    """Operations of a group that overlap have threads of their own; those that only touch share one."""
    times = [(0, 10), (5, 15), (10, 20), (15, 25), (12, 13)]
    trace = traced(*(one("all_reduce", 0, *each, seq=n, group=PAIR) for n, each in enumerate(times)))
    assert set(trace.threads.values()) == {"pair, 2 ranks", "pair, 2 ranks (2)", "pair, 2 ranks (3)"}
    assert sorted((each.start_ns, each.end_ns) for each in trace.slices) == sorted(times)


def test_steps_and_marks() -> None:
    """A step is a slice, its known shares are counters in percent; a mark is an instant of one rank or of all ranks."""
    trace = ChromeTrace(100, RANKS)
    events = list(
        trace.of_steps(
            [TraceStep(0, 7, 300, 500, 50, 20, None, True), TraceStep(1, 7, 300, 400, None, None, None, False)]
        )
    )
    marks = [TraceMark(450, "alert Hang", None, {"summary": "x"}), TraceMark(460, "verdict hang", 2, {"says": "y"})]
    found = sound([*trace.processes(), *events, *trace.of_marks(marks)], {})
    assert {(s.rank, s.name, s.start_ns, s.end_ns) for s in found.slices} == {
        (0, "step 7", 200, 400),
        (1, "step 7", 200, 300),
    }
    assert [each["args"] for each in found.counters] == [{"communication": 25.0, "exposed": 10.0}]
    assert [(each["pid"], each["s"], each["name"]) for each in found.instants] == [
        (pid_of(0), "g", "alert Hang"),
        (pid_of(2), "p", "verdict hang"),
    ]
    assert (trace.steps, trace.marks) == (2, 2)


def test_incidents_that_overlap() -> None:
    """An incident is a slice from its begin to its end; those of one rank that overlap have threads of their own, and a rank without records has none."""
    trace = ChromeTrace(0, RANKS)
    times = [(2, 20, 30), (2, 0, 10), (2, 5, 25), (2, 10, 12), (99, 0, 5)]
    marks = [TraceMark(start, f"incident {start}", rank, {"says": "x"}, end) for rank, start, end in times]
    found = sound([*trace.processes(), *trace.of_marks(marks)], {})
    named = {(each.rank, each.start_ns, each.end_ns, found.threads[each.pid, each.tid]) for each in found.of("mark")}
    assert named == {
        (2, 0, 10, "incidents"), (2, 10, 12, "incidents"), (2, 20, 30, "incidents"), (2, 5, 25, "incidents (2)"),
        (min(RANKS), 0, 5, "incidents"),
    }  # fmt: skip
    assert trace.marks == 5


OPERATIONS = st.lists(
    st.builds(
        lambda op, rank, start, lasts, more: one(op, rank, start, start + lasts, **more),
        st.sampled_from(["all_reduce", "broadcast", "reduce", "send", "recv", "barrier", "c10d::other"]),
        st.integers(0, 2),
        st.integers(0, 1000),
        st.integers(0, 300),
        st.fixed_dictionaries(
            {
                "group": st.sampled_from([WORLD, PAIR]),
                "seq": st.integers(0, 4),
                "peer": st.integers(-1, 3),
                "flags": st.sampled_from([0, ev.FAILED, ev.UNTIMED, ev.ASYNC, ev.NO_SIZE]),
                "size": st.sampled_from([None, 0, 1 << 20]),
            }
        ),
    ),
    max_size=60,
)


@examples(200)
@given(OPERATIONS)
def test_whatever_was_recorded(operations: list[TraceOperation]) -> None:
    """Any operations, in any overlap, give a sound trace with a slice for each that has times and a moment for each that has none."""
    trace = traced(*operations)

    def key(each: Slice) -> tuple[int, str, int, int]:
        return each.rank, each.name, each.start_ns, each.end_ns

    timed = [each for each in operations if not each.flags & (ev.FAILED | ev.UNTIMED)]
    assert sorted(map(key, trace.of("operation"))) == sorted(
        (each.rank, each.op, each.start_ns, each.end_ns) for each in timed
    )
    assert len(trace.instants) == len(operations) - len(timed)


def test_memory_does_not_grow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Twelve times as many operations take no more memory, also where the other ranks' parts never come; events come out at once."""

    def many(number: int) -> Iterator[TraceOperation]:
        for n in reversed(range(number)):
            yield one("all_reduce", 0, 20 * n, 20 * n + 10, seq=n, group=PAIR)
            yield one("send", 0, 20 * n + 11, 20 * n + 12, seq=n, peer=1)

    monkeypatch.setattr(chrome_trace, "MOST_PENDING", 200)
    peaks = []
    for number in (500, 6000):
        trace = ChromeTrace(0, RANKS)
        tracemalloc.start()
        assert sum(1 for event in trace.of_operations(many(number)) if event["ph"] == "X") == 2 * number
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < 1.5 * peaks[0]  # when the collector runs depends on what else this process has
