"""Counts what was read of some rings, in sections. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np

from commwatch.collectors.wire import events as ev
from commwatch.core.cells import MOST_TOGETHER, SLOT_NS
from commwatch.ingest.columns import Batch, Columns, read
from commwatch.ingest.replicas import take
from commwatch.ingest.rows import Cut
from commwatch.ingest.section import Section


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


def _pieces(batch: Batch) -> Iterator[Batch]:
    size = MOST_TOGETHER * ev.RECORD_SIZE
    for at in range(0, len(batch.records), size):
        left = max(0, len(batch.records) - at - size) // ev.RECORD_SIZE
        until_n = None if batch.until_n is None else batch.until_n - left
        yield Batch(batch.totals, batch.records[at : at + size], until_n)


def _ingest(batches: Sequence[Batch]) -> None:
    columns, raw, wrong = read(batches)
    ranks = [batch.totals for batch in batches]
    for batch, nonsense in zip(batches, wrong, strict=True):
        # Checksums have the shape of damaged records.
        checksums = take(batch.totals, batch.records) if nonsense else 0
        batch.totals.take(batch.records, batch.until_n, nonsense - checksums)
    if len(columns):
        cuts = _cuts(columns, batches)
        Section(columns, raw, ranks, cuts).ingest()
    for totals in ranks:
        totals.trim()


def _cuts(columns: Columns, batches: Sequence[Batch]) -> list[Cut]:
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
            cuts.append(Cut(at, ring, wall_ns))
            slot_end = wall_ns - wall_ns % SLOT_NS + SLOT_NS
            at += 1
    return cuts
