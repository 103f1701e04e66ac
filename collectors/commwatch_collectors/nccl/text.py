"""Split one physical line of a log into its messages, with the process that printed each. Pure."""

from __future__ import annotations

import re
from collections.abc import Collection
from functools import lru_cache
from typing import NamedTuple

from commwatch_collectors.nccl.input.prefixes import prefix

_ANSI = re.compile(
    r"\x1b(?:\[[0-?]*[ -/]*[@-~]"  # colours, cursor
    r"|\][^\x07\x1b]*(?:\x07|\x1b\\)"  # titles, links
    r"|[ -/]+[0-~]|[0-Z\\^-~])"  # character sets, single functions
)
_HOST = r"[A-Za-z0-9_-][A-Za-z0-9_.-]*"
#: ``host:pid:tid [dev] origin`` before a level: CALL has no device; the origin is ``file:line``, from 2.30 with the
#: function, from plugins ``function:line`` or ``signature:line``, at TRACE with milliseconds before it.
_HEAD = re.compile(
    rf"(?P<host>{_HOST}):(?P<pid>\d{{1,10}}):(?P<tid>\d{{1,10}})(?: \[(?P<device>-?\d{{1,6}})\])?"
    r"(?: (?:\d+\.\d+ )?(?P<origin>[^\s:]+:\d+)(?: \([^()]*\))?"
    r"| (?P<signature>[A-Za-z_](?:[^:]|:(?!\d)){0,400}\)(?:[^:()]|:(?!\d)){0,200}:\d{1,7}))?"
)
#: The function in a signature of C++.
_FUNCTION = re.compile(r"([\w:~]+)\(")
#: A head after other text, up to the level. Tried only where no host name can have begun before.
_HEAD_BEFORE = re.compile(rf"(?<![A-Za-z0-9_-]){_HEAD.pattern} \Z")
#: Where a message begins: at its level (a head may be before it, or what was left of it), at the bare version, or at
#: a head whose level was cut away. Other text may follow the level directly; ``WARNING`` is not a level.
_BEGIN = re.compile(r"NCCL(?: (?P<level>INFO|WARN|CALL|TRACE|ABORT)(?![A-Z])|(?P<bare> version \d)|(?= |\Z))")
#: Last words of messages to which a head with an unknown host may be glued. CUDA's minor versions have one digit.
_ENDING = re.compile(
    r"(?:cuda\d+\.\d|COMPLETE|START|trees|rings|IPC|CUMEM|MNNVL|pointer|memory|direct|read|CE|GDRDMA|Shared|peer|IB|Socket)"
    r"(?=[A-Za-z0-9_-])"
)
_OWN_TIME = re.compile(
    rf"\[2\d{{3}}-\d\d-\d\d \d\d:\d\d:\d\d[.\d]*\] (?={_HOST}:\d{{1,10}}:\d{{1,10}} |NCCL version \d)"
)
#: Characters; a longer head is other text that contains one.
_MOST_HEAD = 600


class Process(NamedTuple):
    """The process that printed a message. Containers repeat pids, so the launcher's mark of the rank is included."""

    launcher: str
    host: str
    pid: int


class Head(NamedTuple):
    """The text before a message's level, parsed."""

    #: ``None`` if the head is torn, glued to other text, or missing.
    process: Process | None
    tid: int = 0
    #: ``file:line`` or ``function:line`` that warned.
    origin: str = ""
    #: How its launcher marks lines: ``none``, ``slurm "N: "``, ``mpirun``, ``rank``, ``ray``, ``other`` (also a whole head
    #: behind other text); empty where the head is torn, or another message is before it.
    prefix: str = ""


NOBODY = Head(None)
_GLUED = Head(None, prefix="other")


class Message(NamedTuple):
    """One message, or other text (``level`` is empty)."""

    #: ``INFO``, ``WARN``, ``CALL``, ``TRACE``, ``ABORT``; empty for text without a head.
    level: str
    text: str
    head: Head = NOBODY


def clean(line: str) -> str:
    """The line without ANSI codes and carriage returns."""
    if "\x1b" in line:
        line = _ANSI.sub("", line)
    return line.replace("\r", "") if "\r" in line else line


def parse_line(line: str, hosts: Collection[str] = ()) -> list[Message]:
    """Return the messages of one physical line; text outside of messages becomes one without a level.

    Args:
        line: already ``clean``.
        hosts: known host names; they show where a message ends that another is glued to.
    """
    head, found, text = line.partition(" NCCL INFO ")
    if found and "NCCL " not in text and not text.endswith("NCCL"):
        whose = read_head(head)
        if whose is not None:
            return [Message("INFO", text, whose)]
    if "NCCL" not in line:
        return [Message("", line)]
    return _split(line, hosts)


def has_own_time(line: str) -> bool:
    """Return whether NCCL itself printed a timestamp before a message of this line."""
    return "[2" in line and _OWN_TIME.search(line) is not None


def read_head(head: str) -> Head | None:
    """Parse the text before a level; ``None`` unless it is a complete head, with or without a launcher's prefix."""
    return _read_head(head) if len(head) <= _MOST_HEAD else None


@lru_cache(maxsize=8192)
def _read_head(head: str) -> Head | None:
    end, kind, tag = prefix(head)
    found = _HEAD.fullmatch(head, end)
    if found is None:
        return None
    return Head(Process(tag, found["host"], int(found["pid"])), int(found["tid"]), _origin(found), kind)


def _origin(head: re.Match[str]) -> str:
    """Return ``file:line`` or ``function:line``."""
    signature = head["signature"]
    if signature is None:
        return head["origin"] or ""
    function = _FUNCTION.search(signature)
    return signature if function is None else f"{function[1]}:{signature.rpartition(':')[2]}"


def _split(line: str, hosts: Collection[str]) -> list[Message]:
    messages: list[Message] = []
    level, whose, at, since = "", NOBODY, 0, 0
    behind = False  # after another message
    for begin in _BEGIN.finditer(line):
        bare, word = begin["bare"] is not None, begin["level"] or ""
        head = None if bare else _HEAD_BEFORE.search(line, max(since, begin.start() - _MOST_HEAD), begin.start())
        since = begin.end()
        if bare and level and not line[at : begin.start()].strip():
            continue  # the same words behind a head
        if not (bare or word or head):
            continue  # NCCL's name in a text
        alone = at == 0 and not messages and bool(word and head)
        following = read_head(line[: begin.start() - 1]) if alone else None
        start = begin.start() if head is None else head.start()
        if following is None:
            if head is not None:
                start += _glued(head["host"], hosts, whose)
            if level or line[at:start].strip():
                messages.append(_message(level, line[at:start], whose))
            following = _GLUED if word and head and not behind else NOBODY
        behind = behind or bool(word)
        level, whose, at = word, following, begin.start() if bare else begin.end()
    messages.append(_message(level, line[at:], whose))
    return messages


def _message(level: str, text: str, whose: Head) -> Message:
    return Message(level, text.removeprefix(" ") if level else text, whose)


def _glued(host: str, hosts: Collection[str], whose: Head) -> int:
    """Return how many characters of a head's host are the end of the text before it."""
    mine = None if whose.process is None else whose.process.host
    ending = _ENDING.match(host)
    by_default = 0 if ending is None else ending.end()
    # Suffixes of the host, the longest first: there are fewer of them than known hosts.
    return next((at for at in range(len(host)) if host[at:] in hosts or host[at:] == mine), by_default)
