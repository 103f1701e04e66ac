"""Output of ``commwatch bench``: tables in the form of nccl-tests, curves, comparison of backends, list of references."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from commwatch.core import terminal_text
from commwatch.core.bandwidth import algbw, busbw
from commwatch.core.units import moment, percent, rate, seconds, size
from commwatch.reference.references import Measured, References

#: Operations that reduce, and operations that have a root rank.
_REDUCING = ("all_reduce", "reduce_scatter", "reduce")
_ROOTED = ("broadcast", "reduce", "gather", "scatter")
#: Operations whose ``count`` column is one rank's part of S (docs/definitions.md).
_SHARDED = ("all_gather", "reduce_scatter", "all_to_all", "gather", "scatter")
_ITEM = 4  # bytes of a float32


def table(reference: Measured) -> str:
    """Return a table in the form of nccl-tests: sizes in bytes, times in microseconds, bandwidths in GB/s (10^9)."""
    where = f"{reference.group_size} ranks on {', '.join(reference.hosts) or 'unknown hosts'}"
    lines = [f"# {reference.backend}, {where}"]
    for op, points in reference.points.items():
        lines += [
            "#",
            f"# {op}",
            "#       size         count      type   redop    root        time    algbw    busbw",
            "#        (B)    (elements)                               (us)   (GB/s)   (GB/s)",
        ]
        redop, root = "sum" if op in _REDUCING else "none", 0 if op in _ROOTED else -1
        each = _ITEM * (reference.group_size if op in _SHARDED else 1)
        for size_bytes, time_s in sorted(points.items()):
            rates = (algbw(size_bytes, time_s), busbw(op, size_bytes, time_s, reference.group_size))
            rated = "  ".join(f"{_gigabytes(value):>7}" for value in rates)
            lines.append(
                f"{size_bytes:>12}  {size_bytes // each:>12}  {'float':>8}  {redop:>6}  {root:>6}  {time_s * 1e6:>10.2f}  {rated}"
            )
    return terminal_text.lines([*lines, "#", *_curves(reference)])


def _gigabytes(value: float | None) -> str:
    if value is None:
        return "N/A"
    return f"{value / 1e9:.2f}" if value >= 10e9 else f"{value / 1e9:.4f}"


def _curves(reference: Measured) -> Iterator[str]:
    """Yield the α-β curve of each operation, with its error against the measured points."""
    for op in reference.points:
        fitted = reference.fits.get(op)
        if fitted is None:
            yield f"# {op}: too few sizes for a curve"
        else:
            wide = fitted.curve.bandwidth
            large = "size made no difference" if wide is None else f"busbw of large operations {rate(wide)}"
            yield f"# {op}: {seconds(fitted.curve.alpha_s)} a message, {large} (± {percent(fitted.error)})"


def compared(references: list[Measured]) -> str:
    """Return the bus bandwidths of backends side by side, in GB/s, with the fastest backend of each row."""
    names = [str(one.backend) for one in references]
    head = f"# {'operation':<14}  {'size (B)':>12}  " + "  ".join(f"{name:>9}" for name in names) + "  fastest"
    lines = ["# busbw (GB/s)", head]
    keys = dict.fromkeys((op, size_bytes) for one in references for op in one.points for size_bytes in one.points[op])
    for op, size_bytes in keys:
        times = [one.points.get(op, {}).get(size_bytes) for one in references]
        cells = [
            "–" if t is None else _gigabytes(busbw(op, size_bytes, t, one.group_size))
            for one, t in zip(references, times, strict=True)
        ]
        known = {name: t for name, t in zip(names, times, strict=True) if t is not None}
        fastest = min(known, key=lambda name: known[name])
        if len(known) > 1:
            fastest += f" ({max(known.values()) / known[fastest]:.1f} times)"
        lines.append(f"  {op:<14}  {size_bytes:>12}  " + "  ".join(f"{cell:>9}" for cell in cells) + f"  {fastest}")
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
