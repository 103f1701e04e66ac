"""Changes of a model: each returns another model. Pure. ``exchange.py`` has those of the exchange of gradients."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from functools import partial
from statistics import median

from commwatch.analysis.framework_settings import is_model
from commwatch.core.alpha_beta import Curve
from commwatch.whatif.model import CannotAnswer, Do, Kind, Model, Op, Program, recosted

#: Returns another model.
Change = Callable[[Model], Model]


def without_lateness(model: Model, ranks: Collection[int] = ()) -> Model:
    """Return the model without the lateness of some ranks (empty: of all): before each operation, a rank computes for no longer than the
    median of the others that run the same operations.

    Raises:
        CannotAnswer: a rank is not known, or no other rank runs the same operations.
    """
    unknown = sorted(set(ranks) - model.programs.keys())
    if unknown:
        raise CannotAnswer(f"rank {unknown[0]} has no recorded steps; ranks with steps: {_listed(model.programs)}")
    late = set(ranks) or model.programs.keys()
    peers: dict[tuple[int, object], dict[int, Program]] = {}
    for rank, steps in model.programs.items():
        for at, program in enumerate(steps):
            peers.setdefault((at, _shape(model.ops, program)), {})[rank] = program
    programs = {rank: list(steps) for rank, steps in model.programs.items()}
    compared = 0
    for (at, _), alike in peers.items():
        for rank in late & alike.keys() if len(alike) > 1 else ():
            others = [program for other, program in alike.items() if other != rank]
            programs[rank][at] = [
                _at_most(do, [other[place] for other in others]) for place, do in enumerate(alike[rank])
            ]
            compared += 1
    if not compared:
        raise CannotAnswer(
            "no two ranks run the same operations, so nothing shows how long a rank that is not late computes"
        )
    return replace(model, programs=programs)


def _shape(ops: Mapping[int, Op], program: Program) -> object:
    """Return what two programs have in common that can be compared."""
    return tuple((do.kind, ops[do.op].op, ops[do.op].size_bytes) if do.op >= 0 else do.kind for do in program)


def _at_most(do: Do, others: list[Do]) -> Do:
    if do.kind != Kind.COMPUTE:
        return do
    return do._replace(seconds=min(do.seconds, median(other.seconds for other in others)))


def _listed(ranks: Iterable[int]) -> str:
    known = sorted(ranks)
    return f"{', '.join(map(str, known[:8]))}{' ...' if len(known) > 8 else ''}"


def scaled_compute(model: Model, factor: float, rank: int | None = None) -> Model:
    """Return the model with compute that takes ``factor`` times as long; ``rank``: only of this one.

    Raises:
        CannotAnswer: the rank is not known.
    """
    if rank is not None and rank not in model.programs:
        raise CannotAnswer(f"rank {rank} has no recorded steps; ranks with steps: {_listed(model.programs)}")
    programs = {
        number: [[_times(do, factor) for do in program] for program in steps] if rank in (None, number) else steps
        for number, steps in model.programs.items()
    }
    return replace(model, programs=programs)


def _times(do: Do, factor: float) -> Do:
    return do._replace(seconds=do.seconds * factor) if do.kind == Kind.COMPUTE else do


def other_link(model: Model, of: Callable[[Curve], Curve], group: str | None = None) -> Model:
    """Return the model on another link.

    Args:
        of: returns the curve of the new link for that of the old one.
        group: label of the only group on it; ``None``: all groups that span hosts, or all groups if none does.

    Raises:
        CannotAnswer: there is no such group.
    """
    if group is not None and group not in model.curves:
        raise CannotAnswer(f"no group '{group}' in the recorded steps; they have {', '.join(sorted(model.curves))}")
    labels = model.linked if group is None else {group}
    curves = {label: of(curve) if label in labels else curve for label, curve in model.curves.items()}
    ops = {
        number: recosted(model, op, curves[op.group]) if op.group in labels else op for number, op in model.ops.items()
    }
    return replace(model, ops=ops, curves=curves)


def faster(curve: Curve, bandwidth: float = 1.0, latency: float = 1.0) -> Curve:
    """Return the curve of a link with so many times the bandwidth and the latency.

    >>> faster(Curve(alpha_s=1e-3, beta_s=1e-9), bandwidth=2.0)
    Curve(alpha_s=0.001, beta_s=5e-10)
    """
    return Curve(curve.alpha_s * latency, curve.beta_s / bandwidth)


def with_bandwidth(factor: float, group: str | None = None) -> Change:
    """Return the change to a link with so many times the bandwidth."""
    return partial(other_link, of=partial(faster, bandwidth=factor), group=group)


def with_latency(model: Model, factor: float, group: str | None = None) -> Model:
    """Return the model on a link with so many times the latency.

    Raises:
        CannotAnswer: as ``other_link``, and if the latency of the link is not known.
    """
    labels = model.linked if group is None else {group}
    if not any(model.curves[label].alpha_s for label in labels & model.curves.keys()) and labels <= model.curves.keys():
        raise CannotAnswer(
            "latency: not known, as the recorded operations are too much alike to tell it from bandwidth"
        )
    return other_link(model, partial(faster, latency=factor), group)


def with_ranks(model: Model, ranks: int) -> Model:
    """Return the model with more or fewer ranks: groups of data parallelism grow or shrink, the work of each rank stays the same.

    Raises:
        CannotAnswer: the groups of model parallelism do not fit into that number.
    """
    if model.world_size < 2:
        raise CannotAnswer("one rank does not communicate, so nothing shows how more of them would")
    of_model = max((op.n for op in model.ops.values() if is_model(op.group)), default=1)
    if ranks % of_model:
        raise CannotAnswer(f"{ranks} ranks: not a multiple of the {of_model} ranks of a group of model parallelism")
    before = model.world_size
    sizes = Counter(op.n for op in model.ops.values() if not is_model(op.group))
    grown = {n: max(1, round(n * ranks / before)) for n in sizes}
    ops = {
        number: op if is_model(op.group) or not op.queued else recosted(model, op, n=grown[op.n])
        for number, op in model.ops.items()
    }
    alone = {number for number, op in ops.items() if op.n == 1 and op.queued}
    programs = {
        rank: [
            [do._replace(kind=Kind.GIVE) if do.kind == Kind.LAUNCH and do.op in alone else do for do in program]
            for program in steps
        ]
        for rank, steps in model.programs.items()
    }
    more = ("the added ranks are as late as the recorded ones",) if ranks > before else ()
    return replace(model, ops=ops, programs=programs, world_size=ranks, assumed=(*model.assumed, *more))
