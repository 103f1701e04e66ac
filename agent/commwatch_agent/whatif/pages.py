"""Answers as text. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from commwatch_agent.core.units import counted, percent, seconds
from commwatch_agent.whatif.answers import Answer, Forecast, Outcome, Study

#: Heads of the table of answers.
HEADS = ("change", "step", "80% of steps", "comm", "exposed", "rank-h/1,000", "saves")


def answer_rows(answers: Sequence[Answer]) -> Iterator[tuple[str, ...]]:
    """Yield the cells of the recorded job and of each answer, in the order of ``HEADS``."""
    if answers:
        yield ("as recorded", *_cells(answers[0].recorded), "")
    for each in answers:
        yield ("; ".join(each.changes), *_cells(each.predicted), percent(each.saves_share))


def _cells(of: Outcome) -> tuple[str, ...]:
    many = f" / {of.micro_steps}" if of.micro_steps > 1 else ""
    spread = f"{seconds(of.low_s)} to {seconds(of.high_s)}"
    return (
        f"{seconds(of.step_s)}{many}",
        spread,
        percent(of.comm_share),
        percent(of.exposed_share),
        f"{of.rank_hours:.3g}",
    )


def text(study: Study) -> list[str]:
    """Return a study as lines for a terminal; names of the job in them are as the job gave them."""
    lines = [f"what if, job {study.job_id}: {counted(study.steps, 'step')} of {counted(study.ranks, 'rank')} replayed"]
    lines.append(f"recorded step {seconds(study.measured_s)}, replayed without changes {seconds(study.replayed_s)}")
    lines += ["", *_table(HEADS, list(answer_rows(study.answers)))]
    if study.forecast is not None:
        rows = _table(FORECAST_HEADS, list(forecast_rows(study.forecast)))
        lines += ["", "scaling", study.forecast.assumes, *rows, *limit(study.forecast)]
    if study.assumed:
        lines += ["", "assumed", *(f"  - {each}" for each in study.assumed)]
    return lines


#: Heads of the table of a forecast.
FORECAST_HEADS = ("ranks", "step", "communication", "efficiency", "measured step")


def forecast_rows(found: Forecast) -> Iterator[tuple[str, ...]]:
    """Yield the cells of each point, in the order of ``FORECAST_HEADS``."""
    for point in found.points:
        known = "" if point.measured_s is None else seconds(point.measured_s)
        yield str(point.ranks), seconds(point.step_s), percent(point.comm_share), percent(point.efficiency), known


def limit(found: Forecast) -> list[str]:
    """Return the number of ranks from which communication is the bottleneck, as a sentence."""
    if found.limit_ranks is None:
        return [f"communication stays at or below {percent(found.limit_share)} of a step"]
    return [f"communication takes more than {percent(found.limit_share)} of a step from {found.limit_ranks} ranks on"]


def _table(heads: Sequence[str], cells: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(heads, *cells, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if not at else cell.rjust(width)
            for at, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in (heads, *cells)
    ]
