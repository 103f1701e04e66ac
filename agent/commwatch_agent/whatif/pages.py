"""Answers as text. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain

from commwatch_agent.analysis.advice_facts import on_condition
from commwatch_agent.text.plain_table import CELLS, columns, paragraph
from commwatch_agent.text.units import counted, percent, rank_time, seconds
from commwatch_agent.whatif.answers import Answer, Forecast, Outcome, Study, is_close

#: Heads of the table of answers.
HEADS = ("change", "step", "80% of steps", "comm", "exposed", "1,000 steps", "saves")
#: What is left out in a narrow terminal, the least important first.
_LESS = ("80% of steps", "1,000 steps")
#: What the columns mean.
LEGEND = (
    "80% of steps: without the shortest and the longest tenth; 1,000 steps: time of all ranks for them (GPU time if each rank has a GPU); "
    "saves: time for the same work of a rank. comm, exposed: of the replay of these steps; the report has them as measured, of all usual steps of the job"
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


def text(study: Study, cells: int = CELLS) -> list[str]:
    """Return a study as lines for a terminal of ``cells`` columns; names of the job in them are as the job gave them."""
    steps = f"the latest {counted(study.steps, 'step')} of {counted(study.ranks, 'rank')}"
    shown = paragraph(f"what if, job {study.job_id}: {steps} replayed", cells, rest="    ")
    shown += paragraph(basis(study), cells, rest="    ")
    shown += ["", *columns(HEADS, list(answer_rows(study.answers)), 1, cells, optional=_LESS), ""]
    shown += chain.from_iterable(paragraph(each, cells) for each in (*condition(study), LEGEND))
    shown += _listed("not answered", unanswered(study), cells)
    if study.forecast is not None:
        shown += ["", "scaling", *paragraph(study.forecast.assumes, cells, rest="    "), ""]
        heads, *rows = forecast_table(study.forecast)
        shown += [*columns(heads, rows, 1, cells), ""]
        shown += chain.from_iterable(paragraph(each, cells) for each in remarks(study.forecast))
    return shown + _listed("assumed", assumed(study), cells)


def basis(study: Study) -> str:
    """Return the median step as recorded and as replayed, and whether gains can be relied on."""
    both = (
        f"median step {seconds(study.measured_s)} as recorded, {seconds(study.replayed_s)} as replayed without changes"
    )
    if is_close(study.replayed_s, study.measured_s):
        return both
    off = abs(study.replayed_s / study.measured_s - 1)
    return f"{both}: the replay is {percent(off)} off, so all gains are rough, and advice does not use them"


def condition(study: Study) -> list[str]:
    """Return in one sentence which cores the estimates assume, if the ranks lacked them; else nothing."""
    assumes = on_condition(study.core_wait_share)
    return [f"these estimates assume {assumes}"] if assumes else []


def _listed(title: str, texts: Sequence[str], cells: int) -> list[str]:
    lines = chain.from_iterable(paragraph(each, cells, first="  - ") for each in texts)
    return ["", title, *lines] if texts else []


def unanswered(study: Study) -> list[str]:
    """Return the usual questions without an answer, each with the reason."""
    return [f"{question}: {why}" for question, why in study.unanswered.items()]


def assumed(study: Study) -> list[str]:
    """Return what was assumed, without what the scaling says above its table."""
    scaling = "" if study.forecast is None else study.forecast.assumes
    return [each for each in study.assumed if each != scaling]


def forecast_table(found: Forecast) -> list[tuple[str, ...]]:
    """Return the heads and the cells of each point; without a column on measured steps if there are none, as after a change."""
    table: list[tuple[str, ...]] = [("ranks", "step", "communication", "efficiency", "measured step")]
    for point in found.points:
        known = "" if point.measured_s is None else seconds(point.measured_s)
        table.append(
            (str(point.ranks), seconds(point.step_s), percent(point.comm_share), percent(point.efficiency), known)
        )
    return table if any(row[-1] for row in table[1:]) else [row[:-1] for row in table]


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
