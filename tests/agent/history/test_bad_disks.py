"""Disks that are full, read-only or slow under a running agent: it logs this once, serves live numbers, and continues where it was."""

from __future__ import annotations

import json
import shutil
import sqlite3
import threading
import time
import urllib.error
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from commwatch_agent.history.history import History
from commwatch_agent.history.opening import StoreError
from commwatch_agent.history.rows import Rollup
from commwatch_agent.history.store import Writer
from commwatch_agent.model.cells import SLOT_NS
from tests.helpers import (
    RunningAgent,
    Trainer,
    Watch,
    agent,
    clean_env,
    commwatch,
    group_entry,
    identity,
    needs,
    operation,
    small_tmpfs,
    stored_records,
    wait_for,
)

pytestmark = pytest.mark.long

SLOTS = 256
FINE = operation(start_ns=0, end_ns=9)
DAMAGED = "commwatch_history_damaged_chunks_total"
COUNTED = 'commwatch_collectives_total{group="default_pg",job_id="job",op="all_reduce",rank="0"}'


def ready(running: RunningAgent) -> str:
    """Empty, or why the agent is not."""
    try:
        running.get("/readyz")
    except urllib.error.HTTPError as error:
        with closing(error):
            return error.read().decode()
    return ""


def history(state: Path) -> Path:
    """The one in ``state``."""
    (path,) = state.glob("history-*.sqlite")
    return path


def account(path: Path, job: str = "job") -> tuple[int, int]:
    """Records stored, each once and in order, and records lost, of the one ring of a job."""
    with closing(sqlite3.connect(path)) as db:
        ring, lost = db.execute("SELECT id, lost FROM ring WHERE job = ?", (job,)).fetchone()
    stamps = [int.from_bytes(record[:4], "little") for record in stored_records(path, ring)]
    assert all(a < b for a, b in pairwise(stamps)), "twice, or out of order"
    return len(stamps), lost


class Scene:
    """An agent whose history and rings lie where the test wants them, and one rank."""

    def __init__(self, running: RunningAgent, rank: Trainer, log: Path) -> None:
        self.agent, self.rank, self.log = running, rank, log

    def write(self, count: int) -> None:
        """The rank writes so many records, and they show up in ``/metrics``."""
        self.rank.write([FINE] * count)
        wait_for(lambda: self.agent.samples().get(COUNTED) == self.rank.written, "the records in /metrics")

    def said(self, text: str) -> int:
        """Lines of the log that hold it."""
        return sum(text in line for line in self.log.read_text().splitlines())


@contextmanager
def scene(tmp_path: Path, run: Path, state: Path) -> Iterator[Scene]:
    """All of it, with five records taken in."""
    log = tmp_path / "log"
    log.touch()
    with Trainer(run / "rings" / "a.ring", identity(wall_offset_ns=time.time_ns()), SLOTS) as rank:
        rank.call("name", [(group_entry(),)])
        redirect = ("sh", "-c", 'exec "$@" 2>>"$0"', str(log))
        with agent(run, "--state", str(state), there=redirect, env=clean_env()) as running:
            made = Scene(running, rank, log)
            made.write(5)
            yield made


def full(at: Path) -> Callable[[], None]:
    """Fill a file system; what is returned makes room again."""
    ballast = at / "ballast"
    with ballast.open("wb", buffering=0) as file:
        try:
            while file.write(bytes(4096)):
                pass
        except OSError:
            pass
    return ballast.unlink


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """A file system of four megabytes."""
    with small_tmpfs(tmp_path / "small", 4 << 20) as mounted:
        needs(mounted, "the right to mount")
        yield tmp_path / "small"


def test_full_under_the_history(tmp_path: Path, small: Path) -> None:
    """History on a full disk: this is logged once, live numbers and the reading of the ring continue, and with room again all of it is stored."""
    with scene(tmp_path, tmp_path / "run", small) as played:
        free = full(small)
        for _ in range(8):  # twice what the ring holds
            played.write(SLOTS // 2)
        wait_for(lambda: "history is not being written" in ready(played.agent), "the reason in the answer of /readyz")
        assert played.agent.get("/healthz") == "ok\n"
        free()
        wait_for(lambda: not ready(played.agent), "the agent to be ready")
        played.write(7)
        wait_for(lambda: account(history(small)) == (played.rank.written, 0), "all of it in the history")
        assert played.said("history is not being written") == 2, "said once when it began, and once when it was over"


def test_full_before_the_history(small: Path) -> None:
    """A new history on a full disk is refused with the remedy, and leaves no file; with room again it is created."""
    path = small / "history-n.sqlite"
    free = full(small)
    with pytest.raises(StoreError, match=f"^{path}: database or disk is full; make room there, or choose another"):
        Writer(path)
    assert not path.exists()
    free()
    Writer(path).close()
    with History(path) as found:
        assert found.rings() == []


def test_full_under_the_rings(tmp_path: Path, small: Path) -> None:
    """A full run directory: rings that are there go on and are removed at their end, and another agent can take over and start."""
    with scene(tmp_path, small, tmp_path / "state") as played:
        free = full(small)
        for _ in range(4):
            played.write(SLOTS // 2)
        assert ready(played.agent) == ""
        played.rank.kill()
        wait_for(lambda: not list((small / "rings").glob("*.ring")), "the ring to be removed")
        assert account(history(tmp_path / "state")) == (played.rank.written, 0)
        free()


def test_history_taken_away(tmp_path: Path) -> None:
    """A history that is removed under the agent: it is not ready and says what to do, doctor as well; put back, all is written to it."""
    state = tmp_path / "state"
    with scene(tmp_path, tmp_path / "run", state) as played:
        wait_for(lambda: account(history(state)) == (5, 0), "the records in the history")
        state.rename(tmp_path / "aside")
        wait_for(lambda: "start the agent again" in ready(played.agent), "the reason in the answer of /readyz")
        assert played.agent.get("/healthz") == "ok\n"
        played.write(3)
        examined = json.loads(commwatch("doctor", "--dir", tmp_path / "run", "--state", state, "--json").stdout)
        (check,) = [each for each in examined if each["what"] == "history"]
        assert (check["result"], "the file was removed" in check["says"]) == ("fail", True)
        assert "start the agent again" in check["remedy"]
        (tmp_path / "aside").rename(state)
        wait_for(lambda: not ready(played.agent), "the agent to be ready")
        wait_for(lambda: account(history(state)) == (8, 0), "all of it in the history")


def test_history_removed_for_good(tmp_path: Path) -> None:
    """A rank that ends while the history is gone keeps its ring: the agent that is started again writes it to a new one."""
    state = tmp_path / "state"
    with scene(tmp_path, tmp_path / "run", state) as played:
        shutil.rmtree(state)
        wait_for(lambda: "the file was removed" in ready(played.agent), "the reason in the answer of /readyz")
        played.write(3)
        played.rank.kill()
    assert list((tmp_path / "run" / "rings").glob("*.ring"))
    with agent(tmp_path / "run", "--state", str(state)):
        wait_for(lambda: not list((tmp_path / "run" / "rings").glob("*.ring")), "the ring to be taken in")
    assert account(history(state)) == (8, 0)


def test_another_history_in_its_place(tmp_path: Path) -> None:
    """Another file under the history's name is not taken for it, and an idle agent notices when its own file is back."""
    path, aside = tmp_path / "h.sqlite", tmp_path / "aside"
    store = Writer(path)
    path.rename(aside)
    assert (store.commit(), str(path) in (store.trouble or "")) == (False, True)
    Writer(path).close()
    assert (store.commit(), "removed or replaced" in (store.trouble or "")) == (False, True)
    aside.rename(path)
    assert (store.commit(), store.trouble) == (True, None)
    store.close()


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Somebody else keeps the history locked."""
    with closing(sqlite3.connect(path, isolation_level=None)) as db:
        db.execute("BEGIN IMMEDIATE")
        yield
        db.execute("ROLLBACK")


def test_history_locked_by_another(tmp_path: Path) -> None:
    """While another process locks the history for seconds, pages come at once, the ring is read on, and afterwards nothing is missing."""
    state = tmp_path / "state"
    with scene(tmp_path, tmp_path / "run", state) as played:
        with locked(history(state)):
            for _ in range(6):  # three times what the ring holds
                played.write(SLOTS // 2)
            wait_for(lambda: "locked" in ready(played.agent), "the reason in the answer of /readyz")
            with Trainer(
                tmp_path / "run" / "rings" / "b.ring", identity("late", wall_offset_ns=time.time_ns())
            ) as late:
                late.write([FINE] * 3)
                played.write(SLOTS // 2)
                played.rank.kill()
            stored, lost = account(history(state))
            assert (stored < played.rank.written, lost) == (True, 0)
        wait_for(lambda: account(history(state)) == (played.rank.written, 0), "all of it in the history")
        wait_for(lambda: not list((tmp_path / "run" / "rings").glob("*.ring")), "the rings to be removed")
        assert account(history(state), "late") == (3, 0)
        assert played.said("history is not being written") == 2


def test_damaged_under_a_running_agent(tmp_path: Path) -> None:
    """If a chunk of the history is damaged while the agent runs, answers come without it, and it is counted and logged once."""
    state = tmp_path / "state"
    with scene(tmp_path, tmp_path / "run", state) as played:
        wait_for(lambda: account(history(state)) == (5, 0), "the records in the history")
        assert (len(played.agent.get("/api/v1/ops")["operations"]), played.agent.samples()[DAMAGED]) == (5, 0)
        with closing(sqlite3.connect(history(state))) as db, db:
            db.execute("UPDATE chunk SET data = x'78'")
        for _ in range(2):
            assert played.agent.get("/api/v1/ops")["operations"] == []
        assert played.agent.samples()[DAMAGED] == 1
        assert played.said("is damaged and was skipped") == 1


def test_pages_do_not_wait_for_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """During a commit of any length the live totals can be read, and a summary, which needs both, has each operation once."""
    committing, may_end = threading.Event(), threading.Event()
    commit = Writer.commit

    def slow(self: Writer) -> bool:
        committing.set()
        assert may_end.wait(60)
        return commit(self)

    handover = threading.RLock()
    with Trainer(tmp_path / "rings" / "a.ring") as rank:
        watch = Watch(tmp_path)
        watch.intake._handover = watch.agent._handover = handover
        rank.write([FINE] * 9)
        monkeypatch.setattr(Writer, "commit", slow)
        ticking = threading.Thread(target=watch.tick, args=(10**11,))
        ticking.start()
        try:
            assert committing.wait(60)
            assert watch.agent._lock.acquire(timeout=60)
            watch.agent._lock.release()
            with watch.agent.live(None) as (jobs, _):
                assert [book.read for job in jobs for book in job.rank_totals.values()] == [9]
            assert not handover.acquire(blocking=False)
        finally:
            may_end.set()
            ticking.join(60)
        assert watch.count() == 9


def test_intake_does_not_wait_for_an_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While a summary reads the history, however long that takes, the intake goes on and stores; the summary finds each operation once."""
    handover, read = threading.RLock(), History.rollups
    with Trainer(tmp_path / "rings" / "a.ring") as rank:
        watch = Watch(tmp_path)
        watch.intake._handover = watch.agent._handover = handover
        rank.write([FINE] * 9)
        watch.tick()
        watch.tick(2 * SLOT_NS)  # they are stored
        rank.write([FINE] * 5)
        watch.tick(2 * SLOT_NS)

        def slow(self: History, *asked: Any) -> Iterator[Rollup]:
            ticking = threading.Thread(target=watch.tick, args=(4 * SLOT_NS,))
            ticking.start()
            ticking.join(60)
            assert not ticking.is_alive()
            yield from read(self, *asked)

        monkeypatch.setattr(History, "rollups", slow)
        assert watch.count() == 9 + 5
        monkeypatch.setattr(History, "rollups", read)
        assert not [cell for book in watch.aggregate.rank_totals() for cell in book.live_cells()], (
            "all is stored by now"
        )
        assert watch.count() == 9 + 5
