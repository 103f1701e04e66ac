"""Samples kept in memory for the rules, with Prometheus's semantics of scrapes."""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

#: Names and values of labels, sorted by name; the metric's name is the label ``__name__``.
Labels = tuple[tuple[str, str], ...]
#: An instant vector: one value for each set of labels.
Vector = Mapping[Labels, float]
NAME = "__name__"
#: Seconds for which a sample stays current, unless its series ends (Prometheus's lookback).
LOOKBACK_S = 300.0
#: Most series that are kept. Exporters bound their number, so more than this is a fault.
MOST_SERIES = 20_000

EQUAL, NOT_EQUAL, LIKE, UNLIKE = "=", "!=", "=~", "!~"


def labels_of(pairs: Mapping[str, str]) -> Labels:
    """Return labels from a mapping, without labels of empty value."""
    return tuple(sorted((name, value) for name, value in pairs.items() if value))


def value_of(labels: Labels, name: str) -> str:
    """Return the value of a label; empty if there is no such label."""
    return next((value for key, value in labels if key == name), "")


@dataclass(frozen=True)
class Matcher:
    """A selector's condition on one label.

    Raises:
        re.error: a regular expression that Python does not accept.
    """

    name: str
    #: ``=``, ``!=``, ``=~`` or ``!~``.
    kind: str
    value: str
    _pattern: re.Pattern[str] | None = field(init=False, default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        if self.kind in (LIKE, UNLIKE):
            object.__setattr__(self, "_pattern", re.compile(self.value, re.ASCII))

    def accepts(self, value: str) -> bool:
        """Return whether a label value matches; a missing label has the empty value."""
        same = value == self.value if self._pattern is None else self._pattern.fullmatch(value) is not None
        return same is (self.kind in (EQUAL, LIKE))


@dataclass(frozen=True)
class Need:
    """What a selector reads: metrics whose name fits all matchers, ``range_s`` seconds back (0: the latest sample)."""

    names: tuple[Matcher, ...]
    range_s: float = 0.0


@dataclass(frozen=True)
class Window:
    """The samples of a series in a range: times in ms, ascending, and values."""

    times_ms: Sequence[int]
    values: Sequence[float]


class _Series:
    """One series: times in ms, and values; the value ``None`` marks an end."""

    __slots__ = ("by_name", "labels", "times_ms", "values")

    def __init__(self, labels: Labels) -> None:
        self.labels, self.by_name = labels, dict(labels)
        self.times_ms: list[int] = []
        self.values: list[float | None] = []

    def add(self, at_ms: int, value: float | None, oldest_ms: int) -> None:
        if self.times_ms and self.times_ms[-1] == at_ms:
            return  # as in Prometheus, the first of two samples counts
        gone = bisect_left(self.times_ms, oldest_ms)
        if gone:
            del self.times_ms[:gone], self.values[:gone]
        self.times_ms.append(at_ms)
        self.values.append(value)


class Samples:
    """Samples of the metrics that rules need, kept for as long as the rules need them.

    Times are monotonic seconds. Reading at a time before the latest sample works as far back as samples are kept.

    Args:
        needs: the metrics and ranges that will be read.
    """

    def __init__(self, needs: Sequence[Need]) -> None:
        self._needs = tuple(dict.fromkeys(needs))
        self._keep_ms: dict[str, int | None] = {}
        self._metrics: dict[str, dict[Labels, _Series]] = {}
        self._present: dict[str, dict[Labels, _Series]] = {}
        self._count = 0
        self._latest_ms: int | None = None
        #: Number of samples refused because there are ``MOST_SERIES`` series.
        self.refused = 0

    def wants(self, name: str) -> bool:
        """Return whether metrics with this name are kept."""
        return self._kept_ms(name) is not None

    def _kept_ms(self, name: str) -> int | None:
        if name not in self._keep_ms:
            ranges = [need.range_s for need in self._needs if all(matcher.accepts(name) for matcher in need.names)]
            self._keep_ms[name] = round(1000 * max(ranges)) if ranges else None
        return self._keep_ms[name]

    def add(self, at_s: float, values: Mapping[Labels, float], source: str = "") -> None:
        """Add all samples of a source at one time; series that it had the time before and now lacks end.

        Raises:
            ValueError: ``at_s`` is before the latest sample.
        """
        at_ms = round(at_s * 1000)
        if self._latest_ms is not None and at_ms < self._latest_ms:
            raise ValueError(f"samples of {at_s:g} s come after those of {self._latest_ms / 1000:g} s")
        self._latest_ms = at_ms
        self._forget(at_ms)
        present: dict[Labels, _Series] = {}
        for labels, value in values.items():
            series = self._series(labels)
            if series is not None:
                self._put(series, at_ms, value)
                present[labels] = series
        for labels, series in self._present.get(source, {}).items():
            if labels not in present:
                self._put(series, at_ms, None)
        self._present[source] = present

    def _put(self, series: _Series, at_ms: int, value: float | None) -> None:
        keep_ms = self._kept_ms(series.by_name.get(NAME, ""))
        series.add(at_ms, value, at_ms - (keep_ms or 0))

    def _series(self, labels: Labels) -> _Series | None:
        name = value_of(labels, NAME)
        if not self.wants(name):
            return None
        metric = self._metrics.setdefault(name, {})
        series = metric.get(labels)
        if series is None:
            if self._count >= MOST_SERIES:
                self.refused += 1
                return None
            self._count += 1
            series = metric[labels] = _Series(labels)
        return series

    def _forget(self, at_ms: int) -> None:
        for name, metric in list(self._metrics.items()):
            oldest = at_ms - max(self._kept_ms(name) or 0, round(LOOKBACK_S * 1000))
            for labels in [labels for labels, series in metric.items() if series.times_ms[-1] < oldest]:
                del metric[labels]
                self._count -= 1
            if not metric:
                del self._metrics[name]

    def _select(self, names: tuple[Matcher, ...], matchers: tuple[Matcher, ...]) -> Iterator[_Series]:
        if len(names) == 1 and names[0].kind == EQUAL:
            metrics = [self._metrics.get(names[0].value, {})]
        else:
            metrics = [found for name, found in self._metrics.items() if all(one.accepts(name) for one in names)]
        for metric in metrics:
            for series in metric.values():
                if all(matcher.accepts(series.by_name.get(matcher.name, "")) for matcher in matchers):
                    yield series

    def instant(self, at_s: float, names: tuple[Matcher, ...], matchers: tuple[Matcher, ...]) -> dict[Labels, float]:
        """Return the value of each series at a time: the latest sample within ``LOOKBACK_S``, unless the series has ended."""
        at_ms, found = round(at_s * 1000), {}
        for series in self._select(names, matchers):
            at = bisect_right(series.times_ms, at_ms) - 1
            if at >= 0 and series.times_ms[at] >= at_ms - LOOKBACK_S * 1000:
                value = series.values[at]
                if value is not None:
                    found[series.labels] = value
        return found

    def range(
        self, at_s: float, range_s: float, names: tuple[Matcher, ...], matchers: tuple[Matcher, ...]
    ) -> dict[Labels, Window]:
        """Return the samples of each series from ``at_s - range_s`` to ``at_s``, both included; no empty series."""
        at_ms, found = round(at_s * 1000), {}
        begin_ms = at_ms - round(range_s * 1000)
        for series in self._select(names, matchers):
            first, end = bisect_left(series.times_ms, begin_ms), bisect_right(series.times_ms, at_ms)
            if first < end:
                window = _window(series.times_ms[first:end], series.values[first:end])
                if window.values:
                    found[series.labels] = window
        return found


def _window(times_ms: list[int], values: list[float | None]) -> Window:
    """Return the samples without the marks of an end."""
    there = [value for value in values if value is not None]
    if len(there) < len(values):
        times_ms = [time_ms for time_ms, value in zip(times_ms, values, strict=True) if value is not None]
    return Window(times_ms, there)
