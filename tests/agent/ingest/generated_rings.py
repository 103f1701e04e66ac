"""Records of jobs that do not exist, with all that rings may hold; the same seed gives the same records."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any, NamedTuple

from commwatch.wire import events as ev
from commwatch_agent.model.cells import SLOT_NS
from tests.helpers import MS, group_entry, identity, packed

RANKS = 4
#: Groups by number: label, members. The last one also has ranks on another node.
GROUPS: dict[int, tuple[str, tuple[int, ...]]] = {
    0: ("default_pg", (0, 1, 2, 3)),
    1: ("tensor", (0, 1)),
    2: ("tensor", (2, 3)),
    3: ("data", (0, 2)),
    4: ("old", (1, 3)),
    5: ("wide", (0, 1, 2, 3, 4, 5)),
    300: ("many", (0, 1, 2, 3)),
}
_UNALIGNED = 4
_COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "barrier")
_ROOTED = ("broadcast", "reduce", "gather", "scatter")
_SIZES = (0, 1, 4, 1000, 4096, 4097, 1 << 20, 25 << 20, 3 << 30)
_CODE = {**ev.OP_CODE, "unheard_of": 40}
Fields = tuple[int, ...]


class Ring(NamedTuple):
    """One run of one rank: the identity and the names, and its records in batches as they are read."""

    identity: dict[str, Any]
    names: list[dict[str, Any]]
    batches: list[bytes]


class Knobs(NamedTuple):
    """How often something unusual happens in a job, from 0 to 1."""

    failed: float
    untimed: float
    counted: float
    absent: float
    disagreeing: float
    hostile: float
    shuffled: float
    on_device: float
    blocking: float
    pause: float
    mark: float

    @classmethod
    def of(cls, chance: random.Random) -> Knobs:
        """Most things seldom, some often, many never."""
        return cls(*(chance.choice((0.0, 0.0, 0.02, 0.1, 0.4)) for _ in cls._fields))


class _Rank:
    """What a generated rank has written."""

    def __init__(self, chance: random.Random, knobs: Knobs) -> None:
        self.chance, self.knobs = chance, knobs
        self.records: list[Fields] = []
        self.free_ns, self.marks = 0, 0
        self.seq: dict[int, int] = {}

    def collective(self, group: int, op: str, size: int, *, root: int, begin_ns: int, end_ns: int) -> None:
        """One collective, or what became of it."""
        chance, knobs = self.chance, self.knobs
        seq = self.seq[group] = self.seq.get(group, -1) + 1
        if chance.random() < knobs.absent:
            return
        flags, timing = self._flags(), chance.choice((ev.BY_FUTURE, ev.BY_FUTURE, ev.BY_WAIT, ev.BY_NCCL, ev.BY_EVENTS))
        if chance.random() < knobs.disagreeing:
            op, size = chance.choice((op, "all_gather")), chance.choice((size, size + 1))
        launch = min(begin_ns + chance.randrange(MS), end_ns)
        start = min(end_ns, launch + chance.choice((0, 0, chance.randrange(MS))))
        flags |= ev.UNALIGNED if group == _UNALIGNED and chance.random() < 0.5 else 0
        waited = chance.choice((0, 0, 0, chance.randrange(2000)))
        flags |= ev.WAIT_SEEN if flags & ev.ASYNC and chance.random() < 0.5 else 0
        flags |= ev.BESIDE if not flags & (ev.ASYNC | ev.ON_DEVICE) and chance.random() < 0.1 else 0
        aux = chance.choice((0, 18, 210, ev.SHARED_KERNEL | 18)) if timing == ev.BY_NCCL else 0
        end = max(end_ns + chance.randrange(1000), start)
        dtype = chance.choice((0, 1, 2)) if chance.random() < knobs.disagreeing else 1
        self._put(_CODE[op], dtype, group, root, 0, size, launch, seq, waited, start, end, flags, timing, aux)

    def message(self, group: int, op: str, peer: int, size: int, *, begin_ns: int, end_ns: int) -> None:
        """A send or recv."""
        chance, flags = self.chance, self._flags()
        launch = min(begin_ns + chance.randrange(MS), end_ns)
        start, end = launch + chance.choice((0, chance.randrange(MS))), end_ns + chance.randrange(2 * MS)
        waited = chance.choice((0, chance.randrange(3000)))
        timing = chance.choice((ev.BY_POLL, ev.BY_NCCL))
        self._put(
            _CODE[op],
            1,
            group,
            peer,
            0,
            size,
            launch,
            len(self.records),
            waited,
            start,
            max(end, start),
            flags,
            timing,
            0,
        )

    def step(self, end_ns: int) -> None:
        """A step mark."""
        chance = self.chance
        flags = chance.choice(
            (0, ev.EXPOSED, ev.EXPOSED, ev.EXPOSED | ev.UNTIMED if self.knobs.counted else ev.EXPOSED)
        )
        exposed, timing = chance.randrange(20 * MS), chance.choice((ev.BY_NONE, ev.BY_EVENTS))
        in_flight, begin = chance.choice((0, 0, 2)), max(0, end_ns - 1000)
        self._put(ev.STEP_MARK, 0, 0, -1, 0, exposed, begin, self.marks, 0, begin, end_ns, flags, timing, in_flight)
        self.marks += 1

    def counted(self, group: int, op: str, end_ns: int) -> None:
        """Some operations that were only counted."""
        number = self.chance.choice((0, 1, 3, 1000))
        seq = self.seq.get(group, 0)
        launch = max(0, end_ns - MS)
        self._put(_CODE[op], 1, group, -1, 0, number * 1000, launch, seq, number, launch, end_ns, 0, ev.COUNTED, 0)

    def hostile(self, end_ns: int) -> None:
        """A record that no trainer of ours writes."""
        chance = self.chance
        huge = chance.choice((1 << 40, (1 << 62) - 1, 1 << 62, (1 << 64) - 1))
        code, group = chance.choice((1, 5, 9, 40, 99)), chance.choice((0, 1, 5, 299, 0xFFFF, 0xFFFE))
        size, launch, start, end = chance.choice((
            (8, end_ns, end_ns, end_ns - 5),
            (8, 5, end_ns + 5, end_ns),
            (huge, end_ns - 10, end_ns - 10, end_ns),
            (8, 0, 0, end_ns),
            (8, end_ns, 0, end_ns),
        ))  # fmt: skip
        peer, flags = chance.choice((-1, 0, 77)), chance.randrange(256)
        self._put(
            code,
            9,
            group,
            peer,
            0,
            size,
            max(0, launch),
            chance.randrange(9),
            3,
            max(0, start),
            max(0, end),
            flags,
            chance.randrange(9),
            77,
        )

    def _flags(self) -> int:
        chance, knobs = self.chance, self.knobs
        flags = 0 if chance.random() < knobs.blocking else ev.ASYNC
        flags |= ev.ON_DEVICE if chance.random() < knobs.on_device else 0
        flags |= ev.FAILED if chance.random() < knobs.failed else 0
        return flags | (ev.UNTIMED if chance.random() < knobs.untimed else 0)

    def _put(self, *fields: int) -> None:
        self.records.append(fields)
        if len(self.records) > 3 and self.chance.random() < self.knobs.shuffled:
            self.records[-2], self.records[-4] = self.records[-4], self.records[-2]


def job(seed: int, events: int = 120, job_id: str = "job") -> list[Ring]:
    """The rings of a job's ranks, perhaps with a restart; all have the same number of batches."""
    chance = random.Random(seed)
    knobs, rings = Knobs.of(chance), []
    begin_ns = chance.choice((0, SLOT_NS - 40 * MS))
    for restart in range(chance.choice((1, 1, 2))):
        ranks = [_Rank(chance, knobs) for _ in range(RANKS)]
        for _ in range(events):
            begin_ns += chance.choice((0, MS, 3 * MS, 7 * MS, 40 * MS))
            if chance.random() < knobs.pause / 4:
                begin_ns += SLOT_NS // 2
            _event(chance, knobs, ranks, begin_ns)
        rounds = chance.choice((1, 2, 5, 12))
        rings += [_ring(chance, job_id, restart, rank, written.records, rounds) for rank, written in enumerate(ranks)]
    return rings


def _event(chance: random.Random, knobs: Knobs, ranks: list[_Rank], at_ns: int) -> None:
    """Something that happens to some ranks."""
    group = chance.choice(list(GROUPS))
    members = [ranks[rank] for rank in GROUPS[group][1] if rank < len(ranks)]
    size, end_ns = chance.choice(_SIZES), at_ns + chance.choice((5, MS, 4 * MS, 30 * MS))
    kind = chance.random()
    if kind < 0.15:
        source, target = chance.sample(GROUPS[0][1], 2)
        ranks[source].message(0, "send", target, size, begin_ns=at_ns, end_ns=end_ns)
        ranks[target].message(0, "recv", source, size, begin_ns=at_ns, end_ns=end_ns)
    elif kind < 0.15 + knobs.mark:
        for rank in ranks:
            rank.step(at_ns)
    elif kind < 0.75:
        names = _COLLECTIVES if chance.random() < 0.8 else (*_ROOTED, "unheard_of")
        op, root = chance.choice(names), chance.choice(GROUPS[group][1])
        late = chance.choice(members)
        for member in members:
            begin_ns = at_ns + (chance.randrange(4 * MS) if member is late else 0)
            member.collective(group, op, size, root=root, begin_ns=min(begin_ns, end_ns), end_ns=end_ns)
    rank = chance.choice(ranks)
    if chance.random() < knobs.counted:
        rank.counted(group, chance.choice(("all_reduce", "send")), end_ns)
    if chance.random() < knobs.hostile:
        rank.hostile(end_ns)


def _ring(chance: random.Random, job_id: str, restart: int, rank: int, records: list[Fields], rounds: int) -> Ring:
    names = [
        group_entry(number, members, label, aligned=number != _UNALIGNED, restart=restart)
        for number, (label, members) in GROUPS.items()
        if rank in members
    ]
    names += [{"dtype": 1, "name": "float32"}, {"dtype": 2, "name": "bfloat16" if rank else "float16"}]
    names.append({"op": 40, "name": "unheard_of"})
    cuts = sorted(chance.randrange(len(records) + 1) for _ in range(rounds - 1))
    bounds = zip([0, *cuts], [*cuts, len(records)], strict=True)
    batches = [packed(*records[since:until], first=since) for since, until in bounds]
    return Ring(identity(job_id, rank, RANKS, restart=restart), names, batches)


def rounds(rings: list[Ring]) -> Iterator[list[tuple[int, bytes, int]]]:
    """Yield what is read at a time, as (index of the ring, records, number after the last); one run of the job after the other."""
    read = [0] * len(rings)
    for restart in sorted({ring.identity["restart"] for ring in rings}):
        indices = [at for at, ring in enumerate(rings) if ring.identity["restart"] == restart]
        for turn in range(max(len(rings[at].batches) for at in indices)):
            batch = []
            for at in indices:
                if records := rings[at].batches[turn]:
                    read[at] += len(records) // ev.RECORD_SIZE
                    batch.append((at, records, read[at]))
            yield batch
