"""How incidents open, get worse, end and come back."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from commwatch_agent.incidents.alerts import alerts_of
from commwatch_agent.incidents.answers import view_of
from commwatch_agent.incidents.incident import JOB_ENDED, RECOVERED, Condition, EvidenceItem, Incident
from commwatch_agent.incidents.lifecycle import COMES_BACK_S, GAP_S, MOST_EVIDENCE, Around, Table, advanced
from commwatch_agent.incidents.words import what_to_do
from commwatch_alerts.model import CRITICAL, INFO, WARNING, Kind, Rule
from commwatch_alerts.receivers.payload import description

T0 = 1_700_000_000.0


def rule(name: str, kind: str, for_s: float, keep_s: float, severity: str = WARNING, **about: Any) -> Rule:
    return Rule(name, "", for_s, keep_s, severity, summary=f"{name} [of {{rank}}]", description="", kind=kind, **about)


KINDS = (
    Kind("hang", WARNING, 0, 60, "", "Hang"),
    Kind("stalled", INFO, 0, 60, "", "Stalled"),
    Kind("comm_bound", WARNING, None, 300, "", "Share"),
    Kind("rank_lost", WARNING, 0, 60, "", "Lost"),
    Kind("straggler", WARNING, 0, 60, "", "Late"),
)
RULES = {
    "hang": [rule("Hang", "hang", 30, 120, CRITICAL, above=10.0)],
    "stalled": [rule("Stalled", "stalled", 0, 120, above=600.0)],
    "comm_bound": [
        rule("Share", "comm_bound", 300, 300, above=0.3),
        rule("Share", "comm_bound", 300, 300, INFO, variant="quiet", above=0.3),
        rule("ShareCritical", "comm_bound", 600, 300, CRITICAL, above=0.5),
    ],
    "rank_lost": [rule("Lost", "rank_lost", 60, 0), rule("Lost", "rank_lost", 60, 0, INFO, variant="all")],
}
TABLE = Table({kind.name: kind for kind in KINDS}, RULES, runbook_url="http://agent/runbook#{}".format)


def wait(kind: str = "hang", *ranks: int, value: float = 12.0, seq: int = 7, **about: Any) -> Condition:
    """Ranks 0 and 2 are in an operation for which others do not come."""
    about = {"waiting": (0, 2), "idle_ranks": 4.0, **about}
    return Condition(kind, ("g", str(seq)), "stuck", T0 - 10, "train", "key", ranks=ranks, value=value, **about)


def share(value: float, variant: str = "") -> Condition:
    return Condition("comm_bound", (), "much", T0, "train", "key", value=value, variant=variant)


class Scene:
    """Incidents over time."""

    def __init__(self, known: Iterable[Incident] = ()) -> None:
        self.now, self.known = T0, list(known)

    def see(self, *conditions: Condition, after: float = 0.0, **around: Any) -> list[Incident]:
        """What there is so many seconds later."""
        self.now += after
        self.known = advanced(
            conditions,
            self.known,
            TABLE,
            Around(self.now, common={"key": "common"}, host="host", owners={"train": "alice, train.py"}, **around),
        )
        return self.known

    def last(self, *conditions: Condition, for_s: float, every_s: float = 1.0, **around: Any) -> list[Incident]:
        """The same conditions for so long."""
        for _ in range(round(for_s / every_s)):
            self.see(*conditions, after=every_s, **around)
        return self.known


def fired(incident: Incident) -> list[tuple[str, str]]:
    return [(each.name, each.severity) for each in incident.alerts if each.fired_at and not each.resolved_at]


def test_opens_at_once_or_after_a_time() -> None:
    """A hang is open as it is seen, with the time at which it began; a share only once it has held, and is pending before."""
    (hang,) = Scene().see(wait("hang", 1))
    assert (hang.state, hang.severity, hang.began_at, hang.seen_at) == ("open", WARNING, T0 - 10, T0)
    scene = Scene()
    assert [each.state for each in scene.see(share(0.4))] == ["pending"]
    assert [each.state for each in scene.last(share(0.4), for_s=299)] == ["pending"]
    (bound,) = scene.see(share(0.4), after=1)
    assert (bound.state, bound.severity, fired(bound)) == ("open", WARNING, [("Share", WARNING)])


def test_gets_worse() -> None:
    """The severity is that of the worst alert that fires, and does not go down while the incident lasts."""
    scene = Scene()
    scene.see(wait("hang", 1))
    assert scene.last(wait("hang", 1), for_s=29)[0].severity == WARNING
    (hang,) = scene.see(wait("hang", 1), after=1)
    assert (hang.severity, fired(hang)) == (CRITICAL, [("Hang", CRITICAL)])
    scene = Scene()
    scene.last(share(0.6), for_s=601)
    (bound,) = scene.last(share(0.4), for_s=400)
    assert (bound.severity, fired(bound)) == (CRITICAL, [("Share", WARNING)])


def test_information_only() -> None:
    """A share of the quiet variant is an incident for information."""
    (bound,) = Scene().last(share(0.6, "quiet"), for_s=301)
    assert (bound.state, bound.severity, fired(bound)) == ("open", INFO, [("Share", INFO)])


def test_learns_its_culprit() -> None:
    """A wait that becomes a hang once its culprit is known is one incident, and keeps its id; so is one that loses sight of it."""
    scene = Scene()
    (first,) = scene.see(wait("stalled", cause="unseen"))
    (then,) = scene.see(wait("hang", 1, cause="stopped"), after=5)
    (later,) = scene.see(wait("stalled", cause="not_joined"), after=5)
    assert first.id == then.id == later.id
    assert (first.kind, then.kind, later.kind) == ("stalled", "hang", "hang")
    assert (first.ranks, then.ranks, later.ranks, later.cause) == ((), (1,), (1,), "stopped")


def test_alerts_of_what_is_known() -> None:
    """A hang of which less is known, as after a restart of the agent, raises no alert on a stall; its own goes on, or fires in its time."""
    for known_s in (5, 40):
        scene = Scene()
        scene.last(wait("hang", 1, cause="stopped"), for_s=known_s)
        (hang,) = scene.last(wait("stalled", 0, cause="not_joined", value=700.0), for_s=200)
        assert (hang.kind, [each.name for each in hang.alerts]) == ("hang", ["Hang"])
        assert hang.alerts[0].fired_at == T0 + 1 + 30
        (over,) = scene.last(for_s=130)
        assert (over.state, fired(over)) == ("ended", [])


@pytest.mark.parametrize(
    ("before", "after", "same"),
    [
        (("hang", "stopped", 1), 1, True),
        (("hang", "stopped", 1), 0, True),
        (("stalled", "not_joined", 1), 0, True),
        (("stalled", "not_joined", 1), 1, False),
    ],
    ids=["the culprit is killed", "one that waits is killed", "in a stall", "one that worked dies"],
)
def test_ranks_that_are_lost_in_a_wait(before: tuple[str, str, int], after: int, same: bool) -> None:
    """Ranks that are killed in a wait whose culprit is known are not its culprits; a rank that worked is, once it dies."""
    kind, cause, rank = before
    scene = Scene()
    scene.last(wait(kind, rank, cause=cause), for_s=3)
    (found,) = scene.see(wait("hang", after, cause="dead"), after=1)
    assert (found.kind, found.cause, found.ranks) == ((kind, cause, (rank,)) if same else ("hang", "dead", (after,)))
    assert found.last_at == scene.now


def test_interrupted_in_a_wait() -> None:
    """Ctrl-C, which ends one rank before another one, makes no wait, and changes nothing that was known of one."""
    over = wait("hang", 1, cause="gone", variant="interrupted")
    scene = Scene()
    assert scene.see(over) == []
    (stall,) = scene.last(wait("stalled", 1, cause="not_joined"), for_s=3)
    (found,) = scene.see(over, after=1)
    assert (found.id, found.kind, found.cause, found.last_at) == (stall.id, "stalled", "not_joined", scene.now)
    (ended,) = scene.see(after=1, ended_runs={"key"})
    assert (ended.kind, ended.outcome) == ("stalled", JOB_ENDED)
    assert scene.see(over, after=1, ended_runs={"key"}) == [ended]


def test_other_operations_are_other_incidents() -> None:
    """Two waits for two operations are two incidents."""
    found = Scene().see(wait("hang", 1, seq=7), wait("hang", 1, seq=8))
    assert len({each.id for each in found}) == 2


def test_ends_and_comes_back() -> None:
    """It ends when its condition has been gone for a while, at the time when that last held; soon after it goes on, later another one begins."""
    scene = Scene()
    (hang,) = scene.see(wait("hang", 1))
    assert [each.state for each in scene.last(for_s=59)] == ["open"]
    (ended,) = scene.see(after=1)
    assert (ended.state, ended.ended_at, ended.outcome) == ("ended", T0, "recovered")
    (again,) = scene.see(wait("hang", 1), after=COMES_BACK_S - 60)
    assert (again.id, again.state, again.ended_at, again.outcome) == (hang.id, "open", None, None)
    scene.last(for_s=200)
    old, new = scene.see(wait("hang", 1))
    assert (old.id, old.state, new.state, new.number) == (hang.id, "ended", "open", 1)
    assert new.id != hang.id


@pytest.mark.parametrize("over", [True, False])
def test_lost_again(over: bool) -> None:
    """A rank that is lost again after its launcher has started it anew is another incident: what was known of the first loss stays."""

    def lost(says: str, ago_s: float) -> Condition:
        return Condition("rank_lost", ("1",), says, scene.now - ago_s, "train", "key", ranks=(1,))

    scene = Scene()
    (first,) = scene.see(lost("ValueError", 3.0))
    assert scene.see(lost("ValueError", 3.0))[0].id == first.id
    if over:  # all ranks have ended, and begin anew
        scene.see(after=1, ended_runs={"key"})
    scene.last(for_s=10)
    old, new = scene.see(lost("RuntimeError", 2.0))
    assert (old.id, old.says, old.state, new.says, new.state) == (
        first.id,
        "ValueError",
        "ended",
        "RuntimeError",
        "open",
    )
    assert (new.number, len(scene.see(lost("RuntimeError", 2.0)))) == (1, 2)
    scene.see(after=1, ended_runs={"key"})
    scene.now += 5
    for _ in range(2):  # found only once the run is over
        *_, last = scene.see(lost("KeyError", 2.0), ended_runs={"key"})
        assert (last.number, last.says, last.state, len(scene.known)) == (2, "KeyError", "ended", 3)


def test_flicker() -> None:
    """A condition that comes and goes within a minute is one incident, and its alert fires in time."""
    scene = Scene()
    for _ in range(10):
        scene.last(wait("hang", 1), for_s=5)
        scene.last(for_s=GAP_S - 1)
    (hang,) = scene.known
    assert (hang.state, fired(hang)) == ("open", [("Hang", CRITICAL)])


def test_pending_ones_are_forgotten() -> None:
    """What has not held for long enough leaves nothing."""
    scene = Scene()
    scene.last(share(0.4), for_s=200)
    assert [each.state for each in scene.last(for_s=GAP_S - 1)] == ["pending"]
    assert scene.last(for_s=2) == []


def test_alert_stays_for_a_while() -> None:
    """An alert fires on for ``keep_firing_for``, and its incident is open for as long, but no longer holds."""
    scene = Scene()
    (found,) = scene.last(wait("hang", 1), for_s=40)
    assert [one.holds for one in (found, *scene.see(after=GAP_S - 1), *scene.see(after=1))] == [True, True, False]
    assert [one.holds for one in (*scene.see(wait("hang", 1)), *scene.see(after=GAP_S))] == [True, False]
    assert fired(scene.last(for_s=104)[0]) == [("Hang", CRITICAL)]
    (ended,) = scene.see(after=1)
    assert (ended.state, ended.holds, ended.ended_at) == ("ended", False, T0 + 55)
    assert [each.resolved_at for each in ended.alerts] == [T0 + 175]


def test_ends_with_the_job() -> None:
    """The end of a run ends its open incidents at once, and drops pending ones; what is found only then is kept as ended."""
    scene = Scene()
    scene.last(wait("hang", 1), share(0.4), for_s=40)
    lost = Condition("rank_lost", ("1",), "died", T0 + 39, "train", "key", ranks=(1,))
    found = {each.kind: each for each in scene.see(lost, ended_runs={"key"})}
    assert {kind: (each.state, each.outcome) for kind, each in found.items()} == {
        "hang": ("ended", "job_ended"),
        "rank_lost": ("ended", "job_ended"),
    }
    assert found["hang"].alerts[0].resolved_at == T0 + 40
    assert scene.last(lost, for_s=300, ended_runs={"key"}) == scene.known
    assert all(each.state == "ended" for each in scene.known)


def test_loss_that_ends_the_job() -> None:
    """The alert of a loss that ended its job fires at once, and for as long as its kind lasts; that of a loss for information or of long ago does not."""
    over: Any = {"ended_runs": {"key"}}

    def lost(ago_s: float, **about: Any) -> Condition:
        final = {"is_final": True, **about}
        return Condition("rank_lost", ("1",), "died", T0 - ago_s, "train", "key", ranks=(1,), **final)

    scene = Scene()
    (first,) = scene.see(lost(2, is_final=False))
    assert fired(first) == []
    (ended,) = scene.see(lost(2), after=1, **over)
    assert (ended.state, fired(ended)) == ("ended", [("Lost", WARNING)])
    assert fired(scene.last(lost(2), for_s=30, **over)[0]) == [("Lost", WARNING)]
    assert fired(scene.last(for_s=29, **over)[0]) == [("Lost", WARNING)]
    (past,) = scene.see(lost(2), after=1, **over)
    assert (fired(past), [each.resolved_at for each in past.alerts]) == ([], [T0 + 61])
    assert scene.last(lost(2), for_s=30, **over) == [past]
    (found_afterwards,) = Scene().see(lost(2), **over)
    assert (found_afterwards.state, fired(found_afterwards)) == ("ended", [("Lost", WARNING)])
    for quiet in (lost(3600), lost(2, variant="all"), lost(2, is_final=False)):
        (one,) = Scene().see(quiet, **over)
        assert (one.state, one.alerts) == ("ended", ())


def test_lost_twice_within_a_minute() -> None:
    """The alert of the first loss of a rank that its launcher starts again ends, also if the rank is lost again while it fires."""

    def lost() -> Condition:
        return Condition("rank_lost", ("1",), "died", scene.now - 2, "train", "key", ranks=(1,), is_final=True)

    scene = Scene()
    scene.see(lost(), ended_runs={"key"})
    scene.last(for_s=20)
    first, second = scene.see(lost(), after=1, ended_runs={"key"})
    assert (second.number, fired(first), fired(second)) == (1, [("Lost", WARNING)], [("Lost", WARNING)])
    first, second = scene.last(for_s=45)
    assert (fired(first), fired(second)) == ([], [("Lost", WARNING)])
    assert [fired(each) for each in scene.last(for_s=20)] == [[], []]


def test_fires_as_its_job_ends() -> None:
    """An alert that begins to fire in the look in which its job ends fires on, so that it is sent; one that fired before ends with the job."""
    differ = Condition("desync", ("g", "7"), "sizes", T0 - 1, "train", "key", ranks=(1,))
    kinds = {**TABLE.kinds, "desync": Kind("desync", CRITICAL, 0, 900, "", "Desync")}
    found = replace(TABLE, kinds=kinds, rows={**RULES, "desync": [rule("Desync", "desync", 0, 0, CRITICAL)]})

    def see(known: Iterable[Incident], after: float, *conditions: Condition, over: bool) -> list[Incident]:
        return advanced(conditions, known, found, Around(T0 + after, ended_runs={"key"} if over else ()))

    (new,) = see([], 0, differ, over=True)
    assert (new.state, fired(new)) == ("ended", [("Desync", CRITICAL)])
    assert [fired(*see([new], after, over=True)) for after in (59, 60)] == [[("Desync", CRITICAL)], []]
    known = see(see([], 0, differ, over=False), 1, differ, over=True)
    assert [(each.state, fired(each)) for each in known] == [("ended", [])]


def test_error_in_the_log_of_an_earlier_life() -> None:
    """An error in a log ends with its job: it is none of the job that its launcher starts again, nor of a job that is no longer in memory; a new line is."""
    kinds = {**TABLE.kinds, "nccl_fault": Kind("nccl_fault", WARNING, None, 300, "", "Errors")}
    found = replace(TABLE, kinds=kinds, rows={**RULES, "nccl_fault": [rule("Errors", "nccl_fault", 0, 0)]})
    known: list[Incident] = []

    def see(after: float, *numbers: int, run: str = "key", over: bool = False) -> list[tuple[int, str]]:
        nonlocal known
        lines = tuple(EvidenceItem("nccl_log", T0, "closed", {"line": number}) for number in numbers)
        error = Condition("nccl_fault", ("peer_lost",), "closed", T0 + after, "train", run, value=1.0, evidence=lines)
        known = advanced([error], known, found, Around(T0 + after, ended_runs={"key"} if over else ()))
        return [(each.number, each.state) for each in known]

    assert see(0, 7, over=True) == [(0, "ended")]
    assert see(5, 7) == see(300, 7) == see(600, 7, run="") == [(0, "ended")]
    assert see(610, 7, 9) == [(0, "ended"), (1, "open")]


def test_job_that_ended_while_the_agent_was_away() -> None:
    """An incident of a job whose end was not seen ends when its condition last held."""
    scene = Scene()
    scene.see(wait("hang", 1))
    (ended,) = scene.see(after=600, ended_runs={"key"}, looks_since=T0 + 500)
    assert (ended.ended_at, ended.outcome) == (T0, "job_ended")


@pytest.mark.parametrize(
    ("since_s", "settled", "outcome"),
    [
        (8.0, True, RECOVERED),
        (50.0, True, RECOVERED),
        (1.0, True, JOB_ENDED),
        (8.0, False, JOB_ENDED),
        (30.0, False, RECOVERED),
    ],
    ids=["well before", "long before", "with it", "not known", "long before, by a new agent that saw it"],
)
def test_wait_that_was_over_before_the_end(since_s: float, settled: bool, outcome: str) -> None:
    """A wait that was over some seconds before its job ended has recovered, when it was last seen; one that lasted ended with the job."""
    scene = Scene()
    (last,) = scene.last(wait("hang", 1), for_s=5)
    (ended,) = scene.see(after=since_s, ended_runs={"key"}, is_settled=settled)
    at = last.last_at if outcome == RECOVERED else scene.now
    assert (ended.state, ended.outcome, ended.ended_at) == ("ended", outcome, at)


def test_another_run_of_that_name() -> None:
    """Two runs of one name have incidents of their own, also of the same rank."""
    lost = Condition("rank_lost", ("1",), "died", T0, "train", "key", ranks=(1,))
    found = Scene().see(lost, replace(lost, run="other"))
    assert len({each.id for each in found}) == 2


def test_not_settled() -> None:
    """While an agent that has just started may not see everything yet, nothing ends, and what was pending goes on."""
    first = Scene()
    first.last(wait("hang", 1), share(0.4), for_s=100)
    second = Scene(first.known)
    second.now = first.now + 30
    assert [each.state for each in second.last(for_s=50, is_settled=False)] == ["open", "pending"]
    found = {each.kind: each for each in second.last(wait("hang", 1), share(0.4), for_s=130)}
    assert found["comm_bound"].state == "open"
    assert found["hang"].seen_at == first.known[0].seen_at


def test_id_on_all_nodes() -> None:
    """An incident has the same id on nodes that know its run by other keys."""
    here = Scene().see(wait("hang", 1))
    there = advanced(
        [replace(wait("stalled"), run="other")], [], TABLE, Around(T0 + 3, common={"other": "common"}, host="two")
    )
    assert here[0].id == there[0].id
    assert advanced([wait("hang", 1)], [], TABLE, Around(T0, host="three"))[0].id != here[0].id


def test_cost() -> None:
    """The cost is the time of the ranks that do nothing, from the begin; it is unknown where that is unknown, and stands still in gaps of the evidence only."""
    scene = Scene()
    assert scene.see(wait("hang", 1))[0].cost_rank_s == 40.0
    assert scene.last(wait("hang", 1), for_s=10)[0].cost_rank_s == pytest.approx(80.0)
    scene.last(for_s=50)
    assert scene.known[0].cost_rank_s == pytest.approx(80.0)
    assert Scene().last(share(0.4), for_s=400)[0].cost_rank_s is None


def late(began_at: float, last_at: float, says: str = "late") -> Condition:
    """Rank 1 was late from then to then, by half of the time; ranks 0 and 2 waited."""
    return Condition(
        "straggler", ("1",), says, began_at, "train", "key", ranks=(1,), waiting=(0, 2), idle_ranks=1.0, last_at=last_at
    )


def recovered(scene: Scene) -> None:
    """A rank is late for 30 s, and named for 20 s more."""
    for _ in range(21):
        scene.see(late(scene.now - 9, scene.now + 1, "all of it"), after=1)
    for _ in range(20):
        scene.see(late(T0 + 15, T0 + 21, "the rest"), after=1)


@pytest.mark.parametrize("its_job_ends_after_s", [None, 2, 20, 40])
def test_late_rank_that_has_recovered(its_job_ends_after_s: int | None) -> None:
    """A late rank that is on time again was late, and cost, until then: not until it is no more named, nor until its job ends."""
    scene = Scene()
    recovered(scene)
    (known,) = scene.known
    assert (known.state, known.holds, known.says, known.began_at) == ("open", False, "all of it", T0 - 9)
    assert view_of(known).last_at == T0 + 21
    if its_job_ends_after_s is None:
        scene.last(for_s=61)
    else:
        scene.last(for_s=its_job_ends_after_s - 1)
        scene.see(after=1, ended_runs={"key"})
    (known,) = scene.known
    assert (known.ended_at, known.outcome) == (T0 + 21, RECOVERED)
    assert known.cost_rank_s == pytest.approx(30)


@pytest.mark.parametrize(
    ("share", "late_s", "severity"), [(0.08, 10, INFO), (0.08, 30, WARNING), (0.4, 10, WARNING), (0.02, 100, INFO)]
)
def test_late_for_a_moment(share: float, late_s: int, severity: str) -> None:
    """A late rank is a warning while it lasts; one that recovers is information afterwards if it cost little of a minute, or of the time until then."""
    scene = Scene()
    for at in range(late_s):
        condition = late(T0, T0 + at, "late")
        assert scene.see(replace(condition, idle_ranks=2 * share), after=1)[0].severity == WARNING
    assert scene.last(for_s=100)[0].outcome == RECOVERED
    assert scene.known[0].severity == severity


def test_late_for_a_moment_again() -> None:
    """A rank that is late again after a passing lateness is a warning again, and stays one if it is late as its job ends."""
    scene = Scene()
    for _ in range(5):
        scene.see(replace(late(T0, scene.now), idle_ranks=0.1), after=1)
    assert scene.last(for_s=61)[0].severity == INFO
    assert scene.see(replace(late(scene.now - 5, scene.now), idle_ranks=0.1), after=1)[-1].severity == WARNING
    assert scene.see(after=1, ended_runs={"key"})[-1].outcome == JOB_ENDED
    assert [each.severity for each in scene.known] == [INFO, WARNING]


def test_late_until_the_end() -> None:
    """A rank that is late in the last steps is late until its job ends."""
    scene = Scene()
    scene.see(late(T0 - 10, T0))
    scene.see(after=2, ended_runs={"key"})
    assert (scene.known[0].ended_at, scene.known[0].outcome) == (T0 + 2, JOB_ENDED)


def test_cost_of_an_earlier_begin() -> None:
    """What is found later to have begun earlier costs from then on."""
    scene = Scene()
    scene.see(late(T0 - 10, T0))
    scene.see(late(T0 - 25, T0 + 1), after=1)
    assert scene.known[0].began_at == T0 - 25
    assert scene.known[0].cost_rank_s == pytest.approx(26)


def test_cost_of_what_begins_anew_at_each_look() -> None:
    """A condition whose begin is not known, as of metrics, costs from the first look on, and nothing in the time that it was gone."""
    scene = Scene()
    for _ in range(400):
        scene.see(replace(share(0.4), began_at=scene.now + 1, idle_ranks=2.0), after=1)
    assert scene.known[0].cost_rank_s == pytest.approx(2 * 399)
    scene.last(for_s=50)
    scene.see(replace(share(0.4), began_at=scene.now + 1, idle_ranks=2.0), after=1)
    scene.see(replace(share(0.4), began_at=scene.now + 1, idle_ranks=2.0), after=1)
    assert scene.known[0].cost_rank_s == pytest.approx(2 * 400)


def test_evidence_is_kept_once() -> None:
    """The same evidence is kept as it was first seen; there is a limit."""
    scene = Scene()
    item = EvidenceItem("probe", T0, "for 10 s", {"cause": "stopped"})
    scene.see(wait("hang", 1, evidence=(item,)))
    later = EvidenceItem("probe", T0 + 1, "for 11 s", {"cause": "stopped"})
    assert scene.see(wait("hang", 1, evidence=(later,)), after=1)[0].evidence == (item,)
    for n in range(2 * MOST_EVIDENCE):
        scene.see(wait("hang", 1, evidence=(EvidenceItem("probe", T0, "", {"n": n}),)), after=1)
    assert len(scene.known[0].evidence) == MOST_EVIDENCE


def test_texts_and_labels() -> None:
    """An alert has the labels of its incident as they were when it fired, those of the settings behind its own, and texts of now."""
    scene = Scene()
    scene.last(wait("hang"), for_s=31, labels={"cluster": "east", "severity": "mine"})
    (hang,) = scene.see(wait("hang", 1), after=1)
    (alert,) = hang.alerts
    assert alert.labels == {"cluster": "east", "job_id": "train", "alertname": "Hang", "severity": "critical"}
    assert alert.annotations["summary"] == "Hang of 1"
    assert alert.annotations["runbook_url"] == "http://agent/runbook#Hang"
    assert alert.annotations["incident"] == hang.id
    assert alert.annotations["where"] == "Job train (alice, train.py), node host, rank 1, ranks 0, 2 waiting."


def test_message_on_a_missing_stack() -> None:
    """The message on an incident has what to do, and what to install for a stack of its culprit, once one could not be taken."""
    scene = Scene()
    (hang,) = scene.last(wait("hang", 1), for_s=31)
    assert hang.alerts[0].annotations["remedy"] == what_to_do("hang", hang.cause, "train", [], is_over=False) != ""
    missing = EvidenceItem("stack", T0, "rank 1: no Python stack", {"rank": 1, "needs": "install py-spy"})
    (hang,) = scene.see(wait("hang", 1, evidence=(missing,)), after=1)
    (hang,) = scene.see(wait("hang", 1), after=1)
    (alert,) = alerts_of(hang)
    where, remedy = alert.annotations["where"], alert.annotations["remedy"]
    assert remedy.endswith("No Python stack of rank 1: install py-spy.")
    assert description(alert).startswith(f"{where} {remedy}")


def test_kinds_that_are_off() -> None:
    """A kind that the settings switch off has no incidents, and open ones end."""
    off = replace(TABLE, kinds={**TABLE.kinds, "hang": replace(TABLE.kinds["hang"], enabled=False)})
    assert advanced([wait("hang", 1)], [], off, Around(T0)) == []
    known = Scene().see(wait("hang", 1))
    (ended,) = advanced([wait("hang", 1)], known, off, Around(T0 + 1))
    assert ended.state == "ended"


@given(st.lists(st.tuples(st.booleans(), st.sampled_from(("hang", "stalled")), st.floats(0.5, 90)), max_size=40))
def test_any_history(moments: list[tuple[bool, str, float]]) -> None:
    """Whatever comes: at most one incident of a subject is not over, times are in order, costs do not fall, ids differ."""
    scene, costs = Scene(), dict[str, float]()
    for there, kind, after in moments:
        scene.see(*([wait(kind, 1)] if there else []), after=after)
        assert sum(each.ended_at is None for each in scene.known) <= 1
        assert len({each.id for each in scene.known}) == len(scene.known)
        for each in scene.known:
            assert each.began_at <= each.last_at <= scene.now
            assert each.ended_at is None or each.began_at <= each.ended_at <= scene.now
            assert (each.cost_rank_s or 0.0) >= costs.get(each.id, 0.0)
            costs[each.id] = each.cost_rank_s or 0.0
