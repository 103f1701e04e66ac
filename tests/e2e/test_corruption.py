"""Real jobs in which one bit flips on one rank: the verdict names rank, parameter and step; and jobs whose replicas may differ have none."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.e2e.checked_job import CheckedJob, own, verdicts_of
from tests.helpers import RunningAgent, agent, wait_for

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
    Flip("state", 0, "4.weight"),
    Flip("weight", 3, "1.weight", ranks=4, how="hsdp", cause="one_of", culprits=(1, 3)),
)
#: They make weights differ, as those above do.
MORE_FLIPS = (Flip("gradient", 1, "4.weight"), Flip("received", 2, "0.weight"))


def started(directory: Path, flip: Flip, **variables: str) -> CheckedJob:
    """A job whose replicas are compared after each step."""
    arguments = (flip.what, str(flip.rank), str(AFTER), flip.how)
    env = {"COMMWATCH_HOOK": flip.hook, "COMMWATCH_CHECKSUMS": "replicas", **variables}
    return CheckedJob(directory, flip.job, flip.ranks, "corrupt.py", *arguments, **env)


@pytest.fixture(scope="module")
def watching(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningAgent]:
    """An agent."""
    with agent(tmp_path_factory.mktemp("corruption")) as running:
        yield running


@pytest.mark.parametrize(
    "flip",
    [*FLIPS, *(pytest.param(flip, marks=pytest.mark.long) for flip in MORE_FLIPS)],
    ids=lambda flip: flip.job,
)
def test_flip(watching: RunningAgent, flip: Flip) -> None:
    """A flip is found in the step after it, and only there; the rank, the parameter and the step are right."""
    job = started(watching.directory, flip)
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
    job = started(watching.directory, Flip("healthy", 0, ""))

    def checks() -> float:
        return watching.samples().get('commwatch_replica_checks_total{job_id="healthy-ddp-python"}', 0.0)

    try:
        wait_for(lambda: checks() > 150, "the checks of all ways of training")
        assert verdicts_of(watching, "healthy-ddp-python") == []
    finally:
        printed = job.end()
    assert (
        own(printed)
        == ["commwatch: replicas are not compared where ranks step on gradients of their own (no_sync, local SGD)"] * 3
    )


def trained(directory: Path, hook: str, **more: str) -> list[str]:
    """What the ranks of a job say of its losses and weights."""
    return started(directory, Flip("trained", 0, "", ranks=2, hook=hook), **more).said()


@pytest.fixture(scope="module")
def unwatched(watching: RunningAgent) -> list[str]:
    """What they say without the probe."""
    return trained(watching.directory, "off", COMMWATCH="0")


@pytest.mark.parametrize("hook", ["python", "native"])
def test_same_training(watching: RunningAgent, unwatched: list[str], hook: str) -> None:
    """Losses, weights and the state of the random numbers are equal, bit for bit, with checks at each step and without."""
    with_checks = trained(watching.directory, hook)
    assert len(with_checks) == 2
    assert with_checks == trained(watching.directory, hook, COMMWATCH_CHECKSUMS="off") == unwatched
