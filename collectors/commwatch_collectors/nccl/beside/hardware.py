"""What follows from a fault of a GPU's hardware that the driver has logged: failed kernels, and collectives that time out."""

from __future__ import annotations

import re
from collections.abc import Iterable

from commwatch_collectors.nccl import facts as f
from commwatch_collectors.nccl.checks.evidence import Log
from commwatch_collectors.nccl.checks.order import time_of
from commwatch_collectors.nccl.lives import Seen

#: Xids of memory that is damaged, of NVLink, of the bus and of the GPU's own processors: not those that a program causes.
HARDWARE = frozenset((48, 62, 63, 64, 74, 79, 94, 95, 119, 120, 140))
#: Errors of CUDA that such a fault causes; an invalid access of memory is the program's own.
_BY_HARDWARE = re.compile(
    r"(?i:unspecified launch failure|the launch timed out|uncorrectable|unknown error|busy or unavailable"
    r"|hardware stack error|no CUDA-capable device|GPU is lost)"
)


def fails_by_fault(log: Log, says: str, places: Iterable[Seen]) -> bool:
    """Return whether an error of CUDA follows from a fault of a GPU; the kernel's lines may be behind those of the program."""
    if not _BY_HARDWARE.search(says):
        return False
    faults = _faults(log)
    return bool(faults) and all(any(_is_before(fault, place) is not False for fault in faults) for place in places)


def comes_after_fault(log: Log, places: Iterable[Seen]) -> bool:
    """Return whether each line is known to come after a fault of a GPU."""
    found = list(places)
    faults = _faults(log) if found else []
    return bool(faults) and all(any(_is_after(place, fault) for fault in faults) for place in found)


def _faults(log: Log) -> list[Seen]:
    return [seen for _, xid, seen in log.account.of(f.Xid) if xid.number in HARDWARE]


def _is_before(fault: Seen, place: Seen) -> bool | None:
    """Return whether a fault came first, by the times of the lines; ``None`` if they have none."""
    at, other = time_of(fault.line), time_of(place.line)
    return None if at is None or other is None else at <= other


def _is_after(place: Seen, fault: Seen) -> bool:
    by_time = _is_before(fault, place)
    return (place.source == fault.source and place.number > fault.number) if by_time is None else by_time
