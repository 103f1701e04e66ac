"""Messages that a container runtime or a logger has put into JSON, one record a line; and what Ray adds. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from itertools import repeat
from typing import Any

from commwatch_collectors.nccl.input.prefixes import prefix
from commwatch_collectors.nccl.text import clean

#: Fields with the message: of Docker, loguru, Cloud Logging, zap, structlog, ECS, OpenTelemetry, journald.
_FIELDS = (
    ("log",),
    ("record", "message"),
    ("message",),
    ("msg",),
    ("text",),
    ("textPayload",),
    ("jsonPayload", "message"),
    ("event",),
    ("body",),
    ("MESSAGE",),
    ("@message",),
)
#: Fields with the traceback of an exception.
_TRACES = ("exc_info", "exception", "stack_trace", "error.stack_trace")
#: One field on a line of its own, as in indented JSON.
_ALONE = re.compile(r'\s*"(?:log|message|msg|text|textPayload|MESSAGE|@message)": ?"')
_DECODER = json.JSONDecoder(strict=False)
#: Records within records that are opened; a record in JSON makes a message of one that an application wrote in JSON.
_MOST_NESTED = 3
#: Bytes of a message that Docker puts into one entry; the rest is in the next. Characters of the joined message.
_ENTRY_BYTES, _MOST_JOINED = 16_384, 65_536
_REPEATED = re.compile(r" \[repeated (\d{1,9})x across cluster\](?: \(Ray deduplicates logs[^()]{0,600}\))?\s*\Z")
#: A warning that Ray prints once for several workers counts for each of them, up to so many.
_MOST_REPEATED = 1_000


def messages(texts: Iterable[tuple[int, str]]) -> Iterator[tuple[int, str]]:
    """Yield texts of lines, without the JSON around their messages; the lines of a message have the number of its record."""
    entries = _Entries()
    for first, text in texts:
        if '"' not in text or '":' not in text:  # one character is found faster, and most texts have none
            yield first, text
            continue
        for number, line in enumerate(text.split("\n"), first):
            record = _record(line)
            if record is None:
                yield number, line
            elif (message := entries.joined(*record)) is not None:
                yield from ((number, each) for each in _lines(message))
    yield from ((number, line) for message in entries.rest() for line in _lines(message))


class _Entries:
    """Joins the entries of Docker that are parts of one message, which only the last ends with a newline."""

    def __init__(self) -> None:
        self._parts: dict[str, str] = {}
        self._ends = False

    def joined(self, message: str, record: dict[str, Any]) -> str | None:
        """Return the whole message; ``None`` if the next entry continues it."""
        stream = record.get("stream")
        if "log" not in record or stream not in ("stdout", "stderr"):
            return message
        message = self._parts.pop(stream, "") + message
        if message.endswith("\n"):
            self._ends = True
            return message
        is_part = self._ends or len(message.encode("utf-8", "replace")) >= _ENTRY_BYTES
        if not is_part or len(message) > _MOST_JOINED:
            return message
        self._parts[stream] = message
        return None

    def rest(self) -> Iterable[str]:
        """Return the messages that have no end."""
        return self._parts.values()


def _lines(message: str, nested: int = 1) -> Iterator[str]:
    for line in message.removesuffix("\n").split("\n"):
        record = _record(line) if '":' in line and nested < _MOST_NESTED else None
        if record is None:
            yield line
        else:
            yield from _lines(record[0], nested + 1)


def _record(line: str) -> tuple[str, dict[str, Any]] | None:
    """Return the message of a line that is a record, behind the prefix of the line, and the record."""
    if _ALONE.match(line):
        line = f"{{{line.strip().removesuffix(',')}}}"
    at = line.find("{")
    if at < 0:
        return None
    before = clean(line[:at])
    before = "" if before.strip() in ("[", ",") else before
    if prefix(before)[0] < len(before):
        return None
    try:
        record, end = _DECODER.raw_decode(line, at)
    except (ValueError, RecursionError):
        return None
    if not isinstance(record, dict) or line[end:].strip() not in ("", ",", "]", "],"):
        return None
    message = _message(record)
    if message is None:
        return None
    return (before + message.removesuffix("\n").replace("\n", "\n" + before) + "\n" * message.endswith("\n"), record)


def _message(record: dict[str, Any]) -> str | None:
    for path in _FIELDS:
        value: Any = record
        for name in path:
            value = value.get(name) if isinstance(value, dict) else None
        if isinstance(value, list) and value and all(isinstance(byte, int) and 0 <= byte < 256 for byte in value):
            value = bytes(value).decode("utf-8", "replace")  # journald, if there are colours
        if isinstance(value, str):
            traces = [trace for name in _TRACES if isinstance(trace := record.get(name), str)]
            return "\n".join([value, *traces]) if traces else value
    return None


def without_ray(texts: Iterable[tuple[int, str]]) -> Iterator[tuple[int, str]]:
    """Yield texts of lines without Ray's remark that several workers printed a line; warnings are yielded as often."""
    for first, text in texts:
        if "x across cluster]" not in text:
            yield first, text
            continue
        for number, line in enumerate(text.split("\n"), first):
            found = _REPEATED.search(line := clean(line)) if "x across cluster]" in line else None
            if found is None:
                yield number, line
                continue
            times = min(int(found[1]), _MOST_REPEATED) if " NCCL WARN " in line else 1
            yield from repeat((number, line[: found.start()]), max(1, times))
