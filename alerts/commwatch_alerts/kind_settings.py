"""The tables ``[kinds.NAME]`` of the settings: their type, and what they change of kinds and rules. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from commwatch_alerts.model import SEVERITIES, Kind, KindSettings, Rule
from commwatch_alerts.values import DURATION, SWITCH, Keys, one_of

_UNCHANGED = KindSettings()
#: Of a table.
KIND = Keys(
    {"enabled": SWITCH, "severity": one_of(SEVERITIES), "for": DURATION},
    lambda table: KindSettings(table.get("enabled", True), table.get("severity"), table.get("for")),
)


def kind_with(kind: Kind, given: KindSettings) -> Kind:
    """Return a kind with its settings."""
    opens_after_s = kind.opens_after_s if given.for_s is None or kind.opens_after_s is None else given.for_s
    return replace(kind, enabled=given.enabled, severity=_capped(kind.severity, given), opens_after_s=opens_after_s)


def rules_with(rules: Sequence[Rule], settings: Mapping[str, KindSettings]) -> tuple[Rule, ...]:
    """Return the rules with the settings of their kinds, without those of disabled kinds.

    If a rule differs from an earlier one only by its severity and a higher threshold, and its severity is lowered to that
    of the earlier one, it is left out: the earlier one holds whenever it does.
    """
    found: dict[tuple[str, str, str], Rule] = {}
    for rule in rules:
        given = settings.get(rule.kind, _UNCHANGED)
        if given.enabled:
            severity = _capped(rule.severity, given)
            for_s = rule.for_s if given.for_s is None else given.for_s
            found.setdefault((rule.name, severity, rule.variant), replace(rule, severity=severity, for_s=for_s))
    return tuple(found.values())


def _capped(severity: str, given: KindSettings) -> str:
    return severity if given.severity is None else min(severity, given.severity, key=SEVERITIES.index)
