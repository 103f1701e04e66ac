"""Collectives that have ended on one rank, and that others may still be inside: they show what the rank passed. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import NamedTuple

from commwatch.wire import events as ev
from commwatch.wire import splits
from commwatch_agent.analysis.calls.differences import CERTAIN_S
from commwatch_agent.analysis.waits.wait_graph import RECENT_S
from commwatch_agent.ingest.collective_join import GroupJoin
from commwatch_agent.ingest.jobs import Job
from commwatch_agent.ingest.rank_totals import RankTotals, op_of
from commwatch_agent.model.views import Ended

#: Most collectives, the latest, of a rank in a group with ranks on other nodes, whose agents know what those are inside.
_MOST_ACROSS = 4
_NOT_SEEN = ev.FAILED | ev.UNALIGNED


class Sought(NamedTuple):
    """Of which collectives of a job the calls of other ranks matter."""

    #: Numbers of those that ranks of this node have been inside for ``CERTAIN_S``, or in which they have lately raised or died, by ``group_id``.
    inside: Mapping[str, set[int]]
    #: ``group_id`` of groups with ranks on other nodes.
    across: frozenset[str]
    joins: Mapping[str, GroupJoin]


NOTHING = Sought({}, frozenset(), {})


def sought(job: Job, now_ns: int) -> Sought:
    """Return which collectives to look for; the caller locks the job."""
    inside: dict[str, set[int]] = {}
    for totals in job.rank_totals.values():
        entered = [each for each in totals.in_flight if now_ns - each.launch_ns > CERTAIN_S * 1e9]
        raised = [each for each in totals.failures if now_ns - each.end_ns < RECENT_S * 1e9]
        for record in (*entered, *raised):
            if totals.op_name(record.op) not in ev.P2P:
                inside.setdefault(totals.group(record.group).group_id, set()).add(record.seq)
    across = frozenset(group_id for group_id, join in job.joins.items() if not join.is_here)
    return Sought(inside, across, job.joins)


def ended(totals: RankTotals, what: Sought, now_ns: int) -> list[Ended]:
    """Return the rank's collectives that are sought; of a group across nodes also the latest ones, unless one has just ended."""
    if not what.inside and not what.across:
        return []
    groups = {
        small_id: info.group_id
        for small_id, info in totals.groups.items()
        if info.aligned and (info.group_id in what.inside or info.group_id in what.across)
    }
    found: dict[tuple[str, int], Ended] = {}
    latest: dict[str, list[Ended]] = {}
    for each in _collectives(totals, groups, now_ns) if groups else ():
        if each.seq in what.inside.get(each.group_id, ()):
            found[each.group_id, each.seq] = each
        latest.setdefault(each.group_id, []).append(each)
    for group_id in set(groups.values()):
        if group_id in what.across:
            across = latest.get(group_id, [])[-_MOST_ACROSS:]
            quiet = across if across and across[-1].ago_s > CERTAIN_S else ()
            found.update(((group_id, each.seq), each) for each in quiet)
        for seq in what.inside.get(group_id, ()):
            part = what.joins[group_id].part(seq, totals.rank) if group_id in what.joins else None
            if part is not None and (group_id, seq) not in found:
                op, size, dtype = op_of(part)
                ago_s = max(0, now_ns - part.end_ns) / 1e9
                found[group_id, seq] = Ended(op, group_id, seq, dtype, size, ago_s, part.root)
    small_ids = {group_id: small_id for small_id, group_id in groups.items()}
    return [_with_splits(each, totals, small_ids[each.group_id]) for each in found.values()]


def _with_splits(each: Ended, totals: RankTotals, group: int) -> Ended:
    sends, expects = splits_of(totals, each.op, group, each.seq)
    return each if sends is None else replace(each, sends=sends, expects=expects)


def _collectives(totals: RankTotals, groups: dict[int, str], now_ns: int) -> Iterator[Ended]:
    """Yield the latest collectives of some groups, by number in the ring, in the order of their ends."""
    import numpy as np  # where there are records, it is there

    from commwatch_agent.model.records import RECORD

    raw = np.frombuffer(totals.tail, RECORD)
    sound = (raw["launch"] <= raw["end"]) & (raw["start"] <= raw["end"]) & (raw["end"] < np.uint64(ev.MAX_PLAUSIBLE))
    known = (raw["flags"] & _NOT_SEEN == 0) & (raw["timing"] != ev.COUNTED) & (raw["op"] != ev.STEP_MARK)
    for at in np.flatnonzero(sound & known & np.isin(raw["group"], list(groups))).tolist():
        record = ev.Record._make(raw[at].item())
        op = totals.op_name(record.op)
        if op not in ev.P2P:
            yield Ended(
                op=op,
                group_id=groups[record.group],
                seq=record.seq,
                dtype=totals.dtypes.get(record.dtype),
                size_bytes=None if record.flags & ev.NO_SIZE else record.size_bytes,
                ago_s=max(0, now_ns - record.end_ns) / 1e9,
                root=root_of(op, record.peer),
            )


def splits_of(totals: RankTotals, op: str, group: int, seq: int) -> tuple[list[int], list[int]] | tuple[None, None]:
    """Return what a rank sends to each rank of the group in an all_to_all, and expects from each, in bytes; ``None``: not known."""
    if op != "all_to_all" or not totals.splits:
        return None, None
    found = splits.find(totals.splits, group, seq)
    return (None, None) if found is None else (list(found.sends), list(found.expects))


def root_of(op: str, peer: int) -> int | None:
    """Return the root of a collective from its record's ``peer``; ``None``: there is none, or not known."""
    return peer if peer >= 0 and op in ev.TO_ROOT | ev.FROM_ROOT else None
