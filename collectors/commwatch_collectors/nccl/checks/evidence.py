"""Input and results of the checks of a log."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from copy import copy
from dataclasses import replace
from functools import cached_property, wraps
from itertools import islice
from typing import NamedTuple, TypeVar

from commwatch_collectors.nccl import facts as f
from commwatch_collectors.nccl.account import Account
from commwatch_collectors.nccl.checks.order import CAUSE
from commwatch_collectors.nccl.communicators import Communicator, communicators
from commwatch_collectors.nccl.lives import Facts, Life, Seen, Warned
from commwatch_collectors.nccl.text import Process

_T = TypeVar("_T")
#: Share (0 to 1) of the lines that counts as all of them: messages without a fact are not counted.
_MOSTLY = 0.8
#: Most distinct sets of values in one job that are compared with each other.
_MOST_SETS = 256


class Hit(NamedTuple):
    """One result of a check: one line of text, and the log lines that show it."""

    says: str
    evidence: Sequence[Seen]
    #: Instead of the rule's, if this case has a meaning and a remedy of its own.
    means: str = ""
    do: str = ""
    #: It only follows from another finding of this log.
    follows: bool = False


Check = Callable[["Log"], Iterable[Hit]]


class Rule(NamedTuple):
    """One kind of finding."""

    name: str
    severity: str
    title: str
    #: What it means for the job, and what to do about it.
    means: str
    do: str
    check: Check
    #: How far from the cause of a failure it is, for the order of errors (``order``).
    depth: int = CAUSE


class Live(NamedTuple):
    """What is known of a running job, but not from its log."""

    #: The facts of some init changed only just now.
    initialises: bool = False
    #: Host and pid of the processes of earlier runs.
    past: Set[tuple[str, int]] = frozenset()


#: For a log that is not written any more.
FINISHED = Live()


class Log:
    """An account with the derived values that several checks share."""

    def __init__(self, account: Account, live: Live = FINISHED) -> None:
        self.account, self.live = account, live
        #: Of ``reasons``: the hints that are the reason of a failure, once they are known.
        self.failed_hints: list[Warned] | None = None

    @cached_property
    def communicators(self) -> list[Communicator]:
        """Its communicators."""
        return communicators(self.account)

    @cached_property
    def env(self) -> dict[str, dict[str, dict[Process | None, Seen]]]:
        """Settings: name -> value -> processes that printed it."""
        found: dict[str, dict[str, dict[Process | None, Seen]]] = {}
        for process, setting, seen in self.account.of(f.Env):
            found.setdefault(setting.name, {}).setdefault(setting.value, {})[process] = seen
        return found

    @cached_property
    def networks(self) -> dict[str, dict[Process | None, Seen]]:
        """Network -> the processes that use it."""
        found: dict[str, dict[Process | None, Seen]] = {}
        for process, network, seen in self.account.of(f.Network):
            found.setdefault(network.name, {}).setdefault(process, seen)
        return found

    @cached_property
    def hcas(self) -> dict[Process, tuple[f.Hcas, Seen]]:
        """InfiniBand and RoCE devices of each process."""
        return {p: (hcas, seen) for p, hcas, seen in self.account.of(f.Hcas) if p is not None}

    def ends_in(self, begin: Seen, steps: Iterable[Seen]) -> bool:
        """Return whether the log from ``begin`` to its end is mostly ``steps``; False if they are in several files."""
        found = list(steps)
        if not found or {seen.source for seen in found} != {begin.source}:
            return False
        before = begin.number - self.account.firsts.get(begin.source, 1) + 1
        return sum(seen.lines for seen in found) >= _MOSTLY * (self.account.n_lines - before)

    @cached_property
    def crosses_nodes(self) -> bool:
        """Whether some communicator has ranks on several nodes."""
        return any(comm.nodes > 1 for comm in self.communicators)

    @cached_property
    def jobs(self) -> dict[Process, int]:
        """Job number by process: processes that share communicators form a job; others are absent."""
        jobs: dict[Process, int] = {}
        members: dict[int, set[Process]] = {}
        for number, comm in enumerate(self.communicators):
            mine = {member.process for member in comm.members}
            old = {jobs[process] for process in mine if process in jobs}
            # Merge the smaller jobs into the largest: there may be as many communicators as processes.
            largest = max(old, key=lambda job: len(members[job]), default=number)
            mine.update(*(members.pop(job) for job in old - {largest}))
            members.setdefault(largest, set()).update(mine)
            jobs.update(dict.fromkeys(mine, largest))
        return jobs

    @cached_property
    def parts(self) -> list[Log]:
        """A log for each job, and one for what is of no job; this one alone if it has at most one."""
        if len(set(self.jobs.values())) < 2:
            return [self]
        account = self.account
        lives: dict[int | None, dict[Process, Life]] = {None: {}}
        warnings: dict[int | None, dict[tuple[Process | str | None, str], Warned]] = {}
        for process, life in account.lives.items():
            lives.setdefault(self.jobs.get(process), {})[process] = life
        for key, warned in account.warnings.items():
            job = None if warned.process is None else self.jobs.get(warned.process)
            warnings.setdefault(job, {})[key] = warned
        found = []
        for job, mine in lives.items():
            part = copy(account)
            part.lives, part.warnings = mine, warnings.get(job, {})
            part.loose = account.loose if job is None else Facts()
            found.append(Log(part, self.live))
        return found

    @property
    def doubt(self) -> str:
        """What to add where processes are compared: without communicators a log does not show who belongs together."""
        return "" if self.jobs else " (in one log, which may hold several jobs)"

    def disagreements(
        self, reports: Mapping[_T, Mapping[Process | None, Seen]]
    ) -> Iterator[dict[_T, dict[Process, Seen]]]:
        """For each job with processes that have no value in common, yield the processes by value.

        Processes without a communicator are compared only where no process has one: beside a job they may be of any other.
        A process may print several values (a changed setting, two plug-ins tried): that alone is no disagreement.
        """
        by_job: dict[int | None, dict[Process, dict[_T, Seen]]] = {}
        for value, by in reports.items():
            for process, seen in by.items():
                if process is not None and self._is_comparable(process):
                    by_job.setdefault(self.jobs.get(process), {}).setdefault(process, {})[value] = seen
        for processes in by_job.values():
            sets = list(islice({frozenset(values): None for values in processes.values()}, _MOST_SETS))
            if all(not one.isdisjoint(other) for one in sets for other in sets):
                continue
            found: dict[_T, dict[Process, Seen]] = {}
            for process, values in processes.items():
                for value, seen in values.items():
                    found.setdefault(value, {})[process] = seen
            yield found

    def _is_comparable(self, process: Process) -> bool:
        """Return whether the process runs together with the others of its job, as far as is known."""
        return (process in self.jobs or not self.jobs) and (process.host, process.pid) not in self.live.past

    def net_links(self) -> Iterator[tuple[Process | None, f.Via, Seen]]:
        """Yield the connections over a network."""
        return ((p, via, seen) for p, via, seen in self.account.of(f.Via) if via.kind.startswith("NET/"))

    def setting(self, name: str, *values: str) -> list[Seen]:
        """Return where the setting ``name`` was printed as one of ``values`` (any, if none is given)."""
        by_value = self.env.get(name, {})
        return [seen for value, by in by_value.items() if not values or value in values for seen in by.values()]

    @cached_property
    def warnings(self) -> list[Warned]:
        """The warnings, and the texts that exceptions quote; of a warning that is in the log and quoted, only the warning, with its failure."""
        every = list(self.account.warnings.values())
        quoted = {warned.text: warned.failed for warned in every if warned.quoted_by is not None}
        printed = [warned for warned in every if warned.quoted_by is None]
        texts = {warned.text for warned in printed}
        found = [
            replace(warned, failed=quoted[warned.text]) if warned.text in quoted and not warned.failed else warned
            for warned in printed
        ]
        return found + [warned for warned in every if warned.quoted_by is not None and warned.text not in texts]

    @cached_property
    def exceptions_without_reason(self) -> list[Seen]:
        """Where PyTorch raised an exception for a call of NCCL, if neither it nor a failed call shows the reason."""
        account = self.account
        if any(w.failed for w in self.warnings) or any(True for _ in account.of(f.Trail)):
            return []
        return [seen for _, _, seen in account.of(f.TorchError)]

    def warned(self, *kinds: str) -> list[Warned]:
        """Warnings of some classes."""
        return [warned for warned in self.warnings if warned.kind in kinds]


def by_job(check: Check) -> Check:
    """Return the check made of each job by itself: what one job has is no reason to expect it of another."""

    @wraps(check)
    def checked(log: Log) -> Iterator[Hit]:
        found: dict[Hit, list[Seen]] = {}
        for part in log.parts:
            for hit in check(part):
                found.setdefault(hit._replace(evidence=()), []).extend(hit.evidence)
        yield from (hit._replace(evidence=evidence) for hit, evidence in found.items())

    return checked


def who(processes: Iterable[Process | None]) -> str:
    """Return processes as text: host and pid of a single one, else their number and hosts."""
    known = {process for process in processes if process is not None}
    hosts = sorted({process.host for process in known})
    if not known:
        return "an unknown process"
    if len(known) == 1:
        process = next(iter(known))
        return f"{process.host} pid {process.pid}"
    shown = some(hosts)
    return f"{len(known)} processes on {shown}"


def some(names: Iterable[str], most: int = 4) -> str:
    """Return names as text: the first ``most``, and the number of the others."""
    found = list(names)
    more = f" and {len(found) - most} more" if len(found) > most else ""
    return ", ".join(found[:most]) + more


def many(number: int, thing: str, plural: str = "") -> str:
    """Return a number of things as text: ``1 pair``, ``2 pairs``."""
    return f"{number} {thing if number == 1 else plural or thing + 's'}"
