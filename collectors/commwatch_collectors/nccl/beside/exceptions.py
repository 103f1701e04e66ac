"""Exceptions of Python that ended a process."""

from __future__ import annotations

import re
from collections.abc import Iterator

from commwatch_collectors.nccl import facts as f
from commwatch_collectors.nccl.checks.evidence import FINISHED, Log
from commwatch_collectors.nccl.lives import Seen

#: Exceptions of processes that are ended because another one failed.
FOLLOWS = re.compile(
    r"KeyboardInterrupt|SignalException|ChildFailedError|Dist(?:Backend|Store|Network)Error|RayTaskError|NCCL|"
    r"See (?:root cause|stack trace) above|Engine core initialization failed|EngineDeadError|SystemExit|CalledProcessError|"
    r"Process(?:Raised|Exited)Exception|(?:Ray)?ActorDiedError|RayActorError|WorkerCrashedError|Rendezvous\w{1,20}Error|"
    r"BrokenPipeError|ConnectionResetError|ConnectionRefusedError|EOFError|[Cc]onnection (?:reset|closed) by"
)
#: Lines from the last exception to the end of the log; lines between exceptions that came together; and lines from them to a
#: launcher's report or a failed call, which may also be printed before, because the output is buffered.
_NEAR_END, _TOGETHER, _BEFORE, _AFTER = 4, 60, 150, 50

_Found = list[tuple[f.Uncaught, Seen]]


def uncaught(log: Log, reported: Seen | None = None) -> _Found:
    """Return the first exception of each process that ended it, as far as the log shows: a program may handle others and go on.

    Args:
        log: the log.
        reported: where a launcher reports the first process that ended.
    """
    account = log.account
    others = {
        (seen.source, seen.number)
        for kind in (f.Gloo, f.Store, f.TorchError, f.Died)
        for _, _, seen in account.of(kind)
    }
    kept: dict[tuple[str, str], tuple[f.Uncaught, Seen]] = {}
    for together in _ending(log, reported):
        for fact, seen in together:
            whose = (seen.source, fact.who)
            is_own = not FOLLOWS.search(fact.error) and (seen.source, seen.number) not in others
            if is_own and (fact.supersedes or whose not in kept):
                kept[whose] = (fact, seen)
    return list(kept.values())


def _ending(log: Log, reported: Seen | None) -> Iterator[_Found]:
    """Yield the exceptions that came together with the end of a process: not before an init that was completed later."""
    account = log.account
    ends = [] if reported is None else [reported]
    ends += [warned.seen for warned in account.warnings.values() if warned.failed]
    going_on = [seen for _, init, seen in account.of(f.Init) if not init.start]
    for together in _together(log):
        source, first, last = together[0][1].source, together[0][1].number, together[-1][1].number
        reports = any(end.source == source and first - _AFTER <= end.number <= last + _BEFORE for end in ends)
        is_end = log.live is FINISHED and account.lasts.get(source, last) - last <= _NEAR_END
        if (reports or is_end) and not any(seen.source == source and seen.number > last for seen in going_on):
            yield together


def _together(log: Log) -> Iterator[_Found]:
    """Yield the exceptions that came together, of each file up to the one with which a user has ended the program."""
    found: _Found = []
    interrupted: set[str] = set()
    for _, fact, seen in sorted(log.account.of(f.Uncaught), key=lambda each: (each[2].source, each[2].number)):
        if "KeyboardInterrupt" in fact.error:
            interrupted.add(seen.source)
        if seen.source in interrupted:
            continue
        if found and (found[-1][1].source != seen.source or seen.number - found[-1][1].number > _TOGETHER):
            yield found
            found = []
        found.append((fact, seen))
    if found:
        yield found
