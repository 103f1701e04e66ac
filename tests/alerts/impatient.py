"""The list of alerts as it is shipped, except that conditions need not hold for minutes."""

from __future__ import annotations

import re
from pathlib import Path

from commwatch_alerts.catalogue import shipped


def impatient(for_s: int = 15) -> str:
    """Return the list with all durations of so many seconds; by default 15, one round of the agent."""
    shorter, listed = rf"\g<1>: {for_s}s", shipped("rules.yaml")
    keys = r"\b((?:keep_firing_)?for|(?:opens|ends)_after): \d+[ms]\b"
    text, number = re.subn(keys, shorter, listed)
    assert number > 70
    return text


def impatient_agent(file: Path, for_s: int = 15) -> dict[str, float | str]:
    """Write this list to a file; return the constants of an agent that reads it."""
    file.write_text(impatient(for_s), encoding="utf-8")
    return {"commwatch_agent.notify.alert_rules.RULES": str(file)}
