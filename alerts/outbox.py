"""What one receiver is still to be told: which alerts, in which messages, how often. Pure: times are parameters.

Nothing is queued twice: an outbox knows of each alert its latest state and what was told of it. So what changed while a
receiver was away goes out once, as it stands when the receiver is back.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from commwatch.alerts.book import as_json, from_json
from commwatch.alerts.model import FIRING, INFO, RESOLVED, SEVERITIES, Alert

#: Alerts in one message; further ones of a group are only counted.
MOST_ALERTS = 100
#: What was not mentioned for so long is not told again; and is forgotten.
_STALE_S, _FORGET_S = 120.0, 3600.0
#: What groups alerts into messages.
GROUP_LABELS = ("alertname", "job_id")

Labels = tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Policy:
    """What a receiver wants to be told, and how often."""

    #: Seconds after which it is told again of what still fires.
    repeat_s: float
    #: Seconds for which it is told again, as often, of what has ended.
    linger_s: float = 0.0
    #: A message is about one group, with all that fires in it; else about anything, and only what is due.
    grouped: bool = True
    send_resolved: bool = True
    #: The least severity.
    severity: str = INFO
    #: Alerts that may wait to be told for the first time.
    most_waiting: int = 4096


@dataclass(frozen=True)
class Batch:
    """One message."""

    #: The news first.
    alerts: tuple[Alert, ...]
    #: Labels of the group; empty where the receiver groups by itself.
    group: Labels = ()
    #: Alerts that were left out because there were too many.
    truncated: tuple[Alert, ...] = ()


class _Entry:
    """One alert, as far as one receiver is concerned."""

    __slots__ = ("alert", "ended", "seen_s", "told", "told_s", "tried")

    def __init__(self, alert: Alert, now_s: float) -> None:
        #: Its latest state, and when that was mentioned last: an end, first.
        self.alert, self.seen_s = alert, now_s
        #: Id of the occurrence that was told as firing, and when it was told of last.
        self.told: str | None = None
        self.told_s = now_s
        #: It may have been told: a message with it was on its way.
        self.tried = False
        #: Its end was told.
        self.ended = False


class Outbox:
    """What a receiver is to be told. One message at a time: ``next``, then ``sent`` or ``failed``."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._groups: dict[Labels, dict[Labels, _Entry]] = {}
        #: Groups whose turn it is.
        self._turn: deque[Labels] = deque()
        #: Alerts that were told (each time), that were in messages that failed, and that were never told for want of room.
        self.sent_count = self.failed_count = self.dropped_count = 0

    # -- in -----------------------------------------------------------------------------------

    def take(self, alerts: Iterable[Alert], now_s: float) -> None:
        """Take in what fires, each time it is looked at, and what has ended since."""
        for alert in alerts:
            if alert.state not in (FIRING, RESOLVED) or self._is_quiet(alert):
                continue
            key = tuple(sorted(alert.labels.items()))
            group = self._groups.setdefault(self._group_of(alert), {})
            entry = group.get(key)
            if alert.state == RESOLVED and not self._policy.send_resolved:
                group.pop(key, None)
            elif entry is None:
                entry = group[key] = _Entry(alert, now_s)
                if alert.state == RESOLVED:  # of before this agent began: somebody may wait for it
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
        """Make room: the oldest of those that were never told. An end of what was told is not among them."""
        waiting = [each for each in self._entries() if each[2].told is None and not each[2].ended]
        if len(waiting) > self._policy.most_waiting:
            waiting.sort(key=lambda each: each[2].alert.active_at)
            for at, key, _ in waiting[: len(waiting) - self._policy.most_waiting]:
                del self._groups[at][key]
                self.dropped_count += 1

    def _entries(self) -> Iterator[tuple[Labels, Labels, _Entry]]:
        for at, group in self._groups.items():
            for key, entry in group.items():
                yield at, key, entry

    # -- out ----------------------------------------------------------------------------------

    def next(self, now_s: float) -> Batch | None:
        """What to tell now; ``None``: nothing yet."""
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
        """Whether more was due when the latest message was."""
        return bool(self._turn)

    def _batch(self, at: Labels, now_s: float) -> Batch | None:
        entries = list(self._groups.get(at, {}).values())
        due = [entry for entry in entries if self._due(entry, now_s)]
        if not due:
            return None
        if not self._policy.grouped:
            due = sorted(due, key=lambda entry: (entry.told_s, entry.told is not None))[:MOST_ALERTS]
        others = (entry for entry in entries if entry.alert.state == FIRING and not self._due(entry, now_s))
        rest = list(others) if self._policy.grouped else []
        for entry in due + rest:
            entry.tried = True
        alerts = [entry.alert for entry in due + rest]
        return Batch(tuple(alerts[:MOST_ALERTS]), at, tuple(alerts[MOST_ALERTS:]))

    def _due(self, entry: _Entry, now_s: float) -> bool:
        return self._due_s(entry, now_s) <= now_s

    def _due_s(self, entry: _Entry, now_s: float) -> float:
        """When the receiver is to be told of it; infinity: not again, as it looks now."""
        again_s, never = entry.told_s + self._policy.repeat_s, float("inf")
        if entry.alert.state == FIRING:
            if entry.told != entry.alert.id:
                return entry.seen_s
            return again_s if max(again_s, now_s) - entry.seen_s < _STALE_S else never
        if not entry.ended:
            return entry.seen_s if entry.tried else never
        return again_s if again_s - entry.seen_s < self._policy.linger_s else never

    def _tidy(self, now_s: float) -> None:
        """Forget what nobody mentions any more. What has ended is known a while longer, so that its end is told once."""
        for at, key, entry in list(self._entries()):
            is_open = entry.alert.state == RESOLVED and entry.tried and not entry.ended
            if now_s - entry.seen_s > _FORGET_S and not is_open:
                del self._groups[at][key]
        self._groups = {at: group for at, group in self._groups.items() if group}

    def due_in_s(self, now_s: float) -> float | None:
        """Seconds until there is something to tell; ``None``: not unless something changes."""
        first = min((self._due_s(entry, now_s) for _, _, entry in self._entries()), default=float("inf"))
        return None if first == float("inf") else max(0.0, first - now_s)

    # -- what came of it ----------------------------------------------------------------------

    def sent(self, batch: Batch, now_s: float) -> None:
        """The receiver has taken it."""
        self.sent_count += len(batch.alerts) + len(batch.truncated)
        self._told(batch, now_s)

    def failed(self, batch: Batch, now_s: float, again: bool) -> None:
        """The receiver has not; ``again``: it stays to be told, else this is not said to it again before it is due again."""
        self.failed_count += len(batch.alerts) + len(batch.truncated)
        if not again:
            self._told(batch, now_s)

    def _told(self, batch: Batch, now_s: float) -> None:
        group = self._groups.get(batch.group, {})
        for alert in batch.alerts + batch.truncated:
            key = tuple(sorted(alert.labels.items()))
            entry = group.get(key)
            if entry is None:
                continue
            entry.told_s = now_s
            if alert.state == FIRING:
                entry.told = alert.id
            elif entry.alert.state == RESOLVED and entry.alert.id == alert.id:
                entry.ended = True

    @property
    def waiting(self) -> int:
        """Alerts whose latest state the receiver has not been told."""
        entries = (entry for _, _, entry in self._entries())
        return sum(e.told != e.alert.id if e.alert.state == FIRING else e.tried and not e.ended for e in entries)

    # -- over a restart -----------------------------------------------------------------------

    @property
    def keeps(self) -> bool:
        """Whether its state is worth keeping: who groups by itself is told each minute what is so, and needs no memory of ours."""
        return self._policy.grouped

    def state(self, now_s: float) -> list[dict[str, Any]]:
        """What must outlive the agent, as JSON knows it: what may have been told, but for that whose end was; and how long ago."""
        return [
            {"alert": as_json(entry.alert), "told": entry.told, "ago_s": now_s - entry.told_s}
            for _, _, entry in self._entries()
            if entry.tried and not entry.ended
        ]

    def restore(self, state: Iterable[Mapping[str, Any]], now_s: float, as_it_is: Callable[[Alert], Alert]) -> None:
        """Take up what an agent before this one has left; to be called before anything is taken in.

        Args:
            as_it_is: an alert in its present state.
        """
        for one in state:
            alert = as_it_is(from_json(one["alert"]))
            if alert.state == RESOLVED and not self._policy.send_resolved:
                continue
            entry = _Entry(alert, now_s)
            entry.told, entry.told_s, entry.tried = one["told"], now_s - one["ago_s"], True
            self._groups.setdefault(self._group_of(alert), {})[tuple(sorted(alert.labels.items()))] = entry


def _change(entry: _Entry, alert: Alert, now_s: float) -> None:
    """Take in a later state of an alert."""
    if alert.state == RESOLVED:
        is_old = alert.id != entry.alert.id and alert.active_at < entry.alert.active_at
        if is_old or entry.alert.state == RESOLVED:
            return
    elif entry.alert.state == RESOLVED:  # an end of it may have been told, or be on its way
        entry.told = None
    entry.alert, entry.seen_s, entry.ended = alert, now_s, False
