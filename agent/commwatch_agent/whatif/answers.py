"""Answers: a recorded job, and the same job with changes. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from statistics import median
from types import MappingProxyType

from commwatch_agent.analysis.advice_facts import BOTTLENECK_SHARE
from commwatch_agent.whatif.changes import (
    FEWER,
    Change,
    extrapolated,
    replica_ranks,
    with_bandwidth,
    with_latency,
    with_ranks,
    without_lateness,
)
from commwatch_agent.whatif.exchange import accumulated, compressed, with_buckets
from commwatch_agent.whatif.model import CannotAnswer, Model, first_steps
from commwatch_agent.whatif.replay import Step, replay
from commwatch_agent.whatif.runs import combined, measured

#: Most ranks in a forecast without `--ranks`, as a multiple of those of the largest recorded run: far beyond it, nothing shows the network.
_FORECAST_TIMES = 8
#: About how many instructions are replayed for each number of ranks in a forecast.
_FORECAST_MOST = 50_000
#: A replay without changes may differ from the recorded step by this share of it.
_CLOSE = 0.03
#: Shares of the steps that are shorter than the lower and the upper end of the range.
_LOW, _HIGH = 0.1, 0.9
#: Lateness makes a difference if steps take so many times as long as without it.
_MATTERS = 1.03
#: The questions that every report answers.
STANDARD: Mapping[str, Change] = {
    "no rank is late": without_lateness,
    "twice the bandwidth": with_bandwidth(2.0),
    "half the latency": lambda model: with_latency(model, 0.5),
    "buckets of 25 MiB": lambda model: with_buckets(model, 25 << 20),
    "fp16 gradients": lambda model: compressed(model, "fp16"),
    "gradients accumulated over 4 micro-steps": lambda model: accumulated(model, 4),
    "twice the ranks": lambda model: with_ranks(model, 2 * model.world_size),
    "four times the ranks": lambda model: with_ranks(model, 4 * model.world_size),
}


@dataclass(frozen=True)
class Outcome:
    """How a job runs. Medians over the replayed steps; shares are 0 to 1."""

    ranks: int
    step_s: float
    #: A tenth of the steps is shorter than the first, and a tenth is longer than the second.
    low_s: float
    high_s: float
    comm_share: float
    exposed_share: float
    #: Hours of all ranks for 1,000 steps: GPU-hours if each rank has a GPU.
    rank_hours: float
    #: Micro-steps per step, relative to the recorded steps; and seconds of a step by that number.
    micro_steps: int
    micro_step_s: float


@dataclass(frozen=True)
class Answer:
    """What changes do to a job."""

    changes: list[str]
    #: The recorded steps, replayed without changes, and with them.
    recorded: Outcome
    predicted: Outcome
    #: Share of the time for the same work of a rank that the changes save; negative: they cost it.
    saves_share: float
    assumed: list[str]


@dataclass(frozen=True)
class Point:
    """A number of ranks in a forecast."""

    ranks: int
    step_s: float
    comm_share: float
    #: Time of a step of one replica / time of a step: the part of the added ranks' work that counts.
    efficiency: float
    #: Median recorded step of a run with so many ranks; ``None``: there is none, or the forecast is about changes.
    measured_s: float | None


@dataclass(frozen=True)
class Forecast:
    """How a job scales: each rank keeps its work."""

    points: list[Point]
    #: The first number of ranks with communication above ``limit_share`` of a step; ``None``: there is none.
    limit_ranks: int | None
    limit_share: float
    #: What the numbers of ranks above the recorded one are extrapolated from, and what that assumes.
    assumes: str
    #: What the numbers of ranks below the recorded one assume, if it makes a difference; empty: no rank is late.
    fewer: str


@dataclass(frozen=True)
class Study:
    """Answers about one job."""

    job_id: str
    #: What was replayed: number of steps, and of ranks.
    steps: int
    ranks: int
    #: Median step in seconds, as recorded and as replayed without changes.
    measured_s: float
    replayed_s: float
    answers: list[Answer]
    #: The usual questions that the recorded steps cannot answer, with the reason.
    unanswered: dict[str, str]
    #: With all changes; ``None``: the job does not scale by ranks.
    forecast: Forecast | None
    #: What was assumed in all of it.
    assumed: list[str]
    #: Share of the time (0 to 1) that main threads waited for a CPU core, as ``headline.mean_core_wait``; ``None``: not known.
    core_wait_share: float | None = None


def is_close(replayed_s: float, measured_s: float) -> bool:
    """Return whether the replay of a step without changes takes as long as the recorded one, so that its gains can be relied on."""
    return abs(replayed_s - measured_s) <= _CLOSE * measured_s


def outcome(model: Model) -> Outcome:
    """Return how a model runs; raise ``CannotAnswer`` as ``replay``."""
    steps = replay(model)
    durations = sorted(step.duration_s for step in steps)
    step_s = median(durations)
    return Outcome(
        ranks=model.world_size,
        step_s=step_s,
        low_s=_quantile(durations, _LOW),
        high_s=_quantile(durations, _HIGH),
        comm_share=_share(steps, [step.comm_s for step in steps]),
        exposed_share=_share(steps, [step.exposed_s for step in steps]),
        rank_hours=model.world_size * step_s / 3.6,
        micro_steps=model.samples,
        micro_step_s=step_s / model.samples,
    )


def _quantile(ordered: Sequence[float], share: float) -> float:
    return ordered[round(share * (len(ordered) - 1))]


def _share(steps: Iterable[Step], parts_s: Iterable[float]) -> float:
    total_s = sum(step.duration_s for step in steps)
    return min(1.0, sum(parts_s) / total_s) if total_s > 0 else 0.0


def study(
    job_id: str,
    model: Model,
    changes: Mapping[str, Change],
    others: Mapping[str, Model] = MappingProxyType({}),
    *,
    cores: float | None = None,
) -> Study:
    """Return an answer about changes that apply together, one after another; without any, the answers to ``STANDARD``.

    Args:
        others: other runs of the same training, by name; all runs together show latency, bandwidth and scaling.
        cores: ``Study.core_wait_share``.

    Raises:
        CannotAnswer: the recorded steps do not show that, or another run is of another training.
    """
    if others:
        model = combined(model, others)
    recorded = outcome(model)
    answers, unanswered = ([answer(model, recorded, changes)], {}) if changes else standard(model, recorded)
    try:
        after = first_steps(changed(model, changes), _FORECAST_MOST)
        widest = max(run.world_size for run in (model, *others.values()))
        known = {} if changes else measured((model, *others.values()))
        found = forecast(after, known, max(after.world_size, _FORECAST_TIMES * widest))
    except CannotAnswer:
        found = None
    assumed = dict.fromkeys(text for each in answers for text in each.assumed)
    return Study(
        job_id=job_id,
        steps=len(model.measured_s),
        ranks=len(model.programs),
        measured_s=median(model.measured_s),
        replayed_s=recorded.step_s,
        answers=answers,
        unanswered=unanswered,
        forecast=found,
        assumed=list(assumed or dict.fromkeys(model.assumed)),
        core_wait_share=cores,
    )


def changed(model: Model, changes: Mapping[str, Change]) -> Model:
    """Return a model with changes; raise ``CannotAnswer`` as they do."""
    return reduce(lambda so_far, change: change(so_far), changes.values(), model)


def answer(model: Model, recorded: Outcome, changes: Mapping[str, Change]) -> Answer:
    """Return what changes do together.

    Args:
        recorded: the outcome of the model.

    Raises:
        CannotAnswer: the recorded steps do not show that.
    """
    after = changed(model, changes)
    predicted = outcome(after)
    saves = 1 - predicted.micro_step_s / recorded.micro_step_s if recorded.micro_step_s > 0 else 0.0
    return Answer(list(changes), recorded, predicted, saves, list(dict.fromkeys(after.assumed)))


def standard(model: Model, recorded: Outcome) -> tuple[list[Answer], dict[str, str]]:
    """Return answers to the questions of every report, and why there is none to the others; ``recorded``: the model's outcome."""
    found, unanswered = [], {}
    for text, change in STANDARD.items():
        try:
            if _alike(model, change(model)):
                unanswered[text] = "it changes nothing in the recorded steps"
            else:
                found.append(answer(model, recorded, {text: change}))
        except CannotAnswer as error:
            unanswered[text] = str(error)
    return found, unanswered


def _alike(one: Model, other: Model) -> bool:
    """Return whether ranks do the same in two models."""
    return (one.ops, one.programs, one.world_size) == (other.ops, other.programs, other.world_size)


def forecast(model: Model, known: Mapping[int, float], most: int) -> Forecast:
    """Return how the job scales to ``most`` ranks: points at doubled numbers and at those of recorded runs, and the first of all multiples
    above the limit.

    Args:
        known: recorded steps in seconds, by number of ranks.

    Raises:
        CannotAnswer: as ``with_ranks``.
    """
    replica = replica_ranks(model)
    base = with_ranks(model, replica)
    base_s = outcome(base).step_s
    doubled = {replica << power for power in range(max(0, most // replica).bit_length())}
    points = []
    for ranks in sorted(doubled | {ranks for ranks in known if ranks % replica == 0}):
        at = outcome(with_ranks(model, ranks))
        efficiency = base_s / at.step_s if at.step_s > 0 else 1.0
        points.append(Point(ranks, at.step_s, at.comm_share, efficiency, known.get(ranks)))
    above = next((place for place, point in enumerate(points) if point.comm_share > BOTTLENECK_SHARE), None)
    limit = None
    if above is not None:
        low, limit = (points[above - 1].ranks if above else 0), points[above].ranks
        while limit - low > replica:
            middle = (low + limit) // 2 // replica * replica
            if outcome(with_ranks(model, middle)).comm_share > BOTTLENECK_SHARE:
                limit = middle
            else:
                low = middle
    return Forecast(points, limit, BOTTLENECK_SHARE, extrapolated(model), _of_fewer(base, base_s))


def _of_fewer(base: Model, base_s: float) -> str:
    """Return what a model with fewer ranks assumes, if its steps are longer for the lateness of a rank; ``base_s``: its step in seconds."""
    try:
        punctual_s = outcome(without_lateness(base)).step_s
    except CannotAnswer:
        return ""
    return FEWER if base_s > _MATTERS * punctual_s else ""
