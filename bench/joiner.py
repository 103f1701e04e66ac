"""What it costs to join a collective over its ranks, in µs of CPU time, by the size of the group.

Groups of 8, 64 and 1,024 ranks that do not exist. Their parts come as the intake reads them: some collectives of one rank,
then those of the next. Each rank is late in turn. Only the joiner is measured: the parts are made before.
"""

from __future__ import annotations

import gc
import random
import sys
import time
from pathlib import Path
from statistics import median

sys.path.append(str(Path(__file__).parents[1]))

from bench.common import emit
from commwatch.collectors.wire.events import OP_CODE
from commwatch.ingest.collective_join import GroupJoin, Part, Waits

SIZES = (8, 64, 1024)
#: Collectives of one rank that are read before it is the next one's turn.
BATCH = 16
#: Parts in all, of each size of group, a round; rounds.
PARTS, ROUNDS = 65_536, 9
EVERY_NS, USUAL_NS = 10_000_000, 1_000_000


def collectives(size: int) -> list[list[tuple[int, Part]]]:
    """The parts of one round, in batches as they are read."""
    chance = random.Random(size)  # noqa: S311 - nothing secret
    count = PARTS // size
    batches = []
    for first in range(0, count, BATCH):
        seqs = range(first, min(first + BATCH, count))
        for rank in chance.sample(range(size), size):
            batches.append([(seq, part(rank, seq, size, chance)) for seq in seqs])
    return batches


def part(rank: int, seq: int, size: int, chance: random.Random) -> Part:
    """A rank's part: all end together, and the late one begins last."""
    end = (seq + 1) * EVERY_NS
    took = USUAL_NS // 10 if rank == seq % size else USUAL_NS + chance.randrange(USUAL_NS)
    return Part(rank, OP_CODE["all_reduce"], end - took, end, took, None)


def joined(size: int) -> float:
    """CPU seconds of one round; every collective must come out, with the right rank late."""
    batches, join = collectives(size), GroupJoin(size)
    whole: list[Waits] = []
    gc.collect()
    begin = time.process_time()
    for batch in batches:
        for seq, each in batch:
            waits = join.add(seq, each)
            if waits is not None:
                whole.append(waits)
    used = time.process_time() - begin
    assert (len(whole), join.unjoined) == (PARTS // size, 0)
    assert all(waits.late.rank == (waits.late.end_ns // EVERY_NS - 1) % size for waits in whole)
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
