"""Records to totals, waits and steps: packed records in, sums out."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from commwatch.wire import events as ev
from commwatch_agent.ingest.batches import ingest_records
from commwatch_agent.ingest.collective_join import GroupJoin
from commwatch_agent.ingest.jobs import JobTable
from commwatch_agent.ingest.rank_totals import RankTotals
from commwatch_agent.model.bandwidth import busbw_of_one
from commwatch_agent.model.cells import DURATION_BOUNDS_NS, SLOT_NS, Cell
from commwatch_agent.model.sketch import quantile
from tests.helpers import MS, examples, group_entry, identity, mark, operation, packed

#: Wall time of monotonic 0 in ``identity``; a slot begins there.
EPOCH = 1_700_000_000_000_000_000


def a_book(rank: int = 0, joins: dict[str, GroupJoin] | None = None, *names: dict[str, Any]) -> RankTotals:
    book = RankTotals(identity(rank=rank), {} if joins is None else joins)
    book.learn(names or [group_entry()])
    return book


def fed(*records: tuple[int, ...], names: tuple[dict[str, Any], ...] = ()) -> RankTotals:
    book = a_book(0, None, *names)
    ingest_records(book, packed(*records))
    return book


def total(book: RankTotals, op: str | None = None, group: int | None = None) -> Cell:
    """All that a rank has counted of an op, of a group, or in total."""
    sums = Cell()
    for key, cell in book.cells():
        if op in (None, book.op_name(key.op)) and group in (None, key.group):
            sums.add(cell)
    return sums


def live_from(book: RankTotals) -> int | None:
    return book.live_from


def same(a: Cell, b: Cell) -> bool:
    return all(getattr(a, name) == getattr(b, name) for name in Cell.__slots__)


# -- totals ---------------------------------------------------------------------------------------


def test_what_verdicts_need() -> None:
    """The latest launch of collectives without an end, the latest that raised, and what an operation usually takes, are kept."""
    book = fed(
        *(operation(start_ns=n * MS, end_ns=n * MS + 3 * MS, seq=n) for n in range(5)),
        operation(start_ns=20 * MS, end_ns=20 * MS, seq=5, flags=ev.UNTIMED, timing=ev.BY_NONE),
        operation("send", start_ns=30 * MS, end_ns=30 * MS, seq=0, flags=ev.UNTIMED, timing=ev.BY_NONE, peer=1),
        operation("barrier", start_ns=40 * MS, end_ns=41 * MS, seq=6, flags=ev.FAILED),
    )
    assert (book.launched_ns, book.unseen) == ({0: 20 * MS}, {0: 5})
    assert [(book.op_name(record.op), record.seq) for record in book.failures] == [("barrier", 6)]
    assert book.usual_ns(0, ev.OP_CODE["all_reduce"]) == pytest.approx(3 * MS, rel=0.03)
    assert book.usual_ns(0, ev.OP_CODE["broadcast"]) is None


def test_ranks_that_disagree() -> None:
    """A joined collective whose ranks passed different data is kept, by the names of dtypes: each rank numbers its own."""
    joins: dict[str, GroupJoin] = {}
    first, second = a_book(0, joins), a_book(1, joins)
    first.learn([{"dtype": 1, "name": "float32"}, {"dtype": 2, "name": "int64"}])
    second.learn([{"dtype": 1, "name": "int64"}, {"dtype": 2, "name": "float32"}])
    for seq, (one, other) in enumerate(((1, 2), (2, 1), (1, 1))):
        for book, dtype in ((first, one), (second, other)):
            ingest_records(book, packed(operation(start_ns=seq * MS, end_ns=seq * MS + 9, seq=seq, dtype=dtype)))
    (join,) = joins.values()
    assert [seq for seq, _ in join.odd] == [2]
    assert join.unjoined == 0


def test_totals() -> None:
    """Count, bytes and time of an operation are the sums over its records, apart from those of other operations."""
    book = fed(
        operation(start_ns=0, end_ns=3 * MS, size=1000, seq=0),
        operation(start_ns=3 * MS, end_ns=5 * MS, size=5000, seq=1),
        operation("broadcast", start_ns=5 * MS, end_ns=9 * MS, size=70, seq=2),
    )
    sums = total(book, "all_reduce")
    assert (sums.count, sums.bytes, sums.busy_ns, sums.duration_ns) == (2, 6000, 5 * MS, 5 * MS)
    assert (sums.failed, sums.untimed, sums.joined, sums.p2p_wait_ns) == (0, 0, 0, 0)
    assert total(book, "broadcast").bytes == 70
    assert (book.read, book.last_seq) == (3, {0: 2})


@pytest.mark.parametrize(("size", "log2"), [(0, -1), (1, 0), (2, 1), (1023, 10), (1024, 10), (1025, 11), (1 << 40, 40)])
def test_size_class(size: int, log2: int) -> None:
    """An operation counts in the class of the next power of two; one without a size has a class of its own."""
    book = fed(operation(start_ns=0, end_ns=10, size=size))
    assert [(key.size_log2, cell.bytes) for key, cell in book.cells()] == [(log2, size)]


@pytest.mark.parametrize("duration", [1, 9_999, 10_000, 10_001, 3 * MS, 40_000 * MS])
def test_durations(duration: int) -> None:
    """A duration counts in the first bucket whose bound is not below it, and the sketch returns it within 2.2%."""
    (_, cell), *_ = fed(operation(start_ns=500, end_ns=500 + duration)).cells()
    expected = sum(bound < duration for bound in DURATION_BOUNDS_NS)
    assert [n for n, count in enumerate(cell.durations) if count] == [expected]
    assert quantile(cell.bins, 0.5) == pytest.approx(duration, rel=0.022)


# By hand: S 8192 in a group of four, and in one of two.
BUS_BYTES = {"all_reduce": (12288, 8192), "all_gather": (6144, 4096), "broadcast": (8192, 8192), "barrier": (0, 0)}


@pytest.mark.parametrize("op", BUS_BYTES)
def test_bus_bytes(op: str) -> None:
    """Bus bytes use the size of the operation's own group, not of the world."""
    names = group_entry(0, (0, 1, 2, 3)), group_entry(1, (0, 1), "tp"), group_entry(2, (0,), "alone")
    book = fed(*(operation(op, start_ns=n, end_ns=n + 1, size=8192, group=n) for n in range(3)), names=names)
    assert [total(book, group=n).bus_bytes for n in range(3)] == [*BUS_BYTES[op], 0]


def test_eight_queued() -> None:
    """The bandwidth of eight operations launched at once and run in turn is that of one with the bytes of all."""
    names, size, took = group_entry(0, (0, 1, 2, 3)), 1 << 20, 2 * MS
    book = fed(
        *(operation(start_ns=n * took, end_ns=(n + 1) * took, launch_ns=0, size=size, seq=n) for n in range(8)),
        names=(names,),
    )
    sums = total(book)
    assert sums.bus_bytes / (sums.busy_ns / 1e9) == pytest.approx(
        busbw_of_one("all_reduce", 8 * size, 8 * took / 1e9, 4)
    )


def test_unknown_op() -> None:
    """An operation that is not in the table is counted under its own name, and has no bus bytes."""
    code, fields = ev.FIRST_UNKNOWN_OP, operation(start_ns=0, end_ns=MS, size=512)
    book = fed((code, *fields[1:]), (code + 1, *fields[1:]), names=(group_entry(), {"op": code, "name": "c10d::new_"}))
    assert {book.op_name(key.op): (cell.count, cell.bytes, cell.bus_bytes) for key, cell in book.cells()} == {
        "c10d::new_": (1, 512, 0),
        "unknown": (1, 512, 0),
    }


def test_unknown_group() -> None:
    """Records of a group whose name was lost are counted, without a bandwidth and without being joined."""
    book = fed(operation(start_ns=0, end_ns=MS, group=ev.NO_GROUP))
    assert (total(book).count, total(book).bus_bytes, book.group(ev.NO_GROUP).label) == (1, 0, "unknown")


def test_damaged_names() -> None:
    """Entries of the names file that make no sense are passed over; the ones around them count."""
    book = a_book(
        0,
        None,
        {"group": 1},
        {"group": "x", "ranks": []},
        {"dtype": []},
        {"x": 1},
        {**group_entry(2), "size": None},
        group_entry(3),
    )
    assert (set(book.groups), book.dtypes) == ({3}, {})


@pytest.mark.parametrize(
    ("flag", "counts"), [(ev.FAILED, (0, 1, 0)), (ev.UNTIMED, (1, 0, 1)), (ev.FAILED | ev.UNTIMED, (0, 1, 0))]
)
def test_without_duration(flag: int, counts: tuple[int, int, int]) -> None:
    """An operation that failed, or whose end was not seen, is counted as such, and has no duration in sums or quantiles."""
    cell = total(fed(operation(start_ns=0, end_ns=700 * MS, flags=flag)))
    assert (cell.count, cell.failed, cell.untimed) == counts
    assert (cell.duration_ns, cell.busy_ns, cell.bus_bytes, cell.timed_bytes, cell.bins) == (0, 0, 0, 0, {})
    assert sum(cell.durations) == 0


# -- waits ----------------------------------------------------------------------------------------


def two_ranks(first: tuple[int, ...], second: tuple[int, ...], *names: dict[str, Any]) -> tuple[RankTotals, RankTotals]:
    """Both sides of one collective; the names are rank 0's and rank 1's, or the same for both."""
    joins: dict[str, GroupJoin] = {}
    books = a_book(0, joins, *names[:1]), a_book(1, joins, *names[-1:])
    for book, record in zip(books, (first, second), strict=True):
        ingest_records(book, packed(record))
    return books


EARLY: dict[str, Any] = {"start_ns": 0, "end_ns": 50 * MS}
LATE: dict[str, Any] = {"start_ns": 40 * MS, "end_ns": 50 * MS}


@pytest.mark.parametrize("op", ["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "barrier"])
def test_wait_and_lateness(op: str) -> None:
    """In a symmetric operation the early rank's waiting is its own, and the late one's lateness."""
    early, late = two_ranks(operation(op, **EARLY), operation(op, **LATE))
    assert [(total(b).wait_ns, total(b).joined) for b in (early, late)] == [(40 * MS, 1), (0, 1)]
    assert (early.lateness_ns, late.lateness_ns) == ({}, {0: 40 * MS})


@pytest.mark.parametrize("op", ["broadcast", "reduce", "gather", "scatter", "send", "recv"])
def test_rooted_operations_have_no_wait(op: str) -> None:
    """Rooted operations and p2p do not finish together: no wait, no lateness."""
    for book in two_ranks(operation(op, **EARLY), operation(op, **LATE)):
        assert (total(book).joined, book.lateness_ns) == (0, {})


def test_unknown_root_keeps_nothing() -> None:
    """Operations whose root is not known are counted, and their parts are not kept: they could never be complete."""
    joins: dict[str, GroupJoin] = {}
    book = a_book(0, joins)
    for seq in range(50):
        ingest_records(book, packed(operation("broadcast", seq=seq, peer=-1, **EARLY)))
    assert total(book).count == 50
    assert [join._rooted for join in joins.values()] == [{}]


@pytest.mark.parametrize(
    "more",
    [{"flags": ev.UNALIGNED}, {"flags": ev.ASYNC, "timing": ev.BY_WAIT}, {"flags": ev.UNTIMED}, {"flags": ev.FAILED}],
)
def test_never_joined(more: dict[str, Any]) -> None:
    """Unaligned groups, ends seen only in a later wait, and what has no duration are never joined."""
    for book in two_ranks(operation(**EARLY, **more), operation(**LATE)):
        assert (total(book).joined, total(book).wait_ns, book.lateness_ns) == (0, 0, {})


def test_unaligned_is_counted() -> None:
    """An unaligned operation counts with bytes and time like any other, whether its flag or its group marks it."""
    flagged, plain = operation(**EARLY, flags=ev.UNALIGNED), operation(**EARLY)
    for book in (*two_ranks(flagged, flagged), *two_ranks(plain, plain, group_entry(aligned=False))):
        assert (total(book).count, total(book).bytes, total(book).busy_ns, total(book).joined) == (1, 4096, 50 * MS, 0)


def test_groups_of_one_description() -> None:
    """Two groups with one description are never joined together; one group under two numbers is."""
    tp_a, tp_b = (group_entry(0, (0, 1), "tp", group_id=name) for name in ("a", "b"))
    for book in two_ranks(operation(**EARLY), operation(**LATE), tp_a, tp_b):
        assert total(book).joined == 0
    for book in two_ranks(operation(**EARLY), operation(**LATE, group=5), tp_a, {**tp_a, "group": 5}):
        assert total(book).joined == 1


# -- send and recv --------------------------------------------------------------------------------


def test_p2p_is_a_union() -> None:
    """Overlapping sends are busy for the union of their times; so are recvs, on their own."""
    book = fed(
        operation("send", start_ns=0, end_ns=10 * MS, peer=1),
        operation("send", start_ns=4 * MS, end_ns=14 * MS, peer=2, size=100_000),
        operation("recv", start_ns=8 * MS, end_ns=20 * MS, peer=1),
    )
    sends, recvs = total(book, "send"), total(book, "recv")
    assert (sends.busy_ns, sends.duration_ns, recvs.busy_ns) == (14 * MS, 20 * MS, 12 * MS)
    assert book.last_seq == {}


def test_only_waited_p2p_is_communication_time() -> None:
    """Only the time that a thread waited for a send or recv is communication time of the step."""
    book = fed(
        mark(0, 100 * MS),
        operation("recv", start_ns=100 * MS, end_ns=180 * MS, peer=1),
        operation("recv", start_ns=100 * MS, end_ns=190 * MS, peer=2, waited_us=30_000),
        mark(1, 200 * MS),
    )
    (step,) = book.steps.take()
    assert (step.comm_ns, step.p2p_wait_ns, total(book).p2p_wait_ns) == (30 * MS, 30 * MS, 30 * MS)
    recv = ev.OP_CODE["recv"]
    waits = {key: (sums.count, sums.bytes, sums.waited_us) for key, sums in book.messages.items()}
    assert waits == {(0, recv, 1): (1, 4096, 0), (0, recv, 2): (1, 4096, 30_000)}


def test_steps_by_group() -> None:
    """Each group's part of a step is the union of its operations, and the step's that of all: overlapping groups count once."""
    tp, twin = group_entry(1, label="tp", group_id="a"), group_entry(2, (0, 2), label="tp", group_id="b")
    book = fed(
        mark(0, 0),
        operation(start_ns=10, end_ns=40),
        operation(start_ns=30, end_ns=60, group=1),
        operation(start_ns=55, end_ns=70, group=2),
        operation(start_ns=80, end_ns=90),
        mark(1, 100),
        names=(group_entry(), tp, twin),
    )
    (step,) = book.steps.take()
    assert dict(step.groups) == {"default_pg": 40, "tp": 40}
    assert (step.comm_ns, step.p2p_wait_ns) == (70, None)
    assert book.steps.totals.groups_ns == {"default_pg": 40, "tp": 40}


# -- steps ----------------------------------------------------------------------------------------

ops = st.tuples(st.integers(0, 260), st.integers(1, 60))


@examples(60)
@given(st.lists(ops, max_size=12))
def test_comm_of_a_step_is_a_union(intervals: list[tuple[int, int]]) -> None:
    """Communication time of a step is the length of the union of its operations within it, never above the step."""
    records = [(start + took, operation(start_ns=start, end_ns=start + took)) for start, took in intervals]
    marks = [(at, mark(n, at)) for n, at in enumerate((50, 150, 250))]
    book = fed(*(record for _, record in sorted([*records, *marks], key=lambda pair: pair[0])))
    # An operation is over, and in the ring, before the mark behind it; what ends later belongs to the next step.
    first, second = book.steps.take()
    for step in (first, second):
        seen = [(start, start + took) for start, took in intervals if start + took <= step.end_ns]
        union = {at for start, end in seen for at in range(max(start, step.start_ns), end)}
        assert step.comm_ns == len(union) <= step.end_ns - step.start_ns


def test_operations_in_flight_at_the_mark() -> None:
    """A step with operations in flight at its end waits for them: their part within the step counts there."""
    book = fed(mark(0, 100), mark(1, 200, in_flight=1))
    assert book.steps.take() == []
    ingest_records(book, packed(operation(start_ns=180, end_ns=230), mark(2, 300), first=2))
    assert [(step.start_ns, step.end_ns, step.comm_ns) for step in book.steps.take()] == [
        (100, 200, 20),
        (200, 300, 30),
    ]
    assert book.steps.take() == []


@pytest.mark.parametrize(("told", "kept"), [(None, None), (0, 0), (20, 20), (40, 30)])
def test_exposed_time(told: int | None, kept: int | None) -> None:
    """Exposed time is never more than communication time, and absent, not 0, where it is not known."""
    book = fed(mark(0, 100, exposed_ns=told), operation(start_ns=150, end_ns=180), mark(1, 200, exposed_ns=told))
    (step,) = book.steps.take()
    assert (step.comm_ns, step.exposed_ns) == (30, kept)
    totals = book.steps.totals
    assert (totals.count, totals.duration_ns, totals.comm_ns, totals.exposed_ns) == (1, 100, 30, kept)


# -- slots ----------------------------------------------------------------------------------------


def test_slots() -> None:
    """Cells are cut by wall time, every 10 s; the slot is the one in which the operations ended."""
    second = 1000 * MS
    book = fed(*(operation(start_ns=at - 1, end_ns=at) for at in (5 * second, 9 * second, 10 * second, 31 * second)))
    assert [(slot - EPOCH, cell.count) for slot, _, cell in book.take_closed()] == [(0, 2), (SLOT_NS, 1)]
    assert book.take_closed() == []
    assert [(slot - EPOCH, cell.count) for slot, _, cell in book.live_cells()] == [(3 * SLOT_NS, 1)]
    book.roll(EPOCH + 40 * second)
    assert [slot - EPOCH for slot, _, _ in book.take_closed()] == [3 * SLOT_NS]


def test_live_from() -> None:
    """The totals have the number of the first record that no closed cell holds."""
    book = a_book()
    assert live_from(book) is None
    ingest_records(book, packed(*(operation(start_ns=n, end_ns=n + 1) for n in range(3)), first=1000))
    assert live_from(book) == 1000
    ingest_records(book, packed(operation(start_ns=SLOT_NS, end_ns=SLOT_NS + 1), first=1003))
    assert live_from(book) == 1003
    book.roll(EPOCH + 2 * SLOT_NS)
    assert live_from(book) is None


def test_live_from_after_a_late_join() -> None:
    """A wait that comes to a rank after its slot has closed does not hide the records that follow."""
    joins: dict[str, GroupJoin] = {}
    early, late = a_book(0, joins), a_book(1, joins)
    ingest_records(early, packed(operation(start_ns=0, end_ns=50)))
    early.roll(EPOCH + SLOT_NS)
    assert [cell.count for _, _, cell in early.take_closed()] == [1]
    ingest_records(late, packed(operation(start_ns=40, end_ns=50)))
    ingest_records(early, packed(operation(start_ns=SLOT_NS, end_ns=SLOT_NS + 10, seq=1), first=1))
    assert [(cell.count, cell.wait_ns) for _, _, cell in early.live_cells()] == [(1, 40)]
    assert live_from(early) == 1


moments = st.tuples(
    st.integers(0, 45), st.sampled_from(["all_reduce", "broadcast", "send"]), st.sampled_from([0, 100, 4096])
)


@examples(60)
@given(st.lists(moments, max_size=30), st.sets(st.integers(0, 30)), st.booleans())
def test_nothing_depends_on_batches(timeline: list[tuple[int, str, int]], cuts: set[int], roll: bool) -> None:
    """However records are cut into batches and slots, all that was counted is in the totals, once."""
    records = [
        operation(op, start_ns=at * 1000 * MS, end_ns=at * 1000 * MS + 7 * n + 1, size=size, seq=n)
        for n, (at, op, size) in enumerate(sorted(timeline))
    ]
    whole, pieces, handed = fed(*records), a_book(), Cell()
    for n, record in enumerate(records):
        ingest_records(pieces, packed(record, first=n))
        if n in cuts:
            if roll:
                pieces.roll(EPOCH + record[10])
            for _, _, cell in pieces.take_closed():
                handed.add(cell)
    for _, _, cell in pieces.live_cells():
        handed.add(cell)
    assert same(total(whole), total(pieces))
    assert same(total(whole), handed)
    assert total(whole).count == len(records)


def test_finish() -> None:
    """When the rank has ended, everything that was open is handed over."""
    book = fed(mark(0, 100), operation(start_ns=150, end_ns=180), mark(1, 200, in_flight=1))
    book.finish()
    assert [cell.count for _, _, cell in book.take_closed()] == [1]
    assert [step.comm_ns for step in book.steps.take()] == [30]
    assert list(book.live_cells()) == []


# -- jobs -----------------------------------------------------------------------------------------


def test_retire() -> None:
    """A job goes when all its ranks have been gone for long enough, not before, and never while one lives."""
    jobs = JobTable(keep_ended_ns=100)
    first, second = jobs.open("a", identity(rank=0)), jobs.open("b", identity(rank=1))
    jobs.open("c", identity("other"))
    first.alive = False
    for now in (1000, 2000):
        jobs.retire(now)
    assert set(jobs.jobs) == {"job", "other"}
    second.alive = False
    for now in (3000, 3100):
        jobs.retire(now)
        assert set(jobs.jobs) == {"job", "other"}
    jobs.retire(3101)
    assert set(jobs.jobs) == {"other"}


def test_restarted_job_is_not_retired() -> None:
    """A job whose ranks come back (an elastic restart) stays, and its time starts anew when they end again."""
    jobs = JobTable(keep_ended_ns=100)
    jobs.open("a", identity()).alive = False
    jobs.retire(1000)
    again = jobs.open("b", identity(restart=1))
    jobs.retire(5000)
    again.alive = False
    jobs.retire(6000)
    jobs.retire(6100)
    assert [book.identity["restart"] for book in jobs.rank_totals()] == [0, 1]
    jobs.retire(6101)
    assert list(jobs.rank_totals()) == []


@pytest.mark.parametrize("missing", ["job", "rank", "wall_offset_ns"])
def test_damaged_identity(missing: str) -> None:
    """A ring whose identity lacks what is needed is refused, and leaves no job behind."""
    who = identity()
    del who[missing]
    jobs = JobTable()
    with pytest.raises(KeyError):
        jobs.open("a", who)
    assert list(jobs.jobs) == []
