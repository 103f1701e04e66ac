"""Advice on a part of a job, with gains from a replay of its recorded steps where they can be replayed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial

from commwatch_agent.analysis.advice import advice_on
from commwatch_agent.analysis.advice_facts import NO_WHYS, Facts, Whys
from commwatch_agent.analysis.advice_input import count_last, facts
from commwatch_agent.analysis.network_advice import Network
from commwatch_agent.analysis.queries import QueryService
from commwatch_agent.analysis.waits.waiting_advice import on_cores
from commwatch_agent.incidents.answers import IncidentDetails
from commwatch_agent.model.api_views import Advice
from commwatch_agent.model.views import JobView, RankView
from commwatch_agent.report.parts import ReportParts
from commwatch_agent.whatif.advised import predicted
from commwatch_agent.whatif.model import Model
from commwatch_collectors.nccl.views import Finding

#: Returns the recorded steps of a job; ``None``: they cannot be replayed.
Recorded = Callable[[], Model | None]


def of_last_life(
    findings: Iterable[Finding], incidents: Iterable[IncidentDetails], ranks: Iterable[RankView]
) -> list[Finding]:
    """Return the findings in logs that may be of the present, or last, life of a job: not those that ended with an earlier one.

    Args:
        incidents: of the run.
        ranks: in their latest life.
    """
    began_at = max((rank.started_at or 0.0 for rank in ranks if rank.restart), default=0.0)
    before, after = set[object](), set[object]()
    for each in incidents:
        is_over = each.ended_at is not None and each.ended_at < began_at
        names = (item.data.get("finding") for item in each.evidence if each.kind == "nccl_fault")
        (before if is_over else after).update(names)
    return [finding for finding in findings if finding.name not in before - after]


def advice_on_end(
    agent: QueryService,
    job: JobView,
    findings: Iterable[Finding],
    known: Facts | None,
    last_s: float | None,
    *,
    late: Callable[[float], Mapping[int, float] | None],
    whys: Whys,
    recorded: Recorded,
    parts: ReportParts,
) -> tuple[list[Advice], float | None]:
    """Return the advice based on the job's last ``last_s`` seconds, and how many seconds these were; ``None``: the whole job.

    Args:
        known: the facts about the whole job.
        late: returns the late ranks since a Unix time in s, as in ``facts``.
        whys: as in ``facts``.
        recorded: as in ``lately``.
        parts: of the report.
    """
    latest = count_last(agent, job.job_id, last_s)
    began_at = latest.since_ns / 1e9
    whole = began_at <= job.started_at
    about = known if whole else facts(agent, job, latest, findings, late=late(began_at), whys=whys)
    advice = advice_on(about)
    found = parts.part("what-if", partial(predicted, advice, recorded), advice)
    return on_cores(about, found), None if whole else job.last_seen_at - began_at


def lately(
    agent: QueryService,
    job: JobView,
    findings: Iterable[Finding],
    last_s: float | None,
    *,
    network: Network,
    late: Callable[[float], Mapping[int, float] | None],
    whys: Whys = NO_WHYS,
    recorded: Recorded,
) -> list[Advice]:
    """Return advice based on the job's last ``last_s`` seconds, or with ``None`` on the whole job.

    Args:
        network: the state of the nodes' networks.
        late, whys: as in ``advice_on_end``.
        recorded: the steps in that time; called only if there is advice whose gain they can show.
    """
    latest = count_last(agent, job.job_id, last_s)
    known = late(max(latest.since_ns / 1e9, job.started_at))
    found = facts(agent, job, latest, findings, network=network, late=known, whys=whys)
    advice = advice_on(found)
    return on_cores(found, ReportParts().part("what-if", partial(predicted, advice, recorded), advice))
