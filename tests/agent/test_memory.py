"""Memory of the agent's tables and of its temporary buffers: no more than the task needs."""

from __future__ import annotations

import asyncio
import gc
import sqlite3
import tracemalloc
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import httpx
from fastapi import FastAPI
from prometheus_client import CollectorRegistry

from commwatch.wire.ring_reader import RingReader
from commwatch_agent.analysis.queries import QueryService
from commwatch_agent.history.history import History
from commwatch_agent.history.operations import Operation
from commwatch_agent.history.store import Writer
from commwatch_agent.ingest.batches import ingest_records
from commwatch_agent.ingest.rank_totals import RankTotals
from commwatch_agent.ingest.step_accounting import StepTotals
from commwatch_agent.ingest.stragglers import MOST_BINS, LateWindow
from commwatch_agent.ingest.tables.rhythm import MOST
from commwatch_agent.model.cells import SLOT_NS, Cell, CellKey, StepRecord
from commwatch_agent.model.sketch import bin_of
from commwatch_agent.web.application import application
from tests.helpers import (
    EPOCH_NS,
    MS,
    Watch,
    group_entry,
    identity,
    idle_services,
    mark,
    operation,
    packed,
    write_ring,
)

ALWAYS = (0, 1 << 62)
#: Durations as a busy link has them, each in a bin of its own: 200 bins.
DURATIONS_NS = [round(50_000 * 1.025**n) for n in range(200)]


def memory(work: Callable[[], object]) -> tuple[int, int]:
    """Bytes that Python keeps for what ``work`` returns, and the most that it took meanwhile."""
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        kept = work()
        _, most = tracemalloc.get_traced_memory()
        gc.collect()  # empties Python's lists of free tuples, too
        now, _ = tracemalloc.get_traced_memory()
        del kept
    finally:
        tracemalloc.stop()
    return now - before, most - before


# -- the books ------------------------------------------------------------------------------------


def test_late_window() -> None:
    """Who was late in the last minute takes 8 bytes for each rank and tenth of a second, however many collectives there were."""

    def window() -> LateWindow:
        made = LateWindow()
        for n in range(100_000):
            made.add(EPOCH_NS + n * MS, {rank: MS + n if rank == n % 8 else 0 for rank in range(8)})
        return made

    assert memory(window)[0] < 1.25 * 8 * (8 + 1) * MOST_BINS


def test_cells_of_the_last_minute() -> None:
    """Cells whose 10 s are over take a fraction of the live ones: a node has a thousand of them in its last minute."""
    book, slots, sizes = RankTotals(identity(), {}), 6, [1 << n for n in range(10, 18)]
    book.learn([group_entry()])
    # Loads numpy and what counts with it.
    ingest_records(RankTotals(identity(), {}), packed(operation(start_ns=0, end_ns=1)))
    ingest_records(book, packed(mark(0, 1)))  # a rank that marks steps keeps no cycle

    def minute() -> None:
        for at in range(0, slots * SLOT_NS, SLOT_NS):
            for size in sizes:
                each = [operation("broadcast", start_ns=at, end_ns=at + ns, size=size) for ns in DURATIONS_NS]
                ingest_records(book, packed(*each))
        book.roll(EPOCH_NS + slots * SLOT_NS)

    kept, _ = memory(minute)
    cells = [cell for _, _, cell in book.lately((slots - 1) * SLOT_NS)]
    assert len(cells) == slots * len(sizes)
    assert {len(cell.bins) for cell in cells} == {len(set(map(bin_of, DURATIONS_NS)))}
    assert kept < 6000 * len(cells) + 12 * MOST, kept  # with the sums of each kind, and the places of the rank's work


def test_steps_of_the_last_minute() -> None:
    """A step in the shares' window takes 400 bytes at most, however many groups it had: a rank has hundreds a minute."""

    def totals() -> StepTotals:
        made = StepTotals()
        for n in range(600):
            at = EPOCH_NS + n * 100 * MS
            groups = tuple((label, MS + n) for label in ("default_pg", "data", "tensor", "pipeline", "expert"))
            made.add(StepRecord(n, at, at + 100 * MS, 40 * MS + n, 30 * MS + n, groups, 20 * MS + n))
        return made

    assert memory(totals)[0] < 600 * 400


# -- the history ----------------------------------------------------------------------------------


def a_cell() -> Cell:
    cell = Cell()
    cell.count, cell.bins = 7, {number: 300 + number for number in range(500, 700)}
    return cell


def test_rollups(tmp_path: Path) -> None:
    """Roll-ups are read one at a time: there are 58,000 in the hour of a busy node, and a summary of it needs them added up."""
    path, number = tmp_path / "h.sqlite", 1000
    store = Writer(path)
    row = store.ring("a", identity(), EPOCH_NS)
    store.rollups(row.id, [(EPOCH_NS + n * SLOT_NS, CellKey(0, 1, 20), a_cell()) for n in range(number)], 1)
    store.close()
    with History(path) as history:
        _, for_all = memory(lambda: sum(1 for _ in history.rollups(*ALWAYS, [row.id])))
        (one, *_) = history.rollups(*ALWAYS, [row.id])
    assert (one.cell.bins, for_all < 200_000) == (a_cell().bins, True)
    agent = QueryService(path)
    covered, (summed,) = agent.summary(*ALWAYS, ["op"], {})  # loads numpy, which is not measured
    _, for_sum = memory(lambda: agent.summary(*ALWAYS, ["op"], {}))
    assert covered == (EPOCH_NS / 1e9, (EPOCH_NS + number * SLOT_NS) / 1e9)
    assert (summed.count, for_sum < 500_000) == (7 * number, True)


def test_frozen(tmp_path: Path) -> None:
    """A frozen history stays as it was at the first read while more is written, so writers need not wait."""
    store = Writer(tmp_path / "h.sqlite")
    row = store.ring("a", identity(), EPOCH_NS)
    with History(store.path) as history:
        history.freeze()
        assert [ring.next_n for ring in history.rings()] == [0]
        store.rollups(row.id, [(EPOCH_NS, CellKey(0, 1, 20), a_cell())], 7)
        store.progress(row.id, 7, 0, 0, EPOCH_NS)
        assert store.commit()
        assert [ring.next_n for ring in history.rings()] == [0]
        assert list(history.rollups(*ALWAYS, [row.id])) == []
    with History(store.path) as history:
        assert [ring.next_n for ring in history.rings()] == [7]
        assert len(list(history.rollups(*ALWAYS, [row.id]))) == 1


def test_tidying(tmp_path: Path) -> None:
    """Applying the history's retention builds no list of its whole content."""
    path = tmp_path / "h.sqlite"
    store = Writer(path)
    with closing(sqlite3.connect(path)) as db, db:
        chunk = "INSERT INTO chunk (ring, first_n, until_n, from_ns, until_ns, size, data, crc, arrived_ns) VALUES (1, ?1, ?1, ?1, ?1, 10, x'', 0, ?1)"
        db.executemany(chunk, ((EPOCH_NS + n,) for n in range(10_000)))
    _, most = memory(lambda: list(store.tidy(EPOCH_NS + 10_000, 50_000, 1 << 60, 1 << 60)))
    with closing(sqlite3.connect(path)) as db:
        assert db.execute("SELECT count(*), min(first_n) FROM chunk").fetchone() == (5000, EPOCH_NS + 5000)
    assert most < 100_000


def test_newest_operations(tmp_path: Path) -> None:
    """A request stops converting records into operations as soon as it has found those that it returns."""
    watch, made = Watch(tmp_path), 0
    for rank in range(4):
        records = [operation(start_ns=n * MS, end_ns=(n + 1) * MS, seq=n) for n in range(500)]
        write_ring(watch.rings, records, rank=rank)
    watch.tick()

    def counted(one: Operation) -> bool:
        nonlocal made
        made += 1
        return one.rank != 3

    found = watch.agent.operations(*ALWAYS, None, counted, 30)
    assert [(one.rank, one.seq) for one in found[:4]] == [(2, 499), (1, 499), (0, 499), (2, 498)]
    assert (len(found), made) == (30, 40)


def test_names(tmp_path: Path) -> None:
    """Reading new names takes no more memory than there are names."""
    path = write_ring(tmp_path, []).path
    with closing(RingReader(path)) as reader:
        _, most = memory(reader.names)
    assert most < 200_000


# -- the web server -------------------------------------------------------------------------------


def answers(app: FastAPI, *paths: str) -> list[int]:
    """The status of each answer."""

    async def ask() -> list[int]:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://agent") as client:
            return [(await client.get(path)).status_code for path in paths]

    return asyncio.run(ask())


def test_first_requests(tmp_path: Path) -> None:
    """The first requests make no copy of the routes and no description of the API, which would stay in memory: 10 MB."""
    requests, given = ("/healthz", "/api/v1/peers"), list[int]()
    first, app = (application(idle_services(QueryService(tmp_path / "none")), CollectorRegistry()) for _ in range(2))
    answers(first, *requests)  # imports what any request imports
    kept, _ = memory(lambda: given.extend(answers(app, *requests)))
    assert (given, app.openapi_schema) == ([200, 200], None)
    assert kept < 200_000, kept
