"""What a phone shows of an alert before it is opened: the title, and the first line of its text."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import Any

import pytest
import yaml

from commwatch_agent.text.units import IN_TEXTS
from commwatch_alerts.catalogue import read, shipped
from commwatch_alerts.model import RESOLVED, Rule
from commwatch_alerts.outbox import Batch
from commwatch_alerts.receivers import payload
from commwatch_alerts.receivers.hooks import slack
from commwatch_alerts.remedies import remedy
from commwatch_alerts.text import render
from tests.receivers import alert

RULES = read(shipped("rules.yaml")).alerts
LABELS = {
    "job_id": "train-7b", "rank": "3", "group": "default_pg", "op": "all_reduce", "device": "mlx5_0", "instance": "node7:9477", "gpu": "2", "xid": "79",
    "reason": "heat", "finding": "ib_completion", "collector": "nccl",
}  # fmt: skip
#: How many characters a locked phone shows of a notification.
SHOWN = 180


def first_line(rule: Rule, **labels: str) -> str:
    """The title of the message on one alert."""
    text = render(rule.summary, LABELS | labels, 0.42, {"exposed": 0.31}, IN_TEXTS)
    said = replace(alert(rule.name, severity=rule.severity), annotations={"summary": text})
    return payload.title(Batch((said,), ()))


@pytest.mark.parametrize(
    ("name", "severity", "line"),
    [
        ("RankLost", "warning", "[WARNING] Rank 3 of job train-7b failed: read the end of that rank's log"),
        ("CollectiveHang", "critical", "[CRITICAL] Job train-7b hangs, held up by rank 3: see `commwatch diagnose train-7b`"),
        ("CommShareHigh", "warning", "[WARNING] Job train-7b spends 42% of its step time in communication (31% exposed): see `commwatch report train-7b`"),
        ("StragglerRank", "warning", "[WARNING] Rank 3 of job train-7b is a straggler (the others wait 42% of the time): see `commwatch diagnose train-7b`"),
        ("SlowLink", "warning", "[WARNING] A slow link holds up job train-7b: see `commwatch diagnose train-7b`"),
        ("DataCorruption", "critical", "[CRITICAL] Job train-7b has corrupt data (suspect: rank 3): stop it before its next checkpoint"),
        ("GpuLost", "warning", "[WARNING] GPU 2 of node7:9477 no longer responds: take its node out of service"),
    ],
)  # fmt: skip
def test_most_important_ones(name: str, severity: str, line: str) -> None:
    """The first line has how bad it is, what happened, to which job and rank, and what to do."""
    (rule,) = (each for each in RULES if (each.name, each.severity) == (name, severity))
    assert first_line(rule) == line


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: f"{rule.name}-{rule.severity}-{rule.variant}")
def test_every_one(rule: Rule) -> None:
    """Every alert's first line fits on a phone, names the job, or the node if it has none, and ends with what to do."""
    line = first_line(rule)
    assert len(line) <= 140, line
    assert "train-7b" in line or "node7" in line, line
    assert re.search(r": (see|read|run|check|compare|stop|take|use|move) [^:]+$", line), line


def test_a_rank_that_raised() -> None:
    """The texts on a rank that failed have by what, and what its exception says; those for Prometheus, which knows neither, leave it out."""
    (rule,) = (each for each in RULES if (each.name, each.variant) == ("RankLost", ""))
    line = "[WARNING] Rank 3 of job train-7b failed (raised KeyError): read the end of that rank's log"
    assert first_line(rule, ended_by="raised KeyError") == line
    says = "Rank 3 of job train-7b failed: it ended with KeyError: 'lr'. The other ranks"
    assert render(rule.description, LABELS | {"how": "ended with KeyError: 'lr'"}, 1.0, {}).startswith(says)
    assert render(rule.description, LABELS, 1.0, {}).startswith("Rank 3 of job train-7b failed. The other ranks")


def test_text_after_the_title() -> None:
    """Title and text of a message do not repeat each other: the text begins with user, script and node, and what to do about this cause."""
    (rule,) = (each for each in RULES if (each.name, each.variant) == ("RankLost", ""))
    about = {
        "summary": render(rule.summary, LABELS, 1.0, {}),
        "description": render(rule.description, LABELS, 1.0, {}),
        "where": "Job train-7b (ann, train.py), node node7, rank 3.",
        "remedy": remedy("rank_lost", "out_of_memory", {"place": "step (train.py:88)"}),
    }
    lost = replace(alert("RankLost"), annotations=about)
    (said,) = slack(Batch((lost,), ()), "http://agent:9477")["attachments"]
    assert (
        said["title"] == said["fallback"] == "[WARNING] Rank 3 of job train-7b failed: read the end of that rank's log"
    )
    assert f"{said['title']}\n{said['text']}"[:SHOWN] == (
        "[WARNING] Rank 3 of job train-7b failed: read the end of that rank's log\n"
        "Job train-7b (ann, train.py), node node7, rank 3. Use less memory on that rank, in step (train.py:88): smal"
    )
    assert said["text"].count("read the end of that rank's log") == 0
    over = replace(lost, state=RESOLVED)
    assert payload.title(Batch((over,), ())).startswith("[RESOLVED] Rank 3 of job train-7b failed")
    assert payload.description(over).endswith(about["where"])
    assert "Use less memory" not in payload.description(over)
    with_job = replace(over, annotations={**about, "outcome": "All ranks of the job ended with it."})
    assert payload.title(Batch((with_job,), ())).startswith("[ENDED] Rank 3 of job train-7b failed")
    ended = replace(over, annotations={**about, "outcome": "Recovered after 67.5 s."})
    assert payload.title(Batch((ended,), ())).startswith("[RESOLVED] ")
    assert payload.description(ended) == f"Recovered after 67.5 s. {about['where']}"


def test_sample_for_alertmanager() -> None:
    """The shipped configuration of Alertmanager makes the title of the severity and the first summary, and the text of the same annotations as ours."""
    whole: dict[str, Any] = yaml.safe_load(shipped("alertmanager.yml"))
    (chat,) = (each["slack_configs"][0] for each in whole["receivers"] if each["name"] == "chat")
    assert ".CommonLabels.severity | toUpper" in chat["title"]
    assert ".Annotations.summary" in chat["title"]
    order = [chat["text"].index(f".Annotations.{name}") for name in ("where", "remedy", "description")]
    assert order == sorted(order), json.dumps(chat)
