"""The kind of a line form, and how forms are made."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import NamedTuple, get_type_hints

from commwatch_collectors.nccl import facts as f


class Form(NamedTuple):
    """One line form."""

    #: A text without it cannot have the form.
    needle: str
    pattern: re.Pattern[str]
    #: Makes the fact of a match; ``None`` if the match has none.
    make: Callable[[re.Match[str]], f.Fact | None]


def integer(digits: str) -> int:
    """Parse an integer of 64 bits; raise ``ValueError`` for others, which are not counters."""
    if len(digits) < 19:
        return int(digits)
    value = int(digits) if len(digits) < 32 else 1 << 64
    if not -(1 << 63) <= value < 1 << 63:
        raise ValueError(digits[:32])
    return value


def form(needle: str, pattern: str, fact: type[f.Fact], **fixed: object) -> Form:
    """Return a form whose groups are named and typed as the fact's fields; ``fixed`` sets other fields."""
    hints = get_type_hints(fact)
    read_as: dict[type, Callable[[str], object]] = {int: integer, float: float, str: str}
    kinds = {name: read_as[kind] for kind in read_as for name, hint in hints.items() if hint in (kind, kind | None)}
    compiled = re.compile(pattern, re.ASCII)
    fields: tuple[str, ...] = getattr(fact, "_fields")  # noqa: B009
    without = {**dict.fromkeys(fields), **getattr(fact, "_field_defaults"), **fixed}  # noqa: B009
    empty = [without[field] for field in fields]
    named = [(fields.index(name), group - 1, kinds[name]) for name, group in compiled.groupindex.items()]

    def make(match: re.Match[str]) -> f.Fact:
        texts, values = match.groups(), empty.copy()
        for field, group, kind in named:
            if (text := texts[group]) is not None:
                values[field] = kind(text)
        return fact(*values)

    return Form(needle, compiled, make)


def made(needle: str, pattern: str, make: Callable[[re.Match[str]], f.Fact | None]) -> Form:
    return Form(needle, re.compile(pattern, re.ASCII), make)


#: Marks of a process in its lines, the surest first.
_MARKS = (
    (re.compile(r"\[rank(\d{1,9})\]:", re.ASCII), "rank {}"),
    (re.compile(r"\[\d{1,9},(\d{1,9})\](?:\[[^\]]{0,80}\])?<std(?:out|err|diag)>", re.ASCII), "rank {}"),
    (re.compile(r"\[[Rr]ank (\d{1,9})\]", re.ASCII), "rank {}"),
    (re.compile(r"\[PG (?:ID )?0 (?:PG GUID 0(?:\(\w{1,40}\))? )?Rank (\d{1,9})\]", re.ASCII), "rank {}"),
    (re.compile(r"\[PG [^\[\]\n]{1,200}?Rank (\d{1,9})\]", re.ASCII), "rank {} of its process group"),
    (re.compile(r"\(\w{1,80} rank=(\d{1,9})\b", re.ASCII), "rank {}"),
    (re.compile(r"\A *(\d{1,6}): ", re.ASCII), "task {}"),
    (re.compile(r"\[[A-Za-z_]{1,40}(\d{1,6})\]:", re.ASCII), "local rank {}"),
    (re.compile(r"\(\w{1,80} pid=(\d{1,10})", re.ASCII), "pid {}"),
)


def who(text: str) -> str:
    """Return which process printed a line, as far as its marks show it."""
    for pattern, words in _MARKS:
        if found := pattern.search(text):
            return words.format(found[1])
    return ""
