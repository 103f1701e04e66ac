"""The list of jobs: its figures are those of the reports, and its table fits the terminal."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from commwatch.core.terminal_text import width
from commwatch.core.views import JobFigures
from commwatch.report import report
from commwatch.report.job_list import job_figures, text
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
    assert lines[0].split() == ["job", "state", "began", "lasted", "ranks", "steps", "step", "p50", "comm", "exposed"]
    assert lines[1].split()[:2] == ["4242", "ended"]
    assert lines[1].split()[4:] == ["1h06m", "4/16", "123456", "123", "ms", "52", "%", "10", "%"]
    assert lines[2].split()[:2] == ([long_name] if cells == 80 else [long_name, "failed"])
    assert " ".join(line.strip() for line in lines[3:-1]).endswith(failed.ending)
    assert lines[-1].split()[-4:] == ["0", "–", "–", "–"]


def test_name_that_would_write_elsewhere() -> None:
    """Names of jobs cannot move the cursor, and a name with a line break stays one line."""
    lines = text([replace(JOB, job_id="a\x1b[2Jb\nc")], 80).split("\n")
    assert len(lines) == 2
    assert "\x1b" not in "".join(lines)
