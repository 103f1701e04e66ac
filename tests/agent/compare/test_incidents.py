"""Incidents of two runs: which are the same, and which are new, gone, or cost more."""

from __future__ import annotations

from dataclasses import replace

import pytest

from commwatch_agent.compare.comparison import Comparison, Side
from commwatch_agent.compare.gate import parse
from commwatch_agent.compare.incidents import (
    BETTER,
    GONE,
    NEW,
    SAME,
    WORSE,
    IncidentChange,
    IncidentSums,
    changes_of,
)
from commwatch_agent.compare.pages import headline, html, incidents_that_differ, text
from commwatch_agent.incidents.incident import Incident
from tests.agent.compare.test_conditions import STEP
from tests.agent.report.test_job_list import JOB

HOUR_S = 3600.0


def incident(
    kind: str = "straggler", cost: float | None = 600.0, *, at: float = 100.0, lasts_s: float = 60.0, **about: object
) -> Incident:
    """An incident of rank 2, which has ended."""
    one = Incident(
        f"{kind}-{at}", kind, "warning", "ended", "job", "run", ("2",), at, at, at + lasts_s, at + lasts_s,
        cause="late", says=f"{kind} says", ranks=(2,), cost_rank_s=cost,
    )  # fmt: skip
    return replace(one, **about)  # type: ignore[arg-type]


def changes(a: list[Incident], b: list[Incident], hours_a: float = 1.0, hours_b: float = 1.0) -> list[IncidentChange]:
    """How they differ, in runs of so many hours."""
    of_a, of_b = (replace(JOB, started_at=0.0, last_seen_at=hours * HOUR_S) for hours in (hours_a, hours_b))
    return changes_of((of_a, a), (of_b, b))


def words(a: list[Incident], b: list[Incident], hours_a: float = 1.0, hours_b: float = 1.0) -> list[tuple[str, str]]:
    """Each title, and how the incident differs."""
    return [(each.title, each.change) for each in changes(a, b, hours_a, hours_b)]


def test_new_and_gone() -> None:
    """A late rank that is gone is an improvement, and a new hang is a regression, which comes first."""
    found = changes([incident()], [incident("hang", cause="stopped", severity="critical")])
    assert [(each.title, each.change, each.is_regression) for each in found] == [
        ("Hang: rank 2", NEW, True),
        ("Late rank: rank 2", GONE, False),
    ]
    comparison = Comparison(Side(JOB, 0, 0, 0), Side(JOB, 0, 0, 0), [], "", [], {}, found)
    assert parse("incidents").is_met(comparison) is True
    assert parse(" incidents ").is_met(replace(comparison, incidents=found[1:])) is False


@pytest.mark.parametrize(
    ("cost", "hours", "change"),
    [
        (600.0, 1.0, SAME),
        (700.0, 1.0, SAME),
        (900.0, 1.0, WORSE),
        (300.0, 1.0, BETTER),
        # Twice the cost in a run of twice the length is the same; the same cost in a run of half the length is worse.
        (1200.0, 2.0, SAME),
        (600.0, 0.5, WORSE),
    ],
)
def test_cost_per_hour(cost: float, hours: float, change: str) -> None:
    """Costs are compared per hour of the run, and small changes do not count."""
    assert words([incident()], [incident(cost=cost)], hours_b=hours) == [("Late rank: rank 2", change)]


def test_unknown_cost() -> None:
    """Incidents whose cost is not known are compared by the share of the run while they lasted."""
    short, long = (incident("gpu_fault", None, lasts_s=lasts_s) for lasts_s in (60.0, 600.0))
    assert words([short], [long]) == [(changes([short], [])[0].title, WORSE)]
    assert words([long], [long], hours_b=2.0)[0][1] == BETTER
    assert changes([], [long])[0].b == IncidentSums(1, None, 600 / HOUR_S)


def test_run_that_hangs_at_its_end() -> None:
    """A run lasts at least as long as its incidents: ranks that hang record nothing more."""
    (found,) = changes([], [incident("hang", 60.0, at=0.0, lasts_s=HOUR_S)], hours_b=0.1)
    assert found.b == IncidentSums(1, 60.0, 1.0)


def test_which_are_the_same() -> None:
    """Incidents are the same by kind and ranks, or by group if no rank is known; their ids and how often they come do not matter."""
    assert words([incident()], [incident(cost=300.0), incident(cost=300.0, at=900.0)]) == [("Late rank: rank 2", SAME)]
    assert [change for _, change in words([incident()], [incident(ranks=(3,))])] == [NEW, GONE]
    assert words([incident(group="dp")], [incident(group="tp")]) == [("Late rank: rank 2", SAME)]
    slow = [incident("bandwidth_low", ranks=(), group=group) for group in ("dp", "tp")]
    assert [change for _, change in words(slow[:1], slow)] == [NEW, SAME]
    assert words([], slow[1:])[0][0].endswith(" in tp")


@pytest.mark.parametrize("kind", ["stalled", "hang", "waiting", "init_incomplete"])
def test_waits_for_one_rank(kind: str) -> None:
    """Waits for the same ranks are the same, whatever the ranks did at the moment of the look, and in which operation the others waited."""
    before, after = incident(kind, cause="not_joined", op="all_reduce"), incident(kind, cause="silent", op="barrier")
    assert [change for _, change in words([before], [after])] == [SAME]
    assert len(changes([before, after], [])) == 1


def test_two_causes() -> None:
    """Faults of other kinds that differ in their cause are not the same, and where their titles are equal, these have the cause."""
    before, after = (incident("desync", cause=cause) for cause in ("sizes", "one_of"))
    found = changes([before, incident("rank_lost", cause="dead")], [after])
    assert incidents_that_differ(found) == [
        "new: Ranks disagree: rank 2 (one of)",
        "no longer: Rank died: rank 2, Ranks disagree: rank 2 (sizes)",
    ]


def test_consequences() -> None:
    """What another incident explains is not listed: it changes with its cause."""
    assert words([incident()], [incident(), incident("comm_bound", consequence_of="x")]) == [
        ("Late rank: rank 2", SAME)
    ]


def test_moments() -> None:
    """How long a rank has been lost means nothing, so a run that loses it, too, is about the same."""
    short, long = (incident("rank_lost", None, lasts_s=lasts_s) for lasts_s in (10.0, 600.0))
    (found,) = changes([short], [long])
    assert (found.change, found.b) == (SAME, IncidentSums(1, None, None))


def test_information_only() -> None:
    """A new wait that is for information only is no regression, and not in the headline."""
    (found,) = changes([], [incident("waiting", severity="info")])
    assert (found.change, found.is_regression) == (NEW, False)
    assert incidents_that_differ([found]) == []


def test_in_words() -> None:
    """The headline names what differs, and text and page have each incident with its costs and its sentence."""
    many = [incident("rank_lost", ranks=(rank,)) for rank in range(4)]
    figure = replace(STEP, change=None)
    found = Comparison(
        Side(JOB, 9, 0, 0), Side(JOB, 9, 0, 0), [figure], "too few steps", [], {}, changes([incident()], many)
    )
    assert headline(found).endswith(
        "; new: Rank died: rank 0, Rank died: rank 1, Rank died: rank 2 and 1 more; no longer: Late rank: rank 2"
    )
    lines = text(found, 200).splitlines()
    (row,) = (line for line in lines if line.startswith("  Late rank: rank 2 "))
    assert row.split()[4:] == ["no", "longer", *["1", "×,", "10m00s", "of", "rank", "time", "per", "hour", "–"]]
    assert "  Late rank: rank 2: straggler says" in lines
    assert "<h2>Incidents</h2>" in html(found)
    assert "straggler says" in html(found)
