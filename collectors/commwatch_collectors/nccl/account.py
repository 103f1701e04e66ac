"""The facts of a log so far, by process and communicator, each with its first line. No I/O, no clock."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeVar

from commwatch_collectors.nccl import facts as f
from commwatch_collectors.nccl.belonging import OF_COMMUNICATOR, OF_FAULTS, fits, needs_head
from commwatch_collectors.nccl.classes import warning_class
from commwatch_collectors.nccl.last_errors import ANNOUNCES, LastErrors
from commwatch_collectors.nccl.lives import QUOTED, Facts, Life, Member, Seen, Warned
from commwatch_collectors.nccl.quiet import is_quiet
from commwatch_collectors.nccl.search import read
from commwatch_collectors.nccl.text import NOBODY, Head, Message, Process, clean, has_own_time, parse_line, read_head
from commwatch_collectors.nccl.tracebacks import BEGINS, Tracebacks

#: Distinct facts and warnings kept: a log of 2 GB must not fill the memory. Further ones are only counted.
MOST_FACTS = 500_000
#: Those of them that only warnings and facts of faults may be, at most a tenth: a fault at the end of a long log must be found.
_ONLY_FAULTS = 2_000
#: Characters kept of a fact's first line. A fact of a longer message counts as one for each ``_OF_LONG`` characters: it may be
#: one setting, or ten thousand ranks. ``_SAMPLES`` is the number of unknown messages kept.
_MOST_TEXT, _OF_LONG = 400, 100
_SAMPLES = 20
#: Characters kept of a line that shows a fault: both sides of what differs.
_MOST_OF_FAULT = 4_000
#: A host with more messages is a real one, even if its name resembles a piece of another.
_MOST_TORN = 3
#: Heads and texts that are remembered, and characters of a text that is.
_MOST_SPEAKERS, _MOST_CONTENTS, _MOST_CONTENT = 8192, 16_384, 1024

#: A line without any of them begins no exception, and no reason of one.
_A, _B, _C, _D = ANNOUNCES, *BEGINS

_F = TypeVar("_F", bound=f.Fact)


class _Tally:
    """A count that several heads share."""

    __slots__ = ("n",)

    def __init__(self) -> None:
        self.n = 0


@dataclass
class _Speaker:
    """A complete head, as text before ``NCCL INFO``."""

    __slots__ = ("has_time", "last", "tally", "tid")

    #: With its process; ``None`` if that came when there was no more room.
    last: tuple[Head, Life | None]
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
        self._reserve = min(_ONLY_FAULTS, most_facts // 10)
        self._room = most_facts - self._reserve
        #: By process; and facts without a known process: their heads were torn, glued to other text, or missing.
        self.lives: dict[Process, Life] = {}
        self.loose = Facts()
        #: By process (of exceptions: the mark of the rank) and text.
        self.warnings: dict[tuple[Process | str | None, str], Warned] = {}
        #: Messages by level and launcher's prefix.
        self._tallies: dict[tuple[str, str], _Tally] = {}
        self.n_lines = self.n_crlf = self.n_timestamped = self.n_crowded = 0
        #: Messages with a damaged head, messages that no form matches, and facts beyond ``most_facts``.
        self.torn = self.unknown = self.overflow = 0
        self.samples: list[Seen] = []
        self.torn_samples: list[Seen] = []
        self._hosts: set[str] = set()
        #: Number of the first line by source: a file may have had lines before a job wrote to it.
        self.firsts: dict[str, int] = {}
        #: Number of the last one.
        self.lasts: dict[str, int] = {}
        self._source, self._number, self._line, self._length = "", 0, "", 0
        self._last: tuple[Head, Life | None] = (NOBODY, None)
        #: By the text of the head; and by the text of the message.
        self._speakers: dict[str, _Speaker] = {}
        self._contents: dict[str, _Content] = {}
        #: Reports of PyTorch's watchdog, without their process groups, with and without the job's rank.
        self._reports: set[f.Watchdog] = set()
        self._last_errors, self._tracebacks = LastErrors(), Tracebacks()
        #: The next line may complete what one of these has begun to read.
        self._awaits = False
        #: Types of the facts that there are: a log has few of all that it may have, and perhaps thousands of processes.
        self._kinds: set[type] = set()
        #: Messages whose head does not show the process.
        self._unowned = Life(Process("", "", 0))

    def add(self, line: str, source: str, number: int) -> list[Warned]:
        """Add one physical line, without its ``\\n``; return its warnings, and new time-outs of PyTorch's watchdog."""
        warned: list[Warned] = []
        self.add_lines(((number, line),), source, warned.append)
        return warned

    def add_lines(
        self, texts: Iterable[tuple[int, str]], source: str, heard: Callable[[Warned], object] = _ignore
    ) -> None:
        """Add lines of one source as ``Lines`` yields them; ``heard`` is called with what ``add`` returns."""
        if source != self._source:
            self._source, self._number = source, -1
        for first, text in texts:
            lines = text.split("\n")
            self.firsts.setdefault(source, first)
            self.n_lines += len(lines) - (first == self._number)  # another piece of one long line
            if "\r" in text or "\x1b" in text:
                self.n_crlf += sum(line.endswith("\r") for line in lines)
                lines = [clean(line) for line in lines]
            self._add_clean(first, lines, heard)
            self._number = self.lasts[source] = first + len(lines) - 1

    def _add_clean(self, first: int, lines: list[str], heard: Callable[[Warned], object]) -> None:
        speakers, contents = self._speakers, self._contents
        for number, line in enumerate(lines, first):
            head, found, text = line.partition(" NCCL INFO ")
            if not found:
                if self._awaits or _A in line or _B in line or _C in line or _D in line:
                    self._hear_exception(number, line)
                if line and ("NCCL" in line or read(line) or has_own_time(line)):
                    self._number, self._line = number, line
                    self._add_any(line, heard)
                continue
            content = contents.get(text) or self._content(text)
            speaker = speakers.get(head) or self._speaker(head)
            self._number, self._line = number, line
            if content is None or speaker is None:
                self._add_any(line, heard)
                continue
            # Most lines of most logs: one message of level INFO behind a known head.
            facts, known, has_time = content
            if has_time or speaker.has_time:
                self.n_timestamped += 1
            whose, life = speaker.last
            if life is None:
                self._take_message(Message("INFO", text, whose), known, [fact for fact, _, _ in facts], heard)
                continue
            self._last = speaker.last
            speaker.tally.n += 1
            life.messages += 1
            if not known:
                self._count_unknown()
            for fact, kind, by_thread in facts:
                self._length = len(text)
                if not by_thread or not life.says_start or (current := life.current.get(speaker.tid)) is None:
                    self._take(life, fact, speaker.tid)
                elif (of := current.facts.get(kind)) is not None and (seen := of.get(fact)) is not None:
                    seen.lines += 1
                else:
                    self._note(current.facts if fits(fact, current.init) else life.facts, fact)

    def _speaker(self, text: str) -> _Speaker | None:
        """Return how lines with this head count, ``None`` unless it is complete and its process is known or finds no room."""
        head = read_head(text)
        if head is None or head.process is None or "rccl" in head.origin:
            return None
        life = self.lives.get(head.process)
        if life is None and self._room > 0:
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
            (fact, type(fact), type(fact) in OF_COMMUNICATOR and getattr(fact, "comm", None) is None)
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
            facts = read(message.text)
            self._take_message(message, bool(facts), facts, heard)

    # -- one message --------------------------------------------------------------------------

    def _take_message(
        self, message: Message, known: bool, facts: Iterable[f.Fact], heard: Callable[[Warned], object]
    ) -> None:
        self._length = len(message.text)
        life = self._count(message, known) if message.level else None
        if message.level == "WARN":
            heard(self._warn(message, life))
        if life is None:
            self._unowned.messages += 1
            self._take_loose(facts, message, heard)
            return
        for fact in facts:
            self._take(life, fact, message.head.tid)

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

    def _warn(self, message: Message, life: Life | None) -> Warned:
        text, head = message.text.strip(), message.head
        now = Warned(
            text,
            warning_class(text, head.origin),
            head.process,
            self._seen(_MOST_OF_FAULT),
            head.origin,
            life is not None and life.uses_mnnvl,
        )
        known = self.warnings.get((head.process, text))
        if known is not None:
            known.seen.lines += 1
        elif self._has_room(of_fault=True):
            known = self.warnings[head.process, text] = replace(now, seen=self._seen(_MOST_OF_FAULT))
        if known is not None:
            (life or self._unowned).warn(known, head.tid)
        return now

    def _quote(self, whose: str, text: str) -> None:
        known = self.warnings.get((whose, text))
        if known is not None:
            known.seen.lines += 1
        elif self._has_room(of_fault=True):
            self.warnings[whose, text] = Warned(
                text,
                warning_class(text),
                None,
                self._seen(_MOST_OF_FAULT),
                failed=QUOTED,
                quoted_by=whose,
            )

    def _hear_exception(self, number: int, line: str) -> None:
        quoted, ended = self._last_errors.read(line), self._tracebacks.read(line)
        if quoted is not None or ended is not None:
            self._number, self._line, self._length = number, line, len(line)
        if quoted is not None:
            self._quote(*quoted)
        if ended is not None:
            self._note(self.loose, f.Uncaught(*ended))
        self._awaits = bool(self._last_errors or self._tracebacks)

    def _take_loose(self, facts: Iterable[f.Fact], message: Message, heard: Callable[[Warned], object]) -> None:
        for fact in facts:
            if message.level or not needs_head(fact):
                if isinstance(fact, f.Watchdog) and self._is_new(fact):
                    heard(Warned(message.text.strip(), "timeout", None, self._seen()))
                if isinstance(fact, f.Trail):
                    self._unowned.fail(fact, message.head.tid)
                self._note(self.loose, fact)

    def _is_new(self, dog: f.Watchdog) -> bool:
        """Return whether no line had this report: PyTorch repeats it with its process group, and without the job's rank."""
        report = dog._replace(where=f.Where(dog.where.job_rank))
        if report in self._reports:
            return False
        if self._room > -self._reserve:
            self._reports.update((report, dog._replace(where=f.Where())))
        return True

    def _take(self, life: Life, fact: f.Fact, tid: int) -> None:
        if type(fact) in OF_COMMUNICATOR:
            self._note(self._place(life, fact, tid), fact)
            return
        self._note(life.facts, fact)
        if isinstance(fact, f.Trail):
            life.fail(fact, tid)
        elif isinstance(fact, f.Init):
            self._init(life, fact, tid)
        elif isinstance(fact, f.End) and fact.comm in life.by_comm:
            life.by_comm.pop(fact.comm).ended = fact.how

    def _init(self, life: Life, fact: f.Init, tid: int) -> None:
        life.says_start |= fact.start
        life.pass_init(tid, is_complete=not fact.start)
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
                mine = member.complete and fits(known, member.init)
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
            fitting = [member for member in life.by_comm.values() if fits(fact, member.init)]
            member = fitting[0] if len(fitting) == 1 else None
        return member.facts if member is not None and fits(fact, member.init) else life.facts

    def _note(self, facts: Facts, fact: f.Fact) -> None:
        kind = type(fact)
        of = facts.get(kind)
        known = None if of is None else of.get(fact)
        if known is not None:
            known.lines += 1
        elif self._has_room(kind in OF_FAULTS):
            if of is None:
                of = facts[kind] = {}
                self._kinds.add(kind)
            most = _MOST_OF_FAULT if kind in OF_FAULTS else _MOST_TEXT
            of[fact] = Seen(self._source, self._number, self._line[:most])

    def _seen(self, most: int = _MOST_TEXT) -> Seen:
        return Seen(self._source, self._number, self._line[:most])

    def _has_room(self, of_fault: bool = False) -> bool:
        taken = 1 if self._length <= _MOST_TEXT else self._length // _OF_LONG
        if self._room <= (-self._reserve if of_fault else 0):
            self.overflow += 1
            return False
        self._room -= taken if of_fault else min(taken, self._room)
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
        if kind not in self._kinds:
            return
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
