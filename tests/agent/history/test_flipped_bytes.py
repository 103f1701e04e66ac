"""Bytes of the history that a person or a disk has changed between two runs of the agent: it starts or gives the reason, and its answers are true."""

from __future__ import annotations

import logging
import random
import shutil
import sqlite3
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest

from commwatch_agent.history.examination import Examination
from commwatch_agent.history.opening import StoreError
from commwatch_agent.history.operations import Operation
from commwatch_agent.model.views import StepView
from commwatch_agent.report.report import build
from commwatch_agent.report.report_text import text
from tests.helpers import (
    EPOCH_NS,
    MS,
    Trainer,
    Watch,
    group_entry,
    identity,
    mark,
    operation,
)

pytestmark = pytest.mark.long

S = 1000 * MS
ALWAYS = (0, 1 << 62)
#: Bytes that are changed at once, and how often so many: 2,000 in all.
ROUNDS = {1: 30, 5: 14, 95: 20}
JOBS = {"ended": 400, "running": 300}


@dataclass
class Known:
    """A history as it was before, with its log and the ring of a job that went on, and what is true of it."""

    place: Path
    saved: Path
    operations: dict[str, dict[str, Any]]
    steps: set[tuple[str, int, int, float, float]]
    #: How much there is of what.
    whole: Counter[str]


def _key(step: StepView) -> tuple[str, int, int, float, float]:
    return step.job_id, step.rank, step.seq, round(step.end_at, 6), round(step.comm_share or 0, 6)


def _plain(found: Operation) -> dict[str, Any]:
    return {name: value for name, value in asdict(found).items() if name != "id"}


def _name(found: Operation) -> str:
    return f"{found.job_id} {found.seq}"


def _write(trainer: Trainer, first: int, until: int) -> None:
    records = []
    for n in range(first, until):
        at = n * S
        records.append(operation(start_ns=at + MS, end_ns=at + 60 * MS, seq=n, size=1 << (10 + n % 8), dtype=1))
        records.append(mark(n + 1, at + 990 * MS, exposed_ns=50 * MS))
    trainer.write(records)


@pytest.fixture(scope="module")
def known(tmp_path_factory: pytest.TempPathFactory) -> Known:
    """One job that has ended, all of it in the database file; another in the log, with 100 operations that only its ring has yet."""
    tmp = tmp_path_factory.mktemp("flips")
    place = tmp / "place"
    watch = Watch(place)
    names = [(group_entry(0, (0,), group_id="world"),), ({"dtype": 1, "name": "bfloat16"},), ({"op": 40, "name": "x"},)]
    with Trainer(watch.rings / "ended.ring", identity("ended", world_size=1), 2048) as trainer:
        trainer.call("name", names)
        _write(trainer, 0, JOBS["ended"])
        watch.tick()
        watch.tick(400 * S)
    watch.tick(401 * S)
    watch.store._db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    with Trainer(watch.rings / "running.ring", identity("running", world_size=1), 2048) as trainer:
        trainer.call("name", names)
        _write(trainer, 0, 100)
        watch.tick(402 * S)
        _write(trainer, 100, 200)
        watch.tick(403 * S)
        _write(trainer, 200, JOBS["running"])
        shutil.copytree(place, tmp / "saved")
    (watch.rings / "running.ring").unlink()
    watch.store.close()
    # All steps that were made: an agent that starts again begins with the second mark that it sees.
    steps = {(job, 0, n + 1, round(1.7e9 + n + 0.99, 6), 0.059) for job in JOBS for n in range(JOBS[job])}
    made = restored(Known(place, tmp / "saved", {}, steps, Counter()))
    whole = Watch(made.place)
    whole.tick(500 * S)
    found = whole.agent.operations(*ALWAYS, None, lambda _: True, 10_000)
    made.operations.update({_name(each): _plain(each) for each in found})
    whole.store.close()
    counted, said = lived(restored(made), 500 * S) or (Counter(), True)
    assert not said
    assert [counted[f"{what} of {job}"] for what in ("sum", "operations") for job in JOBS] == [*JOBS.values()] * 2
    assert counted["steps of ended"] == JOBS["ended"] - 1
    made.whole.update(counted)
    return made


def restored(known: Known) -> Known:
    """All files as they were."""
    shutil.rmtree(known.place)
    shutil.copytree(known.saved, known.place)
    return known


def flip(file: Path, count: int, chance: random.Random) -> None:
    """Change so many bytes of a file."""
    data = bytearray(file.read_bytes())
    for _ in range(count):
        data[chance.randrange(len(data))] ^= chance.randrange(1, 256)
    file.write_bytes(data)


def lived(known: Known, at_ns: int) -> tuple[Counter[str], bool] | None:
    """Run an agent once. Returns the number of items by kind and whether it reported a loss, or ``None`` if it does not start."""
    try:
        watch = Watch(known.place)
    except StoreError as error:
        why = str(error)
        assert why.startswith(f"{known.place / 'h.sqlite'}: ")
        assert len(why.splitlines()) == 1
        assert (known.place / "h.sqlite").exists(), "it is left as it was"
        return None
    refused = False
    try:
        for n in range(3):
            watch.tick(at_ns + n * S)
        examination = Examination(watch.path, watch.damaged)
        while not examination.tick():
            pass
        list(watch.store.tidy(EPOCH_NS + at_ns, 1 << 30, 1 << 30, 86_400 * S))
        counted: Counter[str] = Counter()
        try:
            counted.update({f"sum of {job}": row.count for (job,), row in watch.rows("job_id").items()})
            for found in watch.agent.operations(*ALWAYS, None, lambda _: True, 10_000):
                assert _plain(found) == known.operations[_name(found)], "an operation is another than it was"
                counted[f"operations of {found.job_id}"] += 1
            steps = [_key(step) for step in watch.agent.steps(*ALWAYS, None, None, 10_000)]
            assert set(steps) <= known.steps, "a step is another than it was"
            assert len(set(steps)) == len(steps)
            counted["steps of ended"] = sum(step[0] == "ended" for step in steps)
            watch.agent.groups(None), watch.agent.ranks(None), watch.agent.jobs(), watch.agent.slots(*ALWAYS, "ended")
            report = build(watch.agent, "ended", watch.path, "", [])
            assert report is None or text(report)
        except (sqlite3.Error, StoreError):  # the API answers 503
            refused = True
        lost = sum(row.lost for row in watch.ring_rows()) if not refused else 0
        set_aside = any(".damaged" in file.name for file in known.place.iterdir())
        said = bool(refused or lost or len(watch.damaged) or watch.store.trouble or set_aside)
        return counted, said
    finally:
        watch.store.close()


def test_flipped_bytes(known: Known, caplog: pytest.LogCaptureFixture) -> None:
    """2,000 bytes changed in history, log and its index: the agent starts or logs why not; each total is exact, or lower and reported."""
    seed = random.SystemRandom().randrange(1 << 32)
    print(f"seed {seed}")  # pytest shows it where the test fails
    chance, outcomes = random.Random(seed), Counter[str]()
    caplog.set_level(logging.CRITICAL, "commwatch")
    rounds = [count for count, times in ROUNDS.items() for _ in range(times)]
    assert sum(rounds) == 2000
    for number, count in enumerate(rounds):
        restored(known)
        suffix = chance.choice(["", "", "", "-wal", "-shm"])
        flip(known.place / f"h.sqlite{suffix}", count, chance)
        first = lived(known, 600 * S)
        if first is None:
            outcomes["says why it does not start"] += 1
            continue
        counted, said = first
        where = f"round {number}, {count} bytes of h.sqlite{suffix}: {counted}"
        assert all(counted[what] <= known.whole[what] for what in counted), f"more than there was: {where}"
        assert said or counted == known.whole, f"a loss was not reported: {where}"
        outcomes["all is there" if counted == known.whole else "a loss was reported"] += 1
        if number % 4 and counted == known.whole:
            continue
        again = lived(known, 700 * S)
        assert again is not None, f"does not start any more: {where}"
        final = lived(known, 800 * S)
        assert final is not None
        assert final[0] == again[0] or final[1], f"restarts: {where}"
        assert len(list(known.place.glob("h.sqlite.damaged-*[0-9]"))) <= 1, f"set aside again and again: {where}"
    print(outcomes)
    assert set(outcomes) >= {"all is there", "a loss was reported"}
