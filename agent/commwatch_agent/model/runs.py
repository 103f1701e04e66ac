"""Which run of a job a process belongs to. Pure.

A run is what one launcher has started, over all restarts of its ranks. A name does not identify it: two jobs may have the same one.
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any, NamedTuple

from commwatch.wire.identity import process_began_ns

#: The end of a process that lives, in ns.
ALIVE_NS = 1 << 62
#: Number of a name; other nodes can report any text.
_NUMBER = re.compile("[2-9]|[1-9][0-9]")


class Run(NamedTuple):
    """A run of a job."""

    #: As it is shown: the job's name, or ``name#2`` for the second of two that run at the same time.
    name: str
    #: What only its ranks have, on all its nodes; empty: not known.
    common: str
    #: How often the launcher has restarted the ranks.
    restart: int


class Stored(NamedTuple):
    """What a run left beside the history is found by: its key, or its name and when it had that, in Unix time (s)."""

    key: str
    name: str
    from_s: float
    until_s: float


class Origin(NamedTuple):
    """What shows on one node which run a process belongs to; texts are empty where they are not known."""

    job: str
    owner: int | None
    boot: str
    restart: int
    rank: int
    world_size: int
    #: Number of its pid namespace.
    space: int
    process: str
    launcher: str
    #: What ``commwatch run`` has named, and where the ranks meet.
    watched: str
    rendezvous: str
    #: Begin and known end of the process, on the monotonic clock of the boot.
    began_ns: int
    until_ns: int = ALIVE_NS


def origin_of(identity: Mapping[str, Any], owner: int | None, until_ns: int = ALIVE_NS) -> Origin:
    """Return the origin of the process that wrote an identity."""
    space = identity.get("pid_namespace", 0)
    return Origin(
        str(identity["job"]),
        owner,
        str(identity.get("boot_id", "")),
        int(identity["restart"]),
        int(identity["rank"]),
        int(identity["world_size"]),
        space if isinstance(space, int) else 0,
        _process(space, identity.get("pid"), identity.get("started_ticks")),
        _process(space, *str(identity.get("launcher", ":")).split(":", 1)),
        str(identity.get("run", "")),
        str(identity.get("rendezvous", "")),
        process_began_ns(identity),
        until_ns,
    )


def _process(space: object, pid: object, ticks: object) -> str:
    """Return a text that only one process of a boot has; empty if it is not known, such as of a parent outside the container."""
    return f"{space}:{pid}:{ticks}" if pid and ticks != "" else ""


@dataclass
class KnownRun:
    """A run of this node, with the origins of its processes."""

    name: str
    #: Random; made by the agent that saw its first rank.
    key: str
    origins: list[Origin]

    def fit(self, origin: Origin) -> int:
        """Return 2 if something shows that a process belongs to this run, 1 if nothing contradicts it, 0 if it belongs to another one."""
        first = self.origins[0]
        if (first.job, first.boot) != (origin.job, origin.boot) or _differ(first.owner, origin.owner):
            return 0
        if origin.process and any(each.process == origin.process for each in self.origins):
            return 2
        at_once = self.began_ns <= origin.until_ns and origin.began_ns <= self.until_ns
        return self._fit_at_once(origin) if at_once else 2 * self._has_later(origin)

    def _fit_at_once(self, origin: Origin) -> int:
        """Return the fit of a process that lives beside others of this run."""
        related = _related(origin, self.origins)
        meets = [_meet(origin, each) for each in self.origins]
        if (related and self._is_new_life(origin)) or True in meets:
            return 2
        if None not in meets or _taken(origin, self.origins):
            return 0
        # Of ranks whose launchers differ, such as a shell script for each, only the size of the world is known.
        sized = origin.world_size == self.origins[0].world_size
        return 2 if related or self._is_watched_with(origin) else int(sized)

    def _has_later(self, origin: Origin) -> bool:
        """Return whether a process that lives before or after all others of this run belongs to it: a restart, or the next part of a script."""
        restart = max(each.restart for each in self.origins)
        # Each rank may have a launcher of its own, which is another one after a restart.
        meet = any(_meet(origin, each) for each in self.origins)
        related = _related(origin, self.origins) and self._is_new_life(origin)
        return self._is_watched_with(origin) or related or (meet and origin.restart > restart)

    def _is_watched_with(self, origin: Origin) -> bool:
        return bool(origin.watched) and any(each.watched == origin.watched for each in self.origins)

    def _is_new_life(self, origin: Origin) -> bool:
        return origin.restart not in {each.restart for each in self.origins}

    def is_live(self, origin: Origin) -> bool:
        """Return whether one of its processes lived when another one began."""
        return self.origins[0].boot == origin.boot and self.until_ns >= origin.began_ns

    @property
    def began_ns(self) -> int:
        """When its first process began."""
        return min(each.began_ns for each in self.origins)

    @property
    def until_ns(self) -> int:
        """When its last process ended; ``ALIVE_NS``: one lives."""
        return max(each.until_ns for each in self.origins)


def _differ(owner: int | None, other: int | None) -> bool:
    return None not in (owner, other) and owner != other


def _meet(one: Origin, other: Origin) -> bool | None:
    """Return whether ranks meet at the same place.

    ``None``: not known. One of them may name this node in another way, and in two containers ``localhost`` may be two places.
    """
    if not one.rendezvous or not other.rendezvous:
        return None
    (host, _, port), (its_host, _, its_port) = (each.rendezvous.rpartition(":") for each in (one, other))
    if port != its_port:
        return False
    if host == its_host:
        return True if one.space == other.space or not is_local(host) else None
    return None if is_local(host) or is_local(its_host) else False


def is_local(host: str) -> bool:
    """Return whether a host is one that every machine calls itself."""
    return host in ("localhost", "::1", "[::1]") or host.startswith("127.")


def _related(origin: Origin, known: list[Origin]) -> bool:
    """Return whether a process has the launcher of one of the others, or has launched it, or was launched by it."""
    return any(
        (origin.launcher and origin.launcher in (each.launcher, each.process))
        or (origin.process and origin.process == each.launcher)
        for each in known
    )


def _taken(origin: Origin, known: list[Origin]) -> bool:
    """Return whether another process that lives has the rank, unless one of the two has started the other: a forked child has its rank, too."""
    return any(
        each.rank == origin.rank
        and each.restart == origin.restart
        and min(each.until_ns, origin.until_ns) == ALIVE_NS
        and each.process not in ("", origin.launcher)
        and origin.process not in ("", each.launcher)
        for each in known
    )


def run_of(origin: Origin, known: Iterable[KnownRun]) -> KnownRun | None:
    """Return the run that a process belongs to, of several the surest and of these the latest; ``None``: it is the first of a new one."""
    fits = [(run.fit(origin), run) for run in known]
    _, found = max(
        ((fit, run) for fit, run in fits if fit), key=lambda each: (each[0], each[1].began_ns), default=(0, None)
    )
    return found


def common_id(key: str, shared: Sequence[str], world_size: int, local_world_size: int | None, ranks: Set[int]) -> str:
    """Return what only the ranks of a run have, on all its nodes; empty: not known.

    Args:
        key: of the run on this node; it is enough if all its ranks are here.
        shared: what its ranks have found in the job's store, oldest first: a restart may have a store of its own, so the latest counts. Empty
            ones have found nothing yet.
        local_world_size: number of its ranks on this node by its launcher, if known.
        ranks: those seen on this node.
    """
    alone = local_world_size == world_size or len(ranks) >= world_size
    return next(filter(None, reversed(shared)), key if alone else "")


def number_of(name: str) -> int:
    """Return the number of a run's name; 1 for one without.

    >>> number_of("train#3"), number_of("train")
    (3, 1)
    """
    _, _, number = name.rpartition("#")
    return int(number) if _NUMBER.fullmatch(number) and "#" in name else 1


def renamed(here: Mapping[str, str], taken: Set[str], there: Mapping[str, Iterable[str]]) -> dict[str, str]:
    """Return new names by old ones, so that a run gets one name on all nodes: that with the highest number, or the next that is free here.

    Args:
        here: names of this node's runs, by the id that the ranks of a run share.
        taken: all names on this node.
        there: names of these runs on other nodes.
    """
    found: dict[str, str] = {}
    for common, name in here.items():
        number = max(map(number_of, there.get(common, ())), default=1)
        if number <= number_of(name):
            continue
        base = name.rpartition("#")[0] if number_of(name) > 1 else name
        found[name] = free_name(base, taken | set(found.values()), number)
    return found


def free_name(job: str, taken: Container[str], number: int = 1) -> str:
    """Return the name of a run of a job with the first number, from ``number`` on, whose name is free; 1 is the job's name alone.

    >>> free_name("train", {"train", "train#2"})
    'train#3'
    """
    while (name := f"{job}#{number}" if number > 1 else job) in taken:
        number += 1
    return name
