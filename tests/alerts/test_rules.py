"""The recording rules for Prometheus, as they are exported: the late rank of a job on several nodes is named, and no other."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from commwatch_alerts.catalogue import read, shipped
from commwatch_alerts.export import prometheus
from tests.alerts.promtool import promtool, records_for

SHARE = "job_rank:commwatch_period_comm_share:"
#: Seconds between scrapes, and between evaluations.
EVERY_S = 5
#: How long a job is watched, in seconds.
WATCHED_S = 300
LIST = read(shipped("rules.yaml"))
#: Without alerts and records that are not looked at here.
RULES = prometheus(replace(LIST, alerts=(), records=records_for(LIST, f"{SHARE}straggler")))
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


#: Stragglers with their lateness in thousandths; and only who they are. ``JOB`` stands for what chooses the job.
STRAGGLERS, WHO = f"round(1e3 * {SHARE}straggler{{JOB}})", f"{SHARE}straggler{{JOB}} > bool 0"


class Seen(NamedTuple):
    """The series of a job, and what must come of it: at so many seconds an expression must have these ranks, with their values."""

    series: Series
    looks: Mapping[int, Mapping[int, float]]
    expr: str = STRAGGLERS
    #: Begin and end of the seconds in which no rank may be a straggler, except those that the labels in ``but`` leave out.
    no_straggler_s: tuple[int, int] | None = None
    but: str = ""


def evaluated(directory: Path, **jobs: Seen) -> None:
    """Have ``promtool`` evaluate the rules over all of these jobs at once, as a Prometheus has them: it takes little longer than over one."""
    series, tests = Series(), []
    for job, seen in jobs.items():
        chosen = f'job_id="{job}"'
        series |= {name.replace('job_id="job"', chosen): values for name, values in seen.series.items()}
        tests += [
            {
                "expr": seen.expr.replace("JOB", chosen),
                "eval_time": f"{at_s}s",
                "exp_samples": [{"labels": f'{{{chosen},rank="{rank}"}}', "value": v} for rank, v in ranks.items()],
            }
            for at_s, ranks in seen.looks.items()
        ]
        if seen.no_straggler_s:
            since_s, until_s = seen.no_straggler_s
            named = f"count_over_time({SHARE}straggler{{{chosen}{seen.but}}}[{until_s - since_s + 1}s])"
            tests.append({"expr": named, "eval_time": f"{until_s}s", "exp_samples": []})
    test = {
        "interval": f"{EVERY_S}s",
        "input_series": [{"series": name, "values": values} for name, values in series.items()],
        "promql_expr_test": tests,
    }
    (directory / "rules.yaml").write_text(RULES, encoding="utf-8")
    whole = {"rule_files": [str(directory / "rules.yaml")], "evaluation_interval": f"{EVERY_S}s", "tests": [test]}
    (directory / "test.yaml").write_text(json.dumps(whole))
    done = promtool("test", "rules", directory / "test.yaml")
    assert done.returncode == 0, done.stdout + done.stderr


def never(series: Series) -> Seen:
    """No rank is a straggler at any time."""
    return Seen(series, {}, no_straggler_s=(0, WATCHED_S))


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


def test_late_rank(tmp_path: Path) -> None:
    """The rank of four that communicates least is the straggler, by what the median of the others communicates more."""

    def seen(culprit: int) -> Seen:
        others = sorted(50 + rank for rank in range(4) if rank != culprit)
        job = Job(lambda rank, _: 0.01 if rank == culprit else 0.05 + rank / 1000)
        return Seen(job.series(), {WATCHED_S: {culprit: 10 * (others[1] - 10)}})

    evaluated(tmp_path, **{f"late_{culprit}": seen(culprit) for culprit in range(4)})


def test_sizes_and_several(tmp_path: Path) -> None:
    """One late rank of two (one a node) to eight, or two, are named with the whole difference."""
    cases = ((2, (1,)), (3, (0,)), (4, (1, 3)), (8, (6,)), (8, (0, 1)))
    evaluated(
        tmp_path,
        **{
            f"late_{culprits}_of_{ranks}": Seen(
                Job(late(*culprits), ranks).series(), {WATCHED_S: dict.fromkeys(culprits, 400)}
            )
            for ranks, culprits in cases
        },
    )


def test_kinds_of_lateness(tmp_path: Path) -> None:
    """A rank that is late now and then, a little, in long steps, or among uneven ones is named."""
    jobs = {
        "every_second_step": (Job(lambda rank, step: 0.01 if rank == 2 or step % 2 else 0.09), 400),
        "one_step_in_four": (Job(lambda rank, step: 0.01 if rank == 2 or step % 4 else 0.33), 800),
        "six_percent": (Job(late(2, by_s=0.006)), 60),
        "steps_of_10_s": (Job(late(2, by_s=2.0, usual_s=1.0), step_s=10.0), 200),
        "steps_of_30_s": (Job(late(2, by_s=3.0, usual_s=6.0), step_s=30.0, watched_s=600), 100),
    }
    seen = {name: Seen(job.series(), {job.watched_s: {2: lateness}}) for name, (job, lateness) in jobs.items()}
    uneven_ones = Job(late(2, usual_s=0.0, beside=uneven(1))).series()
    evaluated(tmp_path, **seen, uneven=Seen(uneven_ones, {WATCHED_S: {2: 1}}, WHO))


def test_even(tmp_path: Path) -> None:
    """Where all ranks communicate as long, however slow the link, none is late; nor where they differ by less than 5% of the time."""
    no_lateness = {WATCHED_S: dict.fromkeys(range(4), 0)}

    def even(share: float) -> Seen:
        return Seen(Job(lambda *_: share / 10).series(), no_lateness, f"round(1e3 * {SHARE}lateness{{JOB}})")

    def nearly(share: float) -> Seen:
        return never(Job(lambda rank, _: share / 10 + rank * 0.0015).series())

    shares = (0.01, 0.5, 0.95)
    evaluated(
        tmp_path,
        **{f"even_{share}": even(share) for share in shares},
        **{f"nearly_{share}": nearly(share) for share in shares},
    )


def test_uneven(tmp_path: Path) -> None:
    """Ranks whose work is random, in steps of 0.1 s and of 2 s, are not named by chance."""
    jobs = {}
    for ranks, seed in itertools.product((2, 3, 4, 8), range(3)):
        jobs[f"{ranks}_seed_{seed}"] = never(Job(uneven(seed), ranks).series())
        long = uneven(seed + 100, work_s=1.0)
        jobs[f"{ranks}_long_steps_seed_{seed}"] = never(Job(long, ranks, step_s=2.0).series())
    evaluated(tmp_path, **jobs)


def test_no_straggler(tmp_path: Path) -> None:
    """Ranks that are late in turn, a rank that saves checkpoints, and ranks with a little more work each are no stragglers."""
    jobs: dict[str, Comm] = {
        "late_in_turn": lambda rank, step: 0.01 if rank == step % 4 else 0.05,
        "checkpoints": lambda rank, step: 0.005 if rank == 0 or step % 60 else 1.005,
        "a_little_more_from_rank_to_rank": lambda rank, step: 0.01 + 0.002 * rank,
    }
    evaluated(tmp_path, **{name: never(Job(comm).series()) for name, comm in jobs.items()})


def test_stages(tmp_path: Path) -> None:
    """Stages of a pipeline, which wait for messages, are uneven; one that is waited for twice as long as it waits is a straggler."""

    def stages(*waits: float) -> Series:
        messages = 'commwatch_p2p_wait_seconds_total{instance="a:9477",job_id="job",rank="0",group="pp"}'
        return {**Job(lambda rank, _: waits[rank]).series(), messages: f"0+1x{WATCHED_S // EVERY_S}"}

    straggler = Seen(stages(0.06, 0.02, 0.06, 0.05), {WATCHED_S: {1: 400}})
    evaluated(tmp_path, uneven=never(stages(0.03, 0.04, 0.05, 0.05)), straggler=straggler)


def test_node_that_is_not_scraped(tmp_path: Path) -> None:
    """Of a job whose ranks are not all there nothing is known: neither at first, nor once a node is no longer scraped."""
    series = Job(late(3)).series()
    here = {name: values for name, values in series.items() if 'instance="a' in name}
    gone = Job(late(3), until_s={1: 150, 3: 150}).series()
    evaluated(
        tmp_path,
        at_first=Seen(here, {WATCHED_S: {}}, f"{SHARE}rate{{JOB}}"),
        gone=Seen(gone, {150: {3: 400}, 160: {}, WATCHED_S: {}}),
    )


def test_restart(tmp_path: Path) -> None:
    """Counters that begin again with their agent change nothing."""
    series = Job(late(3)).series()
    again = Job(late(3), watched_s=WATCHED_S // 2).series()
    for name, values in again.items():
        if 'rank="3"' in name and "_total" in name:
            series[name] = f"{values} {values.split(' ', 1)[1]}"
    evaluated(tmp_path, job=Seen(series, {WATCHED_S: {3: 400}}))


def test_job_of_one_agent(tmp_path: Path) -> None:
    """A job all of whose ranks one agent sees has no straggler by these rules: that agent knows better."""
    evaluated(tmp_path, job=never(Job(late(3), agents="a").series()))


def test_scraped_twice(tmp_path: Path) -> None:
    """An agent that two scrape jobs scrape counts once."""
    series = Job(late(1), ranks=2).series()
    twice = {name.replace("{", f'{{job="{job}",'): values for name, values in series.items() for job in "ab"}
    evaluated(tmp_path, job=Seen(twice, {WATCHED_S: {1: 400}}))


def test_idle(tmp_path: Path) -> None:
    """Ranks that make no steps have no share, and so no lateness."""
    evaluated(tmp_path, job=Seen(Job(late(3), step_s=1e6).series(), {WATCHED_S: {}}, f"{SHARE}rate{{JOB}}"))


def test_found_soon(tmp_path: Path) -> None:
    """Who begins to cost the others 15% of the time, or 60%, is named within half a minute, and forgotten two minutes after."""
    looks = {295: {}, 330: {3: 1}, 440: {3: 1}, 570: {}}
    jobs = {
        f"by_{by_s}": Seen(Job(late_in(range(3000, 4500), 3, by_s), watched_s=600).series(), looks, WHO)
        for by_s in (0.015, 0.06)
    }
    evaluated(tmp_path, **jobs)


def test_scraped_at_different_times(tmp_path: Path) -> None:
    """While a rank begins to be late, and while it catches up, no other is named because its agent was scraped earlier."""
    jobs = {}
    late_ones = ((0, 3000), (3, 3025))
    for agents, earlier_s, (culprit, begins) in itertools.product(("ab", "abbb", "abcd"), (3.0, 4.9), late_ones):
        faulty = late_in(range(begins, begins + 1000), culprit, by_s=0.06)
        series = Job(faulty, agents=agents, watched_s=500, earlier_s={"b": earlier_s}).series()
        who = Seen(series, {335: {culprit: 1}}, WHO, (290, 495), f',rank!="{culprit}"')
        jobs[f"{agents}_{earlier_s}_{culprit}"] = who
    evaluated(tmp_path, **jobs)
