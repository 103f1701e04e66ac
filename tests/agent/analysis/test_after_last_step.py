"""Operations after the last step of a rank: they are counted, but are no part of what is concluded about its steps."""

from __future__ import annotations

from pathlib import Path

import pytest

from commwatch_agent.analysis.advice import advice_on
from commwatch_agent.analysis.advice_input import Counts, count, facts, waiting_share
from tests.helpers import MS, Trainer, Watch, group_entry, identity, mark, operation

STEPS, STEP_NS = 340, 100 * MS
END_NS = STEPS * STEP_NS
#: How long rank 0 evaluates after the last step.
EVALUATES_NS = 15_000 * MS


def records(rank: int, op: str) -> list[tuple[int, ...]]:
    """Even steps with 8% of communication, and then an operation in which the others wait for rank 0."""
    found = [mark(0, 0)]
    for step in range(STEPS):
        end_ns = (step + 1) * STEP_NS
        found += [operation(start_ns=end_ns - 9 * MS, end_ns=end_ns - MS, seq=step), mark(step + 1, end_ns)]
    began_ns = END_NS + (MS if rank else EVALUATES_NS)
    root = 0 if op == "broadcast" else -1
    return [*found, operation(op, start_ns=began_ns, end_ns=END_NS + EVALUATES_NS + MS, seq=STEPS, peer=root)]


def counted(tmp_path: Path, op: str) -> tuple[Watch, Counts]:
    """What a history has of such a job with three ranks."""
    trainers = [Trainer(tmp_path / f"rings/{rank}.ring", identity(rank=rank, world_size=3)) for rank in range(3)]
    watch = Watch(tmp_path)
    for rank, trainer in enumerate(trainers):
        with trainer:
            trainer.call("name", [(group_entry(ranks=(0, 1, 2)),)])
            own = records(rank, op)
            for begin in range(0, len(own), 500):
                trainer.write(own[begin : begin + 500])
                watch.tick(END_NS + EVALUATES_NS + 2 * MS)
    return watch, count(watch.agent, "job")


@pytest.mark.parametrize("op", ["barrier", "broadcast", "all_reduce"])
def test_final_evaluation(tmp_path: Path, op: str) -> None:
    """A rank that evaluates after the last step, while the others wait for it, is not late in the steps."""
    watch, counts = counted(tmp_path, op)
    (job,) = watch.agent.jobs()
    known = facts(watch.agent, job, counts, [])
    assert known is not None
    assert known.waits == {0: 0.0, 1: pytest.approx(0.0, abs=0.001), 2: pytest.approx(0.0, abs=0.001)}
    assert known.late == {}
    assert "straggler" not in [each.rule for each in advice_on(known)]
    assert waiting_share(watch.agent, "job", counts) == pytest.approx(0.0, abs=0.001)
    # All of it is in the sums of the job.
    assert sum(row.wait_s or 0.0 for row in counts.every.by_rank) == pytest.approx(30, abs=0.1)
