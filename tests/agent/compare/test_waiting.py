"""The report and the comparison of a job agree on how long its ranks wait for late ones, whatever its long steps are made of."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from commwatch_agent.compare.bootstrap import ratio
from commwatch_agent.compare.runs import read
from commwatch_agent.report.report import build
from tests.helpers import MS, Watch, group_entry, mark, operation, write_ring

STEPS, EVERY, LATE_MS = 200, 20, 20
#: By rank, what a long step has more than the others, as (op, from, until) in ms since it began.
Long = Callable[[int], list[tuple[str, int, int]]]

LONG: Mapping[str, Long] = {
    "one rank works": lambda rank: [],
    "one rank saves, and the others wait in a barrier": lambda rank: [("barrier", 100 + 900 * (rank == 0), 990)],
    "all ranks save, and gather": lambda rank: [("all_gather", 500, 990)],
    "all ranks gather": lambda rank: [("all_gather", 100, 990)],
    "all ranks gather, one of them later": lambda rank: [("all_gather", 100 + 200 * rank, 990)],
    "one rank saves, and all gather": lambda rank: [("all_gather", 100 + 400 * (rank == 0), 990)],
}


def job(directory: Path, more: Long) -> Watch:
    """Two ranks that meet in each step of 100 ms, rank 1 later than rank 0; each 20th step is long."""
    watch = Watch(directory)
    for rank in range(2):
        at, seq, records = 0, 0, [mark(0, 0)]
        for n in range(STEPS):
            ops, is_long = [("all_reduce", 50 + LATE_MS * rank, 90)], n % EVERY == EVERY - 1
            if is_long:
                ops += more(rank)
                if not more(rank):  # rank 0 works before it meets rank 1
                    ops = [("all_reduce", 50 + 900 * (rank == 0), 990)]
            for op, begin, until in ops:
                records.append(operation(op, start_ns=(at + begin) * MS, end_ns=(at + until) * MS, seq=seq))
                seq += 1
            at += 1000 if is_long else 100
            records.append(mark(n + 1, at * MS))
        write_ring(watch.rings, records, [group_entry()], rank=rank, world_size=2)
    watch.tick(at * MS)
    return watch


@pytest.mark.parametrize("name", LONG)
def test_they_agree(tmp_path: Path, name: str) -> None:
    """Both leave out what was waited in long steps, and nothing else: neither takes a transfer of all ranks for waiting."""
    watch = job(tmp_path, LONG[name])
    (view,) = watch.agent.jobs()
    compared, built = (
        ratio(read(watch.path, view, None).shares["wait_share"]),
        build(watch.agent, "job", watch.path, ""),
    )
    assert compared == pytest.approx(LATE_MS / 2 / 100)
    assert built is not None
    assert built.long_steps is not None
    assert built.wait_share == pytest.approx(compared, abs=0.01)
