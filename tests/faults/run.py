"""Runs the fault matrix and prints a table: what was concluded of each job, how soon, and how steadily (``make faults``).

Arguments: words; only scenarios whose name has all of them are run. ``AT_ONCE`` in the environment: so many at a time.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

from tests.faults.scenarios import LATE, SCENARIOS, Scenario
from tests.helpers import RunningAgent, agent, clean_env, commwatch, free_port

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
    #: Wrong verdicts, as kind, cause and ranks; each once. And what is wrong in the report.
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


def watch(scenario: Scenario, watched_s: float = WATCHED_S) -> Outcome:
    """Run a scenario and poll the verdicts on it for so long from the fault on."""
    with tempfile.TemporaryDirectory() as made, agent(Path(made)) as running, job(scenario, Path(made)) as ranks:
        told = ranks[scenario.ranks[0]].stdout
        assert told is not None
        began = float(told.readline())
        polls = []
        while time.time() < began + watched_s:
            polls.append((time.time() - began, verdicts(running)))
            time.sleep(POLL_S)
        advice = [(each["rule"], each["title"]) for each in running.get("/api/v1/advice")]
        shown = commwatch("top", "--once", "--port", str(urlsplit(running.url).port)).stdout
        headline = next((line for line in shown.splitlines() if line.startswith("comm ")), "")
    found = judge(scenario, polls)
    return found._replace(wrong=(*found.wrong, *reported(scenario, advice, headline)))


def reported(scenario: Scenario, advice: list[tuple[str, str]], headline: str) -> list[str]:
    """What is wrong in the first advice and in the line on communication: a straggler comes first there, and no rank in an even job."""
    late = [title for rule, title in advice if rule == "straggler"]
    if scenario.kinds != LATE:
        return [f"advice: {title}" for title in late if not scenario.kinds]
    expected = " ".join(("rank" + "s" * (len(scenario.ranks) > 1), ", ".join(map(str, scenario.ranks)), ""))
    wrong = []
    if headline and not (advice and advice[0][1].startswith(expected)):
        wrong.append(f"first advice: {advice[0][1] if advice else 'none'}")
    if "communication is the bottleneck" in headline:
        wrong.append("headline: communication is the bottleneck")
    return wrong


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
    outcomes = list[Outcome]()
    with ThreadPoolExecutor(int(os.environ.get("AT_ONCE", "1"))) as pool:
        for outcome in pool.map(watch, chosen):
            outcomes.append(outcome)
            print(line(outcome), flush=True)
    right = sum(outcome.right for outcome in outcomes)
    print(f"\n{right} of {len(outcomes)} right")
    sys.exit(right < len(outcomes))


if __name__ == "__main__":
    main()
