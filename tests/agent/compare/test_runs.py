"""What is compared of a job: its figures are those of the summary, without warm-up, long steps and earlier runs."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from commwatch.wire import events as ev
from commwatch.wire.numbers import NUMBERS
from commwatch_agent.compare.bootstrap import BLOCKS, Samples, Sums, quantile, ratio
from commwatch_agent.compare.comparison import compare
from commwatch_agent.compare.kinds import Kind, KindSamples, Operations
from commwatch_agent.compare.pages import as_json, html, text
from commwatch_agent.compare.pages import says as says_of
from commwatch_agent.compare.runs import LEAST_STEPS, Run, read
from commwatch_agent.history.history import History
from commwatch_agent.history.operations import Names
from tests.agent.report.test_job_list import JOB
from tests.agent.report.test_report_page import job_of
from tests.helpers import MS, Watch, end_rank, group_entry, mark, operation, write_ring

STEP_MS, STEPS = 100, 80
SUMS = Sums(np.zeros(BLOCKS), np.zeros(BLOCKS))


def watched(
    directory: Path,
    job: str = "job",
    warm: int = 0,
    long: int | None = None,
    slower: float = 1.0,
    first: int = 0,
    greets: bool = False,
    **who: Any,
) -> Watch:
    """A job of two ranks, each of whose steps has an all_reduce in which rank 0 waits 5 ms for rank 1, which is late, and a message.

    Args:
        warm: the first steps, which take twice as long.
        long: the step that takes ten times as long; in it rank 0 waits for half a second.
        first: number of the first step mark, collective and message.
        greets: there is a broadcast in the first step.
    """
    watch = Watch(directory)
    writers = []
    for rank in range(2):
        at, records = 0, [mark(first, 0)]
        if greets:
            records.append(operation("broadcast", start_ns=MS, end_ns=2 * MS, seq=first - 1, size=4096))
        for n in range(STEPS):
            lasts = int(STEP_MS * MS * slower * (2 if n < warm else 10 if n == long else 1))
            late = 5 * MS if n != long else 500 * MS
            begin, end = at + 40 * MS + rank * late, at + 45 * MS + late
            number = (first + n) % NUMBERS
            records.append(operation(start_ns=begin, end_ns=end, seq=number, size=1 << 20))
            records.append(
                operation(
                    ("send", "recv")[rank], start_ns=end, end_ns=end + 2 * MS, seq=number, size=100, peer=1 - rank
                )
            )
            at += lasts
            records.append(mark((first + n + 1) % NUMBERS, at, exposed_ns=8 * MS))
        writers.append(write_ring(watch.rings, records, [group_entry(backend="gloo")], job=job, rank=rank, **who))
    watch.tick(at)
    for writer in writers:
        end_rank(writer)
    watch.tick(at + 20_000 * MS)
    return watch


def run_of(watch: Watch, name: str = "job") -> Run:
    """What is compared of it."""
    return read(watch.path, next(job for job in watch.agent.jobs() if job.job_id == name), None)


def test_kinds_are_those_of_the_summary(tmp_path: Path) -> None:
    """Over all of a job, counts, durations, bandwidths and waits of each kind are those of the summary."""
    agent = job_of(tmp_path, 4, 30, range(8, 14))
    operations = Operations()
    with History(agent.path) as history:
        rings = {ring.id: ring for ring in history.rings()}
        for chunk in history.chunks(0, 1 << 62):
            operations.add(chunk.ring, rings[chunk.ring].wall_offset_ns, chunk.records)
        names = Names(history.groups(), history.names("op"))
    edges = operations.first_ns + np.arange(BLOCKS + 1) * (operations.last_ns + BLOCKS - operations.first_ns) // BLOCKS
    inside = operations.within(edges, np.zeros((0, 2), np.int64))
    kinds = inside.kinds(names)
    _, rows = agent.summary(0, 1 << 62, ["group", "op", "size"], {})
    assert {tuple(row.by.values()): row.count for row in rows} == {kind: kinds[kind].count for kind in kinds}
    for row in rows:
        found = kinds[Kind(*row.by.values())]  # type: ignore[arg-type]
        assert row.ranks == found.ranks
        assert quantile(found.durations, 0.5) == pytest.approx(row.p50_s, rel=0.022)
        assert quantile(found.durations, 0.99) == pytest.approx(row.p99_s, rel=0.022)
        assert ratio(found.bus) == (None if row.busbw is None else pytest.approx(row.busbw))
    waits = inside.waits(names)
    assert waits is not None
    assert waits.sum() == pytest.approx(sum(row.wait_s or 0 for row in rows))


def test_steps_without_warm_up_and_long_ones(tmp_path: Path) -> None:
    """Warm-up and long steps are counted, and neither they nor what was waited in them is compared."""
    run = run_of(watched(tmp_path, warm=10, long=50))
    assert (run.steps, run.warm_up, run.long) == (STEPS - 11, 10, 1)
    assert run.enough
    assert run.durations.values == pytest.approx(STEP_MS / 1e3)
    assert ratio(run.mean) == pytest.approx(STEP_MS / 1e3)
    assert {name: ratio(sums) for name, sums in run.shares.items()} == {
        "comm_share": pytest.approx((10 + 5) / 2 / STEP_MS),
        "exposed_share": pytest.approx((8 + 5) / 2 / STEP_MS),
        "wait_share": pytest.approx(5 / 2 / STEP_MS),
    }
    assert {kind: found.count for kind, found in run.kinds.items()} == {
        Kind("default_pg", "all_reduce", 1 << 20): 2 * (STEPS - 11),
        Kind("default_pg", "send", 128): STEPS - 11,
        Kind("default_pg", "recv", 128): STEPS - 11,
    }


def test_another_speed_amid_the_steps(tmp_path: Path) -> None:
    """Half of a run at another speed is no warm-up: it is compared, and one line in text and page has where the speed changed, and how."""
    found = compare(run_of(watched(tmp_path / "a", warm=40)), run_of(watched(tmp_path / "b", warm=10)))
    assert (found.a.steps, found.a.warm_up, found.b.steps, found.b.warm_up) == (STEPS, 0, STEPS - 10, 10)
    assert found.a.shift is not None
    assert (found.a.shift.before_s, found.a.shift.after_s) == pytest.approx((0.2, 0.1))
    assert found.b.shift is None
    says = f"The speed of A changed at about step {found.a.shift.at}, from 200 ms to 100 ms: that is no warm-up"
    assert found.a.shift.at in {40, 41}
    assert " ".join(text(found).split()).count("The speed of") == html(found).count("The speed of") == 1
    assert says in " ".join(text(found).split())
    assert says in html(found)
    assert json.loads(as_json(found))["a"]["shift"]["at"] == found.a.shift.at


def test_left_out_of_one(tmp_path: Path) -> None:
    """Operations that a run has only in what was left out of it are not called only in the other one."""
    cut, whole = (run_of(watched(tmp_path / str(warm), warm=warm, first=1, greets=True)) for warm in (10, 0))
    without = run_of(watched(tmp_path / "without"))
    start = Kind("default_pg", "broadcast", 4096)
    assert (start in cut.kinds, start in whole.kinds, cut.left_out, whole.left_out) == (False, True, {start: 2}, {})
    few = replace(cut, left_out={start: 1})  # the other one has more of them
    found = (compare(whole, other).kinds for other in (cut, without, few))
    assert [[each.op for each in kinds if not each.count_b] for kinds in found] == [[], ["broadcast"], ["broadcast"]]


def test_settings(tmp_path: Path) -> None:
    """What the history keeps of a run is there, and a comparison has what differs."""
    one = run_of(watched(tmp_path / "a", torch="2.13.0", nccl="2.27.3", budget=0.02))
    other = run_of(watched(tmp_path / "b", torch="2.14.1", nccl="2.27.3", hook="native", budget=0.02))
    assert one.settings == {
        "world size": "2", "ranks on this node": "0-1", "host": "host", "PyTorch": "2.13.0", "NCCL": "2.27.3", "hook": "python",
        "COMMWATCH_BUDGET": "0.02", "process groups": "default_pg of 2 (gloo)", "all_reduce in default_pg, each step": "1 × 1 MiB",
        "recv in default_pg, each step": "1 × 100 B", "send in default_pg, each step": "1 × 100 B",
    }  # fmt: skip
    assert compare(one, other).settings == {"PyTorch": ("2.13.0", "2.14.1"), "hook": ("python", "native")}


def test_latest_run_only(tmp_path: Path) -> None:
    """Of jobs that share a name, only the latest is compared."""
    watch = watched(tmp_path)
    later = 10_000 * STEP_MS * MS
    records = [mark(n, later + 30 * MS * n) for n in range(60)]
    write_ring(watch.rings, records, job="job", rank=0, restart=1, started_ns=later)
    watch.tick(later + 2000 * MS)
    run = run_of(watch)
    assert (run.steps, run.kinds) == (59, {})
    assert run.durations.values == pytest.approx(0.03)


def test_operations_only_counted(tmp_path: Path) -> None:
    """If the probe has only counted operations, the comparison has no waiting."""
    watch = watched(tmp_path)
    assert "wait_share" in run_of(watch).shares
    other = Watch(tmp_path / "counted")
    counted = operation(start_ns=0, end_ns=5 * MS, waited_us=7, timing=ev.COUNTED)
    for rank in range(2):
        marks = [mark(n, STEP_MS * MS * n) for n in range(60)]
        write_ring(other.rings, [*marks, counted, operation(start_ns=205 * MS, end_ns=210 * MS)], rank=rank)
    other.tick(6000 * MS)
    assert "wait_share" not in run_of(other).shares


def test_too_few_steps(tmp_path: Path) -> None:
    """A job with too few steps has its values but no interval, and the comparison names it."""
    many = run_of(watched(tmp_path / "many"))
    few = Watch(tmp_path / "few")
    write_ring(few.rings, [mark(n, STEP_MS * MS * n) for n in range(20)], job="few")
    few.tick(2000 * MS)
    found = compare(many, run_of(few, "few"))
    assert found.too_few == f"too few steps without warm-up and long ones (job few: 19); {LEAST_STEPS} are needed"
    step = found.figures[0]
    assert step.b == pytest.approx(0.1)
    assert step.change == pytest.approx(0)
    assert (step.low, step.high, step.differs) == (None, None, None)


def test_job_without_steps(tmp_path: Path) -> None:
    """Operations of jobs without steps are compared, in blocks of equal time."""
    watch = Watch(tmp_path)
    records = [operation(start_ns=20 * n * MS, end_ns=(20 * n + 5) * MS, seq=n) for n in range(200)]
    write_ring(watch.rings, records)
    watch.tick(4000 * MS)
    run = run_of(watch)
    (kind,) = compare(run, run).kinds
    assert (kind.count_a, kind.p50.differs, kind.busbw.change) == (200, False, 0)
    assert not any("each step" in name for name in run.settings)


def test_job_without_records(tmp_path: Path) -> None:
    """A job that has recorded nothing yet can be compared: all is unknown."""
    watch = Watch(tmp_path)
    write_ring(watch.rings, [], job="job")
    watch.tick()
    found = compare(run_of(watch), run_of(watch))
    assert {(each.a, each.b, each.change) for each in found.figures} == {(None, None, None)}
    assert found.kinds == []


def test_numbers_go_on(tmp_path: Path) -> None:
    """A run is the same to a comparison where the numbers of its steps and operations go on at 0 in the middle."""
    (tmp_path / "plain").mkdir()
    plain, moved = (
        run_of(watched(directory, warm=10, long=50, first=first))
        for directory, first in ((tmp_path / "plain", 0), (tmp_path / "moved", NUMBERS - 30))
    )
    assert (moved.steps, moved.warm_up, moved.long) == (plain.steps, plain.warm_up, plain.long) == (STEPS - 11, 10, 1)
    assert {name: ratio(sums) for name, sums in moved.shares.items()} == {
        name: pytest.approx(ratio(sums)) for name, sums in plain.shares.items()
    }
    assert {kind: found.count for kind, found in moved.kinds.items()} == {
        kind: found.count for kind, found in plain.kinds.items()
    }


def test_steps_of_different_work() -> None:
    """Where ranks send more in a step, it may hold more work, which one line tells; buckets of another size with as many bytes do not show that."""
    kind = Kind("default_pg", "all_reduce", 1 << 20)

    def run(times: int, size: int) -> Run:
        found = KindSamples(2 * 50 * times, 2, Samples(np.ones(0), np.zeros(0, np.int64)), SUMS, {size: 2 * 50 * times})
        return Run(JOB, 50, 0, 0, found.durations, SUMS, {}, {kind: found}, {})

    found = compare(run(1, 1 << 20), run(4, 1 << 20))
    assert found.work.startswith(
        "A step of A has 1 operations with 1 MiB per rank, one of B 4 operations with 4 MiB: they may hold"
    )
    assert found.work in " ".join(text(found).split())
    assert compare(run(1, 1 << 20), run(4, 1 << 18)).work == ""


@pytest.mark.parametrize(("a", "b", "says"), [(0.02, 0.31, "+29 points, of the last half minute"), (None, 0.3, "–")])
def test_waiting_for_a_core(a: float | None, b: float | None, says: str) -> None:
    """The share of time for which main threads waited for a core is a figure where it is known."""
    one, other = (
        Run(JOB, 0, 0, 0, Samples(np.ones(0), np.zeros(0, np.int64)), SUMS, {}, {}, {}, core_wait=share)
        for share in (a, b)
    )
    found = compare(one, other).figures[-1]
    assert (found.name, found.a, found.b, says_of(found)) == ("core_wait", a, b, says)
    assert [
        each.name
        for each in compare(replace(one, core_wait=None), replace(other, core_wait=None)).figures
        if each.name == "core_wait"
    ] == []
