"""Operations, steps and waits of a job as files for other tools: CSV, and with pyarrow Parquet or Arrow."""

from __future__ import annotations

import csv
import json
import logging
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from datetime import datetime, timedelta, timezone
from functools import partial
from itertools import islice
from operator import attrgetter
from pathlib import Path
from typing import Any, get_type_hints

from commwatch.wire.errors import CommwatchError
from commwatch_agent.analysis.queries import QueryService, step_view
from commwatch_agent.history.history import History
from commwatch_agent.history.operations import Operation, Reader
from commwatch_agent.model.views import StepView, WaitView

log = logging.getLogger("commwatch")
#: What one row of each table is; its fields are the columns.
TABLES: Mapping[str, type] = {"operations": Operation, "steps": StepView, "waits": WaitView}
FORMATS = ("parquet", "arrow", "csv")
#: Rows that are in memory at a time.
_TOGETHER = 16_384
_EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)


class CannotExport(CommwatchError):
    """A table cannot be written; the text gives the reason and the remedy."""


#: Opens a file for the rows of a class; what it yields writes some of them.
_Opened = Callable[[Path, type], AbstractContextManager[Callable[[list[object]], None]]]


def export(agent: QueryService, job: str, directory: Path, form: str, last_s: float | None = None) -> dict[Path, int]:
    """Write the tables of a job, one file each.

    Args:
        form: of ``FORMATS``.
        last_s: only what ended in the last ``last_s`` seconds of the job; ``None``: all.

    Returns:
        The files, with their rows.

    Raises:
        CannotExport: pyarrow is missing, which CSV does not need, or a file cannot be written.
    """
    opened, written = _form(form), {}
    with History(agent.path) as history:
        for name, rows in _tables(agent, history, job, last_s).items():
            path = directory / f"{name}.{form}"
            try:
                directory.mkdir(parents=True, exist_ok=True)
                written[path] = _write(path, opened, TABLES[name], rows)
            except OSError as error:
                raise CannotExport(f"cannot write {path}: {getattr(error, 'strerror', None) or error}") from None
            except (OverflowError, UnicodeEncodeError) as error:  # a damaged record
                why = "a row has a value that its column cannot hold; --last can leave it out"
                raise CannotExport(f"cannot write {path}: {why} ({error})") from None
        if history.removed:
            missing = "%d chunks of records were removed from the history before they were exported; their operations are missing"
            log.warning(missing, history.removed)
    return written


def _form(form: str) -> _Opened:
    """Return what opens files of a format; raise ``CannotExport`` if it is not installed."""
    if form == "csv":
        return _csv
    try:
        from commwatch_agent.report import arrow_tables
    except ImportError:
        remedy = "write CSV (--format csv), or install commwatch with its extra: commwatch[export]"
        raise CannotExport(f"pyarrow is not installed: {remedy}") from None
    return partial(arrow_tables.opened, form)


def _tables(agent: QueryService, history: History, job: str, last_s: float | None) -> dict[str, Iterable[object]]:
    """Return the rows of each table: of one moment, but read in pieces, so that the agent can empty the write-ahead log meanwhile."""
    history.freeze()
    rings = {ring.id: ring for ring in history.rings(job)}
    reader, until_ns = Reader(history, rings, in_pieces=True), history.last_end_ns(list(rings)) + 1
    history.thaw()
    from_ns = 0 if last_s is None else until_ns - int(last_s * 1e9)
    return {
        "operations": reader.newest_first(from_ns, until_ns, None, lambda _: True),
        "steps": (step_view(rings[step.ring], step) for step in history.each_step(from_ns, until_ns, list(rings))),
        "waits": [wait for wait in agent.totals(job, []).waits if wait.start_at + wait.length_s > from_ns / 1e9],
    }


def _write(path: Path, opened: _Opened, row: type, rows: Iterable[object]) -> int:
    """Write a table under another name and rename it, so that a file of this name is complete; return the number of its rows."""
    hidden = path.with_name(
        f".{secrets.token_hex(6)}.part"
    )  # unpredictable: no other user can place a link there in advance
    number, left = 0, iter(rows)
    try:
        with opened(hidden, row) as write:
            while together := list(islice(left, _TOGETHER)):
                write(together)
                number += len(together)
        hidden.replace(path)
    finally:
        hidden.unlink(missing_ok=True)
    return number


@contextmanager
def _csv(path: Path, row: type) -> Iterator[Callable[[list[object]], None]]:
    """Open a CSV file for rows of a class; yield what writes some of them."""
    names = list(get_type_hints(row))
    values, times = attrgetter(*names), [name.endswith("_at") for name in names]
    with open(path, "w", encoding="utf-8", newline="") as file:
        table = csv.writer(file, lineterminator="\n")
        table.writerow(names)
        yield lambda rows: table.writerows(map(_cell, values(each), times) for each in rows)


def _cell(value: Any, is_time: bool) -> Any:
    """Return what a cell has for a value: a time as ``2026-11-29 10:30:39.000012Z``, JSON for what has parts, nothing for ``None``."""
    if is_time and value is not None:
        return f"{_EPOCH + timedelta(microseconds=round(value * 1e6)):%Y-%m-%d %H:%M:%S.%fZ}"
    if isinstance(value, bool):
        return str(value).lower()
    return json.dumps(value) if isinstance(value, dict) else value
