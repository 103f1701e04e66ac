"""A healthy job has no verdicts, however busy the machine: it runs while the other tests do."""

from __future__ import annotations

from tests.e2e.quiet import PAUSE_S, QuietJob
from tests.helpers import wait_for

MINUTES_S = 125


def test_no_verdict_on_a_healthy_job(quiet: QuietJob) -> None:
    """Two minutes of uneven compute, checkpoints and posted receives on a busy machine, and not one verdict."""
    wait_for(lambda: quiet.age_s > MINUTES_S or not quiet.running(), "two minutes", 2 * MINUTES_S)
    assert quiet.running()
    assert quiet.steps() > 100
    assert quiet.asked > 0.2 * MINUTES_S / PAUSE_S
    assert quiet.verdicts == []
