"""Rules that every dashboard keeps: those of Grafana's dashboard-linter, and that it asks for nothing that agents do not serve."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from typing import Any

import promql_parser as promql
import pytest

from commwatch_agent.notify.alert_rules import labels_by_series
from commwatch_alerts.catalogue import read, shipped
from commwatch_alerts.export import RUNBOOK_URL
from tests.dashboards.grafana import NAMES, label_values, load, panels, substituted, targets, variables

DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}
#: Keys of a panel's options, as Grafana knows them.
OPTIONS = {
    "heatmap": {
        "calculate", "cellGap", "cellRadius", "cellValues", "color", "exemplars", "filterValues", "legend", "rowsFrame",
        "selectionMode", "showValue", "tooltip", "yAxis",
    },
    "stat": {
        "colorMode", "graphMode", "justifyMode", "orientation", "percentChangeColorMode", "reduceOptions",
        "showPercentChange", "textMode", "wideLayout",
    },
    "state-timeline": {"alignValue", "legend", "mergeValues", "perPage", "rowHeight", "showValue", "tooltip"},
    "table": {"cellHeight", "frameIndex", "showHeader", "showTypeIcons", "sortBy"},
    "timeseries": {"legend", "orientation", "tooltip"},
}  # fmt: skip
UNITS = {
    "Bps", "bool_yes_no", "bytes", "celsius", "eps", "h", "hertz", "ops", "percentunit", "pps", "s", "short", "watt",
}  # fmt: skip
#: What Prometheus itself has.
OF_PROMETHEUS = {"ALERTS", "up", "scrape_duration_seconds"}
#: Ranges: of what is drawn, of current values, of what is shown, and for targets that are gone.
RANGES = {"rate": {"5s", "120s"}, "increase": {"5s", "60s"}, "last_over_time": {"3600s"}}
pytestmark = pytest.mark.parametrize("name", NAMES)


def test_identity(name: str) -> None:
    """A dashboard has a uid, a description, our tag and no number of its own, cannot be edited, and its file is named for it."""
    made = load(name)
    assert (made["uid"], made["editable"], made["tags"]) == (f"commwatch-{name}", False, ["commwatch"])
    assert made["title"] == f"commwatch / {name.capitalize()}"
    assert made["description"]
    assert made.get("id") is None


def test_datasource(name: str) -> None:
    """The first variable is the one data source; every panel, query, variable and annotation goes through it."""
    made = load(name)
    first, *others = made["templating"]["list"]
    assert (first["type"], first["name"], first["query"]) == ("datasource", "datasource", "prometheus")
    assert [each["type"] for each in others] == ["query"] * len(others)
    sources = [each["datasource"] for each in (*panels(made), *variables(made), *made["annotations"]["list"])]
    sources += [target["datasource"] for panel in panels(made) for target in panel["targets"]]
    assert [each for each in sources if each != DATASOURCE] == []


def test_panels(name: str) -> None:
    """Every panel has its own title, a description in whole sentences, a unit, a type and options that Grafana knows, and queries."""
    made = load(name)
    titles = [panel["title"] for panel in panels(made)]
    for panel in panels(made):
        where = panel["title"]
        assert panel["description"][:1].isupper() or panel["description"][:1].isdigit(), where
        assert panel["description"].endswith("."), where
        assert set(panel.get("options", {})) <= OPTIONS[panel["type"]], where
        refs = [target["refId"] for target in panel["targets"]]
        assert refs == [chr(ord("A") + n) for n in range(len(refs))], where
        assert refs, where
        for unit in _units(panel):
            assert unit in UNITS or re.fullmatch(r"suffix: \S+", unit), f"{where}: {unit}"
    assert len(set(titles)) == len(titles)
    ids = [panel["id"] for panel in made["panels"]]
    assert len(set(ids)) == len(ids)


def _units(panel: Any) -> Iterator[str]:
    yield panel["fieldConfig"]["defaults"]["unit"]
    for override in panel["fieldConfig"]["overrides"]:
        yield from (each["value"] for each in override["properties"] if each["id"] == "unit")


def test_table_columns(name: str) -> None:
    """What a table renames are its values and labels of its queries; what it sorts by or gives a unit is one of its columns."""
    for panel in panels(load(name)):
        if panel["type"] != "table":
            continue
        merge, organize = panel["transformations"]
        assert (merge["id"], organize["id"]) == ("merge", "organize")
        renamed = organize["options"]["renameByName"]
        refs = [target["refId"] for target in panel["targets"]]
        values = [f"Value #{ref}" for ref in refs] if len(refs) > 1 else ["Value"]
        assert [each for each in renamed if each.startswith("Value")] == values, panel["title"]
        columns = set(renamed.values())
        assert {each["matcher"]["options"] for each in panel["fieldConfig"]["overrides"]} <= columns
        assert {each["displayName"] for each in panel["options"].get("sortBy", ())} <= columns
        assert all(target["format"] == "table" and target["instant"] for target in panel["targets"])


def test_nothing_overlaps(name: str) -> None:
    """Panels lie within 24 columns, and none on another."""
    places = [panel["gridPos"] for panel in load(name)["panels"]]
    for place in places:
        assert place["x"] >= 0
        assert place["w"] > 0
        assert place["h"] > 0
        assert place["x"] + place["w"] <= 24
    for a, b in itertools.combinations(places, 2):
        beside = a["x"] + a["w"] <= b["x"] or b["x"] + b["w"] <= a["x"]
        above = a["y"] + a["h"] <= b["y"] or b["y"] + b["h"] <= a["y"]
        assert beside or above, (a, b)


def test_links(name: str) -> None:
    """Each dashboard leads to the other two, with data source, variables and time range, and to the runbook; cells lead to dashboards that exist."""
    made = load(name)
    urls = {link["url"]: link for link in made["links"]}
    assert set(urls) == {RUNBOOK_URL, *(f"/d/commwatch-{other}" for other in NAMES if other != name)}
    for url, link in urls.items():
        assert url == RUNBOOK_URL or (link["includeVars"] and link["keepTime"])
    for panel in panels(made):
        for override in panel["fieldConfig"]["overrides"]:
            for link in (each for prop in override["properties"] if prop["id"] == "links" for each in prop["value"]):
                found = re.fullmatch(r"/d/commwatch-(\w+)\?\$\{datasource:queryparam\}&var-(\w+)=.*", link["url"])
                assert found
                assert found[2] in {each["name"] for each in variables(load(found[1]))}


def _selectors(expr: str) -> tuple[list[promql.VectorSelector], list[tuple[str, str]]]:
    """The selectors of an expression, and its functions of ranges with the range, in seconds."""
    selectors: list[promql.VectorSelector] = []
    ranges: list[tuple[str, str]] = []

    def visit(node: Any) -> bool:
        if isinstance(node, promql.VectorSelector):
            selectors.append(node)
        if isinstance(node, promql.MatrixSelector):
            selectors.append(node.vector_selector)
        if isinstance(node, promql.Call):
            ranges.extend(
                (node.func.name, f"{each.range.total_seconds():g}s")
                for each in node.args
                if isinstance(each, promql.MatrixSelector)
            )
        return True

    promql.walk(promql.parse(expr), visit)
    return selectors, ranges


def test_queries(name: str) -> None:
    """Every query is PromQL over series that agents, our rules or Prometheus have, with labels that they have; ranges are Grafana's.

    Rates of current values have a range of two minutes, as they must not depend on the time range shown.
    """
    known = {series: {*labels, "instance", "job"} for series, labels in labels_by_series().items()}
    recorded = {record.name for record in read(shipped("rules.yaml")).records}
    values = {each["name"]: "x" for each in variables(load(name))}
    asked = [(str(target), target.expr) for target in targets(load(name))]
    asked += [(each["name"], label_values(each)[0]) for each in variables(load(name))]
    for where, expr in asked:
        selectors, ranges = _selectors(substituted(expr, values))
        assert selectors, where
        for selector in selectors:
            assert selector.name in {*known, *recorded, *OF_PROMETHEUS}, f"{where}: {selector.name}"
            if selector.name in known:
                assert {each.name for each in selector.matchers.matchers} <= known[selector.name], where
        for function, seconds in ranges:
            assert seconds in RANGES[function], f"{where}: {function} over {seconds}"
    for target in targets(load(name)):
        window = "[2m]" if target.instant else "[$__rate_interval]"
        assert target.expr.count("rate(") == len(re.findall(rf"rate\([^\[]*{re.escape(window)}\)", target.expr)), target


def test_variables_are_heeded(name: str) -> None:
    """Every query of a dashboard with a variable for its job or node asks for that alone; alerts are those of the list, or of it."""
    needed = {"cluster": "alertname=~", "job": 'job_id="$job_id"', "node": 'instance="$instance"'}[name]
    for target in targets(load(name)):
        selectors = re.findall(r"\b(?:commwatch_|job\w*:|ALERTS|up\b|scrape_)[\w:]*(?:\{[^}]*\})?", target.expr)
        if name == "cluster":
            selectors = [each for each in selectors if each.startswith("ALERTS")]
        assert all(needed in each for each in selectors), target
