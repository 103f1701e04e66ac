"""The facts of a log so far, by process and communicator, each with its first line. No I/O, no clock."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

from commwatch.collectors.nccl import facts as f
from commwatch.collectors.nccl.classes import warning_class
from commwatch.collectors.nccl.lives import Facts, Life, Member, Seen, Warned
from commwatch.collectors.nccl.quiet import is_quiet
from commwatch.collectors.nccl.search import read
from commwatch.collectors.nccl.text import NOBODY, Head, Message, Process, clean, has_own_time, parse_line, read_head

#: Distinct facts and warnings kept: a log of 2 GB must not fill the memory. Further ones are only counted.
MOST_FACTS = 500_000
#: Characters kept of a fact's first line. A fact of a longer message counts as one for each ``_OF_LONG`` characters: it may be
#: one setting, or ten thousand ranks. ``_SAMPLES`` is the number of unknown messages kept.
_MOST_TEXT, _OF_LONG = 400, 100
_SAMPLES = 20
#: A host with more messages is a real one, even if its name resembles a piece of another.
_MOST_TORN = 3
#: Heads and texts that are remembered, and characters of a text that is.
_MOST_SPEAKERS, _MOST_CONTENTS, _MOST_CONTENT = 8192, 16_384, 1024

_F = TypeVar("_F", bound=f.Fact)
#: Facts of one communicator rather than of its process.
_OF_COMMUNICATOR: frozenset[type] = frozenset(
    (
        f.Via,
        f.CollNetVia,
        f.Ring,
        f.Neighbours,
        f.Tree,
        f.Trees,
        f.Channels,
        f.Connected,
        f.Layout,
        f.Pattern,
        f.NvlsUsed,
        f.Mnnvl,
    )
)

#: Facts that text other than NCCL's messages can match by chance.
_HEADED = (f.Trail, f.Call, f.CudaFailure, f.Retry, f.Rccl)


class _Tally:
    """A count that several heads share."""

    __slots__ = ("n",)

    def __init__(self) -> None:
        self.n = 0


@dataclass
class _Speaker:
    """A complete head of a known process, as text before ``NCCL INFO``."""

    __slots__ = ("has_time", "last", "tally", "tid")

    last: tuple[Head, Life]
    tid: int
    tally: _Tally
    has_time: bool


class _Content(NamedTuple):
    """The content of a text after ``NCCL INFO``, without the process that printed it."""

    #: Each with its type, and whether only the thread shows the communicator that it belongs to.
    facts: tuple[tuple[f.Fact, type[f.Fact], bool], ...]
    #: It has facts, or is known to have none.
    known: bool
    has_time: bool


def _ignore(_: Warned) -> None:
    """Drop a warning: the account keeps it."""


class Account:
    """Collects the facts in the lines of a log.

    Args:
        most_facts: bound on distinct facts and warnings.
    """

    def __init__(self, most_facts: int = MOST_FACTS) -> None:
        self._room = most_facts
        #: By process; and facts without a known process: their heads were torn, glued to other text, or missing.
        self.lives: dict[Process, Life] = {}
        self.loose = Facts()
        self.warnings: dict[str, Warned] = {}
        #: Messages by level and launcher's prefix.
        self._tallies: dict[tuple[str, str], _Tally] = {}
        self.n_lines = self.n_crlf = self.n_timestamped = self.n_crowded = 0
        #: Messages with a damaged head, messages that no form matches, and facts beyond ``most_facts``.
        self.torn = self.unknown = self.overflow = 0
        self.samples: list[Seen] = []
        self.torn_samples: list[Seen] = []
        self._hosts: set[str] = set()
        self._source, self._number, self._line, self._length = "", 0, "", 0
        self._last: tuple[Head, Life | None] = (NOBODY, None)
        #: By the text of the head; and by the text of the message.
        self._speakers: dict[str, _Speaker] = {}
        self._contents: dict[str, _Content] = {}

    def add(self, line: str, source: str, number: int) -> list[Warned]:
        """Add one physical line, without its ``\\n``; return its warnings, and new time-outs of PyTorch's watchdog."""
        warned: list[Warned] = []
        self.add_lines(((number, line),), source, warned.append)
        return warned

    def add_lines(
        self, lines: Iterable[tuple[int, str]], source: str, heard: Callable[[Warned], object] = _ignore
    ) -> None:
        """Add numbered physical lines of one source; ``heard`` is called with what ``add`` returns."""
        if source != self._source:
            self._source, self._number = source, -1
        speakers, contents = self._speakers, self._contents
        for number, line in lines:
            if number != self._number:  # not another piece of one long line
                self.n_lines += 1
                self._number = number
            if "\r" in line or "\x1b" in line:
                self.n_crlf += line.endswith("\r")
                line = clean(line)  # noqa: PLW2901
            self._line = line
            head, found, text = line.partition(" NCCL INFO ")
            if not found:
                if line and ("NCCL" in line or read(line) or has_own_time(line)):
                    self._add_any(line, heard)
                continue
            content = contents.get(text) or self._content(text)
            speaker = speakers.get(head) or self._speaker(head)
            if content is None or speaker is None:
                self._add_any(line, heard)
                continue
            # Most lines of most logs: one message of level INFO behind a known head.
            self._last = _, life = speaker.last
            speaker.tally.n += 1
            life.messages += 1
            self.n_timestamped += speaker.has_time or content.has_time
            if not content.known:
                self._count_unknown()
            current = life.current.get(speaker.tid)
            for fact, kind, by_thread in content.facts:
                if by_thread and current is not None and life.says_start and kind in current.facts:
                    seen = current.facts[kind].get(fact)
                    if seen is not None:  # a repetition
                        seen.lines += 1
                        continue
                self._length = len(text)
                self._take(life, fact, speaker.tid)

    def _speaker(self, text: str) -> _Speaker | None:
        """Return how lines with this head count, ``None`` unless it is complete and its process has printed before."""
        head = read_head(text)
        life = None if head is None or head.process is None or "rccl" in head.origin else self.lives.get(head.process)
        if head is None or life is None:
            return None
        if len(self._speakers) >= _MOST_SPEAKERS:
            self._speakers.clear()
        tally = self._tallies.setdefault(("INFO", head.prefix), _Tally())
        speaker = self._speakers[text] = _Speaker((head, life), head.tid, tally, has_own_time(text + " "))
        return speaker

    def _content(self, text: str) -> _Content | None:
        """Return the content of ``text``; ``None`` if it may hold a second message."""
        if "NCCL " in text or text.endswith("NCCL"):
            return None
        facts = tuple(
            (fact, type(fact), type(fact) in _OF_COMMUNICATOR and getattr(fact, "comm", None) is None)
            for fact in read(text)
        )
        content = _Content(facts, bool(facts) or is_quiet(text), has_own_time(text))
        if len(text) <= _MOST_CONTENT:
            if len(self._contents) >= _MOST_CONTENTS:
                self._contents.clear()
            self._contents[text] = content
        return content

    def _add_any(self, line: str, heard: Callable[[Warned], object]) -> None:
        messages = parse_line(line, self._hosts)
        if len(messages) > 1:
            self.n_crowded += sum(message.level in ("INFO", "WARN", "CALL") for message in messages) > 1
        if has_own_time(line):
            self.n_timestamped += 1
        for message in messages:
            self._length = len(message.text)
            facts = read(message.text)
            life = self._count(message, bool(facts)) if message.level else None
            if message.level == "WARN":
                heard(self._warn(message))
            if life is None:
                self._take_loose(facts, message, heard)
                continue
            for fact in facts:
                self._take(life, fact, message.head.tid)

    # -- one message --------------------------------------------------------------------------

    def _count(self, message: Message, known: bool) -> Life | None:
        """Count a message; return its process, ``None`` if that is not known."""
        level, text, head = message
        self._tallies.setdefault((level, head.prefix), _Tally()).n += 1
        if not known and level != "WARN" and not is_quiet(text):
            self._count_unknown()
        if head.process is None:
            self.torn += 1
            if len(self.torn_samples) < _SAMPLES:
                self.torn_samples.append(self._seen())
            return None
        if head is not self._last[0]:  # lines of one process often follow one another
            self._last = (head, self._life(head, head.process))
        life = self._last[1]
        if life is not None:
            life.messages += 1
        return life

    def _count_unknown(self) -> None:
        self.unknown += 1
        if len(self.samples) < _SAMPLES:
            self.samples.append(self._seen())

    def _life(self, head: Head, process: Process) -> Life | None:
        life = self.lives.get(process)
        if life is None and self._has_room():
            life = self.lives[process] = Life(process)
            self._hosts.add(process.host)
        if life is not None and "rccl" in head.origin:
            self._note(life.facts, f.Rccl())
        return life

    def _warn(self, message: Message) -> Warned:
        text = message.text.strip()
        kind = warning_class(text)
        known = self.warnings.get(text)
        if known is not None:
            known.seen.lines += 1
        elif self._has_room():
            self.warnings[text] = Warned(text, kind, message.head.process, self._seen())
        return Warned(text, kind, message.head.process, self._seen())

    def _take_loose(self, facts: tuple[f.Fact, ...], message: Message, heard: Callable[[Warned], object]) -> None:
        for fact in facts:
            if message.level or not _needs_head(fact):
                if isinstance(fact, f.Watchdog) and fact not in self.loose.of(f.Watchdog):
                    heard(Warned(message.text.strip(), "timeout", None, self._seen()))
                self._note(self.loose, fact)

    def _take(self, life: Life, fact: f.Fact, tid: int) -> None:
        if type(fact) in _OF_COMMUNICATOR:
            self._note(self._place(life, fact, tid), fact)
            return
        self._note(life.facts, fact)
        if isinstance(fact, f.Init):
            self._init(life, fact, tid)
        elif isinstance(fact, f.End) and fact.comm in life.by_comm:
            life.by_comm.pop(fact.comm).ended = fact.how

    def _init(self, life: Life, fact: f.Init, tid: int) -> None:
        life.says_start |= fact.start
        if fact.rank is None or fact.comm is None:
            return
        member = life.by_comm.get(fact.comm)
        if fact.start or member is None or member.complete:
            if not self._has_room():
                return
            member = life.by_comm[fact.comm] = Member(life.process, tid, fact, self._seen())
            life.members.append(member)
        member.complete = not fact.start
        life.current[tid] = member
        # Earlier facts of this thread belong to an init that ends; if one begins, to an init that is not in the log.
        for kind, found in life.pending.pop(tid, Facts()).items():
            for known, seen in found.items():
                mine = member.complete and _fits(known, member.init)
                into = (member.facts if mine else life.facts).setdefault(kind, {})
                into.setdefault(known, seen)
                if into[known] is not seen:
                    into[known].lines += seen.lines

    def _place(self, life: Life, fact: f.Fact, tid: int) -> Facts:
        """Return where a communicator's fact belongs: to the one in the line, or the one its thread initialises or did last."""
        comm = fact.comm if isinstance(fact, (f.Via, f.Trees)) else None
        if not life.says_start and comm is None:
            pending = life.pending.get(tid)
            if pending is None:
                if self._room <= 0:
                    return life.facts
                pending = life.pending[tid] = Facts()
            return pending
        member = life.current.get(tid) if comm is None else life.by_comm.get(comm)
        if member is None and comm is None:
            # Connections may be made at the first collective, by the thread that calls it.
            fitting = [member for member in life.by_comm.values() if _fits(fact, member.init)]
            member = fitting[0] if len(fitting) == 1 else None
        return member.facts if member is not None and _fits(fact, member.init) else life.facts

    def _note(self, facts: Facts, fact: f.Fact) -> None:
        kind = type(fact)
        of = facts.get(kind)
        known = None if of is None else of.get(fact)
        if known is not None:
            known.lines += 1
        elif self._has_room():
            if of is None:
                of = facts[kind] = {}
            of[fact] = Seen(self._source, self._number, self._line[:_MOST_TEXT])

    def _seen(self) -> Seen:
        return Seen(self._source, self._number, self._line[:_MOST_TEXT])

    def _has_room(self) -> bool:
        if self._room <= 0:
            self.overflow += 1
            return False
        self._room -= 1 if self._length <= _MOST_TEXT else self._length // _OF_LONG
        return True

    # -- the whole ----------------------------------------------------------------------------

    @property
    def counts(self) -> dict[tuple[str, str], int]:
        """Messages by level and launcher's prefix."""
        return {what: tally.n for what, tally in self._tallies.items()}

    @property
    def levels(self) -> Counter[str]:
        """Messages by level."""
        return _summed((level, count) for (level, _), count in self.counts.items())

    @property
    def prefixes(self) -> Counter[str]:
        """Messages by launcher's prefix, where that is known."""
        return _summed((prefix, count) for (_, prefix), count in self.counts.items() if prefix)

    @property
    def processes(self) -> list[Process]:
        """Processes that printed anything, except names that are pieces of a torn head."""
        hosts: Counter[str] = Counter()
        for process, life in self.lives.items():
            hosts[process.host] += life.messages
        # By pid and end of the host's name, which pieces of a torn name share: the most messages of one host.
        most: Counter[tuple[int, str]] = Counter()
        for process in self.lives:
            alike = process.pid, process.host[-2:]
            most[alike] = max(most[alike], hosts[process.host])
        complete_hosts = {
            process.host
            for process in self.lives
            if hosts[process.host] > _MOST_TORN or most[process.pid, process.host[-2:]] < 10 * hosts[process.host]
        }
        return [process for process in self.lives if process.host in complete_hosts]

    @property
    def members(self) -> list[Member]:
        """All ranks of all communicators, in the order of their inits within each process."""
        return [member for life in self.lives.values() for member in life.members]

    def of(self, kind: type[_F]) -> Iterator[tuple[Process | None, _F, Seen]]:
        """Yield all facts of one type, with process and place."""
        for life in self.lives.values():
            for facts in (life.facts, *life.pending.values(), *(member.facts for member in life.members)):
                for fact, seen in facts.of(kind).items():
                    yield life.process, fact, seen
        for fact, seen in self.loose.of(kind).items():
            yield None, fact, seen


def _summed(counts: Iterable[tuple[str, int]]) -> Counter[str]:
    total: Counter[str] = Counter()
    for name, count in counts:
        total[name] += count
    return total


def _fits(fact: f.Fact, init: f.Init) -> bool:
    """Return whether ``fact`` can be of the rank and communicator of ``init``."""
    if isinstance(fact, f.Via):
        printing = fact.dst if fact.direction == "receive" else fact.src
        return printing == init.rank and init.nranks is not None and fact.src < init.nranks > fact.dst
    if isinstance(fact, (f.CollNetVia, f.Neighbours, f.Tree)):
        return fact.rank == init.rank
    return not isinstance(fact, f.Layout) or fact.nranks == init.nranks


def _needs_head(fact: f.Fact) -> bool:
    """Return whether text without a message's head can match this fact by chance."""
    return isinstance(fact, _HEADED) or (isinstance(fact, f.Env) and not fact.name.startswith(("NCCL_", "RCCL_")))
