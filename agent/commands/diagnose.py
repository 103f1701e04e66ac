"""``commwatch diagnose``: what is wrong right now, on this node or on all nodes whose agents are named."""

from __future__ import annotations

import json
import urllib.parse
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, TypeVar

from commwatch.analysis.ended_operations import RankParts, put_together
from commwatch.analysis.rank_state import shedding
from commwatch.analysis.verdicts import Verdict, combined, lateness, verdicts
from commwatch.collectors.spans import spans
from commwatch.commands.client import NO_KEYS, TOGETHER_S, Keys, get, together
from commwatch.config import DEFAULT_PORT
from commwatch.core import terminal_text
from commwatch.core.errors import UsageError
from commwatch.core.views import Failed, GroupView, InFlight, RankView
from commwatch.ingest.collective_join import MOST_PENDING
from commwatch.watchers.stack_capture import Evidence

#: Most collectives of cross-node groups, counted per rank, to request from all agents together; fewest per group.
_MOST_PARTS, _LEAST = 500_000, 64
_T = TypeVar("_T")


class CannotDiagnose(UsageError):
    """No agent answers, or an address is wrong; the message names it."""


@dataclass
class Seen:
    """The combined answers of all agents."""

    ranks: list[RankView]
    groups: list[GroupView]
    #: Verdicts that need an agent's own records: late ranks, ranks that disagreed in ended operations, other sources.
    reported: list[Verdict]
    #: Agents that did not answer, by URL, with the reason.
    silent: dict[str, str]
    #: The latest collectives of cross-node groups, by rank.
    parts: list[RankParts] = field(default_factory=list)


def addresses(names: Iterable[str], secure: bool = False) -> list[str]:
    """Return the URLs of agents.

    Args:
        names: ``host``, ``host:port``, URLs, and target files (``.json``) in Prometheus' ``file_sd`` format.
        secure: use TLS for addresses without a scheme.

    Raises:
        CannotDiagnose: a file cannot be read or has another format; an address is not valid.
    """
    found: dict[str, None] = {}
    for name in names:
        if not name.endswith(".json"):
            found[_url(name, secure)] = None
            continue
        try:
            targets = [
                target for entry in json.loads(Path(name).read_text(encoding="utf-8")) for target in entry["targets"]
            ]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise CannotDiagnose(f"{name}: not a Prometheus file_sd target file: {error}") from None
        found.update({_url(str(target), secure): None for target in targets})
    return list(found)


def _url(name: str, secure: bool) -> str:
    scheme, separator, _ = name.partition("://")
    if separator:
        if scheme.lower() not in ("http", "https"):  # urllib would also read files
            raise CannotDiagnose(f"{name}: not an agent's address; give HOST, HOST:PORT, or an http or https URL")
        return name.rstrip("/")
    host, colon, port = name.rpartition(":")
    is_port = bool(colon) and port.isdecimal() and (host.endswith("]") or ":" not in host)
    return f"http{'s' * secure}://{name}{'' if is_port else f':{DEFAULT_PORT}'}"


def ask(urls: list[str], job: str | None, keys: Keys = NO_KEYS) -> Seen:
    """Query all agents at once; then, again at once, those with cross-node groups for the collectives of these groups.

    Raises:
        CannotDiagnose: no agent answers.
    """
    seen = Seen([], [], [], {})
    jobs_at: dict[str, tuple[str, ...]] = {}
    for url, answer in _all(urls, lambda url: _views(url, job, keys)):
        if isinstance(answer, str):
            seen.silent[url] = answer
            continue
        ranks, groups, reported = answer
        seen.ranks += ranks
        seen.groups += groups
        seen.reported += reported
        jobs_at[url] = tuple(group.job_id for group in groups)
    across = _across(seen.groups)
    columns = sum(group.size for group in across)
    limit = max(_LEAST, min(MOST_PENDING, _MOST_PARTS // max(1, columns)))
    jobs = {group.job_id for group in across}
    again = {url: sorted(jobs & set(known)) for url, known in jobs_at.items() if jobs & set(known)}
    for url, columns_of in _all(list(again), lambda url: _parts(url, again[url], limit, keys)):
        if isinstance(columns_of, str):
            seen.silent[url] = columns_of
        else:
            seen.parts += columns_of
    if len(seen.silent) == len(urls):
        reasons = "; ".join(f"{url}: {why}" for url, why in seen.silent.items())
        raise CannotDiagnose(reasons or "no agent runs here; name one, or give its run directory with --dir")
    return seen


def _all(urls: list[str], question: Callable[[str], _T]) -> Iterator[tuple[str, _T | str]]:
    """Yield each URL with the agent's answer, or with the reason why there is none."""
    for url, answer in zip(urls, together(lambda url: _answer(question, url), urls), strict=True):
        yield url, f"no answer within {TOGETHER_S:.0f} s" if answer is None else answer


def _answer(question: Callable[[str], _T], url: str) -> _T | str:
    """Return the agent's answer, or the reason why there is none."""
    try:
        return question(url)
    except OSError as error:
        return str(getattr(error, "reason", error))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        return f"does not answer as an agent of this version: {error}"


def _views(url: str, job: str | None, keys: Keys) -> tuple[list[RankView], list[GroupView], list[Verdict]]:
    """Return one agent's ranks, groups, and the verdicts that need its own records, of running jobs."""
    jobs = [
        each["job_id"]
        for each in get(url, "jobs", keys)
        if each["state"] == "running" and job in (None, each["job_id"])
    ]
    ranks, groups, reported = [], [], []
    for each in jobs:
        query = f"?job={urllib.parse.quote(each, safe='')}"
        for answer in get(url, f"ranks{query}", keys):
            ops = [_view(InFlight, op) for op in answer["in_flight"]]
            failed = [_view(Failed, op) for op in answer["failed"]]
            ranks.append(_view(RankView, {**answer, "in_flight": ops, "failed": failed}))
        groups += [_view(GroupView, answer) for answer in get(url, f"groups{query}", keys)]
        verdicts_of = [_view(Verdict, answer) for answer in get(url, f"verdicts{query}", keys)]
        reported += [v for v in verdicts_of if v.source != "probe" or v.kind in ("straggler", "desync")]
    return ranks, groups, reported


def _parts(url: str, jobs: list[str], limit: int, keys: Keys) -> list[RankParts]:
    """Return one agent's records of collectives of cross-node groups, at most ``limit`` collectives of a group."""
    queries = [f"parts?job={urllib.parse.quote(job, safe='')}&limit={limit}" for job in jobs]
    return [_view(RankParts, answer) for query in queries for answer in get(url, query, keys)["parts"]]


def _merged(groups: Iterable[GroupView]) -> dict[tuple[str, str], GroupView]:
    """Return each group once, by job id and group id, with the ranks that used it on any node."""
    merged: dict[tuple[str, str], GroupView] = {}
    for group in groups:
        known = merged.setdefault((group.job_id, group.group_id), group)
        merged[group.job_id, group.group_id] = replace(known, ranks=sorted({*known.ranks, *group.ranks}))
    return merged


def _across(groups: list[GroupView]) -> list[GroupView]:
    """Return the groups that several agents report and whose ranks are all known."""
    agents = Counter((group.job_id, group.group_id) for group in groups)
    return [group for at, group in _merged(groups).items() if agents[at] > 1 and len(group.ranks) == group.size]


def _view(kind: type[_T], answer: dict[str, Any]) -> _T:
    return kind(**{field.name: answer[field.name] for field in fields(kind)})  # type: ignore[arg-type]


def conclude(seen: Seen) -> list[Verdict]:
    """Return the verdicts on the combined answers."""
    found = verdicts(seen.ranks, seen.groups)
    groups = _merged(seen.groups)
    # No minimum window: agents send at most the latest 1,024 collectives of a group, less than a second of a fast job.
    across = [
        lateness(late, groups[job, group_id])
        for job, group_id, window in put_together(seen.parts)
        if (job, group_id) in groups
        for late in window.late(0, least_ns=0)
    ]
    known = {(verdict.job_id, verdict.group_id, verdict.cause, verdict.source) for verdict in found}
    reported: dict[tuple[object, ...], Verdict] = {}
    for verdict in (*seen.reported, *across):  # drop duplicates from an agent that was queried under two names
        at = (verdict.job_id, verdict.group_id, verdict.cause, verdict.source)
        if at not in known:
            reported.setdefault((*at, verdict.group, verdict.seq, *verdict.ranks), verdict)
    return combined(found, reported.values())


def text(found: list[Verdict], seen: Seen, taken: list[Evidence]) -> str:
    """Return the verdicts as text for people."""
    lines = [f"{url} does not answer: {why}" for url, why in seen.silent.items()]
    jobs = sorted({view.job_id for view in seen.ranks})
    running = [view for view in seen.ranks if view.state == "running"]
    modes = {job: [(view.rank, view.probe_mode) for view in running if view.job_id == job] for job in jobs}
    in_part = {job: part for job, of_job in modes.items() if (part := shedding(of_job)) is not None}
    if not found:
        well = "nothing wrong in the recorded data" if in_part else "healthy"
        seen_of = f"{well}: {len(jobs)} running job{'s' * (len(jobs) != 1)}, {len(running)} ranks"
        lines.append(seen_of if jobs else "no running job")
    lines += [f"{job} is {part}; a hang shows only the missing ranks" for job, part in in_part.items()]
    for verdict in found:
        whom = f"rank {spans(verdict.ranks)}" if verdict.ranks else "no rank"
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
