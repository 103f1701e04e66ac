"""What an account keeps: facts with their first lines, by process and communicator."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, TypeVar

from commwatch_collectors.nccl import facts as f
from commwatch_collectors.nccl.text import Process

_F = TypeVar("_F", bound=f.Fact)
#: Messages of a process after a warning in which a failed call of the same thread has it as its reason, and warnings of a thread that are remembered.
_SOON, _MOST_WARNED = 32, 16
#: Messages after a hint in which a failed call has it as its reason.
_NEAR = 4
#: Characters of the failed calls that are kept of a warning.
_MOST_TRAIL = 400
#: ncclResult_t that is no failure: success, and in progress.
NO_FAILURE = (0, 7)
#: Instead of failed calls: an exception quotes the warning.
QUOTED = "an exception of PyTorch"


class Seen:
    """Where something was printed first, and how often."""

    __slots__ = ("line", "lines", "number", "source")

    def __init__(self, source: str, number: int, line: str) -> None:
        self.source, self.number, self.line = source, number, line
        self.lines = 1


class Facts(dict[type, dict[Any, Seen]]):
    """Distinct facts with the first place of each, by type, because tuples of different types can be equal."""

    def of(self, kind: type[_F]) -> dict[_F, Seen]:
        """Return the facts of one type."""
        return self.get(kind, {})


@dataclass
class Member:
    """One rank of one communicator, as its process printed it."""

    process: Process
    tid: int
    init: f.Init
    seen: Seen
    complete: bool = False
    ended: str | None = None
    facts: Facts = field(default_factory=Facts)


class Life:
    """The facts and communicators of one process."""

    def __init__(self, process: Process) -> None:
        self.process = process
        self.facts = Facts()
        self.members: list[Member] = []
        #: By thread: the communicator it initialises or did last; for inits without ``START``, the facts before the end.
        self.current: dict[int, Member] = {}
        self.pending: dict[int, Facts] = {}
        self.by_comm: dict[str, Member] = {}
        #: By thread: its latest warnings, each with the number of the process's message.
        self.warned: dict[int, list[tuple[int, Warned]]] = {}
        self.says_start = False
        self.messages = 0

    def warn(self, warned: Warned, tid: int) -> None:
        """Note a warning of a thread."""
        latest = self.warned.setdefault(tid, [])
        latest.append((self.messages, warned))
        del latest[:-_MOST_WARNED]

    def fail(self, trail: f.Trail, tid: int) -> None:
        """Note a failed call as the failure of the warnings that its thread printed just before."""
        if trail.code in NO_FAILURE:
            return
        reasons = []
        for at, warned in self.warned.get(tid, ()):
            if self.messages - at <= _SOON:
                reasons.append(warned)
                warned.near |= self.messages - at <= _NEAR
        for warned in reasons:
            if len(warned.failed) < _MOST_TRAIL:
                warned.failed += f"{trail.place} -> {trail.code}\n"
            if warned is not reasons[0]:
                warned.after = warned.after or reasons[0]

    def pass_init(self, tid: int, is_complete: bool) -> None:
        """Forget the warnings of a thread that begins an init; if one is complete, they were no reason to fail: NCCL has found another way."""
        warned = self.warned.pop(tid, ())
        for _, each in warned if is_complete else ():
            each.failed, each.near = "", False

    @property
    def uses_mnnvl(self) -> bool:
        """Whether the process has printed that it uses NVLink between nodes."""
        found = (self.facts, *self.pending.values(), *(member.facts for member in self.members))
        return any(fact.used and fact.clique_size > 1 for facts in found for fact in facts.of(f.Mnnvl))


@dataclass
class Warned:
    """One distinct warning of a process, or NCCL's last error as an exception of PyTorch quotes it."""

    text: str
    kind: str
    process: Process | None
    seen: Seen
    #: ``file:line`` or ``function:line`` that warned; empty where the line does not show it.
    origin: str = ""
    #: The process uses NVLink between nodes.
    between_nodes: bool = False
    #: The calls that failed next on the same thread (the innermost first), or the exception that quotes it; empty: none is known.
    failed: str = ""
    #: The first failed call came at once.
    near: bool = False
    #: An earlier warning of the thread before the same failure.
    after: Warned | None = None
    #: Of an exception's: the launcher's mark of its rank, empty if there is none.
    quoted_by: str | None = None
