"""What Grafana does with a dashboard before it asks Prometheus: variables are resolved and put into queries."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parents[2] / "dashboards" / "commwatch_dashboards"
NAMES = ("cluster", "job", "node")
Values = Mapping[str, str]


@dataclass(frozen=True)
class Target:
    """One query of a panel, or of the annotations."""

    panel: str
    ref_id: str
    expr: str
    instant: bool
    #: What its legend, or its table, says of each series.
    labels: tuple[str, ...]

    def __str__(self) -> str:
        """How a failure names it."""
        return f"{self.panel} {self.ref_id}: {self.expr}"


def load(name: str) -> Any:
    """A dashboard as it is shipped."""
    return json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))


def panels(dashboard: Any) -> list[Any]:
    """Its panels, without the rows."""
    return [panel for panel in dashboard["panels"] if panel["type"] != "row"]


def targets(dashboard: Any) -> Iterator[Target]:
    """Every query it makes."""
    for panel in panels(dashboard):
        for target in panel["targets"]:
            named = re.findall(r"\{\{(\w+)\}\}", target.get("legendFormat", ""))
            for transformation in panel.get("transformations", ()):
                renamed = transformation["options"].get("renameByName", {})
                named += [label for label in renamed if not label.startswith("Value")]
            instant = bool(target.get("instant"))
            yield Target(panel["title"], target["refId"], target["expr"], instant, tuple(named))
    for annotation in dashboard["annotations"]["list"]:
        named = re.findall(r"\{\{(\w+)\}\}", annotation["titleFormat"] + annotation["textFormat"])
        target = annotation["target"]
        yield Target(annotation["name"], target["refId"], target["expr"], False, tuple(named))


def variables(dashboard: Any) -> list[Any]:
    """Those that are resolved by a query, in order."""
    return [each for each in dashboard["templating"]["list"] if each["type"] == "query"]


def label_values(variable: Any) -> tuple[str, str]:
    """The metric with its matchers, and the label whose values are the variable's."""
    query = variable["query"]
    found = re.fullmatch(r"label_values\((.*), (\w+)\)", query if isinstance(query, str) else query["query"])
    assert found, query
    return found[1], found[2]


def substituted(text: str, values: Values) -> str:
    """The text as it is sent; intervals are those of a short window with fast scrapes."""
    given = {"__rate_interval": "5s", "__interval": "1s", "__range": "60s", **values}
    sent = re.sub(r"\$(?:\{(\w+)(?::\w+)?\}|(\w+))", lambda found: given.get(found[1] or found[2], found[0]), text)
    assert "$" not in sent.replace('"000$1"', "").replace('"rank $1"', ""), sent
    return sent


def choices(dashboard: Any, ask: Callable[[str, str], list[str]]) -> list[dict[str, str]]:
    """Every choice of values; ``ask`` gives the values of a label (second) of what a selector (first) selects."""
    found: list[dict[str, str]] = [{}]
    for variable in variables(dashboard):
        selector, label = label_values(variable)
        more: list[dict[str, str]] = []
        for chosen in found:
            values = ask(substituted(selector, chosen), label)
            everything = [variable["allValue"]] if variable.get("includeAll") else []
            more += [{**chosen, variable["name"]: value} for value in [*everything, *values]]
        found = more
    return found
