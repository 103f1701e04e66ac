"""The replay: without changes it is the recorded job, and faster parts never make a step longer."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from statistics import fmean, median

import pytest
from hypothesis import given
from hypothesis import strategies as st

from commwatch.wire import events as ev
from commwatch_agent.model.alpha_beta import Curve
from commwatch_agent.model.cells import GroupInfo
from commwatch_agent.model.views import TraceOperation
from commwatch_agent.whatif.build import StepSpan, build
from commwatch_agent.whatif.changes import scaled_compute, with_bandwidth, with_latency, without_lateness
from commwatch_agent.whatif.model import CannotAnswer, Do, Kind, Model, Op, Program
from commwatch_agent.whatif.replay import replay
from tests.agent.whatif.scenes import MS, ddp, group, model
from tests.helpers import examples

JOBS = st.builds(
    model,
    ranks=st.integers(2, 4),
    sizes=st.lists(st.integers(1 << 10, 8 << 20), min_size=1, max_size=5),
    compute_ms=st.integers(1, 60),
    tail_ms=st.integers(1, 10),
    late_ms=st.integers(0, 80),
    alpha_ms=st.floats(0.1, 3),
    ms_per_mib=st.floats(0, 20),
)


def _step_s(of: Model) -> float:
    return median(step.duration_s for step in replay(of))


@given(JOBS)
@examples(60)
def test_unchanged(job: Model) -> None:
    """Replayed without changes, each step takes as long as it did."""
    for step, measured_s in zip(replay(job), job.measured_s, strict=True):
        assert step.duration_s == pytest.approx(measured_s, rel=1e-6, abs=1e-9)
        assert step.exposed_s <= step.comm_s + 1e-9 <= step.duration_s + 2e-9


@given(JOBS, st.floats(1, 8))
@examples(60)
def test_monotone_in_bandwidth(job: Model, factor: float) -> None:
    """More bandwidth never makes a step longer, and less never shorter."""
    assert (
        _step_s(with_bandwidth(factor)(job)) <= _step_s(job) + 1e-9 <= _step_s(with_bandwidth(1 / factor)(job)) + 2e-9
    )


@given(st.floats(0.01, 1), st.floats(0.1, 5))
@examples(40)
def test_monotone_in_latency(factor: float, alpha_ms: float) -> None:
    """Less latency never makes a step longer, and more never shorter."""
    job = model(sizes=(1 << 12, 4 << 20), alpha_ms=alpha_ms, compute_ms=200)
    assert _step_s(with_latency(job, factor)) <= _step_s(job) + 1e-9 <= _step_s(with_latency(job, 1 / factor)) + 2e-9


@given(JOBS)
@examples(60)
def test_monotone_in_lateness(job: Model) -> None:
    """A job without lateness is not slower."""
    assert _step_s(without_lateness(job)) <= _step_s(job) + 1e-9


@given(JOBS, st.floats(1, 1e6))
@examples(60)
def test_never_below_compute(job: Model, factor: float) -> None:
    """On no link do the steps take less time than the ranks compute."""
    compute_s = fmean(
        sum(do.seconds for program in steps for do in program if do.kind == Kind.COMPUTE)
        for steps in job.programs.values()
    )
    assert sum(step.duration_s for step in replay(with_bandwidth(factor)(job))) >= compute_s - 1e-9


def test_lateness_of_one_rank() -> None:
    """A rank that is 50 ms late makes each step 50 ms longer; without its lateness the steps are as long as in a job without a late rank."""
    late, even = model(3, late_ms=50), model(3)
    assert _step_s(without_lateness(late)) == pytest.approx(_step_s(even), rel=1e-3)
    assert _step_s(without_lateness(late, [2])) == pytest.approx(_step_s(even), rel=1e-3)
    assert _step_s(without_lateness(late, [0])) == _step_s(late)
    assert _step_s(scaled_compute(even, 2.0)) > _step_s(even)
    with pytest.raises(CannotAnswer, match="rank 7 has no recorded steps"):
        without_lateness(late, [7])


def test_ends_that_are_seen_late() -> None:
    """An end that is seen well after the step in which the thread waited for it is no compute of that thread, and lateness is found all the same."""
    parts, spans = ddp(2, sizes=(1 << 20,), late_ms=50, tail_ms=1, steps=12)
    step_ns = spans[0][0].end_ns - spans[0][0].start_ns
    seen = [
        part._replace(end_ns=part.end_ns + step_ns // 10) if part.rank == 0 and part.seq % 3 == 0 else part
        for part in parts
    ]
    known, late = (build(each, spans, {}, 2) for each in (parts, seen))
    assert _step_s(late) == pytest.approx(_step_s(known))
    assert _step_s(without_lateness(late, [1])) == pytest.approx(_step_s(without_lateness(known, [1])), rel=0.01)
    assert median(late.measured_s) - _step_s(without_lateness(late, [1])) == pytest.approx(0.05, rel=0.05)


def test_exposed_time_that_was_not_measured() -> None:
    """The answer has of how many steps exposed time was not measured: that of the other steps is known, and that of the replay is shown."""
    parts, spans = ddp(2, steps=6)

    def said(measured: int) -> str:
        known = {
            rank: [span._replace(exposed_ns=20 * MS if at < measured else None) for at, span in enumerate(of_rank)]
            for rank, of_rank in spans.items()
        }
        return next((each for each in build(parts, known, {}, 2).assumed if "exposed time" in each), "")

    assert said(6) == ""
    assert said(5).startswith("exposed time was not measured in 2 of 12 steps of ranks: ")
    assert said(0).startswith("exposed time was not measured: ")


def test_ends_after_the_step() -> None:
    """Where operations of most steps outlast them, they are not waited for in their step."""
    parts, spans = ddp(2, sizes=(1 << 20,), late_ms=0, tail_ms=20, steps=12)
    outlasting = [part._replace(end_ns=part.end_ns + 25 * MS) for part in parts]
    exposed = {rank: [span._replace(exposed_ns=20 * MS) for span in of_rank] for rank, of_rank in spans.items()}
    job = build(outlasting, exposed, {}, 2)
    assert [do.kind for do in job.programs[0][0]] == [Kind.COMPUTE, Kind.LAUNCH, Kind.COMPUTE]


def test_ranks_that_run_other_operations() -> None:
    """A rank's lateness stays where no other rank launches the same operations, and the answer says that; if it does so in most steps, there is none."""
    job = model(3, late_ms=50)
    alone = _with_another_operation(job, 2, range(6))
    with pytest.raises(CannotAnswer, match="in most steps rank 2 launches other operations than all others"):
        without_lateness(alone, [2])
    both = _with_another_operation(alone, 1, range(6), size_bytes=2.0)
    with pytest.raises(CannotAnswer, match="in most steps no two ranks launch the same operations"):
        without_lateness(both)
    for ranks in ((), (0,)):
        kept = without_lateness(alone, ranks)
        assert _step_s(kept) == pytest.approx(_step_s(alone))
        assert [each for each in kept.assumed if "rank 2" in each] == (
            []
            if ranks
            else ["rank 2 stays as late as it is in all steps, where it launches other operations than all others"]
        )
    sometimes = without_lateness(_with_another_operation(job, 2, range(1)), [2])
    assert (
        "rank 2 stays as late as it is in 1 of 6 steps, where it launches other operations than all others"
        in sometimes.assumed
    )
    assert _step_s(sometimes) == pytest.approx(_step_s(without_lateness(job, [2])))


def _with_another_operation(job: Model, rank: int, steps: Iterable[int], size_bytes: float = 1.0) -> Model:
    """The job, in which a rank also exchanges something with itself at the end of some steps."""
    programs = {other: list(of_rank) for other, of_rank in job.programs.items()}
    ops = dict(job.ops)
    for step in steps:
        number = max(ops) + 1
        ops[number] = Op("own", f"own-{rank}", "broadcast", size_bytes, 1, 0.0, queued=False)
        programs[rank][step] = [*programs[rank][step], Do(Kind.GIVE, op=number)]
    return replace(job, ops=ops, programs=programs)


def test_a_pipeline() -> None:
    """A receiver waits for its sender: if the sender computes for half the time, the step of both is shorter by that."""
    parts, of = list[TraceOperation](), group(2, "pp")
    spans: dict[int, list[StepSpan]] = {0: [], 1: []}
    for step in range(4):
        begin = 10**9 + step * 100 * MS
        # Rank 0 computes for 60 ms before its message and 5 ms after it; rank 1 for 30 ms after it, and tells rank 0 when it is done.
        parts += _message(of, 2 * step, 0, begin + 60 * MS, begin, 5)
        parts += _message(of, 2 * step + 1, 1, begin + 95 * MS, begin + 70 * MS, 5)
        spans[0].append(StepSpan(begin, begin + 100 * MS, None))
        spans[1].append(StepSpan(begin, begin + 100 * MS, None))
    job = build(parts, spans, {}, 2)
    assert _step_s(job) == pytest.approx(0.1)
    # Rank 0 waits from 70 to 100 ms, rank 1 from 0 to 65 ms and for its own message.
    assert replay(job)[1].exposed_s == pytest.approx((5 + 30 + 65 + 5) / 2 / 1e3)
    assert _step_s(scaled_compute(job, 0.5, 0)) == pytest.approx(0.1 - 0.06 / 2)


@pytest.mark.parametrize("op", ["broadcast", "recv", "reduce"])
def test_operations_of_which_one_end_is_known(op: str) -> None:
    """A rank that needs others whose part is not known waits as long as it did; that time counts as transfer."""
    parts, spans, of = list[TraceOperation](), list[StepSpan](), group(2, "pp")
    receiver = 0 if op == "reduce" else 1
    for step in range(4):
        begin = 10**9 + step * 100 * MS
        times = (begin + 20 * MS, begin + 20 * MS, begin + 70 * MS)
        parts.append(TraceOperation(receiver, op, of, step, 0, 0, 1 << 20, None, *times, 0, ev.BY_WAIT))
        spans.append(StepSpan(begin, begin + 100 * MS, None))
    job = build(parts, {receiver: spans}, {}, 2)
    assert [(step.duration_s, step.exposed_s) for step in replay(job)] == [pytest.approx((0.1, 0.05))] * 4


def _message(of: GroupInfo, seq: int, sender: int, sent: int, awaited: int, took_ms: int) -> list[TraceOperation]:
    """Both ends of a blocking message, of which the receiver waits first."""
    end = sent + took_ms * MS
    about = (seq, 1 - sender, 0, 1 << 20, None)
    return [
        TraceOperation(sender, "send", of, *about, sent, sent, end, 0, ev.BY_WAIT),
        TraceOperation(1 - sender, "recv", of, seq, sender, 0, 1 << 20, None, awaited, awaited, end, 0, ev.BY_WAIT),
    ]


@pytest.mark.parametrize("late", [0, 1])
@pytest.mark.parametrize("off", [1, 2])
def test_steps_one_off(late: int, off: int) -> None:
    """Where steps of one rank are paired with later ones of another, operations keep their order, and the replay has the recorded step time."""
    parts, spans = ddp(steps=9)
    shifted = {rank: of_rank[off:] if rank == late else of_rank[:-off] for rank, of_rank in spans.items()}
    job = build(parts, shifted, {}, 2)
    assert _step_s(job) == pytest.approx(median(job.measured_s), rel=0.01)


def test_operations_that_a_rank_lacks() -> None:
    """An operation whose times on one rank are not known keeps its place in the group."""
    parts, spans = ddp(steps=4, late_ms=30)
    known = [part for part in parts if part.rank == 0 or part.seq != 4]
    blocking = [part._replace(flags=0) for part in known]
    job = build(blocking, spans, {}, 2)
    assert len(replay(job)) == 4


@pytest.mark.parametrize("groups", [("g0", "g1"), ("g0", "g0")])
def test_records_that_contradict_one_another(groups: tuple[str, str]) -> None:
    """Ranks that wait for one another forever, or have other orders in one group, raise an error that names the cause."""
    ops = {at: Op(name, name, "all_reduce", 1.0, 2, 1.0) for at, name in enumerate(groups)}
    one: Program = [Do(Kind.LAUNCH, op=0), Do(Kind.WAIT, op=0), Do(Kind.LAUNCH, op=1), Do(Kind.WAIT, op=1)]
    other: Program = [Do(Kind.LAUNCH, op=1), Do(Kind.WAIT, op=1), Do(Kind.LAUNCH, op=0), Do(Kind.WAIT, op=0)]
    curves = dict.fromkeys(groups, Curve(0.0, 1.0))
    job = Model(ops, {0: [one], 1: [other]}, {0: 0.0, 1: 0.0}, curves, {}, frozenset(), 2, (1.0,))
    with pytest.raises(CannotAnswer, match="do not fit together"):
        replay(job)


def test_too_few_steps() -> None:
    """Two steps are too few."""
    parts, spans = ddp(steps=2)
    with pytest.raises(CannotAnswer, match="too few steps of all ranks were recorded: 2, at least 3 are needed"):
        build(parts, spans, {}, 2)
