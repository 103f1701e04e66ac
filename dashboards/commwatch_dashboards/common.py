"""Shared parts of the dashboards: panels with their queries, variables, links, and the conversion to Grafana's JSON.

The builders run at development time, because they need ``grafana-foundation-sdk``. The agent uses the generated JSON.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from grafana_foundation_sdk.builders import common as c
from grafana_foundation_sdk.builders import dashboard as d
from grafana_foundation_sdk.builders import heatmap as heat
from grafana_foundation_sdk.builders import prometheus, stat, statetimeline, table, timeseries
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import common as mc
from grafana_foundation_sdk.models import dashboard as md
from grafana_foundation_sdk.models import heatmap as mheat
from grafana_foundation_sdk.models.prometheus import PromQueryFormat

from commwatch_alerts.catalogue import read, shipped
from commwatch_alerts.export import RUNBOOK_URL

DATASOURCE = md.DataSourceRef(type_val="prometheus", uid="${datasource}")
CLUSTER, JOB, NODE = "commwatch-cluster", "commwatch-job", "commwatch-node"
_TITLES = {CLUSTER: "commwatch / Cluster", JOB: "commwatch / Job", NODE: "commwatch / Node"}
_ALERTS = read(shipped("rules.yaml"))
#: Regular expression of our alerts' names, because the metric ``ALERTS`` has alerts of other rules, too.
ALERT_NAMES = "|".join(dict.fromkeys(rule.name for rule in _ALERTS.alerts))
#: Default thresholds of the list of alerts, by name.
THRESHOLD = {each.name: each.default for each in _ALERTS.thresholds}
#: Shares (0 to 1) above which communication deserves attention, and above which the state is critical.
COMM_SHARE = (THRESHOLD["comm_share"], THRESHOLD["comm_share_critical"])
#: Windows of rates: of values over time, which Grafana derives from the time range shown, and of current values. Of a job that began within
#: the window, a rate is too low, so the latter is as short as scrapes up to one minute apart allow.
OVER_TIME, LATELY = "$__rate_interval", "2m"
#: Labels whose table cells link to a dashboard: its uid, and its name in the link's title.
_CELL_LINKS = {"job_id": (JOB, "Job"), "instance": (NODE, "Node")}
Row = tuple[str, Sequence["Panel"]]
Panel = timeseries.Panel | stat.Panel | table.Panel | heat.Panel | statetimeline.Panel


@dataclass(frozen=True)
class Query:
    """One query of a panel.

    Args:
        expr: PromQL.
        name: legend of its series, as a Grafana template; in a table the title of its column.
        unit: unit of its column, if it is not the table's unit.
    """

    expr: str
    name: str
    unit: str = ""


def lines(
    title: str,
    description: str,
    unit: str,
    *queries: Query,
    width: int = 12,
    marks: Sequence[float] = (),
    most: float | None = None,
) -> timeseries.Panel:
    """Return a panel of values over time. Gaps in the data are gaps in the line, because absent is not 0.

    Args:
        marks: thresholds, drawn as dashed lines; values above them are worse.
        most: the upper end of the axis.
    """
    panel = (
        timeseries.Panel()
        .fill_opacity(8)
        .show_points(mc.VisibilityMode.AUTO)
        .span_nulls(False)
        .legend(
            c.VizLegendOptions()
            .display_mode(mc.LegendDisplayMode.LIST)
            .placement(mc.LegendPlacement.BOTTOM)
            .show_legend(True)
        )
        .tooltip(c.VizTooltipOptions().mode(mc.TooltipDisplayMode.MULTI).sort(mc.SortOrder.DESCENDING))
        .axis_soft_min(0)
    )
    if marks:
        panel = panel.thresholds(_steps(marks)).thresholds_style(
            c.GraphThresholdsStyleConfig().mode(mc.GraphThresholdsStyleMode.DASHED)
        )
    if most is not None:
        panel = panel.max(most)
    for query in _targets(queries):
        panel = panel.with_target(query)
    return panel.title(title).description(description).unit(unit).datasource(DATASOURCE).height(8).span(width)


def number(
    title: str, description: str, unit: str, expr: str, *, marks: Sequence[float] = (), nothing: str = "not known"
) -> stat.Panel:
    """Return a panel with one current number.

    Args:
        marks: values from which the number is yellow and red, or only red if there is one.
        nothing: text to show if there is no value.
    """
    return (
        stat.Panel()
        .title(title)
        .description(description)
        .unit(unit)
        .no_value(nothing)
        .thresholds(_steps(marks))
        .color_mode(mc.BigValueColorMode.VALUE)
        .graph_mode(mc.BigValueGraphMode.NONE)
        .reduce_options(c.ReduceDataOptions().calcs(["lastNotNull"]))
        .datasource(DATASOURCE)
        .with_target(_query(expr).instant())
        .height(4)
        .span(4)
    )


def cells(
    title: str, description: str, labels: Mapping[str, str], *columns: Query, width: int = 24, sort: str = ""
) -> table.Panel:
    """Return a table of current values: a row for each set of labels, a column for each query.

    Args:
        labels: titles of the label columns by label, in order. Jobs and nodes link to their dashboards.
        sort: title of the column to sort by, highest value first; with a minus before it, lowest first.
    """
    values = [f"Value #{chr(ord('A') + n)}" if len(columns) > 1 else "Value" for n in range(len(columns))]
    names = {**labels, **dict(zip(values, (column.name for column in columns), strict=True))}
    order = {"excludeByName": {"Time": True}, "renameByName": names, "indexByName": {n: i for i, n in enumerate(names)}}
    panel = table.Panel().with_transformation(md.DataTransformerConfig(id_val="merge", options={}))
    panel = panel.with_transformation(md.DataTransformerConfig(id_val="organize", options=order))
    for column in columns:
        panel = panel.override_by_name(column.name, [md.DynamicConfigValue(id_val="unit", value=column.unit)])
    for label, (uid, what) in _CELL_LINKS.items():
        if label not in labels:
            continue
        url = f"/d/{uid}?${{datasource:queryparam}}&var-{label}=${{__value.raw}}&${{__url_time_range}}"
        link = {"title": f"{what} ${{__value.text}}", "url": url}
        panel = panel.override_by_name(labels[label], [md.DynamicConfigValue(id_val="links", value=[link])])
    if sort:
        panel = panel.sort_by([c.TableSortByFieldState().display_name(sort.lstrip("-")).desc(not sort.startswith("-"))])
    for query in _targets(columns):
        panel = panel.with_target(query.instant().format(PromQueryFormat.TABLE))
    panel = panel.show_header(True).unit("short").datasource(DATASOURCE)
    return panel.title(title).description(description).height(8).span(width)


def rank_map(title: str, description: str, unit: str, expr: str, width: int = 12) -> heat.Panel:
    """Return a heatmap of ranks over time, coloured by value.

    Args:
        expr: PromQL whose series have the label ``rank``; several series of one rank are summed.
    """
    # Grafana sorts rows as Prometheus sorts their labels, so the numbers get leading zeros; and it takes numeric rows for
    # bucket bounds, so they get the word "rank".
    padded = f'label_replace({expr}, "row", "000$1", "rank", "(.+)")'
    by_row = f'sum by (row) (label_replace({padded}, "row", "rank $1", "row", "0*(.{{4,}})"))'
    return (
        heat.Panel()
        .title(title)
        .description(description)
        .unit(unit)
        .calculate(False)
        .rows_frame(heat.RowsHeatmapOptions().layout(mc.HeatmapCellLayout.UNKNOWN))
        .color(heat.HeatmapColorOptions().mode(mheat.HeatmapColorMode.SCHEME).scheme("Oranges").steps(64))
        .cell_values(heat.CellValues().unit(unit))
        .cell_gap(1)
        .show_color_scale(True)
        .datasource(DATASOURCE)
        .with_target(_query(by_row).legend_format("{{row}}"))
        .height(8)
        .span(width)
    )


def states(title: str, description: str, query: Query, texts: Mapping[str, tuple[str, str]], width: int = 12) -> Panel:
    """Return a panel of states over time.

    Args:
        texts: the text and the colour of each value.
    """
    mapped = {value: md.ValueMappingResult(text=text, color=color) for value, (text, color) in texts.items()}
    return (
        statetimeline.Panel()
        .title(title)
        .description(description)
        .unit("short")
        .mappings([md.ValueMap(options=mapped)])
        .show_value(mc.VisibilityMode.NEVER)
        .merge_values(True)
        .row_height(0.8)
        .legend(
            c.VizLegendOptions()
            .display_mode(mc.LegendDisplayMode.LIST)
            .placement(mc.LegendPlacement.BOTTOM)
            .show_legend(True)
        )
        .datasource(DATASOURCE)
        .with_target(_query(query.expr).legend_format(query.name))
        .height(8)
        .span(width)
    )


def one_of(name: str, label: str, description: str, query: str) -> d.QueryVariable:
    """Return a dashboard variable that selects one value of a label."""
    return (
        d.QueryVariable(name)
        .label(label)
        .description(description)
        .query(query)
        .datasource(DATASOURCE)
        .refresh(md.VariableRefresh.ON_TIME_RANGE_CHANGED)
        .sort(md.VariableSort.NATURAL_ASC)
    )


def dashboard(
    uid: str, description: str, variables: Sequence[d.QueryVariable], rows: Sequence[Row], alerts: str = ""
) -> dict[str, Any]:
    """Return a dashboard as Grafana's JSON.

    Args:
        rows: title and panels of each row, from left to right; panels wrap after 24 columns.
        alerts: label matchers of the ``ALERTS`` to mark in its panels; empty: none.
    """
    made = (
        d.Dashboard(_TITLES[uid])
        .uid(uid)
        .description(description)
        .tags(["commwatch"])
        .readonly()
        .refresh("30s")
        .time("now-1h", "now")
        .timezone("browser")
        .tooltip(md.DashboardCursorSync.CROSSHAIR)
        .with_variable(d.DatasourceVariable("datasource").label("Data source").type("prometheus"))
    )
    for variable in variables:
        made = made.with_variable(variable)
    for other, name in _TITLES.items():
        if other != uid:
            made = made.link(_link(name, f"/d/{other}", "keeps data source and time range").include_vars(True))
    made = made.link(_link("Runbook", RUNBOOK_URL, "what each alert means, and what to do").target_blank(True))
    for title, panels in rows:
        made = made.with_row(d.Row(title))
        for panel in panels:
            made = made.with_panel(panel)
    return _finished(json.loads(json.dumps(made.build(), cls=JSONEncoder)), alerts)


def text(made: Mapping[str, Any]) -> str:
    """Return the text of a dashboard's file."""
    return json.dumps(made, indent=1, sort_keys=True, ensure_ascii=False) + "\n"


def _link(title: str, url: str, tooltip: str) -> d.DashboardLink:
    link = d.DashboardLink(title).type(md.DashboardLinkType.LINK).url(url).tooltip(tooltip)
    return link.icon("external link").keep_time(True)


def _query(expr: str) -> prometheus.Dataquery:
    return prometheus.Dataquery().ref_id("A").expr(expr).datasource(DATASOURCE)


def _targets(queries: Sequence[Query]) -> list[prometheus.Dataquery]:
    named = ((chr(ord("A") + n), query) for n, query in enumerate(queries))
    return [_query(query.expr).ref_id(ref_id).legend_format(query.name) for ref_id, query in named]


def _steps(marks: Sequence[float]) -> d.ThresholdsConfig:
    colors = ("yellow", "red") if len(marks) > 1 else ("red",)
    steps = [md.Threshold(value=None, color="green")]
    steps += [md.Threshold(value=mark, color=color) for mark, color in zip(marks, colors, strict=bool(marks))]
    return d.ThresholdsConfig().mode(md.ThresholdsMode.ABSOLUTE).steps(steps)


def _finished(made: dict[str, Any], alerts: str) -> dict[str, Any]:
    """Number the panels, remove fields that the SDK adds wrongly, and add the alerts' annotation, which it lacks."""
    for n, panel in enumerate(made["panels"], 1):
        panel["id"] = n
        panel.get("options", {}).pop("footer", None)  # newer Grafana tables have no footer
    for variable in made["templating"]["list"]:
        for key in ("auto", "auto_min", "auto_count"):  # only interval variables have these keys
            variable.pop(key, None)
    if alerts:
        # The SDK has no field for PromQL in an annotation.
        made["annotations"] = {"list": [_annotation(alerts)]}
    return made


def _annotation(matchers: str) -> dict[str, Any]:
    expr = f'max by (alertname, severity) (ALERTS{{alertstate="firing", {matchers}}})'
    return {
        "name": "Alerts",
        "datasource": {"type": "prometheus", "uid": "${datasource}"},
        "enable": True,
        "iconColor": "red",
        "expr": expr,  # older Grafanas read it here
        "target": {"expr": expr, "interval": "", "refId": "Anno"},
        "titleFormat": "{{alertname}}",
        "textFormat": "{{severity}}",
        "tagKeys": "severity",
    }
