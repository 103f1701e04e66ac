"""Real jobs in which one bit of a collective flips on one rank: the verdict names the rank, the operation and where it came from; healthy ones have none."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.e2e.checked_job import CheckedJob, own, verdicts_of
from tests.helpers import RunningAgent, agent, wait_for

AT = 20
#: The kinds of jobs, as they print them at their end.
HEALTHY = ("unused_parameters", "sharded", "tensor_parallel", "pipelined", "experts", "unusual")
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
        return self.op.removesuffix("_into_tensor").removesuffix("_single")


FLIPS = (
    Flip("all_reduce", "received", 1, "result", (1,), "the result of rank 1 differs from that of ranks 0, 2"),
    Flip("all_reduce", "received", 0, "one_of", (0, 1), "one of ranks 0-1", ranks=2),
    Flip("all_gather", "sent", 1, "sent", (1,), "received other data than rank 1 was to send", call="async"),
    Flip("all_gather_into_tensor", "received", 1, "received", (1,), "rank 1 received other data than rank 0 sent"),
    Flip("broadcast", "received", 2, "received", (2,), "rank 2 received other data than rank 1 sent", call="async"),
    Flip("all_to_all", "sent", 2, "one_of", (0, 2), "one of ranks 0, 2"),
    Flip("all_to_all_single", "everywhere", 1, "received", (1,), "rank 1 received other data than rank"),
)  # fmt: skip
#: The same operations, flipped in another way.
MORE_FLIPS = (
    Flip("all_reduce", "received", 0, "result", (0,), "the result of rank 0 differs from that of ranks 1-2", call="async"),
    Flip("all_gather", "received", 2, "received", (2,), "rank 2 received other data than rank 0 sent"),
    Flip("broadcast", "sent", 1, "sent", (1,), "received other data than rank 1 was to send"),
    Flip("all_to_all", "received", 1, "one_of", (0, 1), "one of ranks 0-1", call="async"),
    Flip("all_to_all_single", "received", 2, "one_of", (0, 2), "one of ranks 0, 2"),
    Flip("all_to_all_single", "received", 1, "one_of", (0, 1), "one of ranks 0-1", call="async"),
)  # fmt: skip


def started(
    directory: Path,
    name: str,
    ranks: int,
    *arguments: str,
    script: str = "corrupt_collective.py",
    hook: str = "native",
    checks: str = "collectives",
) -> CheckedJob:
    """A job whose collectives are all compared."""
    return CheckedJob(directory, name, ranks, script, *arguments, COMMWATCH_HOOK=hook, COMMWATCH_CHECKSUMS=checks)


@pytest.fixture(scope="module")
def watching(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningAgent]:
    """An agent."""
    with agent(tmp_path_factory.mktemp("collectives")) as running:
        yield running


def compared(running: RunningAgent, job: str) -> float:
    """How many collectives of a job were compared."""
    return running.samples().get(f'commwatch_collective_checks_total{{job_id="{job}"}}', 0.0)


@pytest.mark.parametrize(
    "flip",
    [*FLIPS, *(pytest.param(flip, marks=pytest.mark.long) for flip in MORE_FLIPS)],
    ids=lambda flip: flip.job,
)
def test_flip(watching: RunningAgent, flip: Flip) -> None:
    """A flip is found in its operation, and only there, although the user overwrites the data at once; rank and origin are right."""
    job = started(watching.directory, flip.job, flip.ranks, flip.op, str(flip.rank), str(AT), flip.where, flip.call)
    try:
        (verdict,) = wait_for(lambda: verdicts_of(watching, flip.job), f"the verdict on {flip.job}")
        until = compared(watching, flip.job) + 20
        wait_for(lambda: compared(watching, flip.job) > until, "later operations")
        later = verdicts_of(watching, flip.job)[0]
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
    """The report of the job has what was found."""
    job = started(watching.directory, "reported", 3, "broadcast", "2", str(AT), "received", "sync")

    def corruption() -> list[dict[str, Any]]:
        known = "reported" in [each["job_id"] for each in watching.get("/api/v1/jobs")]
        found = watching.get("/api/v1/report?job=reported")["incidents"] if known else []
        return [each for each in found if each["kind"] == "corruption"]

    try:
        (found,) = wait_for(corruption, "the verdict in the report")
    finally:
        job.end()
    assert f"rank 2 received other data than rank 1 sent: broadcast {AT} of group default_pg" in found["says"]


def test_healthy(watching: RunningAgent) -> None:
    """Jobs of several kinds have no verdict, with all checks at each operation and step."""
    job = started(watching.directory, "healthy", 4, "healthy", "0", "0", "-", "-", checks="all")
    try:
        wait_for(lambda: compared(watching, "healthy") > 500, "the checks of all jobs")
        assert verdicts_of(watching, "healthy") == []
    finally:
        printed = job.end()
    assert own(printed) == []
    assert all(printed.count(kind) == 4 for kind in HEALTHY)


def test_python_hook(watching: RunningAgent) -> None:
    """The Python hook records as ever, and prints once why it does not check collectives."""
    job = started(watching.directory, "python", 2, "all_reduce", "0", str(AT), "received", "sync", hook="python")

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

    def trained(checks: str) -> list[str]:
        arguments = ("trained", "0", "0", "ddp")
        return started(watching.directory, "trained", 3, *arguments, script="corrupt.py", checks=checks).said()

    with_checks = trained("all")
    assert len(with_checks) == 3
    assert with_checks == trained("off")
