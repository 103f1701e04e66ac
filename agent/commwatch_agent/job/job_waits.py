"""Waits in groups that span nodes, from the parts that the nodes send of their collectives. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from commwatch.wire.events import SYMMETRIC
from commwatch_agent.job.wait_parts import GroupPart, WaitPart, columns_of, ops_of
from commwatch_agent.model.cells import SLOT_NS, Counted
from commwatch_agent.model.views import WaitView


class RankWait(NamedTuple):
    """Joined collectives of one rank, op and size in a slot of 10 s, and how long the rank waited in them."""

    rank: int
    group_id: str
    op: str
    size: int | None
    slot_ns: int
    joined: int
    wait_ns: int
    #: As in ``wait_parts.Kind``.
    startup: bool = False


def joined_waits(nodes: Iterable[WaitPart]) -> Iterator[RankWait]:
    """Yield the waits in the groups of which all ranks are known."""
    groups: dict[tuple[int, str], list[GroupPart]] = {}
    for node in nodes:
        for part in node.groups:
            known = groups.setdefault((part.restart, part.group_id), [])
            if not any(set(part.ranks) & set(each.ranks) for each in known):  # an agent may have two addresses
                known.append(part)
    for parts in groups.values():
        sizes = {part.group_size for part in parts}
        if sizes == {sum(len(part.ranks) for part in parts)}:
            yield from _waits_of(parts)


def _waits_of(parts: Sequence[GroupPart]) -> Iterator[RankWait]:
    import numpy as np

    from commwatch_agent.ingest.columns import combined, distinct, first_of

    every = [columns_of(part) for part in parts]
    #: The collectives that all nodes have, in the same op: number, shortest duration and op.
    order = every[0].seq.argsort()
    seq, shortest, op = every[0].seq[order], every[0].shortest[order], ops_of(parts[0], every[0])[order]
    for part, columns in zip(parts[1:], every[1:], strict=True):
        seq, mine, theirs = np.intersect1d(seq, columns.seq, assume_unique=True, return_indices=True)
        same = op[mine] == ops_of(part, columns)[theirs]
        least = np.minimum(shortest[mine], columns.shortest[theirs])
        seq, shortest, op = seq[same], least[same], op[mine][same]
    if not len(seq):
        return
    for part, columns in zip(parts, every, strict=True):
        at = np.minimum(np.searchsorted(seq, columns.seq), len(seq) - 1)
        whole = np.logical_and.reduceat(seq[at] == columns.seq, columns.begins)
        wait = (columns.duration - np.add.reduceat(shortest[at], columns.begins)[:, None])[whole]
        kind, slot, length = columns.kind[whole], columns.slot[whole], columns.length[whole]
        found, which = distinct(combined(kind, slot))
        total, number = np.zeros((len(found), len(part.ranks)), np.int64), np.zeros(len(found), np.int64)
        np.add.at(total, which, wait)
        np.add.at(number, which, length)
        first = first_of(which, len(found))
        for of_kind, of_slot, joined, waits in zip(
            kind[first].tolist(), slot[first].tolist(), number.tolist(), total.tolist(), strict=True
        ):
            op_name, sizes, startup = part.kinds[of_kind]
            for rank, size, wait_ns in zip(part.ranks, sizes, waits, strict=True):
                yield RankWait(rank, part.group_id, op_name, size, of_slot * SLOT_NS, joined, wait_ns, startup)


class JobWaits:
    """The waits of a job's groups that span nodes."""

    def __init__(self, found: Iterable[RankWait]) -> None:
        self._found = list(found)

    def add_to(self, cells: Iterable[Counted], from_ns: int) -> None:
        """Add the waits since ``from_ns`` to the cells of that time; none to those of a label and op of which fewer than nine in ten are joined."""
        sums: dict[tuple[int, str, str, int | None, bool], tuple[int, int]] = {}
        for each in self._found:
            if each.slot_ns >= from_ns:
                at = each.rank, each.group_id, each.op, each.size, each.startup
                joined, wait_ns = sums.get(at, (0, 0))
                sums[at] = joined + each.joined, wait_ns + each.wait_ns
        kinds: dict[tuple[str, str], list[Counted]] = {}
        for one in cells:
            kinds.setdefault((one.group, one.op), []).append(one)
        for of_kind in kinds.values():
            known = [
                (one.cell, *sums.get((one.rank, one.group_id, one.op, one.size, one.startup), (0, 0)))
                for one in of_kind
            ]
            timed = sum(cell.count - cell.untimed for cell, *_ in known)
            if 10 * (timed - sum(cell.joined + joined for cell, joined, _ in known)) <= timed:
                for cell, joined, wait_ns in known:
                    cell.joined, cell.wait_ns = cell.joined + joined, cell.wait_ns + wait_ns

    def over_time(self, others: Iterable[WaitView], cells: Iterable[Counted]) -> list[WaitView]:
        """Return the waits by rank and slot: these and ``others``, since the waits of nearly all symmetric operations are known.

        Args:
            cells: those of the whole job, with the waits that ``add_to`` has added.
        """
        since_s = self._known_since_s([one for one in cells if one.op in SYMMETRIC and one.group_size != 1])
        sums: dict[tuple[int, float, float], float] = {}
        mine = (WaitView(each.rank, each.slot_ns / 1e9, SLOT_NS / 1e9, each.wait_ns / 1e9) for each in self._found)
        for view in (*others, *mine):
            if view.start_at >= since_s:
                at = view.rank, view.start_at, view.length_s
                sums[at] = sums.get(at, 0.0) + view.wait_s
        return [WaitView(*at, wait_s) for at, wait_s in sums.items()]

    def _known_since_s(self, cells: Sequence[Counted]) -> float:
        """Return 0 if the waits of nine in ten operations are known, else the end of the first slot that has those of all groups and ops."""
        every = sum(one.cell.count for one in cells)
        unknown = [one for one in cells if not one.cell.joined]
        if 10 * sum(one.cell.count for one in unknown) <= every:
            return 0.0
        kinds = {(one.group_id, one.op) for one in unknown}
        first: dict[tuple[str, str], int] = {}
        for each in self._found:
            kind = each.group_id, each.op
            if kind in kinds:
                first[kind] = min(first.get(kind, each.slot_ns), each.slot_ns)
        never = [one for one in unknown if (one.group_id, one.op) not in first]
        if 10 * sum(one.cell.count for one in never) > every:
            return float("inf")
        return (max(first.values()) + SLOT_NS) / 1e9
