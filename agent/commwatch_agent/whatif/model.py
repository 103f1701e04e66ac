"""A job's recorded steps as programs of its ranks, which ``replay.py`` runs and ``changes.py`` changes. Pure.

The program of a rank is what its training thread did (on a GPU: its compute stream): it computes, launches operations, and waits for them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import IntEnum
from http import HTTPStatus
from typing import NamedTuple

from commwatch.wire.errors import UsageError
from commwatch_agent.model.alpha_beta import Curve, messages
from commwatch_agent.model.bandwidth import bus_factor


class CannotAnswer(UsageError):
    """The recorded steps do not allow an answer; the text names the reason."""

    status = HTTPStatus.BAD_REQUEST


class Kind(IntEnum):
    """What an instruction does."""

    COMPUTE = 0
    #: Launch a part of an operation whose ranks all finish together, when the last of them has launched it and it is transferred.
    LAUNCH = 1
    #: Launch a part that needs no other rank: the root of a broadcast, a sender that does not wait for the receiver.
    GIVE = 2
    #: Launch a part that needs those that ``GIVE``.
    TAKE = 3
    #: Wait until this rank's part of an operation has ended.
    WAIT = 4


#: Kinds that launch a part of an operation.
LAUNCHES = (Kind.LAUNCH, Kind.GIVE, Kind.TAKE)


class Do(NamedTuple):
    """One instruction of a program.

    ``seconds``: duration of COMPUTE; for LAUNCH, how much earlier than the operation this rank's part ends; for GIVE and TAKE, the transfer.
    """

    kind: Kind
    seconds: float = 0.0
    #: Number of the operation; -1: none.
    op: int = -1


Program = list[Do]


class Op(NamedTuple):
    """One operation of a group, of all its ranks."""

    #: Label and id of the group, and its number of ranks.
    group: str
    group_id: str
    op: str
    size_bytes: float
    n: int
    #: Seconds of the transfer as recorded, without waiting for late ranks and for earlier operations of the group.
    work_s: float
    #: What changes have made of that time; the transfer now takes ``work_s * scale``.
    scale: float = 1.0
    #: Operations of the group follow one another.
    queued: bool = True
    #: ``gradients``, ``parameters`` (gathered by sharded data parallelism), or empty.
    carries: str = ""
    dtype: str | None = None
    backend: str | None = None
    #: It ran on a GPU, where blocking operations do not block the thread.
    on_device: bool = False
    #: The bucket or unit that it carries, as in ``history.operations.Operation``; ``None``: not known.
    part: str | None = None


@dataclass(frozen=True)
class Model:
    """Consecutive steps of a job, and what is known of its links."""

    ops: Mapping[int, Op]
    #: By rank: a program for each step. All ranks have the same number of steps.
    programs: Mapping[int, list[Program]]
    #: By rank: how much later than the first rank it began the first step, in seconds.
    begins_s: Mapping[int, float]
    #: By label of group.
    curves: Mapping[str, Curve]
    #: What the curves follow from, as in ``curves.Points``.
    points: Mapping[str, Mapping[tuple[float, float], float]]
    #: Labels of the groups that a change of the link is about.
    linked: frozenset[str]
    #: Number of ranks of the job; more than there are programs if ``Ranks`` has changed it.
    world_size: int
    #: Recorded durations of the steps in seconds, as means over the ranks.
    measured_s: tuple[float, ...]
    #: Micro-steps per step, relative to the recorded steps.
    samples: int = 1
    #: What was assumed, as sentences.
    assumed: tuple[str, ...] = ()
    #: Number of hosts that its ranks ran on; 0: not known.
    hosts: int = 0


def instructions(model: Model) -> int:
    """Return the number of instructions of all programs."""
    return sum(len(program) for steps in model.programs.values() for program in steps)


def first_steps(model: Model, most: int) -> Model:
    """Return the model with so few of its steps, but at least three, that all programs together have about ``most`` instructions."""
    count = len(model.measured_s)
    kept = min(count, max(3, count * most // max(1, instructions(model))))
    programs = {rank: steps[:kept] for rank, steps in model.programs.items()}
    return model if kept == count else replace(model, programs=programs, measured_s=model.measured_s[:kept])


def cost_s(curve: Curve, op: Op) -> float:
    """Return the seconds of a transfer by the α-β model: a ring, or with NCCL a tree where that is faster; 0 for a group of one rank."""
    if op.n < 2:
        return 0.0
    kind = "all_reduce" if op.op == "reduce_scatter" and op.backend == "gloo" else op.op  # Gloo makes it of all_reduces
    factor = bus_factor(kind, op.n) or 0.0
    ring = messages(kind, op.n) * curve.alpha_s + factor * curve.beta_s * op.size_bytes
    if op.backend != "nccl" or kind != "all_reduce":
        return ring
    return min(ring, 2 * (op.n - 1).bit_length() * curve.alpha_s + 2 * curve.beta_s * op.size_bytes)


def recosted(model: Model, op: Op, curve: Curve | None = None, **changed: float) -> Op:
    """Return an operation with other fields, or on another link; its time changes as the α-β model says.

    Args:
        curve: of the other link; ``None``: it is the same.
        changed: ``size_bytes`` and ``n``, as far as they change.
    """
    known = model.curves[op.group]
    new = op._replace(**changed)  # type: ignore[arg-type]
    before, after = cost_s(known, op), cost_s(curve or known, new)
    return new._replace(
        scale=op.scale * (after / before if before > 0 else float(after > 0 or (op.n > 1) == (new.n > 1)))
    )
