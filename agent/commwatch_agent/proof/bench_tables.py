"""Output of ``commwatch bench``: tables in the form of nccl-tests, curves, comparison of backends, list of references."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from commwatch_agent.model.bandwidth import algbw, busbw_of_one
from commwatch_agent.reference.references import Measured, References
from commwatch_agent.text import terminal_text
from commwatch_agent.text.units import moment, percent, rate, seconds, size

#: Operations that reduce, and operations that have a root rank.
_REDUCING = ("all_reduce", "reduce_scatter", "reduce")
_ROOTED = ("broadcast", "reduce", "gather", "scatter")
#: Operations whose ``count`` column is one rank's part of S (docs/numbers.md).
_SHARDED = ("all_gather", "reduce_scatter", "all_to_all", "gather", "scatter")
_ITEM = 4  # bytes of a float32


class Growing:
    """The tables of a sweep, row by row as they are measured."""

    def __init__(self) -> None:
        self._group_size, self._hosts = 0, ()
        self._backend = self._op = ""

    def lines(self, result: dict[str, Any]) -> list[str]:
        """Return the lines to print for a line of the results file (``torch_sweep``): a row, with its heads where they change."""
        if "ranks" in result:
            self._group_size, self._hosts = result["ranks"], tuple(result["hosts"])
        if "backend" not in result:
            return []
        lines, backend, op = [], result["backend"], result["op"]
        if backend != self._backend:
            lines += _backend_head(backend, self._group_size, self._hosts)
        if (backend, op) != (self._backend, self._op):
            lines += _op_head(op)
        self._backend, self._op = backend, op
        lines.append(_row(op, result["size"], result["time_s"], self._group_size))
        return list(map(terminal_text.line, lines))


def table(reference: Measured) -> str:
    """Return a table in the form of nccl-tests: sizes in bytes, times in microseconds, bandwidths in GB/s (10^9)."""
    lines = _backend_head(reference.backend, reference.group_size, reference.hosts)
    for op, points in reference.points.items():
        lines += _op_head(op)
        lines += [_row(op, size_bytes, time_s, reference.group_size) for size_bytes, time_s in sorted(points.items())]
    return terminal_text.lines([*lines, *curves(reference)])


def note(text: str) -> list[str]:
    """Return a remark in lines of at most 80 cells."""
    return textwrap.wrap(text, 80, initial_indent="# ", subsequent_indent="#   ")


def _backend_head(backend: str | None, group_size: int, hosts: Sequence[str]) -> list[str]:
    return note(f"{backend}, {group_size} ranks on {', '.join(hosts) or 'unknown hosts'}")


def _op_head(op: str) -> list[str]:
    return [
        "#",
        f"# {op}",
        "#      size        count      type   redop    root        time    algbw    busbw",
        "#       (B)   (elements)                               (us)   (GB/s)   (GB/s)",
    ]


def _row(op: str, size_bytes: int, time_s: float, group_size: int) -> str:
    redop, root = "sum" if op in _REDUCING else "none", 0 if op in _ROOTED else -1
    each = _ITEM * (group_size if op in _SHARDED else 1)
    rates = (algbw(size_bytes, time_s), busbw_of_one(op, size_bytes, time_s, group_size))
    rated = "  ".join(f"{_gigabytes(value):>7}" for value in rates)
    return f"{size_bytes:>11}  {size_bytes // each:>11}  {'float':>8}  {redop:>6}  {root:>6}  {time_s * 1e6:>10.2f}  {rated}"


def _gigabytes(value: float | None) -> str:
    if value is None:
        return "N/A"
    return f"{value / 1e9:.2f}" if value >= 10e9 else f"{value / 1e9:.4f}"


def curves(reference: Measured) -> list[str]:
    """Return the α-β curve of each operation, with its error against the measured points."""
    lines = ["#"]
    for op in reference.points:
        fitted = reference.fits.get(op)
        if fitted is None:
            lines += note(f"{op}: too few sizes for a curve")
        else:
            wide = fitted.curve.bandwidth
            large = "size made no difference" if wide is None else f"busbw of large operations {rate(wide)}"
            lines += note(f"{op}: {seconds(fitted.curve.alpha_s)} a message, {large} (± {percent(fitted.error)})")
    return lines


def compared(references: Sequence[Measured]) -> str:
    """Return the bus bandwidths of backends side by side, in GB/s, with the fastest backend of each row."""
    names = [str(one.backend) for one in references]
    widths = [max(7, len(name)) for name in names]
    shown = "  ".join(f"{name:>{cells}}" for name, cells in zip(names, widths, strict=True))
    head = f"# {'operation':<14}  {'size (B)':>11}  {shown}  fastest"
    lines = ["# busbw (GB/s)", head]
    keys = dict.fromkeys((op, size_bytes) for one in references for op in one.points for size_bytes in one.points[op])
    for op, size_bytes in keys:
        times = [one.points.get(op, {}).get(size_bytes) for one in references]
        cells = [
            "–" if t is None else _gigabytes(busbw_of_one(op, size_bytes, t, one.group_size))
            for one, t in zip(references, times, strict=True)
        ]
        known = {name: t for name, t in zip(names, times, strict=True) if t is not None}
        fastest = min(known, key=lambda name: known[name])
        if len(known) > 1:
            fastest += f" ({max(known.values()) / known[fastest]:.1f}x)"
        shown = "  ".join(f"{cell:>{wide}}" for cell, wide in zip(cells, widths, strict=True))
        lines.append(f"  {op:<14}  {size_bytes:>11}  {shown}  {fastest}")
    return terminal_text.lines(lines)


def listing(there: References) -> str:
    """Return the list of references and of link settings."""
    lines = []
    for path, one in sorted(there.measured.items(), key=lambda item: -item[1].made_at):
        sizes = [size_bytes for points in one.points.values() for size_bytes in points]
        lines += [
            f"{one.kind}  {one.name}",
            f"  made {moment(one.made_at)} from {one.source}",
            f"  {', '.join(one.points)}; {size(min(sizes))} to {size(max(sizes))}",
            f"  {path}",
        ]
    lines += [f"skipped  {why}" for why in there.damaged.values()]
    lines += [f"link  {group}: {link}" for group, link in there.links.items()]
    return terminal_text.lines(lines or [f"no references in {Path(there.where)}, and no link is set"])
