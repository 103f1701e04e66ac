"""Real jobs in which one bit flips on one rank: the verdict names rank, parameter and step; and jobs whose replicas may differ have none."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests import prefork
from tests.e2e.torchjob import JOBS
from tests.helpers import RunningAgent, agent, clean_env, free_port, wait_for

AFTER = 20


class Flip(NamedTuple):
    """What flips on which rank, and what the verdict must be."""

    what: str
    rank: int
    parameter: str
    ranks: int = 3
    how: str = "ddp"
    hook: str = "python"
    cause: str = "weights"
    culprits: tuple[int, ...] = ()

    @property
    def job(self) -> str:
        """The name of its job."""
        return f"{self.what}-{self.how}-{self.hook}"


FLIPS = (
    Flip("weight", 1, "4.weight"),
    Flip("weight", 2, "4.weight", hook="native"),
    Flip("frozen", 0, "3.weight"),
    Flip("gradient", 1, "4.weight"),
    Flip("received", 2, "0.weight"),
    Flip("state", 0, "4.weight"),
    Flip("weight", 3, "1.weight", ranks=4, how="hsdp", cause="one_of", culprits=(1, 3)),
)


class Job:
    """The ranks of a job with checks at each step."""

    def __init__(self, directory: Path, flip: Flip, **more: str) -> None:
        where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(flip.ranks)}
        where |= {"COMMWATCH_DIR": str(directory), "COMMWATCH_JOB": flip.job}
        watched = {"COMMWATCH": "1", "COMMWATCH_HOOK": flip.hook}
        checks = {"COMMWATCH_CHECKSUMS": "replicas", "COMMWATCH_CHECKSUM_EVERY": "1", "COMMWATCH_CHECKSUM_BUDGET": "0"}
        env = {**where, **watched, **checks, **more}
        command = prefork.command(JOBS / "corrupt.py", flip.what, str(flip.rank), str(AFTER), flip.how)
        self.ranks = [
            subprocess.Popen(command, env=clean_env(**env, RANK=str(rank)), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
            for rank in range(flip.ranks)
        ]  # fmt: skip

    def end(self) -> list[str]:
        """Kill the ranks; return what each one has printed."""
        for rank in self.ranks:
            rank.kill()
        return [rank.communicate()[1] for rank in self.ranks]


@pytest.fixture(scope="module")
def watching(tmp_path_factory: pytest.TempPathFactory, native: Path) -> Iterator[RunningAgent]:
    """An agent."""
    with agent(tmp_path_factory.mktemp("corruption")) as running:
        yield running


def verdicts_of(running: RunningAgent, job: str) -> list[dict[str, Any]]:
    """The verdicts on a job, once the agent knows it."""
    if job not in [each["job_id"] for each in running.get("/api/v1/jobs")]:
        return []
    found: list[dict[str, Any]] = running.get(f"/api/v1/verdicts?job={job}")
    return [each for each in found if each["kind"] == "corruption"]


@pytest.mark.parametrize("flip", FLIPS, ids=lambda flip: flip.job)
def test_flip(watching: RunningAgent, flip: Flip) -> None:
    """A flip is found in the step after it, and only there; the rank, the parameter and the step are right."""
    job = Job(watching.directory, flip)
    try:
        (verdict,) = wait_for(lambda: verdicts_of(watching, flip.job), f"the verdict on {flip.job}")
    finally:
        printed = job.end()
    assert (verdict["cause"], tuple(verdict["ranks"])) == (flip.cause, flip.culprits or (flip.rank,))
    assert (verdict["parameter"], verdict["step"]) == (flip.parameter, AFTER + 1)
    assert f"seen at step {AFTER + 1}, not at step {AFTER}" in verdict["says"]
    assert set(verdict["waiting"]) == (set() if flip.culprits else set(range(flip.ranks)) - {flip.rank})
    assert not any("commwatch" in each for each in printed)


def test_healthy(watching: RunningAgent) -> None:
    """Jobs whose replicas are equal, or rightly differ, have no verdict, and their checks are read."""
    job = Job(watching.directory, Flip("healthy", 0, ""))

    def checks() -> float:
        return watching.samples().get('commwatch_replica_checks_total{job_id="healthy-ddp-python"}', 0.0)

    try:
        wait_for(lambda: checks() > 150, "the checks of all ways of training")
        assert verdicts_of(watching, "healthy-ddp-python") == []
    finally:
        printed = job.end()
    own = [line for each in printed for line in each.splitlines() if line.startswith("commwatch")]
    assert (
        own
        == ["commwatch: replicas are not compared where ranks step on gradients of their own (no_sync, local SGD)"] * 3
    )


@pytest.mark.parametrize("hook", ["python", "native"])
def test_same_training(watching: RunningAgent, hook: str) -> None:
    """Losses, weights and the state of the random numbers are equal, bit for bit, with checks at each step and without."""

    def trained(**more: str) -> list[str]:
        ranks = Job(watching.directory, Flip("trained", 0, "", hook=hook), **more).ranks
        printed = [rank.communicate(timeout=120)[0] for rank in ranks]
        return sorted(line for each in printed for line in each.splitlines() if line.startswith("said"))

    with_checks = trained()
    assert len(with_checks) == 3
    assert with_checks == trained(COMMWATCH_CHECKSUMS="off") == trained(COMMWATCH="0")
