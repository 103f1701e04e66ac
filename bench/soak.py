"""An agent for a long time under full load: eight ranks at 2,000 operations a second each, or as many jobs of eight ranks as given.

``python bench/soak.py [MINUTES] [--jobs N] [--per-second N]`` (default 30 minutes, one job, 2,000). Memory is sampled, and what it does after
the first fifth of the time is given as a line through it: growth an hour with its standard error, the highest and the lowest, and the
medians of 24 parts of that time, in which a step shows that a line would hide. At the end every record that was written has to be in the
agent's books, and none lost; time of a scrape and size of the history are given for the beginning (after the first fifth) and the end. Last
of all a summary of all of it is asked for.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from math import sqrt
from pathlib import Path
from statistics import linear_regression, median

sys.path.append(str(Path(__file__).parents[1]))

from bench.agent_load import PER_SECOND, Agent, ended, running_agent, scrapes, wait_for
from bench.chaos import written
from bench.common import cpu_s, emit, memory_mb, scratch
from bench.synthetic import JOB, WORLD_SIZE
from commwatch.wire.ring import DEFAULT_SLOTS
from commwatch.wire.ring_reader import RingReader
from commwatch_agent.history.history import History

SAMPLE_S = 5.0
#: Into which samples are put together: those that follow on one another are too much alike to tell the error of a line.
PARTS = 24


def state_mb(state: Path) -> float:
    """Size of the history with its log, in MB (10^6 bytes)."""
    return sum(file.stat().st_size for file in state.glob("history-*.sqlite*")) / 1e6


def sampled(agent: Agent, seconds: float) -> Iterator[tuple[float, float]]:
    """(Hours since the beginning, memory in MB) every few seconds, with a scrape every third time, as Prometheus would."""
    begin, n = time.monotonic(), 0
    while (passed := time.monotonic() - begin) < seconds:
        if n % 3 == 0:
            agent.get("/metrics")
        yield passed / 3600, memory_mb(agent.pid)
        n += 1
        time.sleep(min(SAMPLE_S, max(0.0, seconds - passed)))


def parts(samples: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Medians of samples over ``PARTS`` equal parts of the time, those without any left out."""
    begin, end = samples[0][0], samples[-1][0]
    found: dict[int, list[tuple[float, float]]] = {}
    for hours, mb in samples:
        found.setdefault(int(PARTS * (hours - begin) / (end - begin) * (1 - 1e-9)), []).append((hours, mb))
    return [(median(hours for hours, _ in part), median(mb for _, mb in part)) for part in found.values()]


def growth(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Slope of the line through some points by least squares, and its standard error."""
    x, y = zip(*points, strict=True)
    slope, level = linear_regression(x, y)
    middle = sum(x) / len(x)
    left = sum((b - level - slope * a) ** 2 for a, b in points)
    return slope, sqrt(left / (len(points) - 2) / sum((a - middle) ** 2 for a in x))


def asked(agent: Agent) -> dict[str, float]:
    """How long a summary of everything takes, and the memory afterwards."""
    begin = time.monotonic()
    agent.get("/api/v1/summary?by=group,op")
    return {"summary_s": time.monotonic() - begin, "summary_memory_mb": memory_mb(agent.pid, "VmHWM")}


def settled(agent: Agent, state: Path) -> dict[str, float]:
    """How the agent stands."""
    descriptors = len(list(Path(f"/proc/{agent.pid}/fd").iterdir()))
    threads = len(list(Path(f"/proc/{agent.pid}/task").iterdir()))
    return {
        "memory_mb": memory_mb(agent.pid), "scrape_ms": scrapes(agent)["scrape_ms"], "history_mb": state_mb(state),
        "descriptors": descriptors, "threads": threads,
    }  # fmt: skip


def ended_of(state: Path) -> dict[str, tuple[int, int]]:
    """Of each ring that the history knows to have ended: number of the record to go on from, and records lost."""
    (path,) = state.glob("history-*.sqlite")
    with History(path) as history:
        return {row.uid: (row.next_n, row.lost) for row in history.rings() if row.state != "running"}


def soak(run: Path, state: Path, seconds: float, jobs: int, per_second: int) -> dict[str, float | list[float]]:
    """All of it, in one run of agent and jobs."""
    rings, ranks = run / "rings", jobs * WORLD_SIZE
    generator = (str(Path(__file__).with_name("synthetic.py")), str(rings), str(per_second), str(DEFAULT_SLOTS))
    with running_agent(run, state) as agent:
        with ExitStack() as generators:
            for number in range(jobs):
                generators.enter_context(ended(*generator, f"{JOB}{number}"))
            wait_for(lambda: len(list(rings.glob("*.ring"))) == ranks, "the rings")
            readers = [RingReader(path) for path in rings.glob("*.ring")]
            list(sampled(agent, seconds / 5))
            first, cpu, began_s = settled(agent, state), cpu_s(agent.pid), time.monotonic()
            samples = list(sampled(agent, seconds * 4 / 5))
            cpu_percent = 100 * (cpu_s(agent.pid) - cpu) / (time.monotonic() - began_s)
            last = settled(agent, state)
            highest_mb = memory_mb(agent.pid, "VmHWM")
            summary = asked(agent)
        wait_for(lambda: len(ended_of(state)) == ranks, "the agent to take what is left")
        found = ended_of(state)
        counts = {str(reader.path.absolute()): written(reader) for reader in readers}
    for uid, count in counts.items():
        next_n, lost = found[uid]
        assert (next_n, lost) == (count, 0), f"{uid}: {count} written, read up to {next_n}, {lost} lost"
    medians = parts(samples)
    slope, error = growth(medians)
    memory = [mb for _, mb in samples]
    return {
        "minutes": seconds / 60, "ranks": ranks, "operations_per_s": per_second,
        "records": sum(counts.values()), "lost": 0, "cpu_percent": cpu_percent, "memory_growth_mb_per_h": slope,
        "memory_growth_error_mb_per_h": error, "memory_lowest_mb": min(memory), "memory_highest_mb": max(memory), "memory_peak_mb": highest_mb,
        **{f"first_{name}": value for name, value in first.items()}, **{f"last_{name}": value for name, value in last.items()},
        **summary, "memory_mb": [round(mb, 1) for _, mb in medians],
    }  # fmt: skip


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("minutes", type=float, nargs="?", default=30.0)
    parser.add_argument("--jobs", type=int, default=1, help=f"jobs of {WORLD_SIZE} ranks")
    parser.add_argument("--per-second", type=int, default=PER_SECOND, help="operations of each rank")
    chosen = parser.parse_args()
    with scratch(in_memory=True) as memory, scratch() as disk:
        emit(soak(memory / "run", disk, chosen.minutes * 60, chosen.jobs, chosen.per_second))


if __name__ == "__main__":
    main()
