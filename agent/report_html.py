"""The report as one self-contained page, with plots."""

from __future__ import annotations

import re

from commwatch import pages
from commwatch.advice import Advice
from commwatch.pictures import Material, figures
from commwatch.plots import STYLE
from commwatch.report import LEGEND, OPERATION_HEAD, RANK_HEAD, Report, headlines, operation_cells, rank_cells


def html(report: Report, material: Material) -> str:
    """One file: attached to a ticket it needs nothing from elsewhere."""
    body = [pages.table((), headlines(report))]
    if report.advice:
        body += ["<h2>What to try</h2><p>Gains are upper bounds.</p>", *map(_advice, report.advice)]
    body.append(figures(material))
    if report.ranks and report.steps:
        ranks = [rank_cells(line) for line in report.ranks]
        body += ["<h2>Ranks</h2>", pages.table(RANK_HEAD, ranks, "numbers")]
    if report.operations:
        operations = [operation_cells(row) for row in report.operations]
        body += ["<h2>Operations</h2>", pages.table(OPERATION_HEAD, operations, "numbers"), f"<p>{LEGEND}</p>"]
    else:
        body.append("<p>No operations were seen.</p>")
    body.append(
        f"<p>History: <code>{pages.text(report.history)}</code>. Again: <code>{pages.text(report.command)}</code></p>"
    )
    return pages.page(f"commwatch report: {report.job.job_id}", "\n".join(body), STYLE)


def _advice(advice: Advice) -> str:
    """A piece of it, and the numbers that led to it."""
    do = re.sub("`([^`]+)`", r"<code>\1</code>", pages.text(advice.do))
    because = pages.text("; ".join(advice.because))
    return f"<h3>{pages.text(advice.title)}</h3><p>{pages.text(advice.gain[:1].upper() + advice.gain[1:])}.</p><p>{do}</p><p>Because {because}.</p>"
