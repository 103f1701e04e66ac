"""Read the list of alerts, with the thresholds of the settings. Pure, except for ``shipped``, which reads a file."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from importlib.resources import files
from typing import Any

import yaml

from commwatch.alerts.model import SEVERITIES, OneLineError, Record, Rule
from commwatch.alerts.text import FORMATS, VALUE, BadTemplate, fields

_THRESHOLD = re.compile(r"\$([a-z][a-z0-9_]*)")
_IN_TEXT = re.compile(r"\{\$([a-z][a-z0-9_]*):([a-z]+)\}")
_DURATION = re.compile(r"(?:(\d+)h)?(?:(\d+)m)?(?:(\d+)s)?")
_ALERT_NAME, _RECORD_NAME = re.compile(r"[A-Z][A-Za-z0-9]+"), re.compile(r"[a-z_]+:[a-z0-9_]+:[a-z0-9_]+")
_NAME, _LABEL = re.compile(r"[a-z][a-z0-9_]*"), re.compile(r"[a-zA-Z_][a-zA-Z0-9_]*")
_THRESHOLD_KEYS = ("default", "low", "high", "unit", "help")
_RULE_TEXTS = ("expr", "severity", "summary", "description")
_RULE_KEYS = ("alert", *_RULE_TEXTS, "for", "keep_firing_for", "also", "also_on", "prometheus_only")


class CatalogueError(OneLineError):
    """The list or a threshold in the settings is wrong; the message is one line that names the entry and the key."""


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


@dataclass(frozen=True)
class Catalogue:
    """The list, with the values of thresholds in its expressions and texts."""

    records: tuple[Record, ...]
    alerts: tuple[Rule, ...]
    thresholds: tuple[Threshold, ...]


def shipped(name: str) -> str:
    """Return the text of a file shipped with the code: ``rules.yaml``, ``runbook.md``, ``alertmanager.yml``."""
    return (files("commwatch.alerts") / name).read_text(encoding="utf-8")


def read(text: str, thresholds: Mapping[str, float] | None = None) -> Catalogue:
    """Return the list of alerts in a text.

    Args:
        text: YAML in the form of ``rules.yaml``.
        thresholds: values that the settings set, by name.

    Raises:
        CatalogueError: the text or a threshold is wrong.
    """
    try:
        whole = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise CatalogueError(f"not valid YAML: {' '.join(str(error).split())}") from None
    top = _keys(whole, "the list", ("thresholds", "records", "alerts"))
    known = _thresholds(top.get("thresholds") or {}, thresholds or {})
    records = tuple(_record(entry, known) for entry in _entries(top, "records"))
    alerts = tuple(_alert(entry, known) for entry in _entries(top, "alerts"))
    _no_twins((record.name for record in records), "records")
    _no_twins((f"{rule.name} ({rule.severity})" for rule in alerts), "alerts")
    return Catalogue(records, alerts, tuple(known.values()))


def seconds(text: str) -> float | None:
    """Return the seconds of a duration such as ``90s``, ``5m`` or ``1h30m``; ``None`` if ``text`` is not a duration."""
    found = _DURATION.fullmatch(text)
    if not text or found is None:
        return None
    hours, minutes, rest = (int(part or 0) for part in found.groups())
    return float(hours * 3600 + minutes * 60 + rest)


def duration(duration_s: float) -> str:
    """Return seconds in the form that ``seconds`` reads, such as ``5m``."""
    whole = int(duration_s)
    parts = ((whole // 3600, "h"), (whole % 3600 // 60, "m"), (whole % 60, "s"))
    return "".join(f"{number}{unit}" for number, unit in parts if number) or "0s"


# -- parts of the list ------------------------------------------------------------------------------


def _entries(top: Mapping[str, Any], key: str) -> list[Any]:
    entries = top.get(key) or []
    if not isinstance(entries, list):
        raise CatalogueError(f"{key}: needs a list")
    return entries


def _keys(value: Any, where: str, known: Iterable[str], needed: Iterable[str] = ()) -> dict[str, Any]:
    """Return ``value`` if it is a table with all needed keys and no unknown ones; else raise CatalogueError."""
    if not isinstance(value, dict):
        raise CatalogueError(f"{where}: needs a table of keys and values")
    for key in value:
        if key not in known:
            raise CatalogueError(f"{where}: unknown key '{key}'; known are {', '.join(known)}")
    for key in needed:
        if key not in value:
            raise CatalogueError(f"{where}: lacks the key '{key}'")
    return value


def _no_twins(names: Iterable[str], where: str) -> None:
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise CatalogueError(f"{where}: {name} is there twice")
        seen.add(name)


def _number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _thresholds(table: Any, given: Mapping[str, float]) -> dict[str, Threshold]:
    known = {name: _threshold(name, entry) for name, entry in _keys(table, "thresholds", table).items()}
    for name in given:
        if name not in known:
            raise CatalogueError(f"thresholds: unknown '{name}'; known are {', '.join(known)}")
    return {name: _set(threshold, given.get(name, threshold.default)) for name, threshold in known.items()}


def _threshold(name: Any, entry: Any) -> Threshold:
    where = f"thresholds: {name}"
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise CatalogueError(f"{where}: a name has lower-case letters, digits and underscores")
    about = _keys(entry, where, _THRESHOLD_KEYS, _THRESHOLD_KEYS)
    for key in _THRESHOLD_KEYS[:3]:
        if not _number(about[key]):
            raise CatalogueError(f"{where}: {key}: needs a number, not {about[key]!r}")
    default, low, high = (float(about[key]) for key in _THRESHOLD_KEYS[:3])
    return Threshold(name, default, default, low, high, _text(about, "unit", where), _text(about, "help", where))


def _set(threshold: Threshold, value: Any) -> Threshold:
    if not _number(value) or not threshold.low <= value <= threshold.high:
        limits = f"from {threshold.low:g} to {threshold.high:g}"
        raise CatalogueError(f"thresholds: {threshold.name}: needs a number {limits}, not {value!r}")
    return replace(threshold, value=float(value))


def _text(entry: Mapping[str, Any], key: str, where: str) -> str:
    value = entry[key]
    if not isinstance(value, str) or not value.strip():
        raise CatalogueError(f"{where}: {key}: needs a text, not {value!r}")
    return value.strip()


def _seconds(entry: Mapping[str, Any], key: str, where: str) -> float:
    value = entry.get(key, "0s")
    found = seconds(value) if isinstance(value, str) else None
    if found is None:
        raise CatalogueError(f"{where}: {key}: needs a duration such as 90s or 5m, not {value!r}")
    return found


def _flag(entry: Mapping[str, Any], key: str, where: str) -> bool:
    value = entry.get(key, False)
    if not isinstance(value, bool):
        raise CatalogueError(f"{where}: {key}: needs true or false, not {value!r}")
    return value


def _expr(text: str, known: Mapping[str, Threshold], where: str) -> str:
    """Return PromQL with the values of its thresholds filled in."""

    def put_in(found: re.Match[str]) -> str:
        return f"{_of(found[1], known, where).value:.12g}"

    return _THRESHOLD.sub(put_in, text)


def _of(name: str, known: Mapping[str, Threshold], where: str) -> Threshold:
    if name not in known:
        raise CatalogueError(f"{where}: unknown threshold '${name}'; known are {', '.join(known)}")
    return known[name]


def _record(entry: Any, known: Mapping[str, Threshold]) -> Record:
    keys = ("record", "expr", "prometheus_only")
    name = _named(entry, "record", _RECORD_NAME, "level:metric:operation")
    about = _keys(entry, name, keys, keys[:2])
    return Record(name, _expr(_text(about, "expr", name), known, f"{name}: expr"), _flag(about, keys[2], name))


def _named(entry: Any, key: str, form: re.Pattern[str], like: str) -> str:
    name = entry.get(key) if isinstance(entry, dict) else None
    if not isinstance(name, str) or not form.fullmatch(name):
        raise CatalogueError(f"{key}s: an entry needs '{key}', a name such as {like}, not {name!r}")
    return name


def _alert(entry: Any, known: Mapping[str, Threshold]) -> Rule:
    name = _named(entry, "alert", _ALERT_NAME, "CommShareHigh")
    about = _keys(entry, name, _RULE_KEYS, _RULE_TEXTS)
    texts = {key: _text(about, key, name) for key in _RULE_TEXTS}
    if texts["severity"] not in SEVERITIES:
        raise CatalogueError(f"{name}: severity: needs one of {', '.join(SEVERITIES)}, not '{texts['severity']}'")
    rule = Rule(
        name=name,
        expr=_expr(texts["expr"], known, f"{name}: expr"),
        for_s=_seconds(about, "for", name),
        keep_firing_for_s=_seconds(about, "keep_firing_for", name),
        severity=texts["severity"],
        summary=_template(texts["summary"], known, f"{name}: summary"),
        description=_template(texts["description"], known, f"{name}: description"),
        also=_also(about, known, name),
        on=_on(about, name),
        prometheus_only=_flag(about, "prometheus_only", name),
    )
    _check_fields(rule)
    return rule


def _also(about: Mapping[str, Any], known: Mapping[str, Threshold], where: str) -> dict[str, str]:
    table = about.get("also", {})
    found = {}
    for name in _keys(table, f"{where}: also", table):
        if not isinstance(name, str) or not _NAME.fullmatch(name) or name == VALUE:
            raise CatalogueError(f"{where}: also: {name!r} is no name for a number")
        found[name] = _expr(_text(table, name, f"{where}: also"), known, f"{where}: also: {name}")
    return found


def _on(about: Mapping[str, Any], where: str) -> tuple[str, ...]:
    labels = about.get("also_on", [])
    if not isinstance(labels, list) or not all(isinstance(label, str) and _LABEL.fullmatch(label) for label in labels):
        raise CatalogueError(f"{where}: also_on: needs a list of labels, not {labels!r}")
    return tuple(labels)


def _template(text: str, known: Mapping[str, Threshold], where: str) -> str:
    """Return a text in one line, with the values of its thresholds filled in."""

    def put_in(found: re.Match[str]) -> str:
        if found[2] not in FORMATS:
            raise CatalogueError(f"{where}: unknown format '{found[2]}'; known are {', '.join(FORMATS)}")
        return FORMATS[found[2]](_of(found[1], known, where).value)

    return _IN_TEXT.sub(put_in, " ".join(text.split()))


def _check_fields(rule: Rule) -> None:
    """Check that each number in a rule's texts is its value or in ``also``, and that its texts use all of ``also``."""
    used = set()
    for key, template in (("summary", rule.summary), ("description", rule.description)):
        try:
            numbers = {field.name for field in fields(template) if field.format is not None}
        except BadTemplate as error:
            raise CatalogueError(f"{rule.name}: {key}: {error}") from None
        for name in sorted(numbers - {VALUE, *rule.also}):
            raise CatalogueError(f"{rule.name}: {key}: there is no number '{name}'; put it into 'also'")
        used |= numbers
    for name in rule.also:
        if name not in used:
            raise CatalogueError(f"{rule.name}: also: {name}: no text uses it")
