"""Read the list of kinds and alerts, with the thresholds and kinds of the settings. Pure, except for ``shipped``, which reads a file."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from typing import Annotated, Any, TypeVar

import yaml
from pydantic import AfterValidator, BaseModel, BeforeValidator, Field, Strict, ValidationInfo, model_validator

from commwatch_alerts.durations import seconds
from commwatch_alerts.kind_settings import kind_with, rules_with
from commwatch_alerts.model import SEVERITIES, Kind, KindSettings, OneLineError, Record, Rule
from commwatch_alerts.tables import TABLE, BadTable, checked_table, needs, one_of
from commwatch_alerts.text import FORMATS, VALUE, BadTemplate, fields

_THRESHOLD = re.compile(r"\$([a-z][a-z0-9_]*)")
_IN_TEXT = re.compile(r"\{\$([a-z][a-z0-9_]*):([a-z]+)\}")
_ALERT_NAME, _RECORD_NAME = re.compile(r"[A-Z][A-Za-z0-9]+"), re.compile(r"[a-z_]+:[a-z0-9_]+:[a-z0-9_]+")
_NAME, _LABEL = re.compile(r"[a-z][a-z0-9_]*"), re.compile(r"[a-zA-Z_][a-zA-Z0-9_]*")
_Model = TypeVar("_Model", bound=BaseModel)


class CatalogueError(OneLineError):
    """The list or a threshold in the settings is wrong; the message is one line that names the entry and the key."""


def _threshold(name: str, known: ValidationInfo) -> float:
    thresholds: Mapping[str, Threshold] = known.context or {}
    if name not in thresholds:
        raise ValueError(f"unknown threshold '{name}'; known are {', '.join(thresholds)}")
    return thresholds[name].value


def _filled(expr: str, known: ValidationInfo) -> str:
    """Return PromQL with the values of its thresholds filled in."""
    return _THRESHOLD.sub(lambda found: f"{_threshold(found[1], known):.12g}", expr)


def _line(template: str, known: ValidationInfo) -> str:
    """Return a text in one line, with the values of its thresholds filled in."""

    def put_in(found: re.Match[str]) -> str:
        if found[2] not in FORMATS:
            raise ValueError(f"unknown format '{found[2]}'; known are {', '.join(FORMATS)}")
        return FORMATS[found[2]](_threshold(found[1], known))

    return _IN_TEXT.sub(put_in, " ".join(template.split()))


def _limit(name: Any, known: ValidationInfo) -> float:
    """Return the value of a threshold."""
    if not isinstance(name, str):
        raise ValueError(f"needs the name of a threshold, not {name!r}")
    return _threshold(name, known)


def _seconds(value: Any) -> float | None:
    return seconds(value) if isinstance(value, str) else None


_Duration = Annotated[float, BeforeValidator(_seconds), needs("a duration such as 90s or 5m")]
_Number = Annotated[float, needs("a number", math.isfinite)]
_Text = Annotated[str, AfterValidator(str.strip), needs("a text", bool)]
_Flag = Annotated[bool, needs("true or false")]
_Expr = Annotated[_Text, AfterValidator(_filled)]
_Template = Annotated[_Text, AfterValidator(_line)]
_Label = Annotated[str, needs("a label", _LABEL.fullmatch)]
_Name = Annotated[str, needs("a name of lower-case letters, digits and underscores", _NAME.fullmatch)]
_NameOfThreshold = Annotated[float | None, BeforeValidator(_limit)]
_List = Annotated[list[Any], needs("a list")]
_Severity = Annotated[str, one_of(SEVERITIES)]


class _Top(BaseModel):
    model_config = TABLE

    thresholds: Annotated[dict[_Name, Any], needs("a table")] | None = None
    kinds: Annotated[dict[_Name, Any], needs("a table")] | None = None
    records: _List | None = None
    alerts: _List | None = None


class _Range(BaseModel):
    """The keys of a threshold; the fields are those of ``Threshold``, which adds its name and value."""

    model_config = TABLE

    default: _Number
    low: _Number
    high: _Number
    unit: _Text
    help: _Text


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


class _Kind(BaseModel):
    """The keys of a kind; the fields are those of ``Kind``, which adds its name."""

    model_config = TABLE

    severity: _Severity
    opens_after_s: _Duration | None = Field(None, alias="opens_after")
    ends_after_s: _Duration = Field(alias="ends_after")
    help: _Text
    runbook: _Text


class _Record(BaseModel):
    """The keys of a record; the fields are those of ``Record``."""

    model_config = TABLE

    name: Annotated[str, needs("a name such as level:metric:operation", _RECORD_NAME.fullmatch)] = Field(alias="record")
    expr: _Expr


class _Alert(BaseModel):
    """The keys of an alert; the fields are those of ``Rule``."""

    model_config = TABLE

    name: Annotated[str, needs("a name such as CommShareHigh", _ALERT_NAME.fullmatch)] = Field(alias="alert")
    kind: _Name
    variant: _Name = ""
    above: _NameOfThreshold = None
    below: _NameOfThreshold = None
    expr: _Expr
    severity: _Severity
    summary: _Template
    description: _Template
    for_s: _Duration = Field(0.0, alias="for")
    keep_firing_for_s: _Duration = Field(0.0, alias="keep_firing_for")
    also: Annotated[dict[_Name, _Expr], needs("a table")] = Field(default_factory=dict)
    on: Annotated[tuple[_Label, ...], Strict(False), needs("a list of labels")] = Field((), alias="also_on")
    prometheus_only: _Flag = False

    @model_validator(mode="after")
    def _check_numbers(self) -> _Alert:
        """Check that each number in the texts is the value or in ``also``, and that the texts use all of ``also``."""
        if VALUE in self.also:
            raise ValueError(f"also: '{VALUE}' is reserved for the number of 'expr'; choose another name")
        used = set()
        for key, template in (("summary", self.summary), ("description", self.description)):
            try:
                numbers = {field.name for field in fields(template) if field.format is not None}
            except BadTemplate as error:
                raise ValueError(f"{key}: {error}") from None
            for name in sorted(numbers - {VALUE, *self.also}):
                raise ValueError(f"{key}: there is no number '{name}'; put it into 'also'")
            used |= numbers
        for name in self.also:
            if name not in used:
                raise ValueError(f"also: {name}: no text uses it")
        return self


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
    top = _checked(_Top, whole, "the list")
    known = _thresholds(top.thresholds or {}, thresholds or {})
    listed = _kinds(top.kinds or {})
    records = tuple(Record(**dict(each)) for each in _entries(_Record, top.records, "record", known))
    alerts = tuple(Rule(**dict(each)) for each in _entries(_Alert, top.alerts, "alert", known))
    _no_twins((record.name for record in records), "records")
    _no_twins((f"{rule.name} ({rule.severity})" for rule in alerts), "alerts")
    _check_names(listed, alerts)
    given = kinds or {}
    _known_keys(given, listed, "kinds")
    settled = {name: kind_with(kind, given[name]) if name in given else kind for name, kind in listed.items()}
    return Catalogue(records, rules_with(alerts, given), tuple(known.values()), settled)


# -- parts of the list ------------------------------------------------------------------------------


def _checked(model: type[_Model], entry: Any, where: str, known: Mapping[str, Threshold] | None = None) -> _Model:
    try:
        return checked_table(model, entry, context=known, show_values=True)
    except BadTable as error:
        raise CatalogueError(f"{where}: {error}") from None


def _entries(
    model: type[_Model], entries: list[Any] | None, key: str, known: Mapping[str, Threshold]
) -> Iterator[_Model]:
    for number, entry in enumerate(entries or (), 1):
        name = entry.get(key) if isinstance(entry, dict) else None
        yield _checked(model, entry, name if name and isinstance(name, str) else f"{key} {number}", known)


def _no_twins(names: Iterable[str], where: str) -> None:
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise CatalogueError(f"{where}: {name} is defined twice")
        seen.add(name)


def _known_keys(given: Iterable[str], known: Collection[str], where: str) -> None:
    for name in given:
        if name not in known:
            raise CatalogueError(f"{where}: unknown '{name}'; known are {', '.join(known)}")


def _kinds(table: Mapping[str, Any]) -> dict[str, Kind]:
    return {name: Kind(name, **dict(_checked(_Kind, entry, f"kinds: {name}"))) for name, entry in table.items()}


def _check_names(kinds: Mapping[str, Kind], alerts: Sequence[Rule]) -> None:
    """Check that alerts name kinds, and that kinds name alerts."""
    names = dict.fromkeys(rule.name for rule in alerts)
    for rule in alerts:
        if rule.kind not in kinds:
            raise CatalogueError(f"{rule.name}: kind: unknown '{rule.kind}'; known are {', '.join(kinds)}")
    for kind in kinds.values():
        if kind.runbook not in names:
            raise CatalogueError(f"kinds: {kind.name}: runbook: there is no alert '{kind.runbook}'")


def _thresholds(table: Mapping[str, Any], given: Mapping[str, float]) -> dict[str, Threshold]:
    _known_keys(given, table, "thresholds")
    found = {}
    for name, entry in table.items():
        where = f"thresholds: {name}"
        limits = _checked(_Range, entry, where)
        value = given.get(name, limits.default)
        if not limits.low <= value <= limits.high:
            raise CatalogueError(f"{where}: needs a number from {limits.low:g} to {limits.high:g}, not {value!r}")
        found[name] = Threshold(name, value, **dict(limits))
    return found
