"""The replicated parameters of a job, and which ranks differ in them, as ``replicas`` has found. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:
    from commwatch.ingest.replicas import SetJoin

#: ``rank``: these ranks differ from the others. ``one_of``: two values are equally frequent. ``all``: no two ranks of three or more agree.
Which = Literal["rank", "one_of", "all"]


class Odd(NamedTuple):
    """Ranks that differ, and in which parameters."""

    ranks: tuple[int, ...]
    which: Which
    places: tuple[int, ...]


@dataclass
class Episode:
    """Ranks that have other bits than the rest, from one check to another."""

    odd: Odd
    #: Step of the first check that found it, and of the complete check before that; ``None``: there was none.
    first: int
    right: int | None
    #: Monotonic times of the first and of the latest check that found it, in ns.
    since_ns: int
    latest_ns: int


class ReplicaSets:
    """The sets of replicated parameters of one job."""

    def __init__(self) -> None:
        #: By ``group_id`` and key.
        self.sets: dict[tuple[str, str], SetJoin] = {}

    def episodes(self) -> Iterator[tuple[SetJoin, Episode]]:
        """Yield the episodes of the sets of which a rank runs."""
        for join in self.sets.values():
            if any(totals.alive for totals in join.ranks.values()):
                yield from ((join, episode) for episode in join.episodes)
