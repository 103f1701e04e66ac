"""Counts what was read of some rings, in sections. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from commwatch.wire import events as ev
from commwatch_agent.ingest.columns import Columns, read
from commwatch_agent.ingest.rank_totals import RankTotals
from commwatch_agent.ingest.record_batch import RecordBatch
from commwatch_agent.ingest.rows import SlotBoundary
from commwatch_agent.ingest.tables.rhythm import Places, Rhythm, places
from commwatch_agent.model.cells import MOST_TOGETHER, SLOT_NS
from commwatch_agent.model.corruption.collectives import MOST_GROUPS, GroupChecks
from commwatch_agent.model.corruption.replicas import MOST_SETS, SetJoin
from commwatch_agent.model.names_file import Announced
from commwatch_agent.model.records import RECORD

#: The fields of a record that ``Checksum`` has, in its order.
_CHECKSUM_FIELDS = ("group", "tag", "peer", "seq", "waited", "size", "launch", "start")


class Batch(NamedTuple):
    """Records that were read of one ring."""

    totals: RankTotals
    #: Whole records, one after another.
    records: bytes
    #: Number of the record after the last one; ``None``: from its stamp.
    until_n: int | None


def ingest(batches: Sequence[Batch]) -> None:
    """Count the records of several rings, those of a ring in their order.

    The result is that of one record after the other, ring by ring, but for this: a join drops the oldest of too many incomplete
    collectives once all records are counted.
    """
    held: list[Batch] = []
    number = 0
    for batch in batches:
        for piece in _pieces(batch):
            more = len(piece.records) // ev.RECORD_SIZE
            if number + more > MOST_TOGETHER or (held and held[-1].totals is piece.totals):
                _ingest(held)
                held, number = [], 0
            held.append(piece)
            number += more
    if held:
        _ingest(held)


def ingest_records(totals: RankTotals, records: bytes, until_n: int | None = None) -> None:
    """Count whole records of one ring, in its order; ``until_n`` as in ``Batch``."""
    ingest([Batch(totals, records, until_n)])


def recall_steps(totals: RankTotals, records: bytes) -> None:
    """Take up the steps of earlier records, whose sums are in the history already."""
    before = RankTotals(totals.identity, {})
    before.groups, before.ops, before.dtypes = totals.groups, totals.ops, totals.dtypes
    ingest_records(before, records)
    totals.steps = before.steps


def recall_rhythm(totals: RankTotals, records: bytes) -> None:
    """Take up the places of earlier records, whose sums are in the history already."""
    columns, _, _ = read([records])
    if len(columns):
        _add_places(totals, places(columns), columns)


def _add_places(totals: RankTotals, of: Places, columns: Columns) -> None:
    """Add the places ``of`` records of a rank to its rhythm, without operations that were only counted."""
    at = np.flatnonzero(columns.timing != ev.COUNTED)
    if len(at):
        totals.rhythm = totals.rhythm or Rhythm(totals.account)
        totals.rhythm.add(of[at], columns.of(at))


def _pieces(batch: Batch) -> Iterator[Batch]:
    size = MOST_TOGETHER * ev.RECORD_SIZE
    for at in range(0, len(batch.records), size):
        left = max(0, len(batch.records) - at - size) // ev.RECORD_SIZE
        until_n = None if batch.until_n is None else batch.until_n - left
        yield Batch(batch.totals, batch.records[at : at + size], until_n)


def _ingest(batches: Sequence[Batch]) -> None:
    columns, raw, wrong = read([batch.records for batch in batches])
    ranks = [batch.totals for batch in batches]
    for batch, nonsense in zip(batches, wrong, strict=True):
        # Checksums have the shape of damaged records.
        checksums = _take_checksums(batch.totals, batch.records) if nonsense else 0
        batch.totals.take(batch.records, batch.until_n, nonsense - checksums)
    if len(columns):
        cuts = _cuts(columns, batches)
        RecordBatch(columns, raw, ranks, cuts).ingest()
        _note_rhythm(columns, ranks)
    for totals in ranks:
        totals.trim()
    for settle in dict.fromkeys(totals.settle for totals in ranks):
        settle()


def _note_rhythm(columns: Columns, ranks: Sequence[RankTotals]) -> None:
    """Note the places of each rank's work, when it last recorded something, and the longest time in which it did not."""
    bounds, at_place = np.searchsorted(columns.ring, np.arange(len(ranks) + 1)).tolist(), places(columns)
    for totals, (since, until) in zip(ranks, pairwise(bounds), strict=True):
        if since < until:
            ends = np.maximum.accumulate(columns.end[since:until])
            first_ns = 0 if totals.recorded_ns is None else int(ends[0]) - totals.recorded_ns
            totals.longest_pause_ns = max(totals.longest_pause_ns, first_ns, int(np.diff(ends).max(initial=0)))
            totals.recorded_ns = max(totals.recorded_ns or 0, int(ends[-1]))
            _add_places(totals, at_place[since:until], columns.of(np.arange(since, until)))


def _take_checksums(totals: RankTotals, records: bytes) -> int:
    """Add the checksums among some records of a rank to the sets and the checked collectives of its job; return their number."""
    raw = np.frombuffer(records, RECORD)
    sums = raw[(raw["op"] == ev.CHECKSUM) & (raw["start"] > raw["end"])]
    if not len(sums):
        return 0
    new = np.logical_or.reduce([sums[field][1:] != sums[field][:-1] for field in ("group", "tag", "seq", "waited")])
    bounds = [0, *(np.flatnonzero(new) + 1).tolist(), len(sums)]
    for since, until in pairwise(bounds):
        announced = totals.replicas.get(int(sums["tag"][since]))
        if sums["tag"][since] < 0:
            _add_collective(totals, sums[since:until])
        elif announced is not None:
            _add_check(totals, announced, sums[since:until])
    return len(sums)


def _add_check(totals: RankTotals, announced: Announced, records: npt.NDArray[np.void]) -> None:
    sets, info = totals.sets, totals.group(announced.group)
    at = info.group_id, announced.key
    if at not in sets and len(sets) < MOST_SETS and info.aligned and announced.names:
        sets[at] = SetJoin(info.group_id, info.size, announced.names)
    if at in sets and sets[at].names == announced.names:
        sets[at].add(totals, records)


def _add_collective(totals: RankTotals, records: npt.NDArray[np.void]) -> None:
    checked, info = totals.checked, totals.group(int(records["group"][0]))
    op = totals.ops.get(-int(records["tag"][0]))
    if op is None or info.ranks is None or not info.aligned:
        return
    if info.group_id not in checked and len(checked) < MOST_GROUPS:
        checked[info.group_id] = GroupChecks(info.group_id, info.ranks)
    if info.group_id in checked:
        fields = (records[field].tolist() for field in _CHECKSUM_FIELDS)
        checked[info.group_id].add(totals, op, map(ev.Checksum._make, zip(*fields, strict=True)))


def _cuts(columns: Columns, batches: Sequence[Batch]) -> list[SlotBoundary]:
    """Return where slots end, in order."""
    bounds = np.searchsorted(columns.ring, np.arange(len(batches) + 1)).tolist()
    operation = columns.op != ev.STEP_MARK
    cuts = []
    for ring, (first, until) in enumerate(pairwise(bounds)):
        totals, at = batches[ring].totals, first
        slot_end = totals.slot_end_ns
        while at < until:
            after = operation[at:until] & (columns.end[at:until] >= slot_end - totals.offset_ns)
            if not after.any():
                break
            at += int(after.argmax())
            wall_ns = int(columns.end[at]) + totals.offset_ns
            cuts.append(SlotBoundary(at, ring, wall_ns))
            slot_end = wall_ns - wall_ns % SLOT_NS + SLOT_NS
            at += 1
    return cuts
