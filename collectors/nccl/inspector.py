"""NCCL Inspector: its JSON lines and its Prometheus text files. Pure.

Inspector is NCCL's own profiler plugin (NCCL 2.28 and later; RCCL has a port). It times collectives on the GPU
(``kernel_gpu``) unless configured otherwise. The JSON has one object per line for each collective or message; the text
files hold means since the previous dump, and are rewritten each time.

Source: NVIDIA/nccl, plugins/profiler/inspector: README.md, inspector_json.cc, inspector_prom.cc, inspector.cc.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

#: NCCL's operation -> canonical name, and whether S of nccl-tests is the bytes of one rank times the number of ranks.
_OPS: dict[str, tuple[str, bool]] = {
    "AllReduce": ("all_reduce", False),
    "AllGather": ("all_gather", True),
    "ReduceScatter": ("reduce_scatter", True),
    "AlltoAll": ("all_to_all", True),
    "Broadcast": ("broadcast", False),
    "Reduce": ("reduce", False),
    "Gather": ("gather", True),
    "Scatter": ("scatter", True),
    "Send": ("send", False),
    "Recv": ("recv", False),
}
#: Name of unknown operations.
OTHER = "other"
#: How a duration was measured: on the GPU, by the CPU that watched the kernel, or by the CPU from launch on.
TIMINGS = ("kernel_gpu", "kernel_cpu", "collective_cpu")
UNKNOWN_TIMING = "unknown"
_HEADER = frozenset({"id", "comm_name", "rank", "n_ranks", "nnodes"})
_METADATA = frozenset(
    {"inspector_output_format_version", "git_rev", "rec_mechanism", "dump_timestamp_us", "hostname", "pid"}
)
_PERF = ("sn", "msg_size_bytes", "exec_time_us", "timing_source", "algobw_gbs", "busbw_gbs", "peer")
_KNOWN = {
    kind: frozenset({kind, "event_trace_sn", "event_trace_ts", *(f"{kind}_{name}" for name in _PERF)})
    for kind in ("coll", "p2p")
}
#: Longer durations are invalid: one day, in µs.
_MOST_US = 86_400_000_000
_MOST_TEXT = 200


class Timed(NamedTuple):
    """One collective or message of one rank, as Inspector timed it."""

    #: The communicator's hash, as NCCL's log and RAS print it, too.
    comm: str
    #: The program's name for it; ``None`` if there is none.
    comm_name: str | None
    group_rank: int
    group_size: int
    host: str
    pid: int
    #: Canonical, or ``other``.
    op: str
    seq: int
    #: S as nccl-tests counts it; ``None`` if not known, as for an unknown op.
    size_bytes: int | None
    duration_s: float
    #: One of ``TIMINGS``, or ``unknown``.
    timing: str
    #: Number of fields that no known version has; they are skipped.
    unknown_fields: int


class Mean(NamedTuple):
    """A line of a text file: a mean since the previous dump."""

    metric: str
    labels: dict[str, str]
    value: float


def parse_line(line: str) -> Timed | None:
    """Parse a line of the JSON; ``None`` if it is incomplete or something else."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(record, dict):
        return None
    header, about = record.get("header"), record.get("metadata")
    kind = next((kind for kind in ("coll", "p2p") if isinstance(record.get(f"{kind}_perf"), dict)), None)
    if not isinstance(header, dict) or not isinstance(about, dict) or kind is None:
        return None
    return _timed(record, header, about, record[f"{kind}_perf"], kind)


def _timed(
    record: dict[str, Any], header: dict[str, Any], about: dict[str, Any], perf: dict[str, Any], kind: str
) -> Timed | None:
    rank, size, pid = (_number(value) for value in (header.get("rank"), header.get("n_ranks"), about.get("pid")))
    seq, took_us = _number(perf.get(f"{kind}_sn")), _number(perf.get(f"{kind}_exec_time_us"))
    comm, host, name = _text(header.get("id")), _text(about.get("hostname")), _text(perf.get(kind))
    if rank is None or size is None or pid is None or seq is None or took_us is None:
        return None
    if comm is None or host is None or name is None or not rank < size or took_us > _MOST_US:
        return None
    op, by_ranks = _OPS.get(name, (OTHER, False))
    bytes_of_rank = _number(perf.get(f"{kind}_msg_size_bytes"))
    known = op != OTHER and bytes_of_rank is not None
    source = perf.get(f"{kind}_timing_source")
    comm_name = _text(header.get("comm_name"))
    return Timed(
        comm=comm,
        comm_name=None if comm_name in (None, "", "unknown") else comm_name,
        group_rank=rank,
        group_size=size,
        host=host,
        pid=pid,
        op=op,
        seq=seq,
        size_bytes=(bytes_of_rank or 0) * (size if by_ranks else 1) if known else None,
        duration_s=took_us / 1e6,
        timing=source if source in TIMINGS else UNKNOWN_TIMING,
        unknown_fields=_unknown(record, header, about, perf, kind),
    )


def _unknown(
    record: dict[str, Any], header: dict[str, Any], about: dict[str, Any], perf: dict[str, Any], kind: str
) -> int:
    return (
        len(record.keys() - {"header", "metadata", f"{kind}_perf"})
        + len(header.keys() - _HEADER)
        + len(about.keys() - _METADATA)
        + len(perf.keys() - _KNOWN[kind])
    )


def _number(value: Any) -> int | None:
    return value if type(value) is int and 0 <= value < 1 << 53 else None


def _text(value: Any) -> str | None:
    return value[:_MOST_TEXT] if isinstance(value, str) else None


# -- the text files -------------------------------------------------------------------------------

_SAMPLE = re.compile(r"(nccl_[a-z0-9_]{1,80})\{([^{}]{0,4000})\} ([-+.0-9eE]{1,40})")
#: Others are counters, which newer versions have on request.
_MEANS = frozenset(
    {
        "nccl_bus_bandwidth_gbs",
        "nccl_collective_exec_time_microseconds",
        "nccl_p2p_bus_bandwidth_gbs",
        "nccl_p2p_exec_time_microseconds",
    }
)
_LABEL = re.compile(r'([a-z0-9_]{1,40})="([^"]{0,300})"')


def parse_prom(text: str) -> Iterator[Mean]:
    """Yield the means in a text file; skip other lines, and an incomplete last line."""
    for line in text.split("\n")[:-1]:
        sample = _SAMPLE.fullmatch(line)
        if sample is None or sample[1] not in _MEANS:
            continue
        try:
            value = float(sample[3])
        except ValueError:
            continue
        if 0 <= value < float("inf"):
            yield Mean(sample[1], dict(_LABEL.findall(sample[2])), value)


def canonical(name: str) -> str:
    """Return the canonical name of an NCCL operation, or ``other``.

    >>> canonical("ReduceScatter")
    'reduce_scatter'
    """
    return _OPS.get(name, (OTHER, False))[0]
