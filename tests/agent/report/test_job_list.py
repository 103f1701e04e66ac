"""The list of jobs: its figures are those of the reports, and its table fits the terminal."""

from __future__ import annotations

import time
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from commwatch_agent.incidents.incident import JOB_ENDED, Incident
from commwatch_agent.incidents.stored import row_of
from commwatch_agent.job.packed import packed, unpacked
from commwatch_agent.model.cells import StepSums
from commwatch_agent.model.views import JobFigures, JobView
from commwatch_agent.questions import reports
from commwatch_agent.report import report
from commwatch_agent.report.job_figures import (
    Durations,
    FiguresPart,
    RankSteps,
    figures_of_nodes,
    figures_parts,
    job_figures,
)
from commwatch_agent.report.job_list import text
from commwatch_agent.report.report_text import heading
from commwatch_agent.text.terminal_text import width
from tests.agent.report.test_report_page import job_of
from tests.helpers import EPOCH_NS, MS, Watch, mark, write_ring

NAMES = ("duration_s", "steps", "step_p50_s", "comm_share", "exposed_share")
JOB = JobFigures(
    "4242", "ended", 16, [0, 1, 2, 3], 0, EPOCH_NS / 1e9, EPOCH_NS / 1e9 + 4000, 0, None,
    duration_s=4000.0, steps=123456, step_p50_s=0.1234, comm_share=0.523, exposed_share=0.1,
)  # fmt: skip


def figures_of_report(watch: Watch, job: str) -> tuple[object, ...]:
    """The same figures from the report."""
    built = report.build(watch.agent, job, watch.path, "")
    assert built is not None
    return tuple(getattr(built, name) for name in NAMES)


def test_figures_are_those_of_the_report(tmp_path: Path) -> None:
    """A job with late ranks has the figures of its report, to the last digit."""
    agent = job_of(tmp_path, 4, 13, range(4, 6))
    (job,) = job_figures(agent)
    built = report.build(agent, "job", tmp_path, "")
    assert built is not None
    assert built.step_p50_s is not None
    assert built.exposed_share is not None
    assert tuple(getattr(job, name) for name in NAMES) == pytest.approx(tuple(getattr(built, name) for name in NAMES))


def test_figures_without_long_steps_and_ranks_with_few(tmp_path: Path) -> None:
    """Long steps and the steps of a rank with fewer than three are counted and part of no figure, as in the report."""
    watch = Watch(tmp_path)
    usual = [mark(n, 100 * MS * n, exposed_ns=10 * MS) for n in range(10)]
    late = [mark(n, 900 * MS + 100 * MS * (n - 9) + 800 * MS, exposed_ns=0) for n in range(10, 14)]
    write_ring(watch.rings, usual + late, job="long", rank=0)
    write_ring(watch.rings, [mark(0, 0), mark(1, 700 * MS)], job="long", rank=1)
    write_ring(watch.rings, [], job="none", rank=0, started_ns=5000 * MS)
    watch.tick()
    first, job = job_figures(watch.agent)
    assert (first.job_id, first.steps, first.step_p50_s, first.comm_share) == ("none", 0, None, None)
    assert job.steps == 13
    assert job.step_p50_s == pytest.approx(0.1)
    assert tuple(getattr(job, name) for name in NAMES) == figures_of_report(watch, "long")
    assert [each.job_id for each in job_figures(watch.agent, 1)] == ["none"]


def test_how_it_ended_as_in_the_report(tmp_path: Path) -> None:
    """The list has the words of the report on how a job failed: the incident that ended it, on one node and on several."""
    watch = Watch(tmp_path)
    for rank in range(2):
        write_ring(watch.rings, [mark(n, 100 * MS * n) for n in range(5)], job="stuck", rank=rank).release()
    watch.tick()
    at, run = EPOCH_NS / 1e9, watch.agent.stored("stuck").key
    hang = Incident(
        "1", "hang", "critical", "ended", "stuck", run, ("1",), at, at, at + 9, at + 9, JOB_ENDED, says="rank 1 hangs", ranks=(1,)
    )  # fmt: skip
    watch.store.incident(row_of(hang, "/run"))
    watch.store.commit()
    own = reports.of_history(watch.agent, "stuck")
    how = dict(heading(reports.report(watch.agent, "stuck", own=own, last_s=60.0, command="")))["how"]
    assert how == "Hang: rank 1"
    assert [job.ending for job in job_figures(watch.agent)] == [how]
    assert [part.job.ending for part in figures_parts(watch.agent, 5, 100)] == [how]


@pytest.mark.parametrize("cells", [80, 132])
def test_table_fits(cells: int) -> None:
    """No line is wider than the terminal; names stay whole, those without space beside the figures on a line of their own."""
    long_name = "train_a_large_model-20261125-193159-be19"
    failed = replace(
        JOB, job_id=long_name, failed=True, ending="exit code 1; rank 2 died (no clean end) at 12:03:04, first of 4"
    )
    unknown = replace(JOB, job_id="new", state="running", steps=0, step_p50_s=None, comm_share=None, exposed_share=None)
    lines = text([JOB, failed, unknown], cells).split("\n")
    assert max(map(width, lines)) <= cells
    zone = time.strftime("%Z", time.localtime(JOB.started_at))
    assert " ".join(lines[0].split()) == f"job state began ({zone}) lasted ranks steps step p50 comm exposed"
    assert lines[1].split()[:2] == ["4242", "ended"]
    assert lines[1].split()[4:] == ["1h07m", "4/16", "123456", "123", "ms", "52%", "10%"]
    assert lines[2].split()[:2] == ([long_name] if cells == 80 else [long_name, "failed"])
    assert " ".join(line.strip() for line in lines[3:-1]).endswith(failed.ending)
    assert lines[-1].split()[-4:] == ["0", "–", "–", "–"]


def test_name_that_would_write_elsewhere() -> None:
    """Names of jobs cannot move the cursor, and a name with a line break stays one line."""
    lines = text([replace(JOB, job_id="a\x1b[2Jb\nc")], 80).split("\n")
    assert len(lines) == 2
    assert "\x1b" not in "".join(lines)


def node(restart: int, ranks: dict[int, list[int]], most: int = 100, job_id: str = "train") -> FiguresPart:
    """The part of a node, by the durations of its ranks' steps in ms; half of each is communication."""
    steps = [
        RankSteps(rank, restart, len(of), StepSums(len(of), len(of), sum(of) * MS, sum(of) * MS // 2, 0, 0, 0))
        for rank, of in ranks.items()
    ]
    every = sorted(MS * each for of in ranks.values() for each in of if len(of) >= 3)
    kept = every if len(every) <= most else every[:: -(-len(every) // most)]
    durations = [Durations(restart, len(every), packed(np.array(kept, np.int64)))] if every else []
    job = replace(JOB, job_id=job_id, ranks=sorted(ranks), restarts=restart)
    return FiguresPart(JobView(**{each.name: getattr(job, each.name) for each in fields(JobView)}), steps, durations)


def test_figures_of_nodes() -> None:
    """The figures of several nodes are those of all their steps together; ranks of an earlier life, or with few steps, are no part of them."""
    one, other = node(1, {0: [10, 20, 30], 1: [90, 90]}), node(1, {2: [40, 50, 60, 70]})
    earlier = node(0, {3: [500, 600, 700, 800, 900]})
    (job,) = figures_of_nodes([one, other, earlier], 5)
    assert (job.steps, job.step_p50_s, job.comm_share, job.exposed_share) == (4, 0.04, 0.5, None)
    assert job.ranks == [0, 1, 2, 3], "as merged_jobs has them"
    (job,) = figures_of_nodes([one], 5)
    assert job.step_p50_s == 0.02
    (job,) = figures_of_nodes([node(0, {0: [10, 20, 30, 40]})], 5)
    assert job.step_p50_s == 0.025, "the mean of the two in the middle"
    (job,) = figures_of_nodes([node(0, {0: [10, 20]})], 5)
    assert (job.steps, job.step_p50_s, job.comm_share) == (2, None, None)
    assert figures_of_nodes([], 5) == []
    jobs = [
        replace(part, job=replace(part.job, started_at=part.job.started_at + n)) for n, part in enumerate([one, other])
    ]
    named = [replace(part, job=replace(part.job, job_id=name)) for name, part in zip("ab", jobs, strict=True)]
    assert [job.job_id for job in figures_of_nodes(named, 5)] == ["b", "a"]
    assert [job.job_id for job in figures_of_nodes(named, 1)] == ["b"]


def test_few_of_many_durations() -> None:
    """Where a node sends only some of its durations, each counts for as many steps as it is one of."""
    many = node(0, {0: list(range(1000, 2000))}, most=50)
    few = node(0, {1: [10, 11, 12]})
    (job,) = figures_of_nodes([many, few], 5)
    assert job.step_p50_s == pytest.approx(1.5, rel=0.02)


def test_parts_of_a_node(tmp_path: Path) -> None:
    """The part of the only node gives its own figures, also where it sends only some of the durations."""
    agent = job_of(tmp_path, 4, 30, range(4, 6))
    (expected,) = job_figures(agent)
    assert figures_of_nodes(figures_parts(agent, 5, 1000), 5) == [expected]
    (part,) = figures_parts(agent, 5, 15)
    assert [len(unpacked(each.sorted_ns, 1000)) for each in part.durations] == [15]
    (thin,) = figures_of_nodes([part], 5)
    assert thin.step_p50_s == pytest.approx(expected.step_p50_s, rel=0.1)
    assert replace(thin, step_p50_s=None) == replace(expected, step_p50_s=None)


@pytest.mark.parametrize("wrong", [{"number": 2}, {"sorted_ns": "?"}, {"sorted_ns": packed(np.array([], np.int64))}])
def test_wrong_durations(wrong: dict[str, Any]) -> None:
    """What no agent sends is refused: more durations than steps, and none."""
    good: dict[str, Any] = {"restart": 0, "number": 3, "sorted_ns": packed(np.array([1, 2, 3], np.int64))}
    assert Durations(**good).number == 3
    with pytest.raises(ValueError, match=r"."):
        Durations(**{**good, **wrong})
