"""Runs the fault matrix and prints a table: what was concluded of each job, how soon, and how steadily (``make faults``).

Arguments: words; only scenarios whose name has all of them are run. ``AT_ONCE`` in the environment: so many at a time; ``HOOK``: ``python`` in place of
``native``; ``KEEP``: a folder for the records of each job from some seconds before the fault on (``recorded``).
"""

from __future__ import annotations

import os
import re
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
from tests.faults import recorded
from tests.faults.scenarios import CHECKED, LATE, RHYTHM, SCENARIOS, Scenario
from tests.helpers import agent, clean_env, commwatch

TRAIN = Path(__file__).parent / "jobs" / "train.py"
#: Seconds between two polls.
POLL_S = 0.5
HOOK = os.environ.get("HOOK", "native")
#: Where to keep the records of each job, and of how many seconds before and after the fault.
KEEP, KEPT_S = os.environ.get("KEEP", ""), (4.0, 18.0)
#: How jobs are checked for corrupt data: each tenth step and one in ten collectives, within 1% of the time.
CHECKS = {"COMMWATCH_CHECKSUM_EVERY": "10", "COMMWATCH_CHECKSUM_BUDGET": "0.01"}
#: Alerts that are right in a job without a fault: it may communicate much.
TRUE_SHARES = ("CommShareHigh", "CommShareCritical", "ExposedCommHigh")
#: Kinds of incidents of which that is true, too; and how long before its fault an incident may have begun.
TRUE_KINDS, EARLY_S = ("comm_bound", "exposed_comm", "bandwidth_low"), 30.0
#: A verdict must have ended so many seconds after its fault.
ENDS_S = 15.0
#: A verdict is steady that is there in so many polls from the first one on.
STEADY = 0.9


#: Seconds from the fault, and kind, cause and ranks of each verdict then.
Poll = tuple[float, list[tuple[str, str, tuple[int, ...]]]]


class JobEnded(Exception):
    """A job ended, which it never should."""


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
        for process in started:
            with process:  # closes its output, and waits
                process.kill()


@contextmanager
def job(scenario: Scenario, places: Sequence[Place], name: str = "faulty") -> Iterator[IO[str]]:
    """The ranks of a scenario.

    Returns:
        The output of the first rank at fault.
    """
    at_fault = ",".join(map(str, scenario.ranks))
    command = prefork.command(TRAIN, scenario.shape, scenario.fault, at_fault, *scenario.options)
    with ranks(command, places, name, scenario.checks) as started:
        told = started[scenario.ranks[0]].stdout
        assert told is not None
        yield told


def watch(scenario: Scenario) -> Outcome:
    """Run a scenario and poll the verdicts on it for its time from the fault on, or from its end if it ends."""
    watched_s = scenario.watched_s + (scenario.lasts_s or 0.0)
    with (
        tempfile.TemporaryDirectory() as made,
        agent(Path(made)) as running,
        job(scenario, [Place(Path(made))] * scenario.size) as told,
    ):
        began = began_at(told)
        polls, found, views = list[Poll](), list[dict[str, Any]](), list[recorded.Views]()
        while time.time() < began + watched_s:
            if KEEP and scenario.hangs:
                views.append((time.time() - began, running.get("/api/v1/ranks"), running.get("/api/v1/groups")))
            found = running.get("/api/v1/verdicts")
            polls.append((time.time() - began, [(each["kind"], each["cause"], tuple(each["ranks"])) for each in found]))
            time.sleep(POLL_S)
        advice = [(each["rule"], each["title"]) for each in running.get("/api/v1/advice")]
        alerts = running.get("/api/v1/alerts")
        incidents = running.get("/api/v1/incidents?state=open&state=ended")
        ranks_there = running.get("/api/v1/ranks")
        shown = commwatch("top", "--once", "--address", running.url, env=clean_env(COLUMNS="240"))
        if KEEP:
            path = Path(KEEP) / recorded.file_name(scenario.name)
        if KEEP and scenario.hangs:
            recorded.keep_views(views, path)
        elif KEEP and not scenario.checks:
            recorded.keep(sorted(Path(made, "rings").glob("*.ring")), path, began - KEPT_S[0], began + KEPT_S[1])
        headline = next((line for line in shown.stdout.splitlines() if line.startswith("comm ")), "")
    judged = judge(scenario, polls)
    silent = [shown.stderr.strip()] if shown.returncode else []
    silent += [] if scenario.hangs else trained_on(scenario, ranks_there)
    why = [f"why: {each['why']}" for each in found if scenario.why not in (each["why"] or "")]
    return judged._replace(
        wrong=(
            *judged.wrong,
            *reported(scenario, advice, headline, found),
            *alerted(scenario, alerts),
            *remembered(scenario, began, incidents),
            *why,
            *silent,
        )
    )


def began_at(told: IO[str]) -> float:
    """Return the Unix time at which the fault began, as its rank prints it.

    Raises:
        JobEnded: the rank ended before.
    """
    printed = told.readline()
    if not printed:
        raise JobEnded("the job ended before its fault began")
    return float(printed)


def trained_on(scenario: Scenario, ranks_there: list[dict[str, Any]]) -> list[str]:
    """Return what is wrong with a job that should have gone on to the end: its ranks run, in the life that the fault leaves them."""
    life = int(scenario.fault.startswith("restart"))
    running = [each for each in ranks_there if each["state"] == "running" and each["restart"] == life]
    return [] if len(running) == scenario.size else [f"only {len(running)} ranks run"]


def reported(
    scenario: Scenario, advice: list[tuple[str, str]], headline: str, found: list[dict[str, Any]]
) -> list[str]:
    """What is wrong in the first advice and in the line on communication, beside the latest verdicts.

    A straggler comes first in the advice, and an even job names no rank. Above the 30% line the headline names the straggler.
    Communication is not the bottleneck where waiting for the straggler is most of it.
    """
    late = [title for rule, title in advice if rule == "straggler"]
    if scenario.lasts_s is not None:  # it is long over
        return []
    if scenario.kinds != LATE:
        return [f"advice: {title}" for title in late if not scenario.kinds]
    expected = " ".join(("rank" + "s" * (len(scenario.ranks) > 1), ", ".join(map(str, scenario.ranks)), ""))
    wrong = []
    if headline and not (advice and advice[0][1].startswith(expected)):
        wrong.append(f"first advice: {advice[0][1] if advice else 'none'}")
    if "above 30%" in headline and expected.strip() not in headline:
        wrong.append(f"headline: {headline}")
    share = re.search(r"(\d+)%", headline)
    others = 1 - len(scenario.ranks) / scenario.size  # the share is a mean over all ranks, of which these wait
    cost = others * max((each["cost_share"] or 0.0 for each in found), default=0.0)
    if "communication is the bottleneck" in headline and share and 200 * cost > int(share[1]):
        wrong.append("headline: communication is the bottleneck")
    return wrong


def alerted(scenario: Scenario, alerts: dict[str, list[dict[str, Any]]]) -> list[str]:
    """What is wrong in the alerts, pending ones too: an even job has none but on a true share, and none names a rank that is not at fault."""
    every = [each for some in alerts.values() for each in some if not excused(scenario, each)]
    if not scenario.kinds:
        return [f"alert: {each['name']}" for each in every if each["name"] not in TRUE_SHARES]
    named = [(each["name"], each["labels"]["rank"]) for each in every if "rank" in each["labels"]]
    return [f"alert: {name} of rank {rank}" for name, rank in named if int(rank) not in scenario.ranks]


def excused(scenario: Scenario, found: dict[str, Any]) -> bool:
    """Whether an alert or an incident is information on a long wait of a job that has such waits."""
    return scenario.rhythm and found["severity"] == "info"


def remembered(scenario: Scenario, began: float, incidents: list[dict[str, Any]]) -> list[str]:
    """What is wrong in the incidents: those of the fault name its ranks and its begin, and all others are their consequences or a true share."""
    incidents = [one for one in incidents if not excused(scenario, one)]
    of_fault = [one for one in incidents if one["kind"] in {*scenario.kinds, "rank_lost"}]
    others = [
        one for one in incidents if one not in of_fault and one["kind"] not in TRUE_KINDS and not one["consequence_of"]
    ]
    wrong = [f"incident: {one['kind']} {one['cause']} {one['ranks']}" for one in others]
    if not scenario.kinds:
        return wrong + [f"incident: {one['kind']} {one['ranks']}" for one in of_fault]
    named = {rank for one in of_fault for rank in one["ranks"]}
    wrong += [] if named == set(scenario.ranks) else [f"incidents: ranks {sorted(named)}"]
    first = min((one["began_at"] for one in of_fault), default=began)
    # A straggler begins with the window in which it is late, a corruption with the check that shows it.
    return wrong + (
        []
        if began - EARLY_S < first < began + scenario.within_s
        else [f"incident: began {first - began:.0f} s after the fault"]
    )


def judge(scenario: Scenario, polls: list[Poll]) -> Outcome:
    """What the polls come to. Two culprits may be named in one verdict, or in two."""
    right, wrong = [], list[str]()
    for at_s, found in polls:
        named = {rank for kind, _, ranks in found if kind in scenario.kinds for rank in ranks}
        if scenario.lasts_s is None or at_s < scenario.lasts_s:
            right.append((at_s, named == set(scenario.ranks)))
        elif named and at_s >= scenario.lasts_s + ENDS_S:
            wrong.append("a verdict after the fault's end")
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


def run(scenarios: Iterable[Scenario], watch: Callable[[Scenario], Outcome]) -> None:
    """Run those of the scenarios that were asked for and print the table; exit code 1 if a conclusion is wrong."""
    chosen = [each for each in scenarios if all(word in each.name for word in sys.argv[1:])]
    print(
        "| job, fault, ranks at fault | expected | conclusion | after | steady | also said |\n|---|---|---|---|---|---|"
    )
    outcomes = list[Outcome]()

    def outcome_of(scenario: Scenario) -> Outcome:
        try:
            return watch(scenario)
        except JobEnded as error:
            return Outcome(scenario, None, 0.0, (str(error),))

    for at_once, some in (
        (int(os.environ.get("AT_ONCE", "1")), [each for each in chosen if not each.alone]),
        (1, [each for each in chosen if each.alone]),
    ):
        with ThreadPoolExecutor(at_once) as pool:
            for outcome in pool.map(outcome_of, some):
                outcomes.append(outcome)
                print(line(outcome), flush=True)
    right = sum(outcome.right for outcome in outcomes)
    print(f"\n{right} of {len(outcomes)} right")
    sys.exit(right < len(outcomes))


if __name__ == "__main__":
    run([*SCENARIOS, *CHECKED, *RHYTHM], watch)
