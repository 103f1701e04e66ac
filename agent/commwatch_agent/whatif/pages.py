"""Answers as text. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from commwatch_agent.text.plain_table import paragraph
from commwatch_agent.text.units import counted, percent, rank_time, seconds
from commwatch_agent.whatif.answers import Answer, Forecast, Outcome, Study, is_close

#: Heads of the table of answers.
HEADS = ("change", "step", "80% of steps", "comm", "exposed", "1,000 steps", "saves")
#: What the columns mean.
LEGEND = (
    "80% of steps: without the shortest and the longest tenth; 1,000 steps: time of all ranks for them (GPU time if each rank has a GPU); "
    "saves: time for the same work of a rank"
)


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
        rank_time(of.rank_hours),
    )


def text(study: Study) -> list[str]:
    """Return a study as lines for a terminal; names of the job in them are as the job gave them."""
    steps = f"the latest {counted(study.steps, 'step')} of {counted(study.ranks, 'rank')}"
    lines = [f"what if, job {study.job_id}: {steps} replayed"]
    lines.append(basis(study))
    lines += ["", *_table(HEADS, list(answer_rows(study.answers))), "", *paragraph(LEGEND)]
    lines += _listed("not answered", unanswered(study))
    if study.forecast is not None:
        rows = _table(FORECAST_HEADS, list(forecast_rows(study.forecast)))
        lines += ["", "scaling", study.forecast.assumes, *rows, *remarks(study.forecast)]
    return lines + _listed("assumed", assumed(study))


def basis(study: Study) -> str:
    """Return the median step as recorded and as replayed, and whether gains can be relied on."""
    both = (
        f"median step {seconds(study.measured_s)} as recorded, {seconds(study.replayed_s)} as replayed without changes"
    )
    if is_close(study.replayed_s, study.measured_s):
        return both
    off = abs(study.replayed_s / study.measured_s - 1)
    return f"{both}: the replay is {percent(off)} off, so all gains are rough, and advice does not use them"


def _listed(title: str, texts: Sequence[str]) -> list[str]:
    return ["", title, *(f"  - {each}" for each in texts)] if texts else []


def unanswered(study: Study) -> list[str]:
    """Return the usual questions without an answer, each with the reason."""
    return [f"{question}: {why}" for question, why in study.unanswered.items()]


def assumed(study: Study) -> list[str]:
    """Return what was assumed, without what the scaling says above its table."""
    scaling = "" if study.forecast is None else study.forecast.assumes
    return [each for each in study.assumed if each != scaling]


#: Heads of the table of a forecast.
FORECAST_HEADS = ("ranks", "step", "communication", "efficiency", "measured step")


def forecast_rows(found: Forecast) -> Iterator[tuple[str, ...]]:
    """Yield the cells of each point, in the order of ``FORECAST_HEADS``."""
    for point in found.points:
        known = "" if point.measured_s is None else seconds(point.measured_s)
        yield str(point.ranks), seconds(point.step_s), percent(point.comm_share), percent(point.efficiency), known


def remarks(found: Forecast) -> list[str]:
    """Return from which number of ranks on communication takes a large share of a step, and what fewer ranks assume, as sentences."""
    share = f"{percent(found.limit_share)} of a step"
    what = "communication, including waiting for late ranks,"
    if found.limit_ranks is None:
        most = max(point.ranks for point in found.points)
        limit = f"{what} stays at or below {share} up to {counted(most, 'rank')}"
    else:
        limit = f"{what} takes more than {share} from {counted(found.limit_ranks, 'rank')} on"
    return [limit, *filter(None, [found.fewer])]


def _table(heads: Sequence[str], cells: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(heads, *cells, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if not at else cell.rjust(width)
            for at, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in (heads, *cells)
    ]
