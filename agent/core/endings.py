"""How a job and its ranks ended, in words: the launcher's exit code, and which rank was the first that did not end well. Pure."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from commwatch.collectors.spans import spans


class Ending(NamedTuple):
    """The end of one rank, between two Unix times in ns: exact where the rank said so itself."""

    since_ns: int
    until_ns: int
    #: It said that this was the end; without that, its process died.
    clean: bool
    #: Type of the exception that ended it; empty: none, or not known.
    raised: str = ""
    #: One of its latest operations raised: another rank may have been the reason.
    in_operation: bool = False

    @property
    def failed(self) -> bool:
        """It did not end well."""
        return not self.clean or bool(self.raised)


def first_to_fail(endings: Mapping[int, Ending]) -> list[int]:
    """The ranks that may have been the first that did not end well, by number; several where their times do not tell."""
    failed = {rank: ending for rank, ending in endings.items() if ending.failed}
    earliest = min((ending.until_ns for ending in failed.values()), default=0)
    candidates = [rank for rank, ending in sorted(failed.items()) if ending.since_ns <= earliest]
    # An exception outside of any operation is the rank's own fault; the launcher then kills the ranks that are left.
    alone = [rank for rank in candidates if not failed[rank].in_operation]
    return [rank for rank in alone if failed[rank].clean] or alone or candidates


def says(endings: Mapping[int, Ending], exit_code: int | None = None) -> str:
    """How a job ended; empty where all is well, or nothing is known.

    Args:
        endings: of the ranks that have ended, in their latest life.
        exit_code: the launcher's, 128 + n for signal n; ``None``: not known.

    >>> says({}, 137)
    'exit code 137 (SIGKILL)'
    """
    parts = [] if not exit_code else [exit_says(exit_code)]
    first = first_to_fail(endings)
    if first:
        ending = min((endings[rank] for rank in first), key=lambda ending: ending.until_ns)
        at = time.strftime("%H:%M:%S", time.localtime(ending.until_ns / 1e9))
        how = f"ended with {ending.raised}" if ending.raised else "died (no clean end)"
        among = f", first of {len(endings)}" if len(endings) > len(first) else ""
        parts.append(f"rank{'s' * (len(first) > 1)} {spans(first)} {how} at {at}{among}")
    return "; ".join(parts)


def exit_says(code: int) -> str:
    """An exit code, with the signal that it stands for by custom.

    >>> exit_says(3)
    'exit code 3'
    """
    name = next((each.name for each in signal.Signals if each == code - 128), "")
    return f"exit code {code} ({name})" if name else f"exit code {code}"


def failed(endings: Iterable[Ending], exit_code: int | None) -> bool | None:
    """Whether a job that has ended did not end well; ``None``: not known.

    A launcher's exit code counts more than what became of its ranks, which it may have started anew.
    """
    known = list(endings)
    if exit_code is not None:
        return exit_code != 0
    return any(ending.failed for ending in known) if known else None
