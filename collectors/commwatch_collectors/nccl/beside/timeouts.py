"""Checks for collectives past PyTorch's time-out: which ones, on which ranks, and which ranks to suspect."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from commwatch_collectors.nccl import facts as f
from commwatch_collectors.nccl.beside.exceptions import uncaught
from commwatch_collectors.nccl.beside.hardware import comes_after_fault
from commwatch_collectors.nccl.beside.processes import XIDS
from commwatch_collectors.nccl.checks.evidence import Hit, Log, some
from commwatch_collectors.nccl.lives import Seen
from commwatch_collectors.spans import missing_ranks
from commwatch_collectors.spans import ranks as named


class _Late(NamedTuple):
    """One report that a collective timed out on a rank."""

    #: In the job, and in the process group.
    rank: int
    group_rank: int
    #: ``None``: the report does not number it.
    seq: int | None
    #: Empty if the report does not name it.
    op: str
    ran_ms: int | None
    where: f.Where
    seen: Seen


def _group(where: f.Where) -> str:
    """Return PyTorch's number or name of the process group; empty if the line has none (before 2.2, and in first reports)."""
    return where.guid or where.pg or where.name


def _job_rank(fact: f.Watchdog | f.Progress | f.CommTimeout | f.Relayed | f.Stuck) -> int:
    """Return the rank in the job; that in the group where the line has no other."""
    return fact.rank if fact.where.job_rank is None else fact.where.job_rank


def watchdogs(log: Log) -> Iterator[Hit]:
    """Collectives past the time-out, once for each process group: ranks that run ahead time out in later ones."""
    by_group = _by_group(log)
    for group, late in by_group.items():
        where = f" in process group {group}" if len(by_group) > 1 and group else ""
        ran = next((f" after {report.ran_ms / 1000:.0f} s" for report in late if report.ran_ms is not None), "")
        name = _name(late)
        suspicion, evidence = _suspicion(log, group, by_group)
        says = f"not finished{where}{ran}: {_operations(log, group, late)}{name}{suspicion}{_also_waits(late)}"
        before, cause = _before(log, late, says)
        seen = [report.seen for report in late]
        yield Hit(f"{says}{before}", seen[:3] + cause + evidence + seen[3:], follows=comes_after_fault(log, seen))
    if not by_group:
        yield from _passed_on(log)


def _operations(log: Log, group: str, late: list[_Late]) -> str:
    """Return what timed out where; reports that only number a collective are left out where others name it."""
    works: dict[tuple[int, str], set[int]] = {}
    named_works = {report.seq for report in late if report.op}
    for report in late:
        if report.op or report.seq not in named_works or report.seq is None:
            works.setdefault((-1 if report.seq is None else report.seq, report.op), set()).add(report.rank)
    return some(f"{_work(log, group, seq, op, ranks)} on {named(ranks)}" for (seq, op), ranks in sorted(works.items()))


def _work(log: Log, group: str, seq: int, op: str, ranks: set[int]) -> str:
    if op:
        return f"{op}{f' with SeqNum {seq}' if seq >= 0 else ''}"
    if seq >= 0:
        return f"work {seq}"
    for _, fact, _ in log.account.of(f.Progress):
        if _group(fact.where) == group and _job_rank(fact) in ranks and fact.completed < fact.enqueued:
            return f"a collective after work {fact.completed} (work up to {fact.enqueued} is launched)"
    return "a collective"


def _name(late: list[_Late]) -> str:
    names = {report.where.name for report in late} - {"", "default_pg"}
    return f", group {names.pop()}" if len(names) == 1 else ""


def _also_waits(late: list[_Late]) -> str:
    """Return the ranks whose reports only number a collective that other reports name."""
    named_works = {report.seq: report.op for report in late if report.op and report.seq is not None}
    reported = {report.rank for report in late if report.op}
    waiting = {report.rank for report in late if not report.op and report.seq in named_works} - reported
    return f"; {named(waiting)} wait{'s' * (len(waiting) == 1)} in it as well" if waiting else ""


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
    numbered = [(fact, seen) for _, fact, seen in log.account.of(f.Progress) if fact.work is not None]
    of_work: dict[tuple[int | None, int, int | None], list[f.Where]] = {}
    for fact, _ in numbered:
        if _group(fact.where):
            of_work.setdefault((fact.where.job_rank, fact.rank, fact.work), []).append(fact.where)
    for (job_rank, bare), places in scopes.items():
        if not places:
            places.update(dict.fromkeys(of_work.get((job_rank, bare.rank, bare.seq), ())))
    marked = {dog for job_rank, dog in first if job_rank is not None}
    found = []
    for (job_rank, bare), seen in first.items():
        if job_rank is None and bare in marked:
            continue  # a repetition: ``what():`` of an exception has no mark
        for where in scopes[job_rank, bare] or [f.Where(job_rank)]:
            found.append(_report(bare._replace(where=where), bare.seq, bare.op, bare.ran_ms, seen))
    found += _unnamed(log, found, numbered)
    names = {_group(report.where) for report in found} - {""}
    only = names.pop() if len(names) == 1 else ""
    by_group: dict[str, list[_Late]] = {}
    for late in found:
        by_group.setdefault(_group(late.where) or only, []).append(late)
    return by_group


def _report(
    fact: f.Watchdog | f.Progress | f.CommTimeout, seq: int | None, op: str, ran_ms: int | None, seen: Seen
) -> _Late:
    return _Late(_job_rank(fact), fact.rank, seq, op, ran_ms, fact.where, seen)


def _unnamed(log: Log, known: list[_Late], numbered: list[tuple[f.Progress, Seen]]) -> list[_Late]:
    """Return the time-outs that only lines without the operation show, one for each rank and collective.

    A failure, or a signal to dump, is a time-out only if no line has an error of NCCL: PyTorch prints both after either.
    """
    failed = any(True for _ in log.account.of(f.TorchError)) or bool(_failed_ranks(log))
    found: dict[tuple[int, int | None, str], _Late] = {}
    has = {(report.rank, report.seq, _group(report.where)) for report in known}
    for fact, seen in numbered:
        same = {(_job_rank(fact), fact.work, group) for group in ("", _group(fact.where))}
        if has.isdisjoint(same) and (fact.why == "time-out" or not failed):
            late = _report(fact, fact.work, "", None, seen)
            found.setdefault((late.rank, late.seq, _group(late.where)), late)
    for _, comm, seen in log.account.of(f.CommTimeout):
        late = _report(comm, None, "", comm.ran_ms, seen)
        found.setdefault((late.rank, None, _group(late.where)), late)
    reporting = {report.rank for report in (*known, *found.values())}
    for _, fact, seen in log.account.of(f.Progress):
        if fact.why == "dump" and fact.source is None and _job_rank(fact) not in reporting and not failed:
            late = _report(fact, None, "", None, seen)
            found.setdefault((late.rank, None, ""), late)
    return list(found.values())


def _failed_ranks(log: Log) -> list[f.Died]:
    """Return the processes whose watchdog ended because of CUDA."""
    return [fact for _, fact, _ in log.account.of(f.Died) if fact.kind == "cuda"]


def _passed_on(log: Log) -> Iterator[Hit]:
    """A time-out of which the log has only the signal that another rank has sent."""
    signals = [(fact, seen) for _, fact, seen in log.account.of(f.Progress) if fact.source is not None]
    relayed = [(fact, seen) for _, fact, seen in log.account.of(f.Relayed)]
    passed = _passing(log)
    if any(True for _ in log.account.of(f.TorchError)) or _failed_ranks(log):
        return
    if not passed:
        yield from _gave_up(log)
        return
    sources = {fact.source for fact, _ in signals if fact.source is not None}
    late = f"on {named(sources)}" if sources else "on a rank that the log does not name"
    says = f"{late}; {named(passed)} only passed the signal on: look into the log of the rank that timed out"
    yield Hit(says, [seen for _, seen in (*signals, *relayed)])


def _gave_up(log: Log) -> Iterator[Hit]:
    """An operation that failed or timed out, of which the log has only what PyTorch did next."""
    found = [(fact, seen) for _, fact, seen in log.account.of(f.GaveUp)]
    if not found or log.account.warnings or any(True for _ in log.account.of(f.Stuck)):
        return
    printed = {fact.rank if fact.where.job_rank is None else fact.where.job_rank for fact, _ in found}
    ranks = {rank for rank in printed if rank is not None}
    on = f" on {named(ranks)}" if ranks else ""
    yield Hit(f"an operation failed or timed out{on}; the log does not name it", [seen for _, seen in found])


def _raised(log: Log, because_of_others: bool) -> list[tuple[f.Raised, Seen]]:
    """Return the exceptions of ranks that say that another process did not come, or ended; or the others."""
    kinds: tuple[type[f.Gloo] | type[f.Store] | type[f.Barrier], ...] = (f.Gloo, f.Store, f.Barrier)
    places = {(seen.source, seen.number) for kind in kinds for _, _, seen in log.account.of(kind)}
    found = [(fact, seen) for _, fact, seen in log.account.of(f.Raised) if _first(fact)]
    return [(fact, seen) for fact, seen in found if ((seen.source, seen.number) in places) is because_of_others]


def _suspicion(log: Log, group: str, by_group: dict[str, list[_Late]]) -> tuple[str, list[Seen]]:
    """Return the suspected ranks as text, and lines that show why: ranks that launched less, else silent ranks."""
    reported = {report.rank for reports in by_group.values() for report in reports}
    here = {report.rank for report in by_group[group]}
    elsewhere = {report.rank for other, reports in by_group.items() if other != group for report in reports}
    heard = {fact.rank for _, fact, _ in log.account.of(f.Speaks)}
    heard |= {fact.rank for _, fact, _ in log.account.of(f.Raised)}
    stuck_ranks = {_job_rank(fact) for _, fact, _ in log.account.of(f.Stuck)}
    waiting = {fact.rank for fact, _ in _raised(log, because_of_others=True)}
    passed = (_passing(log) | waiting | stuck_ranks) - reported
    known = reported | heard | passed | _logged_ranks(log)
    # A rank that waits in another group is late because of that one.
    behind, silent = _behind(log, group, by_group) - elsewhere, known - reported - passed
    whole = _is_whole(group, by_group[group])
    if not whole and len(silent) > len(reported):
        silent = set()  # more likely ranks outside of the group
    parts = []
    if behind:
        parts.append(f"{named(behind)} had launched least: look there first")
    if silent:
        parts.append(f"{named(silent)} did not report" + ("" if behind else ": look there first"))
    if not behind and not silent:
        mixed = reported != here or not _is_one(by_group[group], ()) or bool(known - reported)
        parts.append(_no_suspect(known, mixed, None if whole else len(reported)))
        if parts[-1] == _ENTERED:
            parts[-1] = _operations_differ(by_group[group]) or _ENTERED + (
                "" if _has_cause(log) else ": suspect the network"
            )
    raised = [(fact, seen) for fact, seen in _raised(log, because_of_others=False) if fact.rank in behind | silent]
    if raised:
        parts[-1] += f" (rank {raised[0][0].rank} raised {_brief(raised[0][0].error)})"
    return "; " + "; ".join(parts), [seen for _, seen in raised]


def _passing(log: Log) -> set[int]:
    """Return the ranks that have seen the signal of another rank."""
    passed = {_job_rank(fact) for _, fact, _ in log.account.of(f.Relayed)}
    return passed | {_job_rank(fact) for _, fact, _ in log.account.of(f.Progress) if fact.source is not None}


def _is_whole(group: str, late: list[_Late]) -> bool:
    """Return whether all ranks of the job are in the group, as far as is known."""
    return group in ("", "0") or any(report.where.name == "default_pg" for report in late)


def _no_suspect(known: set[int], mixed: bool, most_missing: int | None) -> str:
    """Return what follows where each rank in the log has reported.

    Args:
        known: ranks in the log.
        mixed: they may wait in several process groups, or only pass a signal on.
        most_missing: ranks that are not in the log are suspects only if they are no more; ``None``: always.
    """
    unknown = missing_ranks(known, max(known))
    if len(known) == 1:
        return "the log has no other rank"
    if unknown and (most_missing is None or max(known) + 1 - len(known) <= most_missing):
        return f"the log has nothing from {unknown}: look there first, then at the network"
    if unknown:
        return "the log does not show which other ranks are in the group"
    if mixed:
        return "each rank in the log waits, perhaps in different process groups"
    return _ENTERED


_ENTERED = "all ranks in the log entered it"


def _operations_differ(late: list[_Late]) -> str:
    """Return what follows if ranks of one group wait in different operations of one number, or of none."""
    operations: dict[int | None, set[str]] = {}
    for report in late:
        if report.op:
            operations.setdefault(report.seq, set()).add(report.op)
    if all(len(names) < 2 for names in operations.values()):
        return ""
    if None in operations:
        return "the operations differ: ranks took different paths, or are in different process groups"
    return "the operations differ: ranks took different paths"


def _has_cause(log: Log) -> bool:
    """Return whether the log shows a failed process or GPU."""
    return any(True for _ in log.account.of(f.Died)) or any(xid.number in XIDS for _, xid, _ in log.account.of(f.Xid))


def _first(fact: f.Raised) -> bool:
    """Return whether the exception is a cause: that the watchdog gave up is not."""
    return "DistBackendError" not in fact.error


def _brief(error: str) -> str:
    """Return the first sentence of an exception."""
    return error.partition(". ")[0]


def _before(log: Log, late: list[_Late], says: str) -> tuple[str, list[Seen]]:
    """Return the first process that had failed by then, as text, and its line; nothing if ``says`` names it."""
    source, number = late[0].seen.source, min(r.seen.number for r in late if r.seen.source == late[0].seen.source)
    ends = [(died.who or "a process", died.did, seen) for _, died, seen in log.account.of(f.Died)]
    ends += [(f"rank {r.rank}", f"raised {_brief(r.error)}", seen) for r, seen in _raised(log, because_of_others=False)]
    ends += [(fact.who or "a process", f"raised {_brief(fact.error)}", seen) for fact, seen in uncaught(log)]
    ends += [
        ("the driver", f"reported Xid {xid.number} of GPU {xid.device}", seen)
        for _, xid, seen in log.account.of(f.Xid)
        if xid.number in XIDS
    ]
    ends = [end for end in ends if end[2].source == source and end[2].number < number]
    if not ends:
        return "", []
    who, did, seen = min(ends, key=lambda end: end[2].number)
    return ("", []) if f"({who} raised" in says else (f"; before it, {who} {did}", [seen])


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
    progress: dict[int, int] = {}
    for fact in printed:  # later lines of a rank may show more
        progress[_job_rank(fact)] = max(fact.enqueued, progress.get(_job_rank(fact), fact.enqueued))
    if len(set(progress.values())) < 2 or not _is_one(late, printed):
        return set()
    waited = max((report.seq for report in late if report.seq is not None), default=None)
    least = min(progress.values())
    return {rank for rank, done in progress.items() if done == least} if waited is None or least < waited else set()


def _is_one(late: list[_Late], progress: Iterable[f.Progress]) -> bool:
    """Return whether all facts are certainly of one process group: other numbers than a GUID differ between processes."""
    facts = [(report.group_rank, report.rank, report.where.guid) for report in late]
    facts += [(fact.rank, _job_rank(fact), fact.where.guid) for fact in progress]
    places: dict[int, set[int]] = {}
    for rank, job_rank, _ in facts:
        places.setdefault(rank, set()).add(job_rank)
    if any(len(ranks) > 1 for ranks in places.values()):
        return False
    return all(guid for _, _, guid in facts) or all(rank == job_rank for rank, job_rank, _ in facts)


def stuck(log: Log) -> Iterator[Hit]:
    """Watchdog threads that made no progress; not those of ranks whose time-out came before, which hang in the abort."""
    late = {report.rank for reports in _by_group(log).values() for report in reports}
    found = [(fact, seen) for _, fact, seen in log.account.of(f.Stuck) if _job_rank(fact) not in late]
    ranks = {_job_rank(fact) for fact, _ in found if not fact.gil}
    if not ranks:
        return
    seconds = max((fact.seconds for fact, _ in found if fact.seconds is not None), default=None)
    held = {_job_rank(fact) for fact, _ in found if fact.gil}
    says = f"on {named(ranks)}" + (f": no progress for {seconds} s" if seconds is not None else "")
    if held:
        says += f"; {named(held)} could not get Python's GIL either"
    yield Hit(says, [seen for _, seen in found])
