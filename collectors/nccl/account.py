"""What a log has said so far: facts by process and communicator, each with where it stood first. No I/O, no clock."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, TypeVar

from commwatch.collectors.nccl import facts as f
from commwatch.collectors.nccl.classes import warning_class
from commwatch.collectors.nccl.forms import is_quiet, read
from commwatch.collectors.nccl.text import Message, Process, clean, has_own_time, parse_line

#: Distinct facts and warnings kept: a log of 2 GB must not fill the memory. What comes past it is counted.
MOST_FACTS = 500_000
#: Characters kept of a line that a fact was first seen in, and unknown messages kept as samples.
_MOST_TEXT = 400
_SAMPLES = 20

_F = TypeVar("_F", bound=f.Fact)
#: What belongs to one communicator rather than to its process.
_OF_COMMUNICATOR = (
    f.Via,
    f.CollNetVia,
    f.Ring,
    f.Neighbours,
    f.Trees,
    f.Channels,
    f.Connected,
    f.Layout,
    f.Pattern,
    f.NvlsUsed,
)


@dataclass
class Seen:
    """Where something stood first, and how often it was said."""

    source: str
    number: int
    line: str
    lines: int = 1


class Facts:
    """Distinct facts by type. (By type, too, because tuples of different types can be equal.)"""

    def __init__(self) -> None:
        self._of: dict[type, dict[Any, Seen]] = {}

    def of(self, kind: type[_F]) -> dict[_F, Seen]:
        """The facts of one type, each with where it stood."""
        return self._of.get(kind, {})

    def __iter__(self) -> Iterator[tuple[f.Fact, Seen]]:
        for found in self._of.values():
            yield from found.items()

    def find(self, fact: f.Fact) -> Seen | None:
        """Where ``fact`` was seen."""
        return self._of.get(type(fact), {}).get(fact)

    def put(self, fact: f.Fact, seen: Seen) -> None:
        """A fact that is new here."""
        self._of.setdefault(type(fact), {})[fact] = seen

    def move_to(self, other: Facts) -> None:
        """Give everything to ``other``."""
        for fact, seen in self:
            known = other.find(fact)
            if known is None:
                other.put(fact, seen)
            else:
                known.lines += seen.lines
        self._of.clear()


@dataclass
class Member:
    """One rank of one communicator, as its process told it."""

    process: Process
    tid: int
    init: f.Init
    seen: Seen
    complete: bool = False
    ended: str | None = None
    facts: Facts = field(default_factory=Facts)


class Life:
    """What one process said."""

    def __init__(self, process: Process) -> None:
        self.process = process
        self.facts = Facts()
        self.members: list[Member] = []
        #: The communicator that a thread makes, or has made last; where an init has no ``START``, what came before its end.
        self.current: dict[int, Member] = {}
        self.pending: dict[int, Facts] = {}
        self.by_comm: dict[str, Member] = {}
        self.says_start = False


@dataclass
class Warned:
    """One distinct warning."""

    text: str
    kind: str
    process: Process | None
    seen: Seen


class Account:
    """Reads lines, keeps what they say.

    Args:
        most_facts: bound on distinct facts and warnings.
    """

    def __init__(self, most_facts: int = MOST_FACTS) -> None:
        self._room = most_facts
        #: Facts of processes, and of nobody in particular: their heads were torn, glued to something, or never there.
        self.lives: dict[Process, Life] = {}
        self.loose = Facts()
        self.warnings: dict[str, Warned] = {}
        self.levels: Counter[str] = Counter()
        self.prefixes: Counter[str] = Counter()
        self.classes: Counter[str] = Counter()
        self.n_lines = self.n_crlf = self.n_timestamped = self.n_crowded = 0
        #: Messages whose head was not whole, that no form fits (with a few samples), and facts there was no room for.
        self.torn = self.unknown = self.overflow = 0
        self.samples: list[Seen] = []
        self._hosts: set[str] = set()
        self._where = ("", 0, "")

    def add(self, line: str, source: str, number: int) -> list[Warned]:
        """Take one physical line, without its ``\\n``; returns the warnings in it."""
        self.n_lines += 1
        self.n_crlf += line.endswith("\r")
        line = clean(line)
        if not line:
            return []
        self._where = (source, number, line)
        messages = parse_line(line, self._hosts)
        if len(messages) > 1:
            self.n_crowded += sum(message.level in ("INFO", "WARN", "CALL") for message in messages) > 1
        self.n_timestamped += has_own_time(line)
        warned = []
        for message in messages:
            facts = read(message.text)
            if message.level:
                self._count(message, bool(facts))
                if message.level == "WARN":
                    warned.append(self._warn(message))
            for fact in facts:
                if message.level or not _needs_head(fact):
                    self._take(fact, message)
        return warned

    # -- one message --------------------------------------------------------------------------

    def _count(self, message: Message, known: bool) -> None:
        self.levels[message.level] += 1
        if message.prefix:
            self.prefixes[message.prefix] += 1
        if message.process is None:
            self.torn += 1
        elif message.process not in self.lives and self._has_room():
            self.lives[message.process] = Life(message.process)
            self._hosts.add(message.process.host)
        if not known and message.level != "WARN" and not is_quiet(message.text):
            self.unknown += 1
            if len(self.samples) < _SAMPLES:
                self.samples.append(self._seen())

    def _warn(self, message: Message) -> Warned:
        text = message.text.strip()
        kind = warning_class(text)
        self.classes[kind] += 1
        known = self.warnings.get(text)
        if known is not None:
            known.seen.lines += 1
            return known
        warned = Warned(text, kind, message.process, self._seen())
        if self._has_room():
            self.warnings[text] = warned
        return warned

    def _take(self, fact: f.Fact, message: Message) -> None:
        life = None if message.process is None else self.lives.get(message.process)
        if life is None:
            self._note(self.loose, fact)
            return
        if "rccl" in message.origin:
            self._note(life.facts, f.Rccl())
        if isinstance(fact, f.Init):
            self._init(life, fact, message.tid)
        elif isinstance(fact, _OF_COMMUNICATOR):
            self._note(self._place(life, fact, message.tid), fact)
        else:
            if isinstance(fact, f.End) and fact.comm in life.by_comm:
                life.by_comm.pop(fact.comm).ended = fact.how
            self._note(life.facts, fact)

    def _init(self, life: Life, fact: f.Init, tid: int) -> None:
        self._note(life.facts, fact)
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
        pending = life.pending.pop(tid, None)
        if member.complete and pending is not None:
            for known, seen in pending:
                (member.facts if _fits(known, member.init) else life.facts).put(known, seen)

    def _place(self, life: Life, fact: f.Fact, tid: int) -> Facts:
        """Where a communicator's fact goes: to the one the line names, or that its thread is making or has made last."""
        member = life.by_comm.get(getattr(fact, "comm", None) or "") or life.current.get(tid)
        if member is not None and (life.says_start or getattr(fact, "comm", None)):
            return member.facts if _fits(fact, member.init) else life.facts
        return life.pending.setdefault(tid, Facts())

    def _note(self, facts: Facts, fact: f.Fact) -> None:
        known = facts.find(fact)
        if known is not None:
            known.lines += 1
        elif self._has_room():
            facts.put(fact, self._seen())

    def _seen(self) -> Seen:
        source, number, line = self._where
        return Seen(source, number, line[:_MOST_TEXT])

    def _has_room(self) -> bool:
        if self._room <= 0:
            self.overflow += 1
            return False
        self._room -= 1
        return True

    # -- the whole ----------------------------------------------------------------------------

    @property
    def members(self) -> list[Member]:
        """All ranks of all communicators, in the order of their inits within each process."""
        return [member for life in self.lives.values() for member in life.members]

    def everything(self) -> Iterator[tuple[Process | None, f.Fact, Seen]]:
        """All facts of all processes, and of nobody in particular."""
        for life in self.lives.values():
            for facts in (life.facts, *life.pending.values(), *(member.facts for member in life.members)):
                for fact, seen in facts:
                    yield life.process, fact, seen
        for fact, seen in self.loose:
            yield None, fact, seen

    def of(self, kind: type[_F]) -> Iterator[tuple[Process | None, _F, Seen]]:
        """All facts of one type."""
        for life in self.lives.values():
            for facts in (life.facts, *life.pending.values(), *(member.facts for member in life.members)):
                for fact, seen in facts.of(kind).items():
                    yield life.process, fact, seen
        for fact, seen in self.loose.of(kind).items():
            yield None, fact, seen


def _fits(fact: f.Fact, init: f.Init) -> bool:
    """Whether the rank that prints ``fact`` is the one of this communicator."""
    if isinstance(fact, f.Via):
        printing = fact.dst if fact.direction == "receive" else fact.src
        return printing == init.rank and init.nranks is not None and max(fact.src, fact.dst) < init.nranks
    if isinstance(fact, (f.CollNetVia, f.Neighbours)):
        return fact.rank == init.rank
    return not isinstance(fact, f.Layout) or fact.nranks == init.nranks


def _needs_head(fact: f.Fact) -> bool:
    """Whether text that no NCCL message holds can look like this by chance."""
    return isinstance(fact, (f.Trail, f.Call, f.CudaFailure, f.Retry)) or (
        isinstance(fact, f.Env) and "CCL_" not in fact.name
    )
