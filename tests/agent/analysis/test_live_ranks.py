"""What the live totals alone give for ``/metrics``: which ranks live, and what has been wrong for how long."""

from __future__ import annotations

import threading
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from commwatch.wire import events as ev
from commwatch.wire import ring, splits
from commwatch_agent.analysis.live_ranks import groups, ranks
from commwatch_agent.analysis.live_ranks import rank as view
from commwatch_agent.analysis.verdict import Verdict
from commwatch_agent.analysis.verdicts import verdicts
from commwatch_agent.incidents.evidence import Evidence, KnownJob
from commwatch_agent.ingest.batches import ingest_records
from commwatch_agent.ingest.jobs import JobTable
from commwatch_agent.ingest.rank_totals import RankTotals
from commwatch_agent.model.views import Ended, Failed, InFlight
from commwatch_agent.notify.incident_watch import MOST_RANKS, MOST_VERDICTS, IncidentWatch, Plan
from commwatch_agent.prometheus.exporter import Exporter
from commwatch_agent.questions.node_now import node_now
from tests.agent.web.routes.test_jobs import rings_of
from tests.helpers import (
    MS,
    Trainer,
    agent,
    group_entry,
    identity,
    judged_now,
    mark,
    operation,
    packed,
    table,
    wait_for,
)

S = 1000 * MS
NOW = 100 * S
Found = dict[tuple[str, ...], float]


def rank(aggregate: JobTable, number: int, *, inside_s: float | None = None, size: int = 2, **who: Any) -> RankTotals:
    """A rank that lives and is at collective 7 of a group of all: inside for so long, or not there yet."""
    book = aggregate.open(f"ring-{number}-{who}", identity(rank=number, world_size=size, **who))
    book.learn([group_entry(0, tuple(range(size)), "world", group_id="w")])
    book.last_seq[0], book.heartbeat_ns = 6, NOW
    if inside_s is not None:
        fields = operation(start_ns=0, end_ns=0, launch_ns=NOW - int(inside_s * S), seq=7)
        book.in_flight = [ev.Record._make((1, *fields, 1))]
    return book


@pytest.mark.parametrize(
    ("later", "in_flight", "is_latest"),
    [
        ([], [], True),
        ([operation(start_ns=NOW - 5 * S, launch_ns=NOW - 9 * S, end_ns=NOW - 3 * S, seq=8)], [], True),
        ([operation(start_ns=NOW - 3 * S, end_ns=NOW - 2 * S, seq=8)], [], False),
        ([mark(1, NOW - 2 * S)], [], False),
        ([], [operation(start_ns=0, end_ns=0, launch_ns=NOW - S, seq=8)], False),
        ([], [operation(start_ns=0, end_ns=0, launch_ns=NOW - 9 * S, seq=8)], True),
    ],
)
def test_latest_error(later: list[tuple[int, ...]], in_flight: list[tuple[int, ...]], is_latest: bool) -> None:
    """An error is the latest thing that a rank did until it begins another operation, or ends a step."""
    totals = rank(JobTable(), 0)
    raised = operation("recv", start_ns=NOW - 6 * S, end_ns=NOW - 4 * S, peer=1, flags=ev.FAILED)
    ingest_records(totals, packed(raised, *later))
    totals.in_flight = [ev.Record._make((1, *fields, 1)) for fields in in_flight]
    (failed,) = view("job", totals, NOW).failed
    assert (failed.op, failed.peer, failed.is_latest) == ("recv", 1, is_latest)


@pytest.mark.parametrize(
    ("flags", "queued", "waited_s"), [(ev.ON_DEVICE, True, None), (ev.ON_DEVICE | ev.BLOCKED, False, 3.0)]
)
def test_in_flight_on_a_gpu(flags: int, queued: bool, waited_s: float | None) -> None:
    """On a GPU an operation is queued until the GPU reaches it, and pending, with its age, from there on."""
    totals = rank(JobTable(), 0)
    reached_ns = 0 if queued else NOW - 3 * S
    fields = operation(start_ns=reached_ns, end_ns=0, launch_ns=NOW - 60 * S, seq=7, flags=flags)
    totals.in_flight = [ev.Record._make((1, *fields, 1))]
    (op,) = view("job", totals, NOW).in_flight
    assert (op.queued, op.waited_s, op.age_s) == (queued, waited_s, 60.0)
    assert [record.begun_ns for record in totals.pending()] == ([] if queued else [reached_ns])


def test_quiet() -> None:
    """A rank is quiet since its latest operation or step ended; its longest pause before may lie between two readings, or within one."""
    totals = rank(JobTable(), 0)
    assert (view("job", totals, NOW).quiet_s, view("job", totals, NOW).longest_quiet_s) == (None, None)
    ends = [NOW - seconds * S for seconds in (60, 59, 50)]
    ingest_records(totals, packed(operation(start_ns=ends[0], end_ns=ends[0], seq=1)))
    assert (view("job", totals, NOW).quiet_s, view("job", totals, NOW).longest_quiet_s) == (60.0, None)
    ingest_records(totals, packed(*(operation(start_ns=end, end_ns=end, seq=2) for end in ends[1:])))
    assert (view("job", totals, NOW).quiet_s, view("job", totals, NOW).longest_quiet_s) == (50.0, 9.0)
    ingest_records(totals, packed(mark(1, NOW - 20 * S)))
    assert (view("job", totals, NOW).quiet_s, view("job", totals, NOW).longest_quiet_s) == (20.0, 30.0)
    lost(totals)
    assert (view("job", totals, NOW).quiet_s, view("job", totals, NOW).longest_quiet_s) == (None, None)


def test_latest_step() -> None:
    """A rank has the number of the latest step that it has ended, also after its end; one that marks none has none."""
    totals = rank(JobTable(), 0)
    ingest_records(totals, packed(operation(start_ns=NOW - 9 * S, end_ns=NOW - 9 * S)))
    assert view("job", totals, NOW).step is None
    ingest_records(totals, packed(*(mark(number, NOW - (9 - number) * S) for number in range(1, 7))))
    assert view("job", totals, NOW).step == 6
    lost(totals)
    assert view("job", totals, NOW).step == 6


def lost(book: RankTotals, properly: bool = False, gone_ns: int = NOW) -> None:
    """What the intake writes down of a rank that lives no more."""
    book.alive, book.closed_properly, book.gone_ns = False, properly, gone_ns


def scraped(aggregate: JobTable, metric: str, *told: Verdict) -> Found:
    """The series of one metric, by the values of its labels as docs/metrics.md orders them."""
    registry = CollectorRegistry()
    registry.register(Exporter(aggregate, threading.RLock(), lambda: NOW, list))
    jobs = {name: KnownJob("", 4, ended=False) for name in ("job", *aggregate.jobs)}
    here = Evidence(NOW / 1e9, jobs, [*judged_now(aggregate.jobs.values(), NOW), *told])
    watch = IncidentWatch(Plan(table()), lambda now, now_s: here, "here", wall=lambda: NOW / 1e9)
    watch.tick()
    registry.register(watch)
    families = [family for family in registry.collect() if family.name == f"commwatch_{metric}"]
    return {tuple(sample.labels.values()): sample.value for family in families for sample in family.samples}


def test_rank_up() -> None:
    """A rank is up while it lives, down once it was lost, and not there once it has ended properly."""
    aggregate = JobTable()
    rank(aggregate, 0)
    lost(rank(aggregate, 1))
    lost(rank(aggregate, 2), properly=True)
    assert scraped(aggregate, "rank_up") == {("job", "0"): 1, ("job", "1"): 0}


def test_rank_up_is_of_the_latest_life() -> None:
    """A rank that was lost before a restart, or in an earlier run of the same name, is not missing in the new one."""
    elastic = JobTable()
    for number in (0, 1):
        lost(rank(elastic, number))
    rank(elastic, 0, restart=1)
    assert scraped(elastic, "rank_up") == {("job", "0"): 1}
    again = JobTable()
    for number in (0, 1, 2):
        lost(rank(again, number, started_ns=0), gone_ns=50 * S)
    rank(again, 0, started_ns=60 * S)
    assert scraped(again, "rank_up") == {("job", "0"): 1}
    lost(rank(again, 1, started_ns=61 * S), gone_ns=70 * S)
    assert scraped(again, "rank_up") == {("job", "0"): 1, ("job", "1"): 0}


def test_name_used_again_after_restarts() -> None:
    """A job that is started anew counts its restarts from 0: it is the latest life, with its own size, whatever count the earlier one had."""
    aggregate = JobTable()
    for number in (0, 1):
        lost(rank(aggregate, number, restart=2, started_ns=0), gone_ns=50 * S)
    for number in (0, 1, 2):
        rank(aggregate, number, size=3, started_ns=60 * S)
    lost(rank(aggregate, 3, size=4, started_ns=61 * S), gone_ns=70 * S)
    assert scraped(aggregate, "rank_up") == {("job", str(number)): number < 3 for number in range(4)}
    assert scraped(aggregate, "job_info") == {("job", "4", "0", "", "", ""): 1}
    job = aggregate.jobs["job"]
    assert {(each.rank, each.restart) for each in ranks([job], NOW)} == {(number, 0) for number in range(4)}
    now = node_now(job, {}, [], NOW)
    assert (now.world_size, now.restarts, len(now.ranks)) == (4, 0, 4)


def test_verdict_of_a_lost_rank() -> None:
    """A verdict is as old as the longest wait; the culprit is a label. Without a problem there is no verdict."""
    aggregate = JobTable()
    rank(aggregate, 0, inside_s=70)
    other = rank(aggregate, 1)
    assert scraped(aggregate, "verdict_seconds") == {("job", "world", "w", "stalled", "1"): 70}
    lost(other)
    assert scraped(aggregate, "verdict_seconds") == {("job", "world", "w", "hang", "1"): 70}
    well = JobTable()
    for number in (0, 1):
        rank(well, number, inside_s=0.1)
    assert scraped(well, "verdict_seconds") == {}


def test_straggler() -> None:
    """A straggler is exported as well."""
    aggregate = JobTable()
    for number, took_ms in ((0, 60), (1, 10)):
        ends = [(seq, NOW - S + seq * 100 * MS) for seq in range(-90, 10)]
        made = [operation(start_ns=end - took_ms * MS, end_ns=end, seq=seq + 90) for seq, end in ends]
        ingest_records(rank(aggregate, number), b"".join(ev.RECORD.pack(n + 1, *m, n + 1) for n, m in enumerate(made)))
    assert list(scraped(aggregate, "verdict_seconds")) == [("job", "world", "w", "straggler", "1")]
    assert scraped(aggregate, "straggler_wait_ratio") == {("job", "world", "w", "1"): pytest.approx(0.5)}


def verdict(since_s: float, ranks: list[int], group_id: str = "w") -> Verdict:
    """What NCCL's RAS might say."""
    return Verdict("hang", "dead", "job", group_id, "world", 7, "all_reduce", ranks, [], since_s, "", "ras")


def test_verdicts_are_bounded() -> None:
    """At most 16 verdicts have series, the oldest, and 8 ranks of each; one that names no rank has an empty label."""
    many = [verdict(n, list(range(100)), f"g{n}") for n in range(MOST_VERDICTS + 5)]
    found = scraped(JobTable(), "verdict_seconds", *many)
    assert len(found) == MOST_VERDICTS * MOST_RANKS
    assert min(found.values()) == 5
    assert {labels[-1] for labels in found} == {str(number) for number in range(8)}
    assert scraped(JobTable(), "verdict_seconds", verdict(9, [])) == {("job", "world", "w", "hang", ""): 9}


def test_two_verdicts_alike() -> None:
    """If two sources give the same verdict, it counts once, since the earlier begin."""
    found = scraped(JobTable(), "verdict_seconds", verdict(30, [1]), verdict(3, [1]), verdict(8, [1, 2], "v"))
    assert found == {
        ("job", "world", "w", "hang", "1"): 30,
        ("job", "world", "v", "hang", "1"): 8,
        ("job", "world", "v", "hang", "2"): 8,
    }


def test_before_the_first_operation(tmp_path: Path) -> None:
    """A rank that waits in ``init_process_group`` has no heartbeat yet, and is not called silent; one that died there ended then, and has not come."""
    with agent(tmp_path) as running, ExitStack() as stack:
        about: dict[str, Any] = {"wall_offset_ns": time.time_ns() - time.monotonic_ns()}
        trainers = [
            stack.enter_context(
                Trainer(
                    rings_of(tmp_path) / f"job.r0.{number}.ring",
                    identity(rank=number, started_ns=time.monotonic_ns(), **about),
                )
            )
            for number in range(2)
        ]
        for trainer in trainers:
            trainer.call("outside", [(time.monotonic_ns(), 1, 0, ring.INIT, "")])

        def now() -> list[tuple[Any, ...]]:
            about = ("state", "heartbeat_age_s", "begun")
            return [(*(each[name] for name in about), len(each["outside"])) for each in running.get("/api/v1/ranks")]

        waiting = ("running", None, {"init_process_group": 1}, 1)
        wait_for(lambda: now() == [waiting] * 2, "the ranks")
        trainers[1].kill()
        wait_for(lambda: now() == [waiting, ("gone", None, {}, 0)], "its end")
        assert running.get("/api/v1/ranks")[1]["ended_at"] == pytest.approx(time.time(), abs=60)
        (verdict,) = wait_for(lambda: running.get("/api/v1/verdicts"), "the verdict")
        assert (verdict["kind"], verdict["cause"], verdict["ranks"]) == ("init_incomplete", "dead", [1])


def test_agent_tells_of_a_killed_rank(tmp_path: Path) -> None:
    """With real processes: a killed rank is down and to blame in /metrics as at /api/v1/verdicts; one that ended is not there."""
    with agent(tmp_path) as running, ExitStack() as stack:
        about: dict[str, Any] = {"wall_offset_ns": time.time_ns() - time.monotonic_ns(), "world_size": 3}
        names = group_entry(0, (0, 1), "pair", group_id="p")
        ranks = []
        for number in range(3):
            who = identity(rank=number, started_ns=time.monotonic_ns(), **about)
            ranks.append(stack.enter_context(Trainer(rings_of(tmp_path) / f"job.r0.{number}.ring", who)))
            ranks[-1].call("name", [(names,)])

        def ups() -> list[float | None]:
            found = running.samples()
            return [found.get(f'commwatch_rank_up{{job_id="job",rank="{number}"}}') for number in range(3)]

        wait_for(lambda: ups() == [1, 1, 1], "the ranks")
        ranks[0].call("begin", [operation(start_ns=0, end_ns=0, launch_ns=time.monotonic_ns(), seq=7)])
        ranks[1].kill()
        ranks[2].call("close", [(time.monotonic_ns(),)])
        wait_for(lambda: ups() == [1, 0, None], "the killed and the ended rank")
        labels = 'group="pair",group_id="p",job_id="job",kind="hang",rank="1"'
        for_s = wait_for(lambda: running.samples().get(f"commwatch_verdict_seconds{{{labels}}}"), "the verdict")
        (told,) = running.get("/api/v1/verdicts?job=job")
        assert (told["kind"], told["cause"], told["ranks"]) == ("hang", "dead", [1])
        assert told["since_s"] == pytest.approx(for_s, abs=30)
        ranks[0].call("end", [(slot,) for slot in range(ring.IN_FLIGHT_SLOTS)])
        wait_for(
            lambda: not any(name.startswith("commwatch_verdict") for name in running.samples()), "the verdict to go"
        )


def broadcast(root: int, seq: int = 7, ago_s: float = 5.0, **more: int) -> tuple[int, ...]:
    """A broadcast that has ended."""
    end_ns = NOW - int(ago_s * S)
    return operation("broadcast", start_ns=end_ns - MS, end_ns=end_ns, seq=seq, peer=root, **more)


def test_ended_while_others_are_inside() -> None:
    """What a rank passed to a collective that it has ended is shown while another rank is inside that, or has lately raised in it, and named
    if it differs.
    """
    aggregate = JobTable()
    waits, ended = rank(aggregate, 0, inside_s=4.0), rank(aggregate, 1)
    ingest_records(waits, packed(broadcast(0, seq=6)))
    unused = [
        broadcast(0, seq=5, flags=ev.FAILED),
        broadcast(0, flags=ev.UNALIGNED),
        broadcast(0, seq=6),
        mark(7, NOW - S),
    ]
    ingest_records(ended, packed(*unused, broadcast(1), operation("send", start_ns=1, end_ns=NOW, peer=0, seq=7)))
    jobs = aggregate.jobs.values()
    (of_first, of_second) = ranks(jobs, NOW)
    assert [(each.op, each.seq, each.root, each.ago_s) for each in of_second.ended] == [("broadcast", 7, 1, 5.0)]
    assert of_first.ended == []
    (verdict,) = judged_now(jobs, NOW)
    assert (verdict.cause, verdict.ranks) == ("ops", [0, 1])
    waits.in_flight = []
    assert [each.ended for each in ranks(jobs, NOW)] == [[], []]
    ingest_records(waits, packed(broadcast(0, flags=ev.FAILED)))
    (verdict,) = judged_now(jobs, NOW)
    assert (verdict.cause, verdict.ranks, verdict.seq) == ("root", [0, 1], 7)
    assert [each.ended for each in ranks(jobs, NOW + 60 * S)] == [[], []]


def test_ended_long_before() -> None:
    """What a rank passed is known also after it has made more operations in other groups than its latest records hold."""
    aggregate = JobTable()
    rank(aggregate, 0, inside_s=40.0)
    ended = rank(aggregate, 1)
    ended.learn([group_entry(1, (1, 2), "other", group_id="o")])
    later = [operation(start_ns=NOW - 9 * S, end_ns=NOW - 8 * S, seq=number, group=1) for number in range(400)]
    ingest_records(ended, packed(broadcast(1, ago_s=30.0), *later))
    (passed,) = (each for each in ranks(aggregate.jobs.values(), NOW)[1].ended if each.group_id == "w")
    assert (passed.op, passed.seq, passed.root, passed.size_bytes, passed.ago_s) == ("broadcast", 7, 1, 4096, 30.0)


def test_split_sizes() -> None:
    """What a rank sends and expects in an all_to_all is shown once it has been inside for 2 s, has raised in it, or has ended it before others."""
    aggregate = JobTable()
    area = bytearray(splits.AREA_BYTES)
    for number, seq, sends in ((1, 6, (5, 6)), (2, 7, (8, 9))):
        splits.note(area, 0, number, (0, seq), splits.Splits(sends, (3, 4)))
    inside, before, raised, ended = (rank(aggregate, number, size=4) for number in range(4))
    for each in (inside, before, raised, ended):
        each.hold_splits(bytes(area))
    for each, age_s in ((inside, 4), (before, 1)):
        fields = operation("all_to_all", start_ns=0, end_ns=0, launch_ns=NOW - age_s * S, seq=7)
        each.in_flight = [ev.Record._make((1, *fields, 1))]
    over = {"start_ns": NOW - 4 * S, "end_ns": NOW - 3 * S}
    ingest_records(raised, packed(operation("all_to_all", seq=6, flags=ev.FAILED, **over)))
    ingest_records(ended, packed(*(operation("all_to_all", seq=seq, **over) for seq in (6, 7))))
    views = ranks(aggregate.jobs.values(), NOW)
    every: list[list[InFlight | Failed | Ended]] = [[*view.in_flight, *view.failed, *view.ended] for view in views]
    shown = [[(each.seq, each.sends, each.expects) for each in of_rank] for of_rank in every]
    both = [(6, [5, 6], [3, 4]), (7, [8, 9], [3, 4])]
    assert shown == [[both[1]], [(7, None, None)], [both[0]], both]


def test_ended_in_a_group_over_several_nodes() -> None:
    """An agent shows its ranks' latest collectives of a group with ranks elsewhere, which may be inside them, once that group is quiet."""
    here, there = JobTable(), JobTable()
    ingest_records(rank(here, 1), packed(*(broadcast(1, seq, ago_s=12.0 - seq) for seq in range(8))))
    rank(there, 0, inside_s=4.0)
    passed = ranks(here.jobs.values(), NOW)
    assert [each.seq for each in passed[0].ended] == [4, 5, 6, 7]
    assert ranks(here.jobs.values(), NOW - 4 * S)[0].ended == []
    both = [*passed, *ranks(there.jobs.values(), NOW)]
    (verdict,) = verdicts(both, groups([*here.jobs.values(), *there.jobs.values()]))
    assert (verdict.cause, verdict.seq, verdict.ranks) == ("ops", 7, [0, 1])


def test_raised_with_another_root() -> None:
    """Of an operation that raised, the root is known."""
    totals = rank(JobTable(), 0)
    ingest_records(totals, packed(broadcast(1, flags=ev.FAILED)))
    (failed,) = view("job", totals, NOW).failed
    assert (failed.root, failed.peer) == (1, None)
