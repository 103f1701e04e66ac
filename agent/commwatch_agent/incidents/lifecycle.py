"""From conditions to incidents: how they open, get worse, end and come back; the same for all rules. Pure: times are parameters.

A condition belongs to the incident with its key, or begins one. Each rule of the table that holds for it is an alert of the incident,
which fires once it has held for ``for``, and stays for ``keep_firing_for``. Times are by a clock that is not set while the agent runs,
so setting the wall clock neither opens nor ends anything.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from commwatch_agent.incidents.cut_off import LAST_LOOK_S
from commwatch_agent.incidents.incident import (
    BY_CTRL_C,
    JOB_ENDED,
    LOST,
    ONE_WAIT,
    RECOVERED,
    STANDING,
    STANDSTILLS,
    AlertState,
    Condition,
    Incident,
    incident_id,
    is_known,
    with_new,
)
from commwatch_agent.incidents.words import what_to_do, why_late
from commwatch_agent.ingest.stragglers import COSTS
from commwatch_agent.text.units import IN_TEXTS
from commwatch_alerts.model import INFO, SEVERITIES, Kind, Rule
from commwatch_alerts.text import render
from commwatch_collectors.spans import ranks as named

#: One that comes back so many seconds after its end goes on.
COMES_BACK_S = 60.0
#: A condition that is not found for a shorter time counts as found, because samples are apart.
GAP_S = 15.0
#: A fault of steps that was not there for so long before the end of its run had ended before: a job saves its results after its last step.
_LAST_STEPS_S = 5.0
#: A late rank that is on time again was only a passing one if the others have waited for it for less than this share of that many seconds, or of
#: the time until then if that is longer: in a healthy job, one is as late now and then.
_PASSING, _PASSING_OF_S = COSTS / 2, 60.0
#: A loss that ended its job so many seconds ago is no news: the agent did not run then.
_NEWS_S = 300.0
#: An alert that begins to fire as its job ends fires for so long: Alertmanager sends nothing that ends while it groups.
_FIRES_ON_S = 60.0
#: Most items of evidence, and most alerts, of an incident.
MOST_EVIDENCE, MOST_ALERTS = 24, 16
#: Begins that differ by less are the same: each look measures an age again.
_EQUAL_S = 1.0


@dataclass(frozen=True)
class Table:
    """The kinds of incidents, and the rules of each that an agent uses."""

    kinds: Mapping[str, Kind]
    #: Alerts by kind.
    rows: Mapping[str, Sequence[Rule]]
    #: By name.
    thresholds: Mapping[str, float] = field(default_factory=dict)
    #: Returns the URL of the runbook, given the name of a rule.
    runbook_url: Callable[[str], str] = lambda name: ""


@dataclass(frozen=True)
class Around:
    """What surrounds the conditions of one moment."""

    #: Unix time in s, by a clock that is not set while the agent runs.
    now: float
    #: Keys (``Condition.run``, else the name) of the runs whose ranks have all ended.
    ended_runs: Collection[str] = ()
    #: What all nodes know a run by, by its key on this node; runs that are missing are known by their name.
    common: Mapping[str, str] = field(default_factory=dict)
    #: Name of this host, and the label ``instance`` of what this agent says of it.
    host: str = ""
    instance: str = ""
    #: What people know a job by besides its name, by that: ``alice, train.py``.
    owners: Mapping[str, str] = field(default_factory=dict)
    #: Whether all sources have been looked at: otherwise a condition that is not found may still hold.
    is_settled: bool = True
    #: Since when this agent has looked, in Unix time: before that, a condition may have held that it did not find.
    looks_since: float = float("-inf")
    #: Labels that all alerts have besides their own.
    labels: Mapping[str, str] = field(default_factory=dict)


def advanced(
    conditions: Iterable[Condition], known: Iterable[Incident], table: Table, around: Around
) -> list[Incident]:
    """Return the incidents after this moment: pending, open and ended ones.

    Args:
        conditions: all that hold now.
        known: as returned for the moment before. Ended ones serve to number later ones with their key.
    """
    found: dict[tuple[str, ...], list[Condition]] = {}
    latest = {each.key: each for each in sorted(known, key=lambda each: each.number)}
    # Logs of a job outlive what is known of its run.
    runs = {(each.job_id, *each.key[1:]): each.run for each in latest.values() if each.ended_at is not None}
    for condition in conditions:
        if condition.kind in table.kinds and table.kinds[condition.kind].enabled:
            run = condition.run or runs.get((condition.job_id, *condition.key[1:]), "")
            of_run = condition if run == condition.run else replace(condition, run=run)
            found.setdefault(of_run.key, []).append(of_run)
    earlier = [each for each in known if latest[each.key] is not each]
    after = [_unseen(incident, table, around) for key, incident in latest.items() if key not in found]
    for key, of_key in found.items():
        before = latest.get(key)
        if before is not None and before.ended_at is None and _is_another(of_key, before, around.now):
            before = ended(before, before.last_at, RECOVERED)
        seen = _seen(before, of_key, table, around)
        is_earlier = before is not None and before.ended_at is not None and (seen is None or before.id != seen.id)
        earlier += [before] if before is not None and is_earlier else []
        after.append(seen)
    return [*(_over(each, table, around.now) for each in earlier), *(each for each in after if each is not None)]


# -- conditions that hold ---------------------------------------------------------------------------


def _seen(known: Incident | None, conditions: list[Condition], table: Table, around: Around) -> Incident | None:
    """Return an incident whose conditions hold; ``None``: its run ended before it was open."""
    if known is None or known.ended_at is not None:
        conditions = [each for each in conditions if each.variant != BY_CTRL_C]
        if not conditions:
            return known and _over(known, table, around.now)
    main = max(conditions, key=lambda each: _weight(each, table))
    run_is_over = (main.run or main.job_id) in around.ended_runs
    if known is not None and known.ended_at is not None:
        is_another = _is_another(conditions, known, around.now)
        if (run_is_over or _is_of_the_past(conditions, known)) and not is_another:
            return _over(known, table, around.now)
        if around.now - known.ended_at <= COMES_BACK_S and not is_another:
            known = replace(known, state="open", ended_at=None, outcome=None)
    incident = (
        _begun(main, known, around) if known is None or known.ended_at is not None else _continued(known, main, around)
    )
    kind, alerts = table.kinds[incident.kind], _alerts(incident, conditions, table, around)
    fires = any(each.fired_at is not None for each in alerts)
    has_held = fires if kind.opens_after_s is None else around.now - incident.seen_at >= kind.opens_after_s
    is_open = incident.state == "open" or has_held
    if run_is_over and not is_open:
        return None
    evidence = with_new(incident.evidence, (item for each in conditions for item in each.evidence))
    incident = replace(
        incident,
        state="open" if is_open else "pending",
        alerts=alerts,
        severity=_severity(incident, alerts, _without_alert(main, kind, table)),
        evidence=tuple(evidence[: max(MOST_EVIDENCE, len(incident.evidence))]),
    )
    return ended(incident, around.now, JOB_ENDED) if run_is_over else incident


def _is_another(conditions: Iterable[Condition], known: Incident, now: float) -> bool:
    """Return whether a rank was lost after an earlier loss of it was last seen: its launcher had started it again.

    A loss that begins now has no known time: a rank counts as lost only some time after its end.
    """
    since = known.last_at + _EQUAL_S
    return known.kind == "rank_lost" and all(since < each.began_at < now for each in conditions)


def _is_of_the_past(conditions: Iterable[Condition], known: Incident) -> bool:
    """Return whether conditions show only what an incident has that ended with its job, whose launcher has started it again."""
    shown = (item for each in conditions for item in each.evidence)
    return known.kind in STANDING and known.outcome == JOB_ENDED and is_known(known.evidence, shown)


def _weight(condition: Condition, table: Table) -> tuple[int, int]:
    """Return a key by which, of several conditions of one incident, the one that says most is the largest."""
    severities = [SEVERITIES.index(rule.severity) for rule in _rules_of(condition, table)]
    return _rank_of(condition.kind), max(severities, default=-1)


def _rank_of(kind: str) -> int:
    return ONE_WAIT.index(kind) if kind in ONE_WAIT else 0


def _rules_of(condition: Condition, table: Table) -> list[Rule]:
    """Return the rules of the table that hold for a condition; nothing can end one that is final, so it has reached any age."""
    value = math.inf if condition.is_final else condition.value
    return [rule for rule in table.rows.get(condition.kind, ()) if rule.holds(condition.variant, value)]


def _begun(condition: Condition, earlier: Incident | None, around: Around) -> Incident:
    run, number = around.common.get(condition.run) or condition.job_id or around.host, 0
    number = 0 if earlier is None else earlier.number + 1
    began_at = min(condition.began_at, around.now)
    return Incident(
        id=incident_id(run, condition.kind, condition.subject, number),
        kind=condition.kind,
        severity=SEVERITIES[0],
        state="pending",
        job_id=condition.job_id,
        run=condition.run,
        subject=condition.subject,
        began_at=began_at,
        seen_at=around.now,
        last_at=around.now,
        number=number,
        until=condition.last_at,
        cost_rank_s=None
        if condition.idle_ranks is None
        else condition.idle_ranks * (_last_at(condition, around.now) - began_at),
        **_facts(condition, around),
    )


def _continued(known: Incident, condition: Condition, around: Around) -> Incident:
    cost = known.cost_rank_s
    if condition.idle_ranks is not None:
        earlier_s = known.began_at - condition.began_at
        passed_s = _passed_s(known, condition, around.now) + (earlier_s if earlier_s > _EQUAL_S else 0.0)
        cost = (cost or 0.0) + condition.idle_ranks * passed_s
    until = _last_at(condition, around.now)
    is_new = condition.last_at is None or known.until is None or condition.last_at > known.until
    known = replace(
        known,
        last_at=around.now,
        holds=around.now - until < GAP_S,
        until=condition.last_at if is_new else known.until,
        cost_rank_s=cost,
        job_id=condition.job_id,
    )
    if not is_new or _rank_of(condition.kind) < _rank_of(known.kind) or _is_later(condition, known):
        return known  # what was known stays true
    facts = _facts(condition, around)
    if not condition.ranks:
        facts = {**facts, "ranks": known.ranks}
    is_earlier = known.began_at - condition.began_at > _EQUAL_S
    began_at = condition.began_at if is_earlier else known.began_at
    return replace(known, kind=condition.kind, began_at=began_at, **facts)


def _passed_s(known: Incident, condition: Condition, now: float) -> float:
    """Return for how much of the time since an incident was last found its condition holds, in s."""
    if condition.last_at is not None:
        return max(0.0, condition.last_at - max(condition.began_at, known.there_until))
    since_s = now - known.last_at
    if condition.began_at >= now:  # when it began is not known
        return since_s if 0 < since_s <= GAP_S else 0.0
    return max(0.0, min(since_s, now - condition.began_at))


def _last_at(condition: Condition, now: float) -> float:
    """Return when a condition last held."""
    return now if condition.last_at is None else min(condition.last_at, now)


def _is_later(condition: Condition, known: Incident) -> bool:
    """Return whether ranks were lost after a wait was known: those that waited, or the culprit of a hang; their loss is an incident of its own.

    Ranks that Ctrl-C ended say nothing of the wait.
    """
    if condition.variant == BY_CTRL_C:
        return True
    if condition.cause not in LOST or not known.ranks:
        return False
    had_hung = known.kind == "hang" and known.cause not in LOST
    return had_hung or bool(set(condition.ranks) & set(known.waiting))


def _facts(condition: Condition, around: Around) -> dict[str, Any]:
    """Return the fields of an incident that are those of its latest condition."""
    return {
        "cause": condition.cause,
        "says": condition.says,
        "ranks": condition.ranks,
        "waiting": condition.waiting,
        "nodes": condition.nodes or (around.host,),
        "group_id": condition.group_id,
        "group": condition.group,
        "op": condition.op,
        "seq": condition.seq,
        "share": condition.share,
        "details": condition.details,
    }


def _without_alert(condition: Condition, kind: Kind, table: Table) -> str:
    """Return the severity of an incident while none of its alerts fires: that of its kind, or the worst of its variant's alerts if that is milder."""
    of_variant = [rule.severity for rule in table.rows.get(kind.name, ()) if rule.variant == condition.variant]
    return min([kind.severity, max(of_variant or [kind.severity], key=SEVERITIES.index)], key=SEVERITIES.index)


def _severity(incident: Incident, alerts: Iterable[AlertState], otherwise: str) -> str:
    """Return the severity of the worst alert that fires, at least the one that an open incident had."""
    firing = [each.severity for each in alerts if each.fired_at is not None and each.resolved_at is None]
    reached = [incident.severity] if incident.state == "open" else []
    return max([*(firing or [otherwise]), *reached], key=SEVERITIES.index)


# -- conditions that are gone ----------------------------------------------------------------------


def _unseen(incident: Incident, table: Table, around: Around) -> Incident | None:
    """Return an incident of which no condition holds; ``None``: it is dropped."""
    if incident.ended_at is not None:
        return _over(incident, table, around.now)
    if (incident.run or incident.job_id) in around.ended_runs:
        return None if incident.state == "pending" else _ended_with_its_run(incident, around)
    if not around.is_settled:
        return incident
    kind = table.kinds.get(incident.kind)
    if incident.state == "pending":
        return incident if around.now - incident.last_at < GAP_S else None
    rules = {(rule.name, rule.severity): rule for rule in table.rows.get(incident.kind, ())}
    alerts = tuple(_without(incident.alerts, rules, around.now))
    firing = any(each.fired_at is not None and each.resolved_at is None for each in alerts)
    ends_after_s = 0.0 if kind is None or not kind.enabled else kind.ends_after_s
    unseen_s = around.now - incident.last_at
    if unseen_s >= ends_after_s and not firing:
        return ended(replace(incident, alerts=alerts), incident.there_until, RECOVERED)
    return replace(incident, alerts=alerts, holds=incident.holds and unseen_s < GAP_S)


def _ended_with_its_run(incident: Incident, around: Around) -> Incident:
    """Return an incident that ends with its run, or that had recovered before; the agent may have been away when the run ended."""
    unseen_s = around.now - incident.last_at
    was_watched = incident.last_at >= around.looks_since
    had_ended = incident.kind == "waiting" or (was_watched if unseen_s >= GAP_S else incident.kind in STANDSTILLS)
    is_sure = around.is_settled or (was_watched and unseen_s >= GAP_S)
    if is_sure and had_ended and unseen_s > LAST_LOOK_S:
        return ended(incident, incident.there_until, RECOVERED)
    if incident.until is not None and around.now - incident.until > _LAST_STEPS_S:
        return ended(incident, incident.until, RECOVERED)
    return ended(incident, around.now if unseen_s < GAP_S else incident.last_at, JOB_ENDED)


def ended(incident: Incident, at: float, outcome: str) -> Incident:
    """Return an incident that ends, and its alerts with it; those that begin to fire as their job ends fire on for a while (``_over``)."""
    alerts = tuple(
        each
        if each.resolved_at is not None or (outcome == JOB_ENDED and each.fired_at >= at)
        else replace(each, resolved_at=max(at, each.seen_at))
        for each in incident.alerts
        if each.fired_at is not None
    )
    ended_at = max(at, incident.began_at)
    after = replace(incident, state="ended", holds=False, ended_at=ended_at, outcome=outcome, alerts=alerts)
    return replace(after, severity=INFO) if _was_passing(after) else after


def _was_passing(incident: Incident) -> bool:
    """Return whether a rank was late for a moment only, and recovered before any notification was sent."""
    if incident.kind != "straggler" or incident.outcome != RECOVERED or incident.alerts or not incident.waiting:
        return False
    lasted_s = (incident.ended_at or 0.0) - incident.began_at
    return (incident.cost_rank_s or math.inf) / len(incident.waiting) < _PASSING * max(_PASSING_OF_S, lasted_s)


def _over(incident: Incident, table: Table, now: float) -> Incident:
    """Return an ended incident; its last alerts end once they have fired for a while."""
    if incident.is_closed:
        return incident
    kind = table.kinds.get(incident.kind)
    fires_on_s = _FIRES_ON_S if kind is not None and kind.enabled else 0.0
    if incident.ended_at is None or 0 <= now - incident.ended_at < fires_on_s:
        return incident
    alerts = (each if each.resolved_at is not None else replace(each, resolved_at=now) for each in incident.alerts)
    return replace(incident, alerts=tuple(alerts))


# -- alerts ----------------------------------------------------------------------------------------


def _alerts(
    incident: Incident, conditions: Iterable[Condition], table: Table, around: Around
) -> tuple[AlertState, ...]:
    """Return the alerts of an incident whose conditions hold.

    A condition that says less than what the incident is known for, as after a restart of the agent, raises none: what was known stays true.
    """
    saying = [each for each in conditions if _rank_of(each.kind) >= _rank_of(incident.kind)]
    holding = {
        (rule.name, rule.severity): (rule, condition) for condition in saying for rule in _rules_of(condition, table)
    }
    active = {(each.name, each.severity): each for each in incident.alerts if each.resolved_at is None}
    if not saying:
        own = {(rule.name, rule.severity): rule for rule in table.rows.get(incident.kind, ())}
        active = {at: _going_on(each, own[at], around.now) if at in own else each for at, each in active.items()}
    rules = {(rule.name, rule.severity): rule for of_kind in table.rows.values() for rule in of_kind}
    after = [each for each in incident.alerts if each.resolved_at is not None]
    after += _without([each for at, each in active.items() if at not in holding], rules, around.now)
    cause = why_late(incident.details) or incident.cause
    for at, (rule, condition) in holding.items():
        state = _held(active.get(at), rule, condition, around)
        about = {
            "runbook_url": table.runbook_url(rule.name),
            "incident": incident.id,
            "where": _where(incident, around),
            "remedy": what_to_do(incident.kind, cause, incident.job_id, incident.evidence, is_over=False),
        }
        after.append(replace(state, annotations={**state.annotations, **about}))
    return tuple(after[-MOST_ALERTS:])


def _going_on(state: AlertState, rule: Rule, now: float) -> AlertState:
    """Return the state of an alert whose incident lasts, while less is known of it."""
    fires = state.fired_at is None and now - state.active_at >= rule.for_s
    return replace(state, seen_at=now, fired_at=now if fires else state.fired_at)


def _where(incident: Incident, around: Around) -> str:
    """Return whom an incident is about, for people: job, user, script, nodes and ranks."""
    owner = around.owners.get(incident.job_id, "")
    parts = [f"Job {incident.job_id}{f' ({owner})' if owner else ''}"] if incident.job_id else []
    parts += (
        [f"{'node' if len(incident.nodes) == 1 else 'nodes'} {', '.join(incident.nodes)}"]
        if any(incident.nodes)
        else []
    )
    parts += [named(list(incident.ranks))] if incident.ranks else []
    parts += [f"{named(list(incident.waiting))} waiting"] if incident.waiting else []
    text = ", ".join(parts)
    return f"{text[:1].upper()}{text[1:]}." if text else ""


def _held(known: AlertState | None, rule: Rule, condition: Condition, around: Around) -> AlertState:
    """Return the state of an alert whose condition holds."""
    state = AlertState(rule.name, rule.severity, around.now) if known is None else known
    labels = labels_of(condition, rule, around)
    is_final = condition.is_final and rule.severity != INFO and around.now - condition.began_at < _NEWS_S
    fires = state.fired_at is None and (is_final or around.now - state.active_at >= rule.for_s)
    texts = {
        name: render(text, {**labels, **condition.words}, condition.value, condition.numbers, IN_TEXTS)
        for name, text in (("summary", rule.summary), ("description", rule.description))
    }
    return replace(
        state,
        fired_at=around.now if fires else state.fired_at,
        seen_at=around.now,
        value=condition.value,
        labels=labels if state.fired_at is None else state.labels,
        annotations={**texts, "cause": condition.says},
    )


def labels_of(condition: Condition, rule: Rule, around: Around) -> dict[str, str]:
    """Return the labels of an alert."""
    of_job = (
        {"job_id": condition.job_id, "group": condition.group} if condition.job_id else {"instance": around.instance}
    )
    rank = {"rank": str(condition.ranks[0])} if len(condition.ranks) == 1 else {}
    labels = {**around.labels, **of_job, **rank, **condition.labels, "alertname": rule.name, "severity": rule.severity}
    return {name: value for name, value in labels.items() if value}


def _without(alerts: Iterable[AlertState], rules: Mapping[tuple[str, str], Rule], now: float) -> Iterator[AlertState]:
    """Yield the states of alerts whose conditions do not hold."""
    for each in alerts:
        rule = rules.get((each.name, each.severity))
        keep_s = 0.0 if rule is None else GAP_S if each.fired_at is None else max(GAP_S, rule.keep_firing_for_s)
        if each.resolved_at is not None or now - each.seen_at < keep_s:
            yield each
        elif each.fired_at is not None:
            yield replace(each, resolved_at=now)
