"""The agent under load: eight ranks at 2,000 operations a second each, 13 (group, op) pairs a rank, as on a full node.

One process writes the rings at that pace, a real agent watches them. Measured over a steady period with one scrape in
it: CPU of the agent, in percent of one core. Then, still under load: time of a scrape, number of series, freshness
(from a record written to its count being visible; the looking itself is in the figure), and memory. Before that, another
agent without a job, and then with a job of 200 operations a second: CPU without scrapes, memory, and the CPU time of a scrape.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from functools import partial
from http import HTTPStatus
from http.client import HTTPConnection
from pathlib import Path
from statistics import median
from typing import Any

sys.path.append(str(Path(__file__).parents[1]))

from bench.common import cpu_s, emit, memory_mb, scratch
from bench.synthetic import WORLD_SIZE, Rank

PER_SECOND, USUAL_PER_SECOND = 2000, 200
SETTLE_S, STEADY_S = 5.0, 20.0
SCRAPES, RECORDS = 20, 15
#: Longer than a page is reused: each scrape is rendered.
_REUSED_S = 0.4
#: As Prometheus asks.
ACCEPT = "application/openmetrics-text;version=1.0.0;q=0.6,text/plain;version=0.0.4;q=0.5"
PATIENCE_S = 30.0
#: A second job, whose records are written one at a time to see when they become visible.
WITNESS = "witness"


class Agent:
    """A running agent and how to ask it."""

    def __init__(self, process: subprocess.Popen[bytes], url: str) -> None:
        self.pid, self._process, self.address = process.pid, process, url.removeprefix("http://")

    def get(self, path: str) -> str:
        """The body of a path."""
        assert self._process.poll() is None, "the agent has ended"
        with closing(HTTPConnection(self.address, timeout=PATIENCE_S)) as connection:
            connection.request("GET", path, headers={"Accept": ACCEPT})
            response = connection.getresponse()
            body = response.read().decode()
        assert response.status == HTTPStatus.OK, f"{path}: {response.status} {body}"
        return body

    def kill(self) -> None:
        """SIGKILL: no chance to tidy up."""
        self._process.kill()
        self._process.wait()

    def samples(self) -> dict[str, float]:
        """A scrape, as ``name{labels}`` to value."""
        lines = [line for line in self.get("/metrics").splitlines() if not line.startswith("#")]
        return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines)}


@contextmanager
def ended(*command: str) -> Iterator[subprocess.Popen[bytes]]:
    """A process that is ended at the end."""
    process = subprocess.Popen([sys.executable, *command])
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(PATIENCE_S)
        finally:
            process.kill()


@contextmanager
def running_agent(run_dir: Path, state: Path) -> Iterator[Agent]:
    """An agent with default settings on a free port, its history on disk."""
    command = ("-m", "commwatch", "agent", "--dir", str(run_dir), "--state", str(state), "--port", "0")
    with ended(*command) as process:
        about = wait_for(lambda: _announced(run_dir, process.pid), "the agent to announce itself")
        yield Agent(process, about["url"])


def _announced(run_dir: Path, pid: int) -> dict[str, Any] | None:
    try:
        about = json.loads((run_dir / "agent.json").read_text())
    except (OSError, ValueError):
        return None
    return dict(about) if about["pid"] == pid else None


def wait_for(condition: Callable[[], Any], what: str) -> Any:
    """Look until ``condition`` is true, and return what it returned."""
    end = time.monotonic() + PATIENCE_S
    while not (result := condition()):
        assert time.monotonic() < end, f"waited {PATIENCE_S:.0f} s for {what}"
        time.sleep(0.005)
    return result


def taken(samples: dict[str, float]) -> float:
    """Records the agent has read of the synthetic job; none may be lost."""
    lost = samples['commwatch_events_dropped_total{job_id="synthetic"}']
    assert not lost, f"{lost:.0f} records lost"
    return samples['commwatch_events_total{job_id="synthetic"}']


def steady_load(agent: Agent) -> dict[str, float]:
    """CPU over the steady period, and the records a second it was really given."""
    time.sleep(SETTLE_S)
    records, begin, cpu = taken(agent.samples()), time.monotonic(), cpu_s(agent.pid)
    time.sleep(STEADY_S / 2)
    agent.get("/metrics")
    time.sleep(STEADY_S / 2)
    seconds, cpu = time.monotonic() - begin, cpu_s(agent.pid) - cpu
    return {"cpu_percent": 100 * cpu / seconds, "records_per_s": (taken(agent.samples()) - records) / seconds}


def scrapes(agent: Agent) -> dict[str, float]:
    """Median time of a scrape, its size and its series."""
    seconds = []
    for _ in range(SCRAPES):
        begin = time.perf_counter()
        body = agent.get("/metrics")
        seconds.append(time.perf_counter() - begin)
        time.sleep(_REUSED_S)
    series = sum(not line.startswith("#") for line in body.splitlines())
    return {"scrape_ms": 1e3 * median(seconds), "series": series, "scrape_bytes": len(body)}


def in_metrics(agent: Agent) -> float:
    """Operations of the witness as ``/metrics`` has them."""
    samples = (item for item in agent.samples().items() if item[0].startswith("commwatch_collectives_total{"))
    return sum(value for name, value in samples if f'job_id="{WITNESS}"' in name)


def in_api(agent: Agent) -> float:
    """Operations of the witness as the API has them."""
    if f'"{WITNESS}"' not in agent.get("/api/v1/jobs"):
        return 0
    rows = json.loads(agent.get(f"/api/v1/summary?job={WITNESS}"))["rows"]
    return float(sum(row["count"] for row in rows))


def freshness_s(witness: Rank, visible: Callable[[], float]) -> list[float]:
    """Seconds from each of some records being written to being visible."""
    seconds = []
    for n in range(RECORDS):
        time.sleep(0.1 + 0.037 * (n % 7))
        begin = time.monotonic()
        witness.write_next()
        wait_for(lambda: visible() >= witness.written, "a record to become visible")
        seconds.append(time.monotonic() - begin)
    return seconds


@contextmanager
def writer(run_dir: Path, per_second: int) -> Iterator[None]:
    """The process that writes the rings of the synthetic job, whose ranks do so many operations a second each."""
    with ended(str(Path(__file__).with_name("synthetic.py")), str(run_dir / "rings"), str(per_second)):
        yield


@contextmanager
def loaded_agent(run_dir: Path, state: Path, per_second: int) -> Iterator[Agent]:
    """An agent and the synthetic job, whose ranks do so many operations a second each."""
    with running_agent(run_dir, state) as agent, writer(run_dir, per_second):
        yield agent


def witness_in(run_dir: Path) -> Rank:
    """The one rank of the second job."""
    return Rank(run_dir / "rings", 0, time.monotonic_ns(), 1e6, job=WITNESS)


def cost(agent: Agent) -> tuple[float, float]:
    """CPU of an agent that is not asked, in percent of a core, and memory in MB."""
    time.sleep(SETTLE_S)
    begin, cpu = time.monotonic(), cpu_s(agent.pid)
    time.sleep(STEADY_S)
    return 100 * (cpu_s(agent.pid) - cpu) / (time.monotonic() - begin), memory_mb(agent.pid)


def scrape_cpu_ms(agent: Agent, percent: float) -> float:
    """CPU time of a scrape: what it adds to ``percent`` of a core, which the agent uses without."""
    begin, cpu = time.monotonic(), cpu_s(agent.pid)
    scrapes(agent)
    added = cpu_s(agent.pid) - cpu - percent / 100 * (time.monotonic() - begin)
    return 1e3 * added / SCRAPES


def lighter(directory: Path, state: Path) -> dict[str, float]:
    """What an agent costs without a job, and beside one that does a tenth of the operations."""
    with running_agent(directory, state) as agent:
        idle, idle_mb = cost(agent)
        with writer(directory, USUAL_PER_SECOND):
            usual, usual_mb = cost(agent)
            scrape = scrape_cpu_ms(agent, usual)
    costs = {"idle_percent": idle, "idle_mb": idle_mb, "usual_percent": usual, "usual_mb": usual_mb}
    return {**costs, "usual_per_s": USUAL_PER_SECOND, "scrape_cpu_ms": scrape}


def measure(directory: Path, state: Path) -> dict[str, float]:
    """All of it, in one run of agent and job."""
    with loaded_agent(directory, state, PER_SECOND) as agent:
        figures = {**steady_load(agent), **scrapes(agent)}
        witness = witness_in(directory)
        for name, look in (("metrics", in_metrics), ("api", in_api)):
            fresh = freshness_s(witness, partial(look, agent))
            figures |= {f"{name}_fresh_s": median(fresh), f"{name}_fresh_worst_s": max(fresh)}
        memory = {"memory_mb": memory_mb(agent.pid), "memory_highest_mb": memory_mb(agent.pid, "VmHWM")}
    return {**figures, **memory, "ranks": WORLD_SIZE, "operations_per_s": PER_SECOND, "steady_s": STEADY_S}


def main() -> None:
    """Measure and print."""
    with scratch(in_memory=True) as memory, scratch() as disk:
        figures = {**lighter(memory / "light", disk / "light"), **measure(memory / "run", disk / "run")}
    emit(figures)


if __name__ == "__main__":
    main()
