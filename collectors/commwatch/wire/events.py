"""The layout of one record of the ring buffer, its flags, and the table of operations.

A record is 64 bytes. It describes one finished operation, or one step mark; in the in-flight table of
the ring the same layout describes an operation that has not finished (``end_ns`` 0). All timestamps are
``CLOCK_MONOTONIC`` nanoseconds of the trainer's host.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

RECORD = struct.Struct("<IBBHiiQQIIQQBBHI")
RECORD_SIZE = RECORD.size

STEP_MARK = 0
#: A checksum of replicated parameters, or of the data of a collective. It has the shape of a damaged record, because ``start_ns`` is after
#: ``end_ns``: all readers of operations, and agents that do not know it, skip it. ``Checksum`` has its fields.
CHECKSUM = 255
#: Place of the checksum of a collective's input; in an ``all_to_all``, of what is for the first rank of the group. That for the next one is before it.
INPUT = -1
#: Canonical operation names; the code of an op in a record is its place in this table, from 1.
OPS = (
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "all_to_all",
    "broadcast",
    "reduce",
    "gather",
    "scatter",
    "send",
    "recv",
    "barrier",
)
OP_CODE = {name: code for code, name in enumerate(OPS, start=1)}
#: Ops that are not in the table are counted under their own name, interned from this code on.
FIRST_UNKNOWN_OP = 32
LAST_UNKNOWN_OP = 254
#: Ops all of whose ranks finish together; only these have transfer and lateness.
SYMMETRIC = frozenset({"all_reduce", "all_gather", "reduce_scatter", "all_to_all", "barrier"})
#: Ops in which the root waits for all other ranks, and ops in which all other ranks wait for the root.
TO_ROOT, FROM_ROOT = frozenset({"reduce", "gather"}), frozenset({"broadcast", "scatter"})
P2P = frozenset({"send", "recv"})
#: Ops whose ranks all pass the same size.
SAME_SIZE = frozenset({"all_reduce", "all_gather", "reduce_scatter", "broadcast", "reduce"})

#: Group and dtype ids for names that could not be interned.
NO_GROUP = 0xFFFF
#: Tags per peer and direction that have sequence numbers at one time.
TAGS = 256
#: Peers, by operation and group, whose messages a trainer numbers separately; further ones get no peer in their records.
MOST_PEERS = 16_384
NO_DTYPE = 0

ASYNC = 1  # the caller asked for a handle
SAME_PASS = 1  # step mark: no forward pass ran since the optimizer call before
FAILED = 2  # raised, at launch or later: counted, never measured
NO_SIZE = 4  # S is not known (sparse tensors, an op without a size)
UNTIMED = 8  # begin or end was not seen: counted, has no duration; step mark: some operations were only counted
UNALIGNED = 16  # the probe came after the group was used: counted, never joined
EXPOSED = 32  # step mark: the exposed time is known
WAIT_SEEN = 32  # asynchronous collective on the CPU: ``waited_us`` is known
BLOCKED = 64  # in flight: a thread has been blocked in wait() since ``start_ns``; on a GPU: the GPU reached it at ``start_ns``
BESIDE = 64  # ended, on the CPU: a thread was blocked in it that does not train
ON_DEVICE = 128  # ran on a GPU: no CPU thread is blocked in it
#: Operations that are counted, but never joined over the ranks: their numbers are not known, or none of their waits hold up the training.
NOT_JOINED = UNALIGNED | BESIDE

#: Larger times (ns), sizes (bytes) and counts are invalid: 146 years, four exabytes.
MAX_PLAUSIBLE = 1 << 62

#: How the end of an operation was observed, by code.
TIMING = ("none", "future", "poll", "wait", "call", "events", "nccl")
BY_NONE, BY_FUTURE, BY_POLL, BY_WAIT, BY_CALL, BY_EVENTS, BY_NCCL = range(7)
#: How the exposed time of a step mark was measured, by its ``timing``: as the time without CPU time of the training thread, or as waits of
#: the GPU's compute stream.
EXPOSED_SOURCES = {BY_NONE: "thread_cpu", BY_EVENTS: "stream_waits"}
#: What NCCL may choose for an operation, in the order of ``collectors/commwatch/nccl_plugin/commwatch_nccl.h``.
ALGORITHMS = ("Tree", "Ring", "CollNetDirect", "CollNetChain", "NVLS", "NVLSTree", "PAT")
PROTOCOLS = ("LL", "LL128", "Simple")
#: Bit of ``aux``: the operation ran in one kernel with operations of other calls, and its times are those of all of them.
SHARED_KERNEL = 1 << 13
#: Not a timing: the record sums up operations of one kind and size class that were only counted (governor.py). ``waited_us``
#: is their number, ``size_bytes`` their bytes in all, ``seq`` and ``launch_ns`` belong to the latest.
COUNTED = 255


def size_log2(size: int) -> int:
    """Return the class in which an op of ``size`` bytes is counted: the smallest with S <= 2**class; -1 if S is 0."""
    return (size - 1).bit_length() if size else -1


class NcclChoice(NamedTuple):
    """What NCCL chose for an operation; ``None``: it did not report it, or the parts of the operation differ."""

    algorithm: str | None = None
    protocol: str | None = None
    channels: int | None = None


def nccl_choice(timing: int, aux: int) -> NcclChoice:
    """Return what NCCL chose for an operation, from these fields of its record."""
    if timing != BY_NCCL:
        return NcclChoice()
    algorithm, protocol, channels = aux & 15, aux >> 4 & 3, aux >> 6 & 127
    return NcclChoice(
        ALGORITHMS[algorithm - 1] if 0 < algorithm <= len(ALGORITHMS) else None,
        PROTOCOLS[protocol - 1] if protocol else None,
        channels or None,
    )


class ChannelEnds(NamedTuple):
    """How far apart the kernels of an operation's channels ended; ``None``: not known, or there is one channel."""

    #: The channel that ended last, from 0.
    last: int | None = None
    #: How long before it the first channel ended, in seconds, to the microsecond.
    apart_s: float | None = None


#: Bits of ``tag`` of a collective that NCCL timed, below those of the time: the last channel plus 1. And their mask.
CHANNEL_BITS = 7
CHANNEL = (1 << CHANNEL_BITS) - 1


def channel_ends(timing: int, tag: int) -> ChannelEnds:
    """Return when the channels of a collective ended, from these fields of its record."""
    if timing != BY_NCCL or tag <= 0:
        return ChannelEnds()
    return ChannelEnds((tag & CHANNEL) - 1, (tag >> CHANNEL_BITS) / 1e6)


class Record(NamedTuple):
    """One record, with its fields in the order of the ring.

    For a step mark: ``seq`` numbers the marks, ``size_bytes`` is the exposed time in ns since the mark
    before (with flag ``EXPOSED``; ``timing`` is its source), ``launch_ns`` and ``end_ns`` are begin and end of the optimizer call,
    ``peer`` is the optimizer's number (-1: ``commwatch.step()``), ``aux`` the number of ops in flight. ``aux`` of an operation: ``nccl_choice``.
    """

    stamp: int
    op: int
    dtype: int
    group: int
    #: Global rank of the other side (send, recv) or of the root; -1 where there is none.
    peer: int
    #: Tag of a send or recv; of a collective: ``channel_ends``, 0 if not known.
    tag: int
    #: S as nccl-tests counts it.
    size_bytes: int
    launch_ns: int
    #: Number of this collective in its group on this rank; for p2p, within (src, dst, tag).
    seq: int
    #: Send, recv: how long a thread was blocked waiting for it, up to ``end_ns``, in µs; with ``WAIT_SEEN``: how long it was in waits for any
    #: operation since ``launch_ns``.
    waited_us: int
    #: The later of launch and the end of the operation before it in its queue (docs/numbers.md).
    start_ns: int
    end_ns: int
    flags: int
    timing: int
    aux: int
    stamp2: int

    @property
    def begun_ns(self) -> int:
        """Return when an operation in flight began, in ns: its launch; on a GPU, when the GPU reached it, and 0 before."""
        return self.start_ns if self.flags & ON_DEVICE else self.launch_ns


class Checksum(NamedTuple):
    """The fields of the record of a checksum: what ``collectors/commwatch/probe/checks/torch_checksums.py`` makes of a tensor.

    By default the tensor is a parameter on one rank after a step. If ``set`` is negative, it belongs to a collective with the code ``-set``. Then
    ``place`` is the place of an output, or, from ``INPUT`` down, that of what this rank gave; ``step`` is the number of the collective in its
    group, and ``number`` counts the records of this check.
    """

    group: int
    #: Number of the set of parameters that the names file announces, and the place of the parameter in it.
    set: int
    place: int
    #: Number of the step since the set was announced, from 1; and how many collectives the group had launched.
    step: int
    number: int
    #: The sum of its words, and that of words times positions, each from 0 to 2**64 - 1.
    plain: int
    weighted: int
    taken_ns: int

    def fields(self) -> tuple[int, ...]:
        """Return the fields of the record, without its stamps."""
        tail = (self.step & _WORD, self.number & _WORD, self.taken_ns, 0, 0, 0, 0)
        return (CHECKSUM, NO_DTYPE, self.group, self.place, self.set, self.plain, self.weighted, *tail)


_WORD = 0xFFFFFFFF
