"""What differs between two runs: figures with confidence intervals, operations, settings. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

from commwatch_agent.compare.bootstrap import (
    Change,
    Samples,
    Shift,
    Sums,
    change_of_quantile,
    change_of_ratio,
    quantile,
    ratio,
)
from commwatch_agent.compare.incidents import IncidentChange, changes_of
from commwatch_agent.compare.kinds import Kind, KindSamples
from commwatch_agent.compare.runs import LEAST_STEPS, Run
from commwatch_agent.model.views import JobView
from commwatch_agent.text.units import size

#: Smaller relative changes are not called a difference, nor are smaller differences of shares: two runs of one job differ by as much, and
#: the steps of one run cannot show how much its runs differ.
LEAST_CHANGE, LEAST_POINTS = 0.02, 0.01
#: Steps whose bytes, or operations, differ by a smaller part are alike.
_SAME_WORK = 0.05
#: Name of the figure on main threads that wait for a CPU core.
CORE_WAIT = "core_wait"
#: Kinds that are compared: those with the most time.
_MOST_KINDS = 40


@dataclass(frozen=True)
class Figure:
    """One figure of both jobs. Times in seconds, bandwidths in bytes per second, shares 0 to 1; ``None``: not known."""

    name: str
    a: float | None
    b: float | None
    #: A relative change is ``b / a - 1``, another ``b - a``.
    relative: bool
    #: The change, and its interval; ``None``: not known, or too few samples for an interval.
    change: float | None
    low: float | None
    high: float | None
    #: The interval leaves out zero, and the change is large enough; ``None``: there is no interval.
    differs: bool | None


@dataclass(frozen=True)
class KindFigures:
    """The operations of one kind; ``None`` where one of the jobs has none."""

    group: str
    op: str
    #: Upper end of the size class in bytes; ``None``: no size.
    size: int | None
    #: How many there were in the steps that are compared.
    count_a: int
    count_b: int
    p50: Figure
    p99: Figure
    busbw: Figure


@dataclass(frozen=True)
class Side:
    """What is compared of one job."""

    job: JobView
    #: Steps that are compared, and those left out.
    steps: int
    warm_up: int
    long: int
    #: Where its speed changed amid these steps, ``at`` as the number of that step; ``None``: nowhere, or not known.
    shift: Shift | None = None


@dataclass(frozen=True)
class Comparison:
    """How job B differs from job A."""

    a: Side
    b: Side
    #: Step time (p50, p95, mean) and shares.
    figures: list[Figure]
    #: Why the figures have no intervals; empty if they have.
    too_few: str
    #: Most time first.
    kinds: list[KindFigures]
    #: Settings that differ, by name: of A and of B; empty: not set, or not known.
    settings: dict[str, tuple[str, str]]
    #: What is new first.
    incidents: list[IncidentChange] = field(default_factory=list)
    #: Why a step of A may not hold as much work as one of B; empty: nothing that was measured shows it.
    work: str = ""


def compare(a: Run, b: Run) -> Comparison:
    """Compare two runs."""
    few = [f"job {run.job.job_id}: {run.steps}" for run in (a, b) if not run.enough]
    enough = not few
    shares = ("comm_share", "exposed_share", "wait_share")
    # Operations of jobs without steps are in blocks of equal time.
    kinds = _kinds(a, b, enough or not (a.steps or b.steps))
    names = dict.fromkeys([*a.settings, *b.settings])
    settings = {name: (a.settings.get(name, ""), b.settings.get(name, "")) for name in names}
    return Comparison(
        _side(a),
        _side(b),
        [
            _quantile("step_p50", a.durations, b.durations, 0.5, enough),
            _quantile("step_p95", a.durations, b.durations, 0.95, enough),
            _ratio("step_mean", a.mean, b.mean, enough),
            *(_ratio(name, a.shares.get(name), b.shares.get(name), enough, relative=False) for name in shares),
            *_waits_for_cores(a.core_wait, b.core_wait),
        ],
        f"too few steps without warm-up and long ones ({', '.join(few)}); {LEAST_STEPS} are needed" if few else "",
        kinds,
        {name: pair for name, pair in settings.items() if pair[0] != pair[1]},
        changes_of((a.job, a.incidents), (b.job, b.incidents)),
        _work(a.per_step, b.per_step),
    )


def _waits_for_cores(a: float | None, b: float | None) -> list[Figure]:
    """Return the figure on main threads without a core, if it is known of a job."""
    return [] if a is None and b is None else [_figure(CORE_WAIT, a, b, None, relative=False)]


def _work(a: tuple[float, float], b: tuple[float, float]) -> str:
    """Return that steps may hold different amounts of work, by what a rank sends in a step: its bytes, or operations where these have none."""
    at = 1 if a[1] and b[1] else 0
    if not a[at] or not b[at] or abs(a[at] - b[at]) <= _SAME_WORK * max(a[at], b[at]):
        return ""
    each, of_b = (f"{number:.3g} operations with {size(total)}" for number, total in (a, b))
    return (
        f"A step of A has {each} per rank, one of B {of_b}: they may hold different amounts of work (accumulation, batch, model), "
        "so compare the time per sample, which is not recorded."
    )


def _kinds(a: Run, b: Run, enough: bool) -> list[KindFigures]:
    def seconds(kind: Kind) -> float:
        return sum(float(run.kinds[kind].durations.values.sum()) for run in (a, b) if kind in run.kinds)

    # As many as a run has only in its warm-up or in long steps cannot be compared, and are in both.
    both = {
        kind
        for one, other in ((a, b), (b, a))
        for kind, samples in one.kinds.items()
        if samples.count <= other.left_out.get(kind, 0)
    }
    kinds = sorted({*a.kinds, *b.kinds} - both, key=lambda kind: (-seconds(kind), str(kind)))
    return [_kind(kind, a.kinds.get(kind), b.kinds.get(kind), enough) for kind in kinds[:_MOST_KINDS]]


def _side(run: Run) -> Side:
    return Side(run.job, run.steps, run.warm_up, run.long, run.shift)


def _kind(kind: Kind, a: KindSamples | None, b: KindSamples | None, enough: bool) -> KindFigures:
    durations_a, bus_a, count_a = (a.durations, a.bus, a.count) if a is not None else (None, None, 0)
    durations_b, bus_b, count_b = (b.durations, b.bus, b.count) if b is not None else (None, None, 0)
    return KindFigures(
        kind.group,
        kind.op,
        kind.size,
        count_a,
        count_b,
        p50=_quantile("p50", durations_a, durations_b, 0.5, enough),
        p99=_quantile("p99", durations_a, durations_b, 0.99, enough),
        busbw=_ratio("busbw", bus_a, bus_b, enough),
    )


def _quantile(name: str, a: Samples | None, b: Samples | None, q: float, enough: bool) -> Figure:
    of_a, of_b = (None if run is None else quantile(run, q) for run in (a, b))
    change = change_of_quantile(a, b, q) if enough and a is not None and b is not None else None
    return _figure(name, of_a, of_b, change, relative=True)


def _ratio(name: str, a: Sums | None, b: Sums | None, enough: bool, *, relative: bool = True) -> Figure:
    of_a, of_b = (None if run is None else ratio(run) for run in (a, b))
    change = change_of_ratio(a, b, relative=relative) if enough and a is not None and b is not None else None
    return _figure(name, of_a, of_b, change, relative=relative)


def _figure(name: str, a: float | None, b: float | None, found: Change | None, *, relative: bool) -> Figure:
    if found is None:
        change = None if a is None or b is None or (relative and not a) else b / a - 1 if relative else b - a
        return Figure(name, a, b, relative, change, None, None, None)
    least = LEAST_CHANGE if relative else LEAST_POINTS
    differs = (found.low > 0 or found.high < 0) and abs(found.change) >= least
    return Figure(name, a, b, relative, *found, differs)
