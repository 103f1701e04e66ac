"""A real Prometheus scrapes real agents, and its queries and our rules give what was written by hand."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.alerts.promtool import exported
from tests.alerts.test_rules import SHARE
from tests.helpers import MS, agent, end_rank, group_entry, mark, operation, wait_for, write_ring
from tests.prometheus import Prometheus, prometheus


def test_bandwidth_out_of_prometheus(tmp_path: Path) -> None:
    """The target is up, and rate(bus_bytes) / rate(seconds) is the bus bandwidth of what ran, by rank and in all."""
    (tmp_path / "run").mkdir(mode=0o700)
    names = [group_entry(0, (0, 1, 2, 3), "data", group_id="data-0")]
    writers = [write_ring(tmp_path / "run" / "rings", [], names, rank=rank, world_size=4) for rank in range(4)]
    per_batch = 50

    def train(batch: int) -> None:
        # 1 MB in rank + 1 ms; a ring of four moves 2 * 3/4 of it: 1.5 GB/s on rank 0 down to 375 MB/s on rank 3.
        for seq in range(batch * per_batch, (batch + 1) * per_batch):
            for rank, writer in enumerate(writers):
                end = seq * 10 * MS + 5 * MS
                writer.write(*operation(start_ns=end - (rank + 1) * MS, end_ns=end, seq=seq, size=1_000_000))

    train(0)  # whole before the first scrape: all ranks' rates begin alike
    with agent(tmp_path / "run") as watching:
        wait_for(lambda: watching.samples().get('commwatch_events_total{job_id="job"}') == 4 * per_batch, "the records")
        with prometheus(tmp_path, [watching.url]) as prom:
            _ask(prom, train, per_batch)
    for writer in writers:
        end_rank(writer)


def _ask(prom: Prometheus, train: Callable[[int], None], per_batch: int) -> None:
    count = "sum(commwatch_collectives_total{group='data', op='all_reduce'})"
    wait_for(lambda: prom.value("up{job='commwatch'}") == 1, "the target to be up")
    (target,) = prom.get("targets")["activeTargets"]
    assert (target["health"], target["lastError"]) == ("up", "")
    wait_for(lambda: prom.value(count) == 4 * per_batch, "the first batch")
    train(1)
    wait_for(lambda: prom.value(count) == 8 * per_batch, "the second batch")

    moved, took = (f"rate(commwatch_collective_{n}_total{{op='all_reduce'}}[5m])" for n in ("bus_bytes", "seconds"))
    by_rank = {labels["rank"]: value for labels, value in prom.query(f"{moved} / {took}")}
    assert by_rank == pytest.approx({str(rank): 1.5e9 / (rank + 1) for rank in range(4)})
    # All ranks: 4 MB x 1.5 in 1 + 2 + 3 + 4 ms.
    assert prom.value(f"sum by (group) ({moved}) / sum by (group) ({took})") == pytest.approx(6e6 / 0.010)
    # Waits: rank 3 began first and waited 3 of its 4 ms; rank 0 was late in everything, by a median of 2 ms.
    waited = "commwatch_collective_wait_seconds_total / on (job_id, rank, group) commwatch_collective_seconds_total"
    shares = {labels["rank"]: value for labels, value in prom.query(waited)}
    assert shares == pytest.approx({"0": 0, "1": 1 / 2, "2": 2 / 3, "3": 3 / 4})
    ((labels, late),) = prom.query("topk(1, commwatch_rank_lateness_seconds_total)")
    assert labels["rank"] == "0"
    assert late == pytest.approx(0.002 * 2 * per_batch)
    slowest = prom.value("histogram_quantile(1, sum by (le) (commwatch_collective_duration_seconds_bucket))")
    assert slowest == pytest.approx(0.01)  # upper bound of the bucket 3 to 10 ms


def test_straggler_over_two_agents(tmp_path: Path) -> None:
    """A Prometheus with our rules that scrapes two agents, each with two ranks of four, names the late one and no other."""
    names = [group_entry(0, (0, 1, 2, 3), "data", group_id="d")]
    per_batch, writers = 50, []
    for rank in range(4):
        (tmp_path / "ab"[rank // 2]).mkdir(mode=0o700, exist_ok=True)
        writers.append(write_ring(tmp_path / "ab"[rank // 2] / "rings", [], names, rank=rank, world_size=4))

    def train(batch: int) -> None:
        for seq in range(batch * per_batch, (batch + 1) * per_batch):
            for rank, writer in enumerate(writers):
                took = (20 if rank == 2 else 520 + rank) * MS
                writer.write(*operation(start_ns=seq * 600 * MS, end_ns=seq * 600 * MS + took, seq=seq))
                writer.write(*mark(seq, (seq + 1) * 600 * MS))

    train(0)
    with (
        agent(tmp_path / "a") as a,
        agent(tmp_path / "b") as b,
        prometheus(tmp_path, [a.url, b.url], (exported(tmp_path),)) as prom,
    ):
        count = "sum(commwatch_periods_total)"
        wait_for(lambda: (prom.value(count) or 0) >= 4 * (per_batch - 2), "the first batch")
        train(1)
        wait_for(lambda: prom.query(f"{SHARE}straggler"), "the straggler")
        ((labels, lateness),) = prom.query(f"{SHARE}straggler")
        assert (labels["job_id"], labels["rank"]) == ("job", "2")
        assert lateness == pytest.approx(501 / 600)  # the others: 520, 521 and 523 ms of each step
        shares = {labels["rank"]: value for labels, value in prom.query(f"{SHARE}rate")}
        assert shares == pytest.approx({"0": 520 / 600, "1": 521 / 600, "2": 20 / 600, "3": 523 / 600})
    for writer in writers:
        end_rank(writer)
