"""Exposed time on CPU: how long the training thread was idle while communication was in flight.

Over each period with operations in flight: wall time minus CPU time of the training thread. An upper bound:
a thread that sleeps, reads a file or waits for a core beside an operation counts as exposed too.
"""

from __future__ import annotations

import threading
import time

from commwatch.wire.handlers import raised_by_handler


class Exposure:
    """Sums the idle time over the periods with operations in flight.

    Begins and ends come from any thread and take no lock: a signal handler that communicates, or a backend's own
    thread, must never wait for us. A race of two threads can lose one period at most.
    """

    def __init__(self) -> None:
        self._in_flight: set[object] = set()
        #: Wall and CPU time in ns at the begin of the running period; CPU -1 = unknown.
        self._wall_ns, self._cpu_ns = 0, -1
        self._exposed_ns = 0
        self._thread = self._clock = -1
        #: False once an operation ran on a GPU, where CPU time shows nothing.
        self.known = True
        self.watch(threading.main_thread().ident or 0)

    def watch(self, thread: int) -> None:
        """Treat ``thread`` (an ident) as the training thread from now on."""
        if thread != self._thread:
            self._thread, self._clock = thread, time.pthread_getcpuclockid(thread)

    def begin(self, what: object, now_ns: int) -> None:
        """Note that ``what`` is in flight, or that a thread waits for it."""
        if not self._in_flight:
            self._wall_ns, self._cpu_ns = now_ns, self._cpu_time()
        self._in_flight.add(what)

    def end(self, what: object, now_ns: int) -> None:
        """Note that ``what`` has ended."""
        self._in_flight.discard(what)
        if not self._in_flight:
            self._count(now_ns)
            self._cpu_ns = -1

    def in_call(self, began_ns: int, ended_ns: int) -> None:
        """Count an operation that blocked its caller, unless a period in flight counts it already."""
        if not self._in_flight:
            self._exposed_ns += ended_ns - began_ns

    def take(self, now_ns: int) -> int | None:
        """Return the exposed ns since the last call, including a running period; ``None`` if they are not known."""
        if self._in_flight:
            self._count(now_ns)
        exposed, self._exposed_ns = self._exposed_ns, 0
        return exposed if self.known else None

    def _count(self, now_ns: int) -> None:
        cpu_ns = self._cpu_time()
        if cpu_ns >= 0 <= self._cpu_ns:
            idle_ns = (now_ns - self._wall_ns) - (cpu_ns - self._cpu_ns)
            if idle_ns > 0:
                self._exposed_ns += idle_ns
        self._wall_ns, self._cpu_ns = now_ns, cpu_ns

    def _cpu_time(self) -> int:
        try:
            return time.clock_gettime_ns(self._clock)
        except OSError as error:  # the thread has ended
            if raised_by_handler(error):
                raise
            return -1
