"""The run of a ring that is opened: one that this agent or the history knows, or a new one with a name of its own."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from commwatch.wire import ring
from commwatch.wire.ring_reader import BadRing, RingReader
from commwatch_agent.history.rows import RingRow
from commwatch_agent.ingest.rings.source import Source
from commwatch_agent.model.runs import ALIVE_NS, KnownRun, Origin, free_name, origin_of, run_of


def origin_in(reader: RingReader, boot_id: str) -> Origin:
    """Return the origin of the trainer that writes a ring; ``boot_id``: of now."""
    return origin_of(reader.identity, reader.uid, _until_ns(reader, boot_id))


def _until_ns(reader: RingReader, boot_id: str) -> int:
    """Return until when the trainer that writes a ring lives, as in its origin."""
    if reader.owner() is not None and reader.identity.get("boot_id") == boot_id:
        return ALIVE_NS
    counters = reader.counters()
    return max(counters[ring.CLOSED] or counters[ring.HEARTBEAT], int(reader.identity["started_ns"]))


def choose(
    origin: Origin, sources: Iterable[Source], stored: Callable[[], Iterable[tuple[RingRow, int | None]]]
) -> tuple[str, str]:
    """Return name and key of the run that a ring belongs to.

    Args:
        sources: the other rings that this agent has opened.
        stored: returns the rings in the history that have the job's name, or that with a number, with the users who own them; other agents
            may have opened them.
    """
    here = list(_by_run((source.row, _current(source, origin)) for source in sources))
    found = run_of(origin, here)
    if found is not None:
        return found.name, found.key
    elsewhere = list(_by_run((row, _stored(row, owner)) for row, owner in stored()))
    found = run_of(origin, elsewhere)
    if found is not None:
        return found.name, found.key
    live = {run.name for run in (*here, *elsewhere) if run.is_live(origin)}
    return free_name(origin.job, live), secrets.token_hex(8)


def _by_run(found: Iterable[tuple[RingRow, Origin]]) -> Iterator[KnownRun]:
    runs: dict[tuple[str, str], list[Origin]] = {}
    for row, origin in found:
        runs.setdefault((row.job, row.run), []).append(origin)
    return (KnownRun(*run, origins) for run, origins in runs.items())


def _current(source: Source, asked: Origin) -> Origin:
    """Return the origin of a ring with the end of its process, if that has ended by now and it matters for ``asked``."""
    if source.origin.until_ns == ALIVE_NS and source.origin.job == asked.job:
        if source.reader is not None:
            source.origin = source.origin._replace(until_ns=_until_ns(source.reader, asked.boot))
        elif source.totals.ending is not None:
            source.origin = source.origin._replace(until_ns=source.totals.ending.since_ns - source.totals.offset_ns)
    return source.origin


def _stored(row: RingRow, owner: int | None) -> Origin:
    """Return the origin of a ring in the history; one that is not at its end may have ended without an agent."""
    if row.running:
        with contextlib.suppress(OSError, BadRing), contextlib.closing(RingReader(Path(row.uid))) as reader:
            return origin_in(reader, str(row.identity.get("boot_id", "")))
    ended_ns = row.seen_ns if row.ending is None else row.ending.since_ns
    return origin_of(row.identity, owner, ended_ns - row.wall_offset_ns)
