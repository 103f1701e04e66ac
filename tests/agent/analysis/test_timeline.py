"""The latest operations side by side, from records made by hand."""

from __future__ import annotations

from typing import Any

from commwatch.wire import events as ev
from commwatch.wire.events import Record
from commwatch_agent.analysis.timeline import (
    LEAST_OF_RANK,
    LONGEST_NS,
    MOST_BARS,
    Bar,
    Pending,
    Timeline,
    bars,
    timeline,
)
from commwatch_agent.ingest.batches import ingest_records
from commwatch_agent.ingest.rank_totals import RankTotals
from tests.agent.model.test_model_parts import DTYPES, ENTRY, PASS, step
from tests.helpers import MS, group_entry, identity, mark, operation, packed

SECOND = 1000 * MS


def book(
    rank: int, *records: tuple[int, ...], groups: list[dict[str, Any]] | None = None, ranks: int = 2
) -> RankTotals:
    """The totals of a rank with these operations."""
    found = RankTotals(identity(rank=rank, world_size=ranks), {})
    found.learn(groups if groups is not None else [group_entry(0, tuple(range(ranks)))])
    ingest_records(found, packed(*records))
    return found


def in_flight(op: str, launch_ns: int, *, seq: int = 0, flags: int = 0) -> Record:
    """An operation that has not ended."""
    return Record._make((1, *operation(op, start_ns=launch_ns, end_ns=0, seq=seq, flags=flags), 1))


def seen(*books: RankTotals, now_ns: int = 10 * SECOND) -> Timeline:
    """What is there to see."""
    found = timeline([bars(books, now_ns)])
    assert found is not None
    return found


def test_who_enters_when_and_who_waits() -> None:
    """Each operation has its place on one line of time; what a rank waited is what it took beyond the last one's transfer."""
    early = operation("all_reduce", start_ns=1 * SECOND, end_ns=1 * SECOND + 30 * MS, seq=7, size=4096)
    late = operation("all_reduce", start_ns=1 * SECOND + 20 * MS, end_ns=1 * SECOND + 30 * MS, seq=7, size=4096)
    found = seen(book(0, early), book(1, late))
    assert [track.rank for track in found.tracks] == [0, 1]
    assert found.tracks[0].bars == [Bar(0, 30_000, 20_000, 0, 0, 7, 4096)]
    assert found.tracks[1].bars == [Bar(20_000, 10_000, 0, 0, 0, 7, 4096)]
    assert (found.ops, found.groups) == (["all_reduce"], ["default_pg"])
    assert (found.span_s, found.age_s) == (0.03, 8.97)


def test_what_they_carry() -> None:
    """Operations in complete steps name the part of the model that they carry, by rank and on all nodes."""
    names = [group_entry(0, (0, 1)), ENTRY, *({"dtype": code, "name": name} for code, name in DTYPES.items())]
    records = [*step(1, *PASS), mark(1, 200 * MS), *step(2, *PASS), mark(2, 300 * MS), *step(3, *PASS)]
    numbered = [(*fields[:7], seq, *fields[8:]) for seq, fields in enumerate(records)]
    parts = [bars([book(rank, *numbered, groups=names)], SECOND) for rank in range(2)]
    for found in (timeline([bars([book(0, *numbered, groups=names)], SECOND)]), timeline(parts)):
        assert found is not None
        for track in found.tracks:
            shown = [None if bar.part is None else found.parts[bar.part] for bar in track.bars]
            assert shown == [None] * 3 + ["first", "middle", "last"] + [None] * 3


def test_two_nodes() -> None:
    """Ranks of two nodes whose clocks differ by hours share one line of time, and what they waited for each other is shown."""

    def ran(rank: int, off_ns: int) -> list[tuple[int, ...]]:
        return [
            operation(start_ns=off_ns + n * 100 * MS + rank * 20 * MS, end_ns=off_ns + n * 100 * MS + 30 * MS, seq=n)
            for n in range(5)
        ]

    stuck = in_flight("all_reduce", 7200 * SECOND + 450 * MS, seq=5)
    nodes = [book(0, *ran(0, 0)), book(1, *ran(1, 7200 * SECOND))]
    nodes[1].in_flight = [stuck]
    found = timeline([bars(nodes[:1], SECOND), bars(nodes[1:], 7201 * SECOND)])
    whole = [book(0, *ran(0, 0)), book(1, *ran(1, 0))]
    whole[1].in_flight = [in_flight("all_reduce", 450 * MS, seq=5)]
    assert found == seen(*whole, now_ns=SECOND)
    assert [bar.wait_us for bar in found.tracks[0].bars] == [20_000] * 5
    assert found.tracks[1].pending == [Pending(450_000, 550_000, 0, 0, 5)]


def test_node_whose_clock_is_not_known() -> None:
    """A node that shares no collective with the others has no place on their line of time, and is left out."""
    one = book(0, operation(start_ns=1, end_ns=5 * MS, seq=1))
    other = book(1, operation(start_ns=1, end_ns=5 * MS, seq=99))
    found = timeline([bars([one], SECOND), bars([other], SECOND)])
    assert found is not None
    assert [track.rank for track in found.tracks] == [0]


def test_no_wait_where_it_is_not_defined() -> None:
    """Half a group, a rooted operation, a group whose numbers do not compare, an end seen late: the wait is absent, not 0."""
    one = operation(start_ns=1, end_ns=5 * MS, seq=1)
    assert [bar.wait_us for bar in seen(book(0, one), book(1)).tracks[0].bars] == [None]
    rooted = operation("broadcast", start_ns=1, end_ns=5 * MS, seq=1)
    unaligned = operation(start_ns=1, end_ns=5 * MS, seq=1, flags=ev.UNALIGNED)
    late_seen = operation(start_ns=1, end_ns=5 * MS, seq=1, flags=ev.ASYNC, timing=ev.BY_WAIT)
    for record in (rooted, unaligned, late_seen):
        assert [bar.wait_us for track in seen(book(0, record), book(1, record)).tracks for bar in track.bars] == [
            None
        ] * 2
    strange = [group_entry(0, (0, 1), aligned=False)]
    tracks = seen(book(0, one, groups=strange), book(1, one, groups=strange)).tracks
    assert [bar.wait_us for track in tracks for bar in track.bars] == [None, None]


def test_what_has_no_place_is_left_out() -> None:
    """Step marks, operations that raised, and those without an end are no bars; a size that is not known is absent."""
    records = (
        mark(1, 3 * MS),
        operation(start_ns=1, end_ns=2 * MS, flags=ev.FAILED),
        operation(start_ns=1, end_ns=2 * MS, flags=ev.UNTIMED),
        operation("barrier", start_ns=2 * MS, end_ns=3 * MS, seq=4, flags=ev.NO_SIZE),
    )
    (track,) = seen(book(0, *records)).tracks
    assert [(bar.seq, bar.size_bytes) for bar in track.bars] == [(4, None)]


def test_in_flight() -> None:
    """A pending operation appears with its age; a posted recv only once a thread waits for it."""
    waiting = book(0, operation(start_ns=0, end_ns=4 * MS))
    waiting.in_flight = [
        in_flight("all_reduce", 5 * MS, seq=9),
        in_flight("recv", 2 * MS),
        in_flight("send", 3 * MS, flags=ev.BLOCKED),
    ]
    found = seen(waiting, now_ns=SECOND)
    assert found.tracks[0].pending == [Pending(5000, 995_000, 0, 0, 9), Pending(3000, 997_000, 1, 0, 0)]
    assert found.ops == ["all_reduce", "send"]
    assert (found.span_s, found.age_s) == (0.005, 0.995)


def test_nothing_to_see() -> None:
    """No operation with a known end, none in flight: no picture."""
    assert timeline([bars([book(0), book(1, mark(1, 3 * MS))], SECOND)]) is None
    assert timeline([bars([], SECOND)]) is None


def test_first_operation_hangs() -> None:
    """A job whose first operation never ends has a picture of just that."""
    stuck = book(0)
    stuck.in_flight = [in_flight("all_reduce", 5 * SECOND)]
    found = seen(stuck, book(1), now_ns=65 * SECOND)
    assert (found.tracks[0].pending[0].age_us, found.tracks[1].bars) == (60_000_000, [])
    assert found.span_s > 0


def test_as_far_back_as_all_is_known() -> None:
    """A rank with many short operations bounds the picture: before its oldest known one it would seem idle."""
    busy = [operation(start_ns=n * MS, end_ns=n * MS + MS // 2, seq=n) for n in range(2000)]
    calm = [operation(start_ns=n * 100 * MS, end_ns=n * 100 * MS + MS, seq=n, group=1) for n in range(20)]
    groups = [group_entry(0, (0, 2)), group_entry(1, (1, 3), "tp")]
    found = seen(book(0, *busy, groups=groups), book(1, *calm, groups=groups))
    first = found.tracks[0].bars[0]
    assert first.start_us == 0
    assert len(found.tracks[0].bars) == 256
    assert all(bar.start_us + bar.duration_us > 0 for bar in found.tracks[1].bars)
    assert len(found.tracks[1].bars) == 2  # those of the 256 ms that rank 0 is known of


def test_bounds() -> None:
    """However many ranks there are, a picture has about so many bars, and no more time than ten seconds."""
    records = [operation(start_ns=n * MS, end_ns=n * MS + MS // 2, seq=n) for n in range(1000)]
    crowd = [book(rank, *records, ranks=64) for rank in range(64)]
    found = seen(*crowd)
    assert sum(len(track.bars) for track in found.tracks) <= max(MOST_BARS, 64 * LEAST_OF_RANK)
    assert all(track.bars for track in found.tracks)
    rare = [operation(start_ns=n * 3 * SECOND, end_ns=n * 3 * SECOND + MS, seq=n) for n in range(20)]
    found = seen(book(0, *rare), now_ns=60 * SECOND)
    assert found.span_s == LONGEST_NS / 1e9
    assert len(found.tracks[0].bars) == 4


def test_each_group_once() -> None:
    """Groups with the same label are distinguished by their id, and a group has the same index on all ranks."""
    pairs = [group_entry(0, (0, 1), "tp"), group_entry(1, (2, 3), "tp")]
    left = book(0, operation(start_ns=0, end_ns=MS, group=0), groups=pairs)
    right = book(2, operation(start_ns=0, end_ns=MS, group=1), groups=pairs)
    again = book(3, operation(start_ns=0, end_ns=MS, group=0), groups=[{**pairs[1], "group": 0}])
    found = seen(left, right, again)
    assert found.groups == ["tp", "tp"]
    assert [track.bars[0].group for track in found.tracks] == [0, 1, 1]
