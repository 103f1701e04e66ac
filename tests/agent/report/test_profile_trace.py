"""Profiles in a timeline: each slice and arrow is in it once, exactly in its place, whatever the clock and the trace are like."""

from __future__ import annotations

import gzip
import io
import json
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from commwatch_agent.report import profile_trace
from commwatch_agent.report.profile_trace import BadProfile, ProfileTrace
from commwatch_agent.report.timeline_export import Exported, Window, own_trace, write
from tests.chrome_trace import Trace, parsed
from tests.helpers import EPOCH_NS, MS, Watch, examples, group_entry, mark, operation, write_ring

STEP, STEPS = 100 * MS, 6
#: Zero of the traces, as Unix time.
BASE_NS = EPOCH_NS - 1
#: The profiled steps end at marks 3 and 4.
BEGIN_NS, END_NS = EPOCH_NS + 3 * STEP, EPOCH_NS + 5 * STEP


@pytest.fixture
def watch(tmp_path: Path) -> Watch:
    """A job of two ranks; each step has an all_reduce from its 10th to its 40th ms."""
    watch = Watch(tmp_path)
    for rank in (0, 1):
        records = [mark(0, STEP)]
        for n in range(1, STEPS):
            records.append(operation(start_ns=n * STEP + 10 * MS, end_ns=n * STEP + 40 * MS, seq=n))
            records.append(mark(n, (n + 1) * STEP, exposed_ns=20 * MS))
        write_ring(watch.rings, records, [group_entry()], job="job", rank=rank, started_ns=0)
    watch.tick(7 * STEP)
    return watch


def us(ns: int) -> str:
    """A time as torch writes it."""
    return f"{ns // 1000}.{ns % 1000:03}"


def event(name: str, start_ns: int, end_ns: int, *, tid: int = 8, **more: Any) -> str:
    """A slice of a trace in Unix time."""
    about = json.dumps({"cat": "cpu_op", "name": name, "pid": 7, "tid": tid, "args": {"share": 0.25}, **more})
    return f'{{"ph": "X", "ts": {us(start_ns - BASE_NS)}, "dur": {us(end_ns - start_ns)}, {about[1:]}'


def arrow(begin_ns: int, end_ns: int) -> list[str]:
    """Both ends of an arrow between two threads."""
    about = '"pid": 7, "id": 1, "cat": "fwdbwd", "name": "fwdbwd"'
    return [
        f'{{"ph": "s", "ts": {us(begin_ns - BASE_NS)}, "tid": 8, {about}}}',
        f'{{"ph": "f", "ts": {us(end_ns - BASE_NS)}, "tid": 9, "bp": "e", {about}}}',
    ]


def named(tid: int, name: str) -> str:
    """The name of a thread."""
    return json.dumps({"ph": "M", "name": "thread_name", "pid": 7, "tid": tid, "ts": 0, "args": {"name": name}})


def text_of(events: list[str]) -> str:
    """The text of a trace."""
    head = f'{{"schemaVersion": 1, "displayTimeUnit": "ms", "baseTimeNanoseconds": {BASE_NS}, "traceEvents": ['
    return f'{head}\n {", ".join(events)}\n], "traceName": "trace"}}'


def kept(path: Path, events: list[str], *, rank: int = 0, set_ns: int = 0, cut: int | None = None) -> ProfileTrace:
    """A kept trace, of a time when the clock had been set by so much."""
    path.write_bytes(gzip.compress(text_of(events).encode())[:cut])
    return ProfileTrace(path.name, rank, path, path.with_suffix(".exposed"), (2, 4), BEGIN_NS + set_ns, END_NS + set_ns)


def traced(watch: Watch, *profiles: ProfileTrace, last_s: float | None = None) -> tuple[Exported, Trace]:
    """The timeline of the job with profiles, read strictly."""
    out = io.StringIO()
    with own_trace(watch.path, "job", Window(last_s), (), alone=True, profiles=profiles) as own:
        found = write([own], "job", Window(last_s), {}, out)
    return found, parsed(out.getvalue().encode())


def test_in_its_place(watch: Watch, tmp_path: Path) -> None:
    """Slices, arrows and threads of a profile are in a process after that of its rank, to the ns, with their arguments."""
    events = [
        named(8, "thread 8 (python) "),
        event("step", BEGIN_NS + 1, BEGIN_NS + 90 * MS),
        event("matmul", BEGIN_NS + 12_345_678, BEGIN_NS + 12_345_679),
        event("backward", BEGIN_NS + 50 * MS, BEGIN_NS + 60 * MS, tid=9),
        *arrow(BEGIN_NS + 2 * MS, BEGIN_NS + 51 * MS),
        json.dumps({"ph": "X", "name": "span", "cat": "Trace", "ts": 1, "dur": 2, "pid": "Spans", "tid": "x"}),
        json.dumps({"ph": "i", "name": "end", "ts": 1, "pid": "", "tid": ""}),
        json.dumps({"ph": "X", "name": "without a time", "pid": 7, "tid": 8}),
    ]
    found, trace = traced(watch, kept(tmp_path / "0", events), kept(tmp_path / "1", events, rank=1))
    origin = trace.about["Unix time of 0, in ns"]
    for rank in (0, 1):
        assert sorted(
            (each.name, each.start_ns + origin - BEGIN_NS, each.end_ns + origin - BEGIN_NS, each.inside)
            for each in trace.of("cpu_op")
            if each.rank == rank
        ) == [
            ("backward", 50 * MS, 60 * MS, None),
            ("matmul", 12_345_678, 12_345_679, "step"),
            ("step", 1, 90 * MS, None),
        ]
    assert {json.dumps(each.args) for each in trace.of("cpu_op")} == {'{"share": 0.25}'}
    assert [each for each in trace.arrows if each[2] == "fwdbwd"] == [(0, 0, "fwdbwd"), (1, 1, "fwdbwd")]
    (pid,) = (pid for pid, name in trace.processes.items() if name == "rank 1, torch.profiler")
    assert [name for (of, _), name in trace.threads.items() if of == pid] == ["thread 8 (python)", "thread 9"]
    assert found.profiles == trace.about["profiles"]
    assert len(found.profiles) == 2


@pytest.mark.parametrize("set_ns", [0, 3_600_000 * MS, -5 * MS])
def test_clock(watch: Watch, tmp_path: Path, set_ns: int) -> None:
    """If the clock was set since the job began, the step mark shows by how much; collectives of both show how well that fits."""
    ends = [EPOCH_NS + n * STEP + 40 * MS + set_ns for n in (3, 4)]
    events = [
        event("gloo:all_reduce", ends[0] - 9 * MS, ends[0] + 4000, cat="user_annotation"),
        event("ncclDevKernel_AllReduce_Sum_f32_RING_LL", ends[1] - 9 * MS, ends[1] + 8000, cat="kernel"),
        event("nccl:all_reduce", ends[1], ends[1] + 1, cat="user_annotation", tid=9),
        event("gloo:all_gather", ends[1] - 9 * MS, ends[1], cat="user_annotation", tid=10),
        event("gloo:all_reduce", ends[0] - STEP - 9 * MS, ends[0] - STEP, cat="user_annotation"),
    ]
    _, trace = traced(watch, kept(tmp_path / "0", events, set_ns=set_ns))
    origin = trace.about["Unix time of 0, in ns"]
    assert trace.about["profiles"] == {
        "rank 0, profile 0": {"moved_us": -set_ns / 1000, "compared": 2, "later_us": 6.0, "uncertainty_us": 8.0}
    }
    (kernel,) = trace.of("kernel")
    assert kernel.end_ns + origin == EPOCH_NS + 4 * STEP + 40 * MS + 8000


def test_exposed(watch: Watch, tmp_path: Path) -> None:
    """The exposed intervals of a profile have a thread, by the clock of the timeline; a file of them that cannot be read does not matter."""
    events = [event("op", BEGIN_NS, BEGIN_NS + 9 * MS)]
    made = [kept(tmp_path / str(n), events, rank=n % 2, set_ns=5 * MS) for n in range(4)]
    for profile, text in zip(made, (f"[[{BEGIN_NS + 5 * MS}, {BEGIN_NS + 6 * MS + 1}]]", "[[1", "[]"), strict=False):
        profile.exposed.write_text(text)
    made[2].exposed.write_text(f"[[{BEGIN_NS + 7 * MS}, {BEGIN_NS + 8 * MS}]]")
    _, trace = traced(watch, *made)
    origin = trace.about["Unix time of 0, in ns"]
    found = [
        (each.rank, each.tid, each.start_ns + origin - BEGIN_NS, each.end_ns + origin - BEGIN_NS)
        for each in trace.of("exposed")
    ]
    assert found == [(0, 1, 0, MS + 1), (0, 1, 2 * MS, 3 * MS)]
    assert [name for (_, tid), name in trace.threads.items() if tid == 1] == ["exposed communication"]
    assert len(trace.of("cpu_op")) == 4


def test_which_profiles(watch: Watch, tmp_path: Path) -> None:
    """A profile of another time, run or rank is left out; one that reaches into the window is there with all its slices."""
    events = [event("first", BEGIN_NS + 10 * MS, BEGIN_NS + 20 * MS), event("last", END_NS - 10 * MS, END_NS)]
    late = kept(tmp_path / "0", events)
    earlier = late._replace(begin_ns=BEGIN_NS - 99 * STEP, end_ns=END_NS - 99 * STEP + MS)
    others = late._replace(rank=5), earlier, earlier._replace(marks=(98, 99))
    for last_s, names in ((None, ["first", "last"]), (0.101, ["first", "last"]), (0.05, [])):
        found, trace = traced(watch, late, *others, last_s=last_s)
        assert [each.name for each in trace.of("cpu_op")] == names
        assert list(found.profiles) == (["rank 0, profile 0"] if names else [])


def test_two_profiles_of_a_rank(watch: Watch, tmp_path: Path) -> None:
    """Two profiles of a rank have one process, and arrows of their own."""
    made = []
    for n, begin_ns in enumerate((BEGIN_NS, BEGIN_NS + STEP)):
        slices = [event(f"op {n}", begin_ns, begin_ns + 9 * MS, tid=tid) for tid in (8, 9)]
        made.append(kept(tmp_path / str(n), [named(8, "main"), *slices, *arrow(begin_ns + 1, begin_ns + 2)]))
    _, trace = traced(watch, *made)
    assert sorted((each.tid, each.name) for each in trace.of("cpu_op")) == [
        (2, "op 0"), (2, "op 1"), (3, "op 0"), (3, "op 1"),
    ]  # fmt: skip
    assert len([each for each in trace.arrows if each[2] == "fwdbwd"]) == 2


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"cut": -40}, "cannot be read"),
        ({"events": [event("op", BEGIN_NS, END_NS), "{"]}, "it is cut short, or no JSON"),
        ({"events": [event("op", BEGIN_NS, BEGIN_NS + 1, tid=tid) for tid in range(5000)]}, "more than 4096 threads"),
        ({"events": [event("op", BEGIN_NS, END_NS), "[" * 100_000]}, "cannot be read"),
    ],
)
def test_damaged_traces(watch: Watch, tmp_path: Path, change: dict[str, Any], says: str) -> None:
    """A trace that cannot be read to its end is an error of that profile; the timeline is sound, with the others."""
    events = [event("op", BEGIN_NS, BEGIN_NS + 1) for _ in range(9)]
    bad = kept(tmp_path / "0", **{"events": events, **change})
    found, trace = traced(watch, bad, kept(tmp_path / "1", events, rank=1))
    assert says in str(found.profiles["rank 0, profile 0"]["error"])
    assert str(tmp_path / "0") in str(found.profiles["rank 0, profile 0"]["error"])
    assert len([each for each in trace.of("cpu_op") if each.rank == 1]) == 9
    assert found.operations == 2 * (STEPS - 1)


@pytest.mark.parametrize("text", ["", "{}", "[" * 10, '{"traceEvents": 1}'])
def test_no_trace(text: str) -> None:
    """A file that has no list of events is refused."""
    with pytest.raises(BadProfile, match="no list of trace events"):
        profile_trace.read(io.StringIO(text))


@given(st.lists(st.dictionaries(st.text(), st.text() | st.integers() | st.none() | st.lists(st.integers()))), st.data())
@examples(100)
def test_read_in_pieces(events: list[dict[str, Any]], data: st.DataObject) -> None:
    """Events are the same however the file is cut into pieces."""
    text = text_of([json.dumps(each) for each in events])

    class Pieces(io.StringIO):
        def read(self, size: int | None = -1) -> str:
            return super().read(min(data.draw(st.integers(1, 50)), size or 1))

    base_ns, found = profile_trace.read(Pieces(text))
    assert (base_ns, list(found)) == (BASE_NS, events)


def test_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The memory for reading a trace does not depend on its length."""
    monkeypatch.setattr(profile_trace, "_PIECE", 1 << 14)
    peaks = []
    for number in (2_000, 10_000):
        text = text_of([event(f"op {n}", BEGIN_NS + n, BEGIN_NS + n + 1) for n in range(number)])
        (tmp_path / "trace").write_text(text)
        tracemalloc.start()
        with (tmp_path / "trace").open(encoding="utf-8") as file:
            assert sum(1 for _ in profile_trace.read(file)[1]) == number
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < 1.1 * peaks[0]
