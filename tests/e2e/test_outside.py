"""Real jobs of two ranks of which one does not come to a call outside operations: the verdict names it; what is well has no incident."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests import prefork
from tests.e2e.torchjob import JOBS
from tests.helpers import RunningAgent, agent, clean_env, commwatch, free_port, wait_for

RANKS, CULPRIT = 2, 1
#: For an agent that knows sooner that a rank does not come.
SOON_MISSED: dict[str, float | str] = {
    "commwatch_agent.analysis.waits.outside_waits._PATIENCE_S": 15.0,
    "commwatch_agent.analysis.waits.patience.NEW_S": 15.0,
}


class Trouble(NamedTuple):
    """What the culprit, rank 1, does while rank 0 waits, and what the verdict must be."""

    does: str
    kind: str
    cause: str
    says: str


TROUBLES = (
    Trouble("new_group", "init_incomplete", "not_come", "rank 1 has not come to new_group; it is"),
    Trouble("stopped", "init_incomplete", "stopped", "rank 1 has not come to new_group; it is stopped"),
    Trouble("dead", "init_incomplete", "dead", "rank 1 has not come to new_group, because it died (no clean end)"),
    Trouble("order", "desync", "order", "rank 1 has not come to new_group; it is in all_reduce 2 of group default_pg"),
    Trouble(
        "store", "init_incomplete", "not_come", "key ready of a store is not set; rank 1 is alive and does not wait"
    ),
    Trouble("store_barrier", "init_incomplete", "not_come", "rank 1 has not come to store_based_barrier"),
    Trouble("monitored", "stalled", "not_joined", "rank 1 has not joined"),
    Trouble("init", "init_incomplete", "unseen", "rank 1 has not come to init_process_group: it has not started"),
)


def _start(directory: Path, name: str) -> list[subprocess.Popen[bytes]]:
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(RANKS)}
    watched = {"COMMWATCH": "1", "COMMWATCH_DIR": str(directory), "COMMWATCH_JOB": name}
    return [
        subprocess.Popen(
            prefork.command(JOBS / "outside.py", name),
            env=clean_env(**where, **watched, RANK=str(rank)),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for rank in range(RANKS)
    ]


@pytest.fixture(scope="module")
def troubled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningAgent]:
    """An agent that watches all troubles at once, each in a separate job, and one healthy job."""
    directory = tmp_path_factory.mktemp("outside")
    started: list[subprocess.Popen[bytes]] = []
    try:
        with agent(directory, constants=SOON_MISSED) as running:
            for name in ("healthy", *(trouble.does for trouble in TROUBLES)):
                started += _start(directory, name)
            yield running
    finally:
        for process in started:
            process.kill()
            process.wait()


def _of(running: RunningAgent, what: str, job: str) -> list[dict[str, Any]]:
    """What the agent has of a job, once it knows the job."""
    if job not in [each["job_id"] for each in running.get("/api/v1/jobs")]:
        return []
    found: list[dict[str, Any]] = running.get(f"/api/v1/{what}?job={job}")
    return found


def test_start(troubled: RunningAgent) -> None:
    """A job whose ranks all wait in ``init_process_group`` is a running job without figures in all views."""
    (waiting,) = wait_for(lambda: _of(troubled, "ranks", "init"), "the rank that waits")
    assert (waiting["rank"], waiting["state"], waiting["heartbeat_age_s"]) == (0, "running", None)
    done = commwatch("diagnose", "--dir", troubled.directory, "--job", "init")
    assert "no running job" not in done.stdout
    assert "init" in commwatch("jobs", "--dir", troubled.directory).stdout
    shown = commwatch("top", "--dir", troubled.directory, "--job", "init", "--once")
    assert (shown.returncode, shown.stderr) == (0, "")
    assert "0%" not in shown.stdout


@pytest.mark.parametrize("trouble", TROUBLES, ids=lambda trouble: trouble.does)
def test_trouble(troubled: RunningAgent, trouble: Trouble) -> None:
    """The verdict has the right kind, cause and culprit, and says it in words; ``diagnose`` has it as an incident."""
    (verdict,) = wait_for(lambda: _of(troubled, "verdicts", trouble.does), f"the verdict on {trouble.does}")
    assert (verdict["kind"], verdict["cause"], verdict["ranks"]) == (trouble.kind, trouble.cause, [CULPRIT]), verdict
    assert trouble.says in verdict["says"]
    assert verdict["waiting"] == [0]
    # The agent looks once a second; until then, a long wait may be an incident for information.
    wait_for(
        lambda: trouble.kind in {each["kind"] for each in _of(troubled, "incidents", trouble.does)}, "the incident"
    )
    done = commwatch("diagnose", "--dir", troubled.directory, "--job", trouble.does)
    assert done.returncode == 1
    # Where its end explains the wait, that is above it.
    assert (f"Missing rank: rank {CULPRIT}" if trouble.does == "dead" else trouble.says) in done.stdout


def test_healthy(troubled: RunningAgent) -> None:
    """A job that makes groups one after the other, waits in stores, and makes its default group twice has no incident."""
    wait_for(lambda: _of(troubled, "verdicts", "init"), "the verdict on another job")
    states = [each["state"] for each in wait_for(lambda: _of(troubled, "ranks", "healthy"), "the job")]
    assert states == ["left", "left"]
    assert _of(troubled, "verdicts", "healthy") == []
    assert _of(troubled, "incidents", "healthy") == []
