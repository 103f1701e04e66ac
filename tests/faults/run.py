"""Runs the fault matrix and prints a table: what was concluded of each job, how soon, and how steadily (``make faults``).

Arguments: words; only scenarios whose name has all of them are run.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from tests.faults.scenarios import SCENARIOS, Scenario
from tests.helpers import RunningAgent, agent, clean_env, free_port

TRAIN = Path(__file__).parent / "jobs" / "train.py"
#: Seconds between two polls; for how long a job is watched from the fault on, and how long its start may take.
POLL_S, WATCHED_S, START_S = 0.5, 30.0, 120.0
#: A verdict is steady that is there in so many polls from the first one on.
STEADY = 0.9


class Outcome(NamedTuple):
    """What was concluded of one job."""

    scenario: Scenario
    #: Seconds from the fault to the first right verdict; ``None``: there was none.
    after_s: float | None
    #: Part of the polls from then on that had it.
    steady: float
    #: Wrong verdicts, as kind, cause and ranks; each once.
    wrong: tuple[str, ...]

    @property
    def right(self) -> bool:
        """The culprit in time and steadily, and nothing wrong."""
        if not self.scenario.kinds:
            return not self.wrong
        in_time = self.after_s is not None and self.after_s <= self.scenario.within_s
        return in_time and self.steady >= STEADY and not self.wrong


@contextmanager
def job(scenario: Scenario, directory: Path) -> Iterator[list[subprocess.Popen[str]]]:
    """The ranks of a scenario, each started by hand, so that nobody ends the others when one ends."""
    env = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(scenario.size)}
    ours = {"COMMWATCH": "1", "COMMWATCH_DIR": str(directory), "COMMWATCH_JOB": "faulty", "COMMWATCH_HOOK": "native"}
    ranks = ",".join(map(str, scenario.ranks))
    command = [sys.executable, str(TRAIN), scenario.shape, scenario.fault, ranks, *scenario.options]
    started = [
        subprocess.Popen(
            command,
            env=clean_env(**env, **ours, RANK=str(rank)),
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        for rank in range(scenario.size)
    ]
    try:
        yield started
    finally:
        for rank in started:
            rank.kill()
            rank.communicate()


def watch(scenario: Scenario) -> Outcome:
    """Run a scenario and poll the verdicts on it."""
    with tempfile.TemporaryDirectory() as made, agent(Path(made)) as running, job(scenario, Path(made)) as ranks:
        told = ranks[scenario.ranks[0]].stdout
        assert told is not None
        began = float(told.readline())
        polls = []
        while time.time() < began + WATCHED_S:
            polls.append((time.time() - began, verdicts(running)))
            time.sleep(POLL_S)
    return judge(scenario, polls)


def verdicts(running: RunningAgent) -> list[tuple[str, str, tuple[int, ...]]]:
    """Kind, cause and ranks of each verdict now."""
    found = running.get("/api/v1/verdicts")
    return [(verdict["kind"], verdict["cause"], tuple(verdict["ranks"])) for verdict in found]


def judge(scenario: Scenario, polls: list[tuple[float, list[tuple[str, str, tuple[int, ...]]]]]) -> Outcome:
    """What the polls come to. Two culprits may be named in one verdict, or in two."""
    right, wrong = [], list[str]()
    for at_s, found in polls:
        named = {rank for kind, _, ranks in found if kind in scenario.kinds for rank in ranks}
        right.append((at_s, named == set(scenario.ranks)))
        wrong += [
            f"{kind} {cause} {','.join(map(str, ranks))}"
            for kind, cause, ranks in found
            if kind not in scenario.kinds or not set(ranks) <= set(scenario.ranks)
        ]
    first = next((n for n, (_, is_right) in enumerate(right) if is_right), None)
    if first is None:
        return Outcome(scenario, None, 0.0, tuple(dict.fromkeys(wrong)))
    later = [is_right for _, is_right in right[first:]]
    return Outcome(scenario, right[first][0], sum(later) / len(later), tuple(dict.fromkeys(wrong)))


def line(outcome: Outcome) -> str:
    """One row of the table."""
    expected = "/".join(sorted(outcome.scenario.kinds)) or "nothing"
    after = "–" if outcome.after_s is None else f"{outcome.after_s:.1f} s"
    steady = "–" if outcome.after_s is None else f"{outcome.steady:.0%}"
    verdict = "right" if outcome.right else "WRONG"
    return (
        f"| {outcome.scenario.name} | {expected} | {verdict} | {after} | {steady} | {'; '.join(outcome.wrong) or '–'} |"
    )


def main() -> None:
    """Run what was asked for; exit code 1 if a conclusion is wrong."""
    chosen = [each for each in SCENARIOS if all(word in each.name for word in sys.argv[1:])]
    print(
        "| job, fault, ranks at fault | expected | conclusion | after | steady | also said |\n|---|---|---|---|---|---|"
    )
    outcomes = []
    for scenario in chosen:
        outcomes.append(watch(scenario))
        print(line(outcomes[-1]), flush=True)
    right = sum(outcome.right for outcome in outcomes)
    print(f"\n{right} of {len(outcomes)} right")
    sys.exit(right < len(outcomes))


if __name__ == "__main__":
    main()
