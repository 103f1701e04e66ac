"""Open a history: create it, check its version, check it for damage."""

from __future__ import annotations

import os
import sqlite3
import stat
import time
from functools import partial
from http import HTTPStatus
from pathlib import Path

from commwatch.wire import crossing
from commwatch.wire.errors import CommwatchError
from commwatch_agent.history import wal
from commwatch_agent.history.chunks import Damaged
from commwatch_agent.history.schema import SCHEMA, SCHEMA_VERSION, SHAPE
from commwatch_agent.history.soundness import is_full, is_malformed, judge_rows


class StoreError(CommwatchError):
    """The history cannot be opened; the message names the file and the remedy."""

    exit_code = 2
    status = HTTPStatus.SERVICE_UNAVAILABLE


class DamagedHistory(StoreError):
    """SQLite reports the file as damaged, so it cannot be written to."""


class OldHistory(StoreError):
    """An earlier version wrote the file, so it cannot be read."""


class Transaction:
    """``with Transaction(db):`` commits all statements, or none if an exception is raised."""

    def __init__(self, db: sqlite3.Connection) -> None:
        self._db = db

    def __enter__(self) -> None:
        self._db.execute("BEGIN IMMEDIATE")

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            try:
                self._db.execute("COMMIT")
            finally:
                self._undo()
        else:
            self._undo()

    def _undo(self) -> None:
        """Roll back an open transaction. A full disk ends it by itself; to roll back then would hide the reason."""
        if self._db.in_transaction:
            self._db.execute("ROLLBACK")


def connect(path: Path, write: bool, damaged: Damaged | None = None) -> sqlite3.Connection:
    """Open the history; with ``write``, create it if it is missing.

    Args:
        damaged: counts and logs the damage.

    Raises:
        StoreError: missing, not readable, not a history, or of a later version.
        OldHistory: of an earlier version.
        DamagedHistory: to be written, but the SQLite file is damaged.
    """
    damaged = Damaged() if damaged is None else damaged
    try:
        if write:
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            # An existing directory may be readable by others; a setgid one passes its group on to the file.
            mode = 0o640 if path.parent.stat().st_mode & stat.S_ISGID else 0o600
            os.close(crossing.lock_file(path, mode))
            written = wal.frames(path.with_name(f"{path.name}-wal"))
            db = sqlite3.connect(path, timeout=10, isolation_level=None, check_same_thread=False)
        else:
            try:
                crossing.look(Path(os.path.realpath(path)), crossing.ANYBODY)
            except FileNotFoundError:
                raise StoreError(
                    f"{path}: no history here; start a job with `commwatch run -- COMMAND`, or give the directory of another history with --dir or --state"
                ) from None
            db = sqlite3.connect(
                f"{path.absolute().as_uri()}?mode=ro",
                uri=True,
                timeout=10,
                isolation_level=None,
                check_same_thread=False,
            )
        judge_rows(db, partial(damaged.row, path))
        if write:
            db.execute("PRAGMA synchronous = NORMAL")
        _check_version(db, path, write)
        if write:
            _use_wal(db)
            _, valid, _ = db.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()
            if lost := written.lost(valid):
                damaged.log_lost(path, lost)
    except OSError as error:
        raise StoreError(
            f"{path}: cannot be created or opened: {error.strerror}; choose another with --state"
        ) from None
    except sqlite3.Error as error:
        kind = DamagedHistory if write and is_malformed(error) and _is_sqlite(path) else StoreError
        remedy = "make room there" if is_full(error) else "move it away"
        raise kind(f"{path}: {error}; {remedy}, or choose another place with --state") from None
    except UnicodeDecodeError:  # SQLite's message has a damaged name
        kind = DamagedHistory if write else StoreError
        why = "malformed database schema; move it away, or choose another place with --state"
        raise kind(f"{path}: {why}") from None
    return db


def _is_sqlite(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(16) == b"SQLite format 3\0"


def _check_version(db: sqlite3.Connection, path: Path, write: bool) -> None:
    version, shape = _version(db)
    if version == 0 and write:
        with Transaction(db):  # another agent of this user may be creating it right now
            _create(db)
            version, shape = _version(db)
    if (version, shape) == (SCHEMA_VERSION, SHAPE):
        return
    db.close()
    kind, remedy = StoreError, "move it away"
    what = f"history of version {version}, this commwatch reads {SCHEMA_VERSION}"
    # Before the first release, versions went up to 10, and files had no shape.
    if shape and version > SCHEMA_VERSION:
        remedy = "use the newer commwatch that wrote it, move it away"
    elif version:
        kind, what, remedy = OldHistory, "history of an earlier commwatch", "start an agent on it, which sets it aside"
    raise kind(f"{path}: {what}; {remedy}, or choose another place with --state")


def _version(db: sqlite3.Connection) -> tuple[int, int]:
    """Return the version of a history, and the shape of its tables; 0 where the file has none."""
    version, shape = (int(db.execute(f"PRAGMA {name}").fetchone()[0]) for name in ("user_version", "application_id"))
    return version, shape


def _create(db: sqlite3.Connection) -> None:
    """Create the tables of an empty file; leave any other file unchanged."""
    if _version(db)[0] == 0 and not db.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]:
        for statement in SCHEMA.split(";"):
            db.execute(statement)
        db.execute(f"PRAGMA application_id = {SHAPE}")
        db.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")


def _use_wal(db: sqlite3.Connection) -> None:
    """Switch to the write-ahead log; with retries, because SQLite does not wait for locks in this case."""
    for attempt in range(100):
        try:
            db.execute("PRAGMA journal_mode = WAL")
        except sqlite3.OperationalError:
            if attempt == 99:
                raise
            time.sleep(0.05)
        else:
            return
