"""One Prometheus over a job of many nodes: what it costs, how long rules and panels take, when a straggler and a hang are found.

    python bench/scale.py [--nodes 128] [--interval 15] [--settle 360] [--victoria]

The agents are those of ``fleet.py``. A real Prometheus scrapes them with our rules; every query of our dashboards is asked of it as
Grafana would. Then a rank comes late into the operations of a group whose other ranks are all on other nodes, and last a
rank's process is stopped. With ``--victoria`` Prometheus also writes into a VictoriaMetrics, which is asked the same.
"""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import subprocess
import sys
import time
import urllib.parse
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

sys.path.append(str(Path(__file__).parents[1]))

from bench.agent_load import wait_for
from bench.common import cpu_s, emit, memory_mb, scratch
from bench.fleet import JOB
from tests.dashboards.grafana import NAMES, Target, load, substituted, targets
from tests.helpers import fetch, free_port

#: The rank that comes late, of the fourth node; and the one that is stopped, of the last.
LATE, STOPPED_NODE = 27, -1
#: How long an alert is waited for.
PATIENCE_S = 420.0
#: What is drawn; Grafana asks for a point each interval.
LOOK_S = 1800
STRAGGLER = "job_rank:commwatch_period_comm_share:straggler"


class Server(NamedTuple):
    """A process that answers Prometheus' API."""

    url: str
    pid: int

    def get(self, path: str) -> Any:
        """JSON under ``/api/v1``."""
        return json.loads(fetch(f"{self.url}/api/v1/{path}")[0])

    def query(self, expr: str) -> list[dict[str, Any]]:
        """The series of an instant query."""
        found: list[dict[str, Any]] = self.get(f"query?{urllib.parse.urlencode({'query': expr})}")["data"]["result"]
        return found

    def value(self, expr: str) -> float:
        """The one value of a query."""
        (one,) = self.query(expr)
        return float(one["value"][1])

    def own(self) -> dict[str, float]:
        """Its own metrics: name, with labels, to value."""
        page = fetch(f"{self.url}/metrics")[0].decode()
        lines = [line for line in page.splitlines() if line and not line.startswith("#")]
        return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines)}


@contextmanager
def process(*command: str | Path, log: Path, **kwargs: Any) -> Iterator[subprocess.Popen[str]]:
    """A process that is ended at the end."""
    with open(log, "w", encoding="utf-8") as file:
        running = subprocess.Popen(list(map(str, command)), stderr=file, text=True, **kwargs)
    try:
        yield running
    finally:
        running.terminate()
        try:
            running.wait(30)
        finally:
            running.kill()


@contextmanager
def answering(name: str, place: Path, *command: str | Path) -> Iterator[Server]:
    """A server on a free port; ``{port}`` stands for it in its command line."""
    port = free_port()
    words = [str(word).replace("{port}", str(port)) for word in command]
    with process(*words, log=place / f"{name}.log", stdout=subprocess.DEVNULL) as running:
        server = Server(f"http://127.0.0.1:{port}", running.pid)

        def ready() -> bool:
            assert running.poll() is None, (place / f"{name}.log").read_text()
            try:
                return bool(server.get("query?query=1"))
            except OSError:
                return False

        wait_for(ready, name)
        yield server


@contextmanager
def prometheus(place: Path, addresses: list[str], interval_s: int, writes_to: Server | None) -> Iterator[Server]:
    """A Prometheus with our rules."""
    rules = place / "rules.yaml"
    subprocess.run([sys.executable, "-m", "commwatch", "alerts", "export", "--output", rules], check=True)
    config = {
        "global": {"scrape_interval": f"{interval_s}s", "evaluation_interval": f"{interval_s}s"},
        "rule_files": [str(rules)],
        "scrape_configs": [{"job_name": "commwatch", "static_configs": [{"targets": addresses}]}],
        "remote_write": [{"url": f"{writes_to.url}/api/v1/write"}] if writes_to else [],
    }
    (place / "prom.yml").write_text(json.dumps(config), encoding="utf-8")  # JSON is YAML
    where = (
        f"--config.file={place}/prom.yml",
        f"--storage.tsdb.path={place}/data",
        "--web.listen-address=127.0.0.1:{port}",
    )
    with answering("prometheus", place, "prometheus", *where) as server:
        yield server


@contextmanager
def victoria(place: Path) -> Iterator[Server]:
    """A VictoriaMetrics; Debian's, installed if it is not there and this is root."""
    if shutil.which("victoria-metrics") is None:
        subprocess.run(["apt-get", "install", "-y", "-qq", "--no-install-recommends", "victoria-metrics"], check=True)
    where = (f"-storageDataPath={place}/victoria", "-httpListenAddr=127.0.0.1:{port}", "-retentionPeriod=1")
    with answering("victoria", place, "victoria-metrics", *where, "-search.latencyOffset=0s") as server:
        yield server


def panels(server: Server, addresses: list[str], interval_s: int) -> dict[str, Any]:
    """Milliseconds that each query of the dashboards takes, as Grafana asks for the last half hour: median, worst, and which."""
    values = {
        "job_id": JOB,
        "instance": addresses[0],
        "rank": ".*",
        "group": ".*",
        "op": ".*",
        "gpu": ".*",
        "device": ".*",
    }
    intervals = {"__rate_interval": f"{4 * interval_s}s", "__interval": f"{interval_s}s", "__range": f"{LOOK_S}s"}
    took: dict[str, list[tuple[float, str]]] = {}
    series = 0
    for name in NAMES:
        for target in targets(load(name)):
            begin = time.perf_counter()
            series += len(_ask(server, target, substituted(target.expr, {**values, **intervals}), interval_s))
            took.setdefault(name, []).append((1e3 * (time.perf_counter() - begin), f"{target.panel} {target.ref_id}"))
    every = [each for queries in took.values() for each in queries]
    slowest = sorted(every, reverse=True)[:5]
    return {
        "queries": len(every),
        "series": series,
        "median_ms": median(ms for ms, _ in every),
        "slowest": [(panel, round(ms)) for ms, panel in slowest],
        "whole_ms": {name: sum(ms for ms, _ in queries) for name, queries in took.items()},
    }


def _ask(server: Server, target: Target, expr: str, interval_s: int) -> list[Any]:
    now = time.time()
    if target.instant:
        return server.query(expr)
    window = {"query": expr, "start": f"{now - LOOK_S:.3f}", "end": f"{now:.3f}", "step": str(interval_s)}
    found: list[Any] = server.get(f"query_range?{urllib.parse.urlencode(window)}")["data"]["result"]
    return found


def load_of(server: Server, seconds: float) -> dict[str, float]:
    """What Prometheus does and takes, over some time in which nobody asks it anything."""
    before, cpu, begin = server.own(), cpu_s(server.pid), time.monotonic()
    time.sleep(seconds)
    after, cpu, passed = server.own(), cpu_s(server.pid) - cpu, time.monotonic() - begin
    appended = [
        sum(v for k, v in each.items() if k.startswith("prometheus_tsdb_head_samples_appended_total"))
        for each in (before, after)
    ]
    evaluated = [v for k, v in after.items() if k.startswith("prometheus_rule_group_last_duration_seconds")]
    return {
        "series": after["prometheus_tsdb_head_series"],
        "samples_per_s": (appended[1] - appended[0]) / passed,
        "cpu_percent": 100 * cpu / passed,
        "memory_mb": memory_mb(server.pid),
        "memory_highest_mb": memory_mb(server.pid, "VmHWM"),
        "rules_s": max(evaluated),
        "up": server.value('sum(up{job="commwatch"})'),
        "series_per_node": server.value("max(scrape_samples_scraped)"),
        "scrape_median_ms": 1e3 * server.value("quantile(0.5, scrape_duration_seconds)"),
        "scrape_worst_ms": 1e3 * server.value("max(max_over_time(scrape_duration_seconds[2m]))"),
    }


def found_after(server: Server, signs: dict[str, str]) -> dict[str, Any]:
    """Seconds from now until each of some queries first has a result, and what it then names; absent if it never has."""
    begin, found = time.monotonic(), dict[str, Any]()
    while len(found) < len(signs) and time.monotonic() - begin < PATIENCE_S:
        for sign, expr in signs.items():
            if sign not in found and (series := server.query(expr)):
                ranks = sorted({each["metric"].get("rank", "") for each in series})
                found[sign] = {"after_s": round(time.monotonic() - begin, 1), "ranks": ranks}
        time.sleep(0.5)
    return found


def alert(name: str, state: str) -> str:
    """The query for an alert."""
    return f'ALERTS{{alertname="{name}", alertstate="{state}"}}'


def measure(place: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """All of it."""
    with ExitStack() as stack:
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        fleet_py = Path(__file__).with_name("fleet.py")
        fleet = stack.enter_context(
            process(sys.executable, fleet_py, str(arguments.nodes), log=place / "fleet.log", **pipes)
        )
        assert fleet.stdin is not None
        assert fleet.stdout is not None
        addresses = json.loads(fleet.stdout.readline())
        store = stack.enter_context(victoria(place)) if arguments.victoria else None
        server = stack.enter_context(prometheus(place, addresses, arguments.interval, store))
        time.sleep(arguments.settle)
        wrong = {each["metric"]["alertname"] for each in server.query("ALERTS")}
        figures: dict[str, Any] = {
            "nodes": arguments.nodes,
            "interval_s": arguments.interval,
            "alerts_before": sorted(wrong),
        }
        figures |= {
            "prometheus": load_of(server, 4.0 * arguments.interval),
            "panels": panels(server, addresses, arguments.interval),
        }
        figures["fleet_memory_mb"] = memory_mb(fleet.pid)
        figures["prometheus"]["memory_asked_mb"] = memory_mb(server.pid, "VmHWM")
        if store is not None:
            figures["victoria"] = {
                "series": store.value("count({__name__=~'commwatch_.*'})"),
                "memory_mb": memory_mb(store.pid),
            }
            figures["victoria"]["panels"] = panels(store, addresses, arguments.interval)
        fleet.stdin.write(f"late {LATE}\n")
        fleet.stdin.flush()
        late = "StragglerAcrossNodes"
        signs = {"verdict": STRAGGLER, "pending": alert(late, "pending"), "firing": alert(late, "firing")}
        emit(figures)
        figures["straggler"] = found_after(server, signs)
        emit(figures)
        fleet.stdin.write(f"stop {8 * arguments.nodes + STOPPED_NODE}\n")
        fleet.stdin.flush()
        signs = {"verdict": 'commwatch_verdict_seconds{kind="hang"}'}
        signs |= {state: alert("CollectiveHang", state) for state in ("pending", "firing")}
        figures["hang"] = found_after(server, signs)
        figures["after_hang"] = load_of(server, 2.0 * arguments.interval)
        fleet.stdin.close()
    return figures


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--nodes", type=int, default=128)
    parser.add_argument(
        "--interval", type=int, default=15, help="seconds between scrapes, and between evaluations of the rules"
    )
    parser.add_argument(
        "--settle", type=float, default=360, help="seconds before anything is measured: rules look back five minutes"
    )
    parser.add_argument("--victoria", action="store_true", help="write into a VictoriaMetrics, too, and ask it")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that what was started is ended
    with scratch() as place:
        emit(measure(place, parser.parse_args()))


if __name__ == "__main__":
    main()
