"""What a rank sends to each rank of an ``all_to_all``, and what it expects from each: the last part of the ring file, for its latest calls.

It holds ``CALLS`` entries; that of call n lies in place n % ``CALLS``. An entry has ``HEAD``, then the bytes for each rank of the group by its
number there, then the bytes from each. Groups of more than ``MOST_MEMBERS`` ranks have none.
"""

from __future__ import annotations

import contextlib
import struct
from mmap import mmap
from typing import NamedTuple

from commwatch.wire.events import MAX_PLAUSIBLE

MOST_MEMBERS, CALLS = 64, 16
#: Number of the call, from 1 (0: there is none, or it is being written), number of the operation in its group, group, and size of the group.
HEAD = struct.Struct("<QIHH")
ENTRY_BYTES = HEAD.size + 2 * MOST_MEMBERS * 8
AREA_BYTES = CALLS * ENTRY_BYTES


class Splits(NamedTuple):
    """The split sizes of one call in bytes, by the ranks' numbers in the group."""

    sends: tuple[int, ...]
    expects: tuple[int, ...]


def note(area: bytearray | mmap, at: int, number: int, operation: tuple[int, int], splits: Splits) -> None:
    """Write the entry of a call into an area that begins at ``at``; none of a call whose sizes no tensor can have.

    Args:
        operation: its group and its number there.
    """
    (group, seq), (sends, expects) = operation, splits
    members = len(sends)
    fields = number, seq, group, members, *sends, *expects
    with contextlib.suppress(struct.error):
        struct.pack_into(f"{HEAD.format}{2 * members}q", area, at + number % CALLS * ENTRY_BYTES, *fields)


def find(area: bytes, group: int, seq: int) -> Splits | None:
    """Return the split sizes of an operation of a group; ``None``: they are not there."""
    latest, found = 0, None
    for at in range(0, len(area) - ENTRY_BYTES + 1, ENTRY_BYTES):
        number, of_seq, of_group, members = HEAD.unpack_from(area, at)
        if number > latest and (of_group, of_seq) == (group, seq) and 0 < members <= MOST_MEMBERS:
            sizes = struct.unpack_from(f"<{2 * members}q", area, at + HEAD.size)
            if min(sizes) >= 0 and max(sizes) < MAX_PLAUSIBLE:
                latest, found = number, Splits(sizes[:members], sizes[members:])
    return found
