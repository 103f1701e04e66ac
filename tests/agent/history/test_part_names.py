"""Parts of the model of operations in a long history, which is joined block by block."""

from __future__ import annotations

from pathlib import Path

from tests.agent.model.test_model_parts import DTYPES, ENTRY, PASS, step
from tests.helpers import MS, Watch, group_entry, mark, write_ring

STEPS = 1500


def test_many_blocks(tmp_path: Path) -> None:
    """All operations of two ranks have their part, newest first over many blocks, and one that is asked for alone."""
    watch = Watch(tmp_path)
    names = [group_entry(0, (0, 1)), ENTRY, *({"dtype": code, "name": name} for code, name in DTYPES.items())]
    records = []
    for number in range(1, STEPS + 1):
        mine = [(*one[:7], len(PASS) * number + n, *one[8:]) for n, one in enumerate(step(number, *PASS))]
        records += [*mine, mark(number, (number + 1) * 100 * MS)]
    for rank in range(2):
        write_ring(watch.rings, records, names, rank=rank, world_size=2, slots=1 << 14)
    watch.tick()
    found = watch.agent.operations(0, 1 << 62, None, lambda _: True, 1 << 20)
    assert len(found) == 2 * len(PASS) * STEPS
    assert [one.part for one in found] == [name for name in reversed(ENTRY["names"]) for _ in range(2)] * STEPS
    (alone,) = watch.agent.operations(0, 1 << 62, None, lambda one: one.seq == 4000 and one.rank == 1, 1)
    assert alone.part == ENTRY["names"][4000 % 3]
