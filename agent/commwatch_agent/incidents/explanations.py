"""Which incident explains which: a rank that died explains the hang of the others. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

from commwatch_agent.incidents.incident import JOB_ENDED, LOST, STANDSTILLS, WAITED_FOR, EvidenceItem, Incident
from commwatch_collectors.nccl.checks.order import CAUSE
from commwatch_collectors.nccl.checks.rules import RULES

#: An effect may be seen so many seconds before its cause, because they come from different sources.
_SOON_S = 30.0
#: Most by which two begins differ whose order is not known.
_AT_ONCE_S = 1.0
#: A wait that was last seen so many seconds before another incident began is no consequence of it.
_BEFORE_S = 5.0
#: Errors in logs that are causes of failures, and those that are noticed later.
_CAUSES = frozenset(rule.name for rule in RULES if rule.severity == "error" and rule.depth == CAUSE)
_SYMPTOMS = frozenset(rule.name for rule in RULES if rule.severity == "error") - _CAUSES
#: Findings in logs that are time-outs of waits.
_TIME_OUTS = frozenset({"watchdog_timeout", "barrier_failed", "init_incomplete"})


def _absent(cause: Incident, effect: Incident) -> bool:
    """Return whether the culprits of a wait are those of the cause, or are not known."""
    return not effect.ranks or bool(set(cause.ranks) & set(effect.ranks))


def _took_part(cause: Incident, effect: Incident) -> bool:
    """Return whether a rank was in the operation of the cause before it died: backends abort if ranks disagree."""
    return set(effect.ranks) <= {*cause.ranks, *cause.waiting} and cause.began_at <= effect.began_at + _AT_ONCE_S


def _absent_when_lost(cause: Incident, effect: Incident) -> bool:
    """Return whether a rank that was lost explains a wait: not if the rank was already the culprit of a hang before it was lost."""
    return _absent(cause, effect) and not _had_hung(effect, cause)


def _had_hung(cause: Incident, effect: Incident) -> bool:
    """Return whether a wait was there before a rank was lost: the rank waited in it, or was the culprit of a hang, such as a stopped one."""
    lost = set(effect.ranks)
    if cause.seen_at < effect.began_at and lost <= set(cause.waiting):  # a time-out or a launcher has ended it
        return True
    items = [item for item in cause.evidence if item.data.get("kind") == "hang" and item.at < effect.began_at]
    return any(lost & set(_ranks_in(item)) and item.data.get("cause") not in LOST for item in items)


def _missed_a_rank(cause: Incident, effect: Incident) -> bool:
    """Return whether ranks were lost because an operation raised on them to which another rank did not come."""
    was_there = bool(effect.ranks) and set(effect.ranks) <= set(cause.waiting)
    return cause.cause in LOST and was_there and cause.began_at <= effect.began_at + _AT_ONCE_S


def _raised_without_it(cause: Incident, effect: Incident) -> bool:
    """Return whether an operation raised on a rank and so ended it, because another one had been lost that no operation had ended."""
    soon = cause.began_at <= effect.began_at + _AT_ONCE_S
    return _ended_in_operation(effect) and not _ended_in_operation(cause) and soon


def _ended_in_operation(incident: Incident) -> bool:
    return any(item.data.get("in_operation") is True for item in incident.evidence)


def _ranks_in(item: EvidenceItem) -> list[object]:
    return _listed(item.data.get("ranks"))


def _listed(found: object) -> list[object]:
    return list(found) if isinstance(found, list | tuple) else []


def _waits_there(cause: Incident, effect: Incident) -> bool:
    """Return whether the culprits of a wait wait in the one of the cause, or are its culprits."""
    return bool(effect.ranks) and set(effect.ranks) <= {*cause.waiting, *cause.ranks}


def _shows(cause: Incident, effect: Incident) -> bool:
    """Return whether of two errors in logs one is a cause, and the other what was noticed of it."""
    return cause.subject[0] in _CAUSES and effect.subject[0] in _SYMPTOMS


def _timed_out(cause: Incident, effect: Incident) -> bool:
    """Return whether an error in a log is the time-out of a wait that began before."""
    is_of_gloo = effect.subject[0] == "gloo_error" and "Timed out waiting" in effect.says
    return (effect.subject[0] in _TIME_OUTS or is_of_gloo) and cause.began_at <= effect.began_at


def _of_peers(cause: Incident, effect: Incident) -> bool:
    """Return whether an error in a log is that ranks have lost a peer."""
    return effect.subject[0] in ("peer_lost", "gloo_peer_lost")


def _of_one_that_left(cause: Incident, effect: Incident) -> bool:
    """Return whether an error in a log is that ranks have lost a peer, which had ended properly."""
    return cause.cause == "gone" and _of_peers(cause, effect)


def _of_disagreement(cause: Incident, effect: Incident) -> bool:
    """Return whether an error in a log is what a backend prints of calls that differ between ranks."""
    return effect.subject[0] in ("mismatch", "gloo_error")


def _always(cause: Incident, effect: Incident) -> bool:
    return True


def _most_of_it(cause: Incident, effect: Incident) -> bool:
    """Return whether waiting for late ranks or a slow link is at least half of a share of communication."""
    return bool(cause.share and effect.share) and 2 * (cause.share or 0.0) >= (effect.share or 0.0)


def _behind(cause: Incident, effect: Incident) -> bool:
    """Return whether ranks leave operations late because of a slow link, and so come late to the next ones."""
    behind = {rank for item in cause.evidence for rank in _listed(item.data.get("behind"))}
    return bool(effect.ranks) and behind >= set(effect.ranks)


#: Kind of the cause, kinds of the effects in the same job, and whether the cause explains the effect; the first that does counts.
_RULES: tuple[tuple[str, frozenset[str], Callable[[Incident, Incident], bool]], ...] = (
    ("desync", frozenset({"rank_lost"}), _took_part),
    ("hang", frozenset({"rank_lost"}), _had_hung),
    ("hang", frozenset({"rank_lost"}), _missed_a_rank),
    ("stalled", frozenset({"rank_lost"}), _had_hung),
    ("init_incomplete", frozenset({"rank_lost"}), _had_hung),
    ("rank_lost", frozenset({"rank_lost"}), _raised_without_it),
    ("rank_lost", WAITED_FOR, _absent_when_lost),
    ("desync", WAITED_FOR, _always),
    ("hang", frozenset({"stalled", "waiting"}), _always),
    ("stalled", frozenset({"waiting"}), _always),
    ("init_incomplete", frozenset({"hang", "stalled", "waiting"}), _waits_there),
    ("nccl_fault", frozenset({"nccl_fault"}), _shows),
    ("desync", frozenset({"nccl_fault"}), _of_disagreement),
    ("hang", frozenset({"nccl_fault"}), _of_one_that_left),
    ("rank_lost", frozenset({"nccl_fault"}), _of_peers),
    *((kind, frozenset({"nccl_fault"}), _timed_out) for kind in sorted(STANDSTILLS)),
    ("slow_link", frozenset({"straggler"}), _behind),
    ("slow_link", frozenset({"comm_bound", "exposed_comm", "bandwidth_low", "gpu_underused"}), _most_of_it),
    ("straggler", frozenset({"comm_bound", "exposed_comm", "bandwidth_low", "gpu_underused"}), _most_of_it),
    ("uneven_work", frozenset({"comm_bound", "exposed_comm", "bandwidth_low", "gpu_underused"}), _most_of_it),
    ("hang", frozenset({"comm_bound", "exposed_comm", "bandwidth_low", "gpu_underused"}), _always),
)
#: Kinds of incidents of a node that explain incidents of the jobs there.
_OF_NODES: tuple[tuple[str, frozenset[str], Callable[[Incident, Incident], bool]], ...] = (
    ("link_saturated", frozenset({"bandwidth_low"}), _always),
)


def explained(incidents: Iterable[Incident], now: float) -> list[Incident]:
    """Return incidents with the id of the one that explains them; a cause that was found stays, and those that ended before now keep none."""
    every = list(incidents)
    return [replace(each, consequence_of=each.consequence_of or _cause_of(each, every, now)) for each in every]


def _was_over(effect: Incident, cause: Incident) -> bool:
    """Return whether a wait was over before what might be its cause began."""
    return effect.kind in WAITED_FOR | STANDSTILLS and effect.last_at < cause.began_at - _BEFORE_S


def _is_read_later(cause: Incident, effect: Incident) -> bool:
    """Return whether an error in a log was read after its job had ended, and the cause with it."""
    ended_with_job = cause.outcome == JOB_ENDED and cause.ended_at is not None
    return ended_with_job and effect.kind == "nccl_fault" and effect.began_at - (cause.ended_at or 0.0) < _SOON_S


def _cause_of(effect: Incident, every: list[Incident], now: float) -> str | None:
    if (effect.ended_at is not None and effect.ended_at < now) or not effect.job_id:
        return None
    for rules, of_job in ((_RULES, True), (_OF_NODES, False)):
        for kind, effects, explains in rules:
            if effect.kind not in effects:
                continue
            causes = [
                each
                for each in every
                if each.kind == kind
                and each.id != effect.id
                and (each.run or each.job_id) == ((effect.run or effect.job_id) if of_job else "")
                and each.state != "pending"
                and (each.ended_at is None or each.ended_at > effect.began_at or _is_read_later(each, effect))
                and each.began_at <= effect.seen_at + _SOON_S
                and not _was_over(effect, each)
                and explains(each, effect)
            ]
            if causes:
                return min(causes, key=lambda each: each.began_at).id
    return None
