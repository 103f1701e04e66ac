"""The short form of bench/starve.py: an agent with far too many requests loses nothing, and is not taken for broken."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.common import scratch
from bench.starve import Job, starve

pytestmark = pytest.mark.long

SECONDS, CLIENTS = 12.0, 64
#: An eighth of a busy node's, so that it is the crowd that keeps the agent busy; a ring lasts eight seconds as it does there.
JOB = Job(per_second=250, slots=2048)


def test_asked_too_much(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While a crowd asks the dearest questions without pause no record is lost, health is always 200, and metrics are answered."""
    for name in ("COMMWATCH_DIR", "COMMWATCH_GROUP", "COMMWATCH_JOB", "COMMWATCH_CONFIG"):
        monkeypatch.delenv(name, raising=False)
    with scratch(in_memory=True) as memory:
        found = starve(memory / "run", tmp_path / "state", SECONDS, CLIENTS, job=JOB)
    assert (found["lost"], found["not_read"]) == (0, 0)
    assert found["records"] > 0
    assert set(found["health_statuses"]) == set(found["metrics_statuses"]) == {"200"}
    assert found["answers"]["200"] > 0
    assert set(found["answers"]) <= {"200", "400", "429", "503", "closed"}
