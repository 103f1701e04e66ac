"""Which incidents of two runs are new, gone, or cost more. Pure.

Runs differ in length, so costs are per hour of a run. Incidents of two runs are the same if kind and cause are, and the ranks at fault or, where none
is known, the group. The cause of a wait does not count: it is what the awaited ranks did at the moment of a look. Incidents that others explain are
left out: they change with their cause.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from commwatch_agent.incidents.incident import WAITED_FOR, Incident
from commwatch_agent.incidents.words import lasted_s, title
from commwatch_agent.model.views import JobView
from commwatch_alerts.model import INFO, SEVERITIES

#: How incidents differ, in the order in which they are shown.
NEW, WORSE, GONE, BETTER, SAME = "new", "worse", "gone", "better", "same"
_CHANGES = (NEW, WORSE, GONE, BETTER, SAME)
#: Smaller changes of a cost do not count: in relation to the larger one, and in rank seconds per hour.
_LEAST_RATIO, _LEAST_PER_HOUR = 0.2, 36.0
#: Kinds that happen at a moment.
_MOMENTS = ("rank_lost", "corruption")


@dataclass(frozen=True)
class IncidentSums:
    """All incidents of one run that are the same."""

    count: int
    #: Rank seconds per hour of the run; ``None``: not known.
    cost_per_hour: float | None
    #: Share of the run, 0 to 1, while they lasted; ``None``: their length means nothing.
    share: float | None


@dataclass(frozen=True)
class IncidentChange:
    """How often, for how long and at which cost two runs have had an incident; ``None``: never."""

    #: One of ``_CHANGES``.
    change: str
    title: str
    kind: str
    cause: str
    severity: str
    ranks: list[int]
    group: str
    #: The sentence of the latest one, of B if it has any.
    says: str
    a: IncidentSums | None
    b: IncidentSums | None

    @property
    def is_regression(self) -> bool:
        """Whether it is new or costs more, and is not for information only."""
        return self.change in (NEW, WORSE) and self.severity != INFO


def changes_of(a: tuple[JobView, Sequence[Incident]], b: tuple[JobView, Sequence[Incident]]) -> list[IncidentChange]:
    """Return the incidents of two runs, each given as its job and its incidents; what is new comes first, and the worst of it."""
    of_a, of_b = _by_key(a[1]), _by_key(b[1])
    found = [
        _change(of_a.get(key, []), of_b.get(key, []), _length_s(*a), _length_s(*b))
        for key in dict.fromkeys([*of_a, *of_b])
    ]
    return sorted(
        _with_causes(found),
        key=lambda each: (_CHANGES.index(each.change), -SEVERITIES.index(each.severity), each.title, each.cause),
    )


def _with_causes(found: Sequence[IncidentChange]) -> list[IncidentChange]:
    """Return incidents whose titles have the cause where they would be equal otherwise."""
    times = Counter(each.title for each in found)
    return [
        replace(each, title=f"{each.title} ({each.cause.replace('_', ' ')})")
        if times[each.title] > 1 and each.cause
        else each
        for each in found
    ]


def _by_key(incidents: Iterable[Incident]) -> dict[tuple[object, ...], list[Incident]]:
    found: dict[tuple[object, ...], list[Incident]] = {}
    for each in incidents:
        if each.consequence_of is None:
            cause = "" if each.kind in WAITED_FOR else each.cause
            found.setdefault((each.kind, cause, each.ranks or each.group), []).append(each)
    return found


def _length_s(job: JobView, incidents: Iterable[Incident]) -> float:
    """Return how long a run has lasted; ranks that hang record nothing, but their incidents go on."""
    ends = (each.last_at if each.ended_at is None else each.ended_at for each in incidents)
    return max(1.0, max([job.last_seen_at, *ends]) - job.started_at)


def _change(a: list[Incident], b: list[Incident], length_a_s: float, length_b_s: float) -> IncidentChange:
    last = max(b or a, key=lambda each: each.began_at)
    of_a, of_b = _sums(a, length_a_s), _sums(b, length_b_s)
    return IncidentChange(
        NEW if of_a is None else GONE if of_b is None else _compared(of_a, of_b),
        title(last.kind, last.ranks, last.cause, last.evidence)
        + (f" in {last.group}" if last.group and not last.ranks else ""),
        last.kind,
        last.cause,
        max((each.severity for each in b or a), key=SEVERITIES.index),
        list(last.ranks),
        last.group,
        last.says,
        of_a,
        of_b,
    )


def _sums(incidents: list[Incident], length_s: float) -> IncidentSums | None:
    if not incidents:
        return None
    costs = [each.cost_rank_s for each in incidents if each.cost_rank_s is not None]
    share = None if incidents[0].kind in _MOMENTS else min(1.0, sum(map(lasted_s, incidents)) / length_s)
    return IncidentSums(len(incidents), 3600 * sum(costs) / length_s if costs else None, share)


def _compared(a: IncidentSums, b: IncidentSums) -> str:
    before, after = a.cost_per_hour, b.cost_per_hour
    if before is None or after is None:
        before, after = 3600 * (a.share or 0.0), 3600 * (b.share or 0.0)
    if abs(after - before) < max(_LEAST_PER_HOUR, _LEAST_RATIO * max(before, after)):
        return SAME
    return WORSE if after > before else BETTER
