"""Delivery of alerts to receivers, each in its own thread, so that a slow receiver delays nothing else."""

from __future__ import annotations

import json
import logging
import random
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any

from commwatch_alerts.alert_json import from_json
from commwatch_alerts.kept import KeptFile
from commwatch_alerts.model import RESOLVED, Alert
from commwatch_alerts.outbox import Batch, Outbox
from commwatch_alerts.receivers.sending import CannotSend, Receiver

log = logging.getLogger("commwatch")
#: Least seconds between writes of the file while more messages are due.
_WRITE_S = 1.0
_VERSION = 1
#: Most alerts of a message that the log names.
_MOST_NAMED = 5


@dataclass(frozen=True)
class Retry:
    """Wait before a receiver is tried again: doubled after each failure, less a random part."""

    first_s: float = 1.0
    most_s: float = 300.0
    #: Returns 0 to 1. Randomness keeps many agents from retrying one receiver simultaneously.
    jitter: Callable[[], float] = random.random

    def wait_s(self, failures: int) -> float:
        """Return the seconds to wait after ``failures`` failures in a row; at least one failure."""
        return min(self.most_s, self.first_s * 2.0 ** min(failures - 1, 60)) * (1 - self.jitter() / 2)


@dataclass(frozen=True)
class Delivered:
    """Status of one receiver. An alert counts once for each message that it is in."""

    receiver: str
    sent: int
    #: Alerts in messages that were not delivered; most are tried again.
    failed: int
    #: Alerts dropped because too many were waiting.
    dropped: int
    #: Alerts whose latest state the receiver does not have yet.
    waiting: int
    _: KW_ONLY
    #: Why the last message failed; ``None``: it did not.
    trouble: str | None


class Delivery:
    """Delivers alerts to receivers.

    Args:
        file: record of sent alerts, so that a restarted agent does not send them again; ``None``: no record.
        wall: Unix time in seconds, for the content of messages.
        clock: monotonic seconds, for the timing of messages.
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
        """Replace the receivers. Unchanged ones are not disturbed; a changed receiver with an old name gets only news.

        Args:
            timeout_s: seconds to wait for messages in flight to the removed receivers.
        """
        stay = [lane for lane in self._lanes if lane.receiver in receivers]
        go = [lane for lane in self._lanes if lane not in stay]
        _end(go, timeout_s, self._clock)
        with self._changing:
            states = {lane.name: lane.state() for lane in go}
            by_receiver = {lane.name: lane for lane in stay}
            self._lanes = [by_receiver.get(receiver.name) or self._lane(receiver) for receiver in receivers]
            for lane in self._lanes:
                if lane not in stay:
                    lane.restore(states.get(lane.name, []), lambda alert: alert)
        self._write()

    def resume(self, active: Sequence[Alert], past: Sequence[Alert]) -> None:
        """Restore the record that an earlier agent left. Call it before the first ``send``.

        Args:
            active: alerts that are pending or firing.
            past: past alerts. An alert that was sent as firing and is in neither argument counts as resolved now.
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
        """Write the record of sent alerts to the file."""
        if self._file is None:
            return
        with self._writing:
            states = {lane.name: lane.state() for lane in self._lanes}
            self._file.save(json.dumps({"version": _VERSION, "saved_at": self._wall(), "receivers": states}))

    def send(self, alerts: Sequence[Alert]) -> None:
        """Take in all firing and just resolved alerts, after each look at what is wrong; does not wait for receivers."""
        with self._changing:
            for lane in self._lanes:
                lane.take(alerts)

    def delivered(self) -> list[Delivered]:
        """Return the status of each receiver."""
        return [lane.delivered() for lane in self._lanes]

    def close(self, timeout_s: float) -> None:
        """Try once to send what is waiting, for at most ``timeout_s`` seconds, and end the threads."""
        _end(self._lanes, timeout_s, self._clock)


def _named(alerts: Sequence[Alert]) -> str:
    """Return the alerts of a message for a line of the log; beyond some, their number."""
    names = [
        f"{each.name} {each.state}" + (f" of job {job}" if (job := each.labels.get("job_id")) else "")
        for each in alerts
    ]
    return ", ".join(names[:_MOST_NAMED]) + (
        f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
    )


def _end(lanes: Sequence[_Lane], timeout_s: float, clock: Callable[[], float]) -> None:
    end = clock() + timeout_s
    for lane in lanes:
        lane.close()
    for lane in lanes:
        lane.join(max(0.0, end - clock()))


def _read(text: str) -> Mapping[str, Any]:
    """Return the record of sent alerts from the text of its file.

    Raises:
        ValueError: the text is damaged, or of another version.
    """
    try:
        given: Mapping[str, Any] = json.loads(text)
        if given["version"] != _VERSION:
            raise ValueError(f"version {given['version']}, expected {_VERSION}")
        float(given["saved_at"])
        for state in given["receivers"].values():
            for one in state:
                from_json(one["alert"])
                float(one["ago_s"])
                one["told"]
    except (TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ValueError(f"invalid content: {type(error).__name__}: {error}") from None
    return given


class _Lane:
    """One receiver with its outbox and its thread."""

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
            return Delivered(self.receiver.name, *counts, box.waiting, trouble=self._trouble)

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
        """Return whether to write the file now: after each message, but once per ``_WRITE_S`` while more are due."""
        now = self._clock()
        more = self._not_before_s <= now and self._outbox.has_more
        if not self._outbox.keeps or (more and now < self._written_s + _WRITE_S):
            return False
        self._written_s = now
        return True

    def _next(self) -> Batch | None:
        """Wait for the next message and return it; ``None``: the lane is closing and nothing is due."""
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
            # The message cannot be encoded. The error's text is left out, because it may quote the message.
            return CannotSend(f"cannot be written ({type(error).__name__})", again=False)
        except RuntimeError as error:  # no further thread can be started
            return CannotSend(str(error))
        return None

    def _note(self, batch: Batch, failure: CannotSend | None) -> None:
        now = self._clock()
        if failure is None:
            news = self._outbox.sent(batch, now)
            self._failures = 0
            if self._trouble is not None:
                log.info("receiver %s: works again", self.receiver.name)
            if news:
                about = {"event": "delivered", "receiver": self.name, "alerts": len(news)}
                log.info("receiver %s: sent %s", self.name, _named(news), extra={"about": about})
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
