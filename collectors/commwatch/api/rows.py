"""Rows of an answer of the agent, for notebooks and data frames."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from html import escape
from typing import TYPE_CHECKING, Any, overload

if TYPE_CHECKING:
    import pandas
    import pyarrow

#: Most rows that a notebook shows.
_MOST_SHOWN = 50


class Rows(Sequence[dict[str, Any]]):
    """The rows of an answer, as dictionaries in the form of the REST API (docs/api.md); a notebook shows them as a table.

    Attributes:
        nodes: number of nodes that answered, and the others with the reason, if the answer covers the nodes of a job; else ``None``.
        incidents: number of the job's incidents by kind, so far; only of ``commwatch.summary``.
    """

    def __init__(self, rows: Sequence[dict[str, Any]] = (), nodes: dict[str, Any] | None = None) -> None:
        self._rows, self.nodes = list(rows), nodes
        self.incidents: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._rows)

    @overload
    def __getitem__(self, at: int) -> dict[str, Any]: ...
    @overload
    def __getitem__(self, at: slice) -> Rows: ...
    def __getitem__(self, at: int | slice) -> dict[str, Any] | Rows:
        return Rows(self._rows[at], self.nodes) if isinstance(at, slice) else self._rows[at]

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter(self._rows)

    def __repr__(self) -> str:
        return f"Rows({self._rows!r})"

    def to_pandas(self) -> pandas.DataFrame:
        """Return the rows as a data frame; raises ``ImportError`` without pandas."""
        import pandas

        return pandas.DataFrame(self._rows)

    def to_arrow(self) -> pyarrow.Table:
        """Return the rows as a table; raises ``ImportError`` without pyarrow."""
        import pyarrow

        return pyarrow.Table.from_pylist(self._rows)

    def _repr_html_(self) -> str:
        """Return the rows as an HTML table, for notebooks."""
        names = list(dict.fromkeys(name for row in self._rows for name in row))
        head = "".join(f"<th>{escape(name)}</th>" for name in names)
        body = "".join(
            f"<tr>{''.join(f'<td>{escape(_text(row.get(name)))}</td>' for name in names)}</tr>"
            for row in self._rows[:_MOST_SHOWN]
        )
        more = len(self._rows) - _MOST_SHOWN
        note = f"<p>and {more} more rows</p>" if more > 0 else ""
        return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>{note}"


def _text(value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.4g}"
    return value if isinstance(value, str) else json.dumps(value)
