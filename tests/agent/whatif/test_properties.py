"""Properties of the replay on random jobs: groups of any ranks, operations that block or do not, roots, messages, several steps."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from itertools import accumulate
from typing import Any, SupportsIndex

import pytest
from hypothesis import given
from hypothesis import strategies as st

from commwatch_agent.model.alpha_beta import Curve
from commwatch_agent.whatif.changes import scaled_compute, with_bandwidth, with_latency, with_ranks, without_lateness
from commwatch_agent.whatif.exchange import accumulated, compressed, sharded, with_buckets
from commwatch_agent.whatif.model import LAUNCHES, CannotAnswer, Do, Kind, Model, Op, Program
from commwatch_agent.whatif.replay import replay
from tests.agent.whatif.scenes import large, model
from tests.helpers import examples

RANKS, STEPS = 4, 3
GROUPS = {"world": (0, 1, 2, 3), "low": (0, 1), "high": (2, 3), "odd": (1, 3), "most": (0, 1, 2)}
SECONDS = st.floats(0, 0.1)


@st.composite
def jobs(draw: Callable[[Any], Any]) -> Model:
    """A job: in each step, all ranks launch their operations in the same order, compute between them, and wait for them at once or at the end."""
    ops: dict[int, Op] = {}
    programs: dict[int, list[Program]] = {rank: [] for rank in range(RANKS)}
    for _ in range(STEPS):
        open_ops: dict[int, list[int]] = {rank: [] for rank in range(RANKS)}
        step: dict[int, Program] = {rank: [Do(Kind.COMPUTE, draw(SECONDS))] for rank in range(RANKS)}
        for _ in range(draw(st.integers(0, 5))):
            number, label = len(ops), draw(st.sampled_from(sorted(GROUPS)))
            op = draw(st.sampled_from(["all_reduce", "all_gather", "broadcast"]))
            root, size = GROUPS[label][0], draw(st.integers(1, 1 << 24))
            work_s = draw(SECONDS)
            ops[number] = Op(
                label,
                label,
                op,
                size,
                len(GROUPS[label]),
                work_s,
                queued=op != "broadcast",
                carries="gradients" * (op == "all_reduce"),
            )
            for rank in GROUPS[label]:
                kind = Kind.LAUNCH if op != "broadcast" else Kind.GIVE if rank == root else Kind.TAKE
                # A part of a collective may end before the last one; one of a broadcast takes as long as it does.
                step[rank].append(Do(kind, draw(st.floats(0, work_s)), number))
                if draw(st.booleans()):
                    step[rank].append(Do(Kind.WAIT, op=number))
                else:
                    open_ops[rank].append(number)
                step[rank].append(Do(Kind.COMPUTE, draw(SECONDS)))
        for rank, program in step.items():
            programs[rank].append(
                [*program, *(Do(Kind.WAIT, op=number) for number in open_ops[rank]), Do(Kind.COMPUTE, draw(SECONDS))]
            )
    alpha_s, beta_s = draw(st.floats(1e-6, 1e-2)), draw(st.floats(1e-11, 1e-7))
    curves = dict.fromkeys(GROUPS, Curve(alpha_s, beta_s))
    begins = {rank: draw(SECONDS) for rank in range(RANKS)}
    return Model(ops, programs, begins, curves, {}, frozenset(GROUPS), RANKS, (1.0,) * STEPS)


def _ends(job: Model) -> list[float]:
    """When the job has ended each step, from its begin, as means over the ranks."""
    return list(accumulate(step.duration_s for step in replay(job)))


def _not_longer(faster: Model, slower: Model) -> None:
    """No step of the one ends later than that of the other."""
    assert all(a <= b + 1e-9 for a, b in zip(_ends(faster), _ends(slower), strict=True))


def _compute_s(job: Model, rank: int) -> float:
    return sum(do.seconds for program in job.programs[rank] for do in program if do.kind == Kind.COMPUTE)


def _bytes(job: Model) -> float:
    """Bytes of all operations that the ranks launch."""
    return sum(
        job.ops[do.op].size_bytes
        for steps in job.programs.values()
        for program in steps
        for do in program
        if do.kind in LAUNCHES
    )


@given(jobs(), st.floats(1, 16))
@examples(150)
def test_monotone_in_bandwidth_and_latency(job: Model, factor: float) -> None:
    """More bandwidth or less latency never ends a step later; less bandwidth or more latency never ends it earlier."""
    for change in (with_bandwidth(factor), lambda each: with_latency(each, 1 / factor)):
        _not_longer(change(job), job)
    for change in (with_bandwidth(1 / factor), lambda each: with_latency(each, factor)):
        _not_longer(job, change(job))


@given(jobs(), st.integers(0, RANKS - 1), st.integers(0, STEPS - 1), SECONDS)
@examples(150)
def test_monotone_in_lateness(job: Model, rank: int, step: int, late_s: float) -> None:
    """A rank that is later never ends a step earlier, nor does one that computes longer; a job without lateness never ends a step later."""
    programs = {other: list(of_rank) for other, of_rank in job.programs.items()}
    programs[rank][step] = [Do(Kind.COMPUTE, late_s), *programs[rank][step]]
    _not_longer(job, replace(job, programs=programs))
    _not_longer(job, scaled_compute(job, 1 + late_s, rank))
    try:
        even = without_lateness(job)
    except CannotAnswer:
        return
    _not_longer(even, job)


CHANGES = st.sampled_from(
    [
        with_bandwidth(1e9),
        lambda job: with_latency(job, 1e-9),
        lambda job: with_ranks(job, 2 * RANKS),
        lambda job: with_ranks(job, 1),
        lambda job: compressed(job, "int8"),
        lambda job: accumulated(job, 3),
        without_lateness,
        lambda job: scaled_compute(job, 0.5),
    ]
)


@given(jobs(), CHANGES)
@examples(200)
def test_never_below_compute(job: Model, change: Callable[[Model], Model]) -> None:
    """Whatever changes, no rank takes less time than it computes, and waits are a part of communication, which is a part of the time."""
    try:
        after = change(job)
    except CannotAnswer:
        return
    steps = replay(after)
    compute_s = sum(_compute_s(after, rank) for rank in after.programs) / len(after.programs)
    assert sum(step.duration_s for step in steps) >= compute_s - 1e-9
    for step in steps:
        assert -1e-9 <= step.exposed_s <= step.comm_s + 1e-9 <= step.duration_s + 2e-9


@given(jobs(), st.floats(0.1, 10))
@examples(100)
def test_bytes_are_kept(job: Model, factor: float) -> None:
    """Links, ranks, compute and lateness change no byte; compression leaves its part of the gradients, and all else."""
    for change in (with_bandwidth(factor), lambda each: scaled_compute(each, factor)):
        assert _bytes(change(job)) == pytest.approx(_bytes(job))
    with suppress(CannotAnswer):  # no group that grows
        assert _bytes(with_ranks(job, 8)) == pytest.approx(_bytes(job))
    gradients = sum(_bytes(_only(job, step)) for step in range(STEPS))
    try:
        after = compressed(job, 0.25)
    except CannotAnswer:
        return
    assert _bytes(after) == pytest.approx(_bytes(job) - 0.75 * gradients)


def _only(job: Model, step: int) -> Model:
    """The job with only the gradients of one step."""
    programs = {
        rank: [[do for do in steps[step] if do.op >= 0 and job.ops[do.op].carries]]
        for rank, steps in job.programs.items()
    }
    return replace(job, programs=programs)


@given(st.lists(st.integers(1 << 16, 1 << 23), min_size=1, max_size=5), st.integers(2, 4))
@examples(40)
def test_exchanges_keep_bytes(sizes: list[int], ranks: int) -> None:
    """Buckets carry the bytes of the gradients, sharding scatters them and gathers as many twice, accumulation exchanges them once."""
    job = model(ranks, sizes=sizes)
    assert _bytes(with_buckets(job, 1 << 20)) == pytest.approx(_bytes(job))
    assert _bytes(sharded(job)) == pytest.approx(3 * _bytes(job))
    assert _bytes(accumulated(job, 4)) == pytest.approx(_bytes(job))


class _Counted(list[Do]):
    """A program that counts how often its instructions are read."""

    reads = 0

    def __getitem__(self, place: SupportsIndex | slice) -> Any:
        _Counted.reads += 1
        return super().__getitem__(place)


def test_work_of_a_large_job() -> None:
    """A step of 256 ranks with 200 operations each takes one look at each instruction, and one more where a rank has to wait."""
    job = large(256, 200)
    waits = sum(do.kind == Kind.WAIT for steps in job.programs.values() for do in steps[0])
    instructions = sum(len(steps[0]) for steps in job.programs.values())
    _Counted.reads = 0
    (step,) = replay(replace(job, programs={rank: [_Counted(steps[0])] for rank, steps in job.programs.items()}))
    assert instructions == 256 * (200 + 200 + 50)
    assert instructions <= _Counted.reads <= instructions + waits
    # Four operations are launched at 1, 2, 3 and 4 ms, and end by 5 ms; fifty times.
    assert step.duration_s == pytest.approx(50 * 5e-3)
