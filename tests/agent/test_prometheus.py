"""A real Prometheus scrapes a real agent, and its queries give what was written by hand."""

from __future__ import annotations

import json
import shutil
import subprocess
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.helpers import MS, agent, end_rank, free_port, group_entry, needs, operation, wait_for, write_ring


class Prometheus:
    """A running Prometheus and how to ask it."""

    def __init__(self, port: int) -> None:
        self.url = f"http://127.0.0.1:{port}"

    def get(self, path: str) -> Any:
        """The ``data`` of an answer of its HTTP API."""
        with urllib.request.urlopen(f"{self.url}/api/v1/{path}", timeout=30) as response:
            answer = json.load(response)
        assert answer["status"] == "success"
        return answer["data"]

    def query(self, promql: str) -> list[tuple[dict[str, str], float]]:
        """Labels and values of an instant query."""
        found = self.get(f"query?{urllib.parse.urlencode({'query': promql})}")["result"]
        return [(each["metric"], float(each["value"][1])) for each in found]

    def value(self, promql: str) -> float | None:
        """The one value of a query; ``None`` while there is none."""
        found = self.query(promql)
        assert len(found) <= 1, found
        return found[0][1] if found else None

    def ready(self) -> bool:
        """It answers."""
        try:
            return bool(self.get("status/buildinfo"))
        except (urllib.error.URLError, OSError):
            return False


@contextmanager
def prometheus(directory: Path, target: str) -> Iterator[Prometheus]:
    """A Prometheus of our own on a free port of 127.0.0.1 that scrapes ``target`` twice a second."""
    config = {
        "global": {"scrape_interval": "500ms", "scrape_timeout": "500ms"},
        "scrape_configs": [
            {"job_name": "commwatch", "static_configs": [{"targets": [target.removeprefix("http://")]}]}
        ],
    }
    (directory / "prom.yml").write_text(json.dumps(config))  # JSON is YAML
    port = free_port()
    command = ["prometheus", f"--config.file={directory}/prom.yml", f"--storage.tsdb.path={directory}/data"]
    with open(directory / "prometheus.log", "wb") as log:
        process = subprocess.Popen([*command, f"--web.listen-address=127.0.0.1:{port}"], stdout=log, stderr=log)
    running = Prometheus(port)
    try:

        def ready() -> bool:
            assert process.poll() is None, (directory / "prometheus.log").read_text()
            return running.ready()

        wait_for(ready, "Prometheus")
        yield running
    finally:
        process.terminate()
        process.wait(30)


def test_bandwidth_out_of_prometheus(tmp_path: Path) -> None:
    """The target is up, and rate(bus_bytes) / rate(seconds) is the bus bandwidth of what ran, by rank and in all."""
    needs(shutil.which("prometheus"), "prometheus")
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
        with prometheus(tmp_path, watching.url) as prom:
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
