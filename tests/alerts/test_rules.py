"""The recording rules for Prometheus, as they are exported: the late rank of a job on several nodes is named, and no other."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest

from commwatch_alerts.catalogue import read, shipped
from commwatch_alerts.export import prometheus
from tests.alerts.promtool import promtool

SHARE = "job_rank:commwatch_period_comm_share:"
#: Seconds between scrapes, and between evaluations.
EVERY_S = 5
#: How long a job is watched, in seconds.
WATCHED_S = 300
#: Without alerts, which are not looked at here.
RULES = prometheus(replace(read(shipped("rules.yaml")), alerts=()))
Series = dict[str, str]
#: Seconds that a rank communicates in a step, by rank and number of the step.
Comm = Callable[[int, int], float]


class Job(NamedTuple):
    """A job whose ranks take turns on two nodes."""

    comm: Comm
    ranks: int = 4
    step_s: float = 0.1
    agents: str = "ab"
    #: Ranks are scraped until then, in seconds; by default to the end.
    until_s: Mapping[int, int] = {}
    watched_s: int = WATCHED_S
    #: By how many seconds an agent is scraped earlier than the others, by its name.
    earlier_s: Mapping[str, float] = {}

    def series(self) -> Series:
        """In promtool's notation."""
        found: Series = {}
        for rank in range(self.ranks):
            agent = f'instance="{self.agents[rank % len(self.agents)]}:9477",job_id="job"'
            scrapes = 1 + self.until_s.get(rank, self.watched_s) // EVERY_S
            gone = " stale" if rank in self.until_s else ""
            for name, values in self._counters(rank, scrapes).items():
                found[f'commwatch_{name}{{{agent},rank="{rank}"}}'] = (
                    " ".join(f"{value:.9g}" for value in values) + gone
                )
            found[f'commwatch_rank_info{{{agent},rank="{rank}"}}'] = f"1x{scrapes - 1}{gone}"
            found[f'commwatch_job_info{{{agent},world_size="{self.ranks}"}}'] = f"1x{scrapes - 1}"
        return found

    def _counters(self, rank: int, scrapes: int) -> dict[str, list[float]]:
        names = (
            "periods_total",
            "period_seconds_total",
            "period_comm_seconds_total",
            "period_comm_square_seconds_total",
        )
        values: dict[str, list[float]] = {name: [] for name in names}
        steps, comm, squares = 0, 0.0, 0.0
        earlier_s = self.earlier_s.get(self.agents[rank % len(self.agents)], 0.0)
        for scrape in range(scrapes):
            while (steps + 1) * self.step_s <= scrape * EVERY_S - earlier_s + 1e-9:
                each = self.comm(rank, steps)
                steps, comm, squares = steps + 1, comm + each, squares + each**2
            for name, value in zip(names, (steps, steps * self.step_s, comm, squares), strict=True):
                values[name].append(value)
        return values


#: Stragglers with their lateness in thousandths; and only who they are.
STRAGGLERS, WHO = f"round(1e3 * {SHARE}straggler)", f"{SHARE}straggler > bool 0"


def evaluated(
    directory: Path, series: Series, looks: Mapping[int, Mapping[int, float]], expr: str = STRAGGLERS
) -> None:
    """Have ``promtool`` evaluate the rules; at so many seconds ``expr`` must have these ranks, with their values."""
    all_evaluated(directory, series, {expr: looks})


def all_evaluated(directory: Path, series: Series, by_expr: Mapping[str, Mapping[int, Mapping[int, float]]]) -> None:
    """The same of several expressions at once."""
    test = {
        "interval": f"{EVERY_S}s",
        "input_series": [{"series": name, "values": values} for name, values in series.items()],
        "promql_expr_test": [
            {
                "expr": expr,
                "eval_time": f"{at_s}s",
                "exp_samples": [{"labels": f'{{job_id="job",rank="{rank}"}}', "value": v} for rank, v in ranks.items()],
            }
            for expr, looks in by_expr.items()
            for at_s, ranks in looks.items()
        ],
    }
    (directory / "rules.yaml").write_text(RULES, encoding="utf-8")
    whole = {"rule_files": [str(directory / "rules.yaml")], "evaluation_interval": f"{EVERY_S}s", "tests": [test]}
    (directory / "test.yaml").write_text(json.dumps(whole))
    done = promtool("test", "rules", directory / "test.yaml")
    assert done.returncode == 0, done.stdout + done.stderr


def never(directory: Path, series: Series, watched_s: int = WATCHED_S) -> None:
    """No rank is a straggler at any time."""
    evaluated(directory, series, {at_s: {} for at_s in range(0, watched_s + 1, EVERY_S)})


def uneven(seed: int, work_s: float = 0.05) -> Comm:
    """Each rank computes a random time up to ``work_s`` in each step, and waits for the longest."""
    rng, steps = random.Random(seed), list[list[float]]()

    def comm(rank: int, step: int) -> float:
        while len(steps) <= step:
            steps.append([rng.uniform(0, work_s) for _ in range(8)])
        return 0.005 + max(steps[step]) - steps[step][rank]

    return comm


def late(*culprits: int, by_s: float = 0.04, usual_s: float = 0.01, beside: Comm = lambda *_: 0.0) -> Comm:
    """The others communicate so much longer than these ranks, besides what all do."""
    return lambda rank, step: usual_s + (by_s if rank not in culprits else 0.0) + beside(rank, step)


def late_in(steps: range, culprit: int, by_s: float) -> Comm:
    """The others communicate so much longer than a rank, in these steps only."""
    return lambda rank, step: 0.01 + (by_s if step in steps and rank != culprit else 0.0)


@pytest.mark.parametrize("culprit", range(4))
def test_late_rank(tmp_path: Path, culprit: int) -> None:
    """The rank of four that communicates least is the straggler, by what the median of the others communicates more."""
    series = Job(lambda rank, _: 0.01 if rank == culprit else 0.05 + rank / 1000).series()
    others = sorted(50 + rank for rank in range(4) if rank != culprit)
    evaluated(tmp_path, series, {WATCHED_S: {culprit: 10 * (others[1] - 10)}})


@pytest.mark.parametrize(("ranks", "culprits"), [(2, (1,)), (3, (0,)), (4, (1, 3)), (8, (6,)), (8, (0, 1))])
def test_sizes_and_several(tmp_path: Path, ranks: int, culprits: tuple[int, ...]) -> None:
    """One late rank of two (one a node) to eight, or two, are named with the whole difference."""
    evaluated(tmp_path, Job(late(*culprits), ranks).series(), {WATCHED_S: dict.fromkeys(culprits, 400)})


@pytest.mark.parametrize(
    ("job", "lateness"),
    [
        (Job(lambda rank, step: 0.01 if rank == 2 or step % 2 else 0.09), 400),
        (Job(lambda rank, step: 0.01 if rank == 2 or step % 4 else 0.33), 800),
        (Job(late(2, by_s=0.006)), 60),
        (Job(late(2, by_s=2.0, usual_s=1.0), step_s=10.0), 200),
        (Job(late(2, by_s=3.0, usual_s=6.0), step_s=30.0, watched_s=600), 100),
        (Job(late(2, usual_s=0.0, beside=uneven(1))), None),
    ],
    ids=["every second step", "one step in four", "6%", "steps of 10 s", "steps of 30 s", "uneven"],
)
def test_kinds_of_lateness(tmp_path: Path, job: Job, lateness: int | None) -> None:
    """A rank that is late now and then, a little, in long steps, or among uneven ones is named."""
    series = job.series()
    if lateness is None:
        evaluated(tmp_path, series, {job.watched_s: {2: 1}}, WHO)
    else:
        evaluated(tmp_path, series, {job.watched_s: {2: lateness}})


@pytest.mark.parametrize("share", [0.01, 0.5, 0.95])
def test_even(tmp_path: Path, share: float) -> None:
    """Where all ranks communicate as long, however slow the link, none is late; nor where they differ by less than 5% of the time."""
    series = Job(lambda *_: share / 10).series()
    evaluated(tmp_path, series, {WATCHED_S: dict.fromkeys(range(4), 0)}, f"round(1e3 * {SHARE}lateness)")
    never(tmp_path, Job(lambda rank, _: share / 10 + rank * 0.0015).series())


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
@pytest.mark.parametrize("seed", range(3))
def test_uneven(tmp_path: Path, ranks: int, seed: int) -> None:
    """Ranks whose work is random, in steps of 0.1 s and of 2 s, are not named by chance."""
    never(tmp_path, Job(uneven(seed), ranks).series())
    long = uneven(seed + 100, work_s=1.0)
    never(tmp_path, Job(long, ranks, step_s=2.0).series())


@pytest.mark.parametrize(
    "comm",
    [
        lambda rank, step: 0.01 if rank == step % 4 else 0.05,
        lambda rank, step: 0.005 if rank == 0 or step % 60 else 1.005,
        lambda rank, step: 0.01 + 0.002 * rank,
    ],
    ids=["late in turn", "checkpoints", "a little more from rank to rank"],
)
def test_no_straggler(tmp_path: Path, comm: Comm) -> None:
    """Ranks that are late in turn, a rank that saves checkpoints, and ranks with a little more work each are no stragglers."""
    never(tmp_path, Job(comm).series())


def test_stages(tmp_path: Path) -> None:
    """Stages of a pipeline, which wait for messages, are uneven; one that is waited for twice as long as it waits is a straggler."""

    def stages(*waits: float) -> Series:
        messages = 'commwatch_p2p_wait_seconds_total{instance="a:9477",job_id="job",rank="0",group="pp"}'
        return {**Job(lambda rank, _: waits[rank]).series(), messages: f"0+1x{WATCHED_S // EVERY_S}"}

    never(tmp_path, stages(0.03, 0.04, 0.05, 0.05))
    evaluated(tmp_path, stages(0.06, 0.02, 0.06, 0.05), {WATCHED_S: {1: 400}})


def test_node_that_is_not_scraped(tmp_path: Path) -> None:
    """Of a job whose ranks are not all there nothing is known: neither at first, nor once a node is no longer scraped."""
    series = Job(late(3)).series()
    here = {name: values for name, values in series.items() if 'instance="a' in name}
    evaluated(tmp_path, here, {WATCHED_S: {}}, f"{SHARE}rate")
    gone = Job(late(3), until_s={1: 150, 3: 150}).series()
    evaluated(tmp_path, gone, {150: {3: 400}, 160: {}, WATCHED_S: {}})


def test_restart(tmp_path: Path) -> None:
    """Counters that begin again with their agent change nothing."""
    series = Job(late(3)).series()
    again = Job(late(3), watched_s=WATCHED_S // 2).series()
    for name, values in again.items():
        if 'rank="3"' in name and "_total" in name:
            series[name] = f"{values} {values.split(' ', 1)[1]}"
    evaluated(tmp_path, series, {WATCHED_S: {3: 400}})


def test_job_of_one_agent(tmp_path: Path) -> None:
    """A job all of whose ranks one agent sees has no straggler by these rules: that agent knows better."""
    never(tmp_path, Job(late(3), agents="a").series())


def test_scraped_twice(tmp_path: Path) -> None:
    """An agent that two scrape jobs scrape counts once."""
    series = Job(late(1), ranks=2).series()
    twice = {name.replace("{", f'{{job="{job}",'): values for name, values in series.items() for job in "ab"}
    evaluated(tmp_path, twice, {WATCHED_S: {1: 400}})


def test_idle(tmp_path: Path) -> None:
    """Ranks that make no steps have no share, and so no lateness."""
    evaluated(tmp_path, Job(late(3), step_s=1e6).series(), {WATCHED_S: {}}, f"{SHARE}rate")


@pytest.mark.parametrize("by_s", [0.015, 0.06])
def test_found_soon(tmp_path: Path, by_s: float) -> None:
    """Who begins to cost the others 15% of the time, or 60%, is named within half a minute, and forgotten two minutes after."""
    job = Job(late_in(range(3000, 4500), 3, by_s), watched_s=600)
    looks = {295: {}, 330: {3: 1}, 440: {3: 1}, 570: {}}
    evaluated(tmp_path, job.series(), looks, WHO)


@pytest.mark.parametrize("earlier_s", [3.0, 4.9])
@pytest.mark.parametrize("agents", ["ab", "abbb", "abcd"])
def test_scraped_at_different_times(tmp_path: Path, agents: str, earlier_s: float) -> None:
    """While a rank begins to be late, and while it catches up, no other is named because its agent was scraped earlier."""
    for culprit, begins in itertools.product((0, 3), (3000, 3025)):
        faulty = late_in(range(begins, begins + 1000), culprit, by_s=0.06)
        job = Job(faulty, agents=agents, watched_s=500, earlier_s={"b": earlier_s})
        looks = {at_s: dict[int, float]() for at_s in range(290, 500, EVERY_S)}
        others = f'{SHARE}straggler{{rank!="{culprit}"}}'
        all_evaluated(tmp_path, job.series(), {others: looks, WHO: {335: {culprit: 1}}})
