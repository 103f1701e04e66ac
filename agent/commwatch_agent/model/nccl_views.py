"""API answers from NCCL's logs: messages, and a job's hosts and communicators. Plain values."""

from __future__ import annotations

from dataclasses import dataclass, field

from commwatch_collectors.nccl.views import ChoiceView, CommunicatorView, Finding, HostView


@dataclass(frozen=True)
class NcclMessage:
    """A warning of NCCL, or a time-out of PyTorch's watchdog."""

    job_id: str
    #: Unix time at which the agent read it, because NCCL before 2.26 logs no time.
    at: float
    message_class: str = field(metadata={"serialization_alias": "class"})
    text: str
    host: str | None
    pid: int | None
    #: Global rank, where the probe runs in that process.
    rank: int | None
    file: str
    line: int


@dataclass(frozen=True)
class NcclOperations:
    """Operations of one kind and size class for which NCCL chose the same, over the ranks of this node; by NCCL's own times.

    Without those that ran in one kernel with others: their own times are not known.
    """

    job_id: str
    group_id: str
    group: str
    op: str
    #: S <= 2**size_log2 bytes; -1: S is 0.
    size_log2: int
    #: ``None``: NCCL did not report it, as of sends and receives, or the parts of the operations differ.
    algorithm: str | None
    protocol: str | None
    channels: int | None
    ranks: list[int]
    #: Over all ranks: live since the agent opened their rings, in a report of the latest operations.
    count: int
    bytes: int
    #: Mean time of an operation's kernels, in seconds.
    mean_s: float
    #: Mean time from an operation's launch to the begin of its kernels, in seconds: behind earlier work of the stream, and until its inputs are ready.
    queued_s: float
    #: Bus bandwidth in bytes per second while the kernels ran; ``None``: the operation has none.
    busbw: float | None
    #: The channel whose kernel ended last most often, from 0, and in which part of the operations (0 to 1); ``None``: not known, or they have one channel.
    last_channel: int | None
    last_share: float | None
    #: Mean time from the end of an operation's first channel to that of its last, in seconds; ``None`` as above.
    apart_s: float | None
    #: What is wrong with the choice; empty if nothing is known to be.
    remark: str


@dataclass(frozen=True)
class Topology:
    """Contents of a job's NCCL logs on this node."""

    job_id: str
    #: ``NCCL`` or ``RCCL``.
    library: str
    versions: list[str]
    env: dict[str, str | list[str]]
    hosts: list[HostView]
    communicators: list[CommunicatorView]
    choices: list[ChoiceView]
    findings: list[Finding]
    files: list[str]
    messages: int
    unknown_messages: int
    #: Skipped because the log grew faster than the agent may read.
    skipped_bytes: int
