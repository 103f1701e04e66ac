"""Alerts to receivers: a thread for each, so that none waits for another, and nobody for any of them."""

from __future__ import annotations

import json
import logging
import random
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from commwatch.alerts.book import from_json
from commwatch.alerts.kept import KeptFile
from commwatch.alerts.model import RESOLVED, Alert
from commwatch.alerts.outbox import Batch, Outbox
from commwatch.alerts.receivers.sending import CannotSend, Receiver

log = logging.getLogger("commwatch")
#: While there is more to tell, what was told is written down no more often.
_WRITE_S = 1.0
_VERSION = 1


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
        file: where it is kept what receivers were told, so that nobody is told twice after a restart of the agent; ``None``: nowhere.
        wall: Unix time, for what is sent.
        clock: the monotonic clock, for when it is sent.
    """

    def __init__(
        self,
        receivers: Sequence[Receiver],
        *,
        file: KeptFile | None = None,
        wall: Callable[[], float] = time.time,
        clock: Callable[[], float] = time.monotonic,
        retry: Retry = Retry(),
    ) -> None:
        self._file, self._wall, self._clock, self._retry = file, wall, clock, retry
        self._writing, self._changing = threading.Lock(), threading.Lock()
        self._lanes = [self._lane(receiver) for receiver in receivers]

    def _lane(self, receiver: Receiver) -> _Lane:
        return _Lane(receiver, self._wall, self._clock, self._retry, self._write)

    def change(self, receivers: Sequence[Receiver], timeout_s: float) -> None:
        """Tell others from now on. Those that stay as they were notice nothing; one that is another under its old name is told no more
        than after a restart.

        Args:
            timeout_s: for what is under way to those that go.
        """
        stay = [lane for lane in self._lanes if lane.receiver in receivers]
        go = [lane for lane in self._lanes if lane not in stay]
        _end(go, timeout_s, self._clock)
        with self._changing:
            told = {lane.name: lane.state() for lane in go}
            by_receiver = {lane.name: lane for lane in stay}
            self._lanes = [by_receiver.get(receiver.name) or self._lane(receiver) for receiver in receivers]
            for lane in self._lanes:
                if lane not in stay:
                    lane.restore(told.get(lane.name, []), lambda alert: alert)
        self._write()

    def resume(self, active: Sequence[Alert], past: Sequence[Alert]) -> None:
        """Take up what an agent before this one has told; to be called before anything is sent.

        Args:
            active: alerts that are pending or firing.
            past: some that are over; what was told as firing and is in neither has ended, too.
        """
        kept = None if self._file is None else self._file.load(_read)
        if kept is None:
            return
        now = self._wall()
        away_s = max(0.0, now - kept["saved_at"])
        active_ids, over = {alert.id for alert in active}, {alert.id: alert for alert in past}

        def as_it_is(alert: Alert) -> Alert:
            if alert.state == RESOLVED or alert.id in active_ids:
                return alert
            return over.get(alert.id) or replace(alert, state=RESOLVED, resolved_at=now)

        for lane in self._lanes:
            state = kept["receivers"].get(lane.name, [])
            lane.restore([{**one, "ago_s": one["ago_s"] + away_s} for one in state], as_it_is)

    def _write(self) -> None:
        """Write down what receivers have been told."""
        if self._file is None:
            return
        with self._writing:
            told = {lane.name: lane.state() for lane in self._lanes}
            self._file.save(json.dumps({"version": _VERSION, "saved_at": self._wall(), "receivers": told}))

    def send(self, alerts: Sequence[Alert]) -> None:
        """Take in everything that fires, and what has just been resolved: after each evaluation. Waits for nobody."""
        with self._changing:
            for lane in self._lanes:
                lane.take(alerts)

    def delivered(self) -> list[Delivered]:
        """How it goes with each receiver."""
        return [lane.delivered() for lane in self._lanes]

    def close(self, timeout_s: float) -> None:
        """Try, once more and no longer than that, to tell what has not been told, and end."""
        _end(self._lanes, timeout_s, self._clock)


def _end(lanes: Sequence[_Lane], timeout_s: float, clock: Callable[[], float]) -> None:
    end = clock() + timeout_s
    for lane in lanes:
        lane.close()
    for lane in lanes:
        lane.join(max(0.0, end - clock()))


def _read(text: str) -> Mapping[str, Any]:
    """What receivers were told.

    Raises:
        ValueError: the text is damaged, or of another version.
    """
    try:
        given: Mapping[str, Any] = json.loads(text)
        if given["version"] != _VERSION:
            raise ValueError(f"version {given['version']}, and this is {_VERSION}")
        float(given["saved_at"])
        for told in given["receivers"].values():
            for one in told:
                from_json(one["alert"])
                float(one["ago_s"])
                one["told"]
    except (TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ValueError(f"not what was written: {type(error).__name__}: {error}") from None
    return given


class _Lane:
    """One receiver, its outbox and its thread."""

    def __init__(
        self,
        receiver: Receiver,
        wall: Callable[[], float],
        clock: Callable[[], float],
        retry: Retry,
        write: Callable[[], None],
    ) -> None:
        self.receiver, self._wall, self._clock, self._retry, self._write = receiver, wall, clock, retry, write
        self._written_s = float("-inf")
        self._outbox = Outbox(receiver.policy)
        self._changed = threading.Condition()
        self._closing = False
        self._failures, self._not_before_s = 0, float("-inf")
        self._trouble: str | None = None
        self._thread = threading.Thread(target=self._work, name=f"to {receiver.name}", daemon=True)
        self._thread.start()

    @property
    def name(self) -> str:
        return self.receiver.name

    def state(self) -> list[dict[str, Any]]:
        with self._changed:
            return self._outbox.state(self._clock()) if self._outbox.keeps else []

    def restore(self, state: Sequence[Mapping[str, Any]], as_it_is: Callable[[Alert], Alert]) -> None:
        with self._changed:
            self._outbox.restore(state, self._clock(), as_it_is)
            self._changed.notify()

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
            return Delivered(self.receiver.name, *counts, box.waiting, self._trouble)

    def _work(self) -> None:
        while (batch := self._next()) is not None:
            failure = self._send(batch)
            with self._changed:
                self._note(batch, failure)
                to_write = self._is_to_write()
                is_over = failure is not None and failure.again and self._closing
            if to_write:
                self._write()
            if is_over:
                return

    def _is_to_write(self) -> bool:
        """Whether what was told is to be written down now: at once, but in a flood once a second."""
        now = self._clock()
        more = self._not_before_s <= now and self._outbox.has_more
        if not self._outbox.keeps or (more and now < self._written_s + _WRITE_S):
            return False
        self._written_s = now
        return True

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
            self.receiver.send(batch, self._wall())
        except CannotSend as failure:
            return failure
        except ValueError as error:
            # Of a message that cannot be written down; what the error says may be part of it.
            return CannotSend(f"cannot be written ({type(error).__name__})", again=False)
        except RuntimeError as error:  # no more threads to be had
            return CannotSend(str(error))
        return None

    def _note(self, batch: Batch, failure: CannotSend | None) -> None:
        now = self._clock()
        if failure is None:
            self._outbox.sent(batch, now)
            self._failures = 0
            if self._trouble is not None:
                log.info("receiver %s: works again", self.receiver.name)
            self._trouble = None
            return
        self._outbox.failed(batch, now, failure.again)
        if failure.again:
            self._failures += 1
            if not self._closing:
                self._not_before_s = now + max(self._retry.wait_s(self._failures), failure.after_s or 0.0)
        if str(failure) != self._trouble:
            log.warning("receiver %s: %s", self.receiver.name, failure)
        self._trouble = str(failure)
