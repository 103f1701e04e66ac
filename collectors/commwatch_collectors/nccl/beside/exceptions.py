"""Exceptions of Python that ended a process."""

from __future__ import annotations

import re

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
#: Lines from an exception to the end of the log, or from it to a launcher's report, if it has ended the process.
_NEAR_END, _NEAR_REPORT = 40, 300


def uncaught(log: Log, reported: Seen | None = None) -> list[tuple[f.Uncaught, Seen]]:
    """Return the first exception of each process that ended it, as far as the log shows: another one may have been handled.

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
    ends = [] if reported is None else [reported]
    ends += [warned.seen for warned in account.warnings.values() if warned.failed]
    kept: dict[tuple[str, str], tuple[f.Uncaught, Seen]] = {}
    for _, fact, seen in sorted(account.of(f.Uncaught), key=lambda each: (each[2].source, each[2].number)):
        if "KeyboardInterrupt" in fact.error:
            break  # its user has ended the program
        near = any(end.source == seen.source and abs(end.number - seen.number) <= _NEAR_REPORT for end in ends)
        last = account.lasts.get(seen.source, seen.number)
        if not near and (log.live is not FINISHED or last - seen.number > _NEAR_END):
            continue
        whose = (seen.source, fact.who)
        is_own = not FOLLOWS.search(fact.error) and (seen.source, seen.number) not in others
        if is_own and (fact.supersedes or whose not in kept):
            kept[whose] = (fact, seen)
    return list(kept.values())
