"""The thread beside the training thread: signal handlers at any moment neither hang the training thread nor stop the thread."""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from itertools import count, takewhile
from types import FrameType
from typing import Any

import pytest

from commwatch.probe.watcher import Watcher
from tests.helpers import PATIENCE_S, wait_for


class Raised(Exception):
    """What a signal handler raises."""


class Beating:
    """A watcher that counts its rounds."""

    def __init__(self, pause_s: float = 0.005) -> None:
        self.beats, self._pause_s = 0, pause_s
        self.watcher = Watcher(self._run)
        self.idents: set[int] = set()

    def _run(self) -> None:
        while self.watcher.goes_on():
            self.idents.add(threading.get_ident())
            self.beats += 1
            self.watcher.sleep(self._pause_s)

    def goes_on(self) -> None:
        """Wait for more rounds."""
        before = self.beats
        wait_for(lambda: self.beats > before + 3, "the thread's next rounds")


@pytest.fixture
def beating() -> Iterator[Beating]:
    """One that is ended at last."""
    made = Beating()
    yield made
    made.watcher.end(PATIENCE_S)


def _raises_at(number: int, call: Callable[[], object]) -> bool:
    """Call with an exception at one of the events that a trace function sees; return whether there are so many."""
    came = 0

    def trace(_frame: FrameType, _event: str, _value: object) -> Any:
        nonlocal came
        came += 1
        if came == number:
            raise Raised
        return trace

    sys.settrace(trace)
    try:
        call()
    except Raised:
        return True
    finally:
        sys.settrace(None)
    return False


@pytest.mark.parametrize("what", ["start", "wake"])
def test_handler_leaves_no_lock(beating: Beating, what: str) -> None:
    """A handler that raises anywhere in a start or a wake-up, the standard library's code too, stops neither thread for good."""
    call = {"start": beating.watcher.start, "wake": beating.watcher.wake}[what]
    raised: list[int] = []
    under_fire = threading.Thread(
        target=lambda: raised.extend(takewhile(lambda number: _raises_at(number, call), count(1))), daemon=True
    )
    under_fire.start()
    under_fire.join(PATIENCE_S)
    assert not under_fire.is_alive()
    assert len(raised) >= 3
    beating.watcher.start()
    beating.goes_on()


def test_signals_in_the_thread(beating: Beating) -> None:
    """Signals that interrupt the thread's sleep do not make it ignore its timeout, however busy the training thread is."""
    beating.watcher.start()
    beating.goes_on()
    (ident,) = beating.idents
    before = signal.signal(signal.SIGUSR1, lambda *_: None)
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
    try:
        for _ in range(100):
            signal.pthread_kill(ident, signal.SIGUSR1)
            until = time.monotonic() + 0.02
            while time.monotonic() < until:  # holds the GIL
                pass
        beating.goes_on()
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGUSR1])
        signal.signal(signal.SIGUSR1, before)


def test_started_twice(beating: Beating) -> None:
    """A handler that communicates in the middle of a start starts a second thread: one of the two goes on."""
    for _ in range(10):
        beating.watcher._latest = 0  # as a handler in the middle of the first start finds it
        beating.watcher.start()
    beating.goes_on()
    beating.idents.clear()
    beating.goes_on()
    assert len(beating.idents) == 1


def test_end(beating: Beating) -> None:
    """Once ``end`` has returned, the thread does nothing any more; one that has never run is ended at once."""
    Watcher(lambda: None).end(PATIENCE_S)
    beating.watcher.start()
    beating.goes_on()
    beating.watcher.end(PATIENCE_S)
    before = beating.beats
    time.sleep(0.05)
    assert beating.beats == before
    beating.watcher.start()
    time.sleep(0.05)
    assert beating.beats == before


def test_wakes() -> None:
    """A wake-up ends a long sleep, or the next one, and several at once are one."""
    slow = Beating(PATIENCE_S)
    slow.watcher.start()
    wait_for(lambda: slow.beats == 1, "the first round")
    slow.watcher.wake()
    slow.watcher.wake()
    wait_for(lambda: slow.beats >= 2, "the next round")
    slow.watcher.wake()
    wait_for(lambda: slow.beats >= 3, "the round after it")
    slow.watcher.end(PATIENCE_S)
