"""List where the sources of NCCL, RCCL or a plug-in warn: ``python -m tests.collectors.nccl.sites FOLDER [MACRO] > NAME.tsv``.

A row is a source file, the format string of a warning in it, and the class that the vocabulary has for it today (``-``:
none), for a reader to judge. A macro that warns is a site where it is used. Only the first line of a text counts.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from commwatch_collectors.nccl.vocabulary.known import words_for

_SOURCES = {".c", ".cc", ".cpp", ".cu", ".cuh", ".h", ".hpp"}
#: Another system, the library's own tests, and tools that write no log of NCCL.
_NOT_READ = re.compile(r"windows|/tests?/|\bras/client\.cc")
_COMMENT = re.compile(r'"(?:\\.|[^"\\\n])*"|//[^\n]*|/\*.*?\*/', re.DOTALL)
_DEFINE = re.compile(r"^[ \t]*#[ \t]*define[ \t]+(\w+)\(([^)]*)\)((?:[^\n\\]|\\.|\\\n)*)", re.MULTILINE)
_PART = re.compile(r'"(?:\\.|[^"\\])*"|\'(?:\\.|[^\'\\])\'|[(){}\[\],]', re.DOTALL)
_TOKEN = re.compile(r'"((?:\\.|[^"\\])*)"|(#?\w+)', re.DOTALL)
#: Values that make plausible text of a format string.
_VALUES = {"s": "name", "d": "3", "i": "3", "u": "3", "x": "1f", "X": "1F", "p": "0x7f00", "c": "x", "f": "1.5", "m": "Success", "g": "1.5"}  # fmt: skip
#: Format strings whose own words are values.
_TEXTS = {"Call to %s %s failed": "Call to recv from %s failed", "OFI %s failed; RC": "OFI fi_write failed; RC"}
#: What the build system defines.
_DEFINED = {"PACKAGE_NAME": "aws-ofi-nccl"}
_CONSTANT = re.compile(r'\b(\w+) = "((?:\\.|[^"\\])*)"')
_CONVERSION = re.compile(r"%[-+ #0]*\d*(?:\.\d+)?(?:hh|h|ll|l|z|j|t)?([a-zA-Z%])")


class Site(NamedTuple):
    """A place that warns."""

    file: str
    #: Its format string, with the values of a macro's parameters.
    call: str


def text_of(call: str) -> str:
    """Return a warning that the format string ``call`` prints."""
    for known, text in _TEXTS.items():
        call = call.replace(known, text)
    return _CONVERSION.sub(lambda found: _VALUES.get(found[1], found[1]), call)


def sites(folder: Path, warn: str = "WARN") -> list[Site]:
    """Return all distinct sites in the sources below ``folder``."""
    files = sorted(
        path for path in folder.rglob("*") if path.suffix in _SOURCES and not _NOT_READ.search(path.as_posix())
    )
    sources = {path.relative_to(folder).as_posix(): _plain(path.read_text(errors="replace")) for path in files}
    everywhere = {name: macro for text in sources.values() for name, macro in _macros(text, warn).items()}
    constants = _DEFINED | dict(pair for text in sources.values() for pair in _CONSTANT.findall(text))
    found: dict[Site, None] = {}
    for file, text in sources.items():
        macros = everywhere | _macros(text, warn)
        for name, arguments in _calls(_DEFINE.sub("", text), (warn, *macros)):
            parameters, formats = macros.get(name, ([], arguments[:1]))
            named = dict(zip(parameters, arguments, strict=False))
            if formats[0] == '"%s"':
                formats = [arguments[1]]
            calls = (_format(argument, constants | named) for argument in formats)
            found.update(dict.fromkeys(Site(file, call) for call in calls if call))
    return list(found)


def _macros(text: str, warn: str) -> dict[str, tuple[list[str], list[str]]]:
    """Return the macros that warn: their parameters, and the format of each warning."""
    found = {}
    for name, parameters, body in _DEFINE.findall(text):
        formats = [arguments[0] for _, arguments in _calls(body, (warn,))]
        if formats and name != warn:
            found[name] = ([parameter.strip() for parameter in parameters.split(",")], formats)
    return found


def _plain(text: str) -> str:
    return _COMMENT.sub(lambda found: found[0] if found[0][0] == '"' else " ", text)


def _calls(text: str, names: tuple[str, ...]) -> Iterator[tuple[str, list[str]]]:
    """Yield the name and the arguments of each call of one of ``names``."""
    for call in re.finditer(rf"\b({'|'.join(map(re.escape, names))})\s*\(", text):
        yield call[1], list(_arguments(text, call.end()))


def _arguments(text: str, start: int) -> Iterator[str]:
    depth, at = 1, start
    for part in _PART.finditer(text[start : start + 8192]):
        if part[0] in "([{":
            depth += 1
        elif part[0] in ")]}":
            depth -= 1
        if depth == 0 or (part[0] == "," and depth == 1):
            yield text[at : start + part.start()].strip()
            at = start + part.end()
        if depth == 0:
            return


def _format(argument: str, named: dict[str, str]) -> str:
    """Return the format string of adjacent literals, macros of ``inttypes.h`` and a macro's parameters."""
    parts = []
    for literal, word in _TOKEN.findall(argument):
        value = named.get(word.lstrip("#"), "")
        if not word:
            parts.append(literal)
        elif word.startswith("#"):
            parts.append(value)
        elif value:
            parts.append(_format(value, {}) if value[0] == '"' else value)
        elif word.startswith("PRI"):
            parts.append(word[3])
    line = "".join(parts).replace("\\\n", "").split("\\n")[0]
    return re.sub(r"\s+", " ", re.sub(r"\\(.)", r"\1", line)).strip()


def main() -> None:
    """Print the table."""
    folder, warn = Path(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else "WARN"
    prefix = "NET/OFI " if warn == "NCCL_OFI_WARN" else ""
    for site in sites(folder, warn):
        words = words_for(text_of(prefix + site.call), f"{site.file}:1")
        print(site.file, prefix + site.call, words.kind if words else "-", sep="\t")


if __name__ == "__main__":
    main()
