"""Waits that the end of their job cuts off: which are certain, so that a message on them does not wait."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from commwatch_agent.analysis.verdict import Verdict
from commwatch_agent.incidents.alerts import alerts_of
from commwatch_agent.incidents.conclude import conclude
from commwatch_agent.incidents.evidence import Evidence
from commwatch_agent.incidents.incident import Incident
from commwatch_agent.incidents.lifecycle import Around
from commwatch_agent.model.views import Failed, RankView
from commwatch_alerts.model import FIRING
from tests.agent.incidents.test_job_rules import GROUP, HANG, JOBS, NOW, TABLE, rank

STALL = replace(HANG, kind="stalled", cause="not_joined", says="rank 1 has not joined; it is alive")
TIMED_OUT = "[buffer.cc:78] Timed out waiting 12000ms for recv operation to complete"
INSIDE = Failed("all_reduce", "g", 7, None, None, 0.5, is_latest=True)


def killed(number: int, **about: Any) -> RankView:
    about = {"last_seq": {"g": 6}, "failed": [INSIDE] * (number != 1), **about}
    return rank(number, "gone", ended_at=NOW + 0.6, ended_after=NOW + 0.5, **about)


def raised(number: int, words: str) -> RankView:
    view = replace(killed(number, failed=[INSIDE]), state="ended", raised="RuntimeError", raised_says=words)
    return replace(view, failed_in_operation=True, ended_at=NOW + 0.2, ended_after=NOW + 0.2)


def cut(verdict: Verdict, *views: RankView, after: float = 1.0) -> list[Incident]:
    """The incidents of a job that ends so long after a verdict on it was last found."""
    known = conclude(Evidence(NOW, JOBS, [verdict], groups=[GROUP]), [], TABLE, Around(NOW))
    over = {"train": JOBS["train"]._replace(ended=True)}
    evidence = Evidence(NOW + after, over, ranks=views, groups=[GROUP])
    return conclude(evidence, known, TABLE, Around(NOW + after, ended_runs={"key"}))


def fired(incidents: list[Incident]) -> list[tuple[str, str | None]]:
    """Names and ranks of the alerts that are to be delivered."""
    found = [alert for each in incidents for alert in alerts_of(each) if alert.state == FIRING]
    return [(alert.name, alert.labels.get("rank")) for alert in found]


def test_job_that_fails_in_a_hang() -> None:
    """A hang in which its job fails, after seconds or by a user, has its message with the culprit at once."""
    found = cut(HANG, *map(killed, range(4)))
    assert fired(found) == [("CollectiveHang", "1")]
    (hang,) = (each for each in found if each.kind == "hang")
    assert (hang.state, hang.outcome, hang.severity, hang.ranks) == ("ended", "job_ended", "critical", (1,))
    again = conclude(
        Evidence(NOW + 2, {"train": JOBS["train"]._replace(ended=True)}, ranks=[killed(each) for each in range(4)]),
        found,
        TABLE,
        Around(NOW + 2, ended_runs={"key"}),
    )
    assert [each.alerts for each in again if each.kind == "hang"] == [hang.alerts]


def test_wait_that_times_out() -> None:
    """A stall whose waiters time out is a hang, with a message on its culprit; that they ended follows from it."""
    found = cut(STALL, raised(0, TIMED_OUT), killed(1), raised(2, TIMED_OUT), raised(3, TIMED_OUT))
    assert ("CollectiveHang", "1") in fired(found)
    (hang,) = (each for each in found if each.kind == "hang")
    assert (hang.cause, hang.ranks, hang.state) == ("not_joined", (1,), "ended")
    assert {each.consequence_of for each in found if each is not hang} <= {hang.id}


@pytest.mark.parametrize(
    ("verdict", "views", "after"),
    [
        (STALL, [killed(each) for each in range(4)], 1.0),
        (STALL, [raised(0, "Connection closed by peer"), *(killed(each) for each in (1, 2, 3))], 1.0),
        (HANG, [replace(killed(each), last_seq={"g": 7}, failed=[]) for each in range(4)], 1.0),
        (HANG, [replace(killed(each), state="ended") for each in range(4)], 1.0),
        (HANG, [killed(each) for each in range(4)], 4.0),
    ],
    ids=["killed in a stall", "a peer was lost", "it had ended well", "all ended well", "it had ended before"],
)
def test_waits_that_are_not_certain(verdict: Verdict, views: list[RankView], after: float) -> None:
    """A wait whose culprit may have come, or that had ended before its job, has no message."""
    assert not [each for each in fired(cut(verdict, *views, after=after)) if each[0] != "RankLost"]
