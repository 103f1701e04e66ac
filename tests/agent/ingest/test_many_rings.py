"""More rings than there is room for, and rings without end: what the agent keeps open and in memory is bounded."""

from __future__ import annotations

import errno
import gc
import logging
import os
import tracemalloc
from pathlib import Path

import pytest

from commwatch.wire import events as ev
from commwatch_agent.history.history import History
from commwatch_agent.ingest.intake import MOST_RINGS, Intake, room_for_rings
from tests.helpers import MS, Trainer, Watch, descriptors, end_rank, identity, operation, write_ring

pytestmark = pytest.mark.long

FILES = Path("/proc/self/fd")
FINE = operation(start_ns=0, end_ns=9)


def refuse(monkeypatch: pytest.MonkeyPatch, function: str, name: str) -> None:
    """For want of descriptors, ``os.function`` opens nothing whose name ends so."""
    original = getattr(os, function)

    def opening(path: Path, *arguments: object, **more: object) -> object:
        if str(path).endswith(name):
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE), str(path))
        return original(path, *arguments, **more)

    monkeypatch.setattr(os, function, opening)


@pytest.mark.parametrize(("function", "name"), [("open", "b.ring"), ("open", "rings")])
def test_no_more_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, function: str, name: str
) -> None:
    """A ring for which there is no file descriptor is not refused: it waits, this is logged, and it is read later; the others are read on."""
    watch = Watch(tmp_path)
    with Trainer(watch.rings / "a.ring") as first:
        watch.tick()
        with Trainer(watch.rings / "b.ring", identity(rank=1)) as second:
            second.write([FINE] * 7)
            with monkeypatch.context() as none_left, caplog.at_level(logging.WARNING, "commwatch"):
                refuse(none_left, function, name)
                for _ in range(3):
                    first.write([FINE] * 5)
                    watch.tick()
                assert "Too many open files" in (watch.intake.waiting or "")
                assert watch.count() == 15
            assert (watch.intake.bad_rings, caplog.records) == (0, [])
            watch.tick()
            assert not watch.intake.waiting
            assert watch.count() == 22


def test_bound(tmp_path: Path) -> None:
    """So many rings are read at a time; the others wait, are counted, and come in when some have ended, with all they hold."""
    watch = Watch(tmp_path)
    watch.intake = Intake(watch.rings, watch.aggregate, watch.store, watch.agent._lock, most_rings=2)
    writers = [write_ring(watch.rings, [FINE] * 5, rank=rank) for rank in range(5)]
    watch.tick()
    assert watch.intake.waiting == "3 rings wait until others end: at most 2 are read at a time"
    links = [path.readlink() for path in FILES.iterdir() if path.is_symlink()]
    assert sum(link.parent == watch.rings for link in links) == 2
    for writer in writers:
        end_rank(writer)
    for _ in range(4):
        watch.tick()
    assert not watch.intake.waiting
    assert (watch.count(), watch.intake.lost) == (25, 0)
    assert not list(watch.rings.iterdir())


def test_room_is_left_for_others() -> None:
    """Rings leave descriptors for connections and the history, however few there are, and never take more than their bound."""
    for files in (64, 256, 1024, 4096, 8192, 1 << 20):
        assert 0 < room_for_rings(files) <= MOST_RINGS
        assert files - room_for_rings(files) >= min(512, files // 2)


def test_full_disk_keeps_no_file_open(tmp_path: Path) -> None:
    """A ring that waits for room in the history does not cost a descriptor in each pass."""
    with Trainer(tmp_path / "rings" / "a.ring", identity(note="x" * 2000)):
        watch = Watch(tmp_path)
        watch.tick()
        watch.fill_disk()
        with Trainer(tmp_path / "rings" / "b.ring", identity(rank=1, note="x" * 3000)):
            watch.tick()
            before = len(descriptors())
            for _ in range(20):
                watch.tick()
            assert len(descriptors()) == before


def job(watch: Watch, name: str, at_ns: int) -> None:
    """A job of two ranks from its beginning to its end, watched."""
    operations = [operation(start_ns=at_ns + n, end_ns=at_ns + n + 1, seq=n, launch_ns=at_ns + n) for n in range(20)]
    writers = [write_ring(watch.rings, operations, job=name, rank=rank) for rank in range(2)]
    watch.tick(at_ns + MS)
    for writer in writers:
        writer.close(1)
        end_rank(writer)
    watch.tick(at_ns + 2 * MS)
    assert not list(watch.rings.iterdir())


def test_a_thousand_jobs(tmp_path: Path) -> None:
    """Jobs that come and go leave neither files open nor anything in memory once they are out of sight, and all their records in the history."""
    watch = Watch(tmp_path)
    hour = 3600 * 1000 * MS
    for n in range(700):
        job(watch, f"job{n}", n * hour)
    tracemalloc.start()
    try:
        files = len(descriptors())
        for n in range(700, 1000):
            job(watch, f"job{n}", n * hour)
        gc.collect()
        ours = tracemalloc.take_snapshot().filter_traces([tracemalloc.Filter(True, "*/commwatch/*")])
    finally:
        tracemalloc.stop()
    assert len(descriptors()) == files
    assert len(watch.aggregate.jobs) <= 2
    assert sum(each.size for each in ours.statistics("filename")) < 100_000, "kept of 300 jobs"
    assert len(watch.agent.jobs()) == 1000
    with History(watch.path) as history:
        stored = sum(len(chunk.records) // ev.RECORD_SIZE for chunk in history.chunks(0, 1 << 62))
    assert watch.count() == stored == 1000 * 40
