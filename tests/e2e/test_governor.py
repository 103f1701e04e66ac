"""The probe keeps to its budget: a slow one sheds, reports it, and recovers; its counts meanwhile are exact, its samples true."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from commwatch.probe.governor import is_sampled
from commwatch.wire import events as ev
from tests import prefork
from tests.e2e.torchjob import JOBS, RankRecords, read_rings, results
from tests.helpers import BOTH_HOOKS, PATIENCE_S, RunningAgent, agent, clean_env, commwatch, needs, wait_for

#: Bytes of the operations of a step of ``governed.py``.
STEP_BYTES = 4 * (900 + 1000 + 5000) + 4


@pytest.fixture(scope="module")
def slow_clock(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A library that makes the clock slow while a file exists; jobs with it are forked, too."""
    compiler = shutil.which("gcc")
    needs(compiler, "gcc")
    library = tmp_path_factory.mktemp("clock") / "slow.so"
    command = [str(compiler), "-O1", "-fPIC", "-shared", str(JOBS / "slow_clock.c"), "-o", str(library), "-ldl"]
    subprocess.run(command, check=True, timeout=PATIENCE_S)
    with prefork.started_with("job", LD_PRELOAD=str(library)):
        yield library


@contextmanager
def job(directory: Path, pause_s: float, **env: str) -> Iterator[subprocess.Popen[str]]:
    """``governed.py`` while it runs; it ends when ``directory/stop`` appears."""
    env = clean_env(COMMWATCH="1", COMMWATCH_DIR=str(directory), COMMWATCH_JOB="governed", **env)
    process = subprocess.Popen(
        prefork.command(JOBS / "governed.py", str(directory / "stop"), str(pause_s), ranks=2, env=env),
        env=env,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.terminate()  # so that it ends its ranks
        process.communicate(timeout=PATIENCE_S)


def recorded(running: RunningAgent) -> list[float]:
    """What part of its operations each rank records."""
    return [value for name, value in running.samples().items() if name.startswith("commwatch_probe_recorded_ratio")]


def has_shares(running: RunningAgent) -> bool:
    return any(name.startswith("commwatch_comm_share_ratio") for name in running.samples())


@pytest.mark.parametrize("hook", ["native", pytest.param("python", marks=pytest.mark.long)], indirect=True)
def test_sheds_and_recovers(hook: str, slow_clock: Path, tmp_path: Path) -> None:
    """A probe that becomes slow only counts within seconds, and every view shows it; once it is quick again it records everything again."""
    slow, env = tmp_path / "slow", {"LD_PRELOAD": str(slow_clock), "COMMWATCH_BUDGET": "0.02"}
    with agent(tmp_path) as running, job(tmp_path, 0.05, SLOW=str(slow), **env) as process:
        wait_for(lambda: recorded(running) == [1, 1] and has_shares(running), "shares while all is recorded")
        slow.touch()
        wait_for(lambda: recorded(running) == [0, 0] and not has_shares(running), "both ranks to count only")
        assert {rank["probe_mode"] for rank in running.get("/api/v1/ranks")} == {"counters"}
        doctor = commwatch("doctor", "--dir", tmp_path).stdout
        assert "of the time (budget 2.00%)" in doctor
        told = "recorded in part: no operation of ranks 0-1; the rest is only counted, because the probe was above its budget"
        assert told in doctor
        diagnosis = commwatch("diagnose", "--dir", tmp_path)
        assert (diagnosis.returncode, told in diagnosis.stdout, "healthy" in diagnosis.stdout) == (0, True, False)
        slow.unlink()
        wait_for(lambda: recorded(running) == [1, 1], "both ranks to record everything")
        (tmp_path / "stop").touch()
        steps = results(process.communicate(timeout=PATIENCE_S)[0])
        wait_for(running.job_has_ended, "the end of the job")
        samples = running.samples()
        for rank, number in enumerate(steps):
            of_data = f'group="data",job_id="governed",op="all_reduce",rank="{rank}"'
            assert samples[f"commwatch_collectives_total{{{of_data}}}"] == 3 * number
            assert samples[f"commwatch_collective_bytes_total{{{of_data}}}"] == (STEP_BYTES - 4) * number


@contextmanager
def no_core_free() -> Iterator[None]:
    """A process for each core that never sleeps."""
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(os.cpu_count() or 1)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


@BOTH_HOOKS
@pytest.mark.long
@pytest.mark.usefixtures("hook")
def test_full_machine(tmp_path: Path) -> None:
    """Two ordinary jobs on cores that others use record every operation: waiting for a core is no cost of the probe's."""
    places = [tmp_path / name for name in ("one", "two")]
    for place in places:
        place.mkdir()
    with no_core_free(), job(places[0], 0.01) as one, job(places[1], 0.01) as two:

        def ranks() -> list[RankRecords]:
            return [rank for place in places for rank in read_rings(place)]

        enough = "100 operations of each rank"
        wait_for(
            lambda: len(ranks()) == 4 and all(len(rank.operations) > 100 for rank in ranks()), enough, 2 * PATIENCE_S
        )
        for place, process in zip(places, (one, two), strict=True):
            (place / "stop").touch()
            process.communicate(timeout=PATIENCE_S)
    assert [[r for r in rank.operations if r.timing in (ev.COUNTED, ev.BY_NONE)] for rank in ranks()] == [[]] * 4


def numbers(rank: RankRecords, group: str) -> list[int]:
    """Numbers of the collectives of a group that are recorded one by one, in their order."""
    ids = {small for small, entry in rank.groups.items() if entry["label"] == group}
    return [r.seq for r in rank.operations if r.group in ids and r.timing != ev.COUNTED]


@BOTH_HOOKS
def test_sample(hook: str, tmp_path: Path) -> None:
    """Between everything and nothing one operation in sixteen is recorded, the same on all ranks, with true durations; all are counted."""
    with job(tmp_path, 0.001, COMMWATCH_BUDGET="1e-9") as process:

        def counting() -> bool:
            ranks = read_rings(tmp_path)
            last = [[r for r in rank.operations if r.timing == ev.COUNTED][-1:] for rank in ranks]
            return len(ranks) == 2 and all(
                each and each[0].seq > 300 + numbers(rank, "data")[-1] for rank, each in zip(ranks, last, strict=True)
            )

        wait_for(counting, "the ranks to count only")
        (tmp_path / "stop").touch()
        steps = results(process.communicate(timeout=PATIENCE_S)[0])
    ranks = read_rings(tmp_path)
    assert [rank.lost for rank in ranks] == [0, 0]
    sampled = []
    for rank, number in zip(ranks, steps, strict=True):
        together = [r for r in rank.operations if r.timing == ev.COUNTED]
        alone = [r for r in rank.operations if r.timing != ev.COUNTED]
        ops = Counter({"barrier": 1, "all_reduce": 3 * number, "broadcast": number})
        assert (
            Counter(map(rank.op, alone)) + sum((Counter({rank.op(r): r.waited_us}) for r in together), Counter()) == ops
        )
        assert sum(r.size_bytes for r in rank.operations) == STEP_BYTES * number
        seqs = numbers(rank, "data")
        first = next(seq for n, seq in enumerate(seqs) if seq != n)  # from here on a sample
        sampled.append([seq for seq in seqs if seq >= first])
        assert all(map(is_sampled, sampled[-1]))
        # How a run begins is not known, so its first has no duration; the others have one, and it is of themselves alone.
        untimed = {r.seq for r in alone if r.seq in sampled[-1] and rank.op(r) == "all_reduce" and r.flags & ev.UNTIMED}
        assert {seq % 16 for seq in untimed} == {0}
        marks = [record.flags & ev.UNTIMED for record in rank.marks]
        assert not marks[0]
        assert marks[-2]
    assert set(sampled[0]) & set(sampled[1])
