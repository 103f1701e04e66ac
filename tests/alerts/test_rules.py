"""The recording rules for Prometheus, as they are exported: who is late is named, and nobody else."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.alerts.promtool import exported, promtool

SECONDS = "job_rank_group:commwatch_symmetric_collective_seconds:"
#: Of the series below: a sample a minute, over so many minutes, and asked at the last.
MINUTES = 12
Series = dict[str, str]


class Rank(NamedTuple):
    """A rank's counters: operations a minute, and what each takes it."""

    rank: int
    took_ms: float
    per_minute: int = 600
    group: str = "data"
    group_id: str = "d"
    size: int = 4
    first: int = 0
    last: int = MINUTES
    agent: str = ""

    def series(self) -> Series:
        """Three series in promtool's notation."""
        agent = self.agent or "ab"[self.rank % 2]
        labels = (
            f'instance="{agent}:9477",job_id="job",rank="{self.rank}",group="{self.group}",group_id="{self.group_id}"'
        )
        count, seconds = self.per_minute, self.per_minute * self.took_ms / 1e3
        before, minutes = "_ " * self.first, self.last - self.first
        stale = " stale" if self.last < MINUTES else ""
        return {
            f"commwatch_symmetric_collectives_total{{{labels}}}": f"{before}7+{count}x{minutes}{stale}",
            f"commwatch_symmetric_collective_seconds_total{{{labels}}}": f"{before}7+{seconds:.9f}x{minutes}{stale}",
            f'commwatch_group_info{{{labels},group_size="{self.size}"}}': f"{before}1x{minutes}{stale}",
        }


def together(*ranks: Rank) -> Series:
    """The series of several ranks."""
    return {name: values for rank in ranks for name, values in rank.series().items()}


def node(*took_ms: float, first: int = 0, **more: Any) -> list[Rank]:
    """Ranks from ``first`` on, by what an operation takes them."""
    return [Rank(number, took, **more) for number, took in enumerate(took_ms, start=first)]


def evaluated(
    directory: Path, series: Series, record: str, expected: dict[tuple[int, str], int], minute: int = MINUTES
) -> None:
    """Have ``promtool`` evaluate the rules; ``record`` must be ``expected`` millionths, by rank and ``group_id``."""
    groups = {at: group for name in series for group, at in re.findall(r'group="([^"]+)",group_id="([^"]+)"', name)}
    samples = [
        {"labels": f'{{job_id="job",rank="{rank}",group="{groups[at]}",group_id="{at}"}}', "value": value}
        for (rank, at), value in expected.items()
    ]
    test = {
        "interval": "1m",
        "input_series": [{"series": name, "values": values} for name, values in series.items()],
        # promtool compares to the last bit.
        "promql_expr_test": [
            {"expr": f"round(1e6 * {SECONDS}{record})", "eval_time": f"{minute}m", "exp_samples": samples}
        ],
    }
    whole = {"rule_files": [str(exported(directory))], "evaluation_interval": "1m", "tests": [test]}
    (directory / "test.yaml").write_text(json.dumps(whole))
    done = promtool("test", "rules", directory / "test.yaml")
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("late", range(4))
def test_late_rank(tmp_path: Path, late: int) -> None:
    """The rank of four that takes least time is the straggler, by what the median of the others takes more."""
    ranks = node(*(2.0 if rank == late else 50.0 + rank for rank in range(4)))
    others = sorted(rank.took_ms for rank in ranks if rank.rank != late)
    lateness_us = round((others[1] - 2) * 1000)
    evaluated(tmp_path, together(*ranks), "straggler", {(late, "d"): lateness_us})
    # Ten a second: of a minute the others wait so much.
    shares = {(rank.rank, "d"): lateness_us * 10 if rank.rank == late else 0 for rank in ranks}
    for rank in ranks:
        if rank.rank != late and rank.took_ms < others[1]:
            shares[rank.rank, "d"] = round((others[1] - rank.took_ms) * 10_000)
    evaluated(tmp_path, together(*ranks), "lateness_ratio", shares)


def test_one_rank_a_node(tmp_path: Path) -> None:
    """Of two ranks the late one is named, with the whole difference: the median of both would halve it."""
    evaluated(tmp_path, together(*node(60.0, 10.0, size=2)), "straggler", {(1, "d"): 50_000})


@pytest.mark.parametrize("took_ms", [0.02, 50.0, 5000.0])
def test_nobody_is_late(tmp_path: Path, took_ms: float) -> None:
    """Where all ranks take as long, however slow the link, lateness is 0 and nobody is a straggler."""
    per_minute = 6 if took_ms > 1000 else 600
    even = together(*node(took_ms, took_ms, took_ms, took_ms, per_minute=per_minute))
    evaluated(tmp_path, even, "lateness", {(rank, "d"): 0 for rank in range(4)})
    evaluated(tmp_path, even, "straggler", {})
    # A tenth more or less is no straggler either.
    uneven = together(*node(took_ms * 1.1, took_ms, took_ms * 0.9, took_ms, per_minute=per_minute))
    evaluated(tmp_path, uneven, "straggler", {})


def test_late_but_cheap(tmp_path: Path) -> None:
    """A rank that is late once in a while costs the others little, and is no straggler."""
    seldom = together(*node(60.0, 60.0, 60.0, 10.0, per_minute=30))
    evaluated(tmp_path, seldom, "lateness", {(0, "d"): 0, (1, "d"): 0, (2, "d"): 0, (3, "d"): 50_000})
    evaluated(tmp_path, seldom, "straggler", {})


def test_node_that_is_not_scraped(tmp_path: Path) -> None:
    """Of a group whose ranks are not all there nothing is said: neither at first, nor once a node is no longer scraped."""
    here, there = node(60.0, 60.0), node(60.0, 10.0, first=2)
    evaluated(tmp_path, together(*here), "mean", {})
    evaluated(tmp_path, together(*here, *there), "straggler", {(3, "d"): 50_000})
    gone = together(*here, *(rank._replace(last=8) for rank in there))
    evaluated(tmp_path, gone, "straggler", {(3, "d"): 50_000}, minute=8)
    evaluated(tmp_path, gone, "mean", {}, minute=9)


def test_restart(tmp_path: Path) -> None:
    """Counters that begin again with their agent change nothing; a job's next life is another group, its first one over."""
    ranks = node(60.0, 60.0, 60.0, 10.0)
    series = together(*ranks)
    for name in series:
        if 'rank="3"' in name and "_total" in name:
            count = 600 if "collectives" in name else 6
            series[name] = f"7+{count}x6 0+{count}x5"
    evaluated(tmp_path, series, "straggler", {(3, "d"): 50_000})
    first = [rank._replace(last=5) for rank in ranks]
    second = node(10.0, 60.0, 60.0, 60.0, group_id="d2")
    lives = together(*first, *(rank._replace(first=7) for rank in second))
    evaluated(tmp_path, lives, "straggler", {(3, "d"): 50_000}, minute=5)
    evaluated(tmp_path, lives, "straggler", {(0, "d2"): 50_000})


def test_groups_of_one_name(tmp_path: Path) -> None:
    """Groups that share their label, on the same ranks or on others, are told apart."""
    same = node(60.0, 10.0, size=2, group_id="a") + node(5.0, 5.0, size=2, group_id="b")
    others = node(60.0, 60.0, first=2, size=2, group_id="c")
    evaluated(tmp_path, together(*same, *others), "straggler", {(1, "a"): 50_000})


def test_group_of_one_agent(tmp_path: Path) -> None:
    """A group all of whose ranks one agent sees has its lateness, but no straggler: that agent knows better."""
    local = together(*node(60.0, 10.0, size=2, agent="a"))
    evaluated(tmp_path, local, "lateness", {(0, "d"): 0, (1, "d"): 50_000})
    evaluated(tmp_path, local, "straggler", {})


def test_scraped_twice(tmp_path: Path) -> None:
    """An agent that two scrape jobs scrape counts once."""
    series = together(*node(60.0, 10.0, size=2))
    twice = {name.replace("{", f'{{job="{job}",'): values for name, values in series.items() for job in "ab"}
    evaluated(tmp_path, twice, "straggler", {(1, "d"): 50_000})
    evaluated(tmp_path, twice, "lateness_ratio", {(0, "d"): 0, (1, "d"): 500_000})


def test_idle(tmp_path: Path) -> None:
    """Ranks that do nothing have no mean, and so no lateness."""
    evaluated(tmp_path, together(*node(60.0, 60.0, 60.0, 10.0, per_minute=0)), "mean", {})


def test_found_soon(tmp_path: Path) -> None:
    """Who begins to cost the others 15 % of the time is named within half a minute of scrapes every 5 s, and forgotten two minutes after."""
    usual_s, waiting_s, per_scrape, late = 0.006, 0.036, 25, range(60, 90)
    series: Series = {}
    for rank in range(4):
        labels = f'instance="{"ab"[rank % 2]}:9477",job_id="job",rank="{rank}",group="data",group_id="d"'
        seconds = [0.0]
        for scrape in range(1, 150):
            waits = rank != 3 and scrape in late
            seconds.append(seconds[-1] + per_scrape * (waiting_s if waits else usual_s))
        series |= {
            f"commwatch_symmetric_collectives_total{{{labels}}}": f"0+{per_scrape}x149",
            f"commwatch_symmetric_collective_seconds_total{{{labels}}}": " ".join(f"{value:.6f}" for value in seconds),
            f'commwatch_group_info{{{labels},group_size="4"}}': "1x149",
        }
    looks: dict[int, list[str]] = {295: [], 330: ["3"], 440: ["3"], 570: []}
    test = {
        "interval": "5s",
        "input_series": [{"series": name, "values": values} for name, values in series.items()],
        "promql_expr_test": [
            {
                "expr": f"count by (rank) ({SECONDS}straggler)",
                "eval_time": f"{at_s}s",
                "exp_samples": [{"labels": f'{{rank="{rank}"}}', "value": 1} for rank in ranks],
            }
            for at_s, ranks in looks.items()
        ],
    }
    whole = {"rule_files": [str(exported(tmp_path))], "evaluation_interval": "5s", "tests": [test]}
    (tmp_path / "test.yaml").write_text(json.dumps(whole))
    done = promtool("test", "rules", tmp_path / "test.yaml")
    assert done.returncode == 0, done.stdout + done.stderr
