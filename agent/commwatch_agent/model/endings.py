"""How a job and its ranks ended: the launcher's exit code, and which rank failed first. Pure."""

from __future__ import annotations

import re
import signal
from collections.abc import Mapping
from typing import NamedTuple

from commwatch_agent.text.units import time_of_day
from commwatch_collectors.spans import ranks as named

#: Ends of processes that one signal has ended are less apart; a launcher needs as long to see that one of them has ended.
_APART_NS = 50_000_000
#: What exceptions say of ranks that have lost another one, in Gloo and in stores.
_LOST_PEER = re.compile("connection (?:was )?(?:closed|reset) by", re.IGNORECASE)
#: The exception by which Ctrl-C ends a process: no fault of its rank.
INTERRUPTED = "KeyboardInterrupt"
#: Signals by which people, schedulers and terminals ask a job to end.
STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
#: A rank that ends from a moment before such a signal to its launcher on, and in the time for which launchers wait, ends by it.
_BEFORE_NS, _AFTER_NS = 1_000_000_000, 600_000_000_000
#: What people read of a process that was killed or crashed.
DIED = "died (no clean end)"


class Ending(NamedTuple):
    """End of one rank, between two Unix times in ns; they are equal where the rank recorded its end."""

    since_ns: int
    until_ns: int
    #: The rank recorded its end; otherwise its process died.
    clean: bool
    #: Type of the exception that ended it; empty: none, or not known.
    raised: str = ""
    #: An operation raised shortly before the end: another rank may be the cause.
    in_operation: bool = False
    #: Where it was raised, as ``load (train.py:88)``; empty: not known.
    at: str = ""
    #: ``until_ns`` is when the kernel reported the end of the process, a little after it: of several such ends, the earliest was first.
    is_reported: bool = False
    #: What the exception says, in one line; empty: nothing, or not known.
    says: str = ""
    #: Exit code of the process, or ``-n`` if signal n ended it; ``None``: not known.
    status: int | None = None
    #: The signal that had asked its launcher to end the job, and when that came; 0: none did, or not known.
    stop: int = 0
    stop_ns: int = 0

    @property
    def how(self) -> str:
        """How it ended, as people read it."""
        return how_ended(self.raised, self.at, self.says, self.status)

    @property
    def failed(self) -> bool:
        """Whether the process died or an exception ended it."""
        return not self.clean or bool(self.raised)

    def stopped(self, by: int, at_ns: int) -> Ending:
        """Return the ending, with the signal that had asked its launcher to end the job, if it ended after that."""
        is_after = by in STOPS and at_ns - _BEFORE_NS <= self.until_ns <= at_ns + _AFTER_NS
        return self._replace(stop=by, stop_ns=at_ns) if is_after else self


class Interruption(NamedTuple):
    """A request to end a job, which is no failure."""

    by: int
    #: When it came, in Unix time in ns.
    at_ns: int
    #: It is known from the launcher or from an exception; otherwise it is concluded from how the ranks ended.
    is_certain: bool = True

    @property
    def how(self) -> str:
        """What people read of it, as ``interrupted by SIGINT (Ctrl-C)``."""
        return f"interrupted by {_name_of(self.by)}{' (Ctrl-C)' if self.by == signal.SIGINT else ''}"

    @property
    def says(self) -> str:
        """The same with its time, as ``interrupted by SIGINT (Ctrl-C) at 12:03:10 UTC``."""
        return f"{self.how} at {time_of_day(self.at_ns / 1e9)}"


def interruption(endings: Mapping[int, Ending]) -> Interruption | None:
    """Return by what the ranks of a job were asked to end; ``None``: by nothing, or a rank had failed before.

    A signal that has ended the first ranks to fail, several at once, came from their launcher, which was asked to end. One that ended a single rank
    first was sent to that rank.
    """
    known = [(each.stop_ns, each.stop) for each in endings.values() if each.stop]
    known += [(each.until_ns, int(signal.SIGINT)) for each in endings.values() if each.raised == INTERRUPTED]
    if known:
        at_ns, by = min(known)
        own = (each for each in endings.values() if each.failed and not (each.stop or each.in_operation))
        failed_before = any(each.until_ns < at_ns - _BEFORE_NS for each in own if each.raised != INTERRUPTED)
        return None if failed_before else Interruption(by, at_ns)
    first = [endings[rank] for rank in first_to_fail(endings)]
    signals = {-(each.status or 0) for each in first}
    if len(first) < 2 or len(signals) > 1 or not signals & set(STOPS):
        return None
    return Interruption(signals.pop(), min(each.until_ns for each in first), is_certain=False)


def how_ended(raised: str, at: str, words: str, status: int | None) -> str:
    """Return how a rank failed, as people read it: its exception, or the signal or exit code of its process, whichever is known.

    Args:
        raised, at, words, status: as ``raised``, ``at``, ``says`` and ``status`` of an ``Ending``.

    >>> how_ended("ValueError", "load (train.py:31)", "bad batch", 1)
    'ended with ValueError in load (train.py:31): bad batch'
    >>> how_ended("", "", "", -9), how_ended("", "", "", 3), how_ended("", "", "", None)
    ('died of signal 9 (SIGKILL)', 'ended with exit code 3', 'died (no clean end)')
    """
    if raised:
        return f"ended with {raised}{f' in {at}' if at else ''}{f': {words}' if words else ''}"
    if not status:
        return DIED
    return f"{'died of' if status < 0 else 'ended with'} {ended_by(raised, status)}"


def is_death(how: str) -> bool:
    """Return whether a text of ``how_ended`` is about a process that neither an exception nor an exit of its own has ended."""
    return how.startswith("died ")


def ended_by(raised: str, status: int | None) -> str:
    """Return by what a rank failed, in two words; empty: not known. The arguments are as for ``how_ended``.

    >>> ended_by("ValueError", 1), ended_by("", -9), ended_by("", 3)
    ('raised ValueError', 'signal 9 (SIGKILL)', 'exit code 3')
    """
    if raised:
        return f"raised {raised}"
    if not status:
        return ""
    return f"exit code {status}" if status > 0 else f"signal {-status}{_in_brackets(-status)}"


def _name_of(number: int) -> str:
    """Return the name of a signal; empty: there is none with that number."""
    return next((each.name for each in signal.Signals if each == number), "")


def _in_brackets(number: int) -> str:
    name = _name_of(number)
    return f" ({name})" if name else ""


def first_to_fail(endings: Mapping[int, Ending]) -> list[int]:
    """Return the ranks that may have failed first, in order; several where their times overlap."""
    failed = {rank: ending for rank, ending in endings.items() if ending.failed}
    # On a busy machine, the kernel may take longer to end a process than others to notice that it is lost.
    failed = {rank: ending for rank, ending in failed.items() if not _LOST_PEER.search(ending.says)} or failed
    earliest = min((ending.until_ns for ending in failed.values()), default=0)
    candidates = [rank for rank, ending in sorted(failed.items()) if ending.since_ns <= earliest]
    # An exception outside of operations is the rank's own fault; the launcher then kills the remaining ranks.
    alone = [rank for rank in candidates if not failed[rank].in_operation]
    first = [rank for rank in alone if failed[rank].clean] or alone or candidates
    return _reported_first({rank: failed[rank] for rank in first}, any(each.in_operation for each in failed.values()))


def _reported_first(endings: Mapping[int, Ending], others_raised: bool) -> list[int]:
    """Return the rank whose end the kernel reported first; all ranks if that does not decide.

    A signal to all ranks ends them within moments of each other. If operations of others had raised by then, a rank was missing before.
    """
    in_order = sorted(endings, key=lambda rank: endings[rank].until_ns)
    times = [endings[rank].until_ns for rank in in_order]
    apart_ns = 1 if others_raised else _APART_NS
    if len(times) > 1 and all(each.is_reported for each in endings.values()) and times[1] - times[0] >= apart_ns:
        return in_order[:1]
    return sorted(endings)


def says(endings: Mapping[int, Ending], exit_code: int | None = None) -> str:
    """Return how a job ended, as text; empty if nothing failed or nothing is known.

    Args:
        endings: by rank, of the latest run of each rank that has ended.
        exit_code: the launcher's, 128 + n for signal n; ``None``: not known.

    >>> says({}, 137)
    'exit code 137 (SIGKILL)'
    """
    parts = [] if not exit_code else [exit_says(exit_code)]
    stopped = interruption(endings)
    if stopped is not None and (exit_code or any(ending.failed for ending in endings.values())):
        return "; ".join([*parts, stopped.says])
    first = first_to_fail(endings)
    if first:
        ending = min((endings[rank] for rank in first), key=lambda ending: ending.until_ns)
        at = time_of_day(ending.until_ns / 1e9)
        among = f", first of {len(endings)}" if len(endings) > len(first) else ""
        victims = ", in an operation, so another rank may be the cause" if ending.in_operation else ""
        parts.append(f"{named(first)} {ending.how} at {at}{among}{victims}")
    return "; ".join(parts)


def state_in_words(state: str) -> str:
    """Return a state of a rank as people read it.

    >>> state_in_words("gone"), state_in_words("running")
    ('died', 'running')
    """
    return "died" if state == "gone" else state


def exit_says(code: int) -> str:
    """Return an exit code as text, with the signal that 128 + n means.

    >>> exit_says(3)
    'exit code 3'
    """
    return f"exit code {code}{_in_brackets(code - 128)}"


def failed(endings: Mapping[int, Ending], exit_code: int | None) -> bool | None:
    """Return whether an ended job failed; ``None``: not known. One that was asked to end did not.

    The launcher's exit code overrides the endings of its ranks, because it may have restarted them.
    """
    if interruption(endings) is not None:
        return False
    if exit_code is not None:
        return exit_code != 0
    return any(ending.failed for ending in endings.values()) if endings else None
