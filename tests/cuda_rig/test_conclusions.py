"""What the agent concludes of jobs on the played driver, without any setting: the same as of jobs on the CPU.

On a real GPU, a job has no trace: it runs until it is killed.
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.alerts.impatient import impatient_agent
from tests.cuda_rig.job import command_of, environment
from tests.helpers import BOTH_HOOKS, PATIENCE_S, RunningAgent, agent, wait_for

pytestmark = [pytest.mark.cuda_rig, pytest.mark.timeout(600), pytest.mark.usefixtures("native")]

HIGH = "CommShareHigh"


@contextmanager
def job(libraries: Path | None, directory: Path, scene: str, **settings: str) -> Iterator[None]:
    """A job that runs until it is killed at the end."""
    env = environment(libraries, directory, COMMWATCH_JOB=scene, TRACED="0", **settings)
    process = subprocess.Popen(command_of(scene, directory), env=env)
    try:
        yield
    finally:
        process.terminate()  # the launcher ends its ranks
        process.wait(PATIENCE_S)


def verdicts(running: RunningAgent) -> list[tuple[str, list[int]]]:
    """Kind and ranks of each verdict."""
    return [(each["kind"], each["ranks"]) for each in running.get("/api/v1/verdicts")]


def first_verdicts(running: RunningAgent) -> list[tuple[str, list[int]]]:
    """The first verdicts there are, as ``verdicts``."""
    seen: list[tuple[str, list[int]]] = []

    def named() -> bool:
        seen.extend(verdicts(running))
        return bool(seen)

    wait_for(named, "a verdict")
    return seen


def states(running: RunningAgent, part: str) -> list[str]:
    """The states of the alert on the share, among the agent's ``active`` or ``past`` alerts."""
    found: list[dict[str, Any]] = running.get("/api/v1/alerts")[part]
    return [each["state"] for each in found if (each["name"], each["severity"]) == (HIGH, "warning")]


def true_share(directory: Path) -> float:
    """The communication share of the scene `share`, by the job's own events."""
    times = [line.split() for path in directory.glob("times-*.txt") for line in path.read_text().splitlines()]
    communicated = sum(float(communication) for _, communication in times)
    return communicated / (communicated + sum(float(computation) for computation, _ in times))


@BOTH_HOOKS
@pytest.mark.real_gpu
@pytest.mark.usefixtures("hook")
def test_late_rank(libraries: Path | None, tmp_path: Path) -> None:
    """A rank whose GPU computes longer than the other one is named as a straggler, and no other rank is."""
    with agent(tmp_path) as running, job(libraries, tmp_path, "late"):
        seen: list[tuple[str, list[int]]] = []

        def named() -> bool:
            seen.extend(verdicts(running))
            return ("straggler", [1]) in seen

        wait_for(named, "a verdict")
        assert set(map(str, seen)) == {str(("straggler", [1]))}
        summary = running.get("/api/v1/jobs")
        assert [each["job_id"] for each in summary] == ["late"]


@BOTH_HOOKS
@pytest.mark.real_gpu
@pytest.mark.usefixtures("hook")
def test_gpu_that_does_not_come(libraries: Path | None, tmp_path: Path) -> None:
    """A rank whose GPU computes on while the others wait for it in a collective is named, although its host has launched that collective."""
    with agent(tmp_path) as running, job(libraries, tmp_path, "stuck"):
        assert first_verdicts(running) == [("stalled", [1])]
        (waiting,) = (rank["in_flight"] for rank in running.get("/api/v1/ranks?job=stuck") if rank["rank"] == 0)
        assert [(op["op"], op["queued"]) for op in waiting] == [("all_reduce", False)]


def test_gpu_that_does_not_come_in_a_graph(libraries: Path | None, tmp_path: Path) -> None:
    """In a replay of a graph, NCCL's plugin shows which operation a rank is in, so that the one that does not come is named."""
    with_plugin = {"COMMWATCH_HOOK": "native", "COMMWATCH_NCCL_PLUGIN": "on"}
    with agent(tmp_path) as running, job(libraries, tmp_path, "stuck_replay", **with_plugin):
        assert first_verdicts(running) == [("stalled", [1])]
        ranks = {rank["rank"]: rank["in_flight"] for rank in running.get("/api/v1/ranks?job=stuck_replay")}
        assert [(op["op"], op["queued"]) for op in ranks[0]] == [("all_gather", False)]
        assert ranks[1] == []


@BOTH_HOOKS
@pytest.mark.real_gpu
@pytest.mark.usefixtures("hook")
def test_host_far_ahead(libraries: Path | None, tmp_path: Path) -> None:
    """Operations that wait for 20 s of computation before them are no hang, however long ago they were launched."""
    with agent(tmp_path) as running, job(libraries, tmp_path, "ahead"):
        oldest_s = 0.0
        while oldest_s < 35:
            assert verdicts(running) == []
            ranks = running.get("/api/v1/ranks?job=ahead") if running.get("/api/v1/jobs") else []
            oldest_s = max((op["age_s"] for rank in ranks for op in rank["in_flight"] if op["queued"]), default=0.0)
            time.sleep(0.5)


@BOTH_HOOKS
@pytest.mark.real_gpu
@pytest.mark.usefixtures("hook")
def test_share_alert(libraries: Path | None, tmp_path: Path) -> None:
    """With communication of 40% of a step the alert fires, with the share that was played or measured by the job itself; at 9% it is resolved."""
    watched = agent(tmp_path, constants=impatient_agent(tmp_path / "list.yaml"))
    with watched as running, job(libraries, tmp_path, "share", PLAYED_NCCL_US="40000"):
        wait_for(lambda: "firing" in states(running, "active"), "the alert", 3 * PATIENCE_S)
        steps = running.get("/api/v1/steps?job=share&limit=50")
        shares = [step["comm_share"] for step in steps if step["comm_share"] is not None]
        assert shares
        assert sum(shares) / len(shares) == pytest.approx(0.4 if libraries else true_share(tmp_path), abs=0.01)
        (tmp_path / "calm").touch()
        wait_for(lambda: "resolved" in states(running, "past"), "the end of the alert", 3 * PATIENCE_S)
