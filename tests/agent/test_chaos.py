"""The short form of bench/chaos.py: kills at random, and every record accounted for."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from bench.chaos import Chaos
from bench.common import scratch

pytestmark = pytest.mark.long

SECONDS = 10.0


def test_killed_at_random(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Agent and trainers killed at random: of each ring stored and lost are what was written, exactly; nothing twice, nothing counted too often."""
    seed = random.SystemRandom().randrange(1 << 32)
    print(f"seed {seed}")  # pytest shows it where the test fails
    for name in ("COMMWATCH_DIR", "COMMWATCH_GROUP", "COMMWATCH_JOB", "COMMWATCH_CONFIG"):
        monkeypatch.delenv(name, raising=False)
    with scratch(in_memory=True) as memory:
        chaos = Chaos(memory, tmp_path / "state", seed)
        found = chaos.play(SECONDS)
    assert chaos.done.trainers_killed > 0
    assert chaos.done.looks > 0
    assert sum(each.stored for each in found.values()) > 0
