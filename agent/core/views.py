"""What the API, the report and the command line show of jobs, steps, ranks and groups: plain values."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class JobView:
    """A job on this node. Times are Unix seconds."""

    job_id: str
    #: ``running`` while one of its ranks lives.
    state: str
    world_size: int
    ranks: list[int]
    restarts: int
    started_at: float
    last_seen_at: float
    #: Records the agent never saw: overwritten, torn, or given up by a faulty probe; in all lives of the job, like ``records``.
    lost: int
    #: Why there are no step metrics, if there are none.
    steps_unavailable: str | None
    #: Of its launcher, where that was ``commwatch run``: 128 + n for signal n; ``None``: not known, or it runs.
    exit_code: int | None = None
    #: Whether it ended otherwise than well; ``None``: not known, or it runs.
    failed: bool | None = None
    #: How it ended, for people: exit code, and which rank was the first that did not end well; empty where all is well.
    ending: str = ""
    #: Records that the agent has read.
    records: int = 0


@dataclass(frozen=True)
class StepView:
    """One step of one rank. Times are Unix seconds; shares are 0 to 1; ``None``: not known."""

    job_id: str
    rank: int
    seq: int
    start_at: float
    end_at: float
    duration_s: float
    comm_s: float | None
    comm_share: float | None
    exposed_s: float | None
    exposed_share: float | None
    #: Part of the step that each group's operations took, by its label; together they may be more than ``comm_share``.
    group_shares: dict[str, float]
    #: Time a thread stood waiting for sends and receives.
    p2p_wait_s: float | None
    #: It took more than three times as long as its neighbours.
    long: bool


@dataclass(frozen=True)
class WaitView:
    """How long one rank waited for late ones, of what was counted from ``start_at`` (Unix seconds) on."""

    rank: int
    start_at: float
    length_s: float
    wait_s: float


@dataclass(frozen=True)
class InFlight:
    """An operation that has begun and not ended."""

    op: str
    group: str
    group_id: str
    seq: int
    peer: int | None
    tag: int | None
    dtype: str | None
    #: ``None``: it has none, or it is not known.
    size_bytes: int | None
    age_s: float
    #: A thread stands in a wait for it.
    blocked: bool
    #: For how long; ``None`` where nobody does, or where that is not seen: collectives.
    waited_s: float | None
    #: Median duration of such operations of this rank so far; ``None``: none has ended.
    usual_s: float | None


@dataclass(frozen=True)
class Failed:
    """A collective that raised on this rank."""

    op: str
    group_id: str
    seq: int
    dtype: str | None
    size_bytes: int | None
    #: Seconds since.
    ago_s: float


@dataclass(frozen=True)
class RankView:
    """One rank of a job, in its latest life."""

    job_id: str
    rank: int
    restart: int
    #: ``running``, ``ended`` (said so itself) or ``gone`` (its process vanished).
    state: str
    host: str
    local_rank: int | None
    #: As the trainer sees it.
    pid: int
    hook: str
    #: ``running``, ``sleeping``, ``disk``, ``stopped`` or ``zombie``; ``None``: the agent cannot see the process.
    process: str | None
    #: Seconds since the probe last gave a sign of life; ``None`` once the rank is no more.
    heartbeat_age_s: float | None
    #: Latest finished collective per group, by ``group_id``; of operations whose end is not seen, or that are only counted, the latest launched.
    last_seq: dict[str, int]
    #: Of groups whose latest is such a one (CUDA by default): seconds since it was launched.
    launched_s: dict[str, float]
    in_flight: list[InFlight]
    #: The latest ones.
    failed: list[Failed]
    #: Read and lost, of all rings of this process.
    records: int
    lost: int
    #: Seconds since operations had no room in the table of those in flight, so that some of them are not in ``in_flight``; ``None``: never.
    overflow_s: float | None = None
    #: The trainer's pid as the agent sees it; ``None``: it does not.
    visible_pid: int | None = None
    #: How its operations on GPUs are timed (``events``, ``poll``, ``off``), and why so; empty where it does not say.
    gpu_timing: str = ""
    gpu_timing_reason: str = ""
    #: The card it computes on, as ``/api/v1/gpus`` numbers it; ``None``: none, not known, or not one the agent sees.
    gpu: int | None = None
    #: As the trainer itself says; ``None``: it has not said, or the rank is no more.
    gpu_uuid: str | None = None
    #: Its PCI address; ``None``: not known.
    gpu_bus_id: str | None = None
    #: What the probe records of its operations: ``full`` (each), ``sampling`` (one in sixteen, the rest counted) or ``counters``; ``None``: not
    #: known any more.
    probe_mode: str | None = None
    #: For how many seconds; ``None``: it has always been so, or the rank is no more.
    probe_mode_s: float | None = None
    #: Time that the probe has cost so far, and the part of the time that it may take (0: any); ``None``: not known.
    probe_s: float | None = None
    probe_budget: float | None = None
    #: Unix time of its end, which the agent may see a moment later where the rank did not say so itself; ``None``: it runs, or not known.
    ended_at: float | None = None
    #: Type of the exception that ended it; ``None``: none, or not known.
    raised: str | None = None


@dataclass(frozen=True)
class GroupView:
    """A process group, as the ranks of this node that used it announced it."""

    job_id: str
    group_id: str
    group: str
    name: str
    description: str
    size: int
    #: Global ranks of its members; ``None``: not known.
    members: list[int] | None
    #: Those of them that used it on this node.
    ranks: list[int]
    #: The probe was there from the group's first operation, so its collectives can be joined.
    aligned: bool
    #: torch's name of its backend; ``None``: not known.
    backend: str | None = None
