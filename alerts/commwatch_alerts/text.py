"""The template language of alert texts: rendered in Python, or converted to Go templates with equal results.

- ``{rank}`` is the label ``rank`` of the alert, empty if there is none; ``{how}`` one of ``WORDS``, within a clause;
- ``{value:percent}`` is the alert's value, ``{exposed:percent}`` the number ``exposed`` of the rule's ``also``, or
  ``not known``. Formats: ``percent`` (0.42 is ``42%``), ``seconds`` (``1m 30s``), ``bytes`` (``1.25GB``), ``number`` (``12.5k``);
- ``[, {exposed:percent} of it exposed]`` is a clause: left out if one of its labels is empty or one of its numbers not known.

Braces and brackets have no other meaning; they cannot be escaped.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

from commwatch_alerts.model import Rule

#: Name of the alert's own value.
VALUE = "value"
#: Texts that only an agent knows: Prometheus leaves out the clauses that name them.
WORDS = frozenset({"ended_by", "how"})
UNKNOWN = "not known"
_PART = re.compile(r"\{(?P<name>[a-z_][a-z0-9_]*)(?::(?P<format>[a-z]+))?\}|(?P<open>\[)|(?P<close>\])|(?P<odd>[{}])")
_LARGE, _SMALL = ("k", "M", "G", "T", "P", "E", "Z", "Y"), ("m", "u", "n", "p", "f", "a", "z", "y")


class BadTemplate(ValueError):
    """A template is not valid; the message gives the reason."""


class Field(NamedTuple):
    """A label, or, if it has a format, a number."""

    name: str
    format: str | None


#: Texts and fields in order.
Parts = tuple[str | Field, ...]


class Clause(NamedTuple):
    """Part of a template; an optional clause is left out if one of its fields is not known."""

    parts: Parts
    optional: bool

    def fields(self) -> Iterator[Field]:
        """Return the fields of the clause, in order."""
        return (part for part in self.parts if isinstance(part, Field))


def parse(template: str) -> list[Clause]:
    """Return the clauses of a template.

    Raises:
        BadTemplate: a misplaced brace or bracket, or an unknown format.
    """
    clauses: list[Clause] = []
    parts: list[str | Field] = []
    inside, at = False, 0
    for found in _PART.finditer(template):
        parts += [template[at : found.start()]] if found.start() > at else []
        at = found.end()
        if found["name"]:
            if found["format"] not in (None, *FORMATS):
                raise BadTemplate(f"unknown format '{found['format']}'; known are {', '.join(FORMATS)}")
            if found["name"] == VALUE and found["format"] is None:
                raise BadTemplate("{value} needs a format, such as {value:percent}")
            parts.append(Field(found["name"], found["format"]))
            continue
        if found["odd"] or bool(found["open"]) == inside:
            raise BadTemplate(f"'{found[0]}' does not belong here: {template[max(0, at - 20) : at + 20]!r}")
        clauses.append(Clause(tuple(parts), inside))
        parts, inside = [], not inside
    if inside:
        raise BadTemplate("a clause has no end: there is '[' without ']'")
    clauses.append(Clause((*parts, template[at:]), False))
    return clauses


def fields(template: str) -> set[Field]:
    """Return the labels and numbers that a template names."""
    return {field for clause in parse(template) for field in clause.fields()}


def render(
    template: str,
    labels: Mapping[str, str],
    value: float,
    also: Mapping[str, float],
    formats: Mapping[str, Callable[[float], str]] | None = None,
) -> str:
    """Return the text of an alert.

    Args:
        also: the ``also`` numbers of its rule that are known, by name.
        formats: of numbers, by name; by default ``FORMATS``, with the results of Prometheus.
    """
    numbers = {**also, VALUE: value}

    def known(field: Field) -> str:
        if field.format is None:
            return labels.get(field.name, "")
        return (formats or FORMATS)[field.format](numbers[field.name]) if field.name in numbers else ""

    def text(part: str | Field) -> str:
        if isinstance(part, str):
            return part
        return known(part) or ("" if part.format is None else UNKNOWN)

    kept = [clause for clause in parse(template) if not clause.optional or all(map(known, clause.fields()))]
    return "".join(text(part) for clause in kept for part in clause.parts)


# -- Go templates ---------------------------------------------------------------------------------


def to_go(template: str, rule: Rule) -> str:
    """Return a template of a rule as a Go template for Prometheus.

    ``query`` gets the ``also`` numbers; labels are compared one by one, so that no label value becomes part of PromQL.
    """
    clauses = parse(template)
    numbers = sorted({field for clause in clauses for field in clause.fields() if field.format and field.name != VALUE})
    head = "".join(_looked_up(field, rule) for field in numbers)
    return head + "".join(_go_clause(clause) for clause in clauses)


def _looked_up(field: Field, rule: Rule) -> str:
    expr = " ".join(rule.also[field.name].split())
    same = " ".join(f"(eq .Labels.{label} $labels.{label})" for label in rule.on)
    assigned = f"{{{{ ${_variable(field)} = {_go_format(field, '.Value')} }}}}"
    found = f"{{{{ if and true {same} }}}}{assigned}{{{{ end }}}}"
    return f'{{{{ ${_variable(field)} := "" }}}}{{{{ range query {_quoted(expr)} }}}}{found}{{{{ end }}}}'


def _go_clause(clause: Clause) -> str:
    body = "".join(part if isinstance(part, str) else _go_field(part, clause.optional) for part in clause.parts)
    conditions = [_go_value(field) for field in clause.fields() if field.name != VALUE]
    if not clause.optional or not conditions:
        return body
    return f"{{{{ if and true {' '.join(conditions)} }}}}{body}{{{{ end }}}}"


def _go_field(field: Field, sure: bool) -> str:
    value = _go_value(field)
    needs_word = field.format is not None and field.name != VALUE and not sure
    return f'{{{{ or {value} "{UNKNOWN}" }}}}' if needs_word else f"{{{{ {value} }}}}"


def _go_value(field: Field) -> str:
    if field.format is None:
        return f"$labels.{field.name}"
    return f"({_go_format(field, '$value')})" if field.name == VALUE else f"${_variable(field)}"


def _go_format(field: Field, value: str) -> str:
    return _GO_FORMATS[field.format or ""].format(value)


def _variable(field: Field) -> str:
    return f"{field.name}_{field.format}"


def _quoted(text: str) -> str:
    """Return a string literal of Go."""
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


# -- numbers, formatted as by Prometheus's template functions ---------------------------------------


def _g(value: float) -> str:
    """Format a number as Go's ``%.4g`` does."""
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    return f"{value:.4g}"


def _small(value: float) -> str:
    steps = 0
    while abs(value) < 1 and steps < len(_SMALL):
        value, steps = value * 1000, steps + 1
    return _g(value) + _SMALL[steps - 1]


def humanized(value: float) -> str:
    """Return a number with a metric prefix, as ``humanize`` of Prometheus does."""
    if value == 0 or not math.isfinite(value):
        return _g(value)
    if abs(value) < 1:
        return _small(value)
    prefix = ""
    for larger in _LARGE:
        if abs(value) < 1000:
            break
        prefix, value = larger, value / 1000
    return _g(value) + prefix


def duration(value: float) -> str:
    """Return seconds as days, hours, minutes and seconds, as ``humanizeDuration`` of Prometheus does."""
    if not math.isfinite(value):
        return _g(value)
    if value == 0:
        return f"{_g(value)}s"
    if abs(value) < 1:
        return f"{_small(value)}s"
    sign, value = ("-", -value) if value < 0 else ("", value)
    minutes, seconds = divmod(int(value), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{sign}{days}d {hours}h {minutes}m {seconds}s"
    if hours:
        return f"{sign}{hours}h {minutes}m {seconds}s"
    return f"{sign}{minutes}m {seconds}s" if minutes else f"{sign}{_g(value)}s"


#: Formats that may follow the colon in a field.
FORMATS: dict[str, Callable[[float], str]] = {
    "percent": lambda value: f"{_g(value * 100)}%",
    "seconds": duration,
    "bytes": lambda value: f"{humanized(value)}B",
    "number": humanized,
}
_GO_FORMATS = {
    "percent": "humanizePercentage {}",
    "seconds": "humanizeDuration {}",
    "bytes": 'printf "%sB" (humanize {})',
    "number": "humanize {}",
}
