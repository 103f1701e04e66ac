"""Conditions of jobs: from verdicts of all sources, and from how ranks ended; and which explains which."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

from commwatch_agent.analysis.verdict import Verdict
from commwatch_agent.incidents.conclude import FINDERS, conclude
from commwatch_agent.incidents.evidence import Evidence, KnownJob, WholeJob, is_ended
from commwatch_agent.incidents.incident import RECOVERED, Condition, Incident
from commwatch_agent.incidents.job_rules import left_early, lost_ranks, of_verdicts
from commwatch_agent.incidents.lifecycle import Around, Table
from commwatch_agent.incidents.words import title
from commwatch_agent.model.views import Failed, GroupView, InFlight, RankView
from commwatch_alerts.catalogue import read, shipped

NOW = 1_700_000_000.0
JOBS = {"train": KnownJob("key", 4, ended=False)}
GROUP = GroupView("train", "g", "dp", "dp", "", 4, [0, 1, 2, 3], [0, 1, 2, 3], aligned=True)
HANG = Verdict("hang", "stopped", "train", "g", "dp", 7, "all_reduce", [1], [0, 2, 3], 12.0, "rank 1 is stopped")
INSIDE = InFlight("all_reduce", "dp", "g", 7, None, None, None, None, 12.0, True, None, None)
#: A rank that waits in it, and all ranks at once.
ENDED: tuple[tuple[str, tuple[int, ...]], ...] = (("0", (0,)), ("all", ()))
LIST = read(shipped("rules.yaml"))
TABLE = Table(
    LIST.kinds, {name: LIST.rows(name) for name in LIST.kinds}, {one.name: one.value for one in LIST.thresholds}
)


def rank(number: int, state: str = "running", **about: Any) -> RankView:
    view = RankView("train", number, 0, state, "node", 0, 1, "native", None, None, {}, {}, [], [], 0, 0)
    return replace(view, **about)


def ended(*views: RankView) -> list[tuple[str, str, tuple[int, ...]]]:
    """What is found once the job is over: cause, variant of the table, and ranks."""
    jobs = {"train": JOBS["train"]._replace(ended=True)}
    return [(each.cause, each.variant, each.ranks) for each in lost_ranks(Evidence(NOW, jobs, ranks=views))]


def found(*verdicts: Verdict) -> list[Condition]:
    return list(of_verdicts(Evidence(NOW, JOBS, verdicts, groups=[GROUP])))


def test_places_of_a_disagreement() -> None:
    """Ranks that disagree and raise have the place of each side; of a side, that of its first rank."""
    quarrel = replace(HANG, kind="desync", cause="ops", ranks=[1], waiting=[0, 2, 3], sides=[[0, 2, 3], [1]])
    raised = [
        rank(n, "ended", ended_at=NOW - 1, raised="RuntimeError", raised_at=f"step (train.py:{n})") for n in range(3)
    ]
    (one,) = of_verdicts(Evidence(NOW, JOBS, [quarrel], raised, [GROUP]))
    assert [item.data.get("at") for item in one.evidence] == [None, "step (train.py:0)", "step (train.py:1)"]
    assert one.details["sides"] == [[0, 2, 3], [1]]


def test_of_a_verdict() -> None:
    """A condition has what its verdict says, since when by its age, and who does nothing meanwhile."""
    (one,) = found(HANG)
    assert (one.kind, one.cause, one.ranks, one.waiting, one.seq) == ("hang", "stopped", (1,), (0, 2, 3), 7)
    assert (one.began_at, one.value, one.idle_ranks, one.share, one.run) == (NOW - 12, 12.0, 4.0, 1.0, "key")
    assert [(item.source, item.text) for item in one.evidence] == [("probe", HANG.says)]


@pytest.mark.parametrize(("cause", "raised", "variant"), [
    ("gone", "KeyboardInterrupt", "interrupted"), ("gone", "ValueError", ""), ("gone", None, ""), ("not_joined", "KeyboardInterrupt", ""),
])  # fmt: skip
def test_of_a_rank_that_was_interrupted(cause: str, raised: str | None, variant: str) -> None:
    """A wait for a rank that Ctrl-C ended is marked, and no alert of the table holds for it."""
    ended = rank(1, "ended", raised=raised, ended_at=NOW - 5)
    evidence = Evidence(NOW, JOBS, [replace(HANG, cause=cause)], [ended], [GROUP])
    (one,) = of_verdicts(evidence)
    assert one.variant == variant
    (later,) = of_verdicts(replace(evidence, ranks=[replace(ended, ended_at=NOW - 15)]))
    assert later.variant == ""  # the others hang
    assert any(rule.holds(one.variant, 600.0) for rule in TABLE.rows["hang"]) == (not variant)


@pytest.mark.parametrize(
    ("verdict", "says"),
    [
        (
            "stalled: rank 1 has not joined; its process is stopped (x: y)",
            "rank 1 has not joined; its process is stopped (x: y)",
        ),
        ("process dead: rank 1 was killed; stalled: rank 2 has not joined", "rank 1 was killed; rank 2 has not joined"),
        ("roots differ: rank 1: root 2; rank 0: root 0", "roots differ: rank 1: root 2; rank 0: root 0"),
    ],
)
def test_sentence(verdict: str, says: str) -> None:
    """The sentence of an incident leaves out what its title says."""
    assert [each.says for each in found(replace(HANG, says=verdict))] == [says]


def test_known_to_ras_only() -> None:
    """A hang that only NCCL's RAS knows is a condition with its evidence; one that the probe sees too is there once."""
    by_ras = replace(HANG, source="ras", seq=None, cause="dead")
    (one,) = found(by_ras)
    assert (one.kind, one.cause, one.evidence[0].source) == ("hang", "dead", "ras")
    assert [each.evidence[0].source for each in found(HANG, by_ras)] == ["probe"]
    assert len(found(replace(HANG, kind="straggler", cost_share=0.3), by_ras)) == 2


def test_disagreement_that_is_not_known_yet() -> None:
    """That ranks disagree is a condition once the calls of all of them are known, or it is two seconds old."""
    whole = replace(HANG, kind="desync", cause="sizes")
    part = replace(whole, waiting=[0, 3])
    assert [len(found(replace(part, since_s=age_s))) for age_s in (0.5, 1.9, 2.0)] == [0, 0, 1]
    assert len(found(replace(whole, since_s=0.5))) == 1


def test_straggler_is_about_its_rank() -> None:
    """A straggler costs the others its share of their time, and keeps its incident when it is found in another group."""
    late = replace(HANG, kind="straggler", cause="late", cost_share=0.2, since_s=30.0)
    one, other = (found(replace(late, group_id=group))[0] for group in ("g", "h"))
    assert (one.value, one.share) == (0.2, 0.2)
    assert one.idle_ranks == pytest.approx(0.6)
    assert one.key == other.key
    assert "why" not in one.evidence[0].data
    assert found(replace(late, why="it waits", why_code="no_core"))[0].evidence[0].data["why"] == "no_core"


@pytest.mark.parametrize(
    ("raised", "cause"),
    [
        (None, "died"),
        ("ValueError", "exception"),
        ("OutOfMemoryError", "out_of_memory"),
        ("MemoryError", "out_of_memory"),
    ],
)
def test_lost_rank(raised: str | None, cause: str) -> None:
    """A rank that died or raised while the others run is lost after a moment, with its exception and where that was raised."""
    views = [
        rank(0),
        rank(
            1,
            "ended" if raised else "gone",
            ended_at=NOW - 3,
            raised=raised,
            raised_at="load (train.py:8)" if raised else None,
        ),
    ]
    (one,) = lost_ranks(Evidence(NOW, JOBS, ranks=views))
    assert (one.cause, one.ranks, one.began_at) == (cause, (1,), NOW - 3)
    assert ("load (train.py:8)" in one.says) == bool(raised)
    how = f"ended with {raised} in load (train.py:8)"
    assert one.words == {"rank": "1"} | ({"ended_by": f"raised {raised}", "how": how} if raised else {})
    assert list(lost_ranks(Evidence(NOW - 2, JOBS, ranks=views))) == []


@pytest.mark.parametrize(("status", "says", "named"), [
    (-9, "rank 1 died of signal 9 (SIGKILL), on node", "Rank ended by signal 9 (SIGKILL): rank 1"),
    (3, "rank 1 ended with exit code 3, on node", "Rank ended with exit code 3: rank 1"),
    (None, "rank 1 died (no clean end), on node", "Rank died: rank 1"),
])  # fmt: skip
def test_how_a_process_ended(status: int | None, says: str, named: str) -> None:
    """A rank that was lost is named with the signal or the exit code that ended its process, where that is known."""
    views = [rank(0), rank(1, "gone", ended_at=NOW - 3, exit_status=status)]
    (one,) = lost_ranks(Evidence(NOW, JOBS, ranks=views))
    assert (one.says, title(one.kind, one.ranks, one.cause, one.evidence)) == (says, named)


def test_ranks_that_are_not_lost() -> None:
    """A rank that ended well, or that only left its group, is not lost."""
    views = [rank(0), rank(1, "ended", ended_at=NOW - 9), rank(2, "left", ended_at=NOW - 9)]
    assert list(lost_ranks(Evidence(NOW, JOBS, ranks=views))) == []


def test_first_to_fail() -> None:
    """Of a job that is over, the first to fail is to blame; an exception outside of operations is a rank's own fault, those in operations are not."""
    killed = rank(2, "gone", ended_at=NOW - 8, ended_after=NOW - 9)
    victim = rank(0, "ended", ended_at=NOW - 7, ended_after=NOW - 7, raised="RuntimeError", failed_in_operation=True)
    culprit = rank(1, "ended", ended_at=NOW - 7, ended_after=NOW - 7, raised="ValueError")
    assert ended(victim, killed) == [("died", "", (2,))]
    assert ended(victim, culprit, replace(killed, ended_at=NOW - 5, ended_after=NOW - 6.5)) == [("exception", "", (1,))]


def _ended_by_an_error(number: int, seconds: float, **about: Any) -> RankView:
    """A rank that an all_reduce ended, which raised."""
    error = Failed("all_reduce", "g", 150, "float32", 4000, 1.0, is_latest=True)
    at = {"ended_at": NOW - seconds, "ended_after": NOW - seconds, "raised": "RuntimeError"}
    return rank(
        number, "ended", **{**at, "failed_in_operation": True, "failed": [error], "last_seq": {"g": 149}, **about}
    )


def test_left_early() -> None:
    """Of a job that errors in a collective ended, the rank is to blame that had ended properly before without it; those that raised follow."""
    left = rank(1, "ended", ended_at=NOW - 3.5, ended_after=NOW - 3.5, last_seq={"g": 149})
    victims = [
        _ended_by_an_error(0, 3.0),
        _ended_by_an_error(2, 2.9),
        rank(3, "gone", ended_at=NOW - 1, ended_after=NOW - 2),
    ]
    over = Evidence(NOW, {"train": JOBS["train"]._replace(ended=True)}, ranks=[left, *victims], groups=[GROUP])
    (one,) = left_early(over)
    assert (one.kind, one.cause, one.ranks, one.waiting, one.began_at) == ("hang", "gone", (1,), (0, 2), NOW - 3)
    assert one.says == "rank 1 had ended and did not join (ranks 0, 2 raised in all_reduce 150 of group dp)"
    (lost,) = lost_ranks(over)
    assert lost.ranks == (0,)
    assert explains(one, lost)
    for other in (
        replace(left, last_seq={"g": 150}),  # it was in it, too
        replace(left, ended_at=NOW - 2.5),  # it ended later
        replace(left, raised="ValueError"),
        replace(left, rank=7),  # another group
    ):
        assert list(left_early(replace(over, ranks=[other, *victims]))) == []
    assert list(left_early(replace(over, jobs=JOBS))) == []
    stopped = [replace(view, stopped_by=15, stopped_at=NOW - 4) for view in victims]
    assert list(left_early(replace(over, ranks=[left, *stopped]))) == []  # it left as its launcher was asked to end


def test_all_raise_alike() -> None:
    """Ranks that one exception at one place has ended are named together; one that raised in an operation, or elsewhere, is not among them."""
    raised = {"raised": "ValueError", "raised_at": "setup (train.py:8)"}
    alike = [rank(n, "ended", ended_at=NOW - 3 + n / 10, ended_after=NOW - 3 + n / 10, **raised) for n in range(3)]
    other = replace(alike[0], rank=3, raised="KeyError", ended_at=NOW - 1, ended_after=NOW - 1)
    assert ended(*alike, other) == [("exception", "", (0, 1, 2))]
    for_want_of_it = [replace(each, failed_in_operation=True) for each in alike[1:]]
    assert ended(alike[0], *for_want_of_it) == [("exception", "", (0,))]
    (one,) = lost_ranks(Evidence(NOW, {"train": JOBS["train"]._replace(ended=True)}, ranks=[*alike, other]))
    assert (one.words["rank"], one.words["ended_by"]) == ("0-2", "raised ValueError")
    victim = replace(alike[0], failed_in_operation=True, raised="RuntimeError")
    victims = [replace(victim, rank=n, ended_at=NOW - 3 + n / 10, ended_after=NOW - 3 + n / 10) for n in range(3)]
    assert ended(*victims) == [("exception", "", (0,))]


def test_interrupted() -> None:
    """Ctrl-C ends a job, and no rank is to blame, neither one that raised by it nor one that was ended after it."""
    pressed = rank(1, "ended", ended_at=NOW - 3, ended_after=NOW - 3, raised="KeyboardInterrupt")
    killed = rank(2, "gone", ended_at=NOW - 2, ended_after=NOW - 3)
    assert ended(pressed, killed) == ended(pressed) == [("interrupted", "all", ())]
    assert list(lost_ranks(Evidence(NOW, JOBS, ranks=[rank(0), pressed, killed]))) == []


def test_launcher_that_was_asked_to_end() -> None:
    """What ends after a signal to its launcher is no failure, at the time of that signal; what was lost before it is one."""
    told = {"stopped_by": 15, "stopped_at": NOW - 40}
    first = rank(1, "gone", ended_at=NOW - 39, ended_after=NOW - 40, exit_status=-15, **told)
    second = rank(2, "gone", ended_at=NOW - 9, ended_after=NOW - 10, exit_status=-9, **told)
    assert list(lost_ranks(Evidence(NOW, JOBS, ranks=[rank(0), first]))) == []  # its launcher waits for the others
    over = Evidence(NOW, {"train": JOBS["train"]._replace(ended=True)}, ranks=[first, second])
    (one,) = lost_ranks(over)
    assert (one.kind, one.cause, one.ranks, one.began_at) == ("rank_lost", "interrupted", (), NOW - 40)
    assert one.says == "interrupted by SIGTERM, which ended ranks 1-2"
    assert re.fullmatch(r"interrupted by SIGTERM at [\d:]{8} \S+", one.words["how"])
    before = rank(0, "gone", ended_at=NOW - 50, ended_after=NOW - 51, exit_status=-9)
    assert ended(before, first, second) == [("died", "", (0,))]


def test_ended_at_once_by_a_signal() -> None:
    """Ranks that SIGTERM has ended at once were ended by their launcher, which was asked to end; a single one was not."""
    both = [
        rank(n, "gone", ended_at=NOW - 11 + n / 100, ended_after=NOW - 12, exit_status=-15, end_is_reported=True)
        for n in range(2)
    ]
    assert ended(*both) == [("interrupted", "all", ())]
    later = replace(both[1], ended_at=NOW - 10.8)
    assert ended(both[0], later) == [("died", "", (0,))]
    # While others run, each is lost by itself: their launcher may not end them.
    assert len(list(lost_ranks(Evidence(NOW, JOBS, ranks=[*both, rank(2)])))) == 2


def test_wait_for_ranks_of_a_launcher_that_was_asked_to_end() -> None:
    """Ranks that wait for one that has ended because its launcher was asked to end are no hang."""
    dead = rank(3, "gone", ended_at=NOW - 30, ended_after=NOW - 31, stopped_by=15, stopped_at=NOW - 31)
    (one,) = of_verdicts(Evidence(NOW, JOBS, [replace(HANG, cause="dead", ranks=[3])], [rank(0), dead], [GROUP]))
    assert (one.variant, one.evidence) == ("interrupted", ())


def test_killed_together() -> None:
    """Ranks that were all killed at once are for information, unless they soon run again: a job that was cancelled."""
    assert ended(*(rank(n, "gone", ended_at=NOW - 11, ended_after=NOW - 12) for n in range(4))) == [("all", "all", ())]
    assert ended(*(rank(n, "gone", ended_at=NOW - 8, ended_after=NOW - 9) for n in range(4))) == []
    assert ended(*(rank(n, "ended", ended_at=NOW - 8) for n in range(4))) == []


@pytest.mark.parametrize(
    ("states", "size", "is_over"),
    [
        (["running", "ended"], 2, False),
        (["ended", "ended"], 2, True),
        (["gone", "ended"], 2, True),
        (["ended", "ended"], 4, True),  # those elsewhere end with them
        (["gone", "ended"], 4, False),
        (["left", "left"], 2, True),
    ],
)
def test_end_of_a_job(states: list[str], size: int, is_over: bool) -> None:
    """A job is over if no rank runs here and none may run elsewhere."""
    assert is_ended([rank(n, state) for n, state in enumerate(states)], size) == is_over


def test_whole_job_in_place_of_this_node() -> None:
    """What was found on all nodes of a job replaces what this node sees of its ranks."""
    whole = {"train": WholeJob(found(replace(HANG, ranks=[3])), ended=False)}
    alone = replace(HANG, kind="stalled", cause="unseen", ranks=[3])
    evidence = Evidence(NOW, JOBS, [alone], [rank(0)], [GROUP], whole=whole)
    (one,) = conclude(evidence, [], TABLE, Around(NOW))
    assert (one.kind, one.ranks) == ("hang", (3,))
    assert [each.kind for each in conclude(replace(evidence, whole={}), [], TABLE, Around(NOW))] == ["stalled"]


def test_loss_that_ended_the_job() -> None:
    """A loss is final if an exception of its own ended the rank, or if others raised for want of it; that they ended after it does not show that."""
    jobs = {"train": JOBS["train"]._replace(ended=True)}
    died = rank(1, "gone", ended_at=NOW - 5, ended_after=NOW - 5)
    later, elsewhere = (
        replace(died, rank=2, ended_at=NOW - 3, ended_after=NOW - 3, host=host) for host in ("node", "far")
    )
    left = rank(2, "ended", ended_at=NOW - 3, ended_after=NOW - 3)

    def finals(*views: RankView) -> list[bool]:
        return [each.is_final for each in lost_ranks(Evidence(NOW, jobs, ranks=list(views)))]

    assert finals(died, _ended_by_an_error(2, 3.0)) == [True]
    assert finals(replace(died, state="ended", raised="ValueError")) == [True]
    assert finals(died) == finals(died, left) == finals(died, later) == finals(died, elsewhere) == [False]
    (running,) = lost_ranks(Evidence(NOW, JOBS, ranks=[died, rank(0)]))
    assert not running.is_final


def test_kinds_are_those_of_the_table() -> None:
    """Every kind that a rule may find is in the table, and each row that an agent uses has a rule."""
    kinds = {kind for finder in FINDERS for kind in finder.kinds}
    assert kinds <= set(LIST.kinds)
    assert {kind for kind, rows in TABLE.rows.items() if rows} <= kinds


def explains(cause: Condition, effect: Condition) -> bool:
    """Whether of two conditions of one moment one is the cause of the other."""
    known: list[Incident] = []
    evidence = Evidence(NOW, JOBS, whole={"train": WholeJob([cause, effect], ended=False)})
    for second in range(2):
        known = conclude(replace(evidence, now=NOW + second), known, TABLE, Around(NOW + second))
    by_key = {each.key: each for each in known}
    assert by_key[cause.key].consequence_of is None
    return by_key[effect.key].consequence_of == by_key[cause.key].id


def test_causes() -> None:
    """A lost rank explains the wait for it, and not that for another one; a disagreement explains waits; a straggler a share that is mostly waiting for it."""
    hang = found(HANG)[0]
    lost = Condition("rank_lost", ("1",), "died", NOW - 9, "train", "key", ranks=(1,))
    assert explains(lost, hang)
    assert explains(lost, replace(hang, ranks=()))
    assert not explains(lost, replace(hang, ranks=(2,)))
    differ = found(replace(HANG, kind="desync", cause="sizes", seq=9))[0]
    assert explains(differ, hang)
    assert explains(differ, lost)  # a backend may abort the process
    assert not explains(differ, replace(lost, began_at=NOW - 60))
    late = found(replace(HANG, kind="straggler", cause="late", cost_share=0.3))[0]
    much = Condition("comm_bound", (), "much", NOW, "train", "key", value=0.5, share=0.5)
    assert explains(late, much)
    assert not explains(replace(late, share=0.1), much)
    assert not explains(replace(lost, run="another"), hang)
    missing = found(
        replace(HANG, kind="init_incomplete", cause="not_come", op="new_group", group="", group_id="", seq=None)
    )[0]
    stalled = replace(hang, kind="stalled", cause="not_joined")
    assert explains(lost, missing)
    assert explains(missing, stalled)  # its culprit has not come to either
    assert explains(missing, replace(stalled, ranks=(0,)))  # its culprit waits there
    assert not explains(missing, replace(stalled, ranks=(9,)))


def test_raised_without_a_lost_rank() -> None:
    """While a rank lives on, one that an operation ended is a consequence of the loss of the one that was missing there, which nothing explains."""
    failed = rank(1, "ended", ended_at=NOW - 4, ended_after=NOW - 4, raised="ValueError")
    killed = rank(1, "gone", ended_at=NOW - 3, ended_after=NOW - 4)
    victim = _ended_by_an_error(2, 3.5)
    for first in (failed, killed):
        cause, effect = lost_ranks(Evidence(NOW, JOBS, ranks=[rank(0), first, victim]))
        assert (cause.ranks, effect.ranks) == ((1,), (2,))
        assert explains(cause, effect)
    cause, effect = lost_ranks(Evidence(NOW, JOBS, ranks=[rank(0), replace(failed, ended_at=NOW - 2.1), victim]))
    assert not explains(cause, effect)  # it ended later
    both = list(lost_ranks(Evidence(NOW, JOBS, ranks=[rank(0), _ended_by_an_error(1, 4.0), victim])))
    assert not explains(*both)


def test_found_as_the_job_ends() -> None:
    """What is found in the moment in which a job ends has its cause, too: that of one moment, or of before."""
    differ, hang = found(replace(HANG, kind="desync", cause="sizes", seq=9))[0], found(replace(HANG, cause="gone"))[0]
    closed = Condition("nccl_fault", ("gloo_peer_lost",), "closed", NOW, "train", "key", value=1.0)
    lost = Condition("rank_lost", ("0",), "died", NOW, "train", "key", ranks=(0,))
    for cause in (differ, hang):
        evidence = Evidence(NOW, JOBS, whole={"train": WholeJob([closed], ended=False)})
        known = conclude(evidence, [], TABLE, Around(NOW))
        over = Evidence(NOW + 1, JOBS, whole={"train": WholeJob([closed, cause, lost], ended=True)})
        by_key = {each.key: each for each in conclude(over, known, TABLE, Around(NOW + 1, ended_runs={"key"}))}
        assert {each.state for each in by_key.values()} == {"ended"}
        assert by_key[lost.key].consequence_of == by_key[cause.key].id
        assert (by_key[closed.key].consequence_of == by_key[cause.key].id) == (cause is hang)


def test_logs_that_are_read_after_the_end() -> None:
    """An error that a log shows after its job has ended has its cause, which ended with the job; one that recovered before explains nothing."""
    hang = found(replace(HANG, cause="gone"))[0]
    closed = Condition("nccl_fault", ("gloo_peer_lost",), "closed", NOW + 2, "train", "key", value=1.0)
    for recovered in (False, True):
        known = conclude(Evidence(NOW, JOBS, whole={"train": WholeJob([hang], ended=False)}), [], TABLE, Around(NOW))
        if recovered:
            known = [replace(each, state="ended", holds=False, ended_at=NOW + 0.5, outcome=RECOVERED) for each in known]
        for after, conditions in enumerate(([], [closed], [closed]), 1):
            evidence = Evidence(NOW + after, JOBS, whole={"train": WholeJob(conditions, ended=True)})
            known = conclude(evidence, known, TABLE, Around(NOW + after, ended_runs={"key"}))
        by_key = {each.key: each for each in known}
        assert (by_key[closed.key].consequence_of == by_key[hang.key].id) is not recovered


def test_errors_that_follow() -> None:
    """Of errors in logs, a wait explains its time-out, ranks that disagree the backend's error, a lost rank the error of its peers, and a cause its symptoms;
    others have causes of their own."""
    hang = found(HANG)[0]
    lost = Condition("rank_lost", ("1",), "died", NOW - 9, "train", "key", ranks=(1,))

    def logged(name: str, at: float = NOW) -> Condition:
        return Condition("nccl_fault", (name,), "failed", at, "train", "key", value=1.0)

    for name in ("watchdog_timeout", "barrier_failed", "init_incomplete"):
        assert explains(hang, logged(name))
        assert not explains(hang, logged(name, NOW - 60))
        assert not explains(lost, logged(name))
    late = replace(
        logged("gloo_error"), says="an operation failed: Timed out waiting 14000ms for recv operation to complete"
    )
    assert explains(hang, late)
    assert not explains(hang, replace(late, began_at=NOW - 60))
    differ = found(replace(HANG, kind="desync", cause="sizes", seq=9))[0]
    for name in ("mismatch", "gloo_error"):
        assert explains(differ, logged(name))
        assert not explains(hang, logged(name))
    assert not explains(differ, logged("ib_completion_error"))
    assert explains(lost, logged("peer_lost"))
    assert explains(lost, logged("gloo_peer_lost"))
    for name in ("gloo_error", "watchdog_timeout", "peer_lost"):
        assert explains(logged("nccl_failed"), logged(name))
        assert not explains(logged("socket_transport"), logged(name))
    for name in ("cuda_error", "ib_completion_error", "gloo_error"):
        assert not explains(hang, logged(name))
        assert not explains(lost, logged(name))


def test_a_hung_rank_that_is_killed() -> None:
    """A rank that hung before it was lost is the cause of both; a wait for a rank that worked, until it was lost, is the consequence of its loss."""
    for verdict, hung in ((HANG, True), (replace(HANG, kind="stalled", cause="not_joined"), False)):
        (wait,), dead = found(verdict), found(replace(HANG, cause="dead", since_s=40.0))[0]
        lost = Condition("rank_lost", ("1",), "died", NOW + 30, "train", "key", ranks=(1,))
        known: list[Incident] = []
        for second in range(33):
            conditions = [dead, lost] if second > 30 else [wait]
            evidence = Evidence(NOW + second, JOBS, whole={"train": WholeJob(conditions, ended=False)})
            known = conclude(evidence, known, TABLE, Around(NOW + second))
        by_key = {each.key: each for each in known}
        cause, effect = (wait, lost) if hung else (lost, wait)
        assert by_key[effect.key].consequence_of == by_key[cause.key].id
        assert by_key[cause.key].consequence_of is None


def test_ranks_that_are_ended_while_they_wait() -> None:
    """A rank that is lost while it waits in a hang or stall that is known, by a time-out or by its launcher, is a consequence of that."""
    for verdict in (HANG, replace(HANG, kind="stalled", cause="not_joined")):
        (wait,) = found(verdict)
        lost = [Condition("rank_lost", (name,), "died", NOW + 2, "train", "key", ranks=ranks) for name, ranks in ENDED]
        known: list[Incident] = []
        for second in range(5):
            conditions = [wait, *lost] if second > 2 else [wait]
            evidence = Evidence(NOW + second, JOBS, whole={"train": WholeJob(conditions, ended=False)})
            known = conclude(evidence, known, TABLE, Around(NOW + second))
        by_key = {each.key: each for each in known}
        assert {by_key[each.key].consequence_of for each in lost} == {by_key[wait.key].id}


def at(seq: int, **about: Any) -> list[RankView]:
    """The ranks of a hang at collective 7, all of which have ended this one."""
    return [rank(each, last_seq={"g": seq}, **about) for each in range(4)]


@pytest.mark.parametrize(
    ("ranks", "holds"),
    [
        (at(6), True),
        ([*at(9)[:3], *at(6)[3:]], True),  # one is still inside
        (at(7), False),
        (at(9)[:2], False),  # the others are on other nodes
        ([], True),
        (at(9, launched_s={"g": 1.0}), True),  # its end is not seen
        (at(9, in_flight=[INSIDE]), True),  # later ones end before it
    ],
)
def test_over_with_its_operation(ranks: list[RankView], holds: bool) -> None:
    """A standstill that is not found any more is over once its collective has ended on its ranks; the incident goes on if it comes back."""
    known = conclude(Evidence(NOW, JOBS, [HANG], groups=[GROUP]), [], TABLE, Around(NOW))
    known = conclude(Evidence(NOW + 1, JOBS, ranks=ranks, groups=[GROUP]), known, TABLE, Around(NOW + 1))
    assert [(each.state, each.holds) for each in known] == [("open", holds)]
    later = conclude(Evidence(NOW + 2, JOBS, groups=[GROUP]), known, TABLE, Around(NOW + 2))
    assert [each.holds for each in later] == [holds]
    back = conclude(Evidence(NOW + 3, JOBS, [HANG], ranks, groups=[GROUP]), later, TABLE, Around(NOW + 3))
    assert [(each.id, each.holds) for each in back] == [(known[0].id, True)]


@pytest.mark.parametrize("kind", ["comm_bound", "exposed_comm"])
def test_no_share_of_steps_in_a_hang(kind: str) -> None:
    """While ranks hang, no step runs: a share of the steps before is neither pending nor begins; an open incident of it stays, and ends as usual."""
    hang = Condition(
        "hang", ("g", "7"), "hang", NOW, job_id="train", run="key", cause="stopped", ranks=(1,), waiting=(0,)
    )
    of_steps = Condition(kind, (), "much", NOW, job_id="train", run="key", value=0.9)

    def after(known: list[Incident], at_s: float, *conditions: Condition) -> list[Incident]:
        evidence = Evidence(NOW + at_s, JOBS, whole={"train": WholeJob(list(conditions), ended=False)})
        return conclude(evidence, known, TABLE, Around(NOW + at_s))

    pending = after([], 0, of_steps)
    assert [each.state for each in pending] == ["pending"]
    assert [each.kind for each in after(pending, 1, of_steps, hang)] == ["hang"]
    known = pending
    for at_s in range(1, 700):
        known = after(known, at_s, of_steps)
    assert [each.state for each in known] == ["open"]
    assert {each.kind: each.state for each in after(known, 700, of_steps, hang)} == {kind: "open", "hang": "open"}
