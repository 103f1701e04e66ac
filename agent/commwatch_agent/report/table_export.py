"""Operations, steps and waits of a job as files for other tools: Parquet, Arrow or CSV. Needs pyarrow."""

from __future__ import annotations

import json
import logging
import secrets
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import islice
from operator import attrgetter
from pathlib import Path
from types import UnionType
from typing import TYPE_CHECKING, Any, Protocol, get_args, get_type_hints

from commwatch.wire.errors import CommwatchError
from commwatch_agent.analysis.queries import QueryService, step_view
from commwatch_agent.core.views import StepView, WaitView
from commwatch_agent.history.history import History
from commwatch_agent.history.operations import Operation, Reader

if TYPE_CHECKING:
    import pyarrow

log = logging.getLogger("commwatch")
#: What one row of each table is; its fields are the columns.
TABLES: Mapping[str, type] = {"operations": Operation, "steps": StepView, "waits": WaitView}
FORMATS = ("parquet", "arrow", "csv")
#: Rows that are in memory at a time.
_TOGETHER = 16_384


class CannotExport(CommwatchError):
    """A table cannot be written; the text gives the reason and the remedy."""


class _Writer(Protocol):
    def write_batch(self, batch: pyarrow.RecordBatch) -> None: ...


def export(agent: QueryService, job: str, directory: Path, form: str, last_s: float | None = None) -> dict[Path, int]:
    """Write the tables of a job, one file each.

    Args:
        form: of ``FORMATS``.
        last_s: only what ended in the last ``last_s`` seconds of the job; ``None``: all.

    Returns:
        The files, with their rows.

    Raises:
        CannotExport: pyarrow is missing, or a file cannot be written.
    """
    try:
        import pyarrow
    except ImportError:
        raise CannotExport("pyarrow is not installed; install commwatch with its extra: commwatch[export]") from None
    written = {}
    with History(agent.path) as history:
        for name, rows in _tables(agent, history, job, last_s).items():
            path = directory / f"{name}.{form}"
            try:
                directory.mkdir(parents=True, exist_ok=True)
                written[path] = _write(path, form, schema_of(TABLES[name]), rows)
            except (OSError, pyarrow.ArrowInvalid) as error:
                raise CannotExport(f"cannot write {path}: {getattr(error, 'strerror', None) or error}") from None
            except (OverflowError, UnicodeEncodeError) as error:  # a damaged record
                why = "a row has a value that its column cannot hold; --last can leave it out"
                raise CannotExport(f"cannot write {path}: {why} ({error})") from None
        if history.removed:
            missing = "%d chunks of records were removed from the history before they were exported; their operations are missing"
            log.warning(missing, history.removed)
    return written


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


def schema_of(row: type) -> pyarrow.Schema:
    """Return the columns of a table: the fields of ``row`` in their order.

    Names that end in ``_at`` are times in UTC, in µs. Text holds what has parts of its own, as JSON.
    """
    import pyarrow

    plain = {str: pyarrow.string(), int: pyarrow.int64(), float: pyarrow.float64(), bool: pyarrow.bool_()}

    def column(name: str, kind: Any) -> pyarrow.Field:
        parts = get_args(kind) if isinstance(kind, UnionType) else (kind,)
        (one,) = (part for part in parts if part is not type(None))
        of = pyarrow.timestamp("us", tz="UTC") if name.endswith("_at") else plain.get(one, pyarrow.string())
        return pyarrow.field(name, of, nullable=len(parts) > 1)

    return pyarrow.schema([column(*item) for item in get_type_hints(row).items()])


def _write(path: Path, form: str, schema: pyarrow.Schema, rows: Iterable[object]) -> int:
    """Write a table under another name and rename it, so that a file of this name is complete; return the number of its rows."""
    hidden = path.with_name(
        f".{secrets.token_hex(6)}.part"
    )  # unpredictable: no other user can place a link there in advance
    number, left = 0, iter(rows)
    try:
        with _writer(hidden, form, schema) as writer:
            while together := list(islice(left, _TOGETHER)):
                writer.write_batch(_batch(together, schema))
                number += len(together)
        hidden.replace(path)
    finally:
        hidden.unlink(missing_ok=True)
    return number


@contextmanager
def _writer(path: Path, form: str, schema: pyarrow.Schema) -> Iterator[_Writer]:
    import pyarrow

    if form == "parquet":
        from pyarrow import parquet

        with parquet.ParquetWriter(path, schema, compression="zstd") as writer:
            yield writer
    elif form == "csv":
        from pyarrow import csv

        with csv.CSVWriter(path, schema) as writer:
            yield writer
    else:
        with pyarrow.OSFile(str(path), "wb") as file, pyarrow.ipc.new_file(file, schema) as writer:
            yield writer


def _batch(rows: list[object], schema: pyarrow.Schema) -> pyarrow.RecordBatch:
    import pyarrow

    def column(values: Iterable[Any], field: pyarrow.Field) -> pyarrow.Array:
        if field.name.endswith("_at"):
            values = [None if at is None else round(at * 1e6) for at in values]
        return pyarrow.array((json.dumps(each) if isinstance(each, dict) else each for each in values), field.type)

    columns = zip(*map(attrgetter(*schema.names), rows), strict=True)
    return pyarrow.record_batch([column(*each) for each in zip(columns, schema, strict=True)], schema)
