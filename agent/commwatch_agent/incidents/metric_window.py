"""The last minutes of the metrics that the rules need, as the agent exports them. Pure: times are parameters."""

from __future__ import annotations

import math
from array import array
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # it brings a web server, and the process that answers questions needs this module
    from prometheus_client.metrics_core import Metric

#: Names and values of labels, sorted by name, without empty values.
Labels = tuple[tuple[str, str], ...]
#: One value for each series of a metric.
Vector = Mapping[Labels, float]
#: Seconds that a window covers.
WINDOW_S = 300.0
#: Most series, and most snapshots of each: 10 MB. Exporters bound their series, so more than this is a fault.
MOST_SERIES, MOST_SNAPSHOTS = 20_000, 64
_ABSENT = math.nan


def labels_of(pairs: Mapping[str, str]) -> Labels:
    """Return labels from a mapping."""
    return tuple(sorted((name, value) for name, value in pairs.items() if value))


def only(labels: Labels, names: Collection[str]) -> Labels:
    """Return the labels with these names."""
    return tuple(pair for pair in labels if pair[0] in names)


def by(values: Vector, names: Collection[str], combined: Callable[[Sequence[float]], float]) -> Vector:
    """Combine the series that are equal in some labels; only these labels are left.

    >>> by({(("job_id", "a"), ("rank", "0")): 1.0, (("job_id", "a"), ("rank", "1")): 2.0}, ["job_id"], sum)
    {(('job_id', 'a'),): 3.0}
    """
    groups: dict[Labels, list[float]] = {}
    for labels, value in values.items():
        groups.setdefault(only(labels, names), []).append(value)
    return {labels: combined(group) for labels, group in groups.items()}


def where(values: Vector, name: str, accepts: Callable[[str], bool]) -> Vector:
    """Return the series whose label has a value that is accepted; a missing label has the empty value."""
    return {labels: value for labels, value in values.items() if accepts(dict(labels).get(name, ""))}


class MetricWindow:
    """Snapshots of some metrics, for as long as rules look back.

    A series is answered for only while it is in the latest snapshot: what has ended has no condition. ``snapshots`` also
    has those that were there before. A sample that is no finite number is absent.

    Args:
        names: of the samples that are kept. Reading another one raises ``KeyError``.
        instance: value of the label ``instance`` of every series; empty: no such label.
        keep_s: how long a snapshot is kept.
        most_series: further series are refused and counted.
    """

    def __init__(
        self, names: Collection[str], instance: str = "", keep_s: float = WINDOW_S, most_series: int = MOST_SERIES
    ) -> None:
        self._here = {"instance": instance} if instance else {}
        self._keep_s, self._most = keep_s, most_series
        self._times: list[float] = []
        #: By name and labels: a value for each snapshot.
        self._series: dict[str, dict[Labels, array[float]]] = {name: {} for name in names}
        #: Number of samples refused because there are too many series.
        self.refused = 0

    @property
    def size(self) -> int:
        """Number of series."""
        return sum(map(len, self._series.values()))

    def add(self, at_s: float, families: Iterable[Metric]) -> None:
        """Add a snapshot. Of two samples with equal labels, the first counts.

        Args:
            at_s: monotonic time in s.
            families: what the registry collects.

        Raises:
            ValueError: ``at_s`` is not after the latest snapshot.
        """
        if self._times and at_s <= self._times[-1]:
            raise ValueError(f"a snapshot of {at_s:g} s comes after that of {self._times[-1]:g} s")
        self._forget(max(bisect_left(self._times, at_s - self._keep_s), len(self._times) + 1 - MOST_SNAPSHOTS))
        self._times.append(at_s)
        room = self._most - self.size
        for family in families:
            for sample in family.samples:
                if sample.name in self._series and math.isfinite(sample.value):
                    labels = labels_of({**self._here, **sample.labels})
                    room -= self._put(self._series[sample.name], labels, sample.value, room)
        for values in (values for metric in self._series.values() for values in metric.values()):
            if len(values) < len(self._times):
                values.append(_ABSENT)

    def _put(self, metric: dict[Labels, array[float]], labels: Labels, value: float, room: int) -> bool:
        """Add a sample; return whether its series is new."""
        values, before = metric.get(labels), len(self._times) - 1
        if values is None and room <= 0:
            self.refused += 1
        elif values is None:
            metric[labels] = array("d", [*[_ABSENT] * before, value])
            return True
        elif len(values) == before:
            values.append(value)
        return False

    def _forget(self, old: int) -> None:
        """Forget the ``old`` oldest snapshots, and the series that only these had."""
        del self._times[:old]
        for metric in self._series.values():
            for labels, values in list(metric.items()):
                del values[:old]
                if all(map(math.isnan, values)):
                    del metric[labels]

    def _since(self, seconds: float) -> int:
        """Return the index of the first snapshot of the last ``seconds``, both ends included.

        Raises:
            ValueError: snapshots are not kept for so long.
        """
        if seconds > self._keep_s:
            raise ValueError(f"{seconds:g} s are asked for, and {self._keep_s:g} s are kept")
        return bisect_left(self._times, self._times[-1] - seconds) if self._times else 0

    def _present(self, name: str, seconds: float) -> Iterator[tuple[Labels, list[float]]]:
        """Return the values of each series of the latest snapshot."""
        first = self._since(seconds)
        for labels, values in self._series[name].items():
            if not math.isnan(values[-1]):
                yield labels, [value for value in values[first:] if not math.isnan(value)]

    def latest(self, name: str) -> Vector:
        """Return the values of the latest snapshot."""
        return {labels: values[-1] for labels, values in self._present(name, 0.0)}

    def increase(self, name: str, seconds: float = WINDOW_S) -> Vector:
        """Return by how much counters have grown. A counter that falls has begun again at 0, as in Prometheus.

        Nothing is extrapolated. A counter with a single sample is left out.
        """
        return {labels: _growth(values) for labels, values in self._present(name, seconds) if len(values) > 1}

    def rate(self, name: str, seconds: float = WINDOW_S) -> Vector:
        """Return the increase per second of the time that is covered, which is short after the start of the agent."""
        first = self._since(seconds)
        if len(self._times) - first < 2:
            return {}
        covered_s = self._times[-1] - self._times[first]
        return {labels: growth / covered_s for labels, growth in self.increase(name, seconds).items()}

    def own_rate(self, name: str, seconds: float) -> Vector:
        """Return the increase per second of the time in which each series was there: it may have begun after the window."""
        first, rates = self._since(seconds), dict[Labels, float]()
        for labels, growth in self.increase(name, seconds).items():
            values = self._series[name][labels]
            begun = next(at for at in range(first, len(values)) if not math.isnan(values[at]))
            rates[labels] = growth / (self._times[-1] - self._times[begun])
        return rates

    def mean(self, name: str, seconds: float = WINDOW_S) -> Vector:
        """Return the mean of the samples."""
        return {labels: math.fsum(values) / len(values) for labels, values in self._present(name, seconds)}

    def snapshots(self, name: str, seconds: float = WINDOW_S) -> Iterator[Vector]:
        """Return the values of each snapshot, oldest first, with series that are no longer there."""
        for index in range(self._since(seconds), len(self._times)):
            each = {labels: values[index] for labels, values in self._series[name].items()}
            yield {labels: value for labels, value in each.items() if not math.isnan(value)}


def _growth(values: Sequence[float]) -> float:
    return values[-1] - values[0] + sum(before for before, after in pairwise(values) if after < before)
