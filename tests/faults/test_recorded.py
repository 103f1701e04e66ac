"""The records of jobs of the fault matrix, played again: a change of a rule, or of the replay of steps, is judged in seconds, on the same data."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain, groupby, repeat
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import pytest

from commwatch_agent.analysis.queries import QueryService
from commwatch_agent.analysis.waits.uneven_work import Why, uneven
from commwatch_agent.incidents.conclude import conclude
from commwatch_agent.incidents.evidence import Evidence
from commwatch_agent.incidents.incident import Incident
from commwatch_agent.incidents.lifecycle import Around
from commwatch_agent.model.cells import StepRecord
from commwatch_agent.report import report
from commwatch_agent.report.recorded_steps import model_of
from commwatch_agent.report.timeline_export import Window, own_trace
from commwatch_agent.whatif.replay import replay
from tests.agent.incidents.test_job_rules import JOBS, NOW, TABLE
from tests.faults.contradictions import contradictions, frameworks_of, incident_of
from tests.faults.judging import judge
from tests.faults.recorded import FOLDER, TICK_NS, Look, concluded, file_name, looks, steps_of, views_name
from tests.faults.run import KEPT_S
from tests.faults.scenarios import LATE, RHYTHM, SCENARIOS, Scenario

#: Jobs that have recordings; those of jobs with long waits that none was made of yet are missing.
RECORDED = [*SCENARIOS, *(each for each in RHYTHM if (FOLDER / views_name(each)).exists())]
VIEWED = [each for each in RECORDED if each.has_views]
PLAYED = [each for each in RECORDED if each.has_records]
#: Jobs that mark steps, all of one length.
STEPPING = [each for each in PLAYED if not each.rhythm and not each.name.startswith("unmarked")]
#: Even ones with enough steps for a cycle, whose ranks do not wait for a root: such a wait may be a server's, and has no share.
#: Nor does a thread beside the training mix its operations into those of the cycle, or a rank run out of inputs.
EVEN = [
    each
    for each in STEPPING
    if each.name.endswith(" nothing 0") and not each.shape.startswith(("loader", "heartbeat", "saved", "joined"))
]


def _size(scenario: Scenario) -> int:
    return (FOLDER / file_name(scenario.name)).stat().st_size


def _one_of_each(scenarios: Iterable[Scenario]) -> Iterator[Scenario]:
    """Of each shape and of each fault the job with the smallest file, so that all of them are played in CI."""
    seen: set[str] = set()
    for each in sorted(scenarios, key=_size):
        if new := {each.shape, f"{each.fault} {each.options}"} - seen:
            seen |= new
            yield each


DAILY = [*_one_of_each(PLAYED)]


def _params(scenarios: Sequence[Scenario], daily: Collection[Scenario] = DAILY) -> list[Any]:
    """Return the parameters of a test: those that are not ``daily`` are left to ``make test-long``."""
    marks = [() if each in daily else pytest.mark.long for each in scenarios]
    return [pytest.param(each, marks=mark, id=each.name) for each, mark in zip(scenarios, marks, strict=True)]


class Played(NamedTuple):
    """What came of a job: what was found when, and its history."""

    looks: list[Look]
    history: Path


Play = Callable[[Scenario], Played]


@pytest.fixture(scope="module")
def play(tmp_path_factory: pytest.TempPathFactory) -> Play:
    """Plays a job, once for all tests."""
    done: dict[str, Played] = {}

    def play(scenario: Scenario) -> Played:
        file = file_name(scenario.name)
        if file not in done:
            directory = tmp_path_factory.mktemp("played")
            frameworks = frameworks_of(scenario.shape)
            done[file] = Played(list(looks(FOLDER / file, directory, frameworks)), directory / "h.sqlite")
        return done[file]

    return play


@pytest.mark.parametrize("scenario", _params(PLAYED))
def test_named(scenario: Scenario, play: Play) -> None:
    """In recorded jobs, the ranks at fault are named in time and no other rank ever; an even job names no rank."""
    looks = [(look.at_s - KEPT_S[0], look.late) for look in play(scenario).looks]
    expected = set(scenario.ranks) if scenario.kinds else set()
    assert all(found <= expected for _, found in looks), looks
    after = [at_s for at_s, found in looks if found == expected and expected]
    assert not expected or (after and after[0] <= scenario.within_s), looks
    held = [found for at_s, found in looks if after and at_s >= after[0]]
    assert held.count(expected) >= 0.9 * len(held)


#: Jobs whose ranks are late in turn, as far as that can be known: not of pipelines, without steps, in a few long steps, or beside long transfers. In the
#: last two, ranks compete for cores, which an agent knows (``StepWaits.for_cores``), and a recording does not.
UNEVEN = frozenset({
    "ddp4x2 uneven 0,1", "ddp4x3 uneven 0,1,2", "ddp4x4 in_turn 0,1,2,3", "ddp4x4 uneven 0,1,2,3",
    "ddp4x2 by_chance 0,1", "ddp4x3 by_chance 0,1,2",
    "expertsx4 uneven 0,1,2,3", "gridx4 in_turn 0,1,2,3", "gridx4 uneven 0,1,2,3", "ddp4x4 nothing 0 --busy", "overlapx4 nothing 0 --busy",
})  # fmt: skip


@pytest.mark.parametrize("scenario", _params(PLAYED))
def test_uneven_work(scenario: Scenario, play: Play) -> None:
    """In recorded jobs whose ranks are late in turn the work is uneven to the end; in all others, healthy or with a late rank, for seconds at most."""
    found = [_is_uneven(look) and not look.late for look in play(scenario).looks]
    longest_s = max(len(list(alike)) for value, alike in groupby(found) if value) * TICK_NS / 1e9 if any(found) else 0.0
    assert all(found[-20:]) == (scenario.name in UNEVEN)
    assert longest_s <= 8 or scenario.name in UNEVEN


def _is_uneven(look: Look) -> bool:
    found = None if look.waits is None else uneven(look.waits)
    return found is not None and found.why is Why.TURNS


@pytest.mark.parametrize(("name", "expected"), [("ddp4x4 in_turn 0,1,2,3", ["open"]), ("ddp4x4 all_slow 0,1,2,3", [])])
def test_incident_of_uneven_work(name: str, expected: list[str], play: Play) -> None:
    """A recorded job whose ranks are late in turn has an incident for information if it goes on like that; one whose ranks are all slow has none."""
    (scenario,) = (each for each in PLAYED if each.name == name)
    known: list[Incident] = []
    for at_s, look in zip(
        range(0, 640, 10), chain(play(scenario).looks, repeat(play(scenario).looks[-1])), strict=False
    ):
        evidence = Evidence(NOW + at_s, JOBS, waits={} if look.waits is None else {"train": look.waits})
        known = conclude(evidence, known, TABLE, Around(NOW + at_s))
    assert [(one.kind, one.severity, one.state) for one in known] == [
        ("uneven_work", "info", state) for state in expected
    ]


@pytest.mark.parametrize("scenario", _params(PLAYED))
def test_nothing_in_the_report_is_contradicted(scenario: Scenario, play: Play) -> None:
    """No advice and no headline of a recorded job says what its framework, its backend or its cause contradicts, live known or not."""
    history = play(scenario).history
    agent = QueryService(history)
    (job,) = agent.jobs()
    build = partial(report.build, agent, job.job_id, history, "", last_s=None)
    built = build()
    assert built is not None
    if scenario.kinds == LATE:
        built = build(incidents=[incident_of(scenario, built)])
        assert built is not None
    assert list(contradictions(scenario, built)) == []


@pytest.mark.parametrize("scenario", _params(STEPPING))
def test_replayed_unchanged(scenario: Scenario, play: Play) -> None:
    """The replay of a recorded job, of any shape, with a late rank or without, gives the recorded step time within 3 % if nothing is changed."""
    history = play(scenario).history
    (job,) = QueryService(history).jobs()
    with own_trace(history, job.job_id, Window(None), (), alone=True) as own:
        model = model_of([own], job.world_size)
    steps = replay(model)
    assert len(steps) >= 15
    assert median(step.duration_s for step in steps) == pytest.approx(median(model.measured_s), rel=0.03)
    assert sum(step.duration_s for step in steps) == pytest.approx(sum(model.measured_s), rel=0.03)


@pytest.mark.parametrize("scenario", _params(EVEN, sorted(EVEN, key=_size)[:3]))
def test_iterations_are_the_steps(scenario: Scenario) -> None:
    """A recorded job whose marks are taken away has its steps as iterations: as many, as long, and with the same share of communication."""
    path = FOLDER / file_name(scenario.name)
    for marked, found in zip(steps_of(path, marked=True), steps_of(path, marked=False), strict=True):
        assert found
        steps = [step for step in marked if step.start_ns >= found[0].start_ns and step.end_ns <= found[-1].end_ns]
        assert len(found) == pytest.approx(len(steps), abs=2)
        assert median(map(_duration_ns, found)) == pytest.approx(median(map(_duration_ns, steps)), rel=0.03)
        assert _share(found) == pytest.approx(_share(steps), rel=0.05)


def _duration_ns(step: StepRecord) -> int:
    return step.end_ns - step.start_ns


def _share(steps: list[StepRecord]) -> float:
    known = [step for step in steps if step.comm_ns is not None]
    assert len(known) >= 0.9 * len(steps)
    return sum(step.comm_ns or 0 for step in known) / sum(map(_duration_ns, known))


@pytest.mark.parametrize("scenario", VIEWED, ids=lambda each: each.name)
def test_in_flight(scenario: Scenario) -> None:
    """In recorded jobs that hang, disagree or wait long, the operations in flight name the ranks at fault in time, and no other rank ever."""
    shown = concluded(FOLDER / views_name(scenario))
    polls = [(at_s, [(each.kind, each.cause, tuple(each.ranks)) for each in found]) for at_s, found in shown]
    late = scenario.kinds == LATE  # judged by what has ended: here they must not be called anything else
    outcome = judge(replace(scenario, kinds=frozenset()) if late else scenario, polls)
    assert len(polls) >= 10
    assert outcome.right, outcome


def test_all_are_there() -> None:
    """Each scenario has its files, and no file is left over."""
    views = [views_name(each) for each in VIEWED]
    records = [file_name(each.name) for each in PLAYED]
    assert sorted(str(path.relative_to(FOLDER)) for path in FOLDER.rglob("*.gz")) == sorted(views + records)
