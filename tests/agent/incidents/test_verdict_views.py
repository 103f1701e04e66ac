"""Verdicts are views of incidents: with the fields of what was judged, while that holds, and each once over several nodes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import pytest

from commwatch_agent.analysis.verdict import Verdict
from commwatch_agent.incidents.answers import details_of, merged, whys_of
from commwatch_agent.incidents.conclude import conclude
from commwatch_agent.incidents.evidence import Evidence
from commwatch_agent.incidents.incident import Incident
from commwatch_agent.incidents.lifecycle import Around
from commwatch_agent.incidents.stored import incidents_of, row_of
from commwatch_agent.incidents.verdict_views import merged_verdicts, verdicts_of
from tests.agent.incidents.test_job_rules import GROUP, HANG, JOBS, NOW, TABLE

LATE = replace(
    HANG, kind="straggler", cause="late", seq=None, op="", since_s=30.0, says="straggler: rank 1 is late by 40 ms", cost_share=0.3,
    why="it computes longer", why_code="computes",
)  # fmt: skip
WEIGHTS = replace(
    HANG,
    kind="corruption",
    cause="weights",
    seq=None,
    op="",
    says="corruption: rank 1 differs",
    parameter="0.weight",
    step=7,
)


def after(*looks: Iterable[Verdict], known: Iterable[Incident] = ()) -> list[Incident]:
    """The incidents after looks that found these verdicts, one second apart; the last one was at ``NOW``."""
    found = list(known)
    for number, verdicts in enumerate(looks, 1 - len(looks)):
        evidence = Evidence(NOW + number, JOBS, list(verdicts), groups=[GROUP])
        found = conclude(evidence, found, TABLE, Around(NOW + number))
    return found


@pytest.mark.parametrize(
    "verdict",
    [
        HANG,
        replace(HANG, kind="stalled", cause="not_joined"),
        LATE,
        replace(LATE, ago_s=4.0),
        WEIGHTS,
        replace(HANG, source="ras", seq=None),
    ],
)
def test_fields(verdict: Verdict) -> None:
    """A verdict comes back from its incident with all its fields, from the first look on, and also from one that was stored."""
    found = after([verdict])
    assert verdicts_of(found, NOW) == [verdict]
    assert verdicts_of(incidents_of(row_of(each, "") for each in found), NOW) == [verdict]
    assert verdicts_of(found, NOW, "train") == [verdict]
    assert verdicts_of(found, NOW, "other") == []


def test_where_it_is_late_now() -> None:
    """Of a rank that was late twice, the place is that of the incident whose reason counts, and none if that has none."""
    (now,) = after([LATE])
    (before,) = after([replace(LATE, why_code="no_core")])
    over = replace(
        details_of(before), id="before", state="ended", ended_at=NOW - 50, last_at=NOW - 50, place="a (x.py:1)"
    )
    for place in ("", "b (x.py:2)"):
        assert whys_of([over, replace(details_of(now), place=place)]).places == ({1: place} if place else {})


def test_why_it_is_late_now() -> None:
    """Of a rank that was late twice, the reason is that of the incident that is open, else of the last one, in whatever order they come."""
    (now,) = after([LATE])
    (before,) = after([replace(LATE, why_code="no_core")])
    over = replace(before, id="before", state="ended", ended_at=NOW - 50, until=NOW - 50)
    for open_one, reason in ((now, "computes"), (replace(now, state="ended", ended_at=NOW, last_at=NOW), "computes")):
        for order in ([over, open_one], [open_one, over]):
            assert whys_of(map(details_of, order)).late == {1: reason}


@pytest.mark.parametrize("code", ["computes", None])
def test_one_reason_at_a_time(code: str | None) -> None:
    """What to do, and the reason for the advice, are of the look that the sentence is from, whatever earlier looks found."""
    latest = replace(LATE, why_code=code)
    (incident,) = after([latest], [replace(LATE, why_code="no_core")], [latest])
    view = details_of(incident)
    assert view.why_code == (code or "")
    assert view.remedy == details_of(*after([latest])).remedy
    assert "a core of its own" not in view.remedy
    assert merged([[view], [view]])[0].remedy == view.remedy
    assert whys_of([view]).late == ({1: code} if code else {})


def test_only_while_it_holds() -> None:
    """A condition that is gone is no verdict, although its incident stays open for a while; waits that are no fault are none."""
    found = after([HANG], *[[]] * 5)
    assert [each.state for each in found] == ["open"]
    assert verdicts_of(found, NOW) == []
    assert verdicts_of(after([HANG], [HANG]), NOW + 60) == []
    assert verdicts_of(after([replace(HANG, kind="waiting")]), NOW) == []


def test_what_was_known_stays() -> None:
    """A verdict has what its incident knows: the culprit of a hang although another look sees only a stall, and its whole age."""
    stalled = replace(HANG, kind="stalled", cause="not_joined", ranks=[2], since_s=13.0)
    (verdict,) = verdicts_of(after([HANG], [stalled]), NOW)
    assert (verdict.kind, verdict.ranks, verdict.since_s) == ("hang", [1], 13.0)


def test_straggler_of_several_groups() -> None:
    """A rank that is late in several groups is one verdict, of the group in which it costs most."""
    other = replace(LATE, group_id="t", group="tp", cost_share=0.2)
    for order in ([LATE, other], [other, LATE]):
        assert [(each.group, each.cost_share) for each in verdicts_of(after(order), NOW)] == [("dp", 0.3)]


def test_several_nodes() -> None:
    """Each verdict counts once: of the agent that knows most. That one agent does not see a rank that another one sees is none."""
    unseen = replace(HANG, kind="stalled", cause="unseen", waiting=[0])
    assert merged_verdicts([[unseen], [HANG]], "train", [0, 2, 3]) == [HANG]
    assert merged_verdicts([[HANG], [unseen]], "here", [0, 2, 3]) == [replace(HANG, job_id="here")]
    assert merged_verdicts([[unseen], [unseen]], "train", [0, 2, 3]) == [unseen]
    assert merged_verdicts([[unseen], []], "train", [0, 1, 2, 3]) == []
    assert merged_verdicts([[HANG], [LATE]], "train", ()) == [LATE, HANG]
