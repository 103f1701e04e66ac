"""The report as text: it fits the terminal, and does not say the same twice."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from commwatch_agent.incidents.answers import IncidentDetails
from commwatch_agent.model.api_views import Advice
from commwatch_agent.report.report import LongSteps, Report, build
from commwatch_agent.report.report_text import reasons, text
from commwatch_agent.text.units import seconds
from tests.agent.report.test_what_happened import fault
from tests.helpers import MS, Watch, group_entry, mark, operation, write_ring


def late_job(directory: Path, *incidents: IncidentDetails) -> Report:
    """The report of two ranks of which one is late, with much transfer."""
    watch = Watch(directory)
    for rank in (0, 1):
        records = [mark(0, MS)]
        for n in range(60):
            end = (n + 1) * 100 * MS
            records += [
                operation(start_ns=end - (50 if rank else 80) * MS, end_ns=end, seq=n, size=1 << 22),
                mark(n + 1, end + MS, exposed_ns=60 * MS),
            ]
        write_ring(watch.rings, records, [group_entry(0, (0, 1), "data")], rank=rank, world_size=2)
    watch.tick(7000 * MS)
    built = build(watch.agent, "job", Path("history"), "again", incidents=incidents)
    assert built is not None
    return built


@pytest.mark.parametrize("cells", [40, 80, 120])
def test_fits_the_terminal(tmp_path: Path, cells: int) -> None:
    """No line is longer than the terminal is wide, and the rest of a long one is indented."""
    report = late_job(tmp_path)
    assert len(report.advice) > 1
    report = replace(report, hosts=[f"node-{n}.example" for n in range(30)])
    lines = text(report, cells).splitlines()
    assert max(map(len, lines)) <= cells
    assert all(line[:2] in ("", "  ", "co") for line in lines)


def test_one_figure_for_the_cost_of_a_late_rank(tmp_path: Path) -> None:
    """What a late rank costs is one figure, rounded alike, in its incident, headline and advice; an incident with more than all waiting is no part of that."""
    late = replace(fault("late", "straggler", severity="warning", cost_s=1.2345), ranks=[1])
    whole = text(late_job(tmp_path, late), 1000)
    assert whole.count("1.23 s") == 3
    assert "; cost 1.23 s of rank time\n" in whole
    assert "of waiting for late ranks (1.23 s for rank 1 by its incident)\n" in whole
    assert re.search(r"because the others wait \d+% of the time for rank 1, which cost 1.23 s of rank time", whole)
    more = text(late_job(tmp_path / "more", replace(late, cost_rank_s=99.0)), 1000)
    assert more.count(seconds(99.0)) == 2
    assert "by its incident" not in more


def test_long_steps(tmp_path: Path) -> None:
    """A long step may be shorter than the p95, as it is compared with the steps near it; the line has that, and which figures leave it out."""
    report = replace(late_job(tmp_path), step_p95_s=0.0626, long_steps=LongSteps(1, 0.0476, 0.0476, 0, 19))
    (line,) = [each for each in text(report, 1000).splitlines() if each.startswith("  long steps")]
    assert line.split("  ")[-1] == (
        "1 on one rank, over three times as long as the steps near them, the longest 47.6 ms, number 19 of rank 0; "
        "not in the median, p95 and shares"
    )


def _advice(*because: str) -> Advice:
    return Advice("rule", "title", list(because), "do", "gain", 0.1)


def test_says_each_reason_once() -> None:
    """Figures that led to earlier advice, too, are not repeated."""
    found = reasons([_advice("a", "b"), _advice("a", "b", "c"), _advice("c"), _advice("d")])
    assert list(found) == ["a; b", "of the same figures as above; c", "of the same figures as above", "d"]
