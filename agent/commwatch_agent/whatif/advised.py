"""The gains of advice, predicted by a replay in place of their bounds. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import median
from typing import Literal

from commwatch_agent.analysis.advice import ranked, shares
from commwatch_agent.analysis.advice_facts import ERROR_RULE, FIRST_RULES, LATE_RULE, LEAST_GAIN, UP_TO
from commwatch_agent.model.api_views import Advice, Remedy
from commwatch_agent.text.units import percent
from commwatch_agent.whatif.answers import Outcome, answer, is_close, outcome
from commwatch_agent.whatif.model import CannotAnswer, Model, first_steps, instructions
from commwatch_agent.whatif.questions import Question, changes_of
from commwatch_collectors.spans import ranks

#: Most instructions that are replayed for one remedy.
_MOST_INSTRUCTIONS = 100_000
#: Marks the gain of a formula that is no bound.
_ESTIMATED = "an estimated "
#: A gain is above its bound if it differs by more: it is known to 1%.
_DIFFERS = 0.005
#: And by how much it is more, which is worth a word.
_MUCH_MORE = 0.03


def predicted(advice: Sequence[Advice], recorded: Callable[[], Model | None]) -> list[Advice]:
    """Return advice with the gains that a replay predicts, where these are below their bounds.

    Advice that saves nothing in the replay is left out, except on late ranks: their cost was measured, perhaps in other steps.

    Args:
        recorded: returns the recorded steps, ``None`` if they cannot be replayed; called only if there is a remedy to replay.
    """
    model = recorded() if any(each.remedies for each in advice) else None
    known = None if model is None else _known(model)
    if model is None or known is None:
        return list(advice)
    found = (_predicted(each, model, known) if each.remedies else each for each in advice)
    ahead = next((each.rule for each in advice if each.rule != ERROR_RULE), "") in FIRST_RULES
    return ranked((each for each in found if each is not None), ahead=ahead)


def _known(model: Model) -> Outcome | None:
    """Return the outcome of the steps as recorded; ``None``: it is not that of the job, or ranks are missing, so that nothing follows from it."""
    try:
        known = outcome(model) if len(model.programs) == model.world_size else None
    except CannotAnswer:
        return None
    measured_s = median(model.measured_s)
    return known if known is not None and is_close(known.step_s, measured_s) else None


def _predicted(advice: Advice, model: Model, known: Outcome) -> Advice | None:
    """Return advice with predicted gains; ``None``: it saves nothing, or its first remedy, which is what it says to do, does not.

    A gain that is above its bound shows that this is none: the text has both, and names the smaller one first, which counts.
    """
    gains = [_gain(remedy, model, known) for remedy in advice.remedies]
    below = [
        gain is not None and gain <= remedy.saves_share for gain, remedy in zip(gains, advice.remedies, strict=True)
    ]
    remedies = [
        replace(remedy, saves_share=gain) if gain is not None and lower else remedy
        for remedy, gain, lower in zip(advice.remedies, gains, below, strict=True)
    ]
    best = max(range(len(remedies)), key=lambda at: remedies[at].saves_share)
    share = remedies[best].saves_share
    # The replay has the latest usual steps; a rank may be late in others, or in long ones.
    if advice.rule == LATE_RULE and share < advice.remedies[best].saves_share / 2:
        return advice
    if advice.rule == LATE_RULE and _confirmed(gains, advice.remedies):
        return replace(advice, gain=f"would save {percent(advice.saves_share)} of a step as measured")
    if min(share, remedies[0].saves_share) < LEAST_GAIN:
        return None
    known_gains = [
        replace(remedy, saves_share=gain)
        for remedy, gain in zip(advice.remedies, gains, strict=True)
        if gain is not None and gain >= LEAST_GAIN
    ]
    if not known_gains:
        return advice
    source: Literal["bound", "replay"] = "replay" if below[best] else "bound"
    known_advice = replace(advice, saves_share=share, gain_source=source, remedies=remedies)
    if advice.rule == LATE_RULE:
        return replace(known_advice, gain=_of_late(advice, share, max(each.saves_share for each in known_gains)))
    refuted = any(
        gain is not None and gain > remedy.saves_share + _DIFFERS
        for remedy, gain in zip(advice.remedies, gains, strict=True)
    )
    # What a replay exceeds is no bound.
    bound = advice.gain.replace(f"{UP_TO}this", "this").replace(UP_TO, _ESTIMATED, 1) if refuted else advice.gain
    by = max(gain - remedy.saves_share for remedy, gain in zip(advice.remedies, gains, strict=True) if gain is not None)
    more = "perhaps more: " if len(remedies) == 1 and by >= _MUCH_MORE else ""
    return replace(known_advice, gain=f"{bound}; {more}a replay of the recorded steps gives {shares(known_gains)}")


def _confirmed(gains: Sequence[float | None], remedies: Sequence[Remedy]) -> bool:
    """Return whether a replay gives about what was measured, so that its figure would only be one more."""
    pairs = list(zip(gains, remedies, strict=True))
    return all(gain is not None and abs(gain - remedy.saves_share) <= _MUCH_MORE for gain, remedy in pairs)


def _of_late(advice: Advice, share: float, replayed: float) -> str:
    """Return the gain of advice on late ranks in words: their cost was measured over all steps; the replay has the latest, as ``commwatch whatif``."""
    late = sorted({rank for each in advice.remedies for rank in question_of(each).no_late_rank})
    saves, replay = (
        f"would save {percent(share)} of a step",
        f"a replay of the latest steps without lateness of {ranks(late)}",
    )
    is_more = replayed > share + _DIFFERS
    return f"{saves} as measured; {replay} gives {percent(replayed)}" if is_more else f"{saves}, by {replay}"


def _gain(remedy: Remedy, model: Model, known: Outcome) -> float | None:
    """Return the share of time that a remedy saves, to 1%, as it is not known better; ``None``: the replay cannot predict that."""
    times = int(str(remedy.whatif.get("accumulate", 1)))
    short = first_steps(model, _MOST_INSTRUCTIONS // times)
    if instructions(short) * times > _MOST_INSTRUCTIONS:
        return None
    try:
        changes = changes_of(question_of(remedy), {})
        return round(answer(short, known if short is model else outcome(short), changes).saves_share, 2)
    except CannotAnswer:
        return None


def question_of(remedy: Remedy) -> Question:
    """Return the change that a remedy makes."""
    fields = {name: tuple(value) if isinstance(value, list) else value for name, value in remedy.whatif.items()}
    return Question(**fields)  # type: ignore[arg-type]
