"""The functions for training scripts. They never raise, and hold the training up only for the time that each states."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any, TypeVar

from commwatch.api.rest import OPENED, Client
from commwatch.api.rows import Rows
from commwatch.wire import standard_error
from commwatch.wire.errors import CommwatchError
from commwatch.wire.handlers import raised_by_handler

#: Most seconds that a query waits for data.
_PATIENCE_S = 1.0
#: Seconds between two queries of the thread behind ``metrics``.
_EVERY_S = 5.0
#: Least and most seconds without a call of ``metrics`` until its thread ends. Between, three times the longest time between two calls.
_UNUSED_S, _MOST_UNUSED_S = 60.0, 3600.0
_T = TypeVar("_T")


def summary(since: str = "60s") -> Rows:
    """Return sums over this job's operations by group and op, by default of the last minute; empty if no agent answers within a second.

    ``incidents`` of it has the number of the job's incidents by kind, so far; they take at most another second.
    """
    found = _asked(lambda client, job: client.summary(job, since=since), Rows())
    if found:
        found.incidents = dict(Counter(str(each["kind"]) for each in incidents()))
    return found


def incidents() -> Rows:
    """Return what is wrong in this job and what was, open incidents first; empty if there is nothing, or if no agent answers within a second."""
    return _asked(lambda client, job: client.incidents(job, state=OPENED), Rows())


def verdicts() -> Rows:
    """Return the current problems of this job; empty if there are none, or if no agent answers within a second."""
    return _asked(lambda client, job: client.verdicts(job), Rows())


def last_step() -> dict[str, Any] | None:
    """Return the latest step of this rank in the history of the agent; ``None``: there is none, or no agent answers within a second."""
    found = _asked(lambda client, job: client.steps(job, rank=_place()[1], limit=1), Rows())
    return found[0] if found else None


def metrics(wait_s: float = 0.0) -> dict[str, float]:
    """Return flat figures of this job for experiment trackers (``commwatch.api.figures``); empty while they are not known.

    The first call starts a thread that renews the figures every 5 s, so that a call returns at once. The thread ends when this function has
    not been called for a minute, or for three times the longest time between two calls, an hour at most.

    Args:
        wait_s: how long to wait for the first figures.
    """
    follower = _follower()
    return {} if follower is None else follower.latest(wait_s)


class _Follower:
    """Renews the figures of this job in a thread."""

    def __init__(self, unused_s: float) -> None:
        self.pid = os.getpid()
        self._unused_s = unused_s
        self._called, self._figures = time.monotonic(), dict[str, float]()
        self._fresh = threading.Event()
        self._thread = threading.Thread(target=self._run, name="commwatch-metrics", daemon=True)
        self._thread.start()

    def is_running(self) -> bool:
        """Return whether the thread runs; it does not in a forked child."""
        return self.pid == os.getpid() and self._thread.is_alive()

    def called(self) -> float:
        """Note a call of ``metrics``; return for how many seconds without another one the thread now runs."""
        now_s = time.monotonic()
        self._unused_s = max(self._unused_s, min(3 * (now_s - self._called), _MOST_UNUSED_S))
        self._called = now_s
        return self._unused_s

    def latest(self, wait_s: float) -> dict[str, float]:
        """Return the latest figures; wait for the first ones."""
        self._fresh.wait(wait_s)
        return dict(self._figures)

    def _run(self) -> None:
        while time.monotonic() - self._called < self._unused_s:
            self._figures = _asked(lambda client, job: client.metrics(job), {})
            if self._figures:
                self._fresh.set()
            time.sleep(_EVERY_S if self._figures else _PATIENCE_S)


_latest: _Follower | None = None
#: A fault of ours was printed.
_said = False
_lock = threading.Lock()


def _follower() -> _Follower | None:
    """Return the thread behind ``metrics``; ``None``: this process may have no further thread."""
    global _latest
    with _lock:
        unused_s = _UNUSED_S if _latest is None else _latest.called()
        if _latest is None or not _latest.is_running():
            try:
                _latest = _Follower(unused_s)
            except (RuntimeError, MemoryError) as error:  # a limit of threads, or of memory
                if raised_by_handler(error):
                    raise
                _say(error)
                return None
        return _latest


def _place() -> tuple[str, int] | tuple[None, None]:
    """Return job and rank of this process; ``None`` while nothing is recorded."""
    probe = sys.modules.get("commwatch.probe.torch_collectives")
    return (None if probe is None else probe.place()) or (None, None)


def _asked(question: Callable[[Client, str | None], _T], otherwise: _T) -> _T:
    """Return the answer to a question about this job, or about the latest if this process is in none; ``otherwise`` without one."""
    try:
        return question(Client(timeout_s=_PATIENCE_S), _place()[0])
    except CommwatchError:
        return otherwise
    except Exception as error:  # such as an agent of another version: nothing may reach the training
        if raised_by_handler(error):
            raise
        _say(error)
        return otherwise


def _say(error: Exception) -> None:
    """Print the first fault of ours."""
    global _said
    if not _said:
        _said = True
        standard_error.say(f"commwatch: no figures: {type(error).__name__}: {error}")
