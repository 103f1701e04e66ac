"""Ranks, groups and verdicts on ended operations from the totals in memory alone: cheap enough for every scrape, because no history is read."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from commwatch.wire import events as ev
from commwatch.wire.identity import process_began_ns
from commwatch.wire.modes import FULL, MODES
from commwatch.wire.numbers import ranks_in
from commwatch_agent.analysis import ended_operations
from commwatch_agent.analysis.calls import ended as ended_calls
from commwatch_agent.analysis.corruption import corruptions
from commwatch_agent.analysis.verdict import Verdict, straggler_verdict
from commwatch_agent.analysis.verdicts import disagreement
from commwatch_agent.ingest.jobs import Job
from commwatch_agent.ingest.rank_totals import RankTotals
from commwatch_agent.ingest.stragglers import LEAST_NS, WINDOWS_NS, Late
from commwatch_agent.ingest.why_late import ALL_LACK_CORES, Sample, Why, reason, waited_for_core
from commwatch_agent.model.cells import GroupInfo
from commwatch_agent.model.endings import Ending
from commwatch_agent.model.runs import Run, common_id, is_local
from commwatch_agent.model.views import Failed, GroupView, InFlight, OutsideCall, RankView, Usual

_T = TypeVar("_T")
#: Time after which a rank may do something else than was found.
_OLD_NS = 5_000_000_000

#: Shorter waits are not looked up.
_SOON_NS = 2_000_000_000

#: Most ranks of a node that are listed.
_MOST_HERE = 256


def ranks(jobs: Iterable[Job], now_ns: int) -> list[RankView]:
    """Return the ranks in memory, each in its latest life, without those of an earlier run.

    Args:
        jobs: locked by the caller.
        now_ns: the monotonic clock in ns.
    """
    found = []
    for job in jobs:
        sought = ended_calls.sought(job, now_ns)
        found += [rank(job.id, totals, now_ns, sought) for totals in of_this_run(job)]
    return found


def of_this_run(job: Job) -> Iterator[RankTotals]:
    """Yield the totals of the job's latest life, one per rank; none for a job without ranks.

    The life is that of the latest process: a job of the same name that is started anew counts its restarts from 0 again.
    """
    oldest_first = _latest_run(job)
    if not oldest_first:
        return
    life = int(oldest_first[-1].identity["restart"])
    began = max((process_began_ns(totals.identity) for totals in oldest_first if totals.alive), default=0)
    last: dict[int, RankTotals] = {}
    for totals in oldest_first:
        before = last.get(totals.rank)
        if totals.alive or (int(totals.identity["restart"]) == life and (before is None or not before.alive)):
            last[totals.rank] = totals
    # A rank that ended before the process of a live rank began is of an earlier run of that name.
    yield from (totals for totals in last.values() if totals.alive or totals.gone_ns is None or totals.gone_ns >= began)


def _latest_run(job: Job) -> list[RankTotals]:
    """Return the totals of all processes of the job's latest run, oldest first."""
    key = run_key(job)
    return sorted((totals for totals in job.rank_totals.values() if totals.run_key == key), key=order)


def run_key(job: Job) -> str:
    """Return the key of the job's latest run; empty: not known."""
    return max(job.rank_totals.values(), key=order).run_key if job.rank_totals else ""


def run(job: Job) -> Run:
    """Return the job's latest run."""
    of_run = _latest_run(job)
    if not of_run:
        return Run(job.id, "", 0)
    latest, ranks = of_run[-1], {totals.rank for totals in of_run}
    sizes = int(latest.identity["world_size"]), latest.identity.get("local_world_size")
    common = common_id(latest.run_key, [totals.run for totals in of_run], *sizes, ranks)
    return Run(job.id, common, int(latest.identity["restart"]))


def order(totals: RankTotals) -> int:
    """Return a key that sorts ranks by their begins: 0 for one that began after its end, by the clock of an earlier boot."""
    began_ns = started_ns(totals)
    return 0 if totals.gone_ns is not None and began_ns > totals.gone_ns else began_ns


def started_ns(totals: RankTotals) -> int:
    """Return when a rank's ring was made, on the monotonic clock."""
    return int(totals.identity.get("started_ns", 0))


def rank(job_id: str, totals: RankTotals, now_ns: int, sought: ended_calls.Sought = ended_calls.NOTHING) -> RankView:
    """Return the view of a rank from its totals alone: records are those that this agent has read; the GPU's index is missing.

    Args:
        sought: the ended collectives of the rank that the view is to have.
    """
    identity, place = totals.identity, totals.gpu
    mode, reason = gpu_timing(identity)
    quiet_s, longest_quiet_s = _quiet(totals, now_ns)
    return RankView(
        job_id=job_id,
        rank=totals.rank,
        restart=int(identity["restart"]),
        state=_state(totals),
        host=str(identity.get("host", "")),
        local_rank=identity.get("local_rank"),
        pid=int(identity.get("pid", 0)),
        hook=str(identity.get("hook", "")),
        process=totals.process[1] if totals.process is not None and totals.process[0] == totals.pid else None,
        heartbeat_age_s=max(0, now_ns - totals.heartbeat_ns) / 1e9 if totals.alive and totals.heartbeat_ns else None,
        last_seq={totals.group(small_id).group_id: seq for small_id, seq in totals.last_seq.items()},
        launched_s={
            totals.group(group).group_id: max(0, now_ns - totals.launched_ns.get(group, now_ns)) / 1e9
            for group, seq in totals.unseen.items()
            if totals.mode != FULL or totals.last_seq.get(group) == seq
        },
        in_flight=[_in_flight(totals, record, now_ns) for record in totals.in_flight],
        failed=_failures(totals, now_ns),
        records=totals.read,
        lost=totals.lost + totals.dropped,
        overflow_s=max(0, now_ns - totals.overflow_ns) / 1e9 if totals.overflow_ns is not None else None,
        visible_pid=totals.pid,
        gpu_timing=mode,
        gpu_timing_reason=reason,
        exposed_source=totals.steps.exposed_source,
        frameworks=None if totals.frameworks is None else list(totals.frameworks),
        gpu_uuid=place.uuid if place is not None else None,
        gpu_bus_id=place.bus_id or None if place is not None else None,
        probe_mode=MODES[totals.mode],
        probe_mode_s=max(0, now_ns - totals.mode_since_ns) / 1e9 if totals.mode_since_ns and totals.alive else None,
        probe_s=totals.probe_ns / 1e9,
        probe_budget=budget(identity),
        ended_at=None if totals.ending is None else totals.ending.until_ns / 1e9,
        started_at=(started_ns(totals) + totals.offset_ns) / 1e9,
        ended_after=None if totals.ending is None else totals.ending.since_ns / 1e9,
        failed_in_operation=totals.ending is not None and totals.ending.in_operation,
        end_is_reported=totals.ending is not None and totals.ending.is_reported,
        raised=(totals.ending and totals.ending.raised) or None,
        raised_at=(totals.ending and totals.ending.at) or None,
        raised_says=(totals.ending and totals.ending.says) or None,
        exit_status=totals.ending and totals.ending.status,
        stopped_by=(totals.ending and totals.ending.stop) or None,
        stopped_at=totals.ending.stop_ns / 1e9 if totals.ending and totals.ending.stop else None,
        destroyed=sorted(totals.groups[small_id].group_id for small_id in totals.destroyed),
        ended=ended_calls.ended(totals, sought, now_ns),
        quiet_s=quiet_s,
        longest_quiet_s=longest_quiet_s,
        absence=_absence(totals, now_ns),
        steps=totals.marked,
        step=totals.steps.totals.latest_number if totals.marked else None,
        stepped_s=_stepped_s(totals, now_ns),
        activity=_lately(totals, totals.activity, now_ns),
        traffic=_lately(totals, totals.traffic, now_ns) if totals.alive else totals.traffic and totals.traffic[1],
        outside=_outside(totals, now_ns),
        begun=_begun(totals),
        world_size=int(identity["world_size"]),
        node_ranks=_node_ranks(identity),
        core_wait_share=waited_for_core(totals.samples),
        cores=totals.cores,
    )


def _lately(totals: RankTotals, found: tuple[int, _T] | None, now_ns: int) -> _T | None:
    """Return what was found of a rank, if that was lately."""
    if not totals.alive or found is None:
        return None
    found_ns, what = found
    return what if now_ns - found_ns < _OLD_NS else None


def _outside(totals: RankTotals, now_ns: int) -> list[OutsideCall]:
    """Return the calls outside operations in which a rank waits, one at most."""
    noted = totals.outside
    if not noted.since_ns or not (totals.alive or totals.has_left):
        return []
    of_store = noted.call == "store.wait"
    number = {"init_process_group": noted.inits, "new_group": noted.groups}.get(noted.call, 0)
    ranks = (ranks_in(noted.about) or []) if noted.about and not of_store else None
    age_s = max(0, now_ns - noted.since_ns) / 1e9
    return [OutsideCall(noted.call, ranks, noted.about if of_store else "", age_s, number)]


def _begun(totals: RankTotals) -> dict[str, int]:
    noted = totals.outside
    begun = {"init_process_group": noted.inits, "new_group": noted.groups}
    if noted.since_ns and noted.call in begun and not (totals.alive or totals.has_left):
        begun[noted.call] -= 1
    return {call: number for call, number in begun.items() if number}


def _node_ranks(identity: Mapping[str, Any]) -> list[int] | None:
    """Return the ranks on a rank's node by the launcher's counts, else all if they meet at an address that only this node has."""
    size, rank = int(identity["world_size"]), int(identity["rank"])
    local, local_size = identity.get("local_rank"), identity.get("local_world_size")
    if local_size is None and is_local(str(identity.get("rendezvous", "")).rpartition(":")[0]):
        local, local_size = rank, size
    if local is None or local_size is None or not 0 <= local < local_size <= min(size, _MOST_HERE):
        return None
    first = rank - local
    return list(range(first, first + local_size)) if 0 <= first <= size - local_size else None


def _quiet(totals: RankTotals, now_ns: int) -> tuple[float | None, float | None]:
    """Return for how long nothing of a rank has ended, and for how long at most before; only of a rank that records each operation."""
    if not totals.alive or totals.recorded_ns is None or totals.mode != FULL:
        return None, None
    return max(0, now_ns - totals.recorded_ns) / 1e9, totals.longest_pause_ns / 1e9 or None


def _stepped_s(totals: RankTotals, now_ns: int) -> float | None:
    """Return the seconds since a rank ended its latest step."""
    steps = totals.steps.totals.recent
    if not (totals.alive and totals.marked and steps):
        return None
    return max(0, now_ns - steps[-1].end_ns) / 1e9


def _state(totals: RankTotals) -> str:
    if totals.alive:
        return "running"
    return "left" if totals.has_left else "ended" if totals.closed_properly else "gone"


def endings(job: Job) -> dict[int, Ending]:
    """Return by rank how the ranks of the job's latest life ended, for those that have ended."""
    return {totals.rank: totals.ending for totals in of_this_run(job) if totals.ending is not None}


def gpu_timing(identity: Mapping[str, Any]) -> tuple[str, str]:
    """Return how a rank times its operations on GPUs, and why, from the header of its ring; empty if it is not there."""
    timing = identity.get("timing")
    return (str(timing.get("mode", "")), str(timing.get("reason", ""))) if isinstance(timing, dict) else ("", "")


def budget(identity: Mapping[str, Any]) -> float | None:
    """Return the share of time (0 to 1) that a rank's probe may take, from its ring's header; ``None`` if it is not there."""
    given = identity.get("budget")
    return float(given) if isinstance(given, int | float) and 0 <= given <= 1 else None


def groups(jobs: Iterable[Job]) -> list[GroupView]:
    """Return the groups that the ranks of each job's latest life have used; the caller locks ``jobs``."""
    return [
        group(job.id, members)
        for job in jobs
        for members in _members((totals.rank, info) for totals in of_this_run(job) for info in totals.groups.values())
    ]


def _members(infos: Iterable[tuple[int, GroupInfo]]) -> Iterable[list[tuple[int, GroupInfo]]]:
    by_id: dict[str, list[tuple[int, GroupInfo]]] = {}
    for member in infos:
        by_id.setdefault(member[1].group_id, []).append(member)
    return by_id.values()


def group(job_id: str, members: list[tuple[int, GroupInfo]]) -> GroupView:
    """Return the view of a group from its announcements by ranks of one node: (rank, announcement), at least one."""
    first = members[0][1]
    return GroupView(
        job_id,
        first.group_id,
        first.label,
        first.name,
        first.description,
        first.size,
        None if first.ranks is None else list(first.ranks),
        sorted({rank for rank, _ in members}),
        all(info.aligned for _, info in members),
        first.backend,
    )


def shows_late_ranks(jobs: Collection[Job], now_ns: int, *, of_all_nodes: bool) -> bool:
    """Return whether it is known who is late now: some rank has done something lately, and not only just begun.

    Args:
        of_all_nodes: ranks of other nodes are judged, too; otherwise all that communicate with those of this node must be here.
    """
    ranks = [totals for job in jobs for totals in of_this_run(job) if totals.alive]
    here = {totals.rank for totals in ranks}
    groups = [info for totals in ranks for info in totals.groups.values()]
    whole = of_all_nodes or all(info.ranks is not None and here.issuperset(info.ranks) for info in groups)
    latest_ns = max((totals.recorded_ns or 0 for totals in ranks), default=0)
    began_ns = [totals.steps.totals.recent[0].start_ns for totals in ranks if totals.steps.totals.recent]
    windows = (join.window.begins_ns for job in jobs for join in job.joins.values())
    began_ns += [each for each in windows if each is not None]
    begins = latest_ns - min(began_ns) < LEAST_NS if began_ns else not of_all_nodes
    return bool(ranks) and whole and not begins and latest_ns >= now_ns - WINDOWS_NS[-1]


def ended_verdicts(jobs: list[Job], seen: Iterable[GroupView], now_ns: int) -> list[Verdict]:
    """Return the verdicts on what has ended in the groups ``seen``: disagreements, corruption and stragglers.

    Of ranks that all lack cores alike, one is the latest by chance, and no straggler: the advice on cores is about them.
    """
    by_id = {(group.job_id, group.group_id): group for group in seen}
    odd = [
        disagreement(what, by_id[what.job_id, what.group_id])
        for what in ended_operations.disagreements(jobs, now_ns)
        if (what.job_id, what.group_id) in by_id
    ]
    samples = {
        job.id: {totals.rank: totals.samples for totals in job.rank_totals.values() if totals.alive} for job in jobs
    }
    late = [
        straggler_verdict(who, by_id, (job_id, group_id), why)
        for job_id, group_id, who in ended_operations.stragglers(jobs, now_ns)
        if (job_id, group_id) in by_id
        and ((why := _why_late(who, samples[job_id], now_ns)) is None or why.code != ALL_LACK_CORES)
    ]
    return [verdict for verdict in odd if verdict is not None] + [*corruptions(jobs, by_id, now_ns)] + late


def _why_late(late: Late, samples: Mapping[int, Sequence[Sample]], now_ns: int) -> Why | None:
    until_ns = now_ns - late.ago_ns
    return reason(late.rank, late.cost_share, samples, until_ns - late.window_ns, until_ns)


def _in_flight(totals: RankTotals, record: ev.Record, now_ns: int) -> InFlight:
    group, op = totals.group(record.group), totals.op_name(record.op)
    blocked, on_device = bool(record.flags & ev.BLOCKED), bool(record.flags & ev.ON_DEVICE)
    usual_ns = totals.usual_ns(record.group, record.op)
    place, absent_s = _place(totals, record, now_ns)
    is_shown = now_ns - record.launch_ns > _SOON_NS
    splits = ended_calls.splits_of(totals, op, record.group, record.seq) if is_shown else (None, None)
    return InFlight(
        op=op,
        group=group.label,
        group_id=group.group_id,
        seq=record.seq,
        peer=record.peer if record.peer >= 0 else None,
        tag=record.tag if op in ev.P2P else None,
        dtype=totals.dtypes.get(record.dtype),
        size_bytes=None if record.flags & ev.NO_SIZE else record.size_bytes,
        age_s=max(0, now_ns - record.launch_ns) / 1e9,
        blocked=blocked,
        waited_s=max(0, now_ns - record.start_ns) / 1e9 if blocked and (on_device or op in ev.P2P) else None,
        usual_s=None if usual_ns is None else usual_ns / 1e9,
        queued=on_device and not blocked,
        place=place,
        absent_s=absent_s,
        sends=splits[0],
        expects=splits[1],
    )


def _place(totals: RankTotals, record: ev.Record, now_ns: int) -> tuple[Usual | None, float | None]:
    """Return the waits so far at the place of an operation in flight, and how long the rank was in none before, in s.

    ``None``: it has just begun, or not each operation is recorded.
    """
    if totals.mode != FULL or now_ns - record.launch_ns < _SOON_NS:
        return None, None
    if totals.rhythm is None:
        return Usual(0, None), None
    size = None if record.flags & ev.NO_SIZE else record.size_bytes
    absent_ns = totals.rhythm.absent_before_ns(record.launch_ns)
    usual = totals.rhythm.inside(record.group, record.op, size, record.launch_ns)
    return usual, None if absent_ns is None else absent_ns / 1e9


def _absence(totals: RankTotals, now_ns: int) -> Usual | None:
    """Return the times without an operation so far at the place where a rank is that has no operation in flight; ``None`` as for ``_place``."""
    recorded_ns = totals.recorded_ns or now_ns
    if totals.rhythm is None or totals.mode != FULL or totals.in_flight or now_ns - recorded_ns < _SOON_NS:
        return None
    return totals.rhythm.absent()


def _failures(totals: RankTotals, now_ns: int) -> list[Failed]:
    if not totals.failures:
        return []
    ended = map(ev.Record._make, ev.RECORD.iter_unpack(totals.tail[-ev.RECORD_SIZE :]))
    began_ns = (each.end_ns if each.op == ev.STEP_MARK else each.launch_ns for each in (*ended, *totals.in_flight))
    latest_ns = max(began_ns, default=0)
    return [_failed(totals, record, now_ns, latest_ns) for record in totals.failures]


def _failed(totals: RankTotals, record: ev.Record, now_ns: int, latest_ns: int) -> Failed:
    op = totals.op_name(record.op)
    splits = ended_calls.splits_of(totals, op, record.group, record.seq)
    return Failed(
        op=op,
        group_id=totals.group(record.group).group_id,
        seq=record.seq,
        dtype=totals.dtypes.get(record.dtype),
        size_bytes=None if record.flags & ev.NO_SIZE else record.size_bytes,
        ago_s=max(0, now_ns - record.end_ns) / 1e9,
        peer=record.peer if op in ev.P2P and record.peer >= 0 else None,
        is_latest=latest_ns <= record.end_ns,
        root=ended_calls.root_of(op, record.peer),
        sends=splits[0],
        expects=splits[1],
    )
