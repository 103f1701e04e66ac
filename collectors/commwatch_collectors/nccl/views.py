"""What NCCL's logs show, as plain values: findings and the topology. Without the patterns that find it, which take a fifth of a second to load."""

from __future__ import annotations

from dataclasses import dataclass, field

#: Most entries of a list that grows with the ranks, or with their square.
MOST_ENTRIES = 400
#: Of findings, the worst first.
SEVERITIES = ("error", "warning", "info")


@dataclass(frozen=True)
class Evidence:
    """A log line that shows a finding."""

    file: str
    line: int
    text: str


@dataclass(frozen=True)
class Finding:
    """A problem in this log, or another fact worth knowing."""

    name: str
    severity: str
    title: str
    #: Details of this case.
    says: str
    means: str
    do: str
    evidence: list[Evidence]


@dataclass(frozen=True)
class LinkView:
    """How one rank reaches another; ranks are ranks of the communicator."""

    src: int
    dst: int
    transport: str
    #: Number of the network device, for networks.
    device: str | None
    #: GPUDirect RDMA; ``None`` if the link uses no network.
    gdr: bool | None
    channels: int


@dataclass(frozen=True)
class CommunicatorView:
    """A communicator, as far as the logs show it."""

    #: NCCL's hash, equal on all ranks; ``None`` if the messages have none.
    comm_id: str | None
    name: str
    nranks: int
    #: All communicators of this size in one entry: messages do not distinguish them.
    pooled: bool
    #: Of the communicator it was split from.
    parent_comm_id: str | None
    color: int | None
    #: Ranks of the communicator by host.
    hosts: dict[str, list[int]]
    nnodes: int | None
    complete: bool
    #: Ranks that the logs show: ``0-3, 7``.
    in_sight: str
    #: The first of the other ranks.
    missing_ranks: list[int]
    coll_channels: int | None
    nvls_channels: int | None
    p2p_channels: int | None
    #: Connections (a channel to a peer) by transport.
    transports: dict[str, int]
    links: list[LinkView]
    #: Order of the ranks by channel.
    rings: dict[int, list[int]]
    #: PyTorch process groups that it may be: a single one if that is certain.
    group_ids: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class HostView:
    """Network devices and networks of a host."""

    host: str
    processes: int
    hcas: list[str]
    networks: list[str]
    bootstrap: list[str]


@dataclass(frozen=True)
class ChoiceView:
    """The tuner's choice for a range of sizes."""

    collective: str | None
    algo: str
    proto: str
    min_bytes: int
    max_bytes: int
    #: How often it was printed.
    lines: int
