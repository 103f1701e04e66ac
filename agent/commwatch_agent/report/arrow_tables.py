"""Tables as Parquet and Arrow files. Needs pyarrow."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from operator import attrgetter
from pathlib import Path
from types import UnionType
from typing import Any, get_args, get_type_hints

import pyarrow


def schema_of(row: type) -> pyarrow.Schema:
    """Return the columns of a table: the fields of ``row`` in their order.

    Names that end in ``_at`` are times in UTC, in µs. Text holds what has parts of its own, as JSON.
    """
    plain = {str: pyarrow.string(), int: pyarrow.int64(), float: pyarrow.float64(), bool: pyarrow.bool_()}

    def column(name: str, kind: Any) -> pyarrow.Field:
        parts = get_args(kind) if isinstance(kind, UnionType) else (kind,)
        (one,) = (part for part in parts if part is not type(None))
        of = pyarrow.timestamp("us", tz="UTC") if name.endswith("_at") else plain.get(one, pyarrow.string())
        return pyarrow.field(name, of, nullable=len(parts) > 1)

    return pyarrow.schema([column(*item) for item in get_type_hints(row).items()])


@contextmanager
def opened(form: str, path: Path, row: type) -> Iterator[Callable[[list[object]], None]]:
    """Open a file for rows of a class; yield what writes some of them.

    Args:
        form: ``parquet`` or ``arrow``.

    Raises:
        OSError: it cannot be written.
        OverflowError, UnicodeEncodeError: a row has a value that its column cannot hold.
    """
    schema = schema_of(row)
    try:
        with _writer(form, path, schema) as writer:
            yield lambda rows: writer.write_batch(_batch(rows, schema))
    except pyarrow.ArrowInvalid as error:
        raise OSError(str(error)) from None


def _writer(form: str, path: Path, schema: pyarrow.Schema) -> Any:
    if form == "parquet":
        from pyarrow import parquet

        return parquet.ParquetWriter(path, schema, compression="zstd")
    return pyarrow.ipc.new_file(str(path), schema)


def _batch(rows: list[object], schema: pyarrow.Schema) -> pyarrow.RecordBatch:
    def column(values: Iterable[Any], field: pyarrow.Field) -> pyarrow.Array:
        if field.name.endswith("_at"):
            values = [None if at is None else round(at * 1e6) for at in values]
        return pyarrow.array((json.dumps(each) if isinstance(each, dict) else each for each in values), field.type)

    columns = zip(*map(attrgetter(*schema.names), rows), strict=True)
    return pyarrow.record_batch([column(*each) for each in zip(columns, schema, strict=True)], schema)
