"""Alerts to receivers: a thread for each, so that none waits for another, and nobody for any of them."""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from commwatch.alerts.model import Alert
from commwatch.alerts.outbox import Batch, Outbox
from commwatch.alerts.receivers.sending import CannotSend, Receiver

log = logging.getLogger("commwatch")


@dataclass(frozen=True)
class Retry:
    """How long to wait before a receiver is tried again: twice as long each time, less a random part."""

    first_s: float = 1.0
    most_s: float = 300.0
    #: From 0 to 1: receivers that many agents lost at one moment are not found again by all at one moment.
    jitter: Callable[[], float] = random.random

    def wait_s(self, failures: int) -> float:
        """After so many failures in a row, at least one."""
        return min(self.most_s, self.first_s * 2.0 ** min(failures - 1, 60)) * (1 - self.jitter() / 2)


@dataclass(frozen=True)
class Delivered:
    """How it goes with one receiver. Alerts are counted, each time they are told."""

    receiver: str
    sent: int
    #: In messages that did not arrive; most of them are tried again.
    failed: int
    #: For want of room.
    dropped: int
    #: Alerts whose latest state the receiver has not been told.
    waiting: int
    #: What went wrong with the last message; ``None``: nothing.
    trouble: str | None


class Delivery:
    """Hands alerts to receivers.

    Args:
        wall: Unix time, for what is sent.
        clock: the monotonic clock, for when it is sent.
    """

    def __init__(
        self,
        receivers: Sequence[Receiver],
        *,
        wall: Callable[[], float] = time.time,
        clock: Callable[[], float] = time.monotonic,
        retry: Retry = Retry(),
    ) -> None:
        self._clock = clock
        self._lanes = [_Lane(receiver, wall, clock, retry) for receiver in receivers]

    def send(self, alerts: Sequence[Alert]) -> None:
        """Take in everything that fires, and what has just been resolved: after each evaluation. Waits for nobody."""
        for lane in self._lanes:
            lane.take(alerts)

    def delivered(self) -> list[Delivered]:
        """How it goes with each receiver."""
        return [lane.delivered() for lane in self._lanes]

    def close(self, timeout_s: float) -> None:
        """Try, once more and no longer than that, to tell what has not been told, and end."""
        end = self._clock() + timeout_s
        for lane in self._lanes:
            lane.close()
        for lane in self._lanes:
            lane.join(max(0.0, end - self._clock()))


class _Lane:
    """One receiver, its outbox and its thread."""

    def __init__(self, receiver: Receiver, wall: Callable[[], float], clock: Callable[[], float], retry: Retry) -> None:
        self._receiver, self._wall, self._clock, self._retry = receiver, wall, clock, retry
        self._outbox = Outbox(receiver.policy)
        self._changed = threading.Condition()
        self._closing = False
        self._failures, self._not_before_s = 0, float("-inf")
        self._trouble: str | None = None
        self._thread = threading.Thread(target=self._work, name=f"to {receiver.name}", daemon=True)
        self._thread.start()

    def take(self, alerts: Sequence[Alert]) -> None:
        with self._changed:
            self._outbox.take(alerts, self._clock())
            self._changed.notify()

    def close(self) -> None:
        with self._changed:
            self._closing, self._not_before_s = True, float("-inf")
            self._changed.notify()

    def join(self, timeout_s: float) -> None:
        self._thread.join(timeout_s)

    def delivered(self) -> Delivered:
        with self._changed:
            box = self._outbox
            counts = (box.sent_count, box.failed_count, box.dropped_count)
            return Delivered(self._receiver.name, *counts, box.waiting, self._trouble)

    def _work(self) -> None:
        while (batch := self._next()) is not None:
            failure = self._send(batch)
            with self._changed:
                self._note(batch, failure)
                if failure is not None and failure.again and self._closing:
                    return

    def _next(self) -> Batch | None:
        """The next message, as soon as there is one; ``None``: no more."""
        with self._changed:
            while True:
                now = self._clock()
                held_s = self._not_before_s - now
                batch = self._outbox.next(now) if held_s <= 0 else None
                if batch is not None or self._closing:
                    return batch
                self._changed.wait(held_s if held_s > 0 else self._outbox.due_in_s(now))

    def _send(self, batch: Batch) -> CannotSend | None:
        try:
            self._receiver.send(batch, self._wall())
        except CannotSend as failure:
            return failure
        except ValueError as error:
            # Of a message that cannot be written down; what the error says may be part of it.
            return CannotSend(f"cannot be written ({type(error).__name__})", again=False)
        return None

    def _note(self, batch: Batch, failure: CannotSend | None) -> None:
        now = self._clock()
        if failure is None:
            self._outbox.sent(batch, now)
            self._failures = 0
            if self._trouble is not None:
                log.info("receiver %s: works again", self._receiver.name)
            self._trouble = None
            return
        self._outbox.failed(batch, now, failure.again)
        if failure.again:
            self._failures += 1
            if not self._closing:
                self._not_before_s = now + max(self._retry.wait_s(self._failures), failure.after_s or 0.0)
        if str(failure) != self._trouble:
            log.warning("receiver %s: %s", self._receiver.name, failure)
        self._trouble = str(failure)
