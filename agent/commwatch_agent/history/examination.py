"""Check of the whole history for damage, once after an agent's start, in small pieces.

Queries by ring or time miss rows whose ring or time is damaged, and rows that an index has lost. So this check reads all rows.
It counts and logs what it finds like any other damage.
"""

from __future__ import annotations

import contextlib
import logging
import sqlite3
from collections.abc import Generator, Iterator
from contextlib import closing
from pathlib import Path

from commwatch_agent.history.chunks import Damaged
from commwatch_agent.history.opening import StoreError, connect
from commwatch_agent.history.soundness import SOUND, is_malformed, mark

log = logging.getLogger("commwatch")
#: Rows of a piece, which takes some ten milliseconds.
_ROWS = 2_000
_KEYS = {
    "ring": "id",
    "grp": "ring, small_id",
    "name": "ring, kind, code",
    "chunk": "id",
    "extent": "chunk",
    "rollup": "rowid",
    "step": "ring, seq",
    "run_exit": "job, run",
    "incident": "id, agent",
    "node_sample": "at_ns",
    "clock": "id",
}


class Examination:
    """Checks the history at ``path``. Call ``tick`` until it returns True.

    Args:
        damaged: counts and logs the damage.
    """

    def __init__(self, path: Path, damaged: Damaged) -> None:
        self._path, self._damaged = path, damaged
        self._pieces = self._examine()

    def tick(self) -> bool:
        """Check the next piece; return whether the check is complete, or an error ended it."""
        try:
            return next(self._pieces, self) is self
        except (StoreError, sqlite3.Error) as error:
            if isinstance(error, sqlite3.Error) and is_malformed(error):
                self._found(str(error))
            else:
                log.warning("%s: cannot check it for damage: %s", self._path, error)
            return True

    def close(self) -> None:
        """Close the history, also before the check is complete."""
        self._pieces.close()

    def _examine(self) -> Generator[None, None, None]:
        with closing(connect(self._path, False, self._damaged)) as db:
            self._check_indexes(db)
            yield
            for table, keys in _KEYS.items():
                yield from self._check_rows(db, table, keys)

    def _check_indexes(self, db: sqlite3.Connection) -> None:
        """Run SQLite's integrity check, and rebuild the indexes if it fails."""
        why = _wrong(db)
        if why is None:
            return
        # Not with ``connect``, which opens the file by itself: closing that would release the locks of this process's other connections.
        existing = f"{self._path.absolute().as_uri()}?mode=rw"
        with contextlib.suppress(sqlite3.Error), closing(sqlite3.connect(existing, timeout=10, uri=True)) as writing:
            writing.execute("REINDEX")
        if _wrong(db) is None:
            self._damaged.note_file(self._path, f"an index was damaged ({why}) and has been rebuilt")
        else:
            self._found(why)

    def _check_rows(self, db: sqlite3.Connection, table: str, keys: str) -> Iterator[None]:
        rows = db.execute(f"SELECT COUNT(*) FROM {table}").fetchone()[0]
        select, order = f"SELECT {keys}, {SOUND[table]} FROM {table}", f"ORDER BY {keys} LIMIT {_ROWS}"
        found = db.execute(f"{select} {order}").fetchall()
        # Bounded by the number of rows, because a damaged tree may never end.
        for _ in range(rows // _ROWS):
            yield
            if len(found) < _ROWS:
                return
            last = found[-1][:-1]
            found = db.execute(f"{select} WHERE ({keys}) > ({', '.join('?' * len(last))}) {order}", last).fetchall()

    def _found(self, why: str) -> None:
        self._damaged.note_file(
            self._path, f"{why}; the next start of the agent sets it aside and begins a new history"
        )
        with contextlib.suppress(OSError):
            mark(self._path).touch(mode=0o600)


def _wrong(db: sqlite3.Connection) -> str | None:
    """Return the first problem that SQLite finds in tables and indexes; ``None``: no problem."""
    found: str = db.execute("PRAGMA integrity_check(1)").fetchone()[0]
    return None if found == "ok" else " ".join(found.split())
