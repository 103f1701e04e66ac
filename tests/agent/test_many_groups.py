"""A trainer that makes process groups without end: what is kept of them is bounded, and nothing of what they did is left uncounted."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from commwatch.wire.ring import RingWriter
from commwatch_agent.history.history import History
from commwatch_agent.model.cells import LATEST_KNOWN, MOST_APART, OTHER
from commwatch_agent.prometheus.exporter import MOST_GROUP_IDS, Exporter
from tests.helpers import MS, Watch, group_entry, judged_now, operation, write_ring

GROUPS, RANKS = 10_000, 2
ONE, EACH = "one label", "a label each"


def pages(watch: Watch) -> Iterator[list[str]]:
    """Scrapes of ``/metrics``."""
    registry = CollectorRegistry()
    registry.register(Exporter(watch.aggregate, threading.RLock(), lambda: GROUPS * MS, list))
    while True:
        yield [line for line in generate_latest(registry).decode().splitlines() if not line.startswith("#")]


@pytest.fixture
def crowd(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[Watch, list[RingWriter]]]:
    """An agent that has seen two ranks make ten thousand groups, and one operation in each."""
    watch = Watch(tmp_path)
    writers = [write_ring(watch.rings, [], [], 2 * GROUPS, rank=rank, world_size=RANKS) for rank in range(RANKS)]
    for at in range(0, GROUPS, 1000):
        for writer in writers:
            for n in range(at, at + 1000):
                writer.name(group_entry(n, label="data" if request.param == ONE else f"pg{n}"))
                writer.write(*operation(start_ns=n * MS, end_ns=n * MS + 9, group=n))
        watch.tick((at + 1000) * MS)
    yield watch, writers
    for writer in writers:
        writer.release()


@pytest.mark.parametrize("crowd", [ONE, EACH], indirect=True)
def test_ten_thousand(crowd: tuple[Watch, list[RingWriter]]) -> None:
    """Books, series and joins of ten thousand groups are those of some hundreds; the rest is counted together, and the names are in the history."""
    watch, _ = crowd
    (job,) = watch.aggregate.jobs.values()
    page = next(pages(watch))
    by_id = [line for line in page if "group_id=" in line]
    assert 0 < len(by_id) <= 5 * RANKS * MOST_GROUP_IDS
    assert len(page) < 2000
    for book in job.rank_totals.values():
        assert len(book.groups) <= MOST_APART + LATEST_KNOWN + 1
        assert len({key.group for key, _ in book.cells()}) <= MOST_APART + 1
        assert len(book.last_seq) <= 2 * (MOST_APART + LATEST_KNOWN) + 1000  # and those since the last names
    assert len(job.joins) <= MOST_APART
    counted = [float(line.split()[-1]) for line in page if line.startswith("commwatch_collectives_total{")]
    assert sum(counted) == watch.count() == RANKS * GROUPS
    (dropped,) = (float(line.split()[-1]) for line in page if line.startswith("commwatch_series_dropped_total"))
    assert dropped >= RANKS * (GROUPS - MOST_GROUP_IDS)
    with History(watch.path) as history:
        assert len({info.name for info in history.groups().values()} - {OTHER}) == GROUPS
    latest = watch.agent.operations(0, 1 << 62, None, lambda op: True, 1)[0]
    assert latest.group in ("data", f"pg{GROUPS - 1}")


@pytest.mark.parametrize("crowd", [pytest.param(ONE, marks=pytest.mark.long), EACH], indirect=True)
def test_counters_do_not_go_back(crowd: tuple[Watch, list[RingWriter]]) -> None:
    """While groups still come, no counter of a page is lower than on the page before, and the number of series stays."""
    watch, writers = crowd
    scrapes = pages(watch)
    before = next(scrapes)
    for n in range(GROUPS, GROUPS + 300):
        for writer in writers:
            writer.name(group_entry(n))
            writer.write(*operation(start_ns=n * MS, end_ns=n * MS + 9, group=n))
        watch.tick((n + 1) * MS)
    after = dict(line.rsplit(" ", 1) for line in next(scrapes))
    for line in before:
        name, value = line.rsplit(" ", 1)
        if "_total" in name:
            assert float(after[name]) >= float(value), name
    assert len(after) == len(before)


@pytest.mark.parametrize("crowd", [ONE, pytest.param(EACH, marks=pytest.mark.long)], indirect=True)
def test_latest_group_is_known(crowd: tuple[Watch, list[RingWriter]]) -> None:
    """A rank that is stuck in the latest group is seen to be, by that group's name, as long as only few have come since."""
    watch, writers = crowd
    stuck = operation(start_ns=GROUPS * MS, end_ns=0, group=GROUPS - 1, seq=1)
    assert writers[0].begin(*stuck) >= 0
    watch.tick(GROUPS * MS)
    found = judged_now(watch.aggregate.jobs.values(), GROUPS * MS + 3600 * 1000 * MS)
    assert [(verdict.group_id, verdict.ranks) for verdict in found if verdict.kind in ("hang", "stalled")] == [
        (f"{verdict.group}-{GROUPS - 1}", [1]) for verdict in found if verdict.kind in ("hang", "stalled")
    ]
    assert found
