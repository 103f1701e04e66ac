"""Pipelines of known shape: the bubble and its directions."""

from __future__ import annotations

from pathlib import Path

import pytest

from commwatch_agent.analysis.pipelines import pipelines
from tests.e2e.torchjob import digest, run_job

pytestmark = pytest.mark.by_the_clock
STAGES, BATCHES, STEPS = 3, 4, 12


def test_bubble_of_1f1b(tmp_path: Path) -> None:
    """The bubble of 1F1B is (p-1)/(m+p-1) on every stage; the first stage waits only backward, the last only forward."""
    run_job(tmp_path, "pipeline.py", str(BATCHES), str(STEPS), nproc=STAGES)
    with digest(tmp_path)[0].live(None) as (jobs, _):
        (pipeline,) = pipelines(jobs)
    least = (STAGES - 1) / (BATCHES + STAGES - 1)
    assert (pipeline.group, pipeline.complete, pipeline.micro_batches) == ("pipeline", True, BATCHES)
    assert pipeline.least_bubble_share == pytest.approx(least)
    # Messages and a busy machine make it a little longer than that.
    assert least - 0.02 < (pipeline.bubble_share or 0) < least + 0.08
    for rank, stage in enumerate(pipeline.stages):
        assert stage.rank == rank
        assert stage.bubble_share == pytest.approx(least, abs=0.08)
        # Each of m batches is received and sent forward and backward, but for the ends.
        half = BATCHES * STEPS * (1 if rank in (0, STAGES - 1) else 2)
        assert (stage.forward, stage.backward) == (half, half)
    first, middle, last = pipeline.stages
    assert first.forward_wait_s < 0.1 * first.backward_wait_s
    assert last.backward_wait_s < 0.1 * last.forward_wait_s
    assert middle.forward_wait_s > 0
    assert middle.backward_wait_s > 0
