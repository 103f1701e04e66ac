"""Checks for collectives past PyTorch's time-out: which ones, on which ranks, and which ranks to suspect."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from commwatch_collectors.nccl import facts as f
from commwatch_collectors.nccl.evidence import Hit, Log, some
from commwatch_collectors.nccl.lives import Seen
from commwatch_collectors.spans import missing_ranks
from commwatch_collectors.spans import ranks as named


class _Late(NamedTuple):
    """One report of the watchdog."""

    #: In the job.
    rank: int
    dog: f.Watchdog
    seen: Seen


def _group(where: f.Where) -> str:
    """Return PyTorch's number or name of the process group; empty if the line has none (before 2.2, and in first reports)."""
    return where.guid or where.pg


def _job_rank(fact: f.Watchdog | f.Progress) -> int:
    """Return the rank in the job; that in the group where the line has no other."""
    return fact.rank if fact.where.job_rank is None else fact.where.job_rank


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
        suspicion, evidence = _suspicion(log, group, by_group)
        says = f"not finished{where} after {late[0].dog.ran_ms / 1000:.0f} s: {some(operations)}{suspicion}"
        yield Hit(says, [report.seen for report in late[:3]] + evidence + [report.seen for report in late[3:]])


def _by_group(log: Log) -> dict[str, list[_Late]]:
    """Return each report once for each group: a repeated report may name the group where the first line does not."""
    first: dict[tuple[int | None, f.Watchdog], Seen] = {}
    scopes: dict[tuple[int | None, f.Watchdog], dict[f.Where, None]] = {}
    for _, dog, seen in log.account.of(f.Watchdog):
        report = dog.where.job_rank, dog._replace(where=f.Where())
        first.setdefault(report, seen)
        scopes.setdefault(report, {})
        if _group(dog.where):
            scopes[report][dog.where] = None
    marked = {dog for job_rank, dog in first if job_rank is not None}
    names = {_group(where) for wheres in scopes.values() for where in wheres}
    only = names.pop() if len(names) == 1 else ""
    by_group: dict[str, list[_Late]] = {}
    for (job_rank, bare), seen in first.items():
        if job_rank is None and bare in marked:
            continue  # a repetition: ``what():`` of an exception has no mark
        for where in scopes[job_rank, bare] or [f.Where(job_rank)]:
            dog = bare._replace(where=where)
            by_group.setdefault(_group(where) or only, []).append(_Late(_job_rank(dog), dog, seen))
    return by_group


def _suspicion(log: Log, group: str, by_group: dict[str, list[_Late]]) -> tuple[str, list[Seen]]:
    """Return the suspected ranks as text, and lines that show why: ranks that launched less, else silent ranks."""
    reported = {report.rank for reports in by_group.values() for report in reports}
    here = {report.rank for report in by_group[group]}
    heard = {fact.rank for _, fact, _ in log.account.of(f.Speaks)}
    heard |= {fact.rank for _, fact, _ in log.account.of(f.Raised)}
    known = reported | heard | _logged_ranks(log)
    # A rank that waits in another group is late because of that one.
    behind, silent = _behind(log, group, by_group) - (reported - here), known - reported
    parts = []
    if behind:
        parts.append(f"{named(behind)} had launched least: look there first")
    if silent:
        parts.append(f"{named(silent)} did not report" + ("" if behind else ": look there first"))
    if not behind and not silent:
        parts.append(_no_suspect(known, mixed=reported != here or not _is_one(by_group[group], ())))
    raised = [
        (fact, seen) for _, fact, seen in log.account.of(f.Raised) if fact.rank in behind | silent and _first(fact)
    ]
    if raised:
        parts[-1] += f" (rank {raised[0][0].rank} raised {raised[0][0].error})"
    return "; " + "; ".join(parts), [seen for _, seen in raised]


def _no_suspect(known: set[int], mixed: bool) -> str:
    """Return what follows where each rank in the log has reported; ``mixed``: perhaps in several process groups."""
    unknown = missing_ranks(known, max(known))
    if len(known) == 1:
        return "the log has no other rank"
    if unknown:
        return f"the log has nothing from {unknown}: look there first, then at the network"
    if mixed:
        return "each rank in the log waits, perhaps in different process groups"
    return "all ranks in the log entered it: suspect the network"


def _first(fact: f.Raised) -> bool:
    """Return whether the exception is a cause: that the watchdog gave up is not."""
    return "DistBackendError" not in fact.error


def _logged_ranks(log: Log) -> set[int]:
    """Return the ranks of the largest communicator, which are numbered as in the job."""
    largest = max(log.communicators, key=lambda comm: comm.nranks, default=None)
    return set() if largest is None or largest.pooled else largest.ranks


def _behind(log: Log, group: str, by_group: dict[str, list[_Late]]) -> set[int]:
    """Return the ranks that launched least, if less than a collective that others wait for."""
    late = by_group[group]
    found = [fact for _, fact, _ in log.account.of(f.Progress)]
    printed = [fact for fact in found if _group(fact.where) == group]
    if not printed and len(by_group) == len({_group(fact.where) for fact in found}) == 1:
        printed = found  # a first report does not name the group, or progress does not
    progress = {_job_rank(fact): fact.enqueued for fact in printed}
    if len(set(progress.values())) < 2 or not _is_one(late, printed):
        return set()
    waited = max((report.dog.seq for report in late if report.dog.seq is not None), default=None)
    least = min(progress.values())
    return {rank for rank, done in progress.items() if done == least} if waited is None or least < waited else set()


def _is_one(late: list[_Late], progress: Iterable[f.Progress]) -> bool:
    """Return whether all facts are certainly of one process group: other numbers than a GUID differ between processes."""
    facts: list[f.Watchdog | f.Progress] = [*(report.dog for report in late), *progress]
    places: dict[int, set[int]] = {}
    for fact in facts:
        places.setdefault(fact.rank, set()).add(_job_rank(fact))
    if any(len(ranks) > 1 for ranks in places.values()):
        return False
    return all(fact.where.guid for fact in facts) or all(fact.rank == _job_rank(fact) for fact in facts)
