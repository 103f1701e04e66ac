"""Checks for what went wrong: errors, time-outs, inits that never ended."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator

from commwatch_collectors.nccl import facts as f
from commwatch_collectors.nccl.account import Account
from commwatch_collectors.nccl.beside.form import who as marks_of
from commwatch_collectors.nccl.beside.torch import OTHERS
from commwatch_collectors.nccl.checks.evidence import Hit, Log, many, some, who
from commwatch_collectors.nccl.checks.reasons import (
    DEVICE,
    TEARDOWN,
    by_words,
    errors_of,
    hints_that_failed,
    is_reason,
    is_remark,
    once,
    words_of,
)
from commwatch_collectors.nccl.classes import OTHER
from commwatch_collectors.nccl.communicators import Communicator
from commwatch_collectors.nccl.lives import NO_FAILURE, Seen, Warned
from commwatch_collectors.nccl.text import Process
from commwatch_collectors.spans import missing_ranks, ranks

#: ``ibv_wc_status`` of the completion of a request.
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
#: Sockets return "internal error" only when the communicator is being aborted: the cause is elsewhere.
_ABORTED = re.compile(r"(?:misc/)?(?:nccl)?socket\.cc:\d+ 3$")
#: Vendor codes of mlx5, as they come with these statuses.
_VENDOR = {
    81: "local protection",
    129: "transport retries exceeded",
    136: "remote access",
    138: "remote invalid request",
    244: "flushed by an earlier error",
    245: "flushed by an earlier error",
    249: "flushed by an earlier error",
}
RESULTS = {
    1: "unhandled CUDA error",
    2: "unhandled system error",
    3: "internal error",
    4: "invalid argument",
    5: "invalid usage",
    6: "remote process or network error",
}
_FLUSHED = 5
_STATUS = re.compile(r"(?:with error |status=(?:[A-Z_]{1,40}\()?)(\d{1,9})")
_SECONDS = re.compile(r"[\d.]+ ?s\b")
_VENDOR_ERROR = re.compile(r"vendor[ _]err[ =](\d+)")
#: Printed in each init, and only with NCCL_DEBUG_SUBSYS=INIT (connections also with NET).
_IN_INIT: tuple[type[f.Fact], ...] = (f.Trees, f.Channels, f.Ring)
#: Events of a port that need no action, as ``ibv_event_type_str`` names them.
_HARMLESS = re.compile(
    r"(?i)port active|client reregist|(?:LID|SM|GID table|P_?Key(?: table)?) change|communication established|last WQE|send queue drained"
)
#: What a rank calls, as PyTorch reports it at TORCH_DISTRIBUTED_DEBUG=DETAIL; and what DistributedDataParallel finds.
_CALLS = re.compile(r"rank \d+ calls ")
_CHECKED = re.compile(r"rank \d+ calls |Detected mismatch between collectives")
_MODEL = re.compile(r"DDP expects same model|appears not to match")
#: Ranks whose calls are shown.
_MOST_CALLS = 4
_BRANCH = "Look for a branch around the collective that depends on rank or data."
_OTHER_MODEL = (
    "The ranks have built different models, so their collectives would differ.",
    "Build the same model on all ranks: compare the code, the settings and the checkpoint, and look for parameters that depend on rank "
    "or data.",
)
#: NCCL's error in an exception -> what to do beside switching its warnings on.
_OF_ERROR = {
    "invalid usage": "It is often two ranks on one GPU, or a communicator used after its end.",
    "invalid argument": "Check the arguments of the call: a tensor on another GPU, or a rank or size that does not fit the group.",
    "unhandled system error": "It is often the network or shared memory: NCCL_SOCKET_IFNAME, /dev/shm, ulimit -l, /dev/infiniband.",
    "unhandled cuda error": "It is often no memory left on the GPU, a kernel that failed before, or a driver or build that does not fit the GPU: "
    "look for Xid errors in dmesg.",
    "internal error": "It is often a peer that ended first, or a setting of the network that does not fit the node.",
    "remote process exited": "Find the process that ended first, then look at the network between the two.",
    "remote error": "Find the process that ended first, then look at the network between the two.",
}
_AGAIN = "Run again with NCCL_DEBUG=WARN."


def ib_errors(log: Log) -> Iterator[Hit]:
    """A request on InfiniBand or RoCE failed, with the reason that status and vendor code give: once for each status."""
    by_status: dict[int | None, list[Warned]] = {}
    for warning in once(errors_of(log, "ib_completion_error")):
        found = _STATUS.search(warning.text)
        by_status.setdefault(int(found[1]) if found else None, []).append(warning)
    # When one request has failed, the others of its queue are flushed, which is not a failure of their own.
    flushed = by_status.pop(_FLUSHED, []) if len(by_status) > 1 else []
    for status, warned in by_status.items():
        vendor = _VENDOR_ERROR.search(warned[0].text)
        reasons = [IB_STATUS.get(status, f"status {status}") if status is not None else "no status"]
        if vendor and int(vendor[1]) in _VENDOR and _VENDOR[int(vendor[1])] not in reasons[0]:
            reasons.append(f"vendor code {vendor[1]}: {_VENDOR[int(vendor[1])]}")
        times = sum(warning.seen.lines for warning in warned)
        more = [f" ({times} times)"] if times > 1 else []
        more += [f" (and {many(len(flushed), 'request')} flushed by it)"] if flushed else []
        says = f"{'; '.join(reasons)}: {warned[0].text}{''.join(more)}"
        words = words_of(warned[0])
        means, do = ("", "") if words is None else (words.means, words.do)
        yield Hit(says, [warning.seen for warning in warned + flushed], means, do)
        flushed = []


def ib_events(log: Log) -> Iterator[Hit]:
    """Events of a card or port that are faults."""
    yield from by_words(log, [w for w in errors_of(log, "ib_async_event") if not _HARMLESS.search(w.text)])


def ib_changes(log: Log) -> Iterator[Hit]:
    """Events of a card or port that are harmless."""
    yield from by_words(log, [w for w in log.warned("ib_async_event") if _HARMLESS.search(w.text)])


def mismatches(log: Log) -> Iterator[Hit]:
    """Ranks called different collectives, or with different sizes."""
    yield from by_words(log, errors_of(log, "mismatch"))
    found: list[tuple[dict[str, None], list[Seen]]] = []
    for _, desync, seen in log.account.of(f.Desync):
        sides = dict.fromkeys(desync.text.split("; ")) if _CALLS.match(desync.text) else {desync.text: None}
        same = next((group for group in found if _are_one(group[0], sides)), None)
        if same is None:
            found.append((sides, [seen]))
        else:
            same[0].update(sides)
            same[1].append(seen)
    for sides, places in found:
        calls = [side for side in sides if side != OTHERS]
        says = "; ".join(calls[:_MOST_CALLS] if len(calls) > 1 else sides)
        says += f"; and {len(calls) - _MOST_CALLS} more ranks" if len(calls) > _MOST_CALLS else ""
        model = _MODEL.search(says)
        means, do = _OTHER_MODEL if model else ("", _BRANCH if _CHECKED.match(says) else "")
        yield Hit(says, places, means, do)


def _are_one(one: dict[str, None], other: dict[str, None]) -> bool:
    """Return whether two reports are of one mismatch: each rank reports its own side, and perhaps that of another."""
    return any(side in other for side in one)


def teardown(log: Log) -> Iterator[Hit]:
    """Service threads that lose their peers, as at the end of any job."""
    reasons = {id(w) for w in hints_that_failed(log)}
    found = once(w for w in log.warnings if TEARDOWN.search(w.text) and id(w) not in reasons)
    if found:
        yield Hit(f"{sum(w.seen.lines for w in found)} warnings from service threads", [w.seen for w in found])


def devices_closed(log: Log) -> Iterator[Hit]:
    """HCAs that are listed but cannot be opened."""
    reasons = {id(w) for w in hints_that_failed(log)}
    found = [(w, DEVICE.search(w.text)) for w in log.warnings if id(w) not in reasons]
    names = sorted({match[1] for _, match in found if match and match[1]})
    seen = [warned.seen for warned, match in found if match]
    if seen:
        yield Hit(f"cannot open {some(names) or 'a device'}", seen)


def versions_differ(log: Log) -> Iterator[Hit]:
    """Ranks with different versions of the library."""
    yield from by_words(log, errors_of(log, "version_mismatch"))
    by_version: dict[str, dict[Process | None, Seen]] = {}
    for process, version, seen in log.account.of(f.Version):
        if version.own:
            by_version.setdefault(version.version, {})[process] = seen
    for versions in log.disagreements(by_version):
        parts = (f"{version} ({who(by)})" for version, by in sorted(versions.items()))
        yield Hit(f"{'; '.join(parts)}{log.doubt}", [next(iter(by.values())) for by in versions.values()])
    # Before 2.22 the line is bare, and only rank 0 of each communicator prints it.
    bare = {version: by[None] for version, by in by_version.items() if None in by}
    if len(bare) > 1:
        yield Hit(f"versions {', '.join(sorted(bare))} in one log (which may hold several jobs)", list(bare.values()))


def inits_incomplete(log: Log) -> Iterator[Hit]:
    """Communicators whose init began and did not end within the log."""
    if log.live.initialises:
        return
    cut, failed = cut_in_init(log), _failed(log)
    alike: dict[str, list[Communicator]] = {}
    for comm in log.communicators:
        if not _began_only(comm) or comm in cut or None in failed or comm.processes & failed:
            continue
        if not comm.processes <= log.live.past:
            missing = missing_ranks(comm.ranks, comm.nranks)
            whom = f"{ranks(comm.ranks)} began; the log has nothing from {missing}"
            alike.setdefault(
                whom if missing else f"all {comm.nranks} ranks began, and none had finished when the log ended", []
            ).append(comm)
    for says, comms in alike.items():
        which = comms[0].name if len(comms) == 1 else f"{len(comms)} communicators of {comms[0].nranks} ranks"
        yield Hit(f"{which}: {says}", [member.seen for comm in comms for member in comm.members])
    # Before 2.18.3 the begin of an init is not printed; the facts printed during it show it.
    on_their_way = _on_their_way(log)
    if (
        on_their_way
        and not failed
        and not any(comm.complete for comm in log.communicators)
        and not _pids(on_their_way) <= log.live.past
    ):
        steps = [seen for by in on_their_way.values() for seen in by]
        if not log.ends_in(min(steps, key=lambda seen: seen.number), steps):
            says = f"{who(on_their_way)} began an init and did not finish it"
            yield Hit(says, [by[0] for by in on_their_way.values()])


def _failed(log: Log) -> set[tuple[str, int] | None]:
    """Return host and pid of the processes whose log has a failure; ``None`` for one of an unknown process.

    A process that failed has not waited for others, and what they wait for is that process.
    """
    found = {w.process for w in log.warnings if w.failed or is_reason(log, w)}
    found |= {process for process, trail, _ in log.account.of(f.Trail) if trail.code not in NO_FAILURE}
    return {None if process is None else (process.host, process.pid) for process in found}


def open_inits(account: Account) -> tuple[int, int, int]:
    """Return numbers that change while inits go on: the ranks that began one, those not finished, and lines about these."""
    unfinished = [member for member in account.members if not member.complete]
    pending = (facts for life in account.lives.values() for facts in life.pending.values())
    lines = sum(
        seen.lines
        for facts in (*(member.facts for member in unfinished), *pending)
        for found in facts.values()
        for seen in found.values()
    )
    return len(account.members), len(unfinished), lines


def _began_only(comm: Communicator) -> bool:
    began = [member for member in comm.members if member.init.start]
    return bool(began) and not comm.complete and not any(member.ended == "Destroy" for member in began)


def cut_in_init(log: Log) -> list[Communicator]:
    """Return communicators whose ranks are all in the log and still connect at its end: an excerpt, or a live job."""
    began = [comm for comm in log.communicators if _began_only(comm)]
    if not began or any(len(comm.ranks) < comm.nranks for comm in began):
        return []
    starts = [member.seen for comm in began for member in comm.members]
    steps = [seen for kind in (f.Via, f.Ring, f.Trees, f.Connected) for comm in began for _, _, seen in comm.of(kind)]
    return began if log.ends_in(max(starts, key=lambda seen: seen.number), steps) else []


def _on_their_way(log: Log) -> dict[Process, list[Seen]]:
    """Return, by process, the facts of inits that have not ended, where no line shows their begin."""
    return {
        life.process: [seen for found in life.pending.values() for facts in found.values() for seen in facts.values()]
        for life in log.account.lives.values()
        if not life.says_start and any(kind in found for found in life.pending.values() for kind in _IN_INIT)
    }


def _pids(processes: Iterable[Process]) -> set[tuple[str, int]]:
    return {(process.host, process.pid) for process in processes}


def ras_deaths(log: Log) -> Iterator[Hit]:
    """Peers that RAS lost."""
    yield from _by_ras(log, late=False)


def ras_delays(log: Log) -> Iterator[Hit]:
    """Peers that RAS had to wait for; they may have answered later."""
    yield from _by_ras(log, late=True)


def _by_ras(log: Log, late: bool) -> Iterator[Hit]:
    alike: dict[str, list[tuple[Process | None, Seen]]] = {}
    for process, dead, seen in log.account.of(f.RasDead):
        if ("timeout warning" in dead.text) is late:
            alike.setdefault(_SECONDS.sub("# s", dead.text), []).append((process, seen))
    for text, printed in alike.items():
        yield Hit(f"{text} (reported by {who(process for process, _ in printed)})", [seen for _, seen in printed])


def is_known(log: Log) -> bool:
    """Return whether the log has NCCL's own account of a failure."""
    known = any((w.kind != OTHER or w.failed) and not is_remark(w) for w in log.warnings)
    return known or any(trail.code not in NO_FAILURE for _, trail, _ in log.account.of(f.Trail))


def torch_errors(log: Log) -> Iterator[Hit]:
    """PyTorch gave up on an NCCL call; not reported where the log has NCCL's own account of a failure."""
    if is_known(log):
        return
    by_reason: dict[str, list[Seen]] = {}
    times: Counter[str] = Counter()
    for _, error, seen in log.account.of(f.TorchError):
        if error.who:
            continue  # of another framework
        by_reason.setdefault(error.reason, []).append(seen)
        times[error.reason] += seen.lines
    for reason, places in by_reason.items():
        of_error = next((text for error, text in _OF_ERROR.items() if reason.lower().startswith(error)), "")
        first = marks_of(places[0].line)
        raised = f"; {'first ' if times[reason] > 1 else ''}raised by {first}" if first.startswith("rank") else ""
        says = f"{reason} ({many(times[reason], 'time')}){raised}"
        yield Hit(says, places, do=f"{_AGAIN} {of_error}".strip())


def silent_failures(log: Log) -> Iterator[Hit]:
    """Errors passed up the call stack in a process without warnings: the first line is the origin."""
    warned = {warning.process for warning in log.warnings if warning.quoted_by is None and not is_remark(warning)}
    if None in warned:
        return  # the process of a warning is not known
    first: dict[tuple[str, int], list[Seen]] = {}
    reported: set[Process | None] = set()
    recovered: dict[Process | None, int] = {}
    for process, init, seen in log.account.of(f.Init):
        if not init.start:
            recovered[process] = max(seen.number, recovered.get(process, 0))
    for process, trail, seen in log.account.of(f.Trail):
        if seen.number < recovered.get(process, 0):
            continue  # an init was completed after it, so NCCL found another way
        if process not in warned and process not in reported and trail.code not in NO_FAILURE:
            reported.add(process)
            if not _ABORTED.match(f"{trail.place} {trail.code}"):
                first.setdefault((trail.place.partition(":")[0], trail.code), []).append(seen)
    for (place, code), places in first.items():
        reason = RESULTS.get(code, f"error {code}")
        yield Hit(f"{reason} in {place}, in {many(len(places), 'process', 'processes')}", places)
    failed = {failure: seen for _, failure, seen in log.account.of(f.CudaFailure)}
    for failure, seen in failed.items():
        if not warned and not TEARDOWN.search(failure.text):
            yield Hit(f"CUDA failure '{failure.text}'", [seen])
