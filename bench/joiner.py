"""What it costs to join a collective over its ranks, in µs of CPU time, by the size of the group.

Groups of 8, 64 and 1,024 ranks that do not exist. Their parts come as the intake reads them: some collectives of one rank,
then those of the next. Each rank is late in turn. Only the joiner is measured, own lateness included: the parts are made before.
"""

from __future__ import annotations

import gc
import sys
import time
from pathlib import Path
from statistics import median

import numpy as np

sys.path.append(str(Path(__file__).parents[1]))

from bench.common import emit
from commwatch.wire.events import OP_CODE
from commwatch_agent.ingest.collective_join import NOT_KNOWN_NS, GroupJoin
from commwatch_agent.ingest.joining import Parts, complete
from commwatch_agent.ingest.lateness import Collectives, add_late, lost, own_lateness, split
from commwatch_agent.ingest.own_time import NO_RUN

SIZES = (8, 64, 1024)
#: Collectives of one rank that are read before it is the next one's turn.
BATCH = 16
#: Parts in all, of each size of group, a round; rounds.
PARTS, ROUNDS = 65_536, 9
EVERY_NS, USUAL_NS = 10_000_000, 1_000_000


def collectives(size: int) -> list[Parts]:
    """The parts of one round, in batches as they are read."""
    chance = np.random.default_rng(size)
    number = PARTS // size
    return [part(np.arange(first, min(first + BATCH, number)), size, chance) for first in range(0, number, BATCH)]


def part(seqs: np.ndarray[tuple[int], np.dtype[np.int64]], size: int, chance: np.random.Generator) -> Parts:
    """All ranks' parts in some collectives: all end together, and the late one begins last."""
    rank, seq = np.repeat(chance.permutation(size), len(seqs)), np.tile(seqs, size)
    zeros, end = np.zeros(len(seq), np.int64), (seq + 1) * EVERY_NS
    took = np.where(rank == seq % size, USUAL_NS // 10, USUAL_NS + chance.integers(0, USUAL_NS, len(seq)))
    op = zeros + OP_CODE["all_reduce"]
    unknown, none = zeros + NOT_KNOWN_NS, zeros + NO_RUN
    return Parts(zeros, rank, rank, rank, op, zeros, zeros, seq, end - took, end, took, unknown, none, unknown)


def joined(size: int) -> float:
    """CPU seconds of one round; every collective must come out, with the right rank late."""
    batches, joins = collectives(size), [GroupJoin(size)]
    whole: list[tuple[list[int], list[int]]] = []
    gc.collect()
    begin = time.process_time()
    for parts in batches:
        for table in complete(parts, joins)[0]:
            wait, late, _ = split(parts.duration[table])
            last = table[np.arange(len(table)), late]
            lost_ns = lost(parts.duration[table], parts.blocked[table])
            of_ranks = parts.rank[table], wait, parts.own[table], parts.run[table]
            found = Collectives(parts.join[last], parts.end[last], *of_ranks, lost_ns)
            add_late([found], own_lateness([found], joins), joins)
            whole.append((parts.rank[last].tolist(), parts.seq[last].tolist()))
    used = time.process_time() - begin
    assert sum(len(ranks) for ranks, _ in whole) == PARTS // size
    assert all(rank == seq % size for ranks, seqs in whole for rank, seq in zip(ranks, seqs, strict=True))
    return used


def main() -> None:
    """Measure and print."""
    rounds = [[joined(size) for size in SIZES] for _ in range(ROUNDS)]
    figures = {}
    for size, times in zip(SIZES, zip(*rounds, strict=True), strict=True):
        per_part = median(times) / PARTS * 1e6
        figures[str(size)] = {"part_us": per_part, "collective_us": per_part * size}
    emit(figures)


if __name__ == "__main__":
    main()
