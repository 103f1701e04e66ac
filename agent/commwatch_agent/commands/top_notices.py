"""What is wrong, as lines on top of ``commwatch top``. Pure."""

from __future__ import annotations

from collections import Counter

from rich.text import Text

from commwatch_agent.analysis.rank_state import shedding
from commwatch_agent.commands.top_answers import Answers
from commwatch_agent.core.terminal_text import clean
from commwatch_agent.core.text_table import wrap
from commwatch_alerts.model import SEVERITIES
from commwatch_collectors.spans import ranks

#: Styles of severities and kinds of verdicts.
STYLES = {"critical": "bad", "warning": "warn", "error": "bad", "hang": "bad", "desync": "bad", "corruption": "bad"}
#: Alerts of lower numbers come first.
_SEVERITIES = {severity: -n for n, severity in enumerate(SEVERITIES)}


def notices(answers: Answers) -> list[tuple[str, str]]:
    """Return what is wrong, the text and style of each notice, the worst first."""
    shown = answers.shown
    said = [] if answers.about.trouble is None else [(f"agent: {answers.about.trouble}", "bad")]
    if shown is not None:
        silent = shown.nodes.silent.items()
        said += [(f"no answer from {url} ({why}): ranks of its node are missing below", "bad") for url, why in silent]
    if shown is not None and shown.job.ending:
        said.append((f"FAILED {shown.job.ending}" if shown.job.failed else shown.job.ending, "bad"))
    if shown is not None:
        for verdict in sorted(shown.verdicts, key=lambda verdict: STYLES.get(verdict.kind, "warn")):
            style = STYLES.get(verdict.kind, "warn")
            whom = ranks(verdict.ranks) if verdict.ranks else "no rank"
            says = verdict.says.removeprefix(f"{verdict.kind}: ")
            said.append((f"{verdict.kind.upper()} {whom}: {says}", style))
    firing = [alert for alert in answers.alerts if alert.state == "firing"]
    for alert in sorted(firing, key=lambda alert: _SEVERITIES.get(alert.severity, 0)):
        text = alert.annotations.get("summary", "")
        said.append((f"ALERT {alert.name}: {text}", STYLES.get(alert.severity, "")))
    part = (
        None
        if shown is None
        else shedding((rank.rank, rank.probe_mode) for rank in shown.ranks if rank.state == "running")
    )
    said += [] if part is None else [(part, "warn")]
    said += [(f"GPU {view.gpu.card.index}: {view.gpu.lost}", "bad") for view in answers.gpus.gpus if view.gpu.lost]
    if shown is not None:
        said += [(f"NCCL {found.title}: {found.says}", STYLES.get(found.severity, "")) for found in shown.findings]
        said += [(f"TRY {each.title}: {each.gain}", "") for each in shown.advice[:1]]
    pending = Counter(alert.name for alert in answers.alerts if alert.state == "pending")
    said += [(f"pending: {', '.join(pending)}", "dim")] if pending else []
    said += [(f"other jobs run here: {', '.join(answers.others)} (--job)", "dim")] if answers.others else []
    return [(clean(text), style) for text, style in said]


def wrapped(said: list[tuple[str, str]], cells: int, height: int | None) -> list[Text]:
    """Return notices as lines; if ``height`` is given, at most two lines each, and a count of the notices left out."""
    whole = [wrap(text, cells, height and 2, style) for text, style in said]
    lines: list[Text] = []
    for i, parts in enumerate(whole):
        last = i == len(whole) - 1
        if height is not None and len(lines) + len(parts) + (not last) > height:
            if len(lines) < height:
                lines.append(Text(f"and {len(whole) - i} more: commwatch diagnose, commwatch report", "dim"))
            break
        lines += parts
    return lines
