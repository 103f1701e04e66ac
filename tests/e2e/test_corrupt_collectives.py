"""Real jobs in which one bit of a collective flips on one rank: the verdict names the rank, the operation and where it came from; healthy ones have none."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests import prefork
from tests.e2e.torchjob import JOBS
from tests.helpers import RunningAgent, agent, clean_env, free_port, wait_for

AT = 20
#: The kinds of jobs, as they print them at their end.
HEALTHY = ("unused_parameters", "sharded", "tensor_parallel", "pipelined", "unusual")
NEEDS_NATIVE = "commwatch: collectives are not checked for corrupt data: that needs the native hook"


class Flip(NamedTuple):
    """What flips on which rank, in which operation, and what the verdict must be."""

    op: str
    where: str
    rank: int
    cause: str
    culprits: tuple[int, ...]
    says: str
    call: str = "sync"
    ranks: int = 3

    @property
    def job(self) -> str:
        """The name of its job."""
        return f"{self.op}-{self.where}-{self.rank}-{self.call}-{self.ranks}"

    @property
    def name(self) -> str:
        """The canonical name of the operation."""
        return self.op.removesuffix("_into_tensor")


FLIPS = (
    Flip("all_reduce", "received", 1, "result", (1,), "the result of rank 1 differs from that of rank 0, 2"),
    Flip("all_reduce", "received", 0, "result", (0,), "the result of rank 0 differs from that of rank 1-2", call="async"),
    Flip("all_reduce", "received", 0, "one_of", (0, 1), "one of the ranks 0-1", ranks=2),
    Flip("all_gather", "received", 2, "received", (2,), "rank 2 received other data than rank 0 sent"),
    Flip("all_gather", "sent", 1, "sent", (1,), "received other data than rank 1 was to send", call="async"),
    Flip("all_gather_into_tensor", "received", 1, "received", (1,), "rank 1 received other data than rank 0 sent"),
    Flip("broadcast", "received", 2, "received", (2,), "rank 2 received other data than rank 1 sent", call="async"),
    Flip("broadcast", "sent", 1, "sent", (1,), "received other data than rank 1 was to send"),
)  # fmt: skip


class Job:
    """The ranks of a job of which each collective is checked."""

    def __init__(
        self,
        directory: Path,
        name: str,
        ranks: int,
        *arguments: str,
        script: str = "corrupt_collective.py",
        **more: str,
    ) -> None:
        where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(ranks)}
        where |= {"COMMWATCH_DIR": str(directory), "COMMWATCH_JOB": name, "COMMWATCH": "1"}
        checks = {
            "COMMWATCH_HOOK": "native",
            "COMMWATCH_CHECKSUMS": "collectives",
            "COMMWATCH_CHECKSUM_EVERY": "1",
            "COMMWATCH_CHECKSUM_BUDGET": "0",
        }
        env = {**where, **checks, **more}
        command = prefork.command(JOBS / script, *arguments)
        self.ranks = [
            subprocess.Popen(command, env=clean_env(**env, RANK=str(rank)), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
            for rank in range(ranks)
        ]  # fmt: skip

    def end(self) -> list[str]:
        """Kill the ranks; return the lines that they have printed."""
        for rank in self.ranks:
            rank.kill()
        return [line for rank in self.ranks for line in rank.communicate()[1].splitlines()]


def own(printed: list[str]) -> list[str]:
    """The lines of commwatch."""
    return [line for line in printed if line.startswith("commwatch")]


@pytest.fixture(scope="module")
def watching(tmp_path_factory: pytest.TempPathFactory, native: Path) -> Iterator[RunningAgent]:
    """An agent."""
    with agent(tmp_path_factory.mktemp("collectives")) as running:
        yield running


def verdicts_of(running: RunningAgent, job: str) -> list[dict[str, Any]]:
    """The verdicts on a job, once the agent knows it."""
    if job not in [each["job_id"] for each in running.get("/api/v1/jobs")]:
        return []
    found: list[dict[str, Any]] = running.get(f"/api/v1/verdicts?job={job}")
    return [each for each in found if each["kind"] == "corruption"]


def compared(running: RunningAgent, job: str) -> float:
    """How many collectives of a job were compared."""
    return running.samples().get(f'commwatch_collective_checks_total{{job_id="{job}"}}', 0.0)


@pytest.mark.parametrize("flip", FLIPS, ids=lambda flip: flip.job)
def test_flip(watching: RunningAgent, flip: Flip) -> None:
    """A flip is found in its operation, and only there, although the user overwrites the data at once; rank and origin are right."""
    job = Job(watching.directory, flip.job, flip.ranks, flip.op, str(flip.rank), str(AT), flip.where, flip.call)
    try:
        (verdict,) = wait_for(lambda: verdicts_of(watching, flip.job), f"the verdict on {flip.job}")
        until = compared(watching, flip.job) + 20
        wait_for(lambda: compared(watching, flip.job) > until, "later operations")
        (later,) = verdicts_of(watching, flip.job)
    finally:
        printed = job.end()
    assert (verdict["cause"], tuple(verdict["ranks"])) == (flip.cause, flip.culprits)
    assert (verdict["op"], verdict["seq"]) == (flip.name, AT)
    assert flip.says in verdict["says"]
    assert f"{flip.name} {AT} of group default_pg, not in operation {AT - 1}" in verdict["says"]
    assert set(verdict["waiting"]) == set(range(flip.ranks)) - set(flip.culprits)
    assert later["says"] == verdict["says"]  # without a number of times
    assert own(printed) == []


def test_report(watching: RunningAgent) -> None:
    """The report of the job has the verdict: the evidence of the alert keeps it."""
    job = Job(watching.directory, "reported", 3, "broadcast", "2", str(AT), "received", "sync")

    def corruption() -> list[dict[str, Any]]:
        known = "reported" in [each["job_id"] for each in watching.get("/api/v1/jobs")]
        found: list[dict[str, Any]] = watching.get("/api/v1/report?job=reported")["corruption"] if known else []
        return found

    try:
        (found,) = wait_for(corruption, "the verdict in the report")
    finally:
        job.end()
    assert f"rank 2 received other data than rank 1 sent: broadcast {AT} of group default_pg" in found["says"]


def test_healthy(watching: RunningAgent) -> None:
    """Jobs of several kinds have no verdict, with all checks at each operation and step."""
    job = Job(watching.directory, "healthy", 4, "healthy", "0", "0", "-", "-", COMMWATCH_CHECKSUMS="all")
    try:
        wait_for(lambda: compared(watching, "healthy") > 1500, "the checks of all jobs")
        assert verdicts_of(watching, "healthy") == []
    finally:
        printed = job.end()
    assert own(printed) == []
    assert all(printed.count(kind) == 4 for kind in HEALTHY)


def test_python_hook(watching: RunningAgent) -> None:
    """The Python hook records as ever, and prints once why it does not check collectives."""
    job = Job(watching.directory, "python", 2, "all_reduce", "0", str(AT), "received", "sync", COMMWATCH_HOOK="python")

    def steps() -> bool:
        found = watching.samples().items()
        return any(
            value > 100 for name, value in found if name.startswith("commwatch_events_total") and '"python"' in name
        )

    try:
        wait_for(steps, "operations of the Python hook")
        assert (verdicts_of(watching, "python"), compared(watching, "python")) == ([], 0)
    finally:
        printed = job.end()
    assert own(printed) == [NEEDS_NATIVE]


def test_same_training(watching: RunningAgent) -> None:
    """Losses, weights and the state of the random numbers are equal, bit for bit, with all checks and without."""

    def trained(**more: str) -> list[str]:
        ranks = Job(watching.directory, "trained", 3, "trained", "0", "0", "ddp", script="corrupt.py", **more).ranks
        printed = [rank.communicate(timeout=120)[0] for rank in ranks]
        return sorted(line for each in printed for line in each.splitlines() if line.startswith("said"))

    with_checks = trained(COMMWATCH_CHECKSUMS="all")
    assert len(with_checks) == 3
    assert with_checks == trained(COMMWATCH_CHECKSUMS="off")
