"""Jobs that were cut off: whatever is missing of their records, all questions have an answer or a reason why there is none."""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from commwatch.wire import events as ev
from commwatch_agent.model.views import TraceOperation
from commwatch_agent.whatif.answers import STANDARD, study
from commwatch_agent.whatif.build import StepSpan, build
from commwatch_agent.whatif.changes import Change
from commwatch_agent.whatif.exchange import replicated, sharded, with_buckets
from commwatch_agent.whatif.model import CannotAnswer, Do, Kind, Model
from commwatch_agent.whatif.replay import replay
from tests.agent.whatif.scenes import MS, ddp, group, model
from tests.helpers import examples

CHANGES: dict[str, Change] = {**STANDARD, "sharded": sharded, "replicated": replicated}
RANKS, STEPS = 3, 8


def _ask_all(job: Model) -> None:
    """Ask all questions; only ``CannotAnswer`` may be raised, and none by those of a report."""
    study("job", job, {})
    for name, change in CHANGES.items():
        with suppress(CannotAnswer):
            study("job", job, {name: change})


def _fsdp(step: int, begin: int, ranks: Collection[int]) -> list[TraceOperation]:
    """A gather and a reduce_scatter, in the middle of a step of 160 ms."""
    parts = []
    for at, op in enumerate(("all_gather", "reduce_scatter")):
        start = begin + (30 + 40 * at) * MS
        about = (group(RANKS, "fsdp"), 2 * step + at, -1, 0, 2 << 20, "float32", start, start, start + 10 * MS)
        parts += [TraceOperation(rank, op, *about, ev.ASYNC, ev.BY_FUTURE) for rank in ranks]
    return parts


def _messages(step: int, begin: int) -> list[TraceOperation]:
    """A message from each rank to the next."""
    parts, of = [], group(RANKS, "pp")
    for rank in range(RANKS - 1):
        start, about = begin + (50 + rank) * MS, (step, 1 << 20, None)
        for op, own, other in (("send", rank, rank + 1), ("recv", rank + 1, rank)):
            times = (start, start, start + 5 * MS)
            parts.append(TraceOperation(own, op, of, about[0], other, 0, about[1], about[2], *times, 0, ev.BY_WAIT))
    return parts


@st.composite
def cut(draw: Callable[[Any], Any]) -> Model:
    """A job of which records are missing: operations of a rank from some moment on, single ones, single ends of messages; others end late or never."""
    parts, spans = ddp(RANKS, STEPS, sizes=(1 << 20, 4 << 20), compute_ms=draw(st.integers(1, 30)))
    for step, span in enumerate(spans[0]):
        parts += _fsdp(step, span.start_ns, range(RANKS)) if draw(st.booleans()) else []
        parts += _messages(step, span.start_ns) if draw(st.booleans()) else []
    last_ns = {rank: draw(st.one_of(st.just(1 << 62), st.integers(10**9, 3 * 10**9))) for rank in range(RANKS)}
    parts = [part for part in parts if part.launch_ns < last_ns[part.rank]]
    lost = draw(st.sets(st.integers(0, max(0, len(parts) - 1)), max_size=12))
    late = draw(st.dictionaries(st.integers(0, max(0, len(parts) - 1)), st.integers(0, 400), max_size=12))
    flags = draw(st.sampled_from([0, ev.ASYNC]))
    kept = [
        part._replace(end_ns=part.end_ns + late.get(at, 0) * MS, flags=flags if at in late else part.flags)
        for at, part in enumerate(parts)
        if at not in lost
    ]
    known = draw(st.sampled_from([True, False]))
    steps = {
        rank: [StepSpan(span.start_ns, span.end_ns, span.exposed_ns if known else None) for span in of_rank]
        for rank, of_rank in spans.items()
    }
    return build(kept, steps, {}, RANKS)


@given(cut())
@examples(20)
def test_any_cut(job: Model) -> None:
    """Whatever records are missing, questions have an answer or a reason."""
    with suppress(CannotAnswer):
        _ask_all(job)


def _killed(parts: list[TraceOperation]) -> list[TraceOperation]:
    """Rank 1 never launches the last operation."""
    return [part for part in parts if part.rank != 1 or part.seq < 2 * STEPS - 1]


def _died_early(parts: list[TraceOperation]) -> list[TraceOperation]:
    """Rank 1 launches nothing in the second half."""
    return [part for part in parts if part.rank != 1 or part.seq < STEPS]


def _never_waited_for(parts: list[TraceOperation]) -> list[TraceOperation]:
    """The last operation of each rank ends long after the steps."""
    return [part._replace(end_ns=1 << 62) if part.seq == 2 * STEPS - 1 else part for part in parts]


def _waited_for_later(parts: list[TraceOperation]) -> list[TraceOperation]:
    """The second operation of each step ends in the next one, and is waited for there."""
    return [part._replace(end_ns=part.end_ns + 40 * MS) if part.seq % 2 else part for part in parts]


def _without_peers(parts: list[TraceOperation]) -> list[TraceOperation]:
    """Messages of which the other end is not recorded; the last one never ends."""
    mine = [part for step in range(STEPS) for part in _messages(step, 10**9 + step * 60 * MS) if part.rank == 1]
    return [*parts, *mine[:-1], mine[-1]._replace(end_ns=1 << 62)]


def _without_bytes(parts: list[TraceOperation]) -> list[TraceOperation]:
    """All operations are empty."""
    return [part._replace(size=0) for part in parts]


@pytest.mark.parametrize(
    "cut_off", [_killed, _died_early, _never_waited_for, _waited_for_later, _without_peers, _without_bytes]
)
def test_operations_that_one_rank_lacks(cut_off: Callable[[list[TraceOperation]], list[TraceOperation]]) -> None:
    """A job that was cut off has a study, although a rank never launched an operation, or never waited for it in its step."""
    parts, spans = ddp(RANKS, STEPS, sizes=(1 << 20, 4 << 20))
    job = build(cut_off(parts), spans, {}, RANKS)
    _ask_all(job)
    assert study("job", job, {}).answers


def test_waits_stay_where_they_were() -> None:
    """An exchange for which ranks wait in the next step is waited for there in other buckets, too: those of the recorded size change nothing."""
    parts, spans = ddp(RANKS, STEPS, sizes=(4 << 20,))
    later = [part._replace(end_ns=part.end_ns + 30 * MS) for part in parts]
    open_spans = {rank: [span._replace(exposed_ns=0) for span in of_rank] for rank, of_rank in spans.items()}
    job = build(later, open_spans, {}, RANKS)
    first, second = job.programs[0][:2]
    (launched,) = (do.op for do in first if do.kind == Kind.LAUNCH)
    assert Do(Kind.WAIT, op=launched) in second
    same = with_buckets(job, 4 << 20)
    assert [step.duration_s for step in replay(same)] == pytest.approx([step.duration_s for step in replay(job)])


def test_replicas_wait_for_their_gradients() -> None:
    """With replicas in place of shards, ranks wait for each exchange once, and launch no gather."""
    shards = sharded(model(RANKS))
    job = replicated(shards)
    for steps in job.programs.values():
        launched = [do.op for program in steps for do in program if do.kind == Kind.LAUNCH]
        assert sorted(do.op for program in steps for do in program if do.kind == Kind.WAIT) == sorted(launched)
    assert {job.ops[do.op].op for do in job.programs[0][0] if do.kind == Kind.LAUNCH} == {"all_reduce"}
