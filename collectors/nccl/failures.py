"""Checks for what went wrong: errors, time-outs, inits that never ended."""

from __future__ import annotations

import re
from collections.abc import Iterator

from commwatch.collectors.nccl import facts as f
from commwatch.collectors.nccl.account import Seen, Warned
from commwatch.collectors.nccl.communicators import Communicator, spans
from commwatch.collectors.nccl.evidence import Check, Hit, Log, who
from commwatch.collectors.nccl.text import Process

#: ``ibv_wc_status``: what the completion of a request came back with.
IB_STATUS = {
    1: "local length error",
    2: "local QP operation error",
    4: "local protection error: the memory was not (or no longer) registered",
    5: "flushed: another request of the same queue failed first",
    6: "memory window bind error",
    8: "local access error",
    9: "remote invalid request",
    10: "remote access error: the peer's memory or process is gone",
    11: "remote operation error",
    12: "transport retries exceeded: the peer did not answer (dead, unreachable, or a lossy link)",
    13: "receiver-not-ready retries exceeded: the peer posted no receive in time",
}
_VENDOR = {129: "transport retries exceeded", 136: "remote access", 249: "flushed by an earlier error"}
RESULTS = {
    1: "unhandled CUDA error",
    2: "unhandled system error",
    3: "internal error",
    4: "invalid argument",
    5: "invalid usage",
    6: "remote process or network error",
}
_STATUS = re.compile(r"(?:with error |status=(?:[A-Z_]+\()?)(\d+)")
_VENDOR_ERROR = re.compile(r"vendor[ _]err[ =](\d+)")
_TEARDOWN = re.compile(r"\[Service thread\]|\[Proxy Service \d+\] Failed to execute operation Close")
_PEER_CLOSED = re.compile(r"Connection closed by remote peer|Call to (?:recv|send)\b.* failed")
_SHARP = re.compile(r"SHARP coll init error|Cannot initialize CollNet")
_DEVICE = re.compile(r"Unable to open device (\S+)|Call to ibv_open_device failed")
_HINT = re.compile(
    r'Missing "iommu=pt"|P2P is disabled between NVLINK|lib wrapper not initialized|MSCCL|commDestroySync'
)
#: What the other checks say of warnings that their class alone does not tell.
_TOLD = (_TEARDOWN, _PEER_CLOSED, _SHARP, _DEVICE, _HINT)


def of_class(kind: str) -> Check:
    """The check for one class of warnings."""

    def check(log: Log) -> Iterator[Hit]:
        yield from _by_text(_hits(log, kind))

    return check


def _hits(log: Log, kind: str) -> list[Warned]:
    return [w for w in log.warned(kind) if not any(told.search(w.text) for told in _TOLD)]


def _by_text(warned: list[Warned]) -> Iterator[Hit]:
    """One hit for each text, but for its numbers."""
    alike: dict[str, list[Warned]] = {}
    for warning in warned:
        alike.setdefault(re.sub(r"0x[0-9a-f]+|\d+", "#", warning.text), []).append(warning)
    for same in alike.values():
        times = sum(warning.seen.lines for warning in same)
        more = f" ({times} times{', in variants' if len(same) > 1 else ''})" if times > 1 else ""
        yield Hit(f"{same[0].text}{more}", [warning.seen for warning in same])


def peers_closed(log: Log) -> Iterator[Hit]:
    """A peer has gone."""
    yield from _by_text([w for w in log.account.warnings.values() if _PEER_CLOSED.search(w.text)])


def ib_errors(log: Log) -> Iterator[Hit]:
    """A request on InfiniBand or RoCE failed, with the reason that status and vendor code give."""
    for hit in _by_text(_hits(log, "ib_completion_error")):
        status, vendor = _STATUS.search(hit.says), _VENDOR_ERROR.search(hit.says)
        reasons = [IB_STATUS.get(int(status[1]), "unknown status") if status else "no status"]
        if vendor and int(vendor[1]) in _VENDOR:
            reasons.append(f"vendor code: {_VENDOR[int(vendor[1])]}")
        yield Hit(f"{'; '.join(reasons)}: {hit.says}", hit.evidence)


def mismatches(log: Log) -> Iterator[Hit]:
    """Ranks called different collectives, or with different sizes."""
    yield from _by_text(_hits(log, "mismatch"))
    for _, desync, seen in log.account.of(f.Desync):
        yield Hit(desync.text, [seen])


def hints(log: Log) -> Iterator[Hit]:
    """Warnings that are advice."""
    yield from _by_text([w for w in log.account.warnings.values() if _HINT.search(w.text)])


def teardown(log: Log) -> Iterator[Hit]:
    """Service threads that lose their peers, as at any end of a job."""
    found = [w for w in log.account.warnings.values() if _TEARDOWN.search(w.text)]
    if found:
        yield Hit(f"{sum(w.seen.lines for w in found)} warnings of service threads", [w.seen for w in found])


def devices_closed(log: Log) -> Iterator[Hit]:
    """HCAs that are listed but cannot be opened."""
    found = [(w, _DEVICE.search(w.text)) for w in log.account.warnings.values()]
    names = sorted({match[1] for _, match in found if match and match[1]})
    seen = [warned.seen for warned, match in found if match]
    if seen:
        yield Hit(f"cannot open {', '.join(names) or 'a device'}", seen)


def versions_differ(log: Log) -> Iterator[Hit]:
    """Ranks with different versions of the library."""
    yield from _by_text(_hits(log, "version_mismatch"))
    versions: dict[str, Seen] = {}
    for _, version, seen in log.account.of(f.Version):
        if version.own:
            versions.setdefault(version.version, seen)
    if len(versions) > 1:
        yield Hit(f"versions {', '.join(sorted(versions))} in one log", list(versions.values()))


def inits_incomplete(log: Log) -> Iterator[Hit]:
    """Communicators whose init began and, as far as the log goes, never ended."""
    alike: dict[str, list[Communicator]] = {}
    for comm in log.communicators:
        started = [member for member in comm.members if member.init.start]
        if started and not comm.complete and not any(member.ended == "Destroy" for member in started):
            missing = set(range(comm.nranks)) - comm.ranks
            whom = f"no word of rank {spans(missing)}" if missing else "all ranks began"
            alike.setdefault(f"rank {spans(comm.ranks)} began, none finished; {whom}", []).append(comm)
    for says, comms in alike.items():
        which = comms[0].name if len(comms) == 1 else f"{len(comms)} communicators of {comms[0].nranks} ranks"
        yield Hit(f"{which}: {says}", [member.seen for comm in comms for member in comm.members])


def watchdogs(log: Log) -> Iterator[Hit]:
    """Collectives past PyTorch's time-out, and who is to be suspected."""
    by_work: dict[tuple[int | None, str], list[tuple[f.Watchdog, Seen]]] = {}
    for _, dog, seen in log.account.of(f.Watchdog):
        by_work.setdefault((dog.seq, dog.op), []).append((dog, seen))
    for (seq, op), dogs in by_work.items():
        ranks = {dog.rank for dog, _ in dogs}
        work = op if seq is None else f"{op} with SeqNum {seq}"
        suspicion, evidence = _suspects(log, ranks)
        says = f"{work} timed out after {dogs[0][0].ran_ms / 1000:.0f} s on rank {spans(ranks)}{suspicion}"
        yield Hit(says, [seen for _, seen in dogs[:3]] + evidence + [seen for _, seen in dogs[3:]])


def _suspects(log: Log, reported: set[int]) -> tuple[str, list[Seen]]:
    """The ranks that had launched least, else those that did not report, and what they said instead."""
    progress = {fact.rank: fact.enqueued for _, fact, _ in log.account.of(f.Progress)}
    heard = {fact.rank for _, fact, _ in log.account.of(f.Speaks)} | reported
    silent = set(range(max(heard) + 1)) - reported
    if len(set(progress.values())) > 1:
        suspects = {rank for rank, enqueued in progress.items() if enqueued == min(progress.values())}
        says = f"; rank {spans(suspects)} had launched least: look there first"
    elif silent:
        suspects = silent
        says = f"; rank {spans(suspects)} did not report: look there first"
    else:
        return "", []
    raised = [(fact, seen) for _, fact, seen in log.account.of(f.Raised) if fact.rank in suspects]
    if raised:
        says += f" (rank {raised[0][0].rank} raised {raised[0][0].error})"
    return says, [seen for _, seen in raised]


def ras_deaths(log: Log) -> Iterator[Hit]:
    """Peers that RAS lost."""
    for process, dead, seen in log.account.of(f.RasDead):
        yield Hit(f"{dead.text} (said by {who([process])})", [seen])


def silent_failures(log: Log) -> Iterator[Hit]:
    """Errors on their way up in a process that has warned of nothing: the first line is the origin."""
    warned = {warning.process for warning in log.account.warnings.values()}
    if None in warned:
        return  # whose it was is not known
    first: dict[f.Trail, list[Seen]] = {}
    told: set[Process | None] = set()
    recovered: dict[Process | None, int] = {}
    for process, init, seen in log.account.of(f.Init):
        if not init.start:
            recovered[process] = max(seen.number, recovered.get(process, 0))
    for process, trail, seen in log.account.of(f.Trail):
        if seen.number < recovered.get(process, 0):
            continue  # an init was completed after it: there was another way
        if process not in warned and process not in told and trail.code:
            told.add(process)
            first.setdefault(trail, []).append(seen)
    for trail, places in first.items():
        reason = RESULTS.get(trail.code, f"error {trail.code}")
        yield Hit(f"{reason} at {trail.place}, in {len(places)} process{'es' * (len(places) > 1)}", places)
    for _, failure, seen in log.account.of(f.CudaFailure):
        if not warned:
            yield Hit(f"CUDA failure '{failure.text}'", [seen])
