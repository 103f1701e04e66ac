"""Seconds that ``/api/v1/ops`` takes for a filter that few operations match, over an hour of 8 ranks × 2,000 operations a second.

The history has 57.6 million records, in chunks as an agent writes them every quarter of a second. Only chunks with a rare operation
hold records of their own time; the others repeat one, because no search should read them. Each filter matches operations in three
chunks. Give another number of minutes to search less.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))

from bench.common import emit, scratch
from commwatch.wire import events as ev
from commwatch_agent.analysis.queries import QueryService
from commwatch_agent.history.chunks import OpenChunk, statements
from commwatch_agent.history.opening import Transaction, connect
from commwatch_agent.history.soundness import row_checksum
from commwatch_agent.history.store import Writer
from commwatch_agent.model.cells import GroupInfo
from commwatch_agent.questions.operations import Wanted, operations
from commwatch_agent.reference.references import References

RANKS, RATE, MINUTES = 8, 2_000, 60
NS = 10**9
CHUNK_RECORDS = RATE // 4
EPOCH_NS = 1_700_000_000 * NS
OPS = ("all_reduce", "all_gather", "reduce_scatter", "send", "recv")
#: Chunks of rank 3, as parts of the whole, that have the rare operations; and what they are.
RARE_AT = (0.1, 0.5, 0.9)
FILTERS: dict[str, Wanted] = {
    "op": Wanted(0, 1 << 62, None, {"op": "broadcast"}),
    "duration": Wanted(0, 1 << 62, None, {}, min_seconds=1.0),
    "group": Wanted(0, 1 << 62, None, {"group": "rare"}),
    "op of a job": Wanted(0, 1 << 62, "job", {"op": "broadcast"}),
}


def records_of(chunk: int, rare: bool) -> bytes:
    """The records of one chunk of a ring, of four groups."""
    chance, found, seqs = random.Random(chunk), bytearray(), [chunk * CHUNK_RECORDS // 4] * 4  # noqa: S311
    for n in range(chunk * CHUNK_RECORDS, (chunk + 1) * CHUNK_RECORDS):
        begin, op, group = n * NS // RATE + chance.randrange(100_000), chance.choice(OPS), chance.randrange(4)
        lasts = int(chance.lognormvariate(11.5, 0.5))
        if rare and n % CHUNK_RECORDS == 250:
            op, group, lasts = "broadcast", 4, 2 * NS
        seqs[group % 4] += 1
        fields = (ev.OP_CODE[op], 1, group, -1, 0, 1 << 20, begin, seqs[group % 4], 0, begin, begin + lasts, 1, 1, 0)
        found += ev.RECORD.pack(n + 1 & 0xFFFFFFFF, *fields, n + 1 & 0xFFFFFFFF)
    return bytes(found)


def rows_of(ring: int, chunk: int, rare: bool) -> list[tuple[str, tuple[object, ...]]]:
    """The statements that store a chunk."""
    open_chunk = OpenChunk(ring, EPOCH_NS)
    open_chunk.append(records_of(chunk, rare), (chunk + 1) * CHUNK_RECORDS)
    return statements([open_chunk], 0)[0]


def moved(
    of_first: list[tuple[str, tuple[object, ...]]], ring: int, chunk: int
) -> Iterator[tuple[str, tuple[object, ...]]]:
    """The statements of chunk 0 of ring 1, for another chunk."""
    first, span_ns = chunk * CHUNK_RECORDS, CHUNK_RECORDS * NS // RATE
    (insert, (_, _, _, from_ns, until_ns, size, data, _)), (extent, found), *_ = of_first
    times = tuple(int(at) + chunk * span_ns for at in (from_ns, until_ns))  # type: ignore[call-overload]
    about = (ring, first, first + CHUNK_RECORDS, *times, size)
    yield insert, (*about, data, row_checksum(about))
    ops, groups, longest, seq_from, seq_until = found[3:8]
    where = (ring, *times, ops, groups, longest, seq_from, seq_until)
    yield extent, (*where, row_checksum(where), ring, first)


def fill(path: Path, minutes: float) -> int:
    """Write the history; return the number of records."""
    store = Writer(path)
    for rank in range(RANKS):
        who = {"job": "job", "restart": 0, "rank": rank, "world_size": RANKS, "local_rank": rank, "host": "host"}
        when = {"pid": 1, "boot_id": "", "wall_offset_ns": EPOCH_NS, "started_ns": 0, "hook": "native"}
        row = store.ring(f"{rank}.ring", {**who, **when}, EPOCH_NS)
        for group in range(5):
            label = "rare" if group == 4 else f"group {group}"
            store.group(row.id, group, GroupInfo(f"id{group}", label, label, "", None, RANKS, True))
    store.close()
    chunks = int(minutes * 60 * RATE / CHUNK_RECORDS)
    rare = {int(chunks * part) for part in RARE_AT}
    usual = rows_of(1, 0, rare=False)
    with closing(connect(path, True)) as db:
        for begin in range(0, chunks, 100):
            with Transaction(db):
                for chunk in range(begin, min(begin + 100, chunks)):
                    for ring in range(1, RANKS + 1):
                        is_rare = chunk in rare and ring == 4
                        for statement in rows_of(ring, chunk, True) if is_rare else moved(usual, ring, chunk):
                            db.execute(*statement)
    return chunks * RANKS * CHUNK_RECORDS


def main() -> None:
    """Measure and print."""
    minutes = float(sys.argv[1]) if len(sys.argv) > 1 else MINUTES
    with scratch() as place:
        path = place / "history.sqlite"
        records = fill(path, minutes)
        agent, seconds = QueryService(path, references=References(place)), {}
        for name, wanted in FILTERS.items():
            begin = time.perf_counter()
            found = operations(agent, wanted).operations
            seconds[name] = time.perf_counter() - begin
            if len(found) != len(RARE_AT):
                raise SystemExit(f"{name}: {len(found)} operations instead of {len(RARE_AT)}")
        emit({"records": records, "seconds": seconds, "bytes_per_record": path.stat().st_size / records})


if __name__ == "__main__":
    main()
