"""Jobs, steps, ranks and groups for the API, the report and the command line: plain values."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from commwatch_agent.model.cells import GroupInfo
from commwatch_collectors.node.cores import Cores
from commwatch_collectors.node.judged_activity import Activity
from commwatch_collectors.node.tcp_peers import TcpPeer

#: Where steps come from: from the marks of an optimizer or of ``commwatch.step()``, or from the cycle of a rank's operations.
MARKS, ITERATIONS = "marks", "iterations"


def common_source(sources: Iterable[str | None]) -> str | None:
    """Return where the steps of a job come from, given those of its ranks: from marks if one has them."""
    found = set(sources)
    return next((source for source in (MARKS, ITERATIONS) if source in found), None)


@dataclass(frozen=True)
class JobView:
    """A job on this node. Times are Unix seconds."""

    job_id: str
    #: ``running`` while one of its ranks runs.
    state: str
    world_size: int
    ranks: list[int]
    restarts: int
    started_at: float
    last_seen_at: float
    #: Records that the agent could not read: overwritten, torn, or dropped by the probe. Like ``records``, over all restarts.
    lost: int
    #: Why there are no step metrics, if there are none.
    steps_unavailable: str | None
    #: Exit code of its launcher ``commwatch run``, 128 + n for signal n; ``None``: not known, or it runs.
    exit_code: int | None = None
    #: Whether it failed; ``None``: not known, or it runs.
    failed: bool | None = None
    #: How it ended, as text: exit code, and which rank failed first; empty if nothing failed.
    ending: str = ""
    #: Records that the agent has read.
    records: int = 0
    #: What only the ranks of this run have, on all nodes: two runs may have the same name. Empty: not known.
    run: str = ""
    #: Names for the runs of this name that have ended before, on this node, the latest first, at most 10.
    earlier: list[str] = field(default_factory=list)
    #: What its steps are: ``marks``, those between calls of an optimizer or of ``commwatch.step()``; ``iterations``, the turns of the cycle of a
    #: rank's operations, because nothing marks steps. ``None``: there are none, or it is not known.
    step_source: str | None = None


@dataclass(frozen=True)
class JobFigures(JobView):
    """A job with the headline figures of its report. ``None``: not known."""

    #: From the begin of its first rank until it was last seen.
    duration_s: float = 0.0
    #: Steps of the rank with the most.
    steps: int = 0
    #: Of the steps of all its ranks but the long ones: median in seconds, and shares of their time.
    step_p50_s: float | None = None
    comm_share: float | None = None
    exposed_share: float | None = None


@dataclass(frozen=True)
class StepTotals:
    """All steps of one rank of a job together: their number, and the exposed communication in those of which it is known."""

    rank: int
    steps: int
    exposed_known: int
    #: In ns.
    exposed: float


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
    #: Share of the step in operations of each group, by label; their sum may exceed ``comm_share``.
    group_shares: dict[str, float]
    #: Time in which a thread waited for sends and receives.
    p2p_wait_s: float | None
    #: It took more than three times as long as its neighbours.
    long: bool


@dataclass(frozen=True)
class WaitView:
    """How long one rank waited for late ranks, in the slot of ``length_s`` from ``start_at`` (Unix seconds)."""

    rank: int
    start_at: float
    length_s: float
    wait_s: float


@dataclass(frozen=True)
class Usual:
    """What a rank has done before at one place of its work (docs/verdicts.md, Rhythm)."""

    #: How often it has been there, of the times that are kept.
    times: int
    #: The longest time there that ended, in s; ``None``: none took longer than a second.
    longest_s: float | None


@dataclass(frozen=True)
class InFlight:
    """An operation that has begun and not ended."""

    op: str
    group: str
    group_id: str
    seq: int
    #: Global rank of the other side of a message, or of the root.
    peer: int | None
    tag: int | None
    dtype: str | None
    #: ``None``: it has none, or it is not known.
    size_bytes: int | None
    age_s: float
    #: A thread waits for it; on a GPU: the GPU has reached it.
    blocked: bool
    #: For how long, in s; ``None``: no thread waits, or it is a collective on the CPU, whose waits are not seen.
    waited_s: float | None
    #: Median duration of such operations of this rank so far; ``None``: none has ended.
    usual_s: float | None
    #: The rank's GPU has not reached it: earlier work is not over.
    queued: bool = False
    #: Such waits at this place of the rank's work; ``None``: it has just begun, or not known.
    place: Usual | None = None
    #: For how many seconds the rank was in no operation before it; ``None`` as for ``place``.
    absent_s: float | None = None
    #: Of an all_to_all in which the rank has been for 2 s: the bytes that it sends to each rank of the group, by the order of its members, and
    #: those that it expects from each; ``None``: not known.
    sends: list[int] | None = None
    expects: list[int] | None = None


@dataclass(frozen=True)
class Failed:
    """An operation that raised on this rank."""

    op: str
    group_id: str
    seq: int
    dtype: str | None
    size_bytes: int | None
    #: Seconds since it raised.
    ago_s: float
    #: The other rank of a message; ``None``: a collective, or not known.
    peer: int | None = None
    #: The rank has begun no other operation and ended no step since.
    is_latest: bool = False
    #: Global rank of the root of a collective; ``None``: there is none, or not known.
    root: int | None = None
    #: As in ``InFlight``.
    sends: list[int] | None = None
    expects: list[int] | None = None


@dataclass(frozen=True)
class Ended:
    """A collective that has ended on this rank, or whose end is not seen."""

    op: str
    group_id: str
    seq: int
    dtype: str | None
    size_bytes: int | None
    #: Seconds since its end.
    ago_s: float
    #: As in ``Failed``.
    root: int | None = None
    sends: list[int] | None = None
    expects: list[int] | None = None


@dataclass(frozen=True)
class OutsideCall:
    """A call outside operations in which a rank waits for others."""

    #: One of ``wire.ring.OUTSIDE_CALLS``.
    call: str
    #: Global ranks that it is about; ``None``: all, or it waits in a store; empty: not known.
    ranks: list[int] | None
    #: Of a store; empty: it waits for no key.
    key: str
    age_s: float
    #: How many such calls the rank has begun with it; 0: not counted.
    number: int = 0


@dataclass(frozen=True)
class RankTraffic:
    """What a rank sends to other nodes over TCP while communication takes much of its time. ``None``: not known."""

    peers: list[TcpPeer] = field(default_factory=list)
    #: Part of its usual steps (0 to 1) in communication, and in communication that compute waits for; and the length of such a step in s.
    comm: float | None = None
    exposed: float | None = None
    step_s: float | None = None
    #: Why its connections are not known; empty: they are.
    unknown: str = ""


@dataclass(frozen=True)
class RankView:
    """One rank of a job, in its latest run."""

    job_id: str
    rank: int
    restart: int
    #: ``running``, ``left`` (it has destroyed its default group, its process lives), ``ended`` (it recorded its end) or ``gone`` (its process
    #: vanished).
    state: str
    host: str
    local_rank: int | None
    #: The trainer's own pid.
    pid: int
    hook: str
    #: ``running``, ``sleeping``, ``disk``, ``stopped`` or ``zombie``; ``None``: the agent cannot see the process.
    process: str | None
    #: Seconds since the probe's latest heartbeat; ``None`` after the rank's end.
    heartbeat_age_s: float | None
    #: Number of the latest finished collective, by ``group_id``; of the latest launched where ends are not seen, or operations only counted.
    last_seq: dict[str, int]
    #: Seconds since that launch, for groups where ends are not seen (CUDA by default).
    launched_s: dict[str, float]
    in_flight: list[InFlight]
    #: The latest operations that raised.
    failed: list[Failed]
    #: Records read and lost, of all rings of this process.
    records: int
    lost: int
    #: Seconds since the table of operations in flight overflowed, so that ``in_flight`` may lack some; ``None``: never.
    overflow_s: float | None = None
    #: The trainer's pid as the agent sees it; ``None``: not visible.
    visible_pid: int | None = None
    #: How its operations on GPUs are timed (``events``, ``poll``, ``off``), and why; empty if not reported.
    gpu_timing: str = ""
    gpu_timing_reason: str = ""
    #: How exposed time is measured: ``thread_cpu`` or ``stream_waits`` (docs/numbers.md); ``None``: it is not known.
    exposed_source: str | None = None
    #: The frameworks that exchange its gradients (``ddp``, ``fsdp``, ``fsdp2``, ``deepspeed``, ``megatron``); empty: none of these; ``None``: not known.
    frameworks: list[str] | None = None
    #: Its GPU, as ``/api/v1/gpus`` numbers it; ``None``: none, not known, or not visible to the agent.
    gpu: int | None = None
    #: As the trainer reported it; ``None``: not reported, or the rank has ended.
    gpu_uuid: str | None = None
    #: Its PCI address; ``None``: not known.
    gpu_bus_id: str | None = None
    #: What the probe records of its operations: ``full`` (each), ``sampling`` (one in sixteen, the rest counted) or ``counters``; ``None``: no
    #: longer known.
    probe_mode: str | None = None
    #: Seconds since the mode changed; ``None``: it never changed, or the rank has ended.
    probe_mode_s: float | None = None
    #: Time that the probe has cost so far, and the share of time that it may cost (0: no limit); ``None``: not known.
    probe_s: float | None = None
    probe_budget: float | None = None
    #: Unix time of its end, perhaps a moment late where the rank did not record it; ``None``: it runs, or not known.
    ended_at: float | None = None
    #: Unix time after which it ended: equal to ``ended_at`` where the rank recorded its end; ``None``: it runs, or not known.
    ended_after: float | None = None
    #: An operation raised shortly before its end: another rank may be the cause.
    failed_in_operation: bool = False
    #: ``ended_at`` is when the kernel reported the end of its process.
    end_is_reported: bool = False
    #: When its process started, in s of Unix time; ``None``: not known.
    started_at: float | None = None
    #: Type of the exception that ended it; ``None``: none, or not known.
    raised: str | None = None
    #: Where it was raised, as ``load (train.py:88)``; ``None``: not known.
    raised_at: str | None = None
    #: What it says, in one line; ``None``: nothing, or not known.
    raised_says: str | None = None
    #: Exit code of its process, or ``-n`` if signal n ended it; ``None``: 0, or not known.
    exit_status: int | None = None
    #: The signal that had asked its launcher to end the job before it ended, and the Unix time of that; ``None``: none did, or not known.
    stopped_by: int | None = None
    stopped_at: float | None = None
    #: ``group_id`` of the groups that it has destroyed.
    destroyed: list[str] = field(default_factory=list)
    #: Its collectives that other ranks may still be inside (``analysis.calls.ended``).
    ended: list[Ended] = field(default_factory=list)
    #: Seconds since an operation or a step of it has ended, and the longest time between two such ends; ``None``: not known, or it has ended.
    quiet_s: float | None = None
    longest_quiet_s: float | None = None
    #: Times without an operation at this place of its work; ``None``: it is inside one, has just been, or not known.
    absence: Usual | None = None
    #: It marks steps; ``None``: not known.
    steps: bool | None = None
    #: Number of the latest training step that it has ended, from 1; ``None``: it has marked none, or not known.
    step: int | None = None
    #: Seconds since it ended its latest training step; ``None``: it has marked none, or has ended.
    stepped_s: float | None = None
    #: What it does while others wait for it; ``None``: none waits, or not known.
    activity: Activity | None = None
    #: Its TCP connections, after its end the last that was known of them; ``None``: communication takes little of its time, or all ranks are in one network.
    traffic: RankTraffic | None = None
    #: Where it waits for others outside operations.
    outside: list[OutsideCall] = field(default_factory=list)
    #: How many calls of ``init_process_group`` and of ``new_group`` it has begun, without one in which it died.
    begun: dict[str, int] = field(default_factory=dict)
    #: Ranks of its job on all nodes; 0: not known.
    world_size: int = 0
    #: Ranks of its job on its node by the launcher's variables; ``None``: not known.
    node_ranks: list[int] | None = None
    #: Share (0 to 1) of the latest half minute, after its end of its last one, in which its main thread was ready to run but had no core, or was
    #: stopped by a CPU quota; a standstill is left out. ``None``: not known.
    core_wait_share: float | None = None
    #: Its cores and threads when it last was found to lack cores; ``None``: not known, or it never did.
    cores: Cores | None = None


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
    #: The probe was loaded before the group's first operation, so its collectives can be joined.
    aligned: bool
    #: torch's name of its backend; ``None``: not known.
    backend: str | None = None


class TraceOperation(NamedTuple):
    """One operation of one rank; times in ns of one clock for all ranks."""

    rank: int
    op: str
    group: GroupInfo
    seq: int
    #: Global rank of the other side, or of the root; -1: none, or not known.
    peer: int
    tag: int
    #: ``None``: it has none.
    size: int | None
    dtype: str | None
    launch_ns: int
    start_ns: int
    end_ns: int
    #: ``ev.FAILED``, ``ev.UNTIMED`` and others.
    flags: int
    timing: int
    #: What it carries, as in ``history.operations.Operation``.
    part: str | None = None
