"""Looks once through the whole history of an agent that starts, a piece at a time.

Whoever asks for a ring or a time is not shown a damaged row that has come to lie under another, and what an index has lost is not found by it:
it has to be looked for. What is found is counted and said like any other damage.
"""

from __future__ import annotations

import contextlib
import logging
import sqlite3
from collections.abc import Generator, Iterator
from contextlib import closing
from pathlib import Path

from commwatch.history.chunks import Damaged
from commwatch.history.opening import StoreError, connect
from commwatch.history.soundness import SOUND, is_malformed, mark

log = logging.getLogger("commwatch")
#: Rows of a piece: some ten milliseconds.
_ROWS = 2_000
_KEYS = {
    "ring": "id",
    "grp": "ring, small_id",
    "name": "ring, kind, code",
    "chunk": "id",
    "rollup": "rowid",
    "step": "ring, seq",
    "job_exit": "job",
}


class Examination:
    """Of the history at ``path``; ``tick`` is called until there is nothing left, and may be called then.

    Args:
        damaged: gets what is not as it was written.
    """

    def __init__(self, path: Path, damaged: Damaged) -> None:
        self._path, self._damaged = path, damaged
        self._pieces = self._examine()
        #: All of it has been looked through, as far as it can be read.
        self.over = False

    def tick(self) -> None:
        """Look through the next piece."""
        try:
            self.over = next(self._pieces, self) is self
        except (StoreError, sqlite3.Error) as error:
            self.over = True
            if isinstance(error, sqlite3.Error) and is_malformed(error):
                self._found(str(error))
            else:
                log.warning("%s: cannot be looked through for damage: %s", self._path, error)

    def close(self) -> None:
        """Let go of the history; looked through or not."""
        self._pieces.close()

    def _examine(self) -> Generator[None, None, None]:
        with closing(connect(self._path, False, self._damaged)) as db:
            self._check_indexes(db)
            yield
            for table, keys in _KEYS.items():
                yield from self._check_rows(db, table, keys)

    def _check_indexes(self, db: sqlite3.Connection) -> None:
        """Have SQLite look whether tables and indexes fit, and have indexes that do not made anew."""
        why = _wrong(db)
        if why is None:
            return
        with contextlib.suppress(sqlite3.Error), closing(connect(self._path, True, self._damaged)) as writing:
            writing.execute("REINDEX")
        if _wrong(db) is None:
            self._damaged.whole(self._path, f"an index was damaged ({why}), and has been made anew")
        else:
            self._found(why)

    def _check_rows(self, db: sqlite3.Connection, table: str, keys: str) -> Iterator[None]:
        rows = db.execute(f"SELECT COUNT(*) FROM {table}").fetchone()[0]
        select, order = f"SELECT {keys}, {SOUND[table]} FROM {table}", f"ORDER BY {keys} LIMIT {_ROWS}"
        found = db.execute(f"{select} {order}").fetchall()
        # Not as long as there are more: in a damaged tree there may always be.
        for _ in range(rows // _ROWS):
            yield
            if len(found) < _ROWS:
                return
            last = found[-1][:-1]
            found = db.execute(f"{select} WHERE ({keys}) > ({', '.join('?' * len(last))}) {order}", last).fetchall()

    def _found(self, why: str) -> None:
        self._damaged.whole(self._path, f"{why}; the next start of the agent sets it aside and begins a new history")
        with contextlib.suppress(OSError):
            mark(self._path).touch(mode=0o600)


def _wrong(db: sqlite3.Connection) -> str | None:
    """What SQLite finds wrong with tables and indexes; ``None``: nothing."""
    found: str = db.execute("PRAGMA integrity_check(1)").fetchone()[0]
    return None if found == "ok" else " ".join(found.split())
