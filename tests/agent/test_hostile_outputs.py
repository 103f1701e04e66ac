"""Names chosen by other users, in output that other programs read: tables, metrics, messages, templates."""

from __future__ import annotations

import csv
import io
import json
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as openmetrics
from prometheus_client.parser import text_string_to_metric_families as prometheus

from commwatch_agent.history.operations import Operation
from commwatch_agent.questions.operations import csv_table
from commwatch_alerts.catalogue import read, shipped
from commwatch_alerts.export import prometheus as exported
from commwatch_alerts.outbox import Batch
from commwatch_alerts.receivers import payload
from commwatch_alerts.receivers.hooks import slack
from commwatch_alerts.text import render
from tests.agent.test_hostile_names import EVIL
from tests.helpers import RunningAgent, Trainer, agent, group_entry, identity, operation, wait_for
from tests.receivers import alert

AGENT = "http://agent:9477"
#: Names that mean something to a spreadsheet, a template or a chat, and one that does not.
NAMES = (
    EVIL, "=HYPERLINK(1)", "+1", "-1", "@SUM(A1)", "\t=1", "\r=1", "\n=1", " =1", '"quoted", back\\slash', "{{ .Labels }}{{ $value }}",
    "{rank} [{exposed:percent}]", "<!channel> <http://evil|good> &", "train\r\nBcc: x@example.com", "plain name",
    "<script>alert(1)</script>", "%s %d ${HOME} `id`",
    "訓練",
)  # fmt: skip


@pytest.fixture(scope="module")
def asked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningAgent]:
    """An agent with a job, one rank of it for each of the names, which its groups have."""
    run = tmp_path_factory.mktemp("outputs") / "run"
    who = identity(EVIL, wall_offset_ns=time.time_ns() - time.monotonic_ns(), host=EVIL)
    with Trainer(run / "rings" / "a.ring", who) as trainer, agent(run) as running:
        trainer.call("name", [(group_entry(n, (0, 1), name, group_id=f"g{n}"),) for n, name in enumerate(NAMES)])
        now = time.monotonic_ns()
        trainer.write([operation(start_ns=now - 10, end_ns=now, group=n) for n in range(len(NAMES))])
        wait_for(lambda: [rank["records"] for rank in running.get("/api/v1/ranks")] == [len(NAMES)], "the records")
        yield running


@pytest.mark.parametrize(
    ("accept", "parse"), [("text/plain", prometheus), ("application/openmetrics-text; version=1.0.0", openmetrics)]
)
def test_metrics(asked: RunningAgent, accept: str, parse: Any) -> None:
    """In both formats the page of metrics is whole, and each name comes back as it is, in a label, and in nothing else."""
    request = urllib.request.Request(f"{asked.url}/metrics", headers={"Accept": accept})
    with urllib.request.urlopen(request, timeout=30) as answer:
        families = list(parse(answer.read().decode("utf-8", "strict")))
    samples = [sample for family in families for sample in family.samples]
    labels = {value for sample in samples for value in sample.labels.values()}
    assert set(NAMES) <= labels
    assert all(sample.name.startswith("commwatch_") for sample in samples)


def test_csv(asked: RunningAgent) -> None:
    """No cell of the CSV table begins as a formula does; a name that would has an apostrophe before it, and the ids are as JSON has them."""
    with urllib.request.urlopen(f"{asked.url}/api/v1/ops?format=csv", timeout=30) as response:
        table = list(csv.DictReader(io.StringIO(response.read().decode(), newline="")))
    assert [row["id"] for row in table] == [each["id"] for each in asked.get("/api/v1/ops")["operations"]]
    names = {row["group"] for row in table}
    assert {name for name in names if name.startswith("'")} == {
        f"'{name}" for name in NAMES if name.strip()[0] in "=+-@"
    }
    for row in table:
        assert not any(cell.lstrip()[:1] in tuple("=+@") or cell[:1] in tuple("\t\r\n") for cell in row.values())
    assert {"plain name", "'-1", "'=HYPERLINK(1)", '"quoted", back\\slash', EVIL} <= names


def test_numbers_in_csv() -> None:
    """Numbers are left as they are, below zero too."""
    about: dict[str, Any] = dict.fromkeys(Operation.__dataclass_fields__)
    table = csv_table([Operation(**{**about, "id": "1-2-3", "group": "-x", "peer": -1, "start_at": -2.5})])
    (row,) = csv.DictReader(io.StringIO(table, newline=""))
    assert (row["peer"], row["start_at"], row["group"], row["id"]) == ("-1", "-2.5", "'-x", "1-2-3")


@pytest.mark.parametrize(
    "path", ["jobs", "groups", "ranks", "ops", "summary", "verdicts", "topology", "host", "advice"]
)
def test_json(asked: RunningAgent, path: str) -> None:
    """JSON has all names as they are."""
    found = json.dumps(asked.get(f"/api/v1/{path}"))
    if path in ("groups", "ops", "summary"):
        assert all(json.dumps(name)[1:-1] in found for name in NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_templates(name: str) -> None:
    """A name is plain text in the text of an alert: nothing in it is taken for a field, a clause or a template."""
    said = render("job {job_id}[ rank {rank}]: {value:percent}", {"job_id": name, "rank": "7"}, 0.5, {"exposed": 1.0})
    assert said == f"job {name} rank 7: 50%"


@pytest.mark.parametrize("name", NAMES)
def test_messages(name: str) -> None:
    """In a chat a name makes no line, no mention and no link; machines get it as it is."""
    odd = replace(
        alert(job_id=name, group=name),
        annotations={
            "summary": render("{job_id} hangs", {"job_id": name}, 0, {}),
            "evidence_url": f"javascript:{name}",
        },
    )
    batch = Batch((odd,), (("alertname", "CommShareHigh"), ("job_id", name)))
    (told,) = slack(batch, AGENT)["attachments"]
    for text in (told["title"], told["fallback"], told["text"]):
        assert text.isprintable()
        assert not set("<>") & set(text)
    assert "javascript:" not in told["text"]
    assert payload.webhook(batch, "r", AGENT)["alerts"][0]["labels"]["job_id"] == name


def test_exported_rules() -> None:
    """The exported rules put labels into texts by Prometheus's variables only, so that nothing of a label is evaluated."""
    text = exported(read(shipped("rules.yaml")))
    assert "{{ $labels.job_id }}" in text
    assert not any(word in text for word in ("safeHtml", "tmpl", "template", "toUpper", "reReplaceAll"))
