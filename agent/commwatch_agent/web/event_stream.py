"""Server-sent events of the live page: each is computed once for all clients that watch a job."""

from __future__ import annotations

import asyncio
import sqlite3
import time
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from anyio import CapacityLimiter, to_thread

from commwatch.wire.errors import CommwatchError


class Topic(NamedTuple):
    """A kind of event."""

    name: str
    #: Returns its data as JSON on one line, for a job (``None``: the latest).
    read: Callable[[str | None], bytes]
    #: Seconds between two calls of ``read``.
    every_s: float
    #: What ``read`` reads: only one call per source runs at a time.
    source: str = "live"


@dataclass
class _Channel:
    """The listeners of one job, and the latest events for them."""

    listeners: int = 0
    producers: list[asyncio.Task[None]] = field(default_factory=list)
    changed: asyncio.Condition = field(default_factory=asyncio.Condition)
    #: By topic: number of events so far, and the latest.
    latest: dict[str, tuple[int, bytes]] = field(default_factory=dict)
    #: There will be no more events.
    over: bool = False


class EventStream:
    """Produces events while there are listeners, on the web server's event loop; only ``read`` runs in threads.

    A slow listener misses events and delays no other: there is one latest event of each topic, and no queue.

    Args:
        first: topic that a listener gets once, at its start.
        topics: topics that it gets again and again.
        ending: returns whether the agent is shutting down.
    """

    def __init__(self, first: Topic, topics: list[Topic], ending: Callable[[], bool]) -> None:
        self._first, self._topics, self._ending = first, topics, ending
        self._channels: dict[str | None, _Channel] = {}
        # Threads of its own, so that a slow ``read`` takes none from other requests. One per source, however many jobs are
        # watched, because each further thread would take interpreter time from the intake.
        self._threads = {topic.source: CapacityLimiter(1) for topic in (first, *topics)}

    async def follow(self, job: str | None) -> AsyncGenerator[bytes, None]:
        """Yield events as they come, until the listener disconnects or the agent ends."""
        channel = self._channels.get(job)
        if channel is None or channel.over:
            channel = self._channels[job] = _Channel()
        channel.listeners += 1
        try:
            if not channel.producers:
                channel.producers = [asyncio.create_task(self._produce(channel, job, topic)) for topic in self._topics]
            yield b"retry: 1000\n\n"
            past = await self._read(self._first, job)
            if past is not None:
                yield _event(self._first.name, past)
            seen: dict[str, int] = {}
            while True:
                async with channel.changed:
                    await channel.changed.wait_for(lambda: channel.over or _fresh(channel, seen))
                if channel.over:
                    return
                for name, (number, text) in list(channel.latest.items()):
                    if seen.get(name) != number:
                        seen[name] = number
                        yield _event(name, text)
        finally:
            channel.listeners -= 1

    async def _read(self, topic: Topic, job: str | None) -> bytes | None:
        return await to_thread.run_sync(_read_or_none, topic, job, limiter=self._threads[topic.source])

    async def _produce(self, channel: _Channel, job: str | None, topic: Topic) -> None:
        """Produce events while there are listeners; one that joins before the last ``read`` has ended keeps it going."""
        number = 0
        try:
            while channel.listeners and not self._ending():
                began = time.monotonic()
                text = await self._read(topic, job)
                if text is not None:
                    number += 1
                    channel.latest[topic.name] = (number, text)
                    async with channel.changed:
                        channel.changed.notify_all()
                await self._rest(channel, began + topic.every_s)
        finally:
            channel.over = True
            if self._channels.get(job) is channel:
                del self._channels[job]
            async with channel.changed:
                channel.changed.notify_all()

    async def _rest(self, channel: _Channel, until: float) -> None:
        """Wait until monotonic time ``until`` (s), or until there are no listeners or the agent ends."""
        while channel.listeners and not self._ending():
            left = until - time.monotonic()
            await asyncio.sleep(max(0.0, min(left, 0.5)))
            if left <= 0.5:
                return


def _read_or_none(topic: Topic, job: str | None) -> bytes | None:
    """Return the data of a topic; ``None`` where it cannot be read at the moment."""
    try:
        return topic.read(job)
    except (CommwatchError, sqlite3.Error, OSError):
        return None


def _fresh(channel: _Channel, seen: dict[str, int]) -> bool:
    return any(seen.get(name) != number for name, (number, _) in channel.latest.items())


def _event(name: str, text: bytes) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (name.encode(), text)
