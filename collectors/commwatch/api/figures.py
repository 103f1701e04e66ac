"""Flat figures of a job, for experiment trackers. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

#: A job that has no step after this many seconds may never have one.
_BEGIN_S = 60.0


def figures_of(moment: Mapping[str, Any], incidents: Iterable[Mapping[str, Any]] | None = None) -> dict[str, float]:
    """Return the known figures of a job.

    Args:
        moment: an answer of ``/api/v1/moment``.
        incidents: those that are or were open, as in an answer of ``/api/v1/incidents``; ``None``: not known.

    Returns:
        ``comm/share``, ``comm/exposed_share``: of the latest steps, 0 to 1. ``comm/wait_share``: of the last complete 10 s.
        ``comm/step_time``: in seconds. ``comm/busbw/OP``: bus bandwidth of the last complete 10 s, in GB/s, without operations before
        the first step.
        ``comm/straggler_rank``: the rank that costs the others most. ``comm/problems``: number of current verdicts.
        ``comm/incidents_open``: number of open incidents. ``comm/incidents/KIND``: number of all of that kind so far. ``comm/incident_cost``:
        rank seconds that incidents have cost, without those that another one explains.
    """
    job = moment.get("job")
    if job is None:
        return {}
    # The buckets are the last complete one and the one in progress.
    slot = job["slots"][0] if job["slots"] and not _begins(moment) else {"waiting": None, "busbw": {}}
    late = [verdict for verdict in job["verdicts"] if verdict["kind"] == "straggler" and verdict["ranks"]]
    costliest = max(late, key=lambda verdict: verdict["cost_share"] or 0.0, default=None)
    found = {
        "comm/share": job["comm"],
        "comm/exposed_share": job["exposed"],
        "comm/wait_share": slot["waiting"],
        "comm/step_time": job["step_s"],
        "comm/straggler_rank": None if costliest is None else costliest["ranks"][0],
        "comm/problems": len(job["verdicts"]),
        **{f"comm/busbw/{op}": rate / 1e9 for op, rate in slot["busbw"].items()},
        **({} if incidents is None else _of_incidents(list(incidents))),
    }
    return {name: float(value) for name, value in found.items() if value is not None}


def _begins(moment: Mapping[str, Any]) -> bool:
    """Return whether a job has only initial operations so far, such as the broadcast of the weights: they show nothing of training."""
    job = moment["job"]
    now, began = moment.get("at"), job.get("started_at")
    return job.get("step") is None and now is not None and began is not None and now - began < _BEGIN_S


def _of_incidents(incidents: list[Mapping[str, Any]]) -> dict[str, float | None]:
    costs = [each["cost_rank_s"] for each in incidents if not each["consequence_of"]]
    known = [cost for cost in costs if cost is not None]
    return {
        "comm/incidents_open": sum(each["state"] == "open" for each in incidents),
        "comm/incident_cost": None if costs and not known else sum(known),
        **{f"comm/incidents/{kind}": count for kind, count in Counter(each["kind"] for each in incidents).items()},
    }
