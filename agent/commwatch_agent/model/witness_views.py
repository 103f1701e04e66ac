"""API answers from NCCL Inspector and NCCL's RAS: plain values. Pure."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class InspectorRow:
    """Sums over operations of one rank, timed by Inspector. Times in seconds, bandwidths in bytes per second."""

    job_id: str
    rank: int
    #: Label and id of the process group; ``unknown`` and ``None`` where the communicator matches none or several.
    group: str
    group_id: str | None
    #: NCCL's hash of the communicator.
    comm: str
    group_size: int
    op: str
    #: Upper bound of the size class, a power of two; ``None``: sizes are not known.
    size_bytes: int | None
    #: NCCL's choice, such as ``RING`` and ``LL128``; ``None``: not reported, as for messages and by formats before v4.2.
    algorithm: str | None
    protocol: str | None
    #: How they were timed: ``kernel_gpu``, ``kernel_cpu``, ``collective_cpu`` or ``unknown``.
    timing: str
    count: int
    bytes: int
    #: Sum of their durations: NCCL's kernels of one communicator run one after the other.
    seconds: float
    algbw: float | None
    busbw: float | None


@dataclass(frozen=True)
class InspectorView:
    """State and results of NCCL Inspector on this node."""

    #: ``off``, ``found`` (its folder is known, nothing is in it yet), ``works`` or ``down``.
    state: str
    says: str
    files: list[str]
    records: int
    #: Skipped: lines that are no records, and fields of unknown versions.
    unknown_lines: int
    unknown_fields: int
    #: Skipped because the files grew faster than the agent may read.
    skipped_bytes: int
    #: Records not counted because the table of sums was full.
    left_out: int
    #: Operations that Inspector timed, but overwrote before it wrote them; ``None``: formats before v4.1 do not report them.
    dropped: int | None
    #: Formats, unknown to commwatch, some lines of which cannot be read.
    unread_versions: list[str]
    rows: list[InspectorRow]


@dataclass(frozen=True)
class RasCommunicator:
    """A communicator over all nodes, as NCCL's RAS reports it."""

    comm: str
    size: int | None
    #: Its job and process group; ``None``: not known on this node.
    job_id: str | None
    group: str | None
    #: Ranks in the communicator by state, such as ``0-2,5``.
    ranks: dict[str, str]
    #: Ranks by operation and number of launches; RAS's text form has them only where they differ.
    counts: dict[str, dict[str, str]]
    #: Its ranks have launched different numbers of operations. For a moment this is normal, as RAS queries them one by one.
    differ: bool
    #: For how long these values have not changed.
    unchanged_s: float


@dataclass(frozen=True)
class RasAnswer:
    """The latest answer of one RAS."""

    address: str
    #: ``found`` (not asked yet), ``refused`` (a query can crash this NCCL), ``works`` or ``down``.
    state: str
    says: str
    #: Unix time; ``None``: never.
    asked_at: float | None
    nccl_version: str | None
    #: ``json``, or ``text`` before NCCL 2.28.7, which has fewer fields.
    form: str | None
    communicators: list[RasCommunicator]


@dataclass(frozen=True)
class RasView:
    """State and answers of NCCL's RAS on this node."""

    #: ``off``, ``found`` (waits until no communicator can be under construction), ``works`` or ``down``.
    state: str
    says: str
    answers: list[RasAnswer]


@dataclass(frozen=True)
class WitnessesView:
    """Data of NCCL Inspector and of NCCL's RAS."""

    inspector: InspectorView
    ras: RasView
