"""What the checks work on and what they return."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cached_property
from itertools import islice
from typing import NamedTuple, TypeVar

from commwatch.collectors.nccl import facts as f
from commwatch.collectors.nccl.account import Account, Seen, Warned
from commwatch.collectors.nccl.communicators import Communicator, communicators
from commwatch.collectors.nccl.text import Process

_T = TypeVar("_T")
#: Part of the lines that is taken for all: messages that carry no fact are not counted.
_MOSTLY = 0.8
#: Different things that processes of one job say, each of which is compared with each other.
_MOST_SETS = 256


class Hit(NamedTuple):
    """Something a check has found: what exactly, in one line, and the lines that show it."""

    says: str
    evidence: list[Seen]


Check = Callable[["Log"], Iterable[Hit]]


class Log:
    """An account as the checks see it: what several of them need is worked out once."""

    def __init__(self, account: Account) -> None:
        self.account = account

    @cached_property
    def communicators(self) -> list[Communicator]:
        """Its communicators."""
        return communicators(self.account)

    @cached_property
    def env(self) -> dict[str, dict[str, dict[Process | None, Seen]]]:
        """Settings: name -> value -> who said so."""
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
        """Whether what follows ``begin`` to the log's end is little else than ``steps`` (told only of a single file)."""
        found = list(steps)
        if not found or {seen.source for seen in found} != {begin.source}:
            return False
        return sum(seen.lines for seen in found) >= _MOSTLY * (self.account.n_lines - begin.number)

    @cached_property
    def crosses_nodes(self) -> bool:
        """Whether some communicator has ranks on several nodes."""
        return any(comm.nodes > 1 for comm in self.communicators)

    @cached_property
    def jobs(self) -> dict[Process, int]:
        """Which processes work together, by the communicators that they share; others are not in it."""
        jobs: dict[Process, int] = {}
        members: dict[int, set[Process]] = {}
        for number, comm in enumerate(self.communicators):
            mine = {member.process for member in comm.members}
            old = {jobs[process] for process in mine if process in jobs}
            # Those of the smaller jobs become those of the largest: there may be as many communicators as processes.
            largest = max(old, key=lambda job: len(members[job]), default=number)
            mine.update(*(members.pop(job) for job in old - {largest}))
            members.setdefault(largest, set()).update(mine)
            jobs.update(dict.fromkeys(mine, largest))
        return jobs

    def disagreements(
        self, said: Mapping[_T, Mapping[Process | None, Seen]]
    ) -> Iterator[dict[_T, dict[Process, Seen]]]:
        """For each job with processes that have no value in common: who said what.

        A process may say several things (a setting is changed, two plug-ins are tried): that alone is no difference.
        """
        by_job: dict[int | None, dict[Process, dict[_T, Seen]]] = {}
        for value, by in said.items():
            for process, seen in by.items():
                if process is not None:
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

    def net_links(self) -> Iterator[tuple[Process | None, f.Via, Seen]]:
        """Connections over a network."""
        return ((p, via, seen) for p, via, seen in self.account.of(f.Via) if via.kind.startswith("NET/"))

    def setting(self, name: str, *values: str) -> list[Seen]:
        """Where ``name`` was said to be one of ``values`` (any, where none is given)."""
        by_value = self.env.get(name, {})
        return [seen for value, by in by_value.items() if not values or value in values for seen in by.values()]

    def warned(self, *kinds: str) -> list[Warned]:
        """Warnings of some classes."""
        return [warned for warned in self.account.warnings.values() if warned.kind in kinds]


def who(processes: Iterable[Process | None]) -> str:
    """Processes for people: by host, or the pids of one."""
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
    """Names for people: the first ones, and how many more there are."""
    found = list(names)
    more = f" and {len(found) - most} more" if len(found) > most else ""
    return ", ".join(found[:most]) + more


def many(number: int, thing: str, plural: str = "") -> str:
    """A number of things for people: ``1 pair``, ``2 pairs``."""
    return f"{number} {thing if number == 1 else plural or thing + 's'}"
