"""NCCL Inspector's JSON lines. Pure.

Inspector is NCCL's own profiler plugin (NCCL 2.28 and later; RCCL has a port). It times collectives on the GPU
(``kernel_gpu``) unless configured otherwise, and writes one object per line for each collective or message. Its text files
for Prometheus hold means since the previous dump, which cannot be added up: they are not read.

Formats:

- v4.0: each line has its communicator and process (``header``, ``metadata``);
- v4.1: each dump of a communicator begins with a line ``dump_stats``: the numbers of its records, and of those that were
  overwritten before they were dumped;
- v4.2: collectives have ``coll_algo`` and ``coll_proto``;
- v4.3: only the line ``dump_stats`` has ``header`` and ``metadata``. They hold for the records that it announces:
  collectives, then messages, then those of the proxy thread, which are not used.

Source: NVIDIA/nccl, plugins/profiler/inspector: README.md, inspector_json.cc, inspector.cc; v4.1 in pull
request 2304, v4.2 in commit 35d819ec, v4.3 in pull request 2359.
"""

from __future__ import annotations

import json
import re
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
#: Formats whose fields are known here. Lines of other formats are read if they have the same fields.
VERSIONS = ("v4.0", "v4.1", "v4.2", "v4.3")
_FORMAT = re.compile(r"v[0-9]{1,4}(\.[0-9]{1,4}){0,2}")
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
    kind: frozenset({kind, "event_trace_sn", "event_trace_ts", *(f"{kind}_{name}" for name in (*_PERF, *more))})
    for kind, more in (("coll", ("algo", "proto")), ("p2p", ()))
}
#: A dump's records by the field that has them, in this order: the field of ``dump_stats`` with their number.
_ANNOUNCED = {"coll_perf": "coll_records", "p2p_perf": "p2p_records", "proxy_trace": "proxy_records"}
_STATS = frozenset(
    {
        *_ANNOUNCED.values(),
        *(
            f"{kind}_dropped_{since}"
            for kind in ("coll", "p2p", "proxy", "proxy_ops")
            for since in ("total", "since_last_dump")
        ),
        "proxy_pxn_skipped_process_total",
        "proxy_steps_enabled",
    }
)
#: Longer durations are invalid: one day, in µs.
_MOST_US = 86_400_000_000
_MOST_TEXT = 200
#: Unknown formats remembered of one file.
_MOST_VERSIONS = 8


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
    #: As NCCL writes them, such as ``RING`` and ``LL128``; ``None``: messages, and formats before v4.2.
    algorithm: str | None
    protocol: str | None
    duration_s: float
    #: One of ``TIMINGS``, or ``unknown``.
    timing: str
    #: Number of fields that no known version has; they are skipped.
    unknown_fields: int


class Dropped(NamedTuple):
    """Records of one rank in one communicator that Inspector overwrote before it dumped them, since it joined."""

    comm: str
    comm_name: str | None
    group_rank: int
    group_size: int
    host: str
    pid: int
    collectives: int
    messages: int
    #: As in ``Timed``.
    unknown_fields: int


class _Member(NamedTuple):
    """A rank of a communicator, and its process."""

    comm: str
    comm_name: str | None
    group_rank: int
    group_size: int
    host: str
    pid: int


class Reader:
    """Reads the lines of one file, in order: since v4.3 a record belongs to the ``dump_stats`` before it."""

    def __init__(self) -> None:
        #: Lines that are incomplete, of an unknown kind, or without their ``dump_stats``.
        self.unknown_lines = 0
        #: Unknown formats that have such lines.
        self.unread_versions: set[str] = set()
        self.forget()

    def forget(self) -> None:
        """Read on in another place of the file: what follows does not belong to the latest ``dump_stats``."""
        self._member: _Member | None = None
        self._version: str | None = None
        #: By field: records of the latest dump that are still to come.
        self._awaited: dict[str, int] = {}

    def read(self, line: str) -> Timed | Dropped | None:
        """Parse the next line; ``None`` if it has no data for us. Unknown lines are counted, empty ones are not."""
        if not line.strip():
            return None
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            record = None
        if not isinstance(record, dict):
            self._torn(line)
            return None
        version = _version(record.get("metadata"))
        if "dump_stats" in record:
            return self._begin(record, version)
        if "header" not in record and "metadata" not in record:
            return self._announced(record)
        timed = _timed(record, _member(record))
        if timed is None and not isinstance(record.get("proxy_trace"), dict):
            self._unread(version)
        return timed

    def _unread(self, version: str | None) -> None:
        self.unknown_lines += 1
        if version is not None and version not in VERSIONS and len(self.unread_versions) < _MOST_VERSIONS:
            self.unread_versions.add(version)

    def _torn(self, line: str) -> None:
        """Count a line that is no object; it may have begun a dump."""
        self.unknown_lines += 1
        if '"header"' in line or '"dump_stats"' in line:
            self.forget()

    def _begin(self, record: dict[str, Any], version: str | None) -> Dropped | None:
        self.forget()
        stats, member = record["dump_stats"], _member(record)
        if not isinstance(stats, dict) or member is None:
            self._unread(version)
            return None
        awaited = {field: _number(stats.get(name, 0)) for field, name in _ANNOUNCED.items()}
        collectives, messages = (_number(stats.get(f"{kind}_dropped_total")) for kind in ("coll", "p2p"))
        if collectives is None or messages is None or None in awaited.values():
            self._unread(version)
            return None
        self._member, self._version = member, version
        self._awaited = {field: number for field, number in awaited.items() if number}
        unknown = _unknown(record, "dump_stats") + len(stats.keys() - _STATS)
        return Dropped(*member, collectives, messages, unknown)

    def _announced(self, record: dict[str, Any]) -> Timed | None:
        """Parse a record without a communicator of its own."""
        field = next((field for field in _ANNOUNCED if field in record), None)
        if field is None or not self._awaited.get(field):
            self._unread(self._version)
            return None
        self._awaited[field] -= 1
        found = _timed(record, self._member)
        if found is None and field != "proxy_trace":
            self._unread(self._version)
        return found


def _version(about: Any) -> str | None:
    version = about.get("inspector_output_format_version") if isinstance(about, dict) else None
    return version if isinstance(version, str) and _FORMAT.fullmatch(version) else None


def _member(record: dict[str, Any]) -> _Member | None:
    header, about = record.get("header"), record.get("metadata")
    if not isinstance(header, dict) or not isinstance(about, dict):
        return None
    rank, size, pid = (_number(value) for value in (header.get("rank"), header.get("n_ranks"), about.get("pid")))
    comm, host, name = _text(header.get("id")), _text(about.get("hostname")), _text(header.get("comm_name"))
    if rank is None or size is None or pid is None or comm is None or host is None or not rank < size:
        return None
    return _Member(comm, None if name in (None, "", "unknown") else name, rank, size, host, pid)


def _timed(record: dict[str, Any], member: _Member | None) -> Timed | None:
    kind = next((kind for kind in ("coll", "p2p") if isinstance(record.get(f"{kind}_perf"), dict)), None)
    if kind is None or member is None:
        return None
    perf: dict[str, Any] = record[f"{kind}_perf"]
    seq, took_us = _number(perf.get(f"{kind}_sn")), _number(perf.get(f"{kind}_exec_time_us"))
    name = _text(perf.get(kind))
    if seq is None or took_us is None or name is None or took_us > _MOST_US:
        return None
    op, by_ranks = _OPS.get(name, (OTHER, False))
    bytes_of_rank = _number(perf.get(f"{kind}_msg_size_bytes"))
    known = op != OTHER and bytes_of_rank is not None
    source = perf.get(f"{kind}_timing_source")
    return Timed(
        *member,
        op=op,
        seq=seq,
        size_bytes=(bytes_of_rank or 0) * (member.group_size if by_ranks else 1) if known else None,
        algorithm=_chosen(perf.get(f"{kind}_algo")),
        protocol=_chosen(perf.get(f"{kind}_proto")),
        duration_s=took_us / 1e6,
        timing=source if source in TIMINGS else UNKNOWN_TIMING,
        unknown_fields=_unknown(record, f"{kind}_perf") + len(perf.keys() - _KNOWN[kind]),
    )


def _unknown(record: dict[str, Any], field: str) -> int:
    """Return the number of unknown fields beside ``field``, and in the header and the metadata."""
    return (
        len(record.keys() - {"header", "metadata", field})
        + len(record.get("header", {}).keys() - _HEADER)
        + len(record.get("metadata", {}).keys() - _METADATA)
    )


def _chosen(value: Any) -> str | None:
    name = _text(value)
    return None if name in (None, "", "unknown") else name


def _number(value: Any) -> int | None:
    return value if type(value) is int and 0 <= value < 1 << 53 else None


def _text(value: Any) -> str | None:
    return value[:_MOST_TEXT] if isinstance(value, str) else None
