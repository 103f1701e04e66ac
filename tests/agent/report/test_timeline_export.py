"""The timeline of a job in the history: each record is in it once, on one clock, with the waits that the API reports."""

from __future__ import annotations

import io
from collections import Counter
from pathlib import Path

import pytest

from commwatch_agent.analysis.queries import QueryService
from commwatch_agent.history.store import Writer
from commwatch_agent.model.node_counters import GPU_BUSY, RECEIVED, SENT, CounterSample, NodeCounter
from commwatch_agent.report.chrome_trace import TraceMark, pid_of
from commwatch_agent.report.timeline_export import Exported, Window, export
from commwatch_agent.runtime.whole_files import writing
from tests.agent.report.test_report_page import job_of
from tests.chrome_trace import Trace, parsed, read
from tests.helpers import EPOCH_NS, MS, Watch, group_entry, mark, operation, write_ring

ALL = Window(None)


def traced(
    path: Path, job: str = "job", window: Window = ALL, marks: tuple[TraceMark, ...] = ()
) -> tuple[Exported, Trace]:
    """What the export says of itself, and its trace, read strictly."""
    out = io.StringIO()
    found = export(path, job, window, marks, out)
    return found, parsed(out.getvalue().encode())


@pytest.fixture(scope="module")
def agent(tmp_path_factory: pytest.TempPathFactory) -> QueryService:
    """A job of eight ranks in two groups; in some steps one rank is late."""
    return job_of(tmp_path_factory.mktemp("job"), 8, 12, range(4, 7))


def test_every_record(agent: QueryService) -> None:
    """There is a slice for each operation with its times, a slice for each step, and an arrow for each rank but one of each collective."""
    found, trace = traced(agent.path)
    operations = agent.operations(0, 1 << 62, None, lambda each: True, 1 << 20)
    assert found.operations == len(operations) == 8 * 12 * 8
    origin = trace.about["Unix time of 0, in ns"]
    assert Counter(
        (each.rank, each.name, each.start_ns + origin, each.end_ns + origin) for each in trace.of("operation")
    ) == Counter(
        (each.rank, each.op, round(each.start_at * 1000) * MS, round(each.end_at * 1000) * MS) for each in operations
    )
    collectives = {(each.group_id, each.seq) for each in operations}
    assert found.arrows == len(trace.arrows) == len(operations) - len(collectives)
    steps = agent.steps(0, 1 << 62, "job", None, 1 << 20)
    assert found.steps == len(trace.of("step")) == len(steps)
    assert trace.processes == {pid_of(rank): f"rank {rank}" for rank in range(8)}
    assert {name.removesuffix(" (2)") for name in trace.threads.values()} == {"steps", "dp, 8 ranks", "tp, 4 ranks"}


def test_parts_of_steps_are_those_of_the_api(agent: QueryService) -> None:
    """Each step has its communication and its exposed time, exactly as ``/api/v1/steps``; their sums are the job's."""
    _, trace = traced(agent.path)
    steps = agent.steps(0, 1 << 62, "job", None, 1 << 20)
    for name, field in (("communication", "comm_s"), ("exposed", "exposed_s")):
        expected = Counter((step.rank, step.seq, round(1e9 * getattr(step, field))) for step in steps)
        found = [
            (each.rank, int(each.name.removeprefix("step ")), round(1000 * each.args[f"{name}, us"]))
            for each in trace.of("step")
        ]
        assert Counter(found) == expected
        assert sum(ns for *_, ns in found) == sum(ns for *_, ns in expected) > 0


def test_waits_are_those_of_the_api(agent: QueryService) -> None:
    """The waits in the trace are those that ``/api/v1/collectives`` gives, of each rank and collective."""
    _, trace = traced(agent.path)
    expected: Counter[tuple[int, int]] = Counter()
    for group_id, seq in {
        (each.group_id, each.seq) for each in agent.operations(0, 1 << 62, None, lambda each: True, 1 << 20)
    }:
        answer = agent.collective(group_id, seq)
        assert answer is not None
        assert answer[1] is not None
        expected.update((part.rank, wait) for part, wait in answer[1].waits if wait)
    assert (
        Counter(
            (each.rank, round(1000 * each.args["wait_us"])) for each in trace.of("transfer") if each.args["wait_us"]
        )
        == expected
    )
    drawn = sum(each.end_ns - each.start_ns for each in trace.of("wait"))
    assert drawn == pytest.approx(sum(wait * count for (_, wait), count in expected.items()), rel=0.02)
    assert {each.inside for each in (*trace.of("wait"), *trace.of("transfer"))} == {
        each.name for each in trace.of("operation")
    }


def test_counters_of_the_node(tmp_path: Path) -> None:
    """GPUs and network devices are counters of a process for their node, in the units of their names, from the window only."""
    agent = job_of(tmp_path, 2, 4, range(0))
    until_s = max(step.end_at for step in agent.steps(0, 1 << 62, "job", None, 9))
    times = [int(until_s * 1e9) - ago * MS for ago in (200, 100, 0)]
    store = Writer(agent.path)
    for at_ns in times:
        store.node_sample(
            CounterSample(
                at_ns,
                [NodeCounter(GPU_BUSY, "0", 0.5), NodeCounter(RECEIVED, "eth0", 2e9), NodeCounter(SENT, "eth0", 1e6)],
            )
        )
    store.close()
    _, trace = traced(agent.path)
    (pid,) = (pid for pid, name in trace.processes.items() if name == "node host")
    found = [(each["name"], each["args"], each["ts"]) for each in trace.counters if each["pid"] == pid]
    origin = trace.about["Unix time of 0, in ns"]
    expected = {"GPU 0": {"busy, %": 50.0}, "eth0": {"received, MB/s": 2000.0, "sent, MB/s": 1.0}}
    assert found == [(name, args, (at_ns - origin) / 1000) for at_ns in times for name, args in expected.items()]
    _, trace = traced(agent.path, window=Window(0.15))
    assert len([each for each in trace.counters if each["pid"] == pid]) == 4


def test_window_and_limit(agent: QueryService) -> None:
    """A window has what ended in the last seconds; a limit keeps the latest operations, and says that it has cut."""
    end_at = max(each.end_at for each in agent.steps(0, 1 << 62, "job", None, 1 << 20))
    window, _ = traced(agent.path, window=Window(3.0))
    inside = agent.operations(int((end_at - 3) * 1e9), 1 << 62, None, lambda each: True, 1 << 20)
    assert 0 < window.operations == len(inside) < 8 * 12 * 8
    assert not window.cut
    cut, trace = traced(agent.path, window=Window(None, 100))
    assert (cut.operations, cut.cut) == (100, True)
    assert (
        min(each.end_ns for each in trace.of("operation")) > max(each.end_ns for each in trace.of("step")) - 3000 * MS
    )
    assert not traced(agent.path, window=Window(None, 8 * 12 * 8))[0].cut


def test_window_between(agent: QueryService) -> None:
    """A window between two times has the operations and steps that ended in it, and the marks."""
    end_ns = max(round(each.end_at * 1e9) for each in agent.steps(0, 1 << 62, "job", None, 1 << 20))
    since_ns, until_ns = end_ns - 5000 * MS, end_ns - 2000 * MS
    inside = agent.operations(since_ns, until_ns, None, lambda each: True, 1 << 20)
    marks = tuple(TraceMark(at_ns, "mark", 0, {}) for at_ns in (since_ns - 1, since_ns, until_ns - 1, until_ns))
    found, _ = traced(agent.path, window=Window(None, None, since_ns, until_ns), marks=marks)
    assert 0 < found.operations == len(inside) < 8 * 12 * 8
    assert found.steps == len(agent.steps(since_ns, until_ns, "job", None, 1 << 20)) > 0
    assert found.marks == 2
    assert traced(agent.path, window=Window(None, None, end_ns + MS))[0] == Exported(0, 0, 0, 0, False, {})


def test_one_clock(tmp_path: Path) -> None:
    """Ranks of one node are on one clock, even if its time was set between their begins; earlier runs of the name are left out."""
    watch = Watch(tmp_path)
    write_ring(watch.rings, [operation(start_ns=5 * MS, end_ns=6 * MS)], job="job", restart=0, rank=0)
    for rank, offset in ((0, EPOCH_NS), (1, EPOCH_NS + 7000 * MS)):
        records = [
            mark(0, 20_000 * MS),
            operation(start_ns=20_010 * MS, end_ns=20_020 * MS),
            mark(1, 20_100 * MS, exposed_ns=5 * MS),
        ]
        begun = {"started_ns": 15_000 * MS, "wall_offset_ns": offset}
        write_ring(watch.rings, records, [group_entry()], job="job", restart=1, rank=rank, **begun)
    watch.tick(21_000 * MS)
    found, trace = traced(watch.path)
    assert found == (2, 2, 1, 0, False, {})
    assert {(each.start_ns, each.end_ns) for each in trace.of("operation")} == {(5010 * MS, 5020 * MS)}
    assert {(each.start_ns, each.end_ns) for each in trace.of("step")} == {(5000 * MS, 5100 * MS)}
    assert [each["args"] for each in trace.counters] == [{"communication": 10.0, "exposed": 5.0}] * 2
    _, before = traced(watch.path, window=Window(None, None, 0, EPOCH_NS + 10_000 * MS))
    assert [each.start_ns + before.about["Unix time of 0, in ns"] for each in before.of("operation")] == [
        EPOCH_NS + 5 * MS
    ]


def test_marks(agent: QueryService) -> None:
    """Alerts and verdicts within the window are moments of the trace."""
    end_ns = int(max(each.end_at for each in agent.steps(0, 1 << 62, "job", None, 1 << 20)) * 1e9)
    marks = (
        TraceMark(end_ns - 10 * MS, "verdict straggler", 5, {"says": "late"}),
        TraceMark(end_ns - 10**12, "old", 5, {}),
    )
    found, trace = traced(agent.path, marks=marks)
    assert found.marks == 1
    (moment,) = trace.instants
    assert (moment["pid"], moment["name"], moment["args"]) == (pid_of(5), "verdict straggler", {"says": "late"})


def test_incidents(agent: QueryService) -> None:
    """An incident is shown if it lasts in the window, from the begin of the window on; ranks that hang end nothing, so it may come after all records."""
    end_ns = int(max(each.end_at for each in agent.steps(0, 1 << 62, "job", None, 1 << 20)) * 1e9)
    times = ((-(10**12), -(10**11)), (-(10**12), -MS), (10**9, 10**10))
    marks = tuple(TraceMark(end_ns + start, f"{start}", 5, {"id": f"{start}"}, end_ns + end) for start, end in times)
    marks = (*marks[:1], *(mark._replace(args={"id": mark.name + "x"}) for mark in marks[1:]))
    _, trace = traced(agent.path, window=Window(2.0), marks=marks)
    found = sorted((each.start_ns, each.end_ns) for each in trace.of("mark"))
    origin_ns = trace.about["Unix time of 0, in ns"]
    assert [end + origin_ns - end_ns for _, end in found] == pytest.approx([-MS, 10**10], abs=1000)
    assert found[0][1] - found[0][0] == pytest.approx(2 * 10**9, abs=10 * MS)
    until_ns = end_ns + 1
    _, trace = traced(agent.path, window=Window(None, None, end_ns - 10**9, until_ns), marks=marks)
    assert len(trace.of("mark")) == 1


def test_job_without_records(tmp_path: Path) -> None:
    """A job that has recorded nothing has an empty trace."""
    watch = Watch(tmp_path)
    write_ring(watch.rings, [], job="job")
    watch.tick()
    assert traced(watch.path)[0] == (0, 0, 0, 0, False, {})


@pytest.mark.parametrize("name", ["trace.json", "trace.json.gz"])
def test_file_is_whole_or_not_there(tmp_path: Path, agent: QueryService, name: str) -> None:
    """A file that was written is complete; one whose writing failed is not there, and an earlier one stays."""
    with writing(tmp_path / name) as out:
        export(agent.path, "job", ALL, (), out)
    assert len(read(tmp_path / name).of("operation")) == 8 * 12 * 8
    before = (tmp_path / name).read_bytes()
    with pytest.raises(UnicodeEncodeError), writing(tmp_path / name) as out:
        out.write("{\ud800")
    assert (tmp_path / name).read_bytes() == before
    assert [each.name for each in tmp_path.iterdir()] == [name]
