"""What is concluded from ranks that wait outside operations: who has not come, and nothing of a job that is well."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from commwatch_agent.analysis.verdict import Verdict
from commwatch_agent.analysis.verdicts import verdicts
from commwatch_agent.model.views import GroupView, InFlight, OutsideCall, RankView
from commwatch_collectors.node.judged_activity import Activity

WORLD = GroupView("job", "w", "world", "0", "world", 3, [0, 1, 2], [0, 1, 2], True)
INIT, NEW = "init_process_group", "new_group"


def rank(number: int, *calls: OutsideCall, ops: tuple[InFlight, ...] = (), **more: Any) -> RankView:
    """A live rank of three on one node, in these calls; it has begun one default group and as many others as its call says."""
    begun = {INIT: 1} | {each.call: each.number for each in calls if each.number}
    view = RankView(
        "job", number, 0, "running", "node", number, 100 + number, "native", "sleeping", None, {}, {}, list(ops), [], 9, 0,
        outside=list(calls), begun=begun, world_size=3, node_ranks=[0, 1, 2],
    )  # fmt: skip
    return replace(view, **more)


def call(
    name: str = NEW, age_s: float = 60.0, ranks: list[int] | None = None, number: int = 1, key: str = ""
) -> OutsideCall:
    """A call that a rank is in."""
    return OutsideCall(name, ranks, key, age_s, 0 if key else number)


def op(seq: int = 7, age_s: float = 60.0) -> InFlight:
    """An ``all_reduce`` of all ranks in flight."""
    return InFlight("all_reduce", "world", "w", seq, None, None, "float32", 4000, age_s, False, None, 0.01)


ASLEEP = Activity("asleep", "is asleep in a lock", 9.0, is_working=False)


def judged(*ranks: RankView) -> list[Verdict]:
    """The verdicts."""
    return verdicts(ranks, [WORLD])


@pytest.mark.parametrize(
    ("missing", "cause", "after_s", "says"),
    [
        (rank(2), "not_come", 45, "rank 2 has not come to new_group; it is alive but is doing something else"),
        (rank(2, heartbeat_age_s=30.0), "not_come", 45, "it is alive, but no Python code runs there ("),
        (
            rank(2, heartbeat_age_s=30.0, activity=ASLEEP),
            "not_come",
            45,
            "no Python code runs there, and it is asleep in a lock (",
        ),
        (rank(2, process="stopped"), "stopped", 10, "rank 2 has not come to new_group; it is stopped"),
        (rank(2, state="gone"), "dead", 2, "rank 2 has not come to new_group, because it died (no clean end)"),
        (rank(2, state="ended"), "gone", 2, "rank 2 has not come to new_group, because it has ended"),
        (rank(2, call("store.wait", key="k")), "", 10, "key k of a store is not set"),
        (None, "not_come", 45, "it has not started, or has not called it"),
    ],
)
def test_missing_rank(missing: RankView | None, cause: str, after_s: int, says: str) -> None:
    """The rank that others wait for is named with what has become of it, as soon as that is long; not before."""
    there = [] if missing is None else [missing]
    cause = "unseen" if missing is None else cause
    early = [rank(n, call(age_s=after_s - 0.5)) for n in (0, 1)]
    assert judged(*early, *(replace(each, outside=[]) for each in there)) == []
    late = [rank(n, call(age_s=after_s + 0.5)) for n in (0, 1)]
    found = judged(*late, *there)
    assert any(says in verdict.says for verdict in found), found
    if cause:
        (verdict,) = found
        assert (verdict.kind, verdict.cause, verdict.ranks, verdict.waiting) == ("init_incomplete", cause, [2], [0, 1])
        assert (verdict.op, verdict.seq, verdict.since_s) == (NEW, None, after_s + 0.5)


@pytest.mark.parametrize(
    ("activity", "after_s", "says"),
    [
        (Activity("reading", "is reading 210 MB/s", 9.0, is_working=True), 600, "to new_group; it is reading 210 MB/s ("),
        (Activity("child", "waits while {0} computes", 9.0, is_working=True), 600, "to new_group; it waits while {0} computes ("),
        (ASLEEP, 45, "to new_group; it is asleep in a lock ("),
    ],
)  # fmt: skip
def test_activity(activity: Activity, after_s: int, says: str) -> None:
    """The verdict shows what the missing rank does; one that works, such as one that loads a model, may take minutes."""
    missing = rank(2, activity=activity)
    assert judged(*(rank(n, call(age_s=after_s - 0.5)) for n in (0, 1)), missing) == []
    (verdict,) = judged(*(rank(n, call(age_s=after_s + 0.5)) for n in (0, 1)), missing)
    assert (verdict.cause, verdict.ranks) == ("not_come", [2])
    assert says in verdict.says
    (both,) = judged(rank(0, call(age_s=after_s + 0.5)), replace(missing, rank=1), missing)
    assert f"ranks 1-2 have not come to new_group; each of them {activity.says}" in both.says


def test_init() -> None:
    """Ranks that have not come to ``init_process_group`` are named although there are no data from them; on other nodes they may wait, too."""
    alone = judged(rank(0, call(INIT)))
    assert [(each.ranks, each.waiting, each.cause) for each in alone] == [([1, 2], [0], "unseen")]
    assert alone[0].says.startswith(
        "ranks 1-2 have not come to init_process_group: they have not started, or have not called it"
    )
    (apart,) = judged(rank(0, call(INIT), node_ranks=[0]))
    assert "no data from ranks 1-2" not in alone[0].says
    assert apart.says.startswith("no data from ranks 1-2: ")
    (verdict,) = judged(rank(0, call(INIT), node_ranks=[0, 1]))
    assert verdict.ranks == [1]
    assert judged(rank(0, call(INIT, 30.0))) == []


def test_many() -> None:
    """A world of any size, as a ring may say, takes no time; ranks of this node are named wherever they are in it."""
    (verdict,) = judged(rank(9_000, call(INIT), world_size=1 << 31, node_ranks=[9_000, 9_001]))
    assert verdict.ranks == [9_001]
    assert "ranks 0-4095" in verdict.says


def test_passed() -> None:
    """A rank that has gone on after the call has come: no rank is named as long as the others may still be connecting."""
    inside = [rank(0, call(number=3)), rank(1, call(number=3))]
    assert judged(*inside, rank(2, begun={NEW: 3})) == []
    (stuck,) = judged(*inside, rank(2, call(number=4), begun={NEW: 4}))  # it waits for them, who do not get on
    assert (stuck.cause, stuck.waiting) == ("stuck", [0, 1])
    (verdict,) = judged(*inside, rank(2, begun={NEW: 2}))
    assert verdict.ranks == [2]
    (stuck,) = judged(*(rank(n, call(INIT, 150.0)) for n in range(3)))
    assert (stuck.cause, stuck.ranks, stuck.waiting) == ("stuck", [], [0, 1, 2])
    assert judged(*(rank(n, call(INIT, 100.0)) for n in range(3))) == []


def test_members() -> None:
    """Only the members of the new group are waited for; groups with other members are other waits."""
    pair = rank(0, call(ranks=[0, 1]))
    (verdict,) = judged(pair, rank(1), rank(2))
    assert (verdict.ranks, verdict.group) == ([1], "ranks 0-1")
    assert judged(rank(0, call(ranks=[])), rank(1), rank(2)) == []  # not known
    (verdict,) = judged(pair, rank(1, call(ranks=[1, 2])), rank(2))
    assert (verdict.ranks, verdict.waiting) == ([2], [1])


def test_order() -> None:
    """Ranks that wait for each other in a new group and in an operation are named with both."""
    (verdict,) = judged(rank(0, call()), rank(1, ops=(op(),)), rank(2, ops=(op(),)))
    assert (verdict.kind, verdict.cause, verdict.ranks, verdict.waiting) == ("desync", "order", [1, 2], [0])
    assert (
        "ranks 1-2 have not come to new_group; they are in all_reduce 7 of group world (rank 0 in new_group"
        in verdict.says
    )


def test_root() -> None:
    """Of a chain of waits, only the first is named: others wait in an operation for a rank that waits for another one."""
    found = judged(rank(0, call(ranks=[0, 1])), rank(1), rank(2, ops=(op(),)))
    assert [(each.op, each.ranks) for each in found] == [("all_reduce", [1]), (NEW, [1])]
    (verdict,) = judged(
        rank(0, call("store.wait", 12.0, key="k")), rank(1, ops=(op(age_s=12.0),)), rank(2, ops=(op(age_s=12.0),))
    )
    assert (verdict.op, verdict.ranks, verdict.waiting) == ("store.wait", [], [0])


def test_store() -> None:
    """Who is to set a key is not known, unless one rank alone does not wait."""
    waiting = call("store.wait", key="ready/1")
    (verdict,) = judged(rank(0), rank(1, waiting), rank(2, waiting))
    assert (verdict.ranks, verdict.waiting, verdict.group) == ([0], [1, 2], "ready/1")
    assert verdict.says.startswith("key ready/1 of a store is not set; rank 0 is alive and does not wait for it")
    (verdict,) = judged(rank(0), rank(1), rank(2, waiting))
    assert (verdict.ranks, verdict.waiting) == ([], [2])
    assert judged(rank(0), rank(1, replace(waiting, age_s=40.0)), rank(2)) == []


def test_spare() -> None:
    """A rank that waits for a key while others train is a spare; one of these that is in an operation for a moment leaves no other to blame."""
    spare = rank(2, call("store.wait", 600.0, key="promote"))
    trains = [replace(rank(n), steps=True, stepped_s=0.2) for n in (0, 1)]
    assert judged(*trains, spare) == []
    idle = rank(1), rank(0, ops=(op(age_s=0.02),))
    (verdict,) = judged(*idle, spare)
    assert (verdict.op, verdict.ranks) == ("store.wait", [])


def test_destroyed() -> None:
    """Ranks that destroy their groups one after the other are well, also if one has much left to do; one that waits for the others is named."""
    ending = rank(0, call("destroy_process_group", number=0))
    assert judged(ending, rank(1, state="ended"), rank(2, state="left")) == []
    assert judged(ending, rank(1, state="left"), rank(2)) == []
    (verdict,) = judged(ending, rank(1, state="left"), rank(2, call("store.wait", key="saved")))
    assert (verdict.op, verdict.ranks, verdict.waiting) == ("store.wait", [], [2])
    (verdict,) = judged(ending, rank(1, state="left"), rank(2, process="stopped"))
    assert (verdict.cause, verdict.ranks) == ("stopped", [2])


def test_here() -> None:
    """A rank without data that runs on this node by the launcher's variables is not said to run elsewhere."""
    waiting = [rank(n, ops=(op(),)) for n in (0, 1)]
    (verdict,) = judged(*waiting)
    assert (verdict.kind, verdict.cause, verdict.ranks) == ("stalled", "not_come", [2])
    assert "rank 2 has not joined; it has not started, or has not come to init_process_group" in verdict.says
    (verdict,) = judged(*(replace(each, node_ranks=None) for each in waiting))
    assert verdict.cause == "unseen"
