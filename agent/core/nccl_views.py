"""API answers from NCCL's logs: messages, and a job's hosts and communicators. Plain values."""

from __future__ import annotations

from dataclasses import dataclass, field

from commwatch.collectors.nccl.findings import Finding
from commwatch.collectors.nccl.topology import ChoiceView, CommunicatorView, HostView


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
