"""The report as one self-contained page, with plots."""

from __future__ import annotations

from html import escape

from commwatch import pages
from commwatch.pictures import Material, figures
from commwatch.plots import STYLE
from commwatch.report import LEGEND, OPERATION_HEAD, RANK_HEAD, Report, headlines, operation_cells, rank_cells


def html(report: Report, material: Material) -> str:
    """One file: attached to a ticket it needs nothing from elsewhere."""
    body = [pages.table((), headlines(report))]
    if report.ranks and report.steps:
        ranks = [rank_cells(line) for line in report.ranks]
        body += ["<h2>Ranks</h2>", pages.table(RANK_HEAD, ranks, "numbers")]
    operations = [operation_cells(row) for row in report.operations]
    body += ["<h2>Operations</h2>", pages.table(OPERATION_HEAD, operations, "numbers"), f"<p>{LEGEND}</p>"]
    if report.advice:
        rows = [(each.title, each.gain, each.do, "; ".join(each.because)) for each in report.advice]
        body += ["<h2>What to try</h2>", pages.table(("what", "gain, at most", "how", "because"), rows)]
    body.append(figures(material))
    body.append(f"<p>History: <code>{escape(report.history)}</code>. Again: <code>{escape(report.command)}</code></p>")
    return pages.page(f"commwatch report: {report.job.job_id}", "\n".join(body), STYLE)
