"""The messages due to one receiver: which alerts, in which messages, how often. Pure: times are parameters.

An outbox has no queue: it keeps the latest state of each alert, and what was sent of it. So after an outage of the
receiver, an alert that changed several times is sent once, in its latest state. ``now_s`` is in monotonic seconds.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import KW_ONLY, dataclass
from typing import Any

from commwatch_alerts.alert_json import as_json, from_json
from commwatch_alerts.model import FIRING, INFO, RESOLVED, SEVERITIES, Alert

#: Most alerts in one message; further alerts of a group are only counted.
MOST_ALERTS = 100
#: Seconds since an alert was last passed in, after which it is not repeated, and after which it is forgotten.
_STALE_S, _FORGET_S = 120.0, 3600.0
#: Labels that group alerts into messages.
GROUP_LABELS = ("alertname", "job_id")

Labels = tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Policy:
    """Which alerts a receiver gets, and how often."""

    #: Seconds after which an alert that still fires is sent again.
    repeat_s: float
    #: Seconds for which a resolved alert is sent again, every ``repeat_s``.
    linger_s: float = 0.0
    #: True: a message has all firing alerts of one group. False: it has only the alerts that are due, of all groups.
    grouped: bool = True
    send_resolved: bool = True
    #: Alerts below this severity are not sent.
    severity: str = INFO
    _: KW_ONLY
    #: Most alerts that wait to be sent for the first time.
    most_waiting: int = 4096


@dataclass(frozen=True)
class Batch:
    """One message."""

    #: Alerts that are due come first.
    alerts: tuple[Alert, ...]
    #: Labels of the group; empty if the receiver groups by itself.
    group: Labels = ()
    #: Alerts left out because the message has ``MOST_ALERTS``.
    truncated: tuple[Alert, ...] = ()


class _Entry:
    """What one receiver was sent of one alert."""

    __slots__ = ("alert", "ended", "seen_s", "sent_id", "sent_s", "tried")

    def __init__(self, alert: Alert, now_s: float) -> None:
        #: Its latest state, and when that was last passed in (for a resolved alert: first).
        self.alert, self.seen_s = alert, now_s
        #: Id of the occurrence that was sent as firing, and when the alert was last sent.
        self.sent_id: str | None = None
        self.sent_s = now_s
        #: The receiver may have it, because a message with it was in flight.
        self.tried = False
        #: Its end was sent.
        self.ended = False


class Outbox:
    """The messages due to one receiver. Call ``next``, and then ``sent`` or ``failed`` before the next message."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._groups: dict[Labels, dict[Labels, _Entry]] = {}
        #: Groups with alerts that are due, in order.
        self._turn: deque[Labels] = deque()
        #: Alerts sent (counted each time), alerts in failed messages, and alerts dropped because too many were waiting.
        self.sent_count = self.failed_count = self.dropped_count = 0

    # -- alerts in ----------------------------------------------------------------------------

    def take(self, alerts: Iterable[Alert], now_s: float) -> None:
        """Take in the alerts of one look at what is wrong: all that fire, and those just resolved."""
        for alert in alerts:
            if alert.state not in (FIRING, RESOLVED):
                continue
            key = tuple(sorted(alert.labels.items()))
            entry = self._groups.get(self._group_of(alert), {}).get(key)
            # The end of an alert that was sent before a reload raised the severity is sent, too.
            if self._is_quiet(alert) and (alert.state == FIRING or entry is None):
                continue
            group = self._groups.setdefault(self._group_of(alert), {})
            if alert.state == RESOLVED and not self._policy.send_resolved:
                group.pop(key, None)
            elif entry is None:
                entry = group[key] = _Entry(alert, now_s)
                if alert.state == RESOLVED:  # it fired under an earlier agent: the receiver may need its end
                    entry.tried = True
            else:
                _change(entry, alert, now_s)
        self._drop()

    def _is_quiet(self, alert: Alert) -> bool:
        severity = alert.labels.get("severity", INFO)
        return severity in SEVERITIES and SEVERITIES.index(severity) < SEVERITIES.index(self._policy.severity)

    def _group_of(self, alert: Alert) -> Labels:
        if not self._policy.grouped:
            return ()
        return tuple((name, alert.labels[name]) for name in GROUP_LABELS if alert.labels.get(name))

    def _drop(self) -> None:
        """Drop the oldest alerts that were never sent, down to ``most_waiting``; ends of sent alerts are not dropped."""
        waiting = [each for each in self._entries() if each[2].sent_id is None and not each[2].ended]
        if len(waiting) > self._policy.most_waiting:
            waiting.sort(key=lambda each: each[2].alert.active_at)
            for at, key, _ in waiting[: len(waiting) - self._policy.most_waiting]:
                del self._groups[at][key]
                self.dropped_count += 1

    def _entries(self) -> Iterator[tuple[Labels, Labels, _Entry]]:
        for at, group in self._groups.items():
            for key, entry in group.items():
                yield at, key, entry

    # -- messages out -------------------------------------------------------------------------

    def next(self, now_s: float) -> Batch | None:
        """Return the next message that is due; ``None``: none yet."""
        if not self._turn:
            self._tidy(now_s)
            self._turn.extend(
                at for at, group in self._groups.items() if any(self._due(e, now_s) for e in group.values())
            )
        while self._turn:
            at = self._turn.popleft()
            batch = self._batch(at, now_s)
            if batch is not None:
                return batch
        return None

    @property
    def has_more(self) -> bool:
        """Whether further groups were due when ``next`` returned the latest message."""
        return bool(self._turn)

    def _batch(self, at: Labels, now_s: float) -> Batch | None:
        entries = list(self._groups.get(at, {}).values())
        due = [entry for entry in entries if self._due(entry, now_s)]
        if not due:
            return None
        if not self._policy.grouped:
            due = sorted(due, key=lambda entry: (entry.sent_s, entry.sent_id is not None))[:MOST_ALERTS]
        others = (entry for entry in entries if entry.alert.state == FIRING and not self._due(entry, now_s))
        rest = list(others) if self._policy.grouped else []
        for entry in due + rest:
            entry.tried = True
        alerts = [entry.alert for entry in due + rest]
        return Batch(tuple(alerts[:MOST_ALERTS]), at, tuple(alerts[MOST_ALERTS:]))

    def _due(self, entry: _Entry, now_s: float) -> bool:
        return self._due_s(entry, now_s) <= now_s

    def _due_s(self, entry: _Entry, now_s: float) -> float:
        """Return when an alert is due, in monotonic seconds; infinity: not, unless it changes."""
        again_s, never = entry.sent_s + self._policy.repeat_s, float("inf")
        if entry.alert.state == FIRING:
            if entry.sent_id != entry.alert.id:
                return entry.seen_s
            return again_s if max(again_s, now_s) - entry.seen_s < _STALE_S else never
        if not entry.ended:
            return entry.seen_s if entry.tried else never
        return again_s if again_s - entry.seen_s < self._policy.linger_s else never

    def _tidy(self, now_s: float) -> None:
        """Forget alerts that have not been passed in for ``_FORGET_S``; one whose end still has to be sent is kept."""
        for at, key, entry in list(self._entries()):
            is_open = entry.alert.state == RESOLVED and entry.tried and not entry.ended
            if now_s - entry.seen_s > _FORGET_S and not is_open:
                del self._groups[at][key]
        self._groups = {at: group for at, group in self._groups.items() if group}

    def due_in_s(self, now_s: float) -> float | None:
        """Return the seconds until an alert is due; ``None``: none is, unless something changes."""
        first = min((self._due_s(entry, now_s) for _, _, entry in self._entries()), default=float("inf"))
        return None if first == float("inf") else max(0.0, first - now_s)

    # -- results of messages ------------------------------------------------------------------

    def sent(self, batch: Batch, now_s: float) -> list[Alert]:
        """Record that the receiver accepted a message; return what of it was news, and no repetition."""
        self.sent_count += len(batch.alerts) + len(batch.truncated)
        return self._mark_sent(batch, now_s)

    def failed(self, batch: Batch, now_s: float, again: bool) -> None:
        """Record that a message was not delivered; its alerts stay due (``again``), or wait for the next repeat."""
        self.failed_count += len(batch.alerts) + len(batch.truncated)
        if not again:
            self._mark_sent(batch, now_s)

    def _mark_sent(self, batch: Batch, now_s: float) -> list[Alert]:
        group, news = self._groups.get(batch.group, {}), list[Alert]()
        for alert in batch.alerts + batch.truncated:
            key = tuple(sorted(alert.labels.items()))
            entry = group.get(key)
            if entry is None:
                continue
            entry.sent_s = now_s
            if alert.state == FIRING:
                news += [alert] * (entry.sent_id != alert.id)
                entry.sent_id = alert.id
            elif entry.alert.state == RESOLVED and entry.alert.id == alert.id:
                news += [alert] * (not entry.ended)
                entry.ended = True
        return news

    @property
    def waiting(self) -> int:
        """Number of alerts whose latest state the receiver does not have yet."""
        entries = (entry for _, _, entry in self._entries())
        return sum(e.sent_id != e.alert.id if e.alert.state == FIRING else e.tried and not e.ended for e in entries)

    # -- over a restart -----------------------------------------------------------------------

    @property
    def keeps(self) -> bool:
        """Whether to keep its state over a restart; not if the receiver groups by itself, as that gets all alerts anyway."""
        return self._policy.grouped

    def state(self, now_s: float) -> list[dict[str, Any]]:
        """Return the state to keep over a restart, as JSON types: alerts that may have been sent, and whose end was not."""
        return [
            {"alert": as_json(entry.alert), "told": entry.sent_id, "ago_s": now_s - entry.sent_s}
            for _, _, entry in self._entries()
            if entry.tried and not entry.ended
        ]

    def restore(self, state: Iterable[Mapping[str, Any]], now_s: float, as_it_is: Callable[[Alert], Alert]) -> None:
        """Restore the state that an earlier agent left. Call it before the first ``take``.

        Args:
            as_it_is: returns the present state of a restored alert.
        """
        for one in state:
            alert = as_it_is(from_json(one["alert"]))
            if alert.state == RESOLVED and not self._policy.send_resolved:
                continue
            entry = _Entry(alert, now_s)
            entry.sent_id, entry.sent_s, entry.tried = one["told"], now_s - one["ago_s"], True
            self._groups.setdefault(self._group_of(alert), {})[tuple(sorted(alert.labels.items()))] = entry


def _change(entry: _Entry, alert: Alert, now_s: float) -> None:
    """Update an entry with a later state of its alert."""
    if alert.state == RESOLVED:
        is_old = alert.id != entry.alert.id and alert.active_at < entry.alert.active_at
        if is_old or entry.alert.state == RESOLVED:
            return
    elif entry.alert.state == RESOLVED:  # its end may be sent already or in flight, so it is news again
        entry.sent_id = None
    entry.alert, entry.seen_s, entry.ended = alert, now_s, False
