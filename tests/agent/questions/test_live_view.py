"""What the live page shows of a moment, from totals made by hand, and that its plots continue where the history ends."""

from __future__ import annotations

import json
from collections.abc import Collection
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from commwatch.wire import events as ev
from commwatch.wire.events import Record
from commwatch.wire.modes import SAMPLING
from commwatch.wire.numbers import NUMBERS
from commwatch_agent.analysis.time_buckets import Slot, SlotSums, slots_of
from commwatch_agent.analysis.verdict import Verdict
from commwatch_agent.ingest.batches import ingest_records
from commwatch_agent.ingest.jobs import Job, JobTable
from commwatch_agent.ingest.rank_totals import RankTotals
from commwatch_agent.model.cells import NO_STEPS, SLOT_NS
from commwatch_agent.questions.live_view import JobNow, job_now
from commwatch_agent.questions.node_now import Card, Oldest, node_now, operations_now, pick, running
from tests.helpers import (
    EPOCH_NS,
    MS,
    Trainer,
    Watch,
    group_entry,
    identity,
    judged_now,
    mark,
    operation,
    packed,
    write_ring,
)

SECOND = 1000 * MS
#: Steps of 100 ms of which 40 ms are communication, 30 ms of them exposed.
STEPS = 20


def steps(rank: int, number: int = STEPS, unseen: Collection[int] = ()) -> list[tuple[int, ...]]:
    """Records of steps; rank 1 comes 10 ms late into each operation, which ends 50 ms after the step began, or is not seen to end."""
    found = [mark(0, 0, exposed_ns=0)]
    for n in range(number):
        start = n * 100 * MS
        begins = start + (20 if rank == 1 else 10) * MS
        flags = ev.UNTIMED if n in unseen else 0
        found.append(operation(start_ns=begins, end_ns=start + 50 * MS, seq=n, size=4_000_000, flags=flags))
        found.append(mark(n + 1, start + 100 * MS, exposed_ns=30 * MS))
    return found


def job(*ranks: list[tuple[int, ...]], **who: Any) -> Job:
    """A job with these ranks, which have done this."""
    aggregate = JobTable()
    for rank, records in enumerate(ranks):
        about = identity(rank=rank, world_size=len(ranks), **who)
        book = aggregate.open(f"r{rank}", about)
        book.learn([group_entry(0, tuple(range(len(ranks))), "dp")])
        for first in range(0, len(records), 64):
            ingest_records(book, packed(*records[first : first + 64], first=first))
    return next(iter(aggregate.jobs.values()))


def now(
    shown: Job, now_ns: int = 2 * SECOND, cards: dict[int, Card] | None = None, told: tuple[Verdict, ...] = ()
) -> JobNow:
    """A moment of it."""
    return job_now([node_now(shown, cards or {}, [*judged_now([shown], now_ns), *told], now_ns)])


def books(shown: Job) -> list[RankTotals]:
    """Of its ranks."""
    return list(shown.rank_totals.values())


def test_waiting_for_late_ranks() -> None:
    """Where more than half of the communication is waiting for a late rank, the page does not blame the network."""
    ranks = []
    for begins_ms in (10, 75):  # of 100; both end at 90
        records = [mark(0, 0, exposed_ns=0)]
        for n in range(STEPS):
            at = n * 100 * MS
            records.append(operation(start_ns=at + begins_ms * MS, end_ns=at + 90 * MS, seq=n, size=4_000_000))
            records.append(mark(n + 1, at + 100 * MS, exposed_ns=15 * MS))
        ranks.append(records)
    found = now(job(*ranks))
    assert found.comm == pytest.approx((80 + 15) / 200)
    assert found.says == "above 30%: late ranks are the bottleneck, not the network"
    assert found.split == "15% transfer, 33% waiting for late ranks"


def test_shares_and_steps() -> None:
    """Shares are communication over step time of all ranks here, the pace that of one rank, and the 30% line speaks."""
    found = now(job(steps(0), steps(1)))
    assert found.comm == pytest.approx((40 + 30) / 200)
    assert found.exposed == pytest.approx(0.3)
    assert found.step_s == pytest.approx(0.1)
    assert found.steps_per_s == pytest.approx(10)
    assert found.says == "above 30% only because ranks wait for one another"
    assert [line.comm for line in found.ranks] == [pytest.approx(0.4), pytest.approx(0.3)]
    assert [line.step for line in found.ranks] == [STEPS] * 2


def test_parts_of_two_nodes() -> None:
    """Parts of two nodes are one job: shares and waits are means over all ranks, of a rank that moved the latest life counts."""
    whole = now(job(steps(0), steps(1)))
    one, two = (node_now(job(*ranks), {}, (), 2 * SECOND) for ranks in ([steps(0)], [[], steps(1)]))
    two = replace(two, ranks=two.ranks[1:])
    found = job_now([one, two])
    assert [line.rank for line in found.ranks] == [0, 1]
    assert (found.comm, found.exposed, found.step_s) == (whole.comm, whole.exposed, whole.step_s)
    assert [(slot.at, slot.comm) for slot in found.slots] == [(slot.at, slot.comm) for slot in whole.slots]
    assert found.states == {"running": 2}
    again = replace(one, restarts=1, ranks=[replace(each, view=replace(each.view, restart=1)) for each in one.ranks])
    assert [line.rank for line in job_now([again, two]).ranks] == [0, 1], "nodes may count restarts differently"
    over = [replace(each, view=replace(each.view, state="gone", ended_at=0.0)) for each in two.ranks]
    assert [line.rank for line in job_now([again, replace(two, running=False, ranks=over)]).ranks] == [0]


def test_share_of_some_ranks() -> None:
    """A rank whose communication is not known is no part of the shares, which say of how many ranks they are."""
    found = now(job(steps(0), steps(1, unseen=range(STEPS))))
    assert found.comm == pytest.approx(0.4)
    assert found.exposed == pytest.approx(0.3)
    assert (found.comm_of, found.exposed_of) == ("(1 of 2 ranks)", "(1 of 2 ranks)")
    assert (now(job(steps(0), steps(1))).comm_of, found.ranks[1].comm) == ("", None)


def test_slots_of_an_older_part() -> None:
    """A bucket that only the older of two parts still has is left out: it would be drawn again without the other's steps."""
    shown = job(steps(0))
    older, later = (node_now(shown, {}, (), now_s * SECOND) for now_s in (19, 21))
    assert len(older.slots) == 1
    assert later.slots == []
    assert job_now([later, older]).slots == []
    assert len(job_now([older, older]).slots) == 1


def test_age_of_the_figures() -> None:
    """Once no step of any rank has ended for ten seconds, the figures are of the latest one; while one rank goes on, or after the end, they are not."""
    ended_at = EPOCH_NS / 1e9 + STEPS * 0.1
    shown = job(steps(0), steps(1))
    assert now(shown, 11 * SECOND).figures_at is None
    assert now(shown, 13 * SECOND).figures_at == pytest.approx(ended_at)
    found = now(shown, 300 * SECOND)  # after a minute the figures are not known any more
    assert found.figures_at == pytest.approx(ended_at)
    assert (found.comm, found.step_s) == (None, None)
    assert now(job(steps(0), steps(1, 125)), 13 * SECOND).figures_at is None
    slow = job([mark(n, n * 10 * SECOND) for n in range(6)])
    assert now(slow, 75 * SECOND).figures_at is None
    for book in books(shown):
        book.alive = False
    assert now(shown, 13 * SECOND).figures_at is None
    assert now(job([], []), 13 * SECOND).figures_at is None


def test_no_pace_in_a_hang() -> None:
    """Once no step has ended for five seconds there is no pace any more; steps that take as long still have one."""
    shown = job(steps(0), steps(1))
    assert now(shown, 6 * SECOND).steps_per_s == pytest.approx(10)
    assert now(shown, 8 * SECOND).steps_per_s is None
    slow = job([mark(n, n * 10 * SECOND) for n in range(6)])
    assert now(slow, 75 * SECOND).steps_per_s == pytest.approx(0.1)


def test_probe_that_sheds() -> None:
    """If ranks do not record everything, the page shows that, and the length of their waits is unknown."""
    shown = job(steps(0), steps(1))
    assert now(shown).sheds is None
    for book in books(shown):
        book.mode = SAMPLING
    found = now(shown)
    assert found.sheds is not None
    assert "one in sixteen operations of ranks 0-1" in found.sheds
    assert [line.wait for line in found.ranks] == [None, None]


def test_only_the_latest_steps() -> None:
    """A moment is of the steps of the last ten seconds; of longer steps of the latest three; of none once there were none for long."""
    slow = [mark(0, 0)]
    for n in range(30):
        share = 20 if n < 25 else 80
        slow.append(operation(start_ns=n * SECOND, end_ns=n * SECOND + share * 10 * MS, seq=n))
        slow.append(mark(n + 1, (n + 1) * SECOND))
    shown = job(slow)
    assert now(shown, 30 * SECOND).comm == pytest.approx((5 * 0.2 + 5 * 0.8) / 10)
    assert now(shown, 60 * SECOND).comm == pytest.approx(0.8)
    later = now(shown, 200 * SECOND)
    assert (later.comm, later.exposed, later.step_s, later.steps_per_s, later.says) == (None, None, None, None, "")


def test_unknown_is_absent() -> None:
    """A job without steps, waits, GPUs or times has none of them, and no zeros."""
    found = now(job([operation(start_ns=1, end_ns=2, flags=ev.UNTIMED)], []))
    line = found.ranks[0]
    assert (found.comm, found.exposed, found.step_s) == (None, None, None)
    assert (line.step, line.step_s, line.comm, line.exposed, line.wait, line.gpu, line.gpu_utilization) == (None,) * 7
    assert [slot.busbw for slot in found.slots] == [{}]
    (row,) = operations_now(job([operation(start_ns=1, end_ns=2, flags=ev.UNTIMED)]), SECOND).rows
    assert (row.busbw, row.p50_s, row.wait_s) == (None, None, None)


def test_waits_and_cards() -> None:
    """What a rank waited for the late one is a part of the last minute; a card is shown with what it does."""
    found = now(job(steps(0), steps(1)), cards={1: Card(5, 0.75)})
    assert found.ranks[0].wait == pytest.approx(STEPS * 10 * MS / (2 * SECOND))
    assert found.ranks[1].wait == 0
    assert [(line.gpu, line.gpu_utilization) for line in found.ranks] == [(None, None), (5, 0.75)]


def test_verdicts_mark_their_ranks() -> None:
    """An operation in flight for too long is a verdict, which marks its culprit; so is one from another source."""
    shown = job(steps(0), steps(1))
    stuck = Record._make((1, *operation(start_ns=2 * SECOND, end_ns=0, seq=STEPS), 1))
    books(shown)[0].in_flight = [stuck]
    late = Verdict("straggler", "late", "job", "dp-0", "dp", None, "all_reduce", [0], [1], 30.0, "rank 0 is late")
    found = now(shown, 90 * SECOND, told=(late,))
    assert [verdict.kind for verdict in found.verdicts] == ["stalled", "straggler"]
    assert [(line.rank, line.verdict) for line in found.ranks] == [(0, "straggler"), (1, "stalled")]
    (line,) = found.in_flight
    assert (line.rank, line.op, line.seq) == (0, "all_reduce", STEPS)
    assert line.age_s == pytest.approx(88)
    assert line.usual_s == pytest.approx(0.04, rel=0.03)


def test_message_that_was_only_posted() -> None:
    """A receive that no thread waits for comes after a collective, however long ago it was posted."""
    shown = job(steps(0))
    books(shown)[0].in_flight = [
        Record._make((1, *operation("recv", start_ns=0, end_ns=0, seq=1, peer=1), 1)),
        Record._make((1, *operation(start_ns=2 * SECOND, end_ns=0, seq=STEPS), 1)),
    ]
    assert [line.op for line in now(shown, 40 * SECOND).in_flight] == ["all_reduce", "recv"]


def test_many_in_flight() -> None:
    """The longest fifty are named, the others counted."""
    shown = job(steps(0))
    books(shown)[0].in_flight = [
        Record._make((1, *operation(start_ns=n * MS, end_ns=0, seq=n), 1)) for n in reversed(range(60))
    ]
    found = now(shown)
    assert [line.seq for line in found.in_flight] == list(range(50))
    assert found.in_flight_more == 10


def test_operation_of_each_rank() -> None:
    """Each rank in an operation shows the longest one, however many operations are in flight; the rank that is missing in it shows none."""
    shown = job(*[steps(rank, 3) for rank in range(64)])
    for rank, totals in enumerate(books(shown)):
        starts_ms = [1000, 1500] if rank != 13 else []
        totals.in_flight = [
            Record._make((1, *operation(start_ns=at * MS, end_ns=0, seq=3 + n), 1)) for n, at in enumerate(starts_ms)
        ]
    found = now(shown)
    assert [line.rank for line in found.ranks if line.oldest is None] == [13]
    assert {line.oldest for line in found.ranks} == {None, Oldest("all_reduce", "dp", 1.0)}


def test_operations_of_the_last_minute() -> None:
    """Sums say of how many seconds they are; what is older than a minute is not in them."""
    found = operations_now(job(steps(0), steps(1)), 2 * SECOND)
    (row,) = found.rows
    assert (row.by, row.count, row.group_size, found.covered_s) == ({"group": "dp", "op": "all_reduce"}, 40, 2, 2.0)
    assert row.busbw == pytest.approx(4_000_000 / 0.035)
    assert operations_now(job(steps(0)), 200 * SECOND).rows == []
    old = [operation(start_ns=0, end_ns=MS), operation(start_ns=95 * SECOND, end_ns=95 * SECOND + MS, seq=1)]
    found = operations_now(job(old), 99 * SECOND)
    assert [row.count for row in found.rows] == [1]
    assert found.covered_s == pytest.approx(59)


def test_picks_a_job() -> None:
    """The requested job is picked; otherwise the latest running one, otherwise the latest; an unknown name gives none."""
    old, new, ended = (
        job([], job="old", started_ns=1),
        job([], job="new", started_ns=2),
        job([], job="ended", started_ns=3),
    )
    books(ended)[0].alive = False
    jobs = [new, old, ended]
    assert [pick(jobs, name) for name in (None, "old", "nobody")] == [new, old, None]
    books(old)[0].alive = books(new)[0].alive = False
    assert pick(jobs, None) is ended
    assert pick([], None) is None
    assert [running(each) for each in jobs] == [False] * 3


def slots(tmp_path: Path, unseen: Collection[int]) -> tuple[dict[float, Slot], dict[float, Slot]]:
    """For 35 seconds of a job, by time since the first end: as the live totals had them last, and as the history has them."""
    watch = Watch(tmp_path)
    live: dict[float, Slot] = {}
    with ExitStack() as stack:
        trainers = [
            stack.enter_context(Trainer(watch.rings / f"job.r0.{rank}.ring", identity(rank=rank))) for rank in (0, 1)
        ]
        for trainer in trainers:
            trainer.call("name", [(group_entry(0, (0, 1), "dp"),)])
        for second in range(1, 36):
            for rank, trainer in enumerate(trainers):
                trainer.write(steps(rank, 360, unseen)[1 + 20 * (second - 1) : 1 + 20 * second])
            watch.tick(second * SECOND)
            with watch.agent.live(None) as (jobs, _):
                live |= {slot.at - EPOCH_NS / 1e9: slot for slot in now(jobs[0], second * SECOND).slots}
    return live, {slot.at - EPOCH_NS / 1e9: slot for slot in slots_of(watch.agent.slots(0, 1 << 62, "job"))}


def test_plots_go_on_where_the_history_ends(tmp_path: Path) -> None:
    """Slots from the live totals are the same as those that the history has of them later."""
    live, kept = slots(tmp_path, ())
    assert (kept[20], kept[30]) == (live[20], live[30])
    assert kept[20].comm == pytest.approx(0.35)
    assert kept[20].waiting == pytest.approx(0.05)  # one of two ranks waits 10 of 100 ms
    assert kept[20].busbw == {"all_reduce": pytest.approx(4_000_000 / 0.035)}


def test_initial_operations_are_in_no_bandwidth(tmp_path: Path) -> None:
    """What a rank with steps did before its first one has no bandwidth in a slot, live and stored; of a rank without steps all counts."""
    watch = Watch(tmp_path)
    first = [operation(start_ns=n * MS, end_ns=(n + 1) * MS, seq=n, size=1000) for n in range(3)]
    stepping = [mark(0, 10 * MS), operation(start_ns=20 * MS, end_ns=60 * MS, seq=3, size=4_000_000), mark(1, 100 * MS)]
    for job_id, records in (("steps", [*first, *stepping]), ("none", first)):
        write_ring(watch.rings, records, [group_entry(0, (0, 1), "dp")], job=job_id, world_size=2)
    watch.tick(2 * SECOND)
    with watch.agent.live(None) as (jobs, _):
        live = {each.id: [slot.busbw for slot in now(each, 2 * SECOND).slots] for each in jobs}
    watch.tick(40 * SECOND)
    kept = {name: [slot.busbw for slot in slots_of(watch.agent.slots(0, 1 << 62, name))] for name in live}
    assert live == kept
    assert live["steps"] == [{"all_reduce": pytest.approx(4_000_000 / 0.04)}]
    assert live["none"] == [{"all_reduce": pytest.approx(1_000_000)}]


def test_few_unknown_steps_are_left_out_of_plots(tmp_path: Path) -> None:
    """Where communication is not known of one step in ten the share is that of the others, live and stored; of more there is none."""
    live, kept = slots(tmp_path, {*range(99, 199, 10), *range(199, 299, 9)})
    assert (kept[20], kept[30]) == (live[20], live[30])
    assert kept[20].comm == pytest.approx(0.35)
    assert kept[20].exposed == pytest.approx(0.3)
    assert (kept[30].comm, kept[30].exposed) == (None, None)


def test_slot_of_nothing() -> None:
    """Ten seconds without steps or bytes have no shares and no bandwidth."""
    (slot,) = slots_of([SlotSums(EPOCH_NS, NO_STEPS, {"barrier": (0.0, 5), "all_reduce": (8.0, 2)})])
    assert (slot.at, slot.comm, slot.exposed, slot.busbw) == (
        (EPOCH_NS + SLOT_NS) / 1e9,
        None,
        None,
        {"all_reduce": 4e9},
    )
    assert json.dumps(slot.busbw)


def test_number_of_the_latest_step() -> None:
    """The page shows the latest step of all ranks, also where numbers go on at 0."""
    first = NUMBERS - STEPS + 1
    moved = [
        [(*each[:7], (each[7] + first) % NUMBERS, *each[8:]) for each in steps(rank, number)]
        for rank, number in ((0, STEPS), (1, STEPS - 3))
    ]
    found = now(job(*moved))
    assert ([line.step for line in found.ranks], found.step) == ([1, NUMBERS - 2], 1)
