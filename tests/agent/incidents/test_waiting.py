"""Long waits that are no fault: information, one incident for all waits at one operation, and never in place of a known fault."""

from __future__ import annotations

from dataclasses import replace

from commwatch_agent.analysis.verdict import Verdict
from commwatch_agent.incidents.conclude import conclude
from commwatch_agent.incidents.evidence import Evidence
from commwatch_agent.incidents.incident import Incident
from commwatch_agent.incidents.lifecycle import Around
from tests.agent.incidents.test_job_rules import GROUP, JOBS, NOW, TABLE

WAITS = Verdict(
    "waiting", "not_joined", "train", "g", "dp", 7, "broadcast", [0], [1, 2, 3], 12.0, "waiting: rank 0 has not joined"
)
STALLED = replace(WAITS, kind="stalled", since_s=62.0, says="stalled: rank 0 has not joined")


def after(known: list[Incident], at_s: float, *verdicts: Verdict) -> list[Incident]:
    """The incidents some seconds later."""
    evidence = Evidence(NOW + at_s, JOBS, verdicts, groups=[GROUP])
    return conclude(evidence, known, TABLE, Around(NOW + at_s))


def test_information_only() -> None:
    """A wait that is no fault is an incident of severity info without an alert; its sentence leaves out what the title says."""
    (one,) = after([], 0, WAITS)
    assert (one.kind, one.severity, one.state, one.ranks) == ("waiting", "info", "open", (0,))
    assert one.says == "rank 0 has not joined"
    assert not one.alerts


def test_again_and_again() -> None:
    """Waits at one operation that follow each other are one incident, which costs the time of the waits and not that between them."""
    known: list[Incident] = []
    for cycle in range(4):
        for second in range(10, 20):
            again = replace(WAITS, seq=7 + cycle, since_s=float(second))
            known = after(known, 40 * cycle + second, again)
    (one,) = known
    assert one.state == "open"
    assert one.seq == 10
    assert one.cost_rank_s is not None
    assert round(one.cost_rank_s) == 4 * 19 * 3


def test_becomes_a_fault() -> None:
    """A wait that lasts too long is a stall of its own, which explains the information."""
    known = after(after([], 0, WAITS), 50, STALLED)
    stalled = next(one for one in known if one.kind == "stalled")
    assert stalled.severity == "warning"
    assert [one.consequence_of for one in known if one.kind == "waiting"] == [stalled.id]


def test_was_over_before_the_fault() -> None:
    """A wait that was over before a stall began in another operation is no consequence of it."""
    known = after(after([], 0, WAITS), 15, replace(STALLED, seq=9, since_s=4.0))
    assert {one.kind: one.consequence_of for one in known} == {"waiting": None, "stalled": None}


def test_fault_stays_a_fault() -> None:
    """An operation that was stalled is not called a wait again, whatever its missing rank does, or a new agent knows less."""
    (known,) = after([], 0, STALLED)
    for at_s in (10, 100, 200):
        (known,) = after([known], at_s, replace(WAITS, since_s=62.0 + at_s))
        assert (known.kind, known.state, known.last_at) == ("stalled", "open", NOW + at_s)
    assert {one.kind for one in after([known], 201, replace(WAITS, seq=8))} == {"stalled", "waiting"}


def test_end_of_the_job() -> None:
    """A wait that had ended before the job did has not lasted until then."""
    known = after([], 0, WAITS)
    around = Around(NOW + 30, ended_runs=["key"])
    (one,) = conclude(Evidence(NOW + 30, JOBS), known, TABLE, around)
    assert (one.outcome, one.ended_at) == ("recovered", NOW)
