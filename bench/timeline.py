"""Time and memory of `commwatch timeline` over many operations: eight ranks in groups of two, four and eight; by default a million.

The history is made up, in chunks as an agent writes them. Each number of operations is exported by a process of its own, so that its
highest memory is that of one export. Give other numbers of operations as arguments.
"""

from __future__ import annotations

import random
import subprocess
import sys
import time
from contextlib import closing
from itertools import count
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))

from bench.common import emit, last_json, memory_mb, scratch
from commwatch.collectors.wire import events as ev
from commwatch.core.cells import GroupInfo
from commwatch.history.chunks import CHUNK_RECORDS, OpenChunk, statements
from commwatch.history.opening import Transaction, connect
from commwatch.history.store import Writer
from commwatch.report.timeline_export import Window, export, writing

RANKS, JOB = 8, "job"
EPOCH_NS = 1_700_000_000 * 10**9
#: Sizes of the groups, and what runs in them in turn, each 500 µs after the one before.
GROUPS, PERIOD_NS = (8, 4, 2), 500_000
KINDS = ((0, "all_reduce"), (1, "all_gather"), (2, "all_reduce"), (1, "reduce_scatter"), (2, "send"))


def members_of(rank: int, size: int) -> tuple[int, ...]:
    """The group of that size that a rank is in."""
    first = rank // size * size
    return tuple(range(first, first + size))


def records_of(rank: int, first: int, number: int) -> bytes:
    """Successive operations of a rank, from number ``first`` on. All ranks end them together; each begins up to 200 µs late."""
    found = bytearray()
    for n in range(first, first + number):
        group, op = KINDS[n % len(KINDS)]
        late = random.Random(n * RANKS + rank).randrange(200_000)  # noqa: S311 - made-up data
        begin, end, peer = n * PERIOD_NS + late, n * PERIOD_NS + 400_000, -1
        if op == "send":
            peer, op = rank ^ 1, ("send", "recv")[rank % 2]
        fields = (ev.OP_CODE[op], 1, group, peer, 0, 1 << 20, begin, n, 0, begin, end, 1, ev.BY_FUTURE, 0)
        found += ev.RECORD.pack(n + 1, *fields, n + 1)
    return bytes(found)


def fill(path: Path, operations: int) -> None:
    """Write a history of so many operations."""
    store, each = Writer(path), operations // RANKS
    for rank in range(RANKS):
        who = {"job": JOB, "restart": 0, "rank": rank, "world_size": RANKS, "local_rank": rank, "host": "host"}
        when = {"pid": 1, "boot_id": "", "wall_offset_ns": EPOCH_NS, "started_ns": 0, "hook": "native"}
        row = store.ring(f"{rank}.ring", {**who, **when}, EPOCH_NS + each * PERIOD_NS)
        for small_id, size in enumerate(GROUPS):
            members = members_of(rank, size)
            name = f"groups of {size}"
            group = GroupInfo(f"{size}-{members[0]}", name, name, "", members, size, True)
            store.group(row.id, small_id, group)
    store.close()
    with closing(connect(path, True)) as db, Transaction(db):
        for first in range(0, each, CHUNK_RECORDS):
            for rank in range(RANKS):
                chunk, number = OpenChunk(rank + 1, EPOCH_NS), min(CHUNK_RECORDS, each - first)
                chunk.append(records_of(rank, first, number), first + number)
                for statement in statements([chunk])[0]:
                    db.execute(*statement)


def exported(path: Path, out: Path) -> None:
    """Export a history in this process, and print the figures."""
    begin = time.process_time()
    with writing(out) as file:
        found = export(path, JOB, Window(None), (), file)
    figures = {"operations": found.operations, "arrows": found.arrows, "cpu_s": time.process_time() - begin}
    emit({**figures, "mb": memory_mb(field="VmHWM"), "file_mb": out.stat().st_size / 1e6})


def main() -> None:
    """Measure and print, for each number of operations."""
    if sys.argv[1:2] == ["export"]:
        exported(Path(sys.argv[2]), Path(sys.argv[3]))
        return
    numbers = [int(word) for word in sys.argv[1:]] or [10_000, 100_000, 1_000_000]
    with scratch() as place:
        for number, at in zip(numbers, count()):
            path = place / f"{at}.sqlite"
            fill(path, number)
            command = [sys.executable, __file__, "export", str(path), str(place / "trace.json.gz")]
            done = subprocess.run(command, check=True, capture_output=True, text=True)
            emit(last_json(done.stdout))
            path.unlink()


if __name__ == "__main__":
    main()
