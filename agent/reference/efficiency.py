"""How fast operations are beside what they should be: expected time over measured time (DESIGN §4). Pure.

Measured is the *transfer*, the part of the durations that is not waiting for late ranks, where all ranks of a group are in sight;
elsewhere the whole duration, so that efficiency is a lower bound there. An expected time always names its reference. Without
one of the link itself, it is the job's own best: the curve through the fastest of its operations.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from commwatch.collectors.wire import events as ev
from commwatch.core.alpha_beta import Curve, Fit, fit
from commwatch.core.cells import Cell, Counted
from commwatch.core.sketch import quantile
from commwatch.reference.references import Measured, Modelled, Reference, References

#: The lower envelope: what so much of the transfers stay under. A size needs so many operations on each rank.
_ENVELOPE, _LEAST_SAMPLES = 0.05, 5
#: Where nearly all of an operation's collectives were joined, their waits are known.
_JOINED = 0.9
#: A worse fit is none.
_WORST_FIT = 0.35
#: Below this share of what the link can do, something is wrong with it.
BELOW_THE_LINK = 0.7

#: What to hold operations against: by label of the group, its backend, ranks and hosts, and the op.
Find = Callable[[str, str | None, int, int, str], Reference | None]


def finder(references: References | None) -> Find:
    """What looks references up, as they are now."""
    if references is None:
        return lambda *_: None
    references.refresh()
    return references.best


@dataclass(frozen=True)
class Efficiency:
    """The operations of one size class (a power of two) in one group, beside what they should take."""

    job_id: str
    group_id: str
    group: str
    group_size: int
    op: str
    #: Mean size S in bytes, and how many there were.
    size_bytes: float
    count: int
    #: ``transfer``, or ``duration`` where not all ranks of the group are in sight: waiting for late ranks is in it.
    measured: str
    measured_s: float
    expected_s: float
    #: Expected over measured.
    efficiency: float
    #: ``bench``, ``nccl_tests``, ``catalogue`` or ``own_best``; and its name.
    reference: str
    reference_name: str
    #: ``latency-bound``: larger operations would be more efficient; ``bandwidth-bound``: only fewer bytes or a faster link would
    #: help; ``below the link``: it should be faster on this link, whatever the size. ``None``: not known.
    verdict: str | None


@dataclass(frozen=True)
class Line:
    """The α-β curve through the fastest operations of one kind in one group: T = a(n)·α + b(n)·S/bandwidth."""

    job_id: str
    group_id: str
    group: str
    group_size: int
    op: str
    alpha_s: float
    #: Bus bandwidth of large operations, in bytes per second; ``None``: size made no difference.
    bandwidth: float | None
    #: Root mean square of the relative deviations of the measured times.
    error: float
    #: Sizes it was drawn through.
    sizes: int
    smallest_bytes: int
    largest_bytes: int


@dataclass
class _Pool:
    """The cells of all ranks of one group, operation and size class."""

    one: Counted
    sums: Cell = field(default_factory=Cell)
    ranks: set[int] = field(default_factory=set)

    @property
    def timed(self) -> int:
        return self.sums.count - self.sums.untimed

    @property
    def mean_size(self) -> float:
        return self.sums.timed_bytes / self.timed

    @property
    def joined(self) -> bool:
        return self.sums.joined >= _JOINED * self.timed

    @property
    def measured_s(self) -> float:
        """Mean transfer, or duration where that is not known."""
        waits = self.sums.wait_ns if self.joined else 0
        return (self.sums.duration_ns - waits) / self.timed / 1e9

    @property
    def fastest_s(self) -> float | None:
        """The lower envelope. The rank that is last has no wait: of n ranks' durations the n-th part are pure transfers."""
        if not self.joined or self.timed < _LEAST_SAMPLES * len(self.ranks):
            return None
        lowest = quantile(self.sums.bins, _ENVELOPE / len(self.ranks))
        return None if lowest is None else lowest / 1e9


def _pools(cells: Iterable[Counted]) -> list[_Pool]:
    pools: dict[tuple[str, str, str, int], _Pool] = {}
    for item in cells:
        if item.size is not None and item.group_size > 1:
            pool = pools.setdefault((item.job_id, item.group_id, item.op, item.size), _Pool(item))
            pool.sums.add(item.cell)
            pool.ranks.add(item.rank)
    return [pool for pool in pools.values() if pool.timed and pool.sums.duration_ns]


def lines(cells: Iterable[Counted]) -> dict[tuple[str, str, str], Line]:
    """The curves of the symmetric operations, by job, group_id and op; none where the sizes are too few or the fit is poor."""
    points: dict[tuple[str, str, str], dict[int, float]] = {}
    about: dict[tuple[str, str, str], Counted] = {}
    for pool in _pools(cells):
        fastest = pool.fastest_s if pool.one.op in ev.SYMMETRIC else None
        if fastest is not None:
            key = pool.one.job_id, pool.one.group_id, pool.one.op
            points.setdefault(key, {})[round(pool.mean_size)] = fastest
            about[key] = pool.one
    found = {}
    for key, times in points.items():
        fitted = fit(key[2], about[key].group_size, times)
        if fitted is not None and fitted.error < _WORST_FIT:
            found[key] = _line(about[key], fitted)
    return found


def _line(one: Counted, fitted: Fit) -> Line:
    curve = fitted.curve
    about = (one.job_id, one.group_id, one.group, one.group_size, one.op)
    sizes = (fitted.sizes, fitted.smallest_bytes, fitted.largest_bytes)
    return Line(*about, curve.alpha_s, curve.bandwidth, fitted.error, *sizes)


def own_best(line: Line) -> Modelled:
    """What a job has shown that it can do."""
    return Modelled("own_best", line.op, Curve(line.alpha_s, 0.0 if line.bandwidth is None else 1 / line.bandwidth))


class Yardstick:
    """What to hold the operations of jobs against: a reference of the link, else the job's own curve.

    Args:
        cells: all that is known of the jobs: what they have shown to be able to do, and which ranks of a group are here.
        find: references of the link.
    """

    def __init__(self, cells: Iterable[Counted], find: Find) -> None:
        cells = list(cells)
        self.lines = lines(cells)
        self._find = find
        self._ranks: dict[tuple[str, str], set[int]] = {}
        for one in cells:
            self._ranks.setdefault((one.job_id, one.group_id), set()).add(one.rank)
        self._known: dict[tuple[str, str, str], Reference | None] = {}

    def reference(self, one: Counted) -> Reference | None:
        """That of an operation of a group."""
        key = one.job_id, one.group_id, one.op
        if key not in self._known:
            # Symmetric operations need all ranks of a group: one that is not here is on another host.
            hosts = 1 if len(self._ranks.get(key[:2], ())) == one.group_size else 2
            line = self.lines.get(key)
            own = own_best(line) if line is not None else None
            self._known[key] = self._find(one.group, one.backend, one.group_size, hosts, one.op) or own
        return self._known[key]

    def efficiencies(self, cells: Iterable[Counted]) -> list[Efficiency]:
        """Each group, operation and size class that has a reference, most time first."""
        found = []
        for pool in _pools(cells):
            reference = self.reference(pool.one)
            expected = None if reference is None else reference.time_s(pool.one.op, pool.one.group_size, pool.mean_size)
            if reference is not None and expected is not None and pool.measured_s > 0:
                found.append((pool, _efficiency(pool, reference, expected)))
        return [each for _, each in sorted(found, key=lambda item: -item[0].sums.busy_ns)]

    def overall(self, cells: Iterable[Counted]) -> tuple[float, str] | None:
        """Efficiency of all these operations together whose transfers are known, and the kind of reference; ``None``: not known, or of
        several kinds."""
        kinds = by_kind(self.efficiencies(cells))
        return next(((value, kind) for kind, value in kinds.items()), None) if len(kinds) == 1 else None


def _efficiency(pool: _Pool, reference: Reference, expected: float) -> Efficiency:
    one, efficiency = pool.one, expected / pool.measured_s
    return Efficiency(
        job_id=one.job_id,
        group_id=one.group_id,
        group=one.group,
        group_size=one.group_size,
        op=one.op,
        size_bytes=pool.mean_size,
        count=pool.timed,
        measured="transfer" if pool.joined else "duration",
        measured_s=pool.measured_s,
        expected_s=expected,
        efficiency=efficiency,
        reference=reference.kind,
        reference_name=reference.name,
        verdict=_verdict(pool, reference, efficiency, expected),
    )


def _verdict(pool: _Pool, reference: Reference, efficiency: float, expected: float) -> str | None:
    """What limits these operations. Of a link that is always slow the job's own best knows nothing, nor does a duration that
    holds waiting for late ranks."""
    if efficiency < BELOW_THE_LINK and reference.kind != "own_best" and pool.joined:
        return "below the link"
    curve = curve_of(reference, pool.one.op)
    if curve is None:
        return None
    latency = curve.latency_s(pool.one.op, pool.one.group_size)
    return "latency-bound" if latency > expected / 2 else "bandwidth-bound"


def curve_of(reference: Reference, op: str) -> Curve | None:
    """The α-β curve of a reference for an operation, if both are known."""
    if isinstance(reference, Measured):
        fitted = reference.fits.get(op) or reference.fits.get(Measured.STAND_IN)
        return None if fitted is None else fitted.curve
    return reference.curve if reference.alpha_known else None


def by_kind(found: Iterable[Efficiency]) -> dict[str, float]:
    """Efficiency by kind of reference: all expected time over all measured time, where that is transfer."""
    sums: dict[str, list[float]] = {}
    for each in found:
        if each.measured == "transfer":
            into = sums.setdefault(each.reference, [0.0, 0.0])
            into[0] += each.expected_s * each.count
            into[1] += each.measured_s * each.count
    return {kind: expected / measured for kind, (expected, measured) in sums.items()}
