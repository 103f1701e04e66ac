"""What clients share: turns and places; one client cannot keep the others out, however much it asks for."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Callable, Hashable, Sequence
from typing import TypeVar

_T = TypeVar("_T")


class Turns:
    """Hands out turns on one event loop.

    Waiting clients are served round robin: a client with one request waits for at most one request of each other client.

    Args:
        at_once: number of turns.
        of_one: most turns of one client; ``None``: all.
    """

    def __init__(self, at_once: int, of_one: int | None = None) -> None:
        self._free, self._of_one = at_once, at_once if of_one is None else of_one
        #: Turns by client.
        self._held: Counter[Hashable] = Counter()
        #: Waiting requests by client, in the order in which clients are served. Those that have given up are skipped.
        self._waiting: dict[Hashable, deque[asyncio.Future[None]]] = {}

    async def take(self, client: Hashable, patience_s: float) -> None:
        """Wait for a turn; the caller ends it with ``give_back``.

        Raises:
            TimeoutError: there was no turn within ``patience_s`` seconds.
        """
        mine = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(client, deque()).append(mine)
        self._serve()
        try:
            await asyncio.wait({mine}, timeout=patience_s)
        except asyncio.CancelledError:
            if not mine.cancel():
                self.give_back(client)
            raise
        if not mine.done():
            mine.cancel()
            raise TimeoutError

    def give_back(self, client: Hashable) -> None:
        """End a turn of a client; the next request gets it."""
        self._free += 1
        self._held[client] -= 1
        if not self._held[client]:
            del self._held[client]
        self._serve()

    def _serve(self) -> None:
        while self._free:
            client = next((each for each in self._waiting if self._held[each] < self._of_one), None)
            if client is None:
                return
            line = self._waiting.pop(client)
            mine = line.popleft()
            if line:
                self._waiting[client] = line  # at the end
            if not mine.done():
                mine.set_result(None)
                self._held[client] += 1
                self._free -= 1


class AllTaken(Exception):
    """All places are taken, and no client has so many that one of them could make room."""


class TooManyOfOne(Exception):
    """The client has as many places as one client may have."""


class Place:
    """A place of a client.

    Args:
        give_way: called once, if another client gets the place.
    """

    def __init__(self, client: str, give_way: Callable[[], None]) -> None:
        self.client, self.give_way = client, give_way


class Places:
    """Hands out places.

    If all are taken, a client with fewer places than others gets the newest place of the client with the most, as long as that client
    keeps more than the new one has then, or as many. So places do not go back and forth.

    Args:
        most: number of places.
        of_one: most places of one client.
    """

    def __init__(self, most: int, of_one: int) -> None:
        self._most, self._of_one = most, of_one
        #: Places by client, the newest last. Clients without places are left out.
        self._held: dict[str, list[Place]] = {}
        #: Number of places that another client got.
        self.displaced = 0

    def take(self, client: str, give_way: Callable[[], None]) -> Place:
        """Return a place; the caller returns it with ``give_back``.

        Raises:
            TooManyOfOne: the client has as many places as it may have.
            AllTaken: there is none.
        """
        mine = len(self._held.get(client, ()))
        if mine >= self._of_one:
            raise TooManyOfOne
        if sum(map(len, self._held.values())) >= self._most:
            self._make_room(mine)
        place = Place(client, give_way)
        self._held.setdefault(client, []).append(place)
        return place

    def _make_room(self, mine: int) -> None:
        newest = last_of_largest(list(self._held.values()), mine)
        if newest is None:
            raise AllTaken
        self.give_back(newest)
        self.displaced += 1
        newest.give_way()

    def give_back(self, place: Place) -> None:
        """Return a place; without effect if another client has got it."""
        held = self._held.get(place.client, [])
        if place in held:
            held.remove(place)
        if not held:
            self._held.pop(place.client, None)


def last_of_largest(parts: Sequence[Sequence[_T]], mine: int) -> _T | None:
    """Return the last of the largest part, if that is still as large as one of ``mine`` + 1 without it; else ``None``."""
    largest = max(parts, key=len, default=())
    return largest[-1] if len(largest) > mine + 1 else None
