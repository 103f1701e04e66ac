"""What an agent sends another one about the collectives of groups that span nodes, for the waits in a report. Pure; without numpy until it is used.

The ranks of a symmetric operation finish together, so each waits for what its duration exceeds the shortest of all ranks (``collective_join``).
A node sends the shortest duration of its ranks in each collective, and the sums of each rank over short runs of collectives: the waits in a
run are these sums minus the shortest durations of all nodes. No clocks are compared.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from commwatch.wire.events import OP_CODE, SYMMETRIC
from commwatch_agent.job.packed import unpacked

if TYPE_CHECKING:
    from commwatch_agent.ingest.columns import Ints

#: Most collectives of one node, and of all nodes together.
MOST_COLLECTIVES, MOST_OF_ALL = 1 << 18, 1 << 21
#: Most sums over runs in one group; more than any node reads parts.
_MOST_SUMS = 1 << 21
#: Most collectives of a run. One that another node lacks makes the waits of its run unknown.
RUN = 16
#: Longer operations (4.9 hours) are left out, so that the sums of all collectives fit.
MOST_NS = 1 << 44


class Kind(NamedTuple):
    """An op, by rank the upper end of the size class in bytes, and whether it was before the first step mark of all ranks."""

    op: str
    sizes: list[int | None]
    startup: bool = False


@dataclass(frozen=True)
class GroupPart:
    """The collectives of one group that all its ranks on this node have recorded, run after run. A run has one kind and one slot of 10 s.

    The texts are columns, as ``packed.packed`` makes them.
    """

    restart: int
    group_id: str
    #: Ranks of the group on all nodes; and those on this node.
    group_size: int
    ranks: list[int]
    kinds: list[Kind]
    #: By collective: its number, and the shortest duration on this node in ns.
    seq: str
    shortest_ns: str
    #: By run: index of its kind, number of its slot since 1970, and how many collectives it has.
    kind: str
    slot: str
    length: str
    #: By run, and in it by rank: sum of the durations in ns.
    duration_ns: str

    def __post_init__(self) -> None:
        columns_of(self)


@dataclass(frozen=True)
class WaitPart:
    """The latest collectives of a node, by group."""

    groups: list[GroupPart]


class GroupColumns(NamedTuple):
    """The columns of a ``GroupPart`` as arrays, ``duration`` of shape [runs, ranks]."""

    seq: Ints
    shortest: Ints
    kind: Ints
    slot: Ints
    length: Ints
    duration: Ints

    @property
    def begins(self) -> Ints:
        """The place of the first collective of each run."""
        begins: Ints = self.length.cumsum() - self.length
        return begins


def columns_of(part: GroupPart) -> GroupColumns:
    """Return the columns as arrays; raise ``ValueError`` if they cannot be those of a node."""
    import numpy as np

    seq, shortest = (unpacked(text, MOST_COLLECTIVES) for text in (part.seq, part.shortest_ns))
    kind, slot, length = (unpacked(text, len(seq)) for text in (part.kind, part.slot, part.length))
    if len(kind) * len(part.ranks) > _MOST_SUMS:
        raise ValueError("too many columns")
    duration = unpacked(part.duration_ns, len(kind) * len(part.ranks))
    lengths = len(shortest) == len(seq) == length.sum() and len(kind) == len(slot) == len(length) > 0
    names = all(each.op in SYMMETRIC and len(each.sizes) == len(part.ranks) for each in part.kinds)
    if not (
        lengths and names and len(duration) == len(kind) * len(part.ranks) and len(set(part.ranks)) == len(part.ranks)
    ):
        raise ValueError("columns of different lengths")
    found = GroupColumns(seq, shortest, kind, slot, length, duration.reshape(len(kind), len(part.ranks)))
    limits = (
        (seq, 0, (1 << 32) - 1), (shortest, 0, MOST_NS), (kind, 0, len(part.kinds) - 1),
        (slot, 0, (1 << 31) - 1), (length, 1, RUN), (duration, 0, RUN * MOST_NS),
    )  # fmt: skip
    plausible = all(least <= values.min() and values.max() <= most for values, least, most in limits)
    plausible = plausible and len(np.unique(seq)) == len(seq)
    if not plausible or (found.duration < np.add.reduceat(shortest, found.begins)[:, None]).any():
        raise ValueError("numbers out of range")
    return found


def ops_of(part: GroupPart, columns: GroupColumns) -> Ints:
    """Return the code of the op of each collective."""
    import numpy as np

    return np.repeat(np.array([OP_CODE[each.op] for each in part.kinds], np.int64)[columns.kind], columns.length)
