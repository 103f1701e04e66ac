"""Real jobs in which one rank is late: it is named, with what it costs, and when it is another one's turn, that one."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.test_verdicts import Job, verdicts_of
from tests.helpers import RunningAgent, agent, wait_for

LATE_MS = 50.0


def straggler(running: RunningAgent, rank: int) -> dict[str, Any] | None:
    """The verdict that ``rank`` is the straggler, once its lateness, a mean over the window, is right within 20%."""
    for verdict in verdicts_of(running, "late"):
        found = re.search(r"late by ([0-9.]+) ms", verdict["says"])
        if verdict["ranks"] == [rank] and found is not None and 0.8 * LATE_MS < float(found[1]) < 1.2 * LATE_MS:
            return verdict
    return None


@pytest.mark.parametrize(("ranks", "culprit"), [(3, 1), (4, 3)])
def test_straggler(tmp_path: Path, ranks: int, culprit: int) -> None:
    """A rank that sleeps 50 ms before each collective is the straggler, its lateness right within 20%; then the next."""
    with agent(tmp_path) as running:
        job = Job(tmp_path, "late", "late", culprit, 200, ranks=ranks)
        try:
            for rank in (culprit, (culprit + 1) % ranks):
                verdict = wait_for(partial(straggler, running, rank), f"rank {rank} to be named")
                assert (verdict["kind"], verdict["cause"]) == ("straggler", "late")
                assert verdict["waiting"] == [other for other in range(ranks) if other != rank]
                assert 0 < verdict["cost_share"] < 1
        finally:
            job.end()
