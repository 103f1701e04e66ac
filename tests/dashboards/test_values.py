"""What queries of the dashboards answer over synthetic series, evaluated by ``promtool``."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.alerts.promtool import promtool
from tests.dashboards.grafana import load, substituted, targets

CHOSEN = {"job_id": "train", "group": ".*", "__rate_interval": "1m"}
#: Series of eight ranks on one node: four have ended after five minutes, four take a step per second until the end.
GONE, RUNS = "0+15x20 300x60", "0+15x80"
AT = "15m"


def asked(name: str, panel: str, column: str = "A") -> str:
    """A query of a dashboard's panel."""
    (found,) = [each for each in targets(load(name)) if (each.panel, each.ref_id) == (panel, column)]
    return substituted(found.expr, CHOSEN)


def evaluate(directory: Path, series: Mapping[str, str], expected: Mapping[str, Mapping[str, float]]) -> None:
    """Each query has these values, by labels."""
    looks = [
        {"expr": expr, "eval_time": AT, "exp_samples": [{"labels": of, "value": value} for of, value in values.items()]}
        for expr, values in expected.items()
    ]
    given = [{"series": name, "values": values} for name, values in series.items()]
    test = {"interval": "15s", "input_series": given, "promql_expr_test": looks}
    file = directory / "test.yaml"
    file.write_text(json.dumps({"rule_files": [], "evaluation_interval": "15s", "tests": [test]}), encoding="utf-8")
    done = promtool("test", "rules", file)
    assert done.returncode == 0, done.stdout + done.stderr


def of_ranks(metric: str, labels: str = "", values: tuple[str, str] = (GONE, RUNS)) -> dict[str, str]:
    """A series of each rank, the second half of which still runs."""
    about = 'instance="a", job_id="train"' + labels
    return {f'{metric}{{{about}, rank="{rank}"}}': values[rank >= 4] for rank in range(8)}


@pytest.fixture
def ranks() -> dict[str, str]:
    """Which ranks run: the first four only for five minutes."""
    return of_ranks("commwatch_rank_info", values=("1x20 _x60", "1x80"))


def test_means_are_of_ranks_that_run(tmp_path: Path, ranks: dict[str, str]) -> None:
    """The counters of ranks that have ended, which remain while their job runs, do not lower the means of the others."""
    waits = of_ranks("commwatch_pipeline_wait_seconds_total", ', group="pp", direction="forward"')
    expected = {
        asked("job", "Steps per second"): {"{}": 1.0},
        asked("cluster", "Jobs", "E"): {'{job_id="train"}': 1.0},
        asked("job", "Pipelines by direction"): {'{group="pp", direction="forward"}': 1.0},
    }
    evaluate(tmp_path, {**ranks, **of_ranks("commwatch_steps_total"), **waits}, expected)


def test_fault_has_no_duration_of_a_straggler(tmp_path: Path) -> None:
    """The length of the time in which a straggler was judged is not shown as the duration of a fault."""
    series = {
        'commwatch_verdict_seconds{job_id="hangs", kind="hang", rank="1"}': "20x80",
        'commwatch_verdict_seconds{job_id="hangs", kind="straggler", rank="2"}': "30x80",
        'commwatch_verdict_seconds{job_id="late", kind="straggler", rank="2"}': "30x80",
    }
    evaluate(tmp_path, series, {asked("cluster", "Jobs", "F"): {'{job_id="hangs"}': 20.0}})
