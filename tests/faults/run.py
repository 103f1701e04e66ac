"""Runs the fault matrix and prints a table: what was concluded of each job, how soon, and how steadily (``make faults``).

Arguments: words; only scenarios whose name has all of them are run, and only those that have no result yet (``results``). In the environment:
``AT_ONCE``, so many at a time; ``RUNS``, so many results of each; ``BUSY``, so many processes beside them that each want a core; ``HOOK``, ``python``
in place of ``native``; ``KEEP``, a folder for recordings of each job (``recorded``); ``DEVICE``, ``cuda`` for jobs on NCCL and this machine's GPUs.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, NamedTuple

from tests import prefork
from tests.e2e.torchjob import kill_ranks
from tests.faults import recorded, results
from tests.faults.judging import Outcome, Poll, alerted, judge, remembered, reported, trained_on
from tests.faults.scenarios import LISTS, Scenario
from tests.helpers import RunningAgent, agent, clean_env, commwatch

TRAIN = Path(__file__).parent / "jobs" / "train.py"
#: Seconds between two polls.
POLL_S = 0.5
HOOK, DEVICE = os.environ.get("HOOK", "native"), os.environ.get("DEVICE", "cpu")
#: Where to keep the records of each job, and of how many seconds before and after the fault: a job with long waits, as long as it is watched.
KEEP, KEPT_S = os.environ.get("KEEP", ""), (4.0, 18.0)
#: How jobs are checked for corrupt data: each tenth step and one in ten collectives, within 1% of the time.
CHECKS = {"COMMWATCH_CHECKSUM_EVERY": "10", "COMMWATCH_CHECKSUM_BUDGET": "0.01"}


class JobEnded(Exception):
    """A job ended, which it never should."""


class Place(NamedTuple):
    """Where a rank runs."""

    #: Of the agent that watches it.
    directory: Path
    #: What runs a command there, if not here.
    there: tuple[str, ...] = ()
    #: The network device to use; empty: any.
    device: str = ""


@contextmanager
def ranks(
    command: list[str],
    places: Sequence[Place],
    name: str,
    checks: str = "",
    schedule: Mapping[str, str] = CHECKS,
) -> Iterator[list[subprocess.Popen[str]]]:
    """The ranks of a job, each started by itself, so that none ends when another does; killed at the end.

    Args:
        checks: what is checked for corrupt data, as in ``Scenario``.
        schedule: how often.
    """
    env = {"WORLD_SIZE": str(len(places)), "STORE": str(places[0].directory / f"{name}.store")}
    if checks:
        env |= {"COMMWATCH_CHECKSUMS": checks, **schedule}
    started = list[subprocess.Popen[str]]()
    try:
        for rank, place in enumerate(places):
            watched = {"COMMWATCH": "1", "COMMWATCH_DIR": str(place.directory), "COMMWATCH_JOB": name}
            gloo = {"GLOO_SOCKET_IFNAME": place.device} if place.device else {}
            process = subprocess.Popen(
                [*place.there, *command],
                env=clean_env(**env, **watched, **gloo, COMMWATCH_HOOK=HOOK, RANK=str(rank)),
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
            )
            started.append(process)
        yield started
    finally:
        kill_ranks((place.directory for place in places), name)
        for process in started:
            process.kill()
        for process in started:
            with process:  # closes its output, and waits
                pass


@contextmanager
def job(scenario: Scenario, places: Sequence[Place], name: str = "faulty") -> Iterator[IO[str]]:
    """The ranks of a scenario.

    Returns:
        The output of the first rank at fault.
    """
    at_fault = ",".join(map(str, scenario.ranks))
    # A fork of a process that has used CUDA cannot use it.
    launcher = prefork.launcher(0) if DEVICE == "cpu" else [sys.executable]
    command = [*launcher, str(TRAIN), scenario.shape, scenario.fault, at_fault, *scenario.options]
    with ranks(command, places, name, scenario.checks) as started:
        told = started[scenario.ranks[0]].stdout
        assert told is not None
        yield told


def watch(scenario: Scenario) -> Outcome:
    """Run a scenario and poll the verdicts on it for its time from the fault on, or from its end if it ends."""
    with (
        tempfile.TemporaryDirectory() as made,
        agent(Path(made)) as running,
        job(scenario, [Place(Path(made))] * scenario.size) as told,
    ):
        began = began_at(told)
        polls, found, views = polled(running, scenario, began)
        advice = [(each["rule"], each["title"]) for each in running.get("/api/v1/advice")]
        alerts = running.get("/api/v1/alerts")
        incidents = running.get("/api/v1/incidents?state=open&state=ended")
        ranks_there = running.get("/api/v1/ranks")
        shown = commwatch("top", "--once", "--address", running.url, env=clean_env(COLUMNS="240"))
        if KEEP:
            record(scenario, Path(made, "rings"), views, began)
        headline = next((line for line in shown.stdout.splitlines() if line.startswith("comm ")), "")
    judged = judge(scenario, polls)
    silent = [shown.stderr.strip()] if shown.returncode else []
    silent += [] if scenario.hangs else trained_on(scenario, ranks_there)
    why = [f"why: {each['why']}" for each in found if scenario.why not in (each["why"] or "")]
    return judged._replace(
        wrong=(
            *judged.wrong,
            *reported(scenario, advice, headline, found),
            *alerted(scenario, alerts, incidents),
            *remembered(scenario, began, incidents),
            *why,
            *silent,
        )
    )


def polled(
    running: RunningAgent, scenario: Scenario, began: float
) -> tuple[list[Poll], list[dict[str, Any]], list[recorded.Views]]:
    """Poll for as long as the scenario is watched: its verdicts, the latest ones in whole, and what they were concluded from."""
    until = began + scenario.watched_s + (scenario.lasts_s or 0.0)
    polls, found, views = list[Poll](), list[dict[str, Any]](), list[recorded.Views]()
    while (now := time.time()) < until:
        if KEEP and (not views or now - began >= views[-1][0] + scenario.views_s):
            views.append((round(now - began, 1), running.get("/api/v1/ranks"), running.get("/api/v1/groups")))
        found = running.get("/api/v1/verdicts")
        polls.append((time.time() - began, [(each["kind"], each["cause"], tuple(each["ranks"])) for each in found]))
        time.sleep(POLL_S)
    return polls, found, views


def is_recorded(scenario: Scenario) -> bool:
    """Whether it has all its recordings."""
    names = [recorded.views_name(scenario)] * scenario.has_views
    names += [recorded.file_name(scenario.name)] * scenario.has_records
    return all(Path(KEEP, name).exists() for name in names)


def record(scenario: Scenario, rings: Path, views: list[recorded.Views], began: float) -> None:
    """Keep what tests of the rules need of a job: what was in flight, records, or both."""
    if scenario.has_views:
        recorded.keep_views(views, Path(KEEP) / recorded.views_name(scenario))
    if scenario.has_records:
        until = scenario.watched_s if scenario.rhythm else KEPT_S[1]
        path = Path(KEEP) / recorded.file_name(scenario.name)
        recorded.keep(sorted(rings.glob("*.ring")), path, began - KEPT_S[0], began + until)


def began_at(told: IO[str]) -> float:
    """Return the Unix time at which the fault began, as its rank prints it.

    Raises:
        JobEnded: the rank ended before.
    """
    printed = told.readline()
    if not printed:
        raise JobEnded("the job ended before its fault began")
    return float(printed)


@contextmanager
def busy(processes: int) -> Iterator[None]:
    """So many processes beside the jobs that each want a core."""
    loops = [subprocess.Popen([sys.executable, "-Sc", "while True: pass"]) for _ in range(processes)]
    try:
        yield
    finally:
        for loop in loops:
            with loop:
                loop.kill()


def run(scenarios: Iterable[Scenario], watch: Callable[[Scenario], Outcome], kind: str = "run") -> None:
    """Run those of the scenarios that were asked for and have no result yet, and print the table of all results; exit code 1 if a conclusion is wrong."""
    chosen = [each for each in scenarios if all(word in each.name for word in sys.argv[1:])]
    beside = int(os.environ.get("BUSY", "0"))
    folder, with_busy = results.folder(), f"-busy-{beside}" if beside else ""
    kind = kind if DEVICE == "cpu" else f"{kind}-{DEVICE}"
    for number in range(1, int(os.environ.get("RUNS", "1")) + 1):
        with busy(beside):
            run_once(chosen, watch, folder / f"{kind}-{number}{with_busy}")
    runs = {each.name: results.kept(each, chosen) for each in sorted(folder.glob(f"{kind}-*"))}
    print(results.table(chosen, runs))
    sys.exit(any(len(found) < len(chosen) or not all(one.right for one in found.values()) for found in runs.values()))


def run_once(chosen: Sequence[Scenario], watch: Callable[[Scenario], Outcome], folder: Path) -> None:
    """Run those of the scenarios that have no result in a folder."""
    missing = [each for each in chosen if not results.kept(folder, [each]) or (KEEP and not is_recorded(each))]

    def one(scenario: Scenario) -> None:
        try:
            outcome = watch(scenario)
        except (JobEnded, OSError) as error:  # or the agent does not answer: no result, and the next call runs it again
            print(f"{scenario.name}: {error}", file=sys.stderr)
            return
        results.keep(folder, outcome)
        print(results.line([outcome]), file=sys.stderr)

    for at_once, some in (
        (int(os.environ.get("AT_ONCE", "1")), [each for each in missing if not each.alone]),
        (1, [each for each in missing if each.alone]),
    ):
        with ThreadPoolExecutor(at_once) as pool:
            list(pool.map(one, some))


if __name__ == "__main__":
    run([each for some in LISTS.values() for each in some], watch)
