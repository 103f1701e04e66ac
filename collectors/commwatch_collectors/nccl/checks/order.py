"""The order of findings: what explains others comes first. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from commwatch_collectors.nccl.lives import Seen

#: What a finding can be: the cause of a failure, what was noticed of it, and what only follows from it.
CAUSE, SYMPTOM, CONSEQUENCE = range(3)
_DAY_S = 86_400.0
_CLOCK = r"(?P<h>\d\d):(?P<m>\d\d):(?P<s>\d\d(?:[.,]\d{1,9})?)"
#: Times in front of a message: of NCCL, containers and loggers with the date, of PyTorch with month and day, of syslog.
_DATED = re.compile(rf"\b20\d\d[-/](?P<month>\d\d)[-/](?P<day>\d\d)[T ]{_CLOCK}")
_TORCH = re.compile(rf"\[[A-Z](?P<month>\d\d?)(?P<day>\d\d) {_CLOCK}")
#: Characters of a line in which its time is searched.
_HEAD = 200


def time_of(line: str) -> float | None:
    """Return the time in front of a message, in seconds since the year began; ``None`` if it has no date.

    >>> time_of("[rank4]:[E1103 18:22:05.5 ProcessGroupNCCL.cpp:1]") == time_of("2026-11-03T18:22:05.5Z a:1:2 [0]")
    True
    """
    found = _DATED.search(line, 0, _HEAD) or _TORCH.search(line, 0, _HEAD)
    if found is None:
        return None
    days = 31 * int(found["month"]) + int(found["day"])
    return days * _DAY_S + 3600 * int(found["h"]) + 60 * int(found["m"]) + float(found["s"].replace(",", "."))


def in_time(findings: Sequence[Iterable[Seen]]) -> list[float]:
    """Return for each finding, by its evidence, when it came: by the lines' times if all have some, in one file by the lines' numbers.

    Where neither is known, which is so between files without times, all are equal.
    """
    lines = [list(evidence) for evidence in findings]
    times = [[time for seen in evidence if (time := time_of(seen.line)) is not None] for evidence in lines]
    if all(times):
        return [min(each) for each in times]
    if len({seen.source for evidence in lines for seen in evidence}) == 1:
        return [float(min(seen.number for seen in evidence)) if evidence else 0.0 for evidence in lines]
    return [0.0] * len(lines)
