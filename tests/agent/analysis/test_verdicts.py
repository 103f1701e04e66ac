"""What is concluded from what ranks have in flight: right culprits, and nothing of a job that is well."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from commwatch_agent.analysis.calls.differences import Call
from commwatch_agent.analysis.ended_operations import Disagreement
from commwatch_agent.analysis.verdict import Verdict, awaited_ranks, combined, for_others, straggler_verdict, waited_for
from commwatch_agent.analysis.verdicts import disagreement, latest_life, verdicts
from commwatch_agent.analysis.waits.wait_graph import HANG_S
from commwatch_agent.ingest.stragglers import Late
from commwatch_agent.model.views import Ended, Failed, GroupView, InFlight, RankView
from commwatch_collectors.node.judged_activity import Activity

S = 1_000_000_000
WORLD = GroupView("job", "w", "world", "0", "world", 4, [0, 1, 2, 3], [0, 1, 2, 3], True)
LEFT = GroupView("job", "l", "left", "1", "left", 2, [0, 1], [0, 1], True)
RIGHT = GroupView("job", "r", "right", "2", "right", 2, [0, 1], [0, 1], True)


def late_in_world(late: Late) -> Verdict:
    return straggler_verdict(late, {(WORLD.job_id, WORLD.group_id): WORLD}, (WORLD.job_id, WORLD.group_id))


def op(name: str = "all_reduce", seq: int = 7, age_s: float = 60.0, group: str = "w", **more: Any) -> InFlight:
    """An operation in flight, of a kind that usually takes 10 ms."""
    usual = {
        "peer": None,
        "tag": None,
        "dtype": "float32",
        "size_bytes": 4000,
        "blocked": False,
        "waited_s": None,
        "usual_s": 0.01,
    }
    return InFlight(name, group, group, seq, age_s=age_s, **{**usual, **more})


def rank(number: int, *ops: InFlight, last: int | None = 6, **more: Any) -> RankView:
    """A rank that is alive, has ended collective ``last`` of every group, and has ``ops`` in flight."""
    done = {} if last is None else dict.fromkeys("wlr", last)
    view = RankView(
        "job",
        number,
        0,
        "running",
        "node",
        number,
        100 + number,
        "native",
        "sleeping",
        0.1,
        done,
        {},
        list(ops),
        [],
        9,
        0,
    )
    return replace(view, **more)


def judged(*ranks: RankView, groups: tuple[GroupView, ...] = (WORLD,)) -> list[Verdict]:
    """The verdicts."""
    return verdicts(ranks, groups)


WAITING = [rank(n, op()) for n in (0, 1, 2)]


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        ((213, 213, 213, 213), 214),
        ((213, 213, 213, 212), 214),  # that of the ranks that wait
        ((213, 213, 213, None), 214),
        ((213, 213, 212, 213), None),
        ((213, 213, None, 213), None),
        ((None, None, None, 213), None),
    ],
)
def test_step_of_a_wait(steps: tuple[int | None, ...], expected: int | None) -> None:
    """A wait is in the step after the latest one that all waiting ranks have ended; where they differ, or do not mark steps, that is not known."""
    missing = rank(3, process="stopped", step=steps[3])
    (verdict,) = judged(*(replace(each, step=step) for each, step in zip(WAITING, steps[:3], strict=True)), missing)
    assert (verdict.kind, verdict.step) == ("hang", expected)
    assert verdict.says.endswith(f", in step {expected}" if expected else "for 60.0 s)")


def test_sides_of_a_disagreement() -> None:
    """A disagreement has the ranks of each side, the largest first, and the same operation in its name however the ranks are listed."""
    here = [rank(n, op(name, dtype="float32"), step=9) for n, name in enumerate(["all_gather", "all_reduce"] * 2)]
    for ranks in (here, here[::-1]):
        (verdict,) = judged(*ranks)
        assert (verdict.op, verdict.sides, verdict.step) == ("all_gather", [[0, 2], [1, 3]], 10)
        assert verdict.says.endswith("(all_gather 7 of group world), in step 10")
    three = [*here[:3], rank(3, op("all_gather"), step=9)]
    (verdict,) = judged(*three)
    assert (verdict.ranks, verdict.sides) == ([1], [[0, 2, 3], [1]])


@pytest.mark.parametrize(
    ("missing", "kind", "cause", "says"),
    [
        (rank(3), "stalled", "not_joined", "stalled: rank 3 has not joined; it is alive"),
        (rank(3, process="stopped"), "hang", "stopped", "its process is stopped"),
        (
            rank(3, state="left"),
            "hang",
            "destroyed",
            "rank 3 has destroyed the group and will not join; its process lives",
        ),
        (rank(3, destroyed=["w"]), "hang", "destroyed", "rank 3 has destroyed the group and will not join"),
        (rank(3, destroyed=["l"]), "stalled", "not_joined", "stalled: rank 3 has not joined; it is alive"),
        (rank(3, state="gone", destroyed=["w"]), "hang", "dead", "process dead: rank 3"),
        (rank(3, state="ended", destroyed=["w"]), "hang", "gone", "rank ended: rank 3"),
        (rank(3, heartbeat_age_s=30.0), "stalled", "silent", "its Python code is not running"),
        (rank(3, state="gone"), "hang", "dead", "process dead: rank 3"),
        (rank(3, state="ended"), "hang", "gone", "rank ended: rank 3"),
        (None, "stalled", "unseen", "no data from rank 3"),
    ],
)
def test_missing_rank(missing: RankView | None, kind: str, cause: str, says: str) -> None:
    """The rank that others wait for is named, with what has become of it."""
    (verdict,) = judged(*WAITING, *([] if missing is None else [missing]))
    assert (verdict.kind, verdict.cause, verdict.ranks, verdict.waiting) == (kind, cause, [3], [0, 1, 2])
    assert says in verdict.says
    assert (verdict.group_id, verdict.seq, verdict.op, verdict.since_s) == ("w", 7, "all_reduce", 60.0)


def test_silent_and_known_activity() -> None:
    """Of ranks without a heartbeat the text has what the operating system shows that they do, and a missing core among the reasons."""
    asleep = Activity("asleep", "is asleep in a timer", 9.0, is_working=False)
    why = "Python code is not running (stuck in C, holding the GIL, or without a core)"
    silent = [rank(n, heartbeat_age_s=30.0, activity=asleep) for n in (2, 3)]
    (verdict,) = judged(*WAITING, silent[1])
    assert f"rank 3 has not joined; its {why}, and the rank is asleep in a timer (" in verdict.says
    (verdict,) = judged(*WAITING[:2], *silent)
    assert f"have not joined; their {why}: rank 2 is asleep in a timer, rank 3 is asleep in a timer (" in verdict.says
    (verdict,) = judged(*WAITING, replace(silent[1], activity=None))
    assert f"its {why} (" in verdict.says


def test_first_two_seconds() -> None:
    """A rank that is dead is named once the others have waited for two seconds: before, its record of the operation may be on its way."""
    dead = rank(3, state="gone")
    assert judged(*(rank(n, op(age_s=1.9)) for n in (0, 1, 2)), dead) == []
    (verdict,) = judged(*(rank(n, op(age_s=2.1)) for n in (0, 1, 2)), dead)
    assert verdict.ranks == [3]


def test_queued_on_a_gpu() -> None:
    """A rank whose GPU has not reached an operation has not joined it, however long ago it was launched; time counts from there on."""
    reached, queued = op(blocked=True, waited_s=12.0), op(queued=True)
    (verdict,) = judged(*(rank(n, reached) for n in (0, 1, 2)), rank(3, queued))
    assert (verdict.kind, verdict.cause, verdict.ranks, verdict.since_s) == ("stalled", "not_joined", [3], 12.0)
    assert judged(*(rank(n, op(blocked=True, waited_s=HANG_S - 1)) for n in (0, 1, 2)), rank(3, queued)) == []
    assert judged(*(rank(n, queued) for n in range(4))) == []


def test_message_queued_on_a_gpu() -> None:
    """A message that the peer's GPU has not reached is not there yet."""
    sent = op("send", peer=1, tag=0, blocked=True, waited_s=12.0)
    (verdict,) = judged(rank(0, sent), rank(1, op("recv", peer=0, tag=0, queued=True)), rank(2), rank(3))
    assert (verdict.kind, verdict.ranks, verdict.waiting) == ("stalled", [1], [0])
    met = op("recv", peer=0, tag=0, blocked=True, waited_s=12.0)
    assert {each.cause for each in judged(rank(0, sent), rank(1, met), rank(2), rank(3))} == {"stuck"}


def test_messages_to_another_rank() -> None:
    """A message is met by the peer's message of the same number only: one that is posted but over, and never waited for, does not count."""
    sends = rank(0, op("send", seq=120, peer=2, tag=0, waited_s=30.0), op("recv", seq=120, peer=2, tag=0))
    waits = rank(1, op("recv", seq=120, peer=0, tag=0, waited_s=30.0))
    ahead = rank(2, op("send", seq=121, peer=0, tag=0, waited_s=30.0), op("recv", seq=121, peer=1, tag=0))
    (found,) = judged(sends, waits, ahead, rank(3))
    assert (found.kind, found.cause, found.ranks) == ("desync", "order", [0, 2])


def test_no_room_to_say_so() -> None:
    """A rank whose table of operations in flight was full lately may be inside unseen, so no rank is blamed; if that was long ago, it is."""
    assert judged(*WAITING, rank(3, overflow_s=90.0)) == []
    (verdict,) = judged(*WAITING, rank(3, overflow_s=300.0))
    assert verdict.ranks == [3]


def test_worst_absence_first() -> None:
    """Of several missing ranks, the one that will never come is to blame; the verdict mentions the others."""
    (verdict,) = judged(rank(0, op()), rank(1), rank(2, state="gone"), rank(3))
    assert (verdict.cause, verdict.ranks) == ("dead", [2])
    assert "process dead: rank 2" in verdict.says
    assert "ranks 1, 3 have not joined" in verdict.says


def test_all_inside() -> None:
    """Where every rank has entered, it is stuck inside; in a group's first operation that may be its set-up."""
    (verdict,) = judged(*(rank(n, op()) for n in range(4)))
    assert (verdict.kind, verdict.cause, verdict.ranks, verdict.waiting) == ("hang", "stuck", [0, 1, 2, 3], [])
    (verdict,) = judged(*(rank(n, op(seq=0, usual_s=None), last=None) for n in range(4)))
    assert (verdict.kind, verdict.cause) == ("stalled", "stuck")


def test_stopped_inside() -> None:
    """Where every rank has entered and the process of one is stopped, that one is named, and the others wait for it."""
    (verdict,) = judged(rank(0, op()), rank(1, op(), process="stopped"), rank(2, op()), rank(3, op()))
    assert (verdict.kind, verdict.cause, verdict.ranks, verdict.waiting) == ("hang", "stopped", [1], [0, 2, 3])
    assert "rank 1 has entered; its process is stopped" in verdict.says


@pytest.mark.parametrize(
    "ranks",
    [
        [rank(n, op(age_s=HANG_S - 1)) for n in (0, 1, 2)] + [rank(3)],
        [rank(n, op(age_s=60, usual_s=20)) for n in (0, 1, 2)] + [rank(3)],
        # A later operation has ended meanwhile: the backend runs several at once.
        [rank(n, op(), last=8) for n in (0, 1, 2)] + [rank(3, last=8)],
        # Posted, but nobody waits for it.
        [rank(0, op("recv", peer=1, tag=0)), rank(1), rank(2), rank(3)],
        [rank(0, op("recv", peer=1, tag=0, waited_s=2.0)), rank(1)],
        [rank(n) for n in range(4)],
        [rank(n, op(age_s=1, name="all_reduce" if n else "barrier")) for n in range(4)],
        [],
    ],
    ids=["young", "usually long", "overtaken", "posted", "waits shortly", "idle", "just begun", "nobody"],
)
def test_healthy(ranks: list[RankView]) -> None:
    """What is young, usual, overtaken or not waited for is no verdict."""
    assert judged(*ranks) == []


def test_different_ops() -> None:
    """Ranks in different operations at one place: those that are not with the most are to blame; all, where there is no most."""
    (verdict,) = judged(rank(0, op(age_s=3)), rank(1, op(age_s=3)), rank(2, op("broadcast", age_s=3)), rank(3))
    assert (verdict.kind, verdict.cause, verdict.ranks, verdict.waiting) == ("desync", "ops", [2], [0, 1])
    assert "ranks 0-1: all_reduce; rank 2: broadcast" in verdict.says
    (verdict,) = judged(rank(0, op()), rank(1, op("broadcast")), rank(2), rank(3))
    assert verdict.ranks == [0, 1]


def test_different_data() -> None:
    """The same operation with other sizes or dtypes is one, where all ranks pass the same; an all_to_all may be uneven."""
    (verdict,) = judged(rank(0, op()), rank(1, op()), rank(2, op(size_bytes=8)))
    assert (verdict.cause, verdict.ranks) == ("sizes", [2])
    (verdict,) = judged(rank(0, op()), rank(1, op()), rank(2, op(dtype="int32")))
    assert (verdict.cause, verdict.ranks) == ("sizes", [2])
    uneven = [rank(n, op("all_to_all", size_bytes=n, age_s=5)) for n in range(4)]
    assert judged(*uneven) == []


def test_data_that_is_not_known() -> None:
    """A rank whose size or dtype is not known yet passes no other data than the others: those whose data are known are compared."""
    unknown = rank(1, op(dtype=None, age_s=5)), rank(3, op(size_bytes=None, age_s=5))
    assert judged(rank(0, op(age_s=5)), rank(2, op(age_s=5)), *unknown) == []
    (verdict,) = judged(rank(0, op(age_s=5)), rank(2, op(size_bytes=8, age_s=5)), *unknown)
    assert (verdict.cause, verdict.ranks) == ("sizes", [0, 2])


def test_different_roots() -> None:
    """Where the roots differ, they are named, also of ranks whose operation has ended or raised; a root that is not known is not compared."""
    (verdict,) = judged(rank(0, op("broadcast", peer=0)), rank(1, op("broadcast", peer=1)))
    assert (verdict.kind, verdict.cause, verdict.ranks, verdict.waiting) == ("desync", "root", [0, 1], [])
    assert "roots differ: rank 0: root 0; rank 1: root 1 (broadcast 7 of group world)" in verdict.says
    others = [rank(n, op("reduce", peer=0)) for n in (0, 1)]
    for odd in (
        rank(2, ended=[Ended("reduce", "w", 7, "float32", 4000, 70.0, root=2)]),
        rank(2, failed=[Failed("reduce", "w", 7, "float32", 4000, 70.0, root=2)]),
        rank(2, op("reduce", peer=2, size_bytes=8)),
    ):
        (verdict,) = judged(*others, odd)
        assert (verdict.cause, verdict.ranks, verdict.waiting, verdict.seq) == ("root", [2], [0, 1], 7)
    for cause in (verdict.cause for verdict in judged(*others, rank(2, op("reduce", peer=None)), rank(3))):
        assert cause == "not_joined"
    assert {each.cause for each in judged(*(rank(n, op(peer=n)) for n in range(4)))} == {"stuck"}


def exchanging(*wrong: tuple[int, int]) -> list[InFlight]:
    """What each of four ranks passes to an all_to_all; in the ``wrong`` pairs the first one sends the second one more than that expects."""
    sent = [[100 * one + other for other in range(4)] for one in range(4)]
    expected = [[sent[other][one] for other in range(4)] for one in range(4)]
    for one, other in wrong:
        sent[one][other] += 16
    return [op("all_to_all", sends=sent[n], expects=expected[n]) for n in range(4)]


@pytest.mark.parametrize(
    ("wrong", "odd"),
    [
        ([(1, 2), (1, 3)], [1]),
        ([(0, 2), (1, 2), (3, 2)], [2]),
        ([(1, 2)], [1, 2]),
        ([(3, 3)], [3]),
        ([(1, 2), (1, 3), (1, 0), (2, 0)], [0, 1, 2]),
        ([(1, 2), (1, 0), (3, 2), (3, 0)], [0, 1, 2, 3]),
    ],
)
def test_different_splits(wrong: list[tuple[int, int]], odd: list[int]) -> None:
    """Where a rank sends another one what that does not expect in an all_to_all, those are named that explain all such pairs, with both sizes."""
    (verdict,) = judged(*map(rank, range(4), exchanging(*wrong)))
    assert (verdict.kind, verdict.cause, verdict.ranks) == ("desync", "splits", odd)
    one, other = sorted(wrong)[0]
    sizes = f"rank {one} sends {100 * one + other + 16} bytes to rank {other}, which expects {100 * one + other}"
    assert f"split sizes differ: {sizes}" in verdict.says
    assert ("and 1 more" in verdict.says) == (len(wrong) == 4)


def test_splits_that_agree() -> None:
    """Ranks whose split sizes agree are called nothing else than stuck; sizes that are not known, or of another number of ranks, are not compared."""
    ops = exchanging((1, 2), (1, 3))
    unknown = [replace(each, expects=None) for each in ops[2:]]
    for passed in (
        exchanging(),
        [*ops[:2], *unknown],
        [*ops[:2], *(replace(each, expects=[1, 2]) for each in ops[2:])],
    ):
        assert {verdict.cause for verdict in judged(*map(rank, range(4), passed))} == {"stuck"}
    assert judged(*map(rank, range(4), ops), groups=(replace(WORLD, members=None),))[0].cause == "stuck"
    (verdict,) = judged(*map(rank, (0, 1, 2), ops))
    assert (verdict.cause, verdict.ranks) == ("splits", [1, 2])


def test_splits_in_the_order_of_the_group() -> None:
    """Split sizes belong to the ranks by their numbers in the group, which may be made of ranks in any order."""
    turned = replace(WORLD, size=2, members=[3, 1], ranks=[1, 3])
    sent = op("all_to_all", sends=[10, 20], expects=[30, 20])
    (verdict,) = judged(rank(1, sent), rank(3, replace(sent, sends=[40, 30], expects=[40, 10])), groups=(turned,))
    assert verdict.cause == "stuck"
    (verdict,) = judged(rank(1, sent), rank(3, replace(sent, sends=[40, 30], expects=[40, 11])), groups=(turned,))
    assert "split sizes differ: rank 1 sends 10 bytes to rank 3, which expects 11 (all_to_all 7" in verdict.says


def test_splits_after_an_abort() -> None:
    """A rank that its backend aborts because of another rank's split sizes is no culprit, and neither is one whose call raised or has ended."""
    inside, *over = exchanging((1, 2), (1, 3))
    sender, receiver, other = (dict[str, Any](sends=each.sends, expects=each.expects) for each in over)
    about = ("all_to_all", "w", 7, "float32", 4000, 5.0)
    ranks = (
        rank(1, failed=[Failed(*about, **sender)], state="ended"),
        rank(2, failed=[Failed(*about, **receiver)], state="gone"),
        rank(3, last=7, ended=[Ended(*about, **other)]),
    )
    (verdict,) = judged(rank(0, inside), *ranks)
    assert (verdict.cause, verdict.ranks, verdict.waiting) == ("splits", [1], [0, 2, 3])


@pytest.mark.parametrize(
    ("passed", "cause", "odd"),
    [
        (("broadcast", 4000, "float32"), "ops", [3]),
        (("all_reduce", 8, "float32"), "sizes", [3]),
        (("all_reduce", 4000, "int32"), "sizes", [3]),
        (("all_reduce", 4000, "float32"), "stuck", [0, 1, 2]),
    ],
)
@pytest.mark.parametrize("state", ["running", "left", "ended"])
def test_differs_from_one_that_is_over(passed: tuple[str, int, str], cause: str, odd: list[int], state: str) -> None:
    """What one rank passed is compared also where its operation has ended or raised, however long ago, while others are still inside."""
    name, size, dtype = passed
    ended = rank(3, last=7, ended=[Ended(name, "w", 7, dtype, size, 500.0)], state=state)
    (verdict,) = judged(*WAITING, ended)
    assert (verdict.cause, verdict.ranks, verdict.seq) == (cause, odd, 7)
    (verdict,) = judged(*WAITING, rank(3, last=7, failed=[Failed(name, "w", 7, dtype, size, 500.0)], state=state))
    assert (verdict.cause, verdict.ranks) == (cause, odd)
    assert judged(*(rank(n, last=7) for n in (0, 1, 2)), ended) == []  # no rank is inside
    uneven = [rank(n, op("all_to_all", size_bytes=n)) for n in range(3)]
    (verdict,) = judged(*uneven, rank(3, last=7, ended=[Ended("all_to_all", "w", 7, "float32", 9, 50.0)]))
    assert verdict.cause == "stuck"


def test_raised() -> None:
    """Where the operation raised on some ranks, what they did is still compared, and the dead are still named."""
    failed = Failed("all_reduce", "w", 7, "float32", 4000, 5.0)
    (verdict,) = judged(
        rank(0, failed=[failed]),
        rank(1, state="gone", failed=[replace(failed, size_bytes=8)]),
        rank(2, failed=[failed]),
    )
    assert (verdict.cause, verdict.ranks) == ("sizes", [1])
    (verdict,) = judged(*(rank(n, failed=[failed]) for n in (0, 1, 2)), rank(3, state="gone"))
    assert (verdict.cause, verdict.ranks, verdict.waiting) == ("dead", [3], [0, 1, 2])
    assert "(ranks 0-2 raised in all_reduce 7 of group world)" in verdict.says
    assert judged(*(rank(n, failed=[replace(failed, ago_s=600)]) for n in (0, 1, 2)), rank(3, state="gone")) == []


def test_raised_on_one_rank() -> None:
    """A rank whose operation raised had joined it: the others, which are still inside, do not wait for that rank."""
    (verdict,) = judged(*WAITING, rank(3, failed=[Failed("all_reduce", "w", 7, "float32", 4000, 5.0)]))
    assert (verdict.cause, verdict.ranks) == ("stuck", [0, 1, 2])


def test_message() -> None:
    """A rank that waits for a message waits for its peer, unless that has sent: then they are stuck inside."""
    waits = rank(0, op("recv", group="l", seq=3, peer=1, tag=5, waited_s=30.0))
    (verdict,) = judged(waits, rank(1), groups=(LEFT,))
    assert (verdict.cause, verdict.ranks, verdict.waiting, verdict.op) == ("not_joined", [1], [0], "recv")
    sent = op("send", group="l", seq=3, peer=0, tag=5)
    (verdict,) = judged(waits, rank(1, sent), groups=(LEFT,))
    assert (verdict.cause, verdict.kind) == ("stuck", "hang")
    (verdict,) = judged(waits, rank(1, replace(sent, tag=6)), groups=(LEFT,))
    assert verdict.cause == "not_joined"


def group(name: str, *members: int) -> GroupView:
    """A group of these ranks."""
    return GroupView("job", name, name, "9", name, len(members), list(members), list(members), True)


def lost(name: str, peer: int, of: str = "p", ago_s: float = 5.0, **more: Any) -> Failed:
    """A message of group ``of`` that raised, after which its rank has begun nothing else."""
    return Failed(name, of, 3, "float32", 4000, ago_s, **{"peer": peer, "is_latest": True, **more})


def raised(of: str = "p", ago_s: float = 30.0, **more: Any) -> Failed:
    """A collective of group ``of`` that raised, after which its rank has begun nothing else."""
    return Failed("all_reduce", of, 7, "float32", 4000, ago_s, **{"is_latest": True, **more})


PAIR = group("p", 1, 3)
DEAD, ENDED = rank(3, state="gone"), rank(3, state="ended")


def test_message_lost() -> None:
    """Where a rank's message raised because the other rank died, the dead rank is named, also by those who wait for the first."""
    (verdict,) = judged(rank(1, failed=[lost("recv", 3)]), DEAD, groups=(PAIR,))
    assert (verdict.kind, verdict.cause, verdict.ranks, verdict.waiting) == ("hang", "dead", [3], [1])
    assert "(rank 1 raised in recv 3 of group p)" in verdict.says

    before = rank(1, failed=[lost("recv", 3, ago_s=600.0)])
    for waiting in (rank(0, op(group="l")), rank(0, op("recv", group="l", peer=1, tag=0, waited_s=30.0))):
        (verdict,) = judged(waiting, before, DEAD, groups=(LEFT, PAIR))
        assert (verdict.cause, verdict.ranks, verdict.waiting, verdict.group) == ("dead", [3], [0], "left")
    (verdict,) = judged(rank(0, op(group="l")), before, rank(3), groups=(LEFT, PAIR))
    assert (verdict.cause, verdict.ranks) == ("not_joined", [1])


def test_each_message_lost() -> None:
    """Each rank that a rank has lost is named, also beside one that ended properly before."""
    both = [lost("recv", 3, "w", 50.0), lost("recv", 2, "w")]
    found = judged(rank(1, failed=both), rank(2, state="gone"), ENDED)
    assert {(verdict.cause, tuple(verdict.ranks)) for verdict in found} == {("dead", (2,)), ("gone", (3,))}


def test_collective_lost() -> None:
    """Where a rank's collective raised because a member died, those who wait for it in another group wait for the dead rank."""
    found = judged(rank(0, op(group="l")), rank(1, failed=[raised()]), DEAD, groups=(LEFT, PAIR))
    assert {(each.cause, tuple(each.ranks)) for each in found} == {("dead", (3,))}


def test_goes_on_after_an_error() -> None:
    """A rank that has begun something since its error is judged by that alone: as if there had been no error."""
    error, groups = raised(ago_s=3600.0, is_latest=False), (LEFT, PAIR, group("q", 1, 2))
    assert judged(rank(0, op(group="l", age_s=3.0)), rank(1, failed=[error]), ENDED, groups=groups) == []
    stopped = rank(1, failed=[error], process="stopped")
    (verdict,) = judged(rank(0, op(group="l")), stopped, ENDED, groups=groups)
    assert (verdict.cause, verdict.ranks) == ("stopped", [1])
    waits = rank(1, op(group="q"), failed=[error])
    (verdict,) = judged(rank(0, op(group="l")), waits, rank(2, process="stopped"), ENDED, groups=groups)
    assert verdict.ranks == [2]
    ended = lost("recv", 3, "w", is_latest=False)
    assert judged(rank(0, op(group="l", age_s=1.0), failed=[ended]), rank(1, op(group="l", age_s=1.0)), ENDED) == []


def test_goes_on_without_one_that_ended() -> None:
    """A rank whose peer ended properly may go on: it is a hang only once it lasts."""
    without = rank(1, failed=[raised(ago_s=100.0)])
    assert judged(rank(0, op(group="l", age_s=3.0)), without, ENDED, groups=(LEFT, PAIR)) == []
    (verdict,) = judged(rank(0, op(group="l")), without, ENDED, groups=(LEFT, PAIR))
    assert (verdict.cause, verdict.ranks) == ("gone", [3])


def test_dead_inside_its_message() -> None:
    """A killed rank is named although its message counts as raised, and not the rank that ended for that."""
    ended, dead = rank(2, state="ended", failed=[lost("send", 3)]), rank(3, state="gone", failed=[lost("recv", 2)])
    (verdict,) = judged(rank(0, op(group="q")), ended, dead, groups=(group("q", 0, 3), group("p", 2, 3)))
    assert (verdict.cause, verdict.ranks) == ("dead", [3])


def test_destroyed_group() -> None:
    """A rank that has destroyed a group is named by who waits or has failed there, and by no one else; it is not lost elsewhere."""
    assert judged(rank(0), rank(1), rank(2, state="left"), rank(3, destroyed=["w"])) == []
    destroyed = rank(3, destroyed=["p"])
    (verdict,) = judged(rank(1, failed=[raised()]), destroyed, groups=(PAIR,))
    assert (verdict.kind, verdict.cause, verdict.ranks, verdict.waiting) == ("hang", "destroyed", [3], [1])
    for waits in (op("recv", group="p", peer=3, tag=0, waited_s=30.0), op(group="p", age_s=3.0)):
        (verdict,) = judged(rank(1, waits), destroyed, groups=(PAIR,))
        assert (verdict.cause, verdict.ranks, verdict.waiting) == ("destroyed", [3], [1])
    (verdict,) = judged(rank(1, failed=[lost("recv", 3)]), destroyed, groups=(PAIR,))
    assert (verdict.cause, verdict.ranks) == ("destroyed", [3])
    behind = rank(0, op(group="l")), rank(1, failed=[raised()]), destroyed
    assert {(each.cause, tuple(each.ranks)) for each in judged(*behind, groups=(LEFT, PAIR))} == {("destroyed", (3,))}
    both = rank(0, op()), rank(1, failed=[raised()]), rank(2, op()), destroyed
    (verdict,) = (each for each in judged(*both, groups=(WORLD, PAIR)) if each.group == "world")
    assert (verdict.cause, verdict.ranks) == ("destroyed", [3])
    goes_on = rank(0, op(group="l")), rank(1), destroyed
    (verdict,) = judged(*goes_on, groups=(LEFT, PAIR))
    assert (verdict.cause, verdict.ranks) == ("not_joined", [1])


def test_destroyed_after_an_error() -> None:
    """A rank that destroyed a group because a collective raised had entered it; those that it had lost are at fault."""
    error, three = raised("t"), group("t", 1, 2, 3)
    gave_up = rank(3, failed=[error], destroyed=["t"])
    found = judged(rank(1, failed=[error]), rank(2, state="gone"), gave_up, groups=(three,))
    assert [(verdict.cause, verdict.ranks, verdict.waiting) for verdict in found] == [("dead", [2], [1, 3])]
    (verdict,) = judged(rank(0, op(group="l")), rank(1, state="left", failed=[raised()]), DEAD, groups=(LEFT, PAIR))
    assert (verdict.cause, verdict.ranks) == ("dead", [3])


def test_destroyed_where_ends_are_not_seen() -> None:
    """A rank that launched less than the others and has destroyed the group is named so."""
    idle = [rank(n, last_seq={"w": 40}, launched_s={"w": 30.0}) for n in (0, 1, 2)]
    (verdict,) = judged(*idle, rank(3, last_seq={"w": 37}, launched_s={"w": 31.0}, destroyed=["w"]))
    assert (verdict.kind, verdict.cause, verdict.ranks, verdict.waiting) == ("hang", "destroyed", [3], [0, 1, 2])


def test_chain_of_losses() -> None:
    """Where a rank ended because it had lost another one, the first to be lost is named; two that lost each other name themselves."""
    waits, lost_it = rank(0, op("recv", peer=1, tag=0, waited_s=30.0)), rank(1, failed=[lost("recv", 2, "w", 20.0)])
    ended = rank(2, state="ended", failed=[lost("recv", 3, "w", 21.0)])
    assert [verdict.ranks for verdict in judged(waits, lost_it, ended, DEAD)] == [[3], [3]]
    other = rank(3, state="ended", failed=[lost("send", 2, "w", 21.0)])
    assert [verdict.ranks for verdict in judged(waits, lost_it, ended, other)] == [[2], [2]]


@pytest.mark.timeout(20)
def test_many_that_lost_each_other() -> None:
    """Ranks that have all lost each other are looked at once each, however many paths of losses there are."""
    numbers = range(2, 18)
    ended = [rank(n, state="ended", failed=[lost("recv", peer, "w") for peer in numbers if peer != n]) for n in numbers]
    waits = rank(0, op("recv", peer=2, tag=0, waited_s=30.0))
    assert [(verdict.cause, verdict.ranks) for verdict in judged(waits, *ended)] == [("gone", [2])]


def test_ended_after_an_error() -> None:
    """A rank that ended because a collective raised had entered it, and is not at fault."""
    group_of = group("t", 1, 2, 3)
    error = raised("t")
    ended = rank(3, state="ended", failed=[error])
    found = judged(
        rank(0, op(group="l")), rank(1, failed=[error]), rank(2, process="stopped"), ended, groups=(LEFT, group_of)
    )
    assert {tuple(verdict.ranks) for verdict in found} == {(1,)}
    found = judged(rank(1, failed=[error]), rank(2, state="gone"), ended, groups=(group_of,))
    assert [(verdict.cause, verdict.ranks, verdict.waiting) for verdict in found] == [("dead", [2], [1])]


def test_cause_before_consequence() -> None:
    """Who only waits itself is not to blame: the rank at the end of the chain is."""
    pair = GroupView("job", "p", "pair", "3", "pair", 2, [2, 3], [2, 3], True)
    ranks = [rank(0, op(age_s=50)), rank(1, op(age_s=50)), rank(2, op(group="p", age_s=55)), rank(3, last=6)]
    ranks[2] = replace(ranks[2], last_seq={"p": 6, "w": 6})
    ranks[3] = replace(ranks[3], last_seq={"p": 6, "w": 7})
    (verdict,) = judged(*ranks, groups=(WORLD, pair))
    assert (verdict.group, verdict.ranks, verdict.waiting) == ("pair", [3], [2])


@pytest.mark.parametrize(
    ("inside_s", "usual_s", "culprit"), [(59.0, 20.0, 2), (31.0, 20.0, 2), (29.0, 20.0, 1), (31.0, 0.01, 2)]
)
def test_culprit_in_a_wait_that_may_be_long(inside_s: float, usual_s: float, culprit: int) -> None:
    """A rank that waits in a group whose operations usually take long is no culprit, unless it came there much later: then it goes on."""
    ab, bc = replace(LEFT, members=[0, 1]), replace(RIGHT, ranks=[1, 2], members=[1, 2])
    waits = rank(1, op(group="r", age_s=inside_s, usual_s=usual_s))
    (verdict,) = judged(rank(0, op(group="l")), waits, rank(2), groups=(ab, bc))
    assert (verdict.cause, verdict.ranks, verdict.group_id) == ("not_joined", [culprit], "l" if culprit == 1 else "r")


def test_behind_in_a_group_and_waiting_in_another() -> None:
    """Where ends are not seen, a rank that has launched less is no culprit if it waits in another group for one that has."""
    dp, tp = replace(LEFT, ranks=[0, 2], members=[0, 2]), replace(RIGHT, ranks=[2, 3], members=[2, 3])
    idle = [
        rank(0, last_seq={"l": 10}, launched_s={"l": 30.0}),
        rank(2, last_seq={"l": 9, "r": 50}, launched_s={"l": 31.0, "r": 30.0}),
        rank(3, last_seq={"r": 49}, launched_s={"r": 31.0}),
    ]
    (verdict,) = judged(*idle, groups=(dp, tp))
    assert (verdict.ranks, verdict.waiting, verdict.group_id) == ([3], [2], "r")


def test_ring_of_waits() -> None:
    """Two ranks that wait for each other in different groups have called them in different orders: one verdict names both, and where each is."""
    (found,) = judged(rank(0, op(group="l")), rank(1, op(group="r")), groups=(LEFT, RIGHT))
    assert (found.kind, found.cause, found.ranks, found.waiting) == ("desync", "order", [0, 1], [])
    assert found.says == (
        "ranks wait for each other in different groups: rank 0 in all_reduce 7 of group left for 60.0 s, without rank 1; "
        "rank 1 in all_reduce 7 of group right for 60.0 s, without rank 0"
    )


def test_one_rank_uses_groups_in_another_order() -> None:
    """Of ranks that wait for each other in two groups of the same members, those are at fault that are not where most wait."""
    groups = tuple(replace(each, ranks=[0, 1, 2], members=[0, 1, 2], size=3) for each in (LEFT, RIGHT))
    (found,) = judged(rank(0, op(group="l")), rank(1, op(group="r")), rank(2, op(group="l")), groups=groups)
    assert (found.kind, found.cause, found.ranks, found.waiting) == ("desync", "order", [1], [0, 2])


def test_bystander_of_a_ring() -> None:
    """Of ranks in two groups that two of them call in different orders, one for which none waits is not at fault: it only waits."""
    tp, dp = replace(LEFT, members=[0, 1]), replace(RIGHT, ranks=[0, 1, 2], members=[0, 1, 2], size=3)
    waits = (rank(0, op(group="l")), rank(1, op(group="r")), rank(2, op(group="r")))
    (found,) = judged(*waits, groups=(tp, dp))
    assert (found.kind, found.cause, found.ranks, found.waiting) == ("desync", "order", [0, 1], [2])


def test_both_receive() -> None:
    """Two ranks that wait for a message from each other are named together; their messages have equal numbers in one group."""
    waits = [rank(n, op("recv", peer=1 - n, tag=0, waited_s=30.0)) for n in (0, 1)]
    (found,) = judged(*waits, rank(2), rank(3))
    assert (found.kind, found.cause, found.ranks, found.op) == ("desync", "order", [0, 1], "recv")
    assert found.says.startswith(
        "ranks wait for each other: rank 0 in recv 7 of group world for 30.0 s, without rank 1;"
    )


def test_chain_with_a_free_end() -> None:
    """If two groups wait for each other and one of them for a rank that waits for none, that rank is to blame."""
    three = replace(WORLD, members=[0, 1, 2], ranks=[0, 1, 2], size=3)
    found = judged(rank(0, op()), rank(1, op(group="l")), rank(2), groups=(three, LEFT))
    assert [(verdict.group, verdict.ranks) for verdict in found] == [("world", [2])]


def test_launches_without_ends() -> None:
    """If ends cannot be observed, a rank that launched less than the others is named once no rank launches any more."""

    def launched(number: int, seq: int, ago_s: float) -> RankView:
        return replace(rank(number), last_seq={"w": seq}, launched_s={"w": ago_s})

    (verdict,) = judged(*(launched(n, 40, 30.0) for n in (0, 1, 2)), launched(3, 37, 31.0))
    assert (verdict.kind, verdict.cause, verdict.ranks, verdict.waiting, verdict.seq) == (
        "stalled",
        "not_joined",
        [3],
        [0, 1, 2],
        40,
    )
    assert "ranks 0-2 launched operation 40 of group world 30.0 s ago, rank 3 operation 37" in verdict.says
    assert judged(*(launched(n, 40, 30.0) for n in range(4))) == []
    assert judged(*(launched(n, 40, 30.0) for n in (0, 1, 2)), launched(3, 37, 1.0)) == []
    assert judged(*(launched(n, 40, 30.0) for n in (0, 1, 2))) == []


def test_unaligned() -> None:
    """The numbers of a group that was used before the probe came do not compare: no verdict."""
    assert judged(rank(0, op()), rank(1, op("broadcast")), groups=(replace(WORLD, aligned=False),)) == []


def test_lives_apart() -> None:
    """Ranks of a life that the job has left behind are neither dead nor inside: of those of now only what is seen counts."""
    old = [rank(n, state="gone", restart=0, last=50) for n in range(4)]
    now = [rank(n, op(), restart=1) for n in (0, 1, 2)]
    (verdict,) = judged(*old, *now)
    assert (verdict.cause, verdict.ranks) == ("unseen", [3])
    (verdict,) = judged(*now, *old)
    assert (verdict.cause, verdict.ranks) == ("unseen", [3])


def test_nodes_that_count_restarts_differently() -> None:
    """All ranks that run are of the job's life, as are those that ended in it; a rank of an earlier run never replaces one that runs."""
    failed = [rank(n, op(), restart=1, started_at=60.0) for n in (0, 1)]
    others = [rank(n, op(), restart=0, started_at=61.0) for n in (2, 3)]
    (verdict,) = judged(*failed, *others)
    assert verdict.cause == "stuck", "every rank has entered"
    (verdict,) = judged(*failed, others[0], rank(3, state="gone", restart=0, started_at=61.0, ended_at=70.0))
    assert (verdict.cause, verdict.ranks) == ("dead", [3])
    dead = [rank(n, state="gone", restart=1, started_at=60.0, ended_at=70.0) for n in (0, 1)]
    (verdict,) = judged(*dead, *others)
    assert (verdict.cause, verdict.ranks) == ("dead", [0, 1])
    earlier = [rank(n, state="gone", restart=2, started_at=1.0, ended_at=50.0) for n in range(4)]
    for views in ([*failed, *others, *earlier], [*earlier, *failed, *others]):
        assert {(view.rank, view.state) for view in latest_life(views).values()} == {(n, "running") for n in range(4)}
        assert sorted(latest_life([view for view in views if view.rank != 3 or view.state == "gone"])) == [
            ("job", 0), ("job", 1), ("job", 2)
        ]  # fmt: skip


def test_group_used_before_the_probe_on_one_node() -> None:
    """A group of which some node does not know the numbers is not judged, in whatever order the nodes answer."""
    views = [rank(0, op("all_reduce", 9), last=8), rank(1, op("all_reduce", 5), last=4)]
    here, there = replace(WORLD, ranks=[0]), replace(WORLD, ranks=[1], aligned=False)
    assert judged(*views, groups=(here, there)) == judged(*views, groups=(there, here)) == []


def test_known_before_unseen() -> None:
    """A rank that is known not to have joined is named before ranks that are not observed."""
    (verdict,) = judged(rank(0, op()), rank(1))
    assert (verdict.cause, verdict.ranks) == ("not_joined", [1])


def test_jobs_apart() -> None:
    """Ranks of another job are never looked at, and each job has its own verdict."""
    other = [replace(view, job_id="other") for view in WAITING]
    found = judged(*WAITING, *other, rank(3, state="gone"), groups=(WORLD, replace(WORLD, job_id="other")))
    assert {(verdict.job_id, verdict.cause) for verdict in found} == {("job", "dead"), ("other", "unseen")}


def test_ended_disagreement() -> None:
    """A collective that ended in disagreement is reported for a minute."""
    ranks = {rank: Call("all_reduce", 8, f"float{width}") for rank, width in enumerate((32, 64, 32))}
    what = Disagreement("job", "w", 3, ranks, 5.0)
    verdict = disagreement(what, WORLD)
    assert verdict is not None
    assert (verdict.cause, verdict.ranks, verdict.waiting) == ("sizes", [1], [0, 2])
    assert disagreement(replace(what, ago_s=600), WORLD) is None
    assert disagreement(replace(what, ranks=dict.fromkeys(range(3), ranks[0])), WORLD) is None
    verdict = disagreement(replace(what, ranks={n: Call("broadcast", 8, "float32", n) for n in range(3)}), WORLD)
    assert verdict is not None
    assert (verdict.cause, verdict.ranks, verdict.waiting) == ("root", [0, 1, 2], [])


# -- stragglers


@pytest.mark.parametrize("steps", [100, None])
def test_straggler(steps: int | None) -> None:
    """The verdict names the rank, how late it is in a step where steps are marked, and what that costs."""
    verdict = late_in_world(Late(2, 4_500_000_000, 10_000_000_000, steps))
    assert (verdict.kind, verdict.cause, verdict.ranks, verdict.waiting) == ("straggler", "late", [2], [0, 1, 3])
    by = "late by 45 ms a step (mean of 100 steps)" if steps else "late"
    assert verdict.says == (
        f"straggler: rank 2 is {by} in group world; in 10.0 s the others waited 45% of the time for it"
    )


def test_straggler_in_few_steps() -> None:
    """Of a rank that is late in few steps, the verdict has how many these are and how late it is in them, not a mean of all steps; and when that was."""
    verdict = late_in_world(Late(2, 4_500_000_000, 10_000_000_000, 100, 3_000_000_000, 10))
    assert "rank 2 is late in 10 of 100 steps, by 450 ms each in group world; in 10.0 s" in verdict.says
    assert (verdict.since_s, verdict.ago_s) == (13.0, 3.0)


def test_hanging_rank_is_no_straggler() -> None:
    """The straggler verdict on a rank that hangs is dropped. Verdicts on other ranks and other jobs are kept."""
    late = [
        replace(late_in_world(Late(rank, S, 10 * S, None)), job_id=job) for job in ("job", "other") for rank in (1, 2)
    ]
    hang = replace(late[0], kind="hang", cause="stopped")
    assert combined([hang], late) == [hang, *late[1:]]
    assert combined([], late) == late


def test_late_in_several_groups() -> None:
    """Who waits for a straggler is counted over all groups in which it is late, and a rank that waits in two of them with the longer wait only."""
    job, of = WORLD.job_id, {}
    for name, members in (("tp", [0, 1]), ("dp", [0, 2, 3]), ("other", [0, 1])):
        of[job, name] = replace(WORLD, group_id=name, group=name, size=len(members), members=members, ranks=members)
    late = Late(0, 3 * S, 10 * S, None, also=(("dp", 0.2), ("other", 0.1)))
    verdict = straggler_verdict(late, of, (job, "tp"))
    assert (verdict.group, verdict.ranks, verdict.waiting) == ("tp", [0], [1, 2, 3])
    assert verdict.cost_share == pytest.approx(0.3)
    assert verdict.idles == pytest.approx(0.3 + 2 * 0.2)
    assert "30% of the time for it, and in dp (20%), other (10%)" in verdict.says
    assert waited_for([verdict], None, 4) == pytest.approx(0.7 / 4)


def test_messages_for_others() -> None:
    """What ranks wait for the messages of a straggler is not counted twice."""
    assert for_others(0.48, waiting=0.40, measured=None) == pytest.approx(0.08)
    assert for_others(0.48, waiting=0.40, measured=0.35) == pytest.approx(0.43)
    assert for_others(0.30, waiting=0.40, measured=None) == 0
    assert for_others(None, waiting=0.40, measured=None) is None


@pytest.mark.parametrize(
    ("costs", "waiting", "share"),
    [([], None, None), ([], 0.2, 0.2), ([0.4], 0.2, 0.3), ([0.1, None], 0.2, 0.2), ([0.4], None, 0.3)],
)
def test_waited_for(costs: list[float | None], waiting: float | None, share: float | None) -> None:
    """Of four ranks three wait for a straggler: what ranks wait for late ones is, as a mean, at least three quarters of its cost."""
    found = [replace(late_in_world(Late(1, S, 10 * S, None)), cost_share=cost, idle_ranks=None) for cost in costs]
    assert waited_for(found, waiting, 4) == (None if share is None else pytest.approx(share))


def test_waiting_is_for_the_late_ranks() -> None:
    """Late ranks are named beside the waiting if half of it is for them, at least: the rest is for others."""
    found = [
        replace(late_in_world(Late(rank, S, 10 * S, None)), cost_share=cost) for rank, cost in ((2, 0.1), (1, 0.2))
    ]
    assert [awaited_ranks(found, waiting) for waiting in (None, 0.3, 0.4, 0.41)] == [[1, 2], [1, 2], [1, 2], []]
    assert awaited_ranks([replace(found[0], kind="hang")], 0.1) == []
