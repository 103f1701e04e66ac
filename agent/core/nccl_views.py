"""What the API shows of NCCL's logs: messages, and what they say of a job's hosts and communicators. Plain values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

from commwatch.collectors.nccl.findings import Finding
from commwatch.collectors.nccl.topology import ChoiceView, CommunicatorView, HostView


@dataclass(frozen=True)
class NcclMessage:
    """A warning of NCCL, or a time-out of PyTorch's watchdog."""

    job_id: str
    #: Unix time at which the agent read it: NCCL says no time before 2.26.
    at: float
    message_class: Annotated[str, Field(serialization_alias="class")]
    text: str
    host: str | None
    pid: int | None
    #: Global rank, where the probe runs in the same process.
    rank: int | None
    file: str
    line: int


@dataclass(frozen=True)
class Topology:
    """What the NCCL logs of a job say on this node."""

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
    #: Passed over because the log grew faster than it may be read.
    skipped_bytes: int
