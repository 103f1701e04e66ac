"""What the API shows of the other witnesses, NCCL Inspector and NCCL's RAS: plain values. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from commwatch.collectors.nccl.inspector import Mean, canonical

#: Means kept of one text file.
MOST_MEANS = 4096


@dataclass(frozen=True)
class InspectorRow:
    """Operations of one rank as Inspector timed them, added up. Times in seconds, bandwidths in bytes per second."""

    job_id: str
    rank: int
    #: Label and id of the process group; ``unknown`` and ``None`` where the communicator is none that we know, or several.
    group: str
    group_id: str | None
    #: NCCL's hash of the communicator.
    comm: str
    group_size: int
    op: str
    #: Upper bound of the size class, a power of two; ``None``: sizes are not known.
    size_bytes: int | None
    #: How they were timed: ``kernel_gpu``, ``kernel_cpu``, ``collective_cpu`` or ``unknown``.
    timing: str
    count: int
    bytes: int
    #: Sum of their durations: NCCL's kernels of one communicator run one after the other.
    seconds: float
    algbw: float | None
    busbw: float | None


@dataclass(frozen=True)
class InspectorMean:
    """What a text file of Inspector's says of its last interval: means, which do not add up."""

    #: ``None``: several jobs write into that folder.
    job_id: str | None
    node: str
    gpu: str
    comm_name: str
    group_size: int | None
    op: str
    #: As Inspector says it, such as ``4-5GB`` (of 1024 each).
    sizes: str
    algo_proto: str | None
    #: Arithmetic mean.
    duration_s: float | None
    #: Geometric mean.
    busbw: float | None
    #: Unix time of the dump.
    at: float


@dataclass(frozen=True)
class InspectorView:
    """What there is of NCCL Inspector on this node."""

    #: ``off``, ``found`` (its folder is known, nothing is in it yet), ``works`` or ``down``.
    state: str
    says: str
    files: list[str]
    records: int
    #: Lines that are no records, and fields of no version we know: passed over.
    unknown_lines: int
    unknown_fields: int
    #: Passed over because the files grew faster than they may be read.
    skipped_bytes: int
    #: Records that found no room among the sums.
    left_out: int
    rows: list[InspectorRow]
    means: list[InspectorMean]


@dataclass(frozen=True)
class RasCommunicator:
    """A communicator as NCCL's RAS tells of it, over all nodes."""

    comm: str
    size: int | None
    #: The job and process group that it is; ``None``: none that is known here.
    job_id: str | None
    group: str | None
    #: By state, ranks in the communicator, such as ``0-2,5``.
    ranks: dict[str, str]
    #: By operation and how many of it were launched, likewise; of RAS in text only where they differ.
    counts: dict[str, dict[str, str]]
    #: Its ranks have launched different numbers of operations. For a moment that is nothing: they are asked one after the other.
    differ: bool
    #: For how long none of it has changed.
    unchanged_s: float


@dataclass(frozen=True)
class RasAnswer:
    """What one RAS has said last."""

    address: str
    #: ``found`` (not asked yet), ``works`` or ``down``.
    state: str
    says: str
    #: Unix time; ``None``: never.
    asked_at: float | None
    nccl_version: str | None
    #: ``json``, or ``text`` before NCCL 2.28.7, which tells less.
    form: str | None
    communicators: list[RasCommunicator]


@dataclass(frozen=True)
class RasView:
    """What there is of NCCL's RAS on this node."""

    #: ``off``, ``found`` (waiting until no communicator can be in the making), ``works`` or ``down``.
    state: str
    says: str
    answers: list[RasAnswer]


def means(told: list[Mean], jobs: set[str], at: float) -> list[InspectorMean]:
    """The lines of a file, time and bandwidth of the same thing side by side."""
    together: dict[tuple[tuple[str, str], ...], dict[str, float]] = {}
    for mean in told:
        together.setdefault(tuple(sorted(mean.labels.items())), {})[mean.metric] = mean.value
    job, found = next(iter(jobs)) if len(jobs) == 1 else None, []
    for key, values in list(together.items())[:MOST_MEANS]:
        labels = dict(key)
        name = labels.get("collective") or labels.get("p2p_operation") or ""
        took_us = values.get("nccl_collective_exec_time_microseconds", values.get("nccl_p2p_exec_time_microseconds"))
        gbs = values.get("nccl_bus_bandwidth_gbs", values.get("nccl_p2p_bus_bandwidth_gbs"))
        found.append(
            InspectorMean(
                job_id=job,
                node=labels.get("node", ""),
                gpu=labels.get("gpu", ""),
                comm_name=labels.get("comm_name", ""),
                group_size=int(labels["nranks"]) if labels.get("nranks", "").isdecimal() else None,
                op=canonical(name),
                sizes=labels.get("message_size", ""),
                algo_proto=labels.get("algo_proto"),
                duration_s=None if took_us is None else took_us / 1e6,
                # What it has no formula for, such as AlltoAll, it says 0 of.
                busbw=gbs * 1e9 if gbs else None,
                at=at,
            )
        )
    return found
