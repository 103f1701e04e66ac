"""An agent that is asked far too much: eight ranks at 2,000 operations a second each, and 64 clients that ask without pause.

``python bench/starve.py [SECONDS] [CLIENTS] [PATH...]`` (default 20, 64, and the dearest paths). Beside the crowd, which is one process of low
priority on the same machine, somebody asks for ``/healthz`` five times a second and for ``/metrics`` once. Given are the longest and the median
time of both, the statuses of ``/healthz``, how far the metrics were behind the trainers, the answers that the crowd got by status, and the
memory of the agent with its worker. Every record that was written has to be in the agent's books at the end, and none lost.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from http import HTTPStatus
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

sys.path.append(str(Path(__file__).parents[1]))

from bench.agent_load import PATIENCE_S, PER_SECOND, Agent, ended, running_agent, wait_for
from bench.chaos import written
from bench.common import cpu_s, emit, memory_mb, scratch
from bench.soak import ended_of
from bench.synthetic import WORLD_SIZE
from commwatch.wire.ring import CURSOR, DEFAULT_SLOTS
from commwatch.wire.ring_reader import RingReader

SECONDS, CLIENTS = 20.0, 64
#: The job runs for so long before, so that there is something to ask for.
BEFORE_S = 5.0
BETWEEN_S, METRICS_EVERY = 0.2, 5
_READ = re.compile(rb'commwatch_events_total\{job_id="synthetic"\} (\S+)')


class Observer:
    """Asks for health and metrics, and notes what it got, how long it waited, and how many records the metrics were behind then."""

    def __init__(self, address: str, readers: list[RingReader]) -> None:
        self._address, self._readers = address, readers
        self.behind: list[float] = []
        self.statuses: dict[str, Counter[str]] = {"/healthz": Counter(), "/metrics": Counter()}
        self.seconds: dict[str, list[float]] = {"/healthz": [], "/metrics": []}

    def ask(self, path: str) -> None:
        """Once."""
        there, begin = sum(reader.counter(CURSOR) for reader in self._readers), time.perf_counter()
        with closing(HTTPConnection(self._address, timeout=PATIENCE_S)) as connection:
            try:
                connection.request("GET", path)
                response = connection.getresponse()
                read = _READ.search(response.read())
                if read is not None:
                    self.behind.append(there - float(read[1]))
                status = str(response.status)
            except (OSError, HTTPException) as error:
                status = type(error).__name__
        self.seconds[path].append(time.perf_counter() - begin)
        self.statuses[path][status] += 1

    def watch(self, seconds: float) -> None:
        """For so long."""
        end, n = time.monotonic() + seconds, 0
        while time.monotonic() < end:
            self.ask("/healthz")
            if n % METRICS_EVERY == 0:
                self.ask("/metrics")
            n += 1
            time.sleep(BETWEEN_S)


@contextmanager
def crowd(agent: Agent, clients: int, paths: Sequence[str]) -> Iterator[Counter[str]]:
    """Clients that ask without pause; what they got is there afterwards."""
    command = [sys.executable, str(Path(__file__).with_name("crowd.py")), agent.address, str(clients), *paths]
    process = subprocess.Popen(command, stdout=subprocess.PIPE)
    answers: Counter[str] = Counter()
    try:
        yield answers
    finally:
        process.terminate()
        said, _ = process.communicate(timeout=PATIENCE_S)
        answers.update(json.loads(said))


def children(pid: int) -> list[int]:
    """Processes that a process has started."""
    return [
        int(child) for task in Path(f"/proc/{pid}/task").iterdir() for child in (task / "children").read_text().split()
    ]


def memory_of_all(pid: int) -> float:
    """Of a process and those it has started, in MB."""
    return sum(memory_mb(each) for each in (pid, *children(pid)))


class Job(NamedTuple):
    """The job that is watched."""

    #: Operations of a rank, and records that its ring holds.
    per_second: int = PER_SECOND
    slots: int = DEFAULT_SLOTS


BUSY_NODE = Job()


def starve(
    run: Path, state: Path, seconds: float, clients: int, paths: Sequence[str] = (), job: Job = BUSY_NODE
) -> dict[str, Any]:
    """All of it, in one run of agent and job."""
    rings = run / "rings"
    generator = (str(Path(__file__).with_name("synthetic.py")), str(rings), *map(str, job))
    with running_agent(run, state) as agent:
        with ended(*generator):
            wait_for(lambda: len(list(rings.glob("*.ring"))) == WORLD_SIZE, "the rings")
            readers = [RingReader(path) for path in rings.glob("*.ring")]
            time.sleep(BEFORE_S)
            observer, cpu = Observer(agent.address, readers), cpu_s(agent.pid)
            with crowd(agent, clients, paths) as answers:
                observer.watch(seconds)
                cpu, memory = cpu_s(agent.pid) - cpu, memory_of_all(agent.pid)
        wait_for(lambda: len(ended_of(state)) == WORLD_SIZE, "the agent to take what is left")
        found = ended_of(state)
        counts = {str(reader.path.absolute()): written(reader) for reader in readers}
        highest = memory_mb(agent.pid, "VmHWM")
    figures: dict[str, Any] = {"seconds": seconds, "clients": clients, "records": sum(counts.values())}
    figures["lost"] = sum(found[uid][1] for uid in counts)
    figures["not_read"] = sum(count - found[uid][0] for uid, count in counts.items())
    for path, name in (("/healthz", "health"), ("/metrics", "metrics")):
        figures[f"{name}_median_s"] = median(observer.seconds[path])
        figures[f"{name}_worst_s"] = max(observer.seconds[path])
        figures[f"{name}_statuses"] = observer.statuses[path]
    figures["behind_worst_s"] = max(observer.behind) / WORLD_SIZE / job.per_second
    figures |= {"agent_cpu_percent": 100 * cpu / seconds, "memory_mb": memory, "agent_highest_mb": highest}
    return {**figures, "answers": answers}


def main() -> None:
    """Measure and print."""
    seconds = float(sys.argv[1]) if len(sys.argv) > 1 else SECONDS
    clients = int(sys.argv[2]) if len(sys.argv) > 2 else CLIENTS
    with scratch(in_memory=True) as memory, scratch() as disk:
        figures = starve(memory / "run", disk, seconds, clients, sys.argv[3:])
    emit(figures)
    assert not figures["lost"], f"{figures['lost']} records lost"
    assert set(figures["health_statuses"]) == {str(int(HTTPStatus.OK))}, figures["health_statuses"]


if __name__ == "__main__":
    main()
