"""Incidents in words: each kind and cause has a title and a remedy; times, costs and places are those of the incident."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from commwatch_agent.commands.diagnosis import Diagnosis, text
from commwatch_agent.incidents.answers import details_of, view_of
from commwatch_agent.incidents.incident import JOB_ENDED, RECOVERED, EvidenceItem, Incident
from commwatch_agent.incidents.words import cost, end, no_place, stacks, title, what_to_do, when
from commwatch_agent.report.incident_page import incident_page
from commwatch_agent.report.what_happened import happened, html, lines
from commwatch_agent.text.units import time_of_day
from commwatch_alerts.catalogue import read, shipped
from commwatch_alerts.remedies import TITLES, remedy
from tests.agent.commands.test_diagnosis import ENDED as JOB

AT = 1_700_000_000.0


def incident(
    kind: str = "hang",
    cause: str = "stopped",
    ended_at: float | None = None,
    outcome: str | None = None,
    cost_rank_s: float | None = None,
    evidence: tuple[EvidenceItem, ...] = (),
) -> Incident:
    """An incident of rank 2 that began at ``AT``, and was last seen 60 s later."""
    return Incident(
        "1", kind, "critical", "open", "train", "run", ("2",), AT, AT + 10, AT + 60,
        cause=cause, ranks=(2,), ended_at=ended_at, outcome=outcome, cost_rank_s=cost_rank_s, evidence=evidence,
    )  # fmt: skip


def test_every_kind() -> None:
    """Each kind of the table has a title, and each but those of several causes a remedy whatever its cause."""
    kinds = read(shipped("rules.yaml")).kinds
    assert set(TITLES) == set(kinds)
    assert [kind for kind in kinds if not remedy(kind, "", {})] == ["desync"]


@pytest.mark.parametrize("cause", ["ops", "root", "sizes", "order"])
def test_disagreements(cause: str) -> None:
    """Each cause of a disagreement has its own remedy."""
    assert remedy("desync", cause, {})


@pytest.mark.parametrize(
    ("about", "text"),
    [({"pid": "71"}, ", and let it continue: `kill -CONT 71`."), ({}, "an administrator).")],
)
def test_names_are_filled_in(about: Mapping[str, str], text: str) -> None:
    """A remedy has the process that it is about, and no clause on one that is not known."""
    assert remedy("hang", "stopped", about).endswith(text)


def test_stacks_without_a_place() -> None:
    """Where stacks of a late rank show no place of its own, report and diagnosis say that; a known place, or what a stack needs, counts instead."""
    alike = EvidenceItem(
        "stack",
        AT,
        "in 98 samples, rank 2 spent no more of its time at any place than another rank",
        {"rank": 2, "pid": 71},
    )
    known = EvidenceItem("stack", AT, "rank 2 was in load", {"rank": 2, "place": "load (a.py:1)"})
    needs = EvidenceItem("stack", AT, "no stack", {"rank": 2, "needs": "install py-spy"})
    assert [no_place(each) for each in ((alike,), (alike, known), (needs,), ())] == [alike.text, "", "", ""]
    one = details_of(incident("straggler", "late", evidence=(alike,)))
    assert alike.text in text(Diagnosis(incidents=[one], ended=JOB), [], [], "commwatch diagnose")
    assert alike.text in "\n".join(lines(happened([one]), 200, failed=False))


def test_late_for_a_reason() -> None:
    """What to do about a late rank depends on the reason; without one, it is to look at its code."""
    assert what_to_do("straggler", "no_core", "j", [], is_over=False).startswith("Give that rank a core of its own")
    assert what_to_do("straggler", "late", "j", [], is_over=False).startswith("Look at what that rank does")


def test_when_and_cost() -> None:
    """An open incident has the time so far, or since when it was not seen; an ended one its length, and whether its job ended with it; no cost is no text."""
    assert when(incident()).endswith(", for 60.0 s so far")
    unseen = when(replace(incident(), holds=False))
    assert unseen.partition(", ")[2] == f"for 60.0 s; not seen since {time_of_day(AT + 60)}"
    assert when(incident(ended_at=AT + 30, outcome=RECOVERED)).endswith(f", for 30.0 s, until {time_of_day(AT + 30)}")
    assert when(incident(ended_at=AT + 30, outcome=JOB_ENDED)).endswith(", until the job ended")
    assert [end(each) for each in (incident(), incident(ended_at=AT + 30, outcome=RECOVERED))] == [
        "",
        "Recovered after 30.0 s.",
    ]
    over: Any = {"ended_at": AT + 30, "outcome": JOB_ENDED}
    assert end(incident(**over)) == "It lasted until the job ended, for 30.0 s."
    assert end(incident("rank_lost", "died", **over)) == "All ranks of the job ended with it."
    assert (cost(incident()), cost(incident(cost_rank_s=240.0))) == ("", "4m00s of rank time")


def test_view() -> None:
    """A view has title, place and remedy of its incident, with what its evidence knows of the culprit."""
    raised = EvidenceItem("ending", AT, "rank 2 ended", {"rank": 2, "at": "load (train.py:88)", "pid": 71})
    taken = EvidenceItem("stack", AT, "rank 2 is in wait (a.py:1)", {"rank": 2, "place": "wait (a.py:1)", "stack": "s"})
    view = view_of(incident("rank_lost", "exception", evidence=(taken, raised)))
    assert (view.title, view.place) == ("Rank died: rank 2", "load (train.py:88)")
    assert "in load (train.py:88)" in view.remedy
    typed = replace(raised, data={**raised.data, "raised": "KeyError"})
    assert view_of(incident("rank_lost", "exception", evidence=(taken, typed))).title == "Rank raised KeyError: rank 2"
    assert view_of(incident("rank_lost", "interrupted", evidence=(typed,))).title == "Interrupted: rank 2"
    assert details_of(incident(evidence=(taken,))).place == "wait (a.py:1)"
    process = EvidenceItem("process", AT, "rank 2", {"rank": 2, "pid": 71})
    assert "kill -CONT 71" in view_of(incident(evidence=(process,))).remedy
    assert "kill" not in view_of(incident(ended_at=AT + 60, evidence=(process,))).remedy
    told = tuple(EvidenceItem("nccl_log", AT, "", {"do": do} if do else {"line": 4}) for do in ("before", "now", ""))
    assert view_of(incident("nccl_fault", "", evidence=told)).remedy == "now"
    assert (stacks((raised, taken), "hang"), stacks((raised,), "hang")) == ([(2, "s")], [])
    assert title("unheard_of", ()) == "unheard_of"


def test_both_sides_of_a_disagreement() -> None:
    """Where ranks disagree, each side has its place and its stack in all views; ranks at one place have it once."""

    def at(rank: int, place: str) -> EvidenceItem:
        stack = f'Thread {rank}: "MainThread"\n    {place}\n'
        return EvidenceItem("stack", AT, "", {"rank": rank, "place": place, "stack": stack})

    first, second, third = at(1, "test (train.py:12)"), at(0, "step (train.py:88)"), at(3, "step (train.py:88)")
    one = details_of(incident("desync", "ops", evidence=(first, second, third)))
    assert one.place == "step (train.py:88) on ranks 0, 3 and test (train.py:12) on rank 1"
    assert stacks(one.evidence, "desync") == [(0, second.data["stack"]), (1, first.data["stack"])]
    report, diagnosed = (
        "\n".join(lines(happened([one]), 200, failed=True)),
        text(Diagnosis(incidents=[one], ended=JOB), [], [], "commwatch diagnose"),
    )
    for shown in (report, diagnosed):
        assert one.place in shown
        assert shown.index("Python stack of rank 0") < shown.index("Python stack of rank 1")
    (page,) = [part for part in html(happened([one]), failed=True) if "Python stack of rank 1" in part]
    assert "test (train.py:12)" in page
    raised = EvidenceItem("ending", AT, "", {"rank": 1, "at": "loss (train.py:40)"})
    assert details_of(incident("desync", "ops", evidence=(first, raised))).place == "loss (train.py:40) on rank 1"


def test_missing_stack() -> None:
    """Where no stack of a culprit could be taken, what to do names what to install, in all views; not where the place is known."""
    needs = "install py-spy beside the agent"
    missing = EvidenceItem("stack", AT, "rank 2: no Python stack", {"rank": 2, "pid": 71, "needs": needs})
    raised = EvidenceItem("ending", AT, "rank 2 ended", {"rank": 2, "at": "load (train.py:88)"})
    says = f"No Python stack of rank 2: {needs}."
    ended = incident("stalled", "not_joined", AT + 60, JOB_ENDED, evidence=(missing,))
    assert view_of(incident(evidence=(missing,))).remedy.endswith(says)
    assert view_of(ended).remedy.endswith(says)
    assert says in "\n".join(lines(happened([details_of(ended)]), 1000, failed=True))
    assert says in text(Diagnosis(incidents=[details_of(ended)], ended=JOB), [], (), "commwatch diagnose")
    assert says in incident_page(view_of(ended), (), None, (), ())
    assert needs not in view_of(incident(evidence=(missing, raised))).remedy
    assert needs not in view_of(incident()).remedy
