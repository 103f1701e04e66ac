"""Several runs of one training with different numbers of ranks, which together show latency, bandwidth and how the job scales. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from statistics import fmean, median

from commwatch_agent.text.units import percent
from commwatch_agent.whatif.curves import Points, curves_of
from commwatch_agent.whatif.model import LAUNCHES, CannotAnswer, Kind, Model

#: Runs of one training launch bytes in a step that differ by at most this share.
_SAME_BYTES = 0.1
#: Compute that differs by more than this share is mentioned.
_SAME_COMPUTE = 0.1


def combined(model: Model, others: Mapping[str, Model]) -> Model:
    """Return a model whose curves follow from the transfers of all runs.

    Args:
        others: other runs of the same training, by name.

    Raises:
        CannotAnswer: another run is of another training.
    """
    points, notes = dict(model.points), []
    for name, other in others.items():
        own, theirs = _bytes(model), _bytes(other)
        if own.keys() != theirs.keys() or any(
            abs(theirs[label] - size) > _SAME_BYTES * size for label, size in own.items()
        ):
            raise CannotAnswer(
                f"job {name}: its ranks do not exchange the same bytes in the same groups in a step, so it does not show how this one scales"
            )
        points = {label: _merged(points[label], other.points[label]) for label in points}
        more = _compute_s(other) / _compute_s(model) - 1 if _compute_s(model) > 0 else 0.0
        if abs(more) > _SAME_COMPUTE:
            than = "more" if more > 0 else "less"
            notes.append(
                f"ranks of job {name} compute {percent(abs(more))} {than} in a step; the forecast has the compute of this job"
            )
    curves, assumed = curves_of(model.ops, points)
    alone = curves_of(model.ops, model.points)[1]
    kept = (each for each in model.assumed if each not in alone)
    return replace(model, curves=curves, points=points, assumed=(*assumed, *kept, *notes))


def measured(models: Iterable[Model]) -> dict[int, float]:
    """Return the median recorded step in seconds by number of ranks; of several runs with as many, their mean."""
    found: dict[int, list[float]] = {}
    for model in models:
        found.setdefault(model.world_size, []).append(median(model.measured_s))
    return {ranks: fmean(times) for ranks, times in found.items()}


def _bytes(model: Model) -> dict[str, float]:
    """Return the bytes that a rank launches in a step on average, by label of group."""
    sums: dict[str, float] = {}
    for steps in model.programs.values():
        for program in steps:
            for do in program:
                if do.kind in LAUNCHES:
                    op = model.ops[do.op]
                    sums[op.group] = sums.get(op.group, 0.0) + op.size_bytes
    programs = len(model.programs) * len(model.measured_s)
    return {label: size / programs for label, size in sums.items()}


def _compute_s(model: Model) -> float:
    """Return the seconds of compute of a rank in a step on average."""
    found = (
        do.seconds
        for steps in model.programs.values()
        for program in steps
        for do in program
        if do.kind == Kind.COMPUTE
    )
    return sum(found) / (len(model.programs) * len(model.measured_s))


def _merged(one: Points, other: Points) -> Points:
    """Return the times of both runs; means where they have the same operations among as many ranks."""
    return {at: fmean([each[at] for each in (one, other) if at in each]) for at in {**one, **other}}
