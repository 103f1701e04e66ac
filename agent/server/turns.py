"""Limits the requests that are handled at once; clients take turns, however many requests each of them has."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Hashable


class Turns:
    """Hands out turns on one event loop.

    Waiting clients are served round robin: a client with one request waits for at most one request of each other client.

    Args:
        at_once: number of turns.
    """

    def __init__(self, at_once: int) -> None:
        self._free = at_once
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
                self.give_back()
            raise
        if not mine.done():
            mine.cancel()
            raise TimeoutError

    def give_back(self) -> None:
        """End a turn; the next request gets it."""
        self._free += 1
        self._serve()

    def _serve(self) -> None:
        while self._free and self._waiting:
            client, line = next(iter(self._waiting.items()))
            del self._waiting[client]
            mine = line.popleft()
            if line:
                self._waiting[client] = line  # at the end
            if not mine.done():
                mine.set_result(None)
                self._free -= 1
