"""Types of the values that people write in settings: each has a check, a form in the environment and a JSON Schema. Pure.

The schema decides what is valid, so a program that has only the schema, such as Helm, refuses what the agent refuses.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Mapping
from typing import Any

from commwatch_alerts.durations import seconds
from commwatch_alerts.model import OneLineError

_PYTHON: dict[str, tuple[type, ...]] = {"boolean": (bool,), "integer": (int,), "number": (int, float), "string": (str,)}
_WORDS = {"true": True, "1": True, "false": False, "0": False}
#: Characters of a wrong value in a message.
_SHOWN = 60


class BadValue(OneLineError):
    """A value is wrong; the message names its place and a correct value."""


class Type:
    """A type of single values.

    Args:
        needs: a correct value, in words.
        schema: JSON Schema of a boolean, a number or a text; its patterns match whole texts, in the syntax of Python and Go.
        convert: returns a valid value as the code uses it; raises ``ValueError`` if it is wrong, ``BadValue`` if the message is a better one.
        refused: more JSON Schema, for values that ``convert`` refuses, perhaps with a better message.
    """

    def __init__(
        self,
        needs: str,
        schema: Mapping[str, Any],
        convert: Callable[[Any], Any] = lambda value: value,
        refused: Mapping[str, Any] | None = None,
    ) -> None:
        self.needs, self._checked, self._convert = needs, dict(schema), convert
        self.schema = {**schema, **(refused or {})}

    def checked(self, value: Any, where: str, *, show: bool = True) -> Any:
        """Return a value as the code uses it.

        Args:
            where: place of the value, for the message.
            show: the message repeats the value, which is no secret.

        Raises:
            BadValue: it is wrong.
        """
        if not self._fits(value):
            raise self._wrong(value, where, show)
        try:
            return self._convert(value)
        except BadValue as error:
            raise BadValue(f"{where}: {error}") from None
        except ValueError:
            raise self._wrong(value, where, show) from None

    def parsed(self, text: str) -> Any:
        """Return the value that a text in the environment means; one that means none is returned as it is, for ``checked`` to refuse.

        Raises:
            BadValue: a text that must be JSON is not.
        """
        kind, word = self.schema["type"], text.strip()
        if kind == "boolean":
            return _WORDS.get(word.lower(), text)
        if kind in ("integer", "number") and re.fullmatch(r"[-+]?[0-9]{1,30}", word):
            return int(word)
        if kind == "number":
            try:
                return float(text)
            except ValueError:
                return text
        return text

    def _fits(self, value: Any) -> bool:
        schema = self._checked
        if not isinstance(value, _PYTHON[schema["type"]]) or isinstance(value, bool) != (schema["type"] == "boolean"):
            return False
        if isinstance(value, str):
            within = schema.get("minLength", 0) <= len(value) <= schema.get("maxLength", len(value))
            right = value in schema.get("enum", (value,))
            return right and within and re.fullmatch(schema.get("pattern", "(?s:.*)"), value) is not None
        return bool(schema.get("minimum", value) <= value <= schema.get("maximum", value))  # false for NaN

    def _wrong(self, value: Any, where: str, show: bool) -> BadValue:
        return BadValue(f"{where}: needs {self.needs}{f', not {_shown(value)}' if show else ''}")


def _shown(value: Any) -> str:
    """Return a value as people wrote it, if that was not long."""
    text = str(value).lower() if isinstance(value, bool) else "null" if value is None else repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


class ListOf(Type):
    """Lists of values of one type, as tuples. In the environment they are separated by commas, or JSON."""

    def __init__(self, entry: Type, needs: str, least: int = 0) -> None:
        super().__init__(needs, {"type": "array", "items": entry.schema, "minItems": least})
        self._entry, self._least = entry, least

    def checked(self, value: Any, where: str, *, show: bool = True) -> tuple[Any, ...]:
        """Return the values; arguments and errors as in ``Type``."""
        if not isinstance(value, list) or len(value) < self._least:
            raise self._wrong(value, where, show)
        return tuple(
            self._entry.checked(each, f"{where}: entry {number}", show=show) for number, each in enumerate(value, 1)
        )

    def parsed(self, text: str) -> Any:
        """Return the list that a text in the environment means."""
        try:
            return _of_json(text, list)
        except ValueError:
            return [part.strip() for part in text.split(",") if part.strip()]


class TableOf(Type):
    """Tables of values of one type, by name. In the environment they are JSON.

    Args:
        names: type of the names; ``None``: all texts.
        example: a right table in JSON, for tables that the environment can have.
    """

    def __init__(self, entry: Type, needs: str, names: Type | None = None, example: str = "") -> None:
        allowed = {} if names is None else {"propertyNames": names.schema}
        super().__init__(needs, {"type": "object", "additionalProperties": entry.schema, **allowed})
        self.entry, self._names, self._example = entry, names, example

    def checked(self, value: Any, where: str, *, show: bool = True) -> dict[str, Any]:
        """Return the table; arguments and errors as in ``Type``."""
        if not isinstance(value, Mapping):
            raise self._wrong(value, where, show)
        for name in value:
            if self._names is not None:
                self._names.checked(name, f"{where}: {name}", show=False)
        return {name: self.entry.checked(each, f"{where}: {name}", show=show) for name, each in value.items()}

    def parsed(self, text: str) -> Any:
        """Return the table that a text in the environment means."""
        return from_json(text, dict, self._example)


class Keys(Type):
    """Tables with known keys.

    Args:
        keys: type of the value of each key.
        convert: returns what the code uses in place of the table of checked values; errors as in ``Type``.
    """

    def __init__(self, keys: Mapping[str, Type], convert: Callable[[dict[str, Any]], Any]) -> None:
        properties = {name: each.schema for name, each in keys.items()}
        schema = {"type": "object", "additionalProperties": False, "properties": properties}
        super().__init__(f"a table with keys of {', '.join(keys)}", schema, convert)
        self._keys = keys

    def checked(self, value: Any, where: str, *, show: bool = True) -> Any:
        """Return what the table means; arguments and errors as in ``Type``."""
        if not isinstance(value, Mapping):
            raise self._wrong(value, where, show)
        for key in value:
            if key not in self._keys:
                raise BadValue(f"{where}: unknown key '{key}'; known are {', '.join(self._keys)}")
        return self._convert(
            {key: self._keys[key].checked(each, f"{where}: {key}", show=show) for key, each in value.items()}
        )


def from_json(text: str, kind: type, example: str) -> Any:
    """Return the table or list of a text in the environment.

    Args:
        kind: ``dict`` or ``list``.
        example: a right text, for the message, which does not repeat the wrong one: it may have a secret.

    Raises:
        BadValue: the text is not JSON, or JSON of something else.
    """
    try:
        return _of_json(text, kind)
    except json.JSONDecodeError as error:
        why = f"not valid JSON ({error})"
    except (ValueError, RecursionError):
        why = f"needs a {'table' if kind is dict else 'list'}"
    raise BadValue(f"{why}; write it in JSON, such as '{example}'")


def _of_json(text: str, kind: type) -> Any:
    value = json.loads(text)
    if not isinstance(value, kind):
        raise ValueError
    return value


def number(low: float, high: float, unit: str = "") -> Type:
    """Return the type of the numbers in a range."""
    needs = f"a number {f'of {unit} ' if unit else ''}from {low:g} to {high:g}"
    return Type(needs, {"type": "number", "minimum": low, "maximum": high})


def whole_number(low: int, high: int, unit: str = "") -> Type:
    """Return the type of the whole numbers in a range."""
    needs = f"a whole number {f'of {unit} ' if unit else ''}from {low} to {high}"
    return Type(needs, {"type": "integer", "minimum": low, "maximum": high})


def one_of(words: Collection[str]) -> Type:
    """Return the type of some words."""
    return Type(f"one of {', '.join(words)}", {"type": "string", "enum": list(words)})


def text(
    needs: str,
    pattern: str | None = None,
    most: int | None = None,
    convert: Callable[[str], Any] = lambda value: value,
    refused: Mapping[str, Any] | None = None,
) -> Type:
    """Return a type of texts that are not empty.

    Args:
        pattern: of the whole text, from ``^`` to ``$``.
        most: characters.
        convert, refused: see ``Type``.
    """
    limits = {"pattern": pattern, "maxLength": most}
    schema = {"type": "string", "minLength": 1} | {key: each for key, each in limits.items() if each is not None}
    return Type(needs, schema, convert, refused)


def _seconds(value: str) -> float:
    found = seconds(value)
    if found is None:
        raise ValueError(value)
    return found


SWITCH = Type("true or false", {"type": "boolean"})
DURATION = text("a duration such as 90s or 5m", r"^([0-9]{1,6}h)?([0-9]{1,6}m)?([0-9]{1,6}s)?$", convert=_seconds)
