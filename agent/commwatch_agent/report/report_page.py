"""The report as one self-contained page, with plots."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial

from commwatch_agent.analysis.advice_input import MOST_TIMED
from commwatch_agent.model.api_views import Advice
from commwatch_agent.model.nccl_views import NcclOperations, Topology
from commwatch_agent.model.views import GroupView
from commwatch_agent.report import html_frame, slowest_parts, what_happened
from commwatch_agent.report.charts import Material, figures
from commwatch_agent.report.parts import ReportParts
from commwatch_agent.report.report import Report
from commwatch_agent.report.report_text import (
    LEGEND,
    OPERATION_HEAD,
    about,
    heading,
    headlines,
    judging,
    operation_cells,
    rank_head,
    rank_rows,
    reasons,
)
from commwatch_agent.report.svg import STYLE
from commwatch_agent.report.what_happened import happened, scarce_cores
from commwatch_agent.text.units import counted, percent, rate, seconds, size
from commwatch_agent.whatif.answers import Study
from commwatch_agent.whatif.pages import (
    HEADS,
    answer_rows,
    assumed,
    basis,
    condition,
    forecast_table,
    remarks,
    unanswered,
)
from commwatch_agent.whatif.pages import LEGEND as WHATIF_LEGEND
from commwatch_collectors.nccl.views import Finding
from commwatch_collectors.spans import spans

#: Most rows of what NCCL chose.
_MOST_CHOICES = 40


def html(report: Report, material: Material, topology: Topology | None = None, study: Study | None = None) -> str:
    """Return one HTML file without external resources, so that it can be attached to a ticket.

    Args:
        topology: the job's topology from NCCL's logs.
        study: what changes would do to the job.
    """
    found = happened(report.incidents)
    body = [
        html_frame.table((), heading(report)),
        *what_happened.html(found, failed=bool(report.job.failed), scarce=scarce_cores(report.core_wait_share, found)),
        "<h2>Figures</h2>",
        html_frame.table((), headlines(report)),
    ]
    if report.advice:
        of_what = f"<p>{about(report.advice_last_s).capitalize()}. “Up to” marks a bound by a formula.</p>"
        body += ["<h2>What to try</h2>", of_what, *map(_advice, report.advice, reasons(report.advice))]
    body += [] if study is None else _section("what-if", partial(_study, study))
    body += ["<h2>Findings in NCCL's logs</h2>", *map(_finding, report.findings)] if report.findings else []
    body += _section("charts", lambda: [figures(material, report.late)])
    if topology is not None and topology.communicators:
        body += _section("topology", partial(_topology, topology, material.groups))
    if report.ranks and report.steps:
        ranks = rank_rows(report)
        body += ["<h2>Ranks</h2>", html_frame.table(rank_head(report), ranks, "numbers ranks")]
    if report.operations:
        operations = [operation_cells(row) for row in report.operations]
        body += [
            "<h2>Operations</h2>",
            html_frame.table(OPERATION_HEAD, operations, "numbers operations"),
            f"<p>{LEGEND}</p>",
        ]
        if unjudged := judging(report):
            body.append(f"<p>{_with_code(unjudged)}</p>")
    else:
        body.append("<p>No operations were seen.</p>")
    if report.slowest_parts:
        head, rows, _ = slowest_parts.table(report.slowest_parts)
        slowest = html_frame.table(head, rows, "numbers parts")
        body += ["<h2>Slowest parts of the model</h2>", slowest, f"<p>{slowest_parts.LEGEND}</p>"]
    body += _section("what NCCL chose", partial(_chosen, material.choices))
    body.append(
        f"<p>History: <code>{html_frame.text(report.history)}</code>. Again: <code>{html_frame.text(report.command)}</code></p>"
    )
    return html_frame.page(f"commwatch report: {report.job.job_id}", "\n".join(body), STYLE)


def _section(name: str, function: Callable[[], list[str]]) -> list[str]:
    """Return a section of the page, or in its place why there is none."""
    parts, nothing = ReportParts(), list[str]()
    made = parts.part(name, function, nothing)
    return [*made, *(f"<p>{html_frame.text(f'{name}: {why}')}</p>" for why in parts.missing.values())]


def _with_code(text: str) -> str:
    """Return text as HTML; what is between backquotes is code."""
    return re.sub("`([^`]+)`", r"<code>\1</code>", html_frame.text(text))


def _advice(advice: Advice, reason: str) -> str:
    """Return one piece of advice and why it is given as HTML."""
    do, because = _with_code(advice.do), html_frame.text(reason)
    return f"<h3>{html_frame.text(advice.title)}</h3><p>{html_frame.text(advice.gain[:1].upper() + advice.gain[1:])}.</p><p>{do}</p><p>Because {because}.</p>"


def _study(study: Study) -> list[str]:
    """Return the answers of a replay as tables."""
    steps = f"{counted(study.steps, 'step')} of {counted(study.ranks, 'rank')}"
    intro = f"<p>The replay of the latest {steps}: {basis(study)}. {html_frame.text(WHATIF_LEGEND)}; / 4 after a step time: the step has 4 micro-steps.</p>"
    parts = ["<h2>What if</h2>", intro, html_frame.table(HEADS, list(answer_rows(study.answers)), "numbers changes")]
    parts += [f"<p>{html_frame.text(each[:1].upper() + each[1:])}.</p>" for each in condition(study)]
    parts += _list("Not answered:", unanswered(study))
    if study.forecast is not None:
        heads, *scaling = forecast_table(study.forecast)
        assumes = html_frame.text(study.forecast.assumes[:1].upper() + study.forecast.assumes[1:])
        parts += ["<h3>Scaling</h3>", f"<p>{assumes}.</p>", html_frame.table(heads, scaling, "numbers")]
        parts += [f"<p>{html_frame.text(each[:1].upper() + each[1:])}.</p>" for each in remarks(study.forecast)]
    return parts + _list("Assumed:", assumed(study))


def _list(title: str, texts: Sequence[str]) -> list[str]:
    """Return texts as a list with a title; nothing if there are none."""
    items = "".join(f"<li>{html_frame.text(each)}</li>" for each in texts)
    return [f"<p>{title}</p><ul>{items}</ul>"] if items else []


def _finding(finding: Finding) -> str:
    """Return a finding, its meaning and its remedy as HTML."""
    where = ", ".join(f"{line.file}:{line.line}" for line in finding.evidence[:3])
    parts = [html_frame.text(part) for part in (finding.says, finding.means, finding.do, where) if part]
    return f"<h3>{html_frame.text(finding.severity)}: {html_frame.text(finding.title)}</h3>" + "".join(
        f"<p>{part}</p>" for part in parts
    )


def _topology(topology: Topology, groups: list[GroupView]) -> list[str]:
    """Return what NCCL's logs say on the library and its communicators."""
    return [f"<h2>{html_frame.text(topology.library)}</h2>", _library(topology), _communicators(topology, groups)]


def _library(topology: Topology) -> str:
    chosen = Counter(f"{choice.algo}/{choice.proto}" for choice in topology.choices)
    rows = [
        ("version", ", ".join(topology.versions)),
        ("hosts", ", ".join(host.host for host in topology.hosts)),
        ("algorithm and protocol, by how often chosen", ", ".join(name for name, _ in chosen.most_common())),
    ]
    return html_frame.table((), [(name, value) for name, value in rows if value])


def _chosen(choices: list[NcclOperations]) -> list[str]:
    """Return a table of what NCCL chose, with its own times; nothing where its plugin reports nothing."""
    if not choices:
        return []
    head = (
        "group", "op", "size up to", "algorithm", "protocol", "channels", "count", "mean", "in the queue", "busbw", "last channel",
    )  # fmt: skip
    rows = [
        (
            each.group,
            each.op,
            "–" if each.size_log2 < 0 else size(1 << each.size_log2),
            each.algorithm or "–",
            each.protocol or "–",
            "–" if each.channels is None else str(each.channels),
            str(each.count),
            seconds(each.mean_s),
            seconds(each.queued_s),
            rate(each.busbw),
            "–"
            if each.last_channel is None
            else f"{each.last_channel} ({percent(each.last_share)}, +{seconds(each.apart_s)})",
        )
        for each in choices[:_MOST_CHOICES]
    ]
    legend = (
        f"By NCCL's own times, of the latest {MOST_TIMED:,} operations that it timed, those with the most time first. "
        "In the queue: from the launch to the start of the kernels, behind earlier work of the stream and until the inputs are ready. "
        "Last channel: the one that ended last most often, in which part of the operations, and how long after the first channel the last one ended on average."
    )
    queues = html_frame.text(f"Mean time in the queue by group: {', '.join(_queues(choices))}.")
    return ["<h2>What NCCL chose</h2>", html_frame.table(head, rows, "numbers"), f"<p>{legend}</p><p>{queues}</p>"]


def _queues(choices: list[NcclOperations]) -> list[str]:
    """Return each group with the mean time of its operations in the queue."""
    sums: dict[str, tuple[int, float]] = {}
    for each in choices:
        count, queued_s = sums.get(each.group, (0, 0.0))
        sums[each.group] = count + each.count, queued_s + each.count * each.queued_s
    return [f"{group} {seconds(queued_s / count)}" for group, (count, queued_s) in sums.items()]


def _communicators(topology: Topology, groups: list[GroupView]) -> str:
    """Return a table of the connections between ranks, from NCCL's logs."""
    labels = {group.group_id: group.group for group in groups}
    rows = [
        (
            ", ".join(labels.get(group, group) for group in comm.group_ids) or comm.name,
            str(comm.nranks),
            "; ".join(f"{host}: {spans(ranks)}" for host, ranks in comm.hosts.items()),
            "–" if comm.coll_channels is None else str(comm.coll_channels),
            ", ".join(f"{transport} {count}" for transport, count in comm.transports.items()) or "–",
        )
        for comm in topology.communicators
    ]
    return html_frame.table(("group or communicator", "ranks", "where", "channels", "connections by transport"), rows)
