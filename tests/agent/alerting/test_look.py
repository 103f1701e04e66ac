"""What an agent looks at to conclude."""

from __future__ import annotations

import threading
import time
from pathlib import Path

from commwatch_agent.alerting.look import METRICS_S, NodeLook, Verdicts
from commwatch_agent.analysis.queries import QueryService
from commwatch_agent.ingest.jobs import Aggregate
from tests.agent.analysis.test_uneven_work import RANKS, Loop, S, in_turn


def test_waits(tmp_path: Path) -> None:
    """How ranks wait for each other is looked up with the metrics, and stays known until it is looked up again."""
    aggregate = Aggregate()
    Loop(in_turn, steps=400).run(aggregate, time.monotonic_ns() - 25 * S)
    look = NodeLook(Verdicts(QueryService(tmp_path / "h.sqlite", aggregate, threading.RLock())), tuple)
    waits = look(1000.0, 50.0).waits
    assert set(waits["job"].waits) == set(RANKS)
    aggregate.jobs.clear()
    assert look(1001.0, 51.0).waits == waits
    assert not look(1000.0 + METRICS_S, 50.0 + METRICS_S).waits
