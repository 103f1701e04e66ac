"""Efficiency of operations: expected time / measured time (docs/references.md). Pure.

The measured time is the *transfer* (the duration without waiting for late ranks) where all ranks of a group are on this node;
elsewhere it is the whole duration, and the efficiency a lower bound. Each expected time names its reference. Without a reference
of the link, that is the job's own best: the curve through its fastest operations. The rated link of known GPUs only has expected times for
large operations; the others are compared with the job's own best.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from commwatch.wire import events as ev
from commwatch_agent.model.alpha_beta import Curve, Fit, fit
from commwatch_agent.model.cells import Cell, Counted
from commwatch_agent.model.sketch import merge, quantile
from commwatch_agent.reference.references import INCONCLUSIVE, Measured, Modelled, Reference, References

#: Quantile of the transfers that is the lower envelope. Least number of operations of one size on each rank.
_ENVELOPE, _LEAST_SAMPLES = 0.05, 5
#: Least share of joined collectives for which the waits count as known.
_JOINED = 0.9
#: Largest error of a usable fit.
_WORST_FIT = 0.35
#: Below this efficiency there is a problem with the link.
BELOW_THE_LINK = 0.7

#: Finds a reference by the group's label, its backend, number of ranks and of hosts, the op, and the most ranks on one host.
Find = Callable[[str, str | None, int, int, str, int], Reference | None]


def finder(references: References | None) -> Find:
    """Return a function that finds references, after reading changed files again."""
    if references is None:
        return lambda *_: None
    references.refresh()
    return references.best


def conclusive(find: Find) -> Find:
    """Return a function that finds only references of which incidents and alerts may conclude that a link is slow."""

    def found(*group: Any) -> Reference | None:
        reference = find(*group)
        return None if reference is None or reference.kind in INCONCLUSIVE else reference

    return found


@dataclass(frozen=True)
class Efficiency:
    """Measured and expected time of the operations of one size class (a power of two) in one group."""

    job_id: str
    group_id: str
    group: str
    group_size: int
    op: str
    #: Mean size S in bytes, and number of operations.
    size_bytes: float
    count: int
    #: ``transfer``, or ``duration`` (includes waiting for late ranks) where not all ranks of the group are on this node.
    measured: str
    measured_s: float
    expected_s: float
    #: Expected / measured time.
    efficiency: float
    #: Kind (``bench``, ``nccl_tests``, ``catalogue``, ``hardware`` or ``own_best``) and name of the reference.
    reference: str
    reference_name: str
    #: ``latency-bound``: larger operations would be more efficient; ``bandwidth-bound``: only fewer bytes or a faster link would
    #: help; ``below the link``: slower than this link allows at any size. ``None``: not known.
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
    #: Bus bandwidth of large operations, in bytes per second; ``None``: time does not depend on size.
    bandwidth: float | None
    #: Root mean square of the relative deviations of the measured times.
    error: float
    #: Number of sizes in the fit.
    sizes: int
    smallest_bytes: int
    largest_bytes: int


@dataclass
class _Pool:
    """The cells of all ranks of one group, operation and size class."""

    one: Counted
    #: Without a sketch.
    sums: Cell = field(default_factory=Cell)
    cells: list[Cell] = field(default_factory=list)
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
        """Mean transfer in seconds; mean duration where the transfer is not known."""
        waits = self.sums.wait_ns if self.joined else 0
        return (self.sums.duration_ns - waits) / self.timed / 1e9

    @property
    def fastest_s(self) -> float | None:
        """Lower envelope in seconds. The last rank does not wait, so of n ranks' durations 1/n are pure transfers."""
        if not self.joined or self.timed < _LEAST_SAMPLES * len(self.ranks):
            return None
        bins: dict[int, int] = {}
        for cell in self.cells:
            merge(bins, cell.bins)
        lowest = quantile(bins, _ENVELOPE / len(self.ranks))
        return None if lowest is None else lowest / 1e9


def _pools(cells: Iterable[Counted]) -> list[_Pool]:
    pools: dict[tuple[str, str, str, int], _Pool] = {}
    for item in cells:
        if item.size is not None and item.group_size > 1:
            pool = pools.setdefault((item.job_id, item.group_id, item.op, item.size), _Pool(item))
            pool.sums.add_sums(item.cell)
            pool.cells.append(item.cell)
            pool.ranks.add(item.rank)
    return [pool for pool in pools.values() if pool.timed and pool.sums.duration_ns]


def lines(cells: Iterable[Counted]) -> dict[tuple[str, str, str], Line]:
    """Return the curves of symmetric operations by (job, group_id, op), without those of too few sizes or a poor fit."""
    points: dict[tuple[str, str, str], dict[int, float]] = {}
    about: dict[tuple[str, str, str], Counted] = {}
    for pool in _pools(one for one in cells if one.op in ev.SYMMETRIC):
        fastest = pool.fastest_s
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


def expected(
    references: Iterable[Reference], op: str, group_size: int, size_bytes: float
) -> tuple[Reference, float] | None:
    """Return the first reference that has an expected time for an operation, and that time in s; ``None``: none has."""
    times = ((each, each.time_s(op, group_size, size_bytes)) for each in references)
    return next(((each, time) for each, time in times if time is not None), None)


def own_best(line: Line) -> Modelled:
    """Return the reference that a job's own curve gives."""
    return Modelled("own_best", line.op, Curve(line.alpha_s, 0.0 if line.bandwidth is None else 1 / line.bandwidth))


class Yardstick:
    """Compares operations with a reference of the link, else with the job's own curve.

    Args:
        cells: all known cells of the jobs, for the jobs' own curves and for the nodes of a group's ranks.
        find: finds references of the link.
    """

    def __init__(self, cells: Iterable[Counted], find: Find) -> None:
        cells = list(cells)
        self.lines = lines(cells)
        self._find = find
        #: By job and group: the node of each rank that has cells.
        self._nodes: dict[tuple[str, str], dict[int, int]] = {}
        for one in cells:
            self._nodes.setdefault((one.job_id, one.group_id), {})[one.rank] = one.node
        self._known: dict[tuple[str, str, str], list[Reference]] = {}

    def references(self, one: Counted) -> list[Reference]:
        """Return the references for an operation of a group, best first: that of the link, and the job's own best if it may lack a time."""
        key = one.job_id, one.group_id, one.op
        if key not in self._known:
            # Symmetric operations need all ranks of a group, so ranks without cells are on other hosts.
            nodes = self._nodes.get(key[:2], {})
            hosts = max(len(set(nodes.values())), 1 if len(nodes) == one.group_size else 2)
            line = self.lines.get(key)
            own = [] if line is None else [own_best(line)]
            here = max(Counter(nodes.values()).values(), default=0)
            found = self._find(one.group, one.backend, one.group_size, hosts, one.op, here)
            self._known[key] = [
                *([] if found is None else [found]),
                *(own if found is None or found.kind == "hardware" else []),
            ]
        return self._known[key]

    def efficiencies(self, cells: Iterable[Counted]) -> list[Efficiency]:
        """Return the efficiency of each group, operation and size class with a reference, most time first."""
        found = []
        for pool in _pools(cells):
            references = self.references(pool.one)
            by = expected(references, pool.one.op, pool.one.group_size, pool.mean_size)
            if by is not None and pool.measured_s > 0:
                found.append((pool, _efficiency(pool, *by, _verdict(pool, references))))
        return [each for _, each in sorted(found, key=lambda item: -item[0].sums.busy_ns)]

    def overall(self, cells: Iterable[Counted]) -> tuple[float, str] | None:
        """Return the efficiency over all operations with known transfers, and the kind of reference; ``None``: not known, or several
        kinds. Where the rated link of known GPUs has a time for some operations, only these count."""
        kinds = by_kind(self.efficiencies(cells))
        kinds = {"hardware": kinds["hardware"]} if "hardware" in kinds else kinds
        return next(((value, kind) for kind, value in kinds.items()), None) if len(kinds) == 1 else None


def _efficiency(pool: _Pool, reference: Reference, expected_s: float, verdict: str | None) -> Efficiency:
    one, efficiency = pool.one, expected_s / pool.measured_s
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
        expected_s=expected_s,
        efficiency=efficiency,
        reference=reference.kind,
        reference_name=reference.name,
        verdict=verdict,
    )


def _verdict(pool: _Pool, references: Iterable[Reference]) -> str | None:
    """Return what limits these operations, by the first reference that can tell. Inconclusive ones, and durations that include waiting, cannot
    show that a link is always slow."""
    for reference in references:
        time_s = reference.time_s(pool.one.op, pool.one.group_size, pool.mean_size)
        if time_s is not None and reference.kind != "hardware":
            return _limited_by(pool, reference, time_s)
    return None


def _limited_by(pool: _Pool, reference: Reference, expected_s: float) -> str | None:
    if expected_s / pool.measured_s < BELOW_THE_LINK and reference.kind not in INCONCLUSIVE and pool.joined:
        return "below the link"
    curve = curve_of(reference, pool.one.op)
    if curve is None:
        return None
    latency = curve.latency_s(pool.one.op, pool.one.group_size)
    return "latency-bound" if latency > expected_s / 2 else "bandwidth-bound"


def curve_of(reference: Reference, op: str) -> Curve | None:
    """Return the α-β curve of a reference for an operation; ``None`` unless α and β are known."""
    if isinstance(reference, Measured):
        fitted = reference.fits.get(op) or reference.fits.get(Measured.STAND_IN)
        return None if fitted is None else fitted.curve
    return reference.curve if reference.alpha_known else None


def by_kind(found: Iterable[Efficiency]) -> dict[str, float]:
    """Return the efficiency by kind of reference: sum of expected / sum of measured times, over known transfers."""
    sums: dict[str, list[float]] = {}
    for each in found:
        if each.measured == "transfer":
            into = sums.setdefault(each.reference, [0.0, 0.0])
            into[0] += each.expected_s * each.count
            into[1] += each.measured_s * each.count
    return {kind: expected / measured for kind, (expected, measured) in sums.items()}
