"""A wait is long only for this job: what is a fault after seconds at one place is none for minutes at another."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from commwatch_agent.analysis.verdict import Verdict
from commwatch_agent.analysis.verdicts import verdicts
from commwatch_agent.analysis.waits.patience import NEW_S, WORKING_S, limit_s
from commwatch_agent.analysis.waits.wait_graph import HANG_S
from commwatch_agent.model.views import RankView, Usual
from commwatch_collectors.node.judged_activity import Activity
from tests.agent.analysis.test_verdicts import WORLD, op, rank

#: A place that has always been quick, a new one, and one whose waits vary.
QUICK, NEW, VARIES = Usual(200, None), Usual(1, None), Usual(9, 20.0)
ASLEEP, WRITES = (
    Activity("asleep", "is asleep in a lock", 3.0, False),
    Activity("writing", "is writing 212 MB/s", 3.0, True),
)
COMPUTES = Activity("computing", "is computing", 3.0, True)


def concluded(place: Usual | None, missing: RankView | None, age_s: float = 20.0, name: str = "all_reduce") -> Verdict:
    """The verdict on three ranks that wait for rank 3, or for rank 0 in an operation with a root."""
    peer = None if name == "all_reduce" else 0
    who = 3 if peer is None else 0
    inside = [rank(n, op(name, age_s=age_s, place=place, peer=peer), steps=False) for n in range(4) if n != who]
    there = [] if missing is None else [replace(missing, rank=who)]
    (verdict,) = verdicts([*inside, *there], [WORLD])
    return verdict


@pytest.mark.parametrize(
    ("place", "doing", "limit"),
    [
        (None, None, HANG_S),
        (QUICK, None, HANG_S),
        (QUICK, ASLEEP, HANG_S),
        (QUICK, COMPUTES, HANG_S),
        (QUICK, WRITES, WORKING_S),
        (Usual(5, None), COMPUTES, WORKING_S),
        (NEW, None, NEW_S),
        (NEW, ASLEEP, NEW_S),
        (NEW, COMPUTES, WORKING_S),
        (VARIES, None, 60.0),
        (Usual(9, 40.0), ASLEEP, 120.0),
        (Usual(200, 1.5), ASLEEP, HANG_S),
        (VARIES, WRITES, WORKING_S),
        (Usual(1, 2.0), ASLEEP, NEW_S),
    ],
)
def test_limits(place: Usual | None, doing: Activity | None, limit: float) -> None:
    """A quick place gives seconds, a new or irregular one a minute or more, and a rank that works minutes."""
    working = None if doing is None else doing.is_working
    assert limit_s(place, working, moves_data=doing is WRITES) == limit
    missing = rank(3, activity=doing)
    assert concluded(place, missing, limit + 0.5).kind == "stalled"
    if limit > HANG_S:
        assert concluded(place, missing, limit - 0.5).kind == "waiting"


def test_words() -> None:
    """A wait that is no fault is called that, with what the missing rank does."""
    says = concluded(NEW, rank(3, activity=WRITES)).says
    assert says.startswith(
        "waiting: rank 3 has not joined; it is alive and is writing 212 MB/s (ranks 0-2 in all_reduce 7"
    )
    assert concluded(QUICK, rank(3)).says.startswith(
        "stalled: rank 3 has not joined; it is alive but doing something else ("
    )


@pytest.mark.parametrize("how", [{"state": "gone"}, {"process": "stopped"}, {"state": "ended"}])
def test_no_patience(how: dict[str, Any]) -> None:
    """A rank that cannot come any more, or is stopped, is a hang wherever it happens."""
    assert concluded(NEW, rank(3, activity=COMPUTES, **how)).kind == "hang"


def test_root_of_a_server() -> None:
    """In a job without steps a root may wait for the outside world for minutes, also where it was quick; not in a job that steps."""
    assert concluded(QUICK, rank(0, activity=ASLEEP, steps=False), 40.0, "broadcast").kind == "waiting"
    assert concluded(QUICK, rank(0, activity=ASLEEP, steps=True), 40.0, "broadcast").kind == "stalled"
    assert concluded(QUICK, rank(0, activity=ASLEEP, steps=False), WORKING_S + 1, "broadcast").kind == "stalled"
    assert concluded(QUICK, rank(0, process="stopped", steps=False), 40.0, "broadcast").kind == "hang"


def test_trainer_and_evaluator() -> None:
    """A rank that makes training steps while another one waits for its message is at its work, however long that takes; not once it stops."""
    for name, kind in (("broadcast", "waiting"), ("all_reduce", "stalled")):
        assert concluded(QUICK, rank(3 * (name == "all_reduce"), steps=True, stepped_s=0.1), 700.0, name).kind == kind
    assert concluded(QUICK, rank(0, activity=ASLEEP, steps=True, stepped_s=40.0), 50.0, "broadcast").kind == "stalled"
    waits = rank(1, op("recv", peer=0, tag=0, waited_s=80.0, blocked=True, place=NEW), steps=True)
    (verdict,) = verdicts([waits, rank(0, activity=ASLEEP, steps=True, stepped_s=0.1)], [WORLD])
    assert (verdict.kind, verdict.ranks) == ("waiting", [0])


def test_first_stage_of_a_server() -> None:
    """In a job without steps the first rank may wait for requests before it sends; another stage that does not send is at fault."""
    for sender, kind in ((0, "waiting"), (2, "stalled")):
        waits = op("recv", peer=sender, tag=0, waited_s=40.0, blocked=True, place=QUICK)
        inside = rank(1 + sender, waits, steps=False)
        (verdict,) = verdicts([inside, rank(sender, activity=ASLEEP, steps=False)], [WORLD])
        assert (verdict.kind, verdict.ranks) == (kind, [sender])


def test_usual_absence() -> None:
    """A rank is not late that is away no longer than it usually is, also if the others have not waited so long before."""
    uneven = rank(3, quiet_s=24.0, absence=Usual(4, 12.0))
    few = Usual(9, None)
    assert concluded(few, uneven).kind == "waiting"
    assert concluded(few, replace(uneven, quiet_s=90.0), 80.0).kind == "stalled"
    assert concluded(few, replace(uneven, absence=Usual(400, None))).kind == "stalled"
    assert concluded(QUICK, uneven).kind == "stalled"  # the others know their place better


def test_rank_that_does_nothing_where_it_is_always_quick() -> None:
    """A rank that does nothing at a place of its own that has always been quick is at fault, wherever the others wait for it."""
    for place, absence, doing, kind in (
        (NEW, QUICK, ASLEEP, "stalled"),
        (VARIES, QUICK, ASLEEP, "stalled"),
        (NEW, QUICK, COMPUTES, "waiting"),
        (NEW, QUICK, None, "waiting"),
        (NEW, Usual(9, None), ASLEEP, "waiting"),
        (NEW, Usual(200, 12.0), ASLEEP, "waiting"),
    ):
        assert concluded(place, rank(3, activity=doing, absence=absence, quiet_s=20.0)).kind == kind


def test_place_in_place_of_the_median() -> None:
    """Where the place is known, the usual duration of the operation elsewhere does not matter."""
    inside = [rank(n, op(age_s=20.0, usual_s=20.0, place=QUICK)) for n in (0, 1, 2)]
    (verdict,) = verdicts([*inside, rank(3)], [WORLD])
    assert verdict.kind == "stalled"


def test_as_long_as_the_others() -> None:
    """A rank is not late where the others have just needed long, too: all of them compile, or read data."""
    for absent_s, kind in (((15.0,) * 3, "waiting"), ((25.0, 0.03, 0.03), "stalled"), ((None,) * 3, "stalled")):
        inside = [rank(n, op(age_s=20.0, place=QUICK, absent_s=each)) for n, each in enumerate(absent_s)]
        (verdict,) = verdicts([*inside, rank(3, activity=ASLEEP)], [WORLD])
        assert (verdict.kind, verdict.ranks) == (kind, [3])


def test_root_is_no_excuse_for_its_workers() -> None:
    """That the root of a server waited for a request before is no reason for a worker to take long; that any other rank needed long is one."""
    for steps, kind in ((False, "stalled"), (True, "waiting")):
        root = rank(0, op("broadcast", age_s=20.0, place=QUICK, peer=0, absent_s=15.0), steps=steps)
        others = [rank(n, op("broadcast", age_s=20.0, place=QUICK, peer=0), steps=steps) for n in (1, 2)]
        (verdict,) = verdicts([root, *others, rank(3, activity=ASLEEP, steps=steps)], [WORLD])
        assert (verdict.kind, verdict.ranks) == (kind, [3])


def test_only_those_at_fault_are_named() -> None:
    """Of two missing ranks, the one that sleeps is named and not the one that writes."""
    inside = [rank(n, op(place=QUICK)) for n in (0, 1)]
    (verdict,) = verdicts([*inside, rank(2, activity=ASLEEP), rank(3, activity=WRITES)], [WORLD])
    assert (verdict.kind, verdict.ranks) == ("stalled", [2])
    (verdict,) = verdicts([*inside, rank(2, activity=WRITES), rank(3, activity=WRITES)], [WORLD])
    assert (verdict.kind, verdict.ranks) == ("waiting", [2, 3])
    assert "they are alive: rank 2 is writing 212 MB/s, rank 3 is writing 212 MB/s" in verdict.says


def test_all_inside() -> None:
    """All ranks inside an operation at a new place are no fault yet: its connections may be set up."""
    for place, kind in ((NEW, "waiting"), (QUICK, "hang"), (None, "hang")):
        (verdict,) = verdicts([rank(n, op(age_s=30.0, place=place)) for n in range(4)], [WORLD])
        assert verdict.kind == kind


def test_unseen_rank() -> None:
    """A rank that no agent sees is no fault for minutes at a new place, and one where all have been quick before."""
    assert concluded(NEW, None, 100.0).kind == "waiting"
    assert concluded(NEW, None, WORKING_S + 1).kind == "stalled"
    assert concluded(QUICK, None).kind == "stalled"


def test_ranks_behind() -> None:
    """Where no ends are seen, a rank that has launched less is a fault after its usual absence."""

    def launched(number: int, last: int, idle_s: float, absence: Usual | None = None) -> RankView:
        return rank(number, last_seq={"w": last}, launched_s={"w": idle_s}, absence=absence)

    ahead = [launched(n, 40, 30.0) for n in (0, 1, 2)]
    for absence, kind in ((None, "stalled"), (Usual(4, 12.0), "waiting"), (Usual(200, None), "stalled")):
        (verdict,) = verdicts([*ahead, launched(3, 37, 31.0, absence)], [WORLD])
        assert (verdict.kind, verdict.ranks) == (kind, [3])
