"""``commwatch diagnose``: what is wrong right now, on this node or on all nodes whose agents are named."""

from __future__ import annotations

import json
import urllib.parse
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, fields, replace
from typing import Any, NamedTuple, TypeVar

from commwatch.api.client import NO_KEYS, TOGETHER_S, Keys, get, reason, together
from commwatch.wire.errors import UsageError
from commwatch_agent.analysis.ended_operations import RankParts, most_collectives
from commwatch_agent.analysis.rank_state import shedding
from commwatch_agent.analysis.verdicts import Verdict
from commwatch_agent.core import terminal_text
from commwatch_agent.core.units import counted
from commwatch_agent.core.views import Ended, Failed, GroupView, InFlight, JobView, RankView
from commwatch_agent.nodes.merging import Seen, across_nodes, by_run, own_records
from commwatch_agent.nodes.replica_parts import RankChecks
from commwatch_agent.watchers.stack_capture import Evidence
from commwatch_collectors.spans import ranks

_T = TypeVar("_T")
_OfJob = TypeVar("_OfJob", RankView, GroupView, Verdict, RankParts, RankChecks)


class CannotDiagnose(UsageError):
    """There is no agent, none answers, or the job is unknown; the message names it."""


def with_peers(urls: list[str], keys: Keys = NO_KEYS) -> list[str]:
    """Return agents and the agents of other nodes that they know; ``ask`` reports those that do not answer."""

    def others(url: str) -> list[str]:
        return [str(peer["url"]) for peer in get(url, "peers", keys) if peer["state"] != "this agent"]

    known = [url for _, answer in _all(urls, others) if not isinstance(answer, str) for url in answer]
    return list(dict.fromkeys([*urls, *known]))


def ask(urls: list[str], job: str | None, keys: Keys = NO_KEYS) -> Seen:
    """Query all agents at once; then, again at once, those with cross-node groups for the collectives of these groups.

    Raises:
        CannotDiagnose: no agent answers, or those that answer do not know the job.
    """
    seen = Seen([], [], [], {})
    known: list[tuple[str, JobView]] = []
    for url, jobs in _all(urls, lambda url: [_view(JobView, each) for each in get(url, "jobs", keys)]):
        if isinstance(jobs, str):
            seen.silent[url] = jobs
        else:
            known += [(url, view) for view in jobs]
    # Nodes may give a run different names.
    names = {
        (url, view.job_id): name for name, parts in by_run(known, lambda part: part[1]).items() for url, view in parts
    }
    wanted: dict[str, list[str]] = {}
    for url, view in known:
        if view.state == "running" and job in (None, names[url, view.job_id]):
            wanted.setdefault(url, []).append(view.job_id)
    for url, views in _all(list(wanted), lambda url: _views(url, wanted[url], keys)):
        if isinstance(views, str):
            seen.silent[url] = views
            continue
        seen.ranks += [_named(names, url, view) for view in views.ranks]
        seen.groups += [_named(names, url, view) for view in views.groups]
        seen.reported += [_named(names, url, verdict) for verdict in views.reported]
    across = across_nodes(seen.groups)
    limit = most_collectives(sum(group.size for group in across))
    over_nodes = {group.job_id for group in across}
    again = {url: [each for each in jobs if names[url, each] in over_nodes] for url, jobs in wanted.items()}
    again = {url: jobs for url, jobs in again.items() if jobs and url not in seen.silent}
    for url, columns_of in _all(list(again), lambda url: _parts(url, again[url], limit, keys)):
        if isinstance(columns_of, str):
            seen.silent[url] = columns_of
        else:
            seen.parts += [_named(names, url, part) for part in columns_of[0]]
            seen.replicas += [_named(names, url, part) for part in columns_of[1]]
    if len(seen.silent) == len(urls):
        reasons = "; ".join(f"{url}: {why}" for url, why in seen.silent.items())
        raise CannotDiagnose(reasons or "no agent runs here; name one, or give its run directory with --dir")
    if job is not None and job not in names.values() and not seen.silent:
        raise CannotDiagnose(f"no job '{job}'")
    return seen


def _all(urls: list[str], question: Callable[[str], _T]) -> Iterator[tuple[str, _T | str]]:
    """Yield each URL with the agent's answer, or with the reason why there is none."""
    for url, answer in zip(urls, together(lambda url: _answer(question, url), urls), strict=True):
        yield url, f"no answer within {TOGETHER_S:.0f} s" if answer is None else answer


def _answer(question: Callable[[str], _T], url: str) -> _T | str:
    """Return the agent's answer, or the reason why there is none."""
    try:
        return question(url)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return reason(error)


class _Views(NamedTuple):
    """Ranks, groups, and the verdicts that need its own records, of jobs of one agent."""

    ranks: list[RankView]
    groups: list[GroupView]
    reported: list[Verdict]


def _views(url: str, jobs: list[str], keys: Keys) -> _Views:
    found = _Views([], [], [])
    for name in jobs:
        query = f"?job={urllib.parse.quote(name, safe='')}"
        for answer in get(url, f"ranks{query}", keys):
            kinds: dict[str, type[InFlight | Failed | Ended]] = {
                "in_flight": InFlight,
                "failed": Failed,
                "ended": Ended,
            }
            of_kinds = {name: [_view(kind, op) for op in answer.get(name, ())] for name, kind in kinds.items()}
            found.ranks.append(_view(RankView, answer | of_kinds))
        found.groups.extend(_view(GroupView, answer) for answer in get(url, f"groups{query}", keys))
        found.reported.extend(own_records(_view(Verdict, answer) for answer in get(url, f"verdicts{query}", keys)))
    return found


def _named(names: Mapping[tuple[str, str], str], url: str, view: _OfJob) -> _OfJob:
    """Return what an agent has answered with the name that its run has here."""
    return replace(view, job_id=names.get((url, view.job_id), view.job_id))


def _parts(url: str, jobs: list[str], limit: int, keys: Keys) -> tuple[list[RankParts], list[RankChecks]]:
    """Return one agent's records of collectives of cross-node groups, at most ``limit`` of a group, and its checks of their replicas."""
    queries = [f"parts?job={urllib.parse.quote(job, safe='')}&limit={limit}" for job in jobs]
    answers = [get(url, query, keys) for query in queries]
    parts = [_view(RankParts, part) for answer in answers for part in answer["parts"]]
    checks = [
        _view(RankChecks, {**part, "at": [tuple(at) for at in part["at"]]})
        for answer in answers
        for part in answer["replicas"]
    ]
    return parts, checks


def _view(kind: type[_T], answer: dict[str, Any]) -> _T:
    """Return an agent's answer as a view. An agent of another version may lack what has a default, and have more."""
    return kind(**{field.name: answer[field.name] for field in fields(kind) if field.name in answer})  # type: ignore[arg-type]


def text(found: list[Verdict], seen: Seen, taken: list[Evidence]) -> str:
    """Return the verdicts as text for people."""
    lines = [f"{url} does not answer: {why}" for url, why in seen.silent.items()]
    jobs = sorted({view.job_id for view in seen.ranks})
    running = [view for view in seen.ranks if view.state == "running"]
    modes = {job: [(view.rank, view.probe_mode) for view in running if view.job_id == job] for job in jobs}
    in_part = {job: part for job, of_job in modes.items() if (part := shedding(of_job)) is not None}
    if not found:
        well = "nothing wrong in the recorded data" if in_part else "healthy"
        seen_of = f"{well}: {counted(len(jobs), 'running job')}, {counted(len(running), 'rank')}"
        lines.append(seen_of if jobs else "no running job")
    lines += [f"{job} is {part}; a hang shows only the missing ranks" for job, part in in_part.items()]
    for verdict in found:
        whom = ranks(verdict.ranks) if verdict.ranks else "no rank"
        lines.append(f"{verdict.kind.upper()} in {verdict.job_id}: {whom}")
        lines.append(f"  {verdict.says}")
    for each in sorted(taken, key=lambda each: (each.job_id, each.rank, each.kind)):
        what = {"python_stack": "Python stack", "flight_recorder": "PyTorch's Flight Recorder, dumped to"}
        lines += ["", f"rank {each.rank} of {each.job_id}, {what[each.kind]}:"]
        lines += [f"  {line}" for line in each.text.splitlines()]
    return terminal_text.lines(lines)


def as_json(found: list[Verdict], seen: Seen, taken: list[Evidence]) -> str:
    """Return the verdicts as JSON text for programs."""
    verdicts, evidence = [asdict(verdict) for verdict in found], [asdict(each) for each in taken]
    return json.dumps({"verdicts": verdicts, "silent": seen.silent, "evidence": evidence}, indent=2)
