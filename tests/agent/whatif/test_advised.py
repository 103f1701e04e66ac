"""Advice: a gain is the one of the replay where there is one, and never more than the bound."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from commwatch_agent.analysis.advice import advice_on
from commwatch_agent.analysis.advice_facts import CORES_RULE, LATE_RULE, Whys, on_condition
from commwatch_agent.analysis.waits.waiting_advice import on_cores
from commwatch_agent.ingest.why_late import NO_CORE
from commwatch_agent.model.api_views import Advice, Remedy
from commwatch_agent.text.units import percent
from commwatch_agent.whatif.advised import predicted, question_of
from commwatch_agent.whatif.answers import answer, outcome
from commwatch_agent.whatif.model import Model
from commwatch_agent.whatif.questions import Question, changes_of
from tests.agent.analysis.test_advice import SPEAKS, facts
from tests.agent.whatif.scenes import model

LINK, LATE, BUCKETS = {"link": "2x"}, {"no_late_rank": [2]}, {"buckets": "9437184B"}


def _advice(rule: str, *remedies: Remedy) -> Advice:
    """Advice with these remedies."""
    most = max((each.saves_share for each in remedies), default=None)
    return Advice(rule, rule, ["reason"], "do", f"saves up to {most}", most, remedies=list(remedies))


def _saves(job: Model, question: Question) -> float:
    return answer(job, outcome(job), changes_of(question, {})).saves_share


def test_below_its_bound() -> None:
    """The predicted gain takes the place of a bound above it, to 1%; text and source tell that."""
    job = model(3, late_ms=50)
    late, link = predicted(
        [_advice("straggler", Remedy("", LATE, 0.4)), _advice("x", Remedy("", LINK, 0.9))], lambda: job
    )
    assert (link.rule, link.gain_source, late.gain_source) == ("x", "replay", "replay")
    assert link.saves_share == pytest.approx(_saves(job, Question(link="2x")), abs=0.005)
    assert late.saves_share == pytest.approx(_saves(job, Question(no_late_rank=(2,))), abs=0.005)
    assert link.saves_share is not None
    assert link.gain == f"saves up to 0.9; a replay of the recorded steps gives {100 * link.saves_share:.0f}%"
    assert link.remedies == [Remedy("", LINK, link.saves_share)]


def test_above_its_bound() -> None:
    """A gain above its bound leaves both numbers, and the smaller one counts; no text calls a number a bound beside a larger one."""
    advice = replace(_advice("x", Remedy("", LINK, 0.02)), gain="would save up to 2% of a step")
    (found,) = predicted([advice], lambda: model(3))
    replayed = _saves(model(3), Question(link="2x"))
    assert (
        found.gain
        == f"would save an estimated 2% of a step; perhaps more: a replay of the recorded steps gives {100 * replayed:.0f}%"
    )
    assert replace(found, gain=advice.gain) == advice


def test_several_forms() -> None:
    """Each form has its own gain, and the advice has the largest of them."""
    forms = [Remedy("fp16", {"compress": "0.5"}, 0.9), Remedy("int8", {"compress": "0.25"}, 0.01)]
    (found,) = predicted([_advice("compression", *forms)], lambda: model(3))
    assert found.remedies[1] == forms[1]
    assert found.saves_share is not None
    assert 0.01 < found.remedies[0].saves_share == found.saves_share < 0.9
    assert found.gain.startswith("saves an estimated 0.9; ")
    assert re.search(rf"gives fp16 {100 * found.saves_share:.0f}%, int8 \d+%$", found.gain)


def test_late_ranks_in_other_steps() -> None:
    """What late ranks cost stays if the replay, which has the latest usual steps, has less than half of that."""
    job = model(3, late_ms=50)
    late = _advice("straggler", Remedy("", LATE, 2.1 * _saves(job, Question(no_late_rank=(2,)))))
    assert predicted([late], lambda: job) == [late]


def test_late_ranks_by_measure_and_replay() -> None:
    """The gain of advice on late ranks is what they cost, or the lower one of the replay; if that has more, as ``commwatch whatif`` has it, both."""
    job = model(3, late_ms=50)
    replayed = _saves(job, Question(no_late_rank=(2,)))
    for cost in (replayed - 0.1, replayed + 0.1):
        late = _advice("straggler", Remedy("", {"no_late_rank": [2]}, cost))
        (found,) = predicted([late], lambda: job)
        share = min(cost, replayed)
        assert found.saves_share == pytest.approx(share, abs=0.006)
        steps = "a replay of the latest steps without lateness of rank 2"
        lower = f", by {steps}" if replayed < cost else f" as measured; {steps} gives {percent(replayed)}"
        assert found.gain == f"would save {percent(found.saves_share or 0)} of a step{lower}"
        assert found.gain_source == ("replay" if replayed < cost else "bound")


def test_late_ranks_by_a_replay_that_agrees() -> None:
    """Where a replay gives what was measured within 3 points, the gain has one figure, which is what was measured."""
    job = model(3, late_ms=50)
    replayed = _saves(job, Question(no_late_rank=(2,)))
    for cost in (replayed - 0.02, replayed, replayed + 0.02):
        late = _advice("straggler", Remedy("", {"no_late_rank": [2]}, cost))
        assert predicted([late], lambda: job) == [
            replace(late, gain=f"would save {percent(cost)} of a step as measured")
        ]


def test_nothing_saved() -> None:
    """Advice that saves nothing in the replay is left out, but not that on late ranks, whose cost was measured."""
    hidden = model(2, sizes=(1 << 10,), compute_ms=100)
    late = _advice("straggler", Remedy("", {"no_late_rank": [0]}, 0.3))
    assert predicted([_advice("x", Remedy("", LINK, 0.3)), late], lambda: hidden) == [late]


def test_estimates_of_ranks_without_cores() -> None:
    """Where the ranks wait for cores, advice on these comes before what a replay or a formula predicts, and each of these has the condition and the share."""
    cores = on_condition(0.34)
    assert cores == "that the ranks have CPU cores, for which their main threads waited 34% of the time"
    for about in (each for cases in SPEAKS.values() for each in cases):
        lacking = about._replace(for_cores=0.34)
        found = on_cores(lacking, predicted(advice_on(lacking), lambda: model(3, late_ms=50)))
        at = [each.rule for each in found].index(CORES_RULE)
        assert all(each.rule in {CORES_RULE, LATE_RULE} or each.gain_source == "bound" for each in found[: at + 1])
        for each in found:
            doubtful = each.rule != CORES_RULE and each.saves_share is not None
            assert each.gain.endswith(f"; this assumes {cores}") == doubtful, each


def test_estimates_of_ranks_with_cores() -> None:
    """Where main threads hardly wait for cores, or that is not known, estimates have no condition; nor has the cost of a late rank that lacks a core."""
    advice = [_advice("x", Remedy("", LINK, 0.9)), _advice(LATE_RULE, Remedy("", LATE, 0.4))]
    assert on_cores(None, advice) == on_cores(facts(), advice) == on_cores(facts(for_cores=0.09), advice) == advice
    starved = facts(for_cores=0.5, late={2: 0.4}, whys=Whys({2: NO_CORE}))
    assert [each.gain.partition(";")[2] != "" for each in on_cores(starved, advice)] == [True, False]


def test_sorted_by_predicted_gains() -> None:
    """The larger predicted gain comes first, whatever the bounds are."""
    job = model(2, sizes=(4 << 20, 4 << 20))
    small, large = Remedy("", {"compress": "0.95"}, 0.9), Remedy("", {"compress": "0.1"}, 0.8)
    found = predicted([_advice("small", small), _advice("large", large), _advice("unknown")], lambda: job)
    assert [each.rule for each in found] == ["large", "small", "unknown"]


@pytest.mark.parametrize(
    "job",
    [
        None,
        replace(model(2), world_size=4),
        replace(model(2), measured_s=(0.2,) * 6),
    ],
    ids=["no steps", "missing ranks", "another step time"],
)
def test_bounds_without_a_replay(job: Model | None) -> None:
    """If the steps cannot be replayed, ranks are missing, or the replay is not the recorded job, all gains are bounds."""
    advice = [_advice("x", Remedy("", LINK, 0.9)), _advice("y")]
    assert predicted(advice, lambda: job) == advice


def test_what_cannot_be_replayed() -> None:
    """A change that the steps do not allow, and one with too many micro-steps for its cost, have their bounds."""
    tiny, small = model(2, sizes=(100,)), model(8, sizes=(1 << 20,) * 40)
    for job, remedy in ((tiny, Remedy("", BUCKETS, 0.9)), (small, Remedy("", {"accumulate": 64}, 0.9))):
        advice = _advice("x", remedy)
        assert predicted([advice], lambda: job) == [advice]  # noqa: B023


def test_steps_are_read_only_if_needed() -> None:
    """Without a remedy that can be replayed, the recorded steps are not read."""
    advice = [_advice("x")]
    assert predicted(advice, lambda: pytest.fail("read")) == advice


def test_questions_of_all_rules() -> None:
    """Whatever a rule finds, its remedies are valid questions; the rules that can be predicted are those that docs/advice.md lists."""
    found = [each for cases in SPEAKS.values() for about in cases for each in advice_on(about) if each.remedies]
    for each in found:
        for remedy in each.remedies:
            assert len(changes_of(question_of(remedy), {})) == 1
        assert each.saves_share == max(remedy.saves_share for remedy in each.remedies)
    text = (Path(__file__).parents[3] / "docs" / "advice.md").read_text(encoding="utf-8")
    given = text[text.index("They are given for") : text.index("The text of a gain has both")]
    assert {each.rule for each in found} == set(re.findall("`([a-z_]+)`", given))
