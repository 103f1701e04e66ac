"""Read the list of kinds and alerts, with the thresholds and kinds of the settings. Pure, except for ``shipped``, which reads a file."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from importlib.resources import files
from typing import Any

import yaml

from commwatch_alerts.kind_settings import kind_with, rules_with
from commwatch_alerts.model import SEVERITIES, Kind, KindSettings, OneLineError, Record, Rule
from commwatch_alerts.text import FORMATS, VALUE, BadTemplate, fields
from commwatch_alerts.values import DURATION, SWITCH, BadValue, Keys, ListOf, TableOf, Type, one_of
from commwatch_alerts.values import text as text_type

_THRESHOLD = re.compile(r"\$([a-z][a-z0-9_]*)")
_IN_TEXT = re.compile(r"\{\$([a-z][a-z0-9_]*):([a-z]+)\}")
#: The list that is shipped with the code.
RULES = "rules.yaml"
#: Larger numbers are no floats.
_MOST = 1e300
_PARTS = ("thresholds", "kinds", "records", "alerts")


class CatalogueError(OneLineError):
    """The list or a threshold in the settings is wrong; the message is one line that names the entry and the key.

    Args:
        setting: the wrong entry of the settings, such as ``thresholds.comm_share``; empty: the list itself is wrong.
    """

    def __init__(self, says: str, setting: str = "") -> None:
        super().__init__(says)
        self.setting = setting


@dataclass(frozen=True)
class Threshold:
    """A number of the list that the settings can change."""

    name: str
    #: The value in force: from the settings, else the default.
    value: float
    default: float
    low: float
    high: float
    #: ``ratio`` (0 to 1), ``seconds``, ``bytes_per_second`` or ``count``.
    unit: str
    help: str
    #: The threshold whose value must not be above this one's.
    not_below: str | None = None


@dataclass(frozen=True)
class Catalogue:
    """The list, with the values of thresholds in its expressions and texts, and with the settings of kinds."""

    records: tuple[Record, ...]
    alerts: tuple[Rule, ...]
    thresholds: tuple[Threshold, ...]
    #: By name.
    kinds: Mapping[str, Kind] = field(default_factory=dict)

    def rows(self, kind: str) -> tuple[Rule, ...]:
        """Return the rules of a kind that the agent uses."""
        return tuple(rule for rule in self.alerts if rule.kind == kind and not rule.prometheus_only)


#: In C, where there is libyaml: ten times as fast, and every agent reads the list at its start.
_LOADER: type[yaml.SafeLoader | yaml.CSafeLoader] = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def shipped(name: str) -> str:
    """Return the text of a file shipped with the code: ``rules.yaml``, ``runbook.md``, ``alertmanager.yml``."""
    return (files("commwatch_alerts") / name).read_text(encoding="utf-8")


def read(
    text: str,
    thresholds: Mapping[str, float] | None = None,
    kinds: Mapping[str, KindSettings] | None = None,
) -> Catalogue:
    """Return the list of kinds and alerts in a text.

    Args:
        text: YAML in the form of ``rules.yaml``.
        thresholds: values that the settings set, by name.
        kinds: settings of kinds, by name.

    Raises:
        CatalogueError: the text, a threshold, or the name of a kind in the settings is wrong.
    """
    try:
        whole = yaml.load(text, _LOADER)  # noqa: S506 - both are safe
    except yaml.YAMLError as error:
        raise CatalogueError(f"not valid YAML: {' '.join(str(error).split())}") from None
    try:
        top = _parts(whole)
        known = _thresholds(top.get("thresholds") or {}, thresholds or {})
        listed = _kinds(top.get("kinds") or {})
        records = tuple(
            Record(each["record"], each["expr"]) for each in _entries(_record(known), top.get("records"), "record")
        )
        alerts = tuple(_rule(each) for each in _entries(_alert(known), top.get("alerts"), "alert"))
    except BadValue as error:
        raise CatalogueError(str(error)) from None
    _no_twins((record.name for record in records), "records")
    _no_twins((f"{rule.name} ({rule.severity})" for rule in alerts), "alerts")
    _check_names(listed, alerts)
    given = kinds or {}
    _known_keys(given, listed, "kinds")
    settled = {name: kind_with(kind, given[name]) if name in given else kind for name, kind in listed.items()}
    return Catalogue(records, rules_with(alerts, given), tuple(known.values()), settled)


# -- parts of the list ------------------------------------------------------------------------------


class _Table(Keys):
    """Tables that have all of some keys.

    Args:
        defaults: values of the keys that may be missing.
    """

    def __init__(self, keys: Mapping[str, Type], defaults: Mapping[str, Any]) -> None:
        super().__init__(keys, dict)
        self._defaults = defaults

    def checked(self, value: Any, where: str, *, show: bool = True) -> dict[str, Any]:
        table = super().checked(value, where, show=show)
        for key in self._keys:
            if key not in table and key not in self._defaults:
                raise BadValue(f"{where}: lacks the key '{key}'")
        return {**self._defaults, **table}


def _finite(value: float) -> float:
    found = float(value) if abs(value) < _MOST else math.inf
    if not math.isfinite(found):
        raise ValueError(value)
    return found


def _stripped(value: str) -> str:
    if not value.strip():
        raise ValueError(value)
    return value.strip()


_NUMBER, _TEXT = Type("a number", {"type": "number"}, _finite), text_type("a text", convert=_stripped)
_NAME = text_type("a name of lower-case letters, digits and underscores", "[a-z][a-z0-9_]*")
_LABEL = text_type("a label", "[a-zA-Z_][a-zA-Z0-9_]*")
_SEVERITY = one_of(SEVERITIES)
_RANGE = _Table(
    {"default": _NUMBER, "low": _NUMBER, "high": _NUMBER, "unit": _TEXT, "help": _TEXT, "not_below": _NAME},
    {"not_below": None},
)
_KIND = _Table(
    {"severity": _SEVERITY, "opens_after": DURATION, "ends_after": DURATION, "help": _TEXT, "runbook": _TEXT},
    {"opens_after": None},
)


def _value_of(name: str, known: Mapping[str, Threshold]) -> float:
    if name not in known:
        raise BadValue(f"unknown threshold '{name}'; known are {', '.join(known)}")
    return known[name].value


def _expression(known: Mapping[str, Threshold]) -> Type:
    """Return the type of PromQL; the values of its thresholds are filled in."""

    def fill(expr: str) -> str:
        return _THRESHOLD.sub(lambda found: f"{_value_of(found[1], known):.12g}", _stripped(expr))

    return text_type("a text", convert=fill)


def _line(known: Mapping[str, Threshold]) -> Type:
    """Return the type of texts, in one line; the values of their thresholds are filled in."""

    def put_in(found: re.Match[str]) -> str:
        if found[2] not in FORMATS:
            raise BadValue(f"unknown format '{found[2]}'; known are {', '.join(FORMATS)}")
        return FORMATS[found[2]](_value_of(found[1], known))

    return text_type("a text", convert=lambda value: _IN_TEXT.sub(put_in, " ".join(_stripped(value).split())))


def _record(known: Mapping[str, Threshold]) -> _Table:
    name = text_type("a name such as level:metric:operation", "[a-z_]+:[a-z0-9_]+:[a-z0-9_]+")
    return _Table({"record": name, "expr": _expression(known)}, {})


def _alert(known: Mapping[str, Threshold]) -> _Table:
    expr, line = _expression(known), _line(known)
    limit = text_type("the name of a threshold", convert=lambda name: _value_of(name, known))
    keys = {
        "alert": text_type("a name such as CommShareHigh", "[A-Z][A-Za-z0-9]+"),
        "kind": _NAME,
        "variant": _NAME,
        "above": limit,
        "below": limit,
        "expr": expr,
        "severity": _SEVERITY,
        "summary": line,
        "description": line,
        "for": DURATION,
        "keep_firing_for": DURATION,
        "also": TableOf(expr, "a table", _NAME),
        "also_on": ListOf(_LABEL, "a list of labels"),
        "prometheus_only": SWITCH,
    }
    defaults = {"variant": "", "above": None, "below": None, "for": 0.0, "keep_firing_for": 0.0}
    return _Table(keys, {**defaults, "also": {}, "also_on": (), "prometheus_only": False})


def _rule(entry: Mapping[str, Any]) -> Rule:
    rule = Rule(
        entry["alert"],
        entry["expr"],
        entry["for"],
        entry["keep_firing_for"],
        entry["severity"],
        summary=entry["summary"],
        description=entry["description"],
        also=entry["also"],
        on=entry["also_on"],
        prometheus_only=entry["prometheus_only"],
        kind=entry["kind"],
        variant=entry["variant"],
        above=entry["above"],
        below=entry["below"],
    )
    _check_numbers(rule)
    return rule


def _check_numbers(rule: Rule) -> None:
    """Check that each number in the texts is the value or in ``also``, and that the texts use all of ``also``."""
    if VALUE in rule.also:
        raise BadValue(f"{rule.name}: also: '{VALUE}' is reserved for the number of 'expr'; choose another name")
    used = set()
    for key, template in (("summary", rule.summary), ("description", rule.description)):
        try:
            numbers = {field.name for field in fields(template) if field.format is not None}
        except BadTemplate as error:
            raise BadValue(f"{rule.name}: {key}: {error}") from None
        for name in sorted(numbers - {VALUE, *rule.also}):
            raise BadValue(f"{rule.name}: {key}: there is no number '{name}'; put it into 'also'")
        used |= numbers
    for name in rule.also:
        if name not in used:
            raise BadValue(f"{rule.name}: also: {name}: no text uses it")


def _parts(whole: Any) -> Mapping[str, Any]:
    if not isinstance(whole, dict):
        raise BadValue("the list: needs a table of keys and values")
    _known_keys(whole, _PARTS, "the list", "key ")
    return whole


def _entries(kind: _Table, entries: Any, key: str) -> Iterator[dict[str, Any]]:
    if not isinstance(entries or [], list):
        raise BadValue(f"{key}s: needs a list")
    for number, entry in enumerate(entries or (), 1):
        name = entry.get(key) if isinstance(entry, dict) else None
        yield kind.checked(entry, name if name and isinstance(name, str) else f"{key} {number}")


def _no_twins(names: Iterable[str], where: str) -> None:
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise CatalogueError(f"{where}: {name} is defined twice")
        seen.add(name)


def _known_keys(given: Iterable[str], known: Collection[str], where: str, what: str = "") -> None:
    for name in given:
        if name not in known:
            near = get_close_matches(str(name), known, 1)
            hint = f"did you mean {near[0]}?" if near else f"known are {', '.join(known)}"
            raise CatalogueError(f"{where}: unknown {what}'{name}'; {hint}", f"{where}.{name}")


def _kinds(table: Any) -> dict[str, Kind]:
    return {
        name: Kind(name, each["severity"], each["opens_after"], each["ends_after"], each["help"], each["runbook"])
        for name, each in TableOf(_KIND, "a table", _NAME).checked(table, "kinds").items()
    }


def _check_names(kinds: Mapping[str, Kind], alerts: Sequence[Rule]) -> None:
    """Check that alerts name kinds, and that kinds name alerts."""
    names = dict.fromkeys(rule.name for rule in alerts)
    for rule in alerts:
        if rule.kind not in kinds:
            raise CatalogueError(f"{rule.name}: kind: unknown '{rule.kind}'; known are {', '.join(kinds)}")
    for kind in kinds.values():
        if kind.runbook not in names:
            raise CatalogueError(f"kinds: {kind.name}: runbook: there is no alert '{kind.runbook}'")


def _thresholds(table: Any, given: Mapping[str, float]) -> dict[str, Threshold]:
    ranges = TableOf(_RANGE, "a table", _NAME).checked(table, "thresholds")
    _known_keys(given, ranges, "thresholds")
    found = {}
    for name, limits in ranges.items():
        value = given.get(name, limits["default"])
        if not limits["low"] <= value <= limits["high"]:
            allowed = f"needs a number from {limits['low']:g} to {limits['high']:g}, not {value!r}"
            raise CatalogueError(f"thresholds: {name}: {allowed}", f"thresholds.{name}")
        found[name] = Threshold(name, value, **limits)
    _check_order(found, given)
    return found


def _check_order(thresholds: Mapping[str, Threshold], given: Collection[str]) -> None:
    """Check that no threshold is below the one that it must not be below."""
    for upper in thresholds.values():
        if upper.not_below is None:
            continue
        lower = thresholds.get(upper.not_below)
        if lower is None:
            raise BadValue(
                f"thresholds: {upper.name}: not_below: unknown threshold '{upper.not_below}'; known are {', '.join(thresholds)}"
            )
        if upper.value < lower.value:
            # The list itself is in order, so one of them is set.
            setting = next((each.name for each in (lower, upper) if each.name in given), "")
            low, high = (
                f"{each.name} ({each.value:g}{'' if each.name in given else ', the default'})"
                for each in (lower, upper)
            )
            says = f"{low} must not be above {high}"
            raise CatalogueError(f"thresholds: {says}", f"thresholds.{setting}")
