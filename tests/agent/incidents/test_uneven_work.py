"""Uneven work: information after five minutes, only while ranks wait for no known reason, and the cause of the communication share that follows from it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

import pytest

from commwatch_agent.analysis.verdict import Verdict
from commwatch_agent.analysis.waits.uneven_work import StepWaits
from commwatch_agent.incidents.conclude import conclude
from commwatch_agent.incidents.evidence import Evidence, WholeJob
from commwatch_agent.incidents.incident import REASONS_TO_WAIT, Condition, Incident
from commwatch_agent.incidents.lifecycle import Around
from commwatch_agent.model.views import RankView
from tests.agent.incidents.metric_series import windows
from tests.agent.incidents.test_job_rules import GROUP, HANG, JOBS, NOW, TABLE, rank
from tests.alerts.cases import share

UNEVEN = StepWaits(dict.fromkeys(range(4), 0.2), 0.05, 0.25)
LATE = replace(HANG, kind="straggler", cause="late", seq=None, cost_share=0.3, since_s=10.0)


def after(
    known: Iterable[Incident],
    at_s: float,
    waits: StepWaits | None = UNEVEN,
    *verdicts: Verdict,
    ranks: Iterable[RankView] = (),
    elsewhere: Iterable[Condition] = (),
) -> list[Incident]:
    """The incidents some seconds later."""
    found: Mapping[str, StepWaits] = {} if waits is None else {"train": waits}
    whole = {"train": WholeJob(list(elsewhere), ended=False)} if elsewhere else {}
    evidence = Evidence(NOW + at_s, JOBS, verdicts, list(ranks), [GROUP], found, whole=whole)
    return conclude(evidence, known, TABLE, Around(NOW + at_s, common={"key": "common"}))


def lasting(until_s: int, known: Iterable[Incident] = (), since_s: int = 0) -> list[Incident]:
    """The incidents after so many seconds of uneven work."""
    found = list(known)
    for at_s in range(since_s, until_s + 1, 10):
        found = after(found, at_s)
    return found


def test_opens_after_five_minutes() -> None:
    """It is for information, about the job and no rank, and costs each rank its part of the time; nothing is sent."""
    assert [one.state for one in lasting(290)] == ["pending"]
    (one,) = lasting(300)
    assert (one.kind, one.severity, one.state, one.ranks, one.alerts) == ("uneven_work", "info", "open", (), ())
    assert one.says == "each rank waits for others 20% of its step time, and the late rank changes"
    assert one.share == pytest.approx(0.2)
    assert one.cost_rank_s == pytest.approx(4 * 0.2 * 300)
    (item,) = one.evidence
    assert item.text == "waiting takes 20% of the step time: mean of 4 ranks over a minute, transfers 5%"


def test_ends_five_minutes_later() -> None:
    """An even job ends it; a moment of even work does not."""
    known = after(lasting(300), 320, None)
    assert [one.state for one in known] == ["open"]
    (one,) = after(after(known, 330), 640, None)
    assert (one.state, one.outcome, one.ended_at) == ("ended", "recovered", NOW + 330)


@pytest.mark.parametrize("kind", sorted(REASONS_TO_WAIT))
def test_not_beside_a_known_reason(kind: str) -> None:
    """A late, missing or lost rank, a long wait or a slow link, on this node or another one, is why ranks wait: there is no uneven work beside it."""
    other = Condition(kind, ("1",), "something", NOW, job_id="train", run="key", ranks=(1,))
    assert {one.kind for one in after([], 0, UNEVEN, elsewhere=[other])} == {kind}
    known: list[Incident] = []
    for at_s in range(0, 400, 10):
        known = after(known, at_s, UNEVEN, elsewhere=[other] if at_s % 60 == 0 else [])
        assert not any(one.kind == "uneven_work" and one.state == "open" for one in known)


def test_not_beside_a_straggler() -> None:
    """While a straggler's incident is open, also between its verdicts, and after a rank of this node was lost, the work is not called uneven."""
    known = after([], 0, UNEVEN, LATE)
    assert [(one.kind, one.state) for one in after(known, 20)] == [("straggler", "open")]
    dead = rank(2, "gone", ended_at=NOW - 5)
    assert {one.kind for one in after([], 0, UNEVEN, ranks=[dead])} == {"rank_lost"}


def test_ends_when_a_reason_is_known() -> None:
    """A rank that becomes late all the time ends it at once: from then on the ranks wait for that one."""
    known = after(after(lasting(300), 310), 320, UNEVEN, LATE)
    by_kind = {one.kind: one for one in known}
    assert {kind: (one.state, one.outcome) for kind, one in by_kind.items()} == {
        "uneven_work": ("ended", "recovered"),
        "straggler": ("open", None),
    }
    assert by_kind["uneven_work"].ended_at == NOW + 310


@pytest.mark.parametrize(
    "waits",
    [
        StepWaits({}, None, None),
        StepWaits({0: 0.3}, 0.05, None),
        UNEVEN._replace(waits=dict.fromkeys(range(4), 0.09)),  # little
        UNEVEN._replace(
            waits={0: 0.3, 1: 0.3, 2: 0.3, 3: 0.01}
        ),  # one rank is late, though not by enough for a verdict
        UNEVEN._replace(transfer=0.2),  # long transfers
        UNEVEN._replace(exposed=0.05),  # hidden behind compute
        UNEVEN._replace(for_cores=0.2),  # too few cores
    ],
)
def test_other_jobs(waits: StepWaits) -> None:
    """Jobs that wait little, for one rank, for transfers, for cores, or at no cost have no such incident."""
    assert not after([], 0, waits)


def test_explains_the_share() -> None:
    """Of a communication share that is mostly such waiting, uneven work is the cause; of one that is mostly transfer, it is not."""
    for value, is_cause in ((0.35, True), (0.45, False)):
        known: list[Incident] = []
        for at_s, window in windows({name.replace('"j"', '"train"'): values for name, values in share(value).items()}):
            evidence = Evidence(NOW + at_s, JOBS, waits={"train": UNEVEN}, metrics=window)
            known = conclude(evidence, known, TABLE, Around(NOW + at_s))
        by_kind = {one.kind: one for one in known}
        assert set(by_kind) == {"uneven_work", "comm_bound"}
        assert (by_kind["comm_bound"].consequence_of == by_kind["uneven_work"].id) == is_cause


def test_one_id_on_all_nodes() -> None:
    """Each node of a job finds its part, and all of them have the id of one incident."""
    (here,) = lasting(300)
    other = Evidence(NOW, {"train": JOBS["train"]._replace(run="other key")}, waits={"train": UNEVEN})
    (there,) = conclude(other, [], TABLE, Around(NOW, common={"other key": "common"}, host="b"))
    assert here.id == there.id
