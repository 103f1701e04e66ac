"""Checks for collectives past PyTorch's time-out: which ones, on which ranks, and which ranks to suspect."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

from commwatch.collectors.nccl import facts as f
from commwatch.collectors.nccl.evidence import Hit, Log, some
from commwatch.collectors.nccl.lives import Seen
from commwatch.collectors.spans import missing_ranks
from commwatch.collectors.spans import ranks as named

_SCOPE = re.compile(r"\[PG (?:ID )?(\d+)")
_RANK = re.compile(r"\[rank(\d+)\]:")


class _Late(NamedTuple):
    """One report of the watchdog."""

    rank: int
    dog: f.Watchdog
    seen: Seen


def _group(seen: Seen) -> str:
    """Return PyTorch's number of the process group; empty if the line has none (before 2.4, and in first reports)."""
    scope = _SCOPE.search(seen.line)
    return scope[1] if scope is not None else ""


def _job_rank(rank: int, seen: Seen) -> int:
    """Return the rank in the job, from the line's ``[rankN]:``; ``rank``, from the report, is the rank in its group."""
    marks = set(_RANK.findall(seen.line))
    return int(marks.pop()) if len(marks) == 1 else rank


def watchdogs(log: Log) -> Iterator[Hit]:
    """Collectives past the time-out, once for each process group: ranks that run ahead time out in later ones."""
    by_group = _by_group(log)
    for group, late in by_group.items():
        works: dict[tuple[int, str], set[int]] = {}
        for rank, dog, _ in late:
            works.setdefault((-1 if dog.seq is None else dog.seq, dog.op), set()).add(rank)
        operations = [
            f"{op}{f' with SeqNum {seq}' if seq >= 0 else ''} on {named(ranks)}"
            for (seq, op), ranks in sorted(works.items())
        ]
        where = f" in process group {group}" if len(by_group) > 1 and group else ""
        suspicion, evidence = _suspicion(log, group, late)
        says = f"not finished{where} after {late[0].dog.ran_ms / 1000:.0f} s: {some(operations)}{suspicion}"
        yield Hit(says, [report.seen for report in late[:3]] + evidence + [report.seen for report in late[3:]])


def _by_group(log: Log) -> dict[str, list[_Late]]:
    """Return each report once, by group: a repeated report may name the group where the first line does not."""
    once: dict[tuple[int, f.Watchdog], Seen] = {}
    groups: dict[tuple[int, f.Watchdog], str] = {}
    for _, dog, seen in log.account.of(f.Watchdog):
        report = (_job_rank(dog.rank, seen), dog)
        once.setdefault(report, seen)
        groups[report] = groups.get(report) or _group(seen)
    named = set(groups.values()) - {""}
    only = named.pop() if len(named) == 1 else ""
    by_group: dict[str, list[_Late]] = {}
    for report, seen in once.items():
        by_group.setdefault(groups[report] or only, []).append(_Late(*report, seen))
    return by_group


def _suspicion(log: Log, group: str, late: list[_Late]) -> tuple[str, list[Seen]]:
    """Return the suspected ranks as text, and lines that show why: ranks that launched less, else silent ranks."""
    reported = {report.rank for report in late}
    heard = {fact.rank for _, fact, _ in log.account.of(f.Speaks)}
    heard |= {fact.rank for _, fact, _ in log.account.of(f.Raised)}
    known = reported | heard | _logged_ranks(log)
    behind, silent = _behind(log, group, late), known - reported
    parts = []
    if behind:
        parts.append(f"{named(behind)} had launched least: look there first")
    if silent:
        parts.append(f"{named(silent)} did not report" + ("" if behind else ": look there first"))
    unknown = missing_ranks(known, max(known))
    if len(known) == 1:
        parts.append("the log has no other rank")
    elif not behind and not silent and unknown:
        parts.append(f"the log has nothing from {unknown}: look there first, then at the network")
    elif not behind and not silent:
        parts.append("all ranks in the log entered it: suspect the network")
    raised = [
        (fact, seen) for _, fact, seen in log.account.of(f.Raised) if fact.rank in behind | silent and _first(fact)
    ]
    if raised:
        parts[-1] += f" (rank {raised[0][0].rank} raised {raised[0][0].error})"
    return "; " + "; ".join(parts), [seen for _, seen in raised]


def _first(fact: f.Raised) -> bool:
    """Return whether the exception is a cause: that the watchdog gave up is not."""
    return "DistBackendError" not in fact.error


def _logged_ranks(log: Log) -> set[int]:
    """Return the ranks of the largest communicator, which are numbered as in the job."""
    largest = max(log.communicators, key=lambda comm: comm.nranks, default=None)
    return set() if largest is None or largest.pooled else largest.ranks


def _behind(log: Log, group: str, late: list[_Late]) -> set[int]:
    """Return the ranks that launched least, if less than a collective that others wait for."""
    progress: dict[int, int] = {}
    for _, fact, seen in log.account.of(f.Progress):
        if not group or _group(seen) in ("", group):
            progress[_job_rank(fact.rank, seen)] = fact.enqueued
    waited = max((report.dog.seq for report in late if report.dog.seq is not None), default=None)
    if len(set(progress.values())) < 2:
        return set()
    least = min(progress.values())
    return {rank for rank, done in progress.items() if done == least} if waited is None or least < waited else set()
