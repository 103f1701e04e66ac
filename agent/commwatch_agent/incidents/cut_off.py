"""Standstills that the end of their job has cut off: they are certain, and their alerts do not wait. Pure."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator

from commwatch.wire import events as ev
from commwatch.wire.numbers import ahead
from commwatch_agent.incidents.evidence import Evidence
from commwatch_agent.incidents.incident import STANDSTILLS, Condition, EvidenceItem, Incident
from commwatch_agent.model.views import RankView
from commwatch_agent.text.units import seconds
from commwatch_collectors.spans import ranks as named

#: A standstill that was not found for so long before the end of its run had ended before: looks are a second apart.
LAST_LOOK_S = 3.0
#: What exceptions say of operations that time out, in Gloo, in NCCL's watchdog and in stores.
_TIMED_OUT = re.compile("time[- ]?(?:d )?out", re.IGNORECASE)


def cut_off(known: Iterable[Incident], evidence: Evidence, ended_runs: Collection[str]) -> Iterator[Condition]:
    """Yield the standstills in which ranks were when their job failed, for good.

    A stall is one if ranks ended because they had waited in it up to the time-out: then it is a hang. Otherwise its culprit might have come.

    Args:
        known: the incidents before this moment.
        ended_runs: as in ``Around``.
    """
    for each in known:
        if each.kind in STANDSTILLS and each.state == "open" and (each.run or each.job_id) in ended_runs:
            views = [view for view in evidence.ranks if view.job_id == each.job_id]
            timed_out = [view.rank for view in views if view.rank in each.waiting and _has_timed_out(view, each)]
            if timed_out or (each.kind != "stalled" and _lasted_to_the_end(each, views, evidence.now)):
                yield _for_good(each, timed_out, evidence.now)


def _lasted_to_the_end(incident: Incident, views: list[RankView], now: float) -> bool:
    """Return whether a job failed while its ranks were in a standstill, by the ranks that this agent knows."""
    here = [view for view in views if view.rank in (*incident.ranks, *incident.waiting)]
    has_failed = any(view.state == "gone" or view.raised for view in views)
    return has_failed and now - incident.last_at <= LAST_LOOK_S and not all(has_passed(view, incident) for view in here)


def _has_timed_out(view: RankView, incident: Incident) -> bool:
    """Return whether a rank ended because it had waited in the operation of an incident up to the time-out."""
    is_there = any(
        (each.group_id, each.seq) == (incident.group_id, incident.seq) for each in view.failed if each.is_latest
    )
    return is_there and bool(view.raised) and bool(_TIMED_OUT.search(view.raised_says or ""))


def _for_good(incident: Incident, timed_out: list[int], now: float) -> Condition:
    """Return the condition of a standstill that its job's end has cut off."""
    lasted_s = max(0.0, incident.last_at - incident.began_at)
    what = f"the wait of {named(timed_out)} timed out" if timed_out else "the job ended in it"
    return Condition(
        kind="hang" if incident.kind == "stalled" else incident.kind,
        subject=incident.subject,
        says=incident.says,
        began_at=incident.began_at,
        job_id=incident.job_id,
        run=incident.run,
        cause=incident.cause,
        is_final=True,
        value=lasted_s,
        ranks=incident.ranks,
        waiting=incident.waiting,
        nodes=incident.nodes,
        group_id=incident.group_id,
        group=incident.group,
        op=incident.op,
        seq=incident.seq,
        share=incident.share,
        details=incident.details,
        evidence=(EvidenceItem("ending", now, f"{what}, after {seconds(lasted_s)}", {"timed_out": timed_out}),),
    )


def has_passed(view: RankView, incident: Incident) -> bool:
    """Return whether a rank is known to have ended the collective of an incident: not where ends are not seen."""
    group, seq = incident.group_id, incident.seq
    last = None if group in view.launched_s else view.last_seq.get(group)
    if seq is None or last is None or incident.op in ev.P2P:
        return False
    is_inside = any(op.group_id == group and ahead(seq, op.seq) >= 0 and op.op not in ev.P2P for op in view.in_flight)
    return ahead(last, seq) >= 0 and not is_inside
