"""What the checks work on and what they return."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import cached_property
from typing import NamedTuple

from commwatch.collectors.nccl import facts as f
from commwatch.collectors.nccl.account import Account, Seen, Warned
from commwatch.collectors.nccl.communicators import Communicator, communicators
from commwatch.collectors.nccl.text import Process


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

    @cached_property
    def crosses_nodes(self) -> bool:
        """Whether some communicator has ranks on several nodes."""
        return any(
            len(comm.hosts) > 1 or (comm.layout is not None and comm.layout.nnodes > 1) for comm in self.communicators
        )

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
    shown = ", ".join(hosts[:4]) + (", ..." if len(hosts) > 4 else "")
    return f"{len(known)} processes on {shown}"
