"""A site with the systemd unit on its nodes, and with Prometheus and Alertmanager by the printed files."""

from __future__ import annotations

import time
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.e2e.test_day import Day
from tests.helpers import PATIENCE_S, Trainer, group_entry, identity, wait_for
from tests.sites import paging, titles

pytestmark = pytest.mark.long


def test_lost_rank_reaches_a_phone(tmp_path: Path) -> None:
    """Prometheus finds the unit's agent, the death of a rank arrives in a chat, and its title says what, which job, which rank, and what to do."""
    day = Day(tmp_path)
    day.settings.write_text("")
    with ExitStack() as stack:
        ranks = []
        for rank in (0, 1):
            now = {"wall_offset_ns": time.time_ns() - time.monotonic_ns(), "started_ns": time.monotonic_ns()}
            path = tmp_path / "run" / "rings" / f"{rank}.ring"
            ranks.append(stack.enter_context(Trainer(path, identity(job="train", rank=rank, **now))))
            ranks[rank].call("name", [(group_entry(),)])
        stack.enter_context(day.unit())
        prometheus, chat = stack.enter_context(paging(tmp_path, f"localhost:{day.port}"))
        wait_for(lambda: prometheus.value('sum(up{job="commwatch"})') == 1, "the target")
        wait_for(lambda: prometheus.value("sum(commwatch_rank_up)") == 2, "both ranks")
        ranks[1].kill()
        wait_for(lambda: titles(chat), "a message", 3 * PATIENCE_S)
        assert titles(chat) == ["[WARNING] Rank 1 of job train failed: read the end of that rank's log"]
        (group,) = prometheus.get("rules")["groups"]
        assert {rule["health"] for rule in group["rules"]} == {"ok"}
