"""What is wrong, as lines on top of ``commwatch top``. Pure."""

from __future__ import annotations

import shlex
from collections.abc import Iterator

from rich.text import Text

from commwatch_agent.analysis.rank_state import shedding
from commwatch_agent.commands.top_answers import Answers, OfJob
from commwatch_agent.incidents.answers import IncidentView, in_order
from commwatch_agent.incidents.families import families, uncertain
from commwatch_agent.incidents.incident import STANDSTILLS
from commwatch_agent.incidents.words import is_over, lasted
from commwatch_agent.report.what_happened import ending
from commwatch_agent.text.terminal_text import clean
from commwatch_agent.text.text_table import wrap

#: Styles of severities, and of kinds of incidents.
STYLES = {"critical": "bad", "warning": "warn", "error": "bad"} | dict.fromkeys(
    ("hang", "desync", "corruption", "rank_lost"), "bad"
)


def notices(answers: Answers, first: str = "") -> list[tuple[str, str]]:
    """Return what is wrong, or was with an ended job, the text and style of each notice, the worst first.

    Args:
        first: the rule that the headline names, as ``headline.first``; empty: none.
    """
    shown = answers.shown
    said = [] if answers.about.trouble is None else [(f"agent: {answers.about.trouble}", "bad")]
    if shown is not None:
        silent = shown.nodes.silent.items()
        said += [(f"no answer from {url} ({why}): ranks of its node are missing below", "bad") for url, why in silent]
    if shown is not None and (how := ending(shown.job, shown.incidents)):
        said.append((f"FAILED {how}" if shown.job.failed else how, "bad"))
    said += _incidents(worth_showing(shown, answers.incidents))
    part = (
        None
        if shown is None
        else shedding((rank.rank, rank.probe_mode) for rank in shown.ranks if rank.state == "running")
    )
    said += [] if part is None else [(part, "warn")]
    said += [(f"GPU {view.gpu.card.index}: {view.gpu.lost}", "bad") for view in answers.gpus.gpus if view.gpu.lost]
    if shown is not None:
        said += [(f"NCCL {found.title}: {found.says}", STYLES.get(found.severity, "")) for found in shown.findings]
        said += _to_do(shown, first)
    every = [*answers.incidents, *(shown.incidents if shown is not None and shown.job.state == "running" else [])]
    pending = dict.fromkeys(each.title for each in uncertain(every))
    said += [(f"not yet certain: {', '.join(pending)}", "dim")] if pending else []
    said += [(f"other jobs run here: {', '.join(answers.others)} (--job)", "dim")] if answers.others else []
    return [(clean(text), style) for text, style in said]


def _to_do(shown: OfJob, first: str) -> list[tuple[str, str]]:
    """Return what to do about a job that makes no progress, else the first advice on making it faster.

    If the headline names a late rank or CPU cores, only advice on that: the other advice is of a longer time, or some seconds old.
    """
    stands = [
        each for each in shown.incidents if each.state == "open" and each.kind in STANDSTILLS and not is_over(each)
    ]
    if shown.job.state == "running" and stands:
        return [(f"DO {each.remedy}", "") for each in in_order(stands)[:1] if each.remedy]
    advice = [each for each in shown.advice if first in ("", each.rule)]
    return [(f"TRY {each.title}: {each.gain}", "") for each in advice[:1]]


def worth_showing(shown: OfJob | None, of_node: list[IncidentView]) -> list[IncidentView]:
    """Return the open incidents of a running job and of the node, or those of an ended job."""
    if shown is not None and shown.job.state != "running":
        return sorted((each for each in shown.incidents if each.state != "pending"), key=lambda each: each.began_at)
    return in_order(each for each in [*(shown.incidents if shown else []), *of_node] if each.state == "open")


def _incidents(incidents: list[IncidentView]) -> Iterator[tuple[str, str]]:
    for one in families(incidents):
        severity = "over" if is_over(one.cause) else one.cause.severity
        yield f"{severity.upper()} {_about(one.cause)}: {one.cause.says}", STYLES.get(severity, "")
        for _, effect in one.effects:
            yield f"Consequence: {_about(effect)}", "dim"


def _about(incident: IncidentView) -> str:
    """Return what an incident is, where in the code, when, and what it costs, in one line."""
    at = f" in {incident.place}" if incident.place else ""
    return f"{incident.title}{at}, {lasted(incident)}"


def wrapped(said: list[tuple[str, str]], cells: int, height: int | None, job: str = "") -> list[Text]:
    """Return notices as lines; if they have no room in ``height``, the first one as far as it has, at most two lines of each other one, and a
    count of those left out. The end of a notice is why something is wrong, so the worst one is whole.

    Args:
        job: whose they are; empty: of none.
    """
    of_job = f" {clean(shlex.quote(job))}" if job else ""
    first = height and max(1, height - (len(said) > 1))
    whole = [wrap(text, cells, None, style) for text, style in said]
    if height is not None and sum(map(len, whole)) > height:
        whole = [wrap(text, cells, 2 if n else first, style) for n, (text, style) in enumerate(said)]
    lines: list[Text] = []
    for i, parts in enumerate(whole):
        last = i == len(whole) - 1
        if height is not None and len(lines) + len(parts) + (not last) > height:
            if len(lines) < height:
                lines.append(Text(f"and {len(whole) - i} more: commwatch diagnose{of_job}", "dim"))
            break
        lines += parts
    return lines
