"""The clock of arrivals: when data came to the history. It never goes back, whatever the wall clock does. Pure."""

from __future__ import annotations

import sqlite3
from typing import NamedTuple

from commwatch_agent.history.chunks import Statement
from commwatch_agent.history.soundness import SOUND, row_checksum

#: Most time that passes between two boots: the wall clock of a node that has just booted may be years ahead.
_MOST_APART_NS = 86_400 * 10**9


class Moment(NamedTuple):
    """One moment on three clocks, in ns: the monotonic one of a boot, the wall clock, the clock of arrivals."""

    boot_id: str
    monotonic_ns: int
    wall_ns: int
    arrived_ns: int


def following(last: Moment | None, boot_id: str, monotonic_ns: int, wall_ns: int) -> Moment:
    """Return the moment now.

    Within one boot the clock of arrivals advances with the monotonic clock; from one boot to the next by the wall clock, at most a day.

    Args:
        last: an earlier moment; ``None``: there is none, so the clock of arrivals begins at the wall clock.
        boot_id: of this boot; empty: not known.
    """
    if last is None:
        return Moment(boot_id, monotonic_ns, wall_ns, wall_ns)
    same_boot = bool(boot_id) and boot_id == last.boot_id
    passed_ns = monotonic_ns - last.monotonic_ns if same_boot else min(wall_ns - last.wall_ns, _MOST_APART_NS)
    return Moment(boot_id, monotonic_ns, wall_ns, last.arrived_ns + max(0, passed_ns))


def stored(db: sqlite3.Connection) -> Moment | None:
    """Return the moment of the latest commit; ``None``: there is none, or its row is damaged."""
    row = db.execute(f"SELECT boot_id, monotonic_ns, wall_ns, arrived_ns FROM clock WHERE {SOUND['clock']}").fetchone()
    return None if row is None else Moment(*row)


def store(moment: Moment) -> Statement:
    """Return the statement that stores the moment of a commit."""
    return "INSERT OR REPLACE INTO clock VALUES (1, ?, ?, ?, ?, ?)", (*moment, row_checksum(moment))
