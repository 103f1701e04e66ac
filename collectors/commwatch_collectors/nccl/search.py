"""Search a text for the line forms: a text is tried only with those forms whose needles it has."""

from __future__ import annotations

from functools import lru_cache

from commwatch_collectors.nccl import facts as f
from commwatch_collectors.nccl.beside.form import Form
from commwatch_collectors.nccl.forms import FORMS

#: Parts that several needles share: a text without a part is not searched for these needles.
_SHARED_PARTS = (
    "-> ", "COMPLETE", "ersion", "ccl", "NET/", "GPU", "NVLS", "lugin", "rank", "Init ", "ootstrap", "rror", "onitored", "atchdog", "emory",
    "illed", "ailed", "UE TO", "tore", "imeout", "ith ", "imed out", "as ", "ollective", "ignal", "nvalid", "ith return", "ecause",
)  # fmt: skip


def _by_part(forms: tuple[Form, ...]) -> list[tuple[str, list[Form]]]:
    """Group the forms by a part of their needles: a shared part, or else the needle itself."""
    groups: dict[str, list[Form]] = {}
    for form in forms:
        part = next((part for part in _SHARED_PARTS if part in form.needle), form.needle)
        groups.setdefault(part, []).append(form)
    return list(groups.items())


_BY_PART = _by_part(FORMS)
#: The forms in the order in which a text is searched for them: the first that is the whole text ends the search.
SEARCHED: tuple[Form, ...] = tuple(form for _, forms in _BY_PART for form in forms)

#: Characters. Longer texts are not cached, so that the caches do not grow with the length of lines.
_MOST_KEPT, _MOST_SHAPE = 2048, 512
#: Texts that differ in hexadecimal digits only have one shape. Bytes, because they are translated ten times as fast.
_DIGITS = bytes.maketrans(b"123456789abcdef", b"0" * 15)


def read(text: str) -> tuple[f.Fact, ...]:
    """Return the facts in ``text``; empty if it has no complete form."""
    if len(text) > _MOST_SHAPE:
        return _read(text) if len(text) <= _MOST_KEPT else _search(text, _candidates(text))
    forms = _of_shape(_shape(text))
    return _search(text, forms) if forms else ()


@lru_cache(maxsize=2048)
def _read(text: str) -> tuple[f.Fact, ...]:
    return _search(text, _candidates(text))


def _candidates(text: str) -> tuple[Form, ...]:
    """Return the forms whose needle is in ``text``."""
    return tuple(form for part, forms in _BY_PART if part in text for form in forms if form.needle in text)


def _shape(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass").translate(_DIGITS)


@lru_cache(maxsize=8192)
def _of_shape(shape: bytes) -> tuple[Form, ...]:
    """Return the forms that a text of this shape can have."""
    found = []
    for part, forms in _SHAPED:
        if part in shape:
            found += [form for needle, form in forms if needle in shape]
    return tuple(found)


_SHAPED = [(_shape(part), [(_shape(form.needle), form) for form in forms]) for part, forms in _BY_PART]


def _search(text: str, forms: tuple[Form, ...]) -> tuple[f.Fact, ...]:
    found: list[f.Fact] = []
    length = len(text.rstrip())
    for form in forms:
        for match in form.pattern.finditer(text):
            try:
                fact = form.make(match)
            except ValueError:
                continue  # a number out of range
            if fact is not None:
                found.append(fact)
                if match.start() == 0 and match.end() >= length:
                    return tuple(found)  # the match is the whole text
    return tuple(found)
