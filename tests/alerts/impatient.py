"""The list of alerts as it is shipped, except that conditions need not hold for minutes."""

from __future__ import annotations

import re

from commwatch_alerts.catalogue import shipped


def impatient() -> str:
    """Return the list with ``for`` and ``keep_firing_for`` of 15 s, one round of the agent."""
    text, number = re.subn(r"\b((?:keep_firing_)?for): \d+m$", r"\1: 15s", shipped("rules.yaml"), flags=re.MULTILINE)
    assert number > 30
    return text
