"""Records a second that one core takes through ring, drain, aggregate and store: records over CPU seconds.

Eight ranks' rings are filled, then drained by one ``tick`` of the intake, again and again; only the ticks count. The
records' clock runs at 2,000 operations a second and rank, so that roll-ups are closed as often as in a real job. The
history is a real one, on disk. Once for a job on one node, once for one on two: most of its groups span both.
"""

from __future__ import annotations

import sys
import threading
import time
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median

sys.path.append(str(Path(__file__).parents[1]))

from bench.common import emit, scratch
from bench.synthetic import WORLD_SIZE, Rank
from commwatch_agent.history.store import Writer
from commwatch_agent.ingest.intake import Intake
from commwatch_agent.ingest.jobs import JobTable

PER_SECOND = 2000
#: Of the records' clock, between two ticks: 1,000 operations a ring.
TICK_NS = 500_000_000
TICKS, WARM_UP = 120, 8


def write_on_request(requests: Connection, rings: Path, begin_ns: int, nodes: int) -> None:
    """The trainer's side, a process of its own: fill the rings up to each time that is asked for."""
    ranks = [Rank(rings, rank, begin_ns, PER_SECOND, nodes=nodes) for rank in range(WORLD_SIZE)]
    while (until_ns := requests.recv()) is not None:
        requests.send(sum(rank.write_until(until_ns) for rank in ranks))


class Rings:
    """The rings, the intake that drains them, and the clock both go by."""

    def __init__(self, rings: Path, history: Path, nodes: int) -> None:
        self._now = time.monotonic_ns()
        self._wall_offset = time.time_ns() - self._now
        self._requests, other_end = get_context("spawn").Pipe()
        arguments = (other_end, rings, self._now, nodes)
        self._writer = get_context("spawn").Process(target=write_on_request, args=arguments, daemon=True)
        self._writer.start()
        self.store = Writer(history / "history.sqlite")
        self._intake = Intake(rings, JobTable(), self.store, threading.RLock())

    def tick(self) -> tuple[int, float]:
        """Fill the rings, then drain them; records drained and CPU seconds of that."""
        self._now += TICK_NS
        self._requests.send(self._now)
        written = self._requests.recv()
        begin = time.process_time()
        taken = self._intake.tick(self._now, self._now + self._wall_offset)
        used = time.process_time() - begin
        assert taken == written, f"{taken} records taken of {written} written"
        return taken, used

    def close(self) -> None:
        """End the writer."""
        self._requests.send(None)
        self._writer.join()
        self.store.close()


def measure(nodes: int) -> dict[str, float]:
    """Fill and drain the rings of one node."""
    with scratch(in_memory=True) as memory, scratch() as disk:
        rings = Rings(memory, disk, nodes)
        for _ in range(WARM_UP):
            rings.tick()
        ticks = [rings.tick() for _ in range(TICKS)]
        assert rings.store.trouble is None, rings.store.trouble
        rings.close()
    records = sum(taken for taken, _ in ticks)
    # Mean, not median, of the time: closing the roll-ups every 10 s is part of the work.
    rate = records / sum(used for _, used in ticks)
    return {"records_per_s": rate, "median_tick_records_per_s": median(n / s for n, s in ticks), "records": records}


def main() -> None:
    """Measure and print."""
    emit({str(nodes): measure(nodes) for nodes in (1, 2)})


if __name__ == "__main__":
    main()
