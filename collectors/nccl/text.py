"""One physical line of a log to the messages in it: whose they are, and what they say. Pure."""

from __future__ import annotations

import re
from collections.abc import Collection
from functools import lru_cache
from typing import NamedTuple

_ANSI = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|[@-_])")
_HOST = r"[A-Za-z0-9_-][A-Za-z0-9_.-]*"
#: ``host:pid:tid [dev] origin`` before a level: CALL has no device; the origin is ``file:line``, from 2.30 with the
#: function, from plugins ``function:line``, at TRACE with milliseconds before it.
_REST = r":\d+:\d+(?: \[-?\d+\])?(?: (?:\d+\.\d+ )?[^\s:]+:\d+(?: \([^()]*\))?)?"
_LEVEL = r"NCCL (?:INFO|WARN|CALL|TRACE|ABORT)\b"
#: Where a message begins: with its head, with what was left of it, or as the bare version.
_BEGIN = re.compile(rf"(?:{_HOST}{_REST} )?{_LEVEL}|NCCL version \d")
_HEAD = re.compile(
    rf"(?P<host>{_HOST}):(?P<pid>\d+):(?P<tid>\d+)(?: \[(?P<device>-?\d+)\])?(?: (?:\d+\.\d+ )?(?P<origin>[^\s:]+:\d+)(?: \([^()]*\))?)?"
)
_STAMP = r"\[?\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d[.,\d]*(?:Z|[+-]\d\d:?\d\d)?\]?:?"
#: What launchers, container runtimes and quotations put before a message.
_LAUNCHER = re.compile(
    r"(?:\s"
    r"|(?P<slurm>\d+):"
    r"|\[(?P<mpi>\d+,\d+)\]<std(?:out|err|diag)>:"
    r"|\[(?P<rank>[A-Za-z][\w-]*?-?\d+)\]:"
    r"|\((?P<ray>[^()]*\bpid=\d+[^()]*)\)"
    rf"|(?P<time>{_STAMP})"
    r"|(?P<pod>\[?[\w.-]+(?:/[\w.-]+)+\]?) "
    r"|(?P<compose>[\w.-]+) +\| "
    r"|std(?:out|err) [FP] "
    r"|(?P<quote>[>|`]))*"
)
_OWN_TIME = re.compile(rf"\[2\d{{3}}-\d\d-\d\d \d\d:\d\d:\d\d[.\d]*\] (?={_HOST}:\d+:\d+ )")
#: A head is never longer; what is, is text that has swallowed one.
_MOST_HEAD = 600


class Process(NamedTuple):
    """Who printed a message. Containers repeat pids, so what the launcher says of the rank belongs to it."""

    launcher: str
    host: str
    pid: int


class Message(NamedTuple):
    """One message, or text that is none (``level`` is empty)."""

    #: ``INFO``, ``WARN``, ``CALL``, ``TRACE``, ``ABORT``; empty for text without a head.
    level: str
    text: str
    #: ``None`` where the head is torn, glued behind other text, or missing.
    process: Process | None = None
    tid: int = 0
    #: ``file:line`` or ``function:line`` that warned.
    origin: str = ""
    #: How its launcher marks lines: ``none``, ``slurm "N: "``, ``mpirun``, ``rank``, ``ray``, ``other`` (also a whole head
    #: behind other text); empty where the head is torn.
    prefix: str = ""


class _Head(NamedTuple):
    process: Process
    tid: int
    origin: str
    prefix: str


def clean(line: str) -> str:
    """The line without ANSI codes and carriage returns."""
    if "\x1b" in line:
        line = _ANSI.sub("", line)
    return line.replace("\r", "") if "\r" in line else line


def parse_line(line: str, hosts: Collection[str] = ()) -> list[Message]:
    """The messages of one physical line, without its newline; text that belongs to none is one, too.

    Args:
        line: already ``clean``.
        hosts: that have printed before: they tell where a message ends that another is glued to.
    """
    head, found, text = line.partition(" NCCL INFO ")
    if found and "NCCL " not in text:
        whose = read_head(head)
        if whose is not None:
            return [Message("INFO", text, *whose)]
    if "NCCL " not in line:
        return [Message("", line)]
    return _split(line, hosts)


def has_own_time(line: str) -> bool:
    """Whether NCCL itself put the time before a message of this line."""
    return "[2" in line and _OWN_TIME.search(line) is not None


@lru_cache(maxsize=8192)
def read_head(head: str) -> _Head | None:
    """What stands before the level; ``None`` if that is not a launcher's prefix and a whole head."""
    if len(head) > _MOST_HEAD:
        return None
    before = _LAUNCHER.match(head)
    assert before is not None  # it matches nothing at all, too
    found = _HEAD.fullmatch(head, before.end())
    if found is None:
        return None
    kind, tag = _launcher(before)
    return _Head(Process(tag, found["host"], int(found["pid"])), int(found["tid"]), found["origin"] or "", kind)


def _launcher(found: re.Match[str]) -> tuple[str, str]:
    """Kind of a launcher's prefix, and what of it tells processes apart."""
    for name, kind in (("slurm", 'slurm "N: "'), ("mpi", "mpirun"), ("rank", "rank"), ("ray", "ray")):
        if found[name] is not None:
            return kind, found[name]
    if found["pod"] is not None or found["compose"] is not None:
        return "other", found["pod"] or found["compose"]
    return ("other" if found[0].strip() else "none"), ""


def _split(line: str, hosts: Collection[str]) -> list[Message]:
    messages: list[Message] = []
    level, whose, at, glued = "", None, 0, False
    for begin in _BEGIN.finditer(line):
        head, _, word = begin[0].rpartition("NCCL ")
        start, bare = begin.start(), word.startswith("version")
        if bare and level and not line[at:start].strip():
            continue  # the same words behind a head
        first = at == 0 and not messages
        following = read_head(line[:start] + head[:-1]) if first and head else None
        if following is None:
            start += _glued(head, hosts)
            if level or line[at:start].strip():
                messages.append(_message(level, line[at:start], whose, glued))
        glued = following is None and bool(head)
        level, whose, at = "" if bare else word, following, start if bare else begin.end()
    messages.append(_message(level, line[at:], whose, glued))
    return messages


def _message(level: str, text: str, whose: _Head | None, glued: bool) -> Message:
    text = text.removeprefix(" ") if level else text
    return Message(level, text, prefix="other" if glued else "") if whose is None else Message(level, text, *whose)


def _glued(head: str, hosts: Collection[str]) -> int:
    """How much of what reads as a head's host is the end of the text before it."""
    host = head.partition(":")[0]
    if host in hosts:
        return 0
    return min((len(host) - len(known) for known in hosts if known and host.endswith(known)), default=0)
