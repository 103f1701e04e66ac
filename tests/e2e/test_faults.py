"""Faults of the agent's environment: training continues, and the agent reports exactly what it lost."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from commwatch.probe.governor import DEFAULT_BUDGET
from tests import prefork
from tests.e2e.torchjob import JOBS, digest, preforked, read_rings, results, run_job
from tests.helpers import PATIENCE_S, RunningAgent, agent, clean_env, free_port, needs, wait_for


def start_job(directory: Path, script: str, *arguments: str, **env: str) -> subprocess.Popen[str]:
    """A watched job in the background; its standard output is kept."""
    environment = clean_env(COMMWATCH="1", COMMWATCH_DIR=str(directory), **env)
    return subprocess.Popen(
        preforked(script, 2, *arguments), env=environment, stdout=subprocess.PIPE, text=True, stderr=subprocess.PIPE
    )


def finish(job: subprocess.Popen[str]) -> int:
    """Wait for a job of ``ops.py``; returns how many operations it made, the ones that agree on the end left out."""
    out, err = job.communicate(timeout=2 * PATIENCE_S)
    assert out.count("job done") == 2, err[-3000:]
    return int(next(line for line in out.splitlines() if line.startswith("count")).split()[1])


def all_reduces(running: RunningAgent, **where: Any) -> dict[int, int]:
    """Operations of 64 bytes in the history, by rank."""
    query = "&".join(f"{key}={value}" for key, value in where.items())
    rows = running.get(f"/api/v1/summary?by=rank,size&op=all_reduce&{query}")["rows"]
    return {row["by"]["rank"]: row["count"] for row in rows if row["by"]["size"] == 64}


def ended(running: RunningAgent, jobs: int = 1) -> bool:
    """All jobs in the history have ended."""
    views = running.get("/api/v1/jobs")
    return len(views) == jobs and all(job["state"] == "ended" for job in views)


def lost(running: RunningAgent) -> int:
    """Records lost, as the history says."""
    return sum(job["lost"] for job in running.get("/api/v1/jobs"))


@pytest.mark.parametrize("when", ["before", "during", "after"])
def test_agent_started(when: str, tmp_path: Path) -> None:
    """An agent started before, during or after a job has all of it."""
    stop = tmp_path / "stop"
    if when == "before":
        with agent(tmp_path) as running:
            count = finish(start_job(tmp_path, "ops.py", "200"))
            wait_for(lambda: ended(running), "the end of the job")
            assert (all_reduces(running), lost(running)) == ({0: count, 1: count}, 0)
        return
    job = start_job(tmp_path, "ops.py", "100", "--pause", "0.005", "--until", str(stop))
    wait_for(lambda: len(list(tmp_path.glob("rings/*.ring"))) == 2, "the rings")
    if when == "after":
        stop.touch()
        count = finish(job)
    with agent(tmp_path) as running:
        if when == "during":
            wait_for(lambda: sum(all_reduces(running).values()) > 100, "records")
            stop.touch()
            count = finish(job)
        wait_for(lambda: ended(running), "the end of the job")
        assert (all_reduces(running), lost(running)) == ({0: count, 1: count}, 0)
        wait_for(
            lambda: not list(tmp_path.glob("rings/*")),
            "the removal of the rings, once what follows from their end is stored",
        )


def test_agent_killed(tmp_path: Path) -> None:
    """A SIGKILL of the agent stops no rank, and the next agent continues without a record lost or doubled."""
    stop = tmp_path / "stop"
    job = start_job(tmp_path, "ops.py", "100", "--pause", "0.005", "--until", str(stop))
    for _ in range(2):
        with agent(tmp_path) as running:
            seen = sum(all_reduces(running).values())
            wait_for(lambda seen=seen: sum(all_reduces(running).values()) > seen + 100, "more records")  # type: ignore[misc]
            running.kill()
    stop.touch()
    count = finish(job)
    with agent(tmp_path) as running:
        wait_for(lambda: ended(running), "the end of the job")
        assert (all_reduces(running), lost(running)) == ({0: count, 1: count}, 0)


@pytest.mark.parametrize("both", [False, True])
def test_trainer_killed(both: bool, tmp_path: Path) -> None:
    """What a killed rank had recorded is kept, also when the agent died with it; it is gone, not ended."""
    dies = tmp_path / "dies"
    job = start_job(tmp_path, "ops.py", "500", "--kill-rank", "1", "--kill-at", "50", "--kill-after", str(dies))
    with agent(tmp_path) as running:
        if both:
            wait_for(lambda: len(list(tmp_path.glob("rings/*.ring"))) == 2, "the rings")
            running.kill()
        dies.touch()
        job.communicate(timeout=2 * PATIENCE_S)
        assert job.returncode != 0
        if not both:
            wait_for(lambda: ended(running), "the end of the job")
            _check_killed(running)
    if both:
        with agent(tmp_path) as running:
            wait_for(lambda: ended(running), "the end of the job")
            _check_killed(running)


def _check_killed(running: RunningAgent) -> None:
    counts = all_reduces(running)
    assert counts[1] == 50
    assert counts[0] >= 50
    states = {rank["rank"]: rank["state"] for rank in running.get("/api/v1/ranks")}
    assert states[1] == "gone"
    assert lost(running) == 0


def test_overrun_is_counted(tmp_path: Path) -> None:
    """Records overwritten before an agent came are counted exactly: read + lost = written."""
    output = run_job(tmp_path, "ops.py", "300", COMMWATCH_SLOTS="256")
    assert "count 300" in output
    ranks = read_rings(tmp_path)
    for rank in ranks:
        # Written: 300, one that agrees on the end, a barrier. Of a dead ring every slot is readable.
        assert (len(rank.records), rank.lost) == (256, 302 - 256)
    agent_, _ = digest(tmp_path)
    assert agent_.jobs()[0].lost == sum(rank.lost for rank in ranks)


def test_variables_that_are_wrong(tmp_path: Path) -> None:
    """Invalid values of variables are reported once, by the first rank, in a line each; the defaults apply, and all is recorded."""
    bad = {"COMMWATCH_BUDGET": "nonsense", "COMMWATCH_SLOTS": "5", "COMMWATCH_TIMING": "x"}
    out, err = start_job(tmp_path, "ops.py", "20", **bad).communicate(timeout=2 * PATIENCE_S)
    assert out.count("job done") == 2, err[-3000:]
    said = [line for line in err.splitlines() if "commwatch: " in line]
    assert [line.partition(": needs ")[0] for line in said] == [f"commwatch: {name}" for name in bad]
    assert said[0].endswith("COMMWATCH_BUDGET: needs a number from 0 to 1, not 'nonsense'; the default applies")
    ranks = read_rings(tmp_path)
    assert [(len(rank.of("all_reduce")), rank.identity["budget"]) for rank in ranks] == [
        (21, DEFAULT_BUDGET["native"])
    ] * 2


def test_awkward_trainer(tmp_path: Path) -> None:
    """Forked workers, operations that raise, threads on several groups, an uninstall with works in flight: all harmless."""
    output = run_job(tmp_path, "awkward.py")
    # 0 + 1 + ... + 15, on both ranks; errors arrive as they do without us.
    assert results(output) == results(run_job(tmp_path / "off", "awkward.py", COMMWATCH="0"))
    ranks = read_rings(tmp_path)
    assert len(ranks) == 2
    for rank in ranks:
        # One of the two got as far as the dispatcher; Python refused the other before.
        assert [rank.op(r) for r in rank.operations if r.flags & 2] == ["all_gather"]
        threaded = [r for r in rank.of("all_reduce") if rank.groups[r.group]["name"] != "0"]
        assert sorted(r.seq for r in threaded) == sorted(list(range(50)) * 4)
        assert rank.lost == 0
        stamps = [record.stamp for record in rank.records]
        assert stamps == list(range(1, len(stamps) + 1))
        # Eight in flight at the uninstall; what came after is not seen.
        assert (
            len([r for r in rank.of("all_reduce") if rank.groups[r.group]["name"] == "0" and not r.flags & 2])
            == 1 + 4 + 8
        )


def test_kill_switch(tmp_path: Path) -> None:
    """COMMWATCH_DISABLE=1 wins over COMMWATCH=1 and over a call of install()."""
    run_job(tmp_path / "run", "install_late.py", COMMWATCH_DISABLE="1", EXPECT_OFF="1")
    assert not (tmp_path / "run").exists()


def test_elastic_restart(tmp_path: Path) -> None:
    """The lives of an elastically restarted job stay apart, although their groups have the same ids: nothing is joined across them."""
    for life in ("0", "1"):
        # Ranks as an elastic launcher starts them; its own restarts are not reliable with Gloo on one machine.
        port = str(free_port())
        ranks_of_life = [
            subprocess.Popen(
                prefork.command(JOBS / "ops.py", "5"),
                env=clean_env(
                    COMMWATCH="1", COMMWATCH_DIR=str(tmp_path), TORCHELASTIC_RUN_ID="elastic", TORCHELASTIC_RESTART_COUNT=life,
                    RANK=rank, WORLD_SIZE="2", LOCAL_RANK=rank, MASTER_ADDR="127.0.0.1", MASTER_PORT=port,
                ),
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in ("0", "1")
        ]  # fmt: skip
        assert all("job done" in process.communicate(timeout=2 * PATIENCE_S)[0] for process in ranks_of_life)
    ranks = read_rings(tmp_path)
    assert sorted((rank.rank, rank.identity["restart"]) for rank in ranks) == [(0, 0), (0, 1), (1, 0), (1, 1)]
    agent_, _ = digest(tmp_path)
    assert agent_.jobs()[0].restarts == 1
    (group,) = agent_.groups("elastic")
    found = agent_.collective(group.group_id, 0)
    assert found is not None
    assert [(each.rank, each.restart) for each in found[0]] == [(0, 1), (1, 1)]


def test_two_jobs_at_once(tmp_path: Path) -> None:
    """Two jobs with equal ranks and groups under one agent: no series and no join mixes them."""
    with agent(tmp_path) as running:
        jobs = [
            start_job(tmp_path, "ops.py", str(count), COMMWATCH_JOB=name)
            for name, count in (("red", 100), ("blue", 160))
        ]
        for job in jobs:
            finish(job)
        wait_for(lambda: ended(running, jobs=2), "the end of the jobs")
        assert all_reduces(running, job="red") == {0: 100, 1: 100}
        assert all_reduces(running, job="blue") == {0: 160, 1: 160}
        samples = running.samples()
        for name, count in (("red", 101), ("blue", 161)):
            labels = f'group="default_pg",job_id="{name}",op="all_reduce",rank="0"'
            assert samples[f"commwatch_collectives_total{{{labels}}}"] == count
        groups = running.get("/api/v1/groups")
        assert len({group["group_id"] for group in groups}) == 2


@pytest.fixture
def tiny(tmp_path: Path) -> Iterator[Path]:
    """A file system in memory with next to no room."""
    needs(os.geteuid() == 0, "root, for mounting")
    where = tmp_path / "tiny"
    where.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k,mode=700", "tmpfs", str(where)], check=True)
    yield where
    subprocess.run(["umount", "-l", str(where)], check=True)


def test_no_room(tiny: Path) -> None:
    """A full memory file system switches the probe off, with one line per rank; no SIGBUS, training continues."""
    job = start_job(tiny, "ops.py", "50")
    out, err = job.communicate(timeout=2 * PATIENCE_S)
    assert out.count("job done") == 2, err[-3000:]
    assert err.count("commwatch: not recording this run: No space left on device") == 2
    assert not list(tiny.glob("rings/*"))


def test_unusable_run_directory(tmp_path: Path) -> None:
    """A run directory that cannot be created is reported once per rank, and training continues."""
    (tmp_path / "file").write_text("")
    job = start_job(tmp_path / "file", "ops.py", "50")
    out, err = job.communicate(timeout=2 * PATIENCE_S)
    assert out.count("job done") == 2, err[-3000:]
    assert err.count("commwatch: not recording this run:") == 2


def test_history_on_a_full_disk(tmp_path: Path, tiny: Path) -> None:
    """An agent whose disk is full reports it, keeps serving metrics, and the job is not affected."""
    with agent(tmp_path / "run", "--state", str(tiny)) as running:
        job = start_job(tmp_path / "run", "ops.py", "800")
        assert finish(job) == 800

        def complains() -> bool:
            try:
                running.get("/readyz")
            except OSError as error:
                return "503" in str(error)
            return False

        wait_for(complains, "the agent to say that it is not ready")
        assert running.get("/healthz") == "ok\n"
        labels = 'group="default_pg",job_id="'
        assert any(name.startswith(f"commwatch_collectives_total{{{labels}") for name in running.samples())
