"""Samples of the trainers' processes from the kernel, read without the lock of the totals."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

from commwatch.wire.modes import FULL
from commwatch_agent.ingest.jobs import JobTable
from commwatch_agent.ingest.rank_totals import RankTotals
from commwatch_agent.ingest.why_late import Sample, waited_for_core
from commwatch_collectors.node import cores as node_cores
from commwatch_collectors.node import process
from commwatch_collectors.node.cores import Cores
from commwatch_collectors.node.gpu import GpuPlace

#: A rank with shorter pauses does not stand still.
_STILL_NS = 5 * 10**9
#: Its cores and threads are read where its main thread waits for a core for this part of the time, once in so many samples.
_WAITS, _EVERY = 0.1, 10


class Processes:
    """Samples the process of each running rank, and stores the samples in the rank's totals; in a standstill those of the time before it stay.

    Args:
        lock: guards the totals.
        held_back: returns why a GPU throttles its clock now; empty: it does not, or not known.
        state, usage, cores: return those of a process.
        now_ns: returns the monotonic time.
    """

    def __init__(
        self,
        aggregate: JobTable,
        lock: threading.RLock,
        *,
        held_back: Callable[[GpuPlace | None], Sequence[str]] = lambda place: (),
        state: Callable[[int], str | None] = process.state,
        usage: Callable[[int], process.Usage | None] = process.usage,
        cores: Callable[[int], Cores] = node_cores.cores,
        now_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._aggregate, self._lock, self._held_back = aggregate, lock, held_back
        self._state, self._usage, self._cores, self._now_ns = state, usage, cores, now_ns
        self._ticks = 0

    def tick(self) -> None:
        """Take one sample of each process."""
        with self._lock:
            alive = [
                (totals, totals.pid, totals.gpu) for totals in self._aggregate.rank_totals() if totals.pid is not None
            ]
            self._ticks += 1
            looked_at = alive if self._ticks % _EVERY == 0 else ()
            lack = [(totals, pid) for totals, pid, _ in looked_at if (waited_for_core(totals.samples) or 0.0) >= _WAITS]
        read = [(totals, self._cores(pid)) for totals, pid in lack]
        looks = [
            (totals, (pid, self._state(pid)), Sample(self._now_ns(), self._usage(pid), tuple(self._held_back(place))))
            for totals, pid, place in alive
        ]
        with self._lock:
            for totals, state, sample in looks:
                totals.process = state
                if not _stands_still(totals, sample.now_ns):
                    totals.add_sample(sample)
            for totals, found in read:
                totals.cores = found


def _stands_still(totals: RankTotals, now_ns: int) -> bool:
    """Return whether nothing of a rank has ended for longer than ever before, so that its process shows nothing of its steps."""
    if totals.recorded_ns is None or totals.mode != FULL:
        return False
    return now_ns - totals.recorded_ns > max(_STILL_NS, totals.longest_pause_ns)
