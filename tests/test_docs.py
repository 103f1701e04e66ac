"""The documents hold every setting, route and metric there is, and none that is not."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
import yaml
from prometheus_client import CollectorRegistry

from commwatch.probe.torch_nccl_plugin import CHAIN
from commwatch_agent.analysis import advice
from commwatch_agent.analysis.queries import QueryService
from commwatch_agent.config import SETTINGS
from commwatch_agent.config_sources import load
from commwatch_agent.notify.alert_rules import labels_by_series
from commwatch_agent.prometheus.exporter import MOST_GROUPS
from commwatch_agent.prometheus.metrics import METRICS
from commwatch_agent.web.application import application
from commwatch_alerts import catalogue
from commwatch_alerts.check import OF_A_SCRAPE, labels
from commwatch_alerts.durations import duration
from commwatch_alerts.export import runbook
from commwatch_alerts.model import SEVERITIES
from commwatch_collectors.nccl.checks.rules import RULES
from commwatch_collectors.nccl.classes import CLASSES, OTHER
from commwatch_collectors.node.gpu import THROTTLE_REASONS
from commwatch_collectors.node.gpu_xids import XIDS
from commwatch_collectors.node.infiniband import EVENTS, HW_EVENTS
from commwatch_collectors.node.nics import LINK_DOWNED
from docs.settings_table import table
from tests.helpers import commwatch, idle_services, needs

TREE = Path(__file__).parents[1]
DOCS = TREE / "docs"
RUNBOOK = TREE / "alerts" / "commwatch_alerts" / "runbook.md"
DOCUMENTS = (
    *DOCS.glob("*.md"),
    *TREE.glob("*.md"),
    RUNBOOK,
    TREE / "bench" / "README.md",
    TREE / "tests" / "cuda_rig" / "README.md",
)
#: What docs/api.md names beside fields and parameters: values, settings, parts of rules, annotations and events.
VALUES_IN_API = (
    "all bound ca_file client_cert covered_s critical ddp deepspeed desync done evidence_url firing for fsdp gone hang incident info init_incomplete "
    "insecure iterations keep_firing_for left megatron null open pipelines replay report require_token resolved retry runbook_url stalled summary "
    "token_file warning where"
)
ALERTS = catalogue.read(catalogue.shipped("rules.yaml"))


def rows(document: str, before: str = "\0") -> Iterator[list[str]]:
    """The cells of every table line of a document, up to a heading, whose first cell is code, without the code marks."""
    for line in (DOCS / document).read_text(encoding="utf-8").partition(before)[0].splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if line.startswith("| `"):
            yield [cells[0].strip("`"), *cells[1:]]


def test_every_metric() -> None:
    """Every metric is in docs/metrics.md with its type and labels, and no other is."""
    documented = {
        row[0]: (row[1], row[2].strip("`"))
        for row in rows("metrics.md", before="## Push over OTLP")
        if ":" not in row[0]
    }
    assert documented == {spec.name: (spec.kind, ", ".join(spec.labels)) for spec in METRICS.values()}
    assert f"more than {MOST_GROUPS}" in (DOCS / "metrics.md").read_text(encoding="utf-8")


def recorded() -> list[str]:
    """What our rules for Prometheus record."""
    return [record.name for record in ALERTS.records]


def test_every_rule() -> None:
    """Every recording rule is in docs/metrics.md, and no other is."""
    assert [row[0] for row in rows("metrics.md") if ":" in row[0]] == recorded()


def test_metrics_in_the_text() -> None:
    """Queries and texts name only metrics and rules that exist."""
    names = {spec.name for spec in METRICS.values()}
    names |= {
        f"{spec.name}_{part}"
        for spec in METRICS.values()
        if spec.kind == "histogram"
        for part in ("bucket", "sum", "count")
    }
    for document in (*DOCS.glob("*.md"), TREE / "README.md", RUNBOOK):
        named = set(
            re.findall(r"(?<![a-z_])[a-z_:]*commwatch_[a-z0-9_:]*[a-z0-9]", document.read_text(encoding="utf-8"))
        )
        assert named <= {*names, *recorded()}, document.name


def test_queries_are_promql(tmp_path: Path) -> None:
    """Prometheus understands every query of docs/metrics.md."""
    needs(shutil.which("promtool"), "promtool")
    (block,) = re.findall(r"```promql\n(.*?)```", (DOCS / "metrics.md").read_text(encoding="utf-8"), re.DOTALL)
    queries = [query for query in re.split(r"^#.*$", block, flags=re.MULTILINE) if query.strip()]
    assert len(queries) >= 9
    rules = [{"record": f"query:number_{n}", "expr": query} for n, query in enumerate(queries)]
    (tmp_path / "rules.yaml").write_text(json.dumps({"groups": [{"name": "docs", "rules": rules}]}))
    checked = ["promtool", "check", "rules", str(tmp_path / "rules.yaml")]
    done = subprocess.run(checked, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, ""), done.stdout
    assert f"SUCCESS: {len(queries)} rules found" in done.stdout


def test_every_setting() -> None:
    """The table of docs/settings.md is that of the declarations, and the flags in it are those of the command."""
    assert table() in (DOCS / "settings.md").read_text(encoding="utf-8"), "run make settings"
    usage = commwatch("agent", "--help").stdout
    for key, setting in SETTINGS.items():
        assert setting.flag == (f"--{key.replace('_', '-')} " in usage), key


def settings_files() -> Iterator[tuple[str, str]]:
    """Each settings file in the documents, with its place."""
    for document in DOCUMENTS:
        text = document.read_text(encoding="utf-8")
        for found in re.finditer(r"^( *)```toml\n(.*?)^ *```", text, re.DOTALL | re.MULTILINE):
            yield f"{document.name}:{text.count(chr(10), 0, found.start()) + 1}", dedent(found[2])


@pytest.mark.parametrize("text", [pytest.param(text, id=place) for place, text in settings_files()])
def test_settings_files_are_valid(tmp_path: Path, text: str) -> None:
    """Every settings file that a document shows is accepted as written."""
    (tmp_path / "docs.toml").write_text(text)
    load({"HOME": str(tmp_path)}, tmp_path / "docs.toml")


def test_commands_need_no_import_of_the_agent() -> None:
    """No documented command imports the agent's packages: an installation as a tool has the program only, for no Python of the user."""
    for document in DOCUMENTS:
        found = re.findall(r"python.* -c .*commwatch_\w+", document.read_text(encoding="utf-8"))
        assert not found, document.name


def test_every_flag_of_whatif() -> None:
    """The table of docs/whatif.md has every flag of the command, but not those that all commands have, and no other."""
    every, common = (
        set(re.findall(r"^  (--[a-z-]+)", usage, re.MULTILINE))
        for usage in (
            commwatch("whatif", "--help").stdout,
            commwatch("jobs", "--help").stdout.partition("\nplaces:")[2],
        )
    )
    assert common
    assert {flag for row in rows("whatif.md") for flag in re.findall(r"(--[a-z-]+)", row[0])} == every - common


def test_every_variable() -> None:
    """Every environment variable of ours that the code reads is in docs/settings.md, and no other is; those of settings follow from their keys."""
    name = r"\bCOMMWATCH(?:_[A-Z]+)*\b"
    code = [file for folder in ("agent", "collectors") for file in (TREE / folder).rglob("*.py")]
    read = {each for file in code for each in re.findall(f"""["']({name})["']""", file.read_text(encoding="utf-8"))}
    assert {"COMMWATCH", "COMMWATCH_DIR", "COMMWATCH_DISABLE", "COMMWATCH_CONFIG"} <= read
    documented = set(re.findall(name, (DOCS / "settings.md").read_text(encoding="utf-8")))
    of_settings = {each.variable for each in SETTINGS.values()}
    entries = tuple(each.prefix for each in SETTINGS.values() if each.prefix)
    assert {each for each in documented - of_settings if not each.startswith(entries)} == read - of_settings - {CHAIN}


def openapi() -> dict[str, Any]:
    """The routes of the application and their parameters."""
    return application(idle_services(QueryService(Path("none"))), CollectorRegistry()).openapi()


def test_every_route() -> None:
    """Every route is in docs/api.md, and no other is."""
    routes = {f"{method.upper()} {path}" for path, methods in openapi()["paths"].items() for method in methods}
    routes |= {f"GET {path}" for path in ("/", "/docs", "/openapi.json")}
    assert {row[0] for row in rows("api.md")} == routes


def test_fields_that_are_named() -> None:
    """Each field and parameter that docs/api.md names exists in the API, or is one of the values and settings that it names."""
    described = openapi()
    fields = {name for schema in described["components"]["schemas"].values() for name in schema.get("properties", ())}
    parameters = [
        each
        for methods in described["paths"].values()
        for method in methods.values()
        for each in method.get("parameters", ())
    ]
    named = set(re.findall(r"`([a-z_]+)`", (TREE / "docs" / "api.md").read_text(encoding="utf-8")))
    assert named - fields - {each["name"] for each in parameters} == set(VALUES_IN_API.split())


def test_runbook_has_every_alert() -> None:
    """Each alert has its section in the runbook, with a request and a query, and no section is of another."""
    text = RUNBOOK.read_text(encoding="utf-8")
    sections = dict(re.findall(r"^## (\w+)\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL))
    assert list(sections) == list(dict.fromkeys(rule.name for rule in ALERTS.alerts))
    for name, section in sections.items():
        for part in ("**Meaning:** ", "```promql\n", "**Remedy:** "):
            assert part in section, f"{name}: {part}"
        # The health alone needs no token.
        assert re.search(r"```sh\n(commwatch query '|curl -s 'localhost:9477/healthz')", section), name
        assert runbook("", name) == f"#{name.lower()}"


def test_runbook_asks_what_there_is() -> None:
    """Every request of the runbook is to an existing route with existing parameters; every query is PromQL over existing series."""
    text, routes = RUNBOOK.read_text(encoding="utf-8"), openapi()["paths"]
    asked = re.findall(r"localhost:9477(/[^'?\s]*)(?:\?([^'\s]*))?'", text)
    asked += [
        (f"/api/v1/{path}", query) for path, query in re.findall(r"commwatch query '([^'?\s]*)(?:\?([^'\s]*))?'", text)
    ]
    asked += re.findall(r"`(/(?:api|healthz)[^`?]*)(?:\?([^`]*))?`", text)
    assert len(asked) > len(ALERTS.alerts)
    for path, query in asked:
        known = {each["name"] for each in routes[path]["get"].get("parameters", ())}
        assert {part.partition("=")[0] for part in query.split("&") if part} <= known, f"{path}?{query}"
    series = {name: frozenset(labels) | OF_A_SCRAPE for name, labels in labels_by_series().items()}
    series |= {"up": OF_A_SCRAPE}
    for record in ALERTS.records:
        series[record.name] = labels(record.expr, series, record.name)
    queries = re.findall(r"```promql\n(.*?)```", text, re.DOTALL)
    assert len(queries) >= len({rule.name for rule in ALERTS.alerts})
    for query in queries:
        labels(query, series, "runbook")


def test_every_finding_and_class() -> None:
    """Every finding of the NCCL logs with its severity and title, and every class of warnings, is in docs/nccl.md."""
    documented = list(rows("nccl.md"))
    assert [row for row in documented if len(row) == 3] == [[rule.name, rule.severity, rule.title] for rule in RULES]
    assert [row[0] for row in documented if len(row) == 2 and row[0].isidentifier()] == [*CLASSES, OTHER]


def test_every_reason_and_xid() -> None:
    """Every reason of throttling, and every Xid with its meaning and remedy, is in docs/hardware.md, and no other is."""
    documented = list(rows("hardware.md"))
    assert [row[0] for row in documented if row[0] in THROTTLE_REASONS] == [*THROTTLE_REASONS]
    assert [row for row in documented if row[0].isdecimal()] == [
        [str(n), said.title, said.do] for n, said in XIDS.items()
    ]
    read = {
        name
        for row in documented
        if row[0].startswith("commwatch_gpu")
        for name in re.findall(r"commwatch_\w+", row[0])
    }
    assert read == {spec.name for spec in METRICS.values() if spec.name.startswith("commwatch_gpu_")}


def test_every_advice() -> None:
    """Every rule of advice is in docs/advice.md with its subject and remedy, and no other is."""
    assert list(rows("advice.md")) == [[rule.name, rule.title, rule.do] for rule in advice.RULES]


def anchors(document: Path) -> set[str]:
    """What its headings are called in links, as GitHub does."""
    headings = re.findall(r"^#+ (.*)$", document.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_links_lead_somewhere() -> None:
    """Every link from one document to a file of the tree finds it, with its heading."""
    for document in DOCUMENTS:
        for link, anchor in re.findall(r"\]\(([^)#\s]*)(#[^)\s]+)?\)", document.read_text(encoding="utf-8")):
            if not re.match(r"[a-z]+:", link):
                target = document.parent / link if link else document
                assert target.is_file(), f"{document.name}: {link}"
                assert not anchor or anchor[1:] in anchors(target), f"{document.name}: {link}{anchor}"


def at_once_or(duration_s: float) -> str:
    """A duration in a table."""
    return duration(duration_s) if duration_s else "at once"


def test_every_kind() -> None:
    """Every kind with its alerts, severity, durations and meaning is in docs/alerts.md, in order, and no other is."""
    alerts: dict[str, dict[str, None]] = {name: {} for name in ALERTS.kinds}
    for rule in ALERTS.alerts:
        alerts[rule.kind][f"`{rule.name}`"] = None
    assert [row for row in rows("alerts.md") if len(row) == 6 and row[2] in SEVERITIES] == [
        [
            kind.name,
            ", ".join(alerts[kind.name]) or "none",
            kind.severity,
            "with an alert" if kind.opens_after_s is None else at_once_or(kind.opens_after_s),
            duration(kind.ends_after_s),
            kind.help,
        ]
        for kind in ALERTS.kinds.values()
    ]


def test_every_alert() -> None:
    """Every alert with its severity, ``for``, evaluator and kind, and every threshold, is in docs/alerts.md, and no other is."""
    documented = list(rows("alerts.md"))
    assert [row[:5] for row in documented if row[1] in SEVERITIES] == [
        [
            rule.name,
            rule.severity,
            at_once_or(rule.for_s),
            "Prometheus" if rule.prometheus_only else "both",
            f"`{rule.kind}`",
        ]
        for rule in ALERTS.alerts
    ]
    assert [row for row in documented if row[0] in {each.name for each in ALERTS.thresholds}] == [
        [each.name, f"{each.default:g}", f"{each.low:g} to {each.high:g}", each.unit, each.help]
        for each in ALERTS.thresholds
    ]


def test_every_event() -> None:
    """Every event of RDMA ports is in docs/hardware.md with its meaning, and no other is."""
    events = {**EVENTS, **HW_EVENTS}
    del events[LINK_DOWNED]  # a metric of its own
    section = (DOCS / "hardware.md").read_text(encoding="utf-8").partition("### Events")[2].partition("\n### ")[0]
    assert dict(re.findall(r"^\| `(\w+)` \| (.*) \|$", section, re.MULTILINE)) == events


def test_every_panel() -> None:
    """Every panel of the dashboards is in docs/dashboards.md with its row, in order, and no other is."""
    made = []
    for name in ("cluster", "job", "node"):
        for panel in json.loads(
            (TREE / "dashboards" / "commwatch_dashboards" / f"{name}.json").read_text(encoding="utf-8")
        )["panels"]:
            if panel["type"] == "row":
                made.append([name.capitalize(), panel["title"], ""])
            else:
                made[-1][2] += ("; " if made[-1][2] else "") + panel["title"]
    assert list(rows("dashboards.md")) == made


def test_promises_name_their_tests() -> None:
    """Each section of what we promise of security and reliability names a test or a benchmark, and every one that is named there is."""
    known = {path.name: path.read_text(encoding="utf-8") for path in (TREE / "tests").rglob("test_*.py")}
    functions = "\n".join(known.values())
    for document in ("security.md", "reliability.md"):
        text = (DOCS / document).read_text(encoding="utf-8")
        for section in text.split("\n## ")[1:]:
            assert re.search(r"\btest_\w+|\bbench/\w+\.py", section), section.partition("\n")[0]
        for path in re.findall(r"\b(?:tests|bench)/[\w/]+\.py", text):
            assert (TREE / path).is_file(), path
        for name, suffix in re.findall(r"\b(test_\w+)(\.py)?", text):
            assert name + suffix in known if suffix else f"def {name}(" in functions, name


def test_paths() -> None:
    """Each path of the repository that a document names is there."""
    found = {
        (document.name, path)
        for document in (
            *DOCS.glob("*.md"),
            *(TREE / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md", "bench/README.md")),
        )
        for path in re.findall(
            r"(?<![\w/.-])((?:agent|collectors|alerts|dashboards|tests|bench|deploy|examples)/[\w*-][\w/.*-]*\w)",
            document.read_text(encoding="utf-8"),
        )
    }
    assert len(found) > 100
    found.remove(("CONTRIBUTING.md", "tests/data"))  # of another repository
    assert {each for each in found if not list(TREE.glob(each[1].replace("NAME", "*")))} == set()


def test_messages_of_troubleshooting() -> None:
    """Each message that docs/troubleshooting.md explains is one of the code."""
    code = "".join(
        path.read_text(encoding="utf-8") for part in ("agent", "collectors") for path in (TREE / part).rglob("*.py")
    )
    messages = [row[0] for row in rows("troubleshooting.md") if not row[0].startswith("/")]
    assert len(messages) >= 8
    for message in messages:
        assert message in code, message


def test_issue_forms() -> None:
    """Each form for issues is one that GitHub accepts: a name, a description, and fields with an id of their own; a bug needs ``commwatch doctor``."""
    forms = {path.stem: path for path in (TREE / ".github" / "ISSUE_TEMPLATE").glob("*.yml")}
    assert yaml.safe_load(forms.pop("config").read_text(encoding="utf-8")) == {"blank_issues_enabled": False}
    assert set(forms) == {"bug", "feature", "question", "gpu-proof"}
    for path in forms.values():
        form = yaml.safe_load(path.read_text(encoding="utf-8"))
        assert set(form) == {"name", "description", "labels", "body"}
        fields_of_form = [field for field in form["body"] if field["type"] != "markdown"]
        assert {field["type"] for field in fields_of_form} == {"textarea"}
        assert len({field["id"] for field in fields_of_form}) == len(fields_of_form)
        assert all(field["attributes"]["label"] for field in fields_of_form)
    assert "commwatch doctor" in forms["bug"].read_text(encoding="utf-8")


def test_data_flow() -> None:
    """The walks of an operation, a request, a late rank and a fault name files and what is in them; the first has twelve files at most, the others nine."""
    text = (TREE / "CONTRIBUTING.md").read_text(encoding="utf-8")
    walk = re.findall(r"^(\d+)\. `([\w/.]+)`: .*?`([\w.]+)`", text[text.index("## How data flows") :], re.MULTILINE)
    begins = [at for at, (number, *_) in enumerate(walk) if number == "1"]
    lengths = [end - begin for begin, end in pairwise([*begins, len(walk)])]
    assert len(lengths) == 4
    assert all(length <= most for length, most in zip(lengths, (12, 9, 4, 9), strict=True))
    for _, file, name in walk:
        content = (TREE / file).read_text(encoding="utf-8")
        assert all(re.search(rf"\b{part}\b", content) for part in name.split(".")), (file, name)
