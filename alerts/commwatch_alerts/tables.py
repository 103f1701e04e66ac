"""Check the tables of the list of alerts with pydantic; an error is one line that names the key."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError, ValidatorFunctionWrapHandler, WrapValidator
from pydantic_core import ErrorDetails, PydanticCustomError

from commwatch_alerts.model import OneLineError

#: Configuration of the model of a table.
TABLE = ConfigDict(extra="forbid", frozen=True, strict=True, hide_input_in_errors=True)
_Model = TypeVar("_Model", bound=BaseModel)


class BadTable(OneLineError):
    """A table is wrong; the message names the key and a correct value."""


def needs(what: str, holds: Callable[[Any], object] = lambda value: True) -> WrapValidator:
    """Return an annotation that replaces the errors of a type, except those of its elements, by "needs ``what``".

    Args:
        what: a correct value, in words.
        holds: a condition that values must meet besides the type.
    """

    def check(value: Any, validate: ValidatorFunctionWrapHandler) -> Any:
        try:
            found = validate(value)
        except ValidationError as error:
            if any(each["loc"] for each in error.errors()):
                raise
        else:
            if holds(found):
                return found
        raise PydanticCustomError("needs", f"needs {what}")

    return WrapValidator(check)


def one_of(names: Collection[str]) -> WrapValidator:
    """Return ``needs`` for a text that is one of ``names``."""
    return needs(f"one of {', '.join(names)}", names.__contains__)


def checked_table(model: type[_Model], table: Any, *, context: Any = None, show_values: bool = False) -> _Model:
    """Return a table as a model.

    Args:
        context: for the validators of the model.
        show_values: show wrong values in errors; only for tables without secrets.

    Raises:
        BadTable: the table is wrong.
    """
    try:
        return model.model_validate(table, context=context)
    except ValidationError as error:
        # An unknown key first: it often is the misspelt name of a key that is missing.
        first, *_ = sorted(error.errors(), key=lambda each: each["type"] not in ("extra_forbidden", "invalid_key"))
        known = [field.alias or name for name, field in model.model_fields.items()]
        raise BadTable(_message(first, known, show_values)) from None


def _message(error: ErrorDetails, known: list[str], show_values: bool) -> str:
    kind, place = error["type"], list(error["loc"])
    if place[-1:] == ["[key]"]:  # the error is in a key, which is no position in a list even if it is a number
        place[-2:] = [str(place[-2])]
    if kind in ("extra_forbidden", "invalid_key"):
        key = error["input"] if kind == "invalid_key" else place[-1]
        return f"unknown key '{key}'; known are {', '.join(known)}"
    if kind == "missing":
        return f"lacks the key '{place[-1]}'"
    if kind == "model_type":
        return "needs a table of keys and values"
    says = str(error["ctx"]["error"]) if kind == "value_error" else error["msg"]
    value = f", not {error['input']!r}" if show_values and kind == "needs" else ""
    where = "".join(f" {part + 1}" if isinstance(part, int) else f": {part}" for part in place)
    return f"{where}: {says}{value}".removeprefix(": ")
