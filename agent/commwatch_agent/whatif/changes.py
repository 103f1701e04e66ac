"""Changes of a model: each returns another model. Pure. ``exchange.py`` has those of the exchange of gradients."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from math import ceil, lcm
from statistics import median

from commwatch_agent.analysis.framework_settings import is_model
from commwatch_agent.model.alpha_beta import Curve
from commwatch_agent.text.units import counted
from commwatch_agent.whatif.model import LAUNCHES, CannotAnswer, Do, Kind, Model, Program, recosted

#: Returns another model.
Change = Callable[[Model], Model]


def without_lateness(model: Model, ranks: Collection[int] = ()) -> Model:
    """Return the model without the lateness of some ranks (empty: of all): before each operation, a rank computes for no longer than the
    median of the others that launch the same operations in that step.

    Raises:
        CannotAnswer: a rank is not known; or in most steps no other rank launches the same operations as one of ``ranks``, or any two do.
    """
    unknown = sorted(set(ranks) - model.programs.keys())
    if unknown:
        raise CannotAnswer(f"rank {unknown[0]} has no recorded steps; ranks with steps: {_listed(model.programs)}")
    late = set(ranks) or model.programs.keys()
    programs = {rank: list(steps) for rank, steps in model.programs.items()}
    #: Steps in which no other rank shows how long a rank computes that is not late.
    alone = dict.fromkeys(sorted(late), 0)
    for at, alike in _alike(model):
        computes = {rank: _computes(program) for rank, program in alike.items()}
        for rank in late & alike.keys():
            others = [computes[other] for other in alike if other != rank]
            alone[rank] += not others
            if others:
                usual = [median(each) for each in zip(*others, strict=True)]
                programs[rank][at] = _at_most(alike[rank], computes[rank], usual)
    steps = len(model.measured_s)
    unlike = [rank for rank, count in alone.items() if 2 * count > steps]
    if ranks and unlike:
        raise CannotAnswer(f"in most steps rank {unlike[0]} launches other operations than all others, {_SHOWS}")
    if len(unlike) == len(alone):
        raise CannotAnswer(f"in most steps no two ranks launch the same operations, {_SHOWS}")
    kept = (f"rank {rank} stays as late as it is in {_steps(count, steps)}" for rank, count in alone.items() if count)
    return replace(model, programs=programs, assumed=(*model.assumed, *kept))


#: Why a rank's lateness is not known.
_SHOWS = "so nothing shows how long a rank that is not late computes"


def _steps(count: int, steps: int) -> str:
    """Return in how many steps a rank has no other to compare with, as text."""
    return (
        f"{f'{count} of {steps}' if count < steps else 'all'} steps, where it launches other operations than all others"
    )


def _alike(model: Model) -> Iterator[tuple[int, dict[int, Program]]]:
    """Yield the programs of the ranks that launch the same operations in a step, with the number of the step."""
    found: dict[tuple[int, object], dict[int, Program]] = {}
    for rank, steps in model.programs.items():
        for at, program in enumerate(steps):
            launches = tuple(
                (model.ops[do.op].op, model.ops[do.op].size_bytes) for do in program if do.kind in LAUNCHES
            )
            found.setdefault((at, launches), {})[rank] = program
    return ((at, alike) for (at, _), alike in found.items())


def _computes(program: Program) -> list[float]:
    """Return the seconds of compute before each launch, and before the end of the step."""
    found = [0.0]
    for do in program:
        if do.kind == Kind.COMPUTE:
            found[-1] += do.seconds
        elif do.kind in LAUNCHES:
            found.append(0.0)
    return found


def _at_most(program: Program, computes: Sequence[float], usual: Sequence[float]) -> Program:
    """Return a program with no more compute before each launch than usual."""
    place, out = 0, []
    for do in program:
        if do.kind == Kind.COMPUTE and computes[place] > usual[place]:
            do = do._replace(seconds=do.seconds * usual[place] / computes[place])  # noqa: PLW2901
        place += do.kind in LAUNCHES
        out.append(do)
    return out


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
        raise CannotAnswer("the recorded operations are too much alike to tell latency from bandwidth")
    return other_link(model, partial(faster, latency=factor), group)


def replica_ranks(model: Model) -> int:
    """Return the ranks that hold one copy of the model: all of them, divided by those of a group that exchanges gradients between copies; but whole
    groups of model parallelism, and whole shard groups of hybrid sharding.
    """
    shards = _shards(model)
    kept = {op.n for op in model.ops.values() if op.queued and (is_model(op.group) or op.group in shards)}
    copies = _copies(model)
    if copies is None:
        return model.world_size if kept or any(is_model(op.group) for op in model.ops.values()) else 1
    return lcm(model.world_size // copies, *kept)


def _copies(model: Model) -> int | None:
    """Return the ranks of the groups that exchange the most bytes of gradients between copies of the model; ``None``: no gradients are exchanged."""
    shards, sizes = _shards(model), Counter[int]()
    for op in model.ops.values():
        if op.carries == "gradients" and op.group not in shards and model.world_size % op.n == 0:
            sizes[op.n] += ceil(op.size_bytes)
    return max(sizes, key=lambda n: sizes[n], default=None)


def _shards(model: Model) -> Collection[str]:
    """Return the labels of the groups over which hybrid sharding shards: their gradients are then reduced over the groups of the replicas."""
    gathered = {op.group: op.n for op in model.ops.values() if op.carries == "parameters"}
    reduced = {op.group: op.n for op in model.ops.values() if op.carries == "gradients" and op.op == "all_reduce"}
    shards = max(gathered.values(), default=0)
    replicas = [n for group, n in reduced.items() if group not in gathered]
    return gathered if any(n * shards <= model.world_size for n in replicas) else ()


#: What a prediction for fewer ranks assumes.
FEWER = "fewer ranks keep the compute of the recorded ones, so the lateness of a rank counts as compute"


def extrapolated(model: Model) -> str:
    """Return what any number of ranks above the recorded one is extrapolated from, and on which assumptions."""
    known = counted(len(model.programs), "rank")
    where = f" on {counted(model.hosts, 'node')}" if model.hosts else ""
    backends = sorted({op.backend for op in model.ops.values() if op.backend})
    through = f" with {', '.join(backends)}" if backends else ""
    links = "links as fast as theirs" + (" (between nodes, they are usually slower)" if model.hosts == 1 else "")
    shapes = "rings or trees" if "nccl" in backends else "rings"
    return f"more ranks are extrapolated from {known}{where}{through}: assumed are {links}, {shapes}, and added ranks no later than these"


def with_ranks(model: Model, ranks: int) -> Model:
    """Return the model with more or fewer ranks: groups of data parallelism grow or shrink, the work of each rank stays the same. With hybrid
    sharding, the groups of the replicas do, and the shard groups stay.

    Raises:
        CannotAnswer: the number of ranks is not that of whole copies of the model, or there is one copy, which exchanges no gradients.
    """
    if model.world_size < 2:
        raise CannotAnswer("one rank does not communicate, so nothing shows how more of them would")
    replica, shards = replica_ranks(model), _shards(model)
    growing = {
        number for number, op in model.ops.items() if op.queued and not is_model(op.group) and op.group not in shards
    }
    one_copy = replica == model.world_size and (_copies(model) or 1) < 2
    if one_copy or all(model.ops[number].n < 2 for number in growing):
        raise CannotAnswer(
            "no group exchanges gradients between copies of the model, so nothing shows how more copies would"
        )
    if ranks % replica:
        what = "shard groups of hybrid sharding stay" if shards else "groups of model parallelism stay"
        raise CannotAnswer(
            f"{ranks} ranks: not a multiple of the {replica} ranks of a copy of the model; the {what} as they are"
        )
    before = model.world_size
    ops = {
        number: recosted(model, op, n=max(1, round(op.n * ranks / before))) if number in growing else op
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
    assumed = [*model.assumed]
    if ranks != before:
        assumed.append(extrapolated(model) if ranks > before else FEWER)
    every = (model.ops[number] for number in growing)
    labels = sorted({op.group for op in every if op.op == "all_gather" and op.carries != "parameters"})
    if labels and ranks != before:
        assumed.append(
            f"what is gathered in group {', '.join(labels)} keeps its size, as optimizer shards do; if each rank adds a part of its own, it grows"
        )
    return replace(model, ops=ops, programs=programs, world_size=ranks, assumed=tuple(assumed))
