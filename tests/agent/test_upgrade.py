"""Another version of the agent under running jobs: it goes on where the one before has stopped."""

from __future__ import annotations

import sqlite3
import struct
import tarfile
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from commwatch.wire import ring
from commwatch_agent.history.schema import SCHEMA_VERSION, SHAPE
from tests.helpers import Trainer, Watch, agent, commwatch, group_entry, identity, operation, stored_records, wait_for

COUNTED = 'commwatch_collectives_total{group="default_pg",job_id="job",op="all_reduce",rank="0"}'

#: What ranks of earlier commits have written (README.md there).
RINGS = Path(__file__).parents[1] / "fixtures" / "rings"
#: Operations of each rank there.
RECORDED = {"all_reduce": 40, "all_gather": 20, "barrier": 1}


def today() -> dict[str, Any]:
    """An identity by which monotonic time 0 is now: what is older than the history keeps goes when an agent starts."""
    return identity(wall_offset_ns=time.time_ns())


def history(state: Path) -> Path:
    """The one in ``state``."""
    (path,) = state.glob("history-*.sqlite")
    return path


def change(state: Path, *statements: str) -> None:
    """Make a history as another version has it."""
    with closing(sqlite3.connect(history(state))) as db, db:
        for statement in statements:
            db.execute(statement)


def test_takes_over(tmp_path: Path) -> None:
    """The agent is replaced while a job runs: nothing is lost, nothing counted twice."""
    run, state = tmp_path / "run", tmp_path / "state"
    with Trainer(run / "rings" / "a.ring", today()) as rank:
        rank.call("name", [(group_entry(),)])
        for _ in range(3):
            with agent(run, "--state", str(state)) as running:
                rank.write([operation(start_ns=0, end_ns=9)] * 300)
                wait_for(lambda: running.get("/api/v1/jobs") and COUNTED in running.samples(), "the records")
            rank.write([operation(start_ns=0, end_ns=9)] * 200)
    with agent(run, "--state", str(state)) as running:
        wait_for(lambda: not list((run / "rings").glob("*.ring")), "the end of the ring")
        (job,) = running.get("/api/v1/jobs")
    assert job["lost"] == 0
    stamps = [int.from_bytes(record[:4], "little") for record in stored_records(history(state), 1)]
    assert stamps == list(range(1, rank.written + 1))


@pytest.mark.parametrize("marks", [(8, 0), (SCHEMA_VERSION, 0), (SCHEMA_VERSION, SHAPE - 1)])
def test_history_of_an_earlier_version(tmp_path: Path, marks: tuple[int, int]) -> None:
    """An agent sets an earlier history aside, also one of this version with other tables; it logs that in one line, and starts a new one."""
    run, state = tmp_path / "run", tmp_path / "state"
    with Trainer(run / "rings" / "a.ring", today()) as rank:
        rank.call("name", [(group_entry(),)])
        rank.write([operation(start_ns=0, end_ns=9)] * 5)
        with agent(run, "--state", str(state)) as running:
            wait_for(lambda: running.samples().get(COUNTED) == 5, "the records")
        version, shape = marks
        change(state, f"PRAGMA user_version = {version}", f"PRAGMA application_id = {shape}")
        before = history(state).read_bytes()
        done = commwatch("report", "--state", state)
        assert (done.returncode, done.stderr.count("\n")) == (2, 1)
        assert "history of an earlier commwatch" in done.stderr
        assert "start an agent on it, which sets it aside" in done.stderr
        said = tmp_path / "said"
        with agent(run, "--state", str(state), said=said) as running:
            wait_for(lambda: running.samples().get(COUNTED) == 5, "the records, again")
        assert "history of an earlier commwatch: renamed to" in said.read_text()
    (aside,) = state.glob("history-*.sqlite.old-*")
    assert aside.read_bytes() == before


def test_downgrade(tmp_path: Path) -> None:
    """An older agent on what a newer one has written does not start, says what to do in one line, and leaves all of it as it was."""
    run, state = tmp_path / "run", tmp_path / "state"
    with Trainer(run / "rings" / "a.ring", today()) as rank:
        with agent(run, "--state", str(state)):
            rank.write([operation(start_ns=0, end_ns=9)] * 5)
        change(state, "PRAGMA user_version = 1000")
        done = commwatch("agent", "--dir", run, "--state", state, "--port", "0")
        assert done.returncode != 0
        (line,) = done.stderr.splitlines()
        assert "use the newer commwatch that wrote it" in line
        change(state, f"PRAGMA user_version = {SCHEMA_VERSION}")
        with agent(run, "--state", str(state)) as running:
            wait_for(lambda: running.get("/api/v1/jobs"), "the job")
            assert running.get("/api/v1/jobs")[0]["lost"] == 0


@pytest.mark.parametrize("version", range(1, ring.VERSION))
def test_rings_of_earlier_formats(tmp_path: Path, version: int) -> None:
    """An agent reads what a real job has written in each earlier format of the ring: each operation and step once, and nothing is lost."""
    with tarfile.open(RINGS / f"format-{version}.tar.gz") as packed:
        packed.extractall(tmp_path / "rings", filter="data")
    for path in (tmp_path / "rings").glob("*.ring"):
        assert struct.unpack_from("<I", path.read_bytes(), 8) == (version,)
    watch = Watch(tmp_path)
    while watch.tick():
        pass
    counts = {key: row.count for key, row in watch.rows("rank", "op").items()}
    assert counts == {(rank, op): count for rank in (0, 1) for op, count in RECORDED.items()}
    assert watch.stored() == 2 * (sum(RECORDED.values()) + 20)
    assert [row.lost for row in watch.ring_rows()] == [0, 0]


def test_ring_of_a_newer_probe_beside_others(tmp_path: Path) -> None:
    """A trainer with a newer probe is refused by name and with the remedy, and its ring left for an agent that can read it; others are read."""
    run = tmp_path / "run"
    with Trainer(run / "rings" / "a.ring", today()) as rank, Trainer(run / "rings" / "b.ring", today()) as newer:
        with open(newer.path, "r+b") as file:
            file.seek(8)
            file.write(struct.pack("<I", ring.VERSION + 1))
        rank.call("name", [(group_entry(),)])
        with agent(run, "--state", str(tmp_path / "state")) as running:
            rank.write([operation(start_ns=0, end_ns=9)] * 5)
            wait_for(lambda: running.samples().get(COUNTED) == 5, "the records")
        with open(newer.path, "r+b") as file:
            file.seek(8)
            file.write(struct.pack("<I", ring.VERSION))
        newer.write([operation(start_ns=0, end_ns=9)] * 7)
        with agent(run, "--state", str(tmp_path / "state")) as running:
            wait_for(lambda: sum(len(stored_records(history(tmp_path / "state"), row)) for row in (1, 2)) == 12, "both")
