"""Incidents as families: each consequence below its cause, and no wait below itself."""

from __future__ import annotations

from typing import Any

import pytest

from commwatch_agent.incidents.answers import IncidentView
from commwatch_agent.incidents.families import families, uncertain
from tests.agent.commands.test_top import NOW, incident

LATE = incident("straggler", 1, consequence_of="waiting(1,)")


def below(cause: str, **more: Any) -> list[tuple[int, str]]:
    """The consequences of a fault that is in operation 7 of a group: of a wait there, and of what this one explains."""
    fault = incident(cause, 1, seq=7)
    wait = incident("waiting", 1, seq=7, consequence_of=fault.id, **more)
    (family,) = families([fault, wait, LATE])
    return [(depth, each.kind) for depth, each in family.effects]


@pytest.mark.parametrize("cause", ["stalled", "hang"])
def test_no_consequence_of_itself(cause: str) -> None:
    """A long wait that became a stall or a hang is not listed as its consequence; what it explains is."""
    assert below(cause) == below(cause, began_at=NOW - 11.5, severity="info") == [(1, "straggler")]


@pytest.mark.parametrize(
    "more", [{"began_at": NOW - 10}, {"seq": 6}, {"op": "barrier"}, {"group_id": "g2"}, {"job_id": "other"}]
)
def test_another_wait(more: dict[str, Any]) -> None:
    """A wait that began at another time, or in another operation, is a consequence; so is any wait of another kind of fault."""
    fault = incident("hang", 1, seq=7)
    wait: IncidentView = incident("waiting", 1, consequence_of=fault.id, **{"seq": 7, **more})
    (family,) = families([fault, wait])
    assert family.effects == ((1, wait),)
    assert below("rank_lost") == [(1, "waiting"), (2, "straggler")]


def test_lost_rank() -> None:
    """Nor is it listed beside the hang that it became, where both follow from a lost rank."""
    lost = incident("rank_lost", 1)
    wait, hang = (incident(kind, 1, seq=7, consequence_of=lost.id) for kind in ("waiting", "hang"))
    (family,) = families([lost, wait, hang])
    assert family.effects == ((1, hang),)
    assert [family.cause for family in families([wait])] == [wait]


def test_uncertain() -> None:
    """Pending incidents that nothing explains are listed, but no share of a job that makes no progress."""
    pending = {"state": "pending"}
    share, late = incident("comm_bound", **pending), incident("straggler", 1, **pending)
    assert uncertain([share, late]) == [share, late]
    assert uncertain([share, late, incident("hang", 2)]) == [late]
    assert uncertain([share, incident("hang", 2, job_id="other")]) == [share]
    assert (
        uncertain([incident("hang", 2), incident("straggler", 1, **pending, consequence_of=incident("hang", 2).id)])
        == []
    )
