"""Runs jobs in which random bits flip (``jobs/random_flips.py``), and prints how many of the flips the agent has found, on which rank and when.

Arguments: how many flips (200), and a seed (1). Half of the jobs have three ranks, half have four.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests import prefork
from tests.faults.run import Place, ranks
from tests.helpers import RunningAgent, agent, wait_for

JOB = Path(__file__).parent / "jobs" / "random_flips.py"
#: Flips in one job, each in a training of its own.
FLIPS = 20
EACH = {"COMMWATCH_CHECKSUM_EVERY": "1", "COMMWATCH_CHECKSUM_BUDGET": "0"}


def flips(
    running: RunningAgent, name: str, size: int, count: int, seed: int
) -> Iterator[tuple[dict[str, Any], list[dict[str, Any]]]]:
    """Run one job; yield each flip with the verdicts on the weights of its training."""
    command = prefork.command(JOB, str(count), str(seed))
    with ranks(command, [Place(running.directory)] * size, name, "replicas", EACH) as started:
        told = started[0].stdout
        assert told is not None
        made = [json.loads(told.readline()) for _ in range(count)]
        steps, metric = sum(each["steps"] for each in made), f'commwatch_replica_checks_total{{job_id="{name}"}}'
        wait_for(lambda: running.samples().get(metric, 0) >= steps, f"the comparison of {steps} steps")
        verdicts = [each for each in running.get(f"/api/v1/verdicts?job={name}") if each["kind"] == "corruption"]
    for each in made:
        yield each, [verdict for verdict in verdicts if f".t{each['number']}." in f".{verdict['parameter']}"]


def judged(flip: dict[str, Any], verdicts: list[dict[str, Any]]) -> tuple[bool, bool]:
    """Return whether only the rank with the flip is named, and whether the first wrong step is exact."""
    steps = [(each["step"], f", not at step {flip['step'] - 1})" in each["says"]) for each in verdicts]
    return all(each["ranks"] == [flip["rank"]] for each in verdicts), steps == [(flip["step"], True)]


def main() -> None:
    """Run all and print a line for each flip that is not found, or not rightly, and the numbers."""
    count, seed = int((*sys.argv[1:2], "200")[0]), int((*sys.argv[2:3], "1")[0])
    changed = found = right = exact = false = 0
    with tempfile.TemporaryDirectory() as made, agent(Path(made)) as running:
        for number, first in enumerate(range(0, count, FLIPS)):
            job = flips(running, f"flips{number}", 3 + number % 2, min(FLIPS, count - first), seed + number)
            for flip, verdicts in job:
                if flip["step"] is None:
                    false += bool(verdicts)
                    continue
                changed += 1
                rank, step = judged(flip, verdicts)
                if verdicts:
                    found, right, exact = found + 1, right + rank, exact + step
                if not verdicts or not rank or not step:
                    print(number, flip, [each["says"] for each in verdicts], flush=True)
    print(
        f"{count} flips, {changed} changed a weight: {found} found, rank right in {right}, first wrong step in {exact}; "
        f"{false} verdicts on the others"
    )
    sys.exit(found < 0.99 * changed or right < found or false > 0)


if __name__ == "__main__":
    main()
