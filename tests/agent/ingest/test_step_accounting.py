"""Shares of steps: what counts as a step like others, and when there is a share at all."""

from __future__ import annotations

import threading
from dataclasses import replace
from itertools import accumulate
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from commwatch.wire import events as ev
from commwatch.wire.numbers import NUMBERS
from commwatch_agent.analysis.time_buckets import slots_of
from commwatch_agent.ingest import step_accounting
from commwatch_agent.ingest.step_accounting import (
    StepAccounting,
    StepTotals,
    comm_share,
    exposed_share,
    of_known,
    total,
)
from commwatch_agent.ingest.stragglers import LEAST_PERIODS
from commwatch_agent.model.cells import SHARE_WINDOW_NS, StepRecord
from commwatch_agent.model.views import StepView
from commwatch_agent.prometheus.exporter import Exporter
from commwatch_agent.report import report, report_text
from tests.helpers import MS, Trainer, Watch, examples, group_entry, identity, mark, operation, write_ring

S = 1000 * MS


def stepped(*durations_ms: float, comm: float = 0.2) -> StepAccounting:
    """A rank whose steps took so long, a part of each in communication; the first mark is at 1 s."""
    book = StepAccounting()
    ends = list(accumulate((int(ms * MS) for ms in durations_ms), initial=S))
    for seq, end in enumerate(ends):
        if seq:
            start = ends[seq - 1]
            book.busy("data").add(start, start + int(comm * (end - start)))
        book.mark(record(seq, end))
    return book


def record(seq: int, end_ns: int) -> ev.Record:
    return ev.Record._make((seq + 1, *mark(seq, end_ns), seq + 1))


def test_waits_that_are_seen_late() -> None:
    """What a GPU waited in a step, but was seen in the next one, counts in the next one; on the CPU nothing is seen late."""
    for source, exposed in ((ev.BY_EVENTS, [0, 20, 20, 20]), (ev.BY_NONE, [0, 20, 10, 10])):
        book = StepAccounting()
        for seq, waited in enumerate((0, 0, 40, 10, 10)):
            end = S + seq * 100 * MS
            book.busy("data").add(end - 20 * MS, end)
            fields = mark(seq, end, exposed_ns=waited * MS, exposed_by=source)
            book.mark(ev.Record._make((seq + 1, *fields, seq + 1)))
        book.end()
        assert book.exposed_source == ev.EXPOSED_SOURCES[source]
        found = {step.seq: step.exposed_ns for step in book.take()}
        assert [(found[seq] or 0) // MS for seq in range(1, 5)] == exposed


def share(book: StepAccounting, now_ns: int) -> float:
    """The comm share; nothing is known of exposure here."""
    shares = book.totals.shares(now_ns)
    assert shares is not None
    assert shares[1] is None
    return shares[0]


def long_ones(book: StepAccounting) -> list[int]:
    """Numbers of the long steps, as the store would know them in the end."""
    last = {step.seq: step.long for step in book.take()}
    return [seq for seq, long in last.items() if long]


@pytest.mark.parametrize(
    ("durations", "long"),
    [
        ([100] * 10, []),
        ([5000] + [100] * 9, [1]),  # the first step compiles
        ([100] * 9 + [5000, 100], [10]),  # a checkpoint
        ([100] * 3 + [900] + [100] * 6, [4]),  # among the first
        ([100, 100, 100, 5000], []),  # too few to tell
        ([100, 250] * 10, []),  # a loop of two kinds of steps is no trouble
        ([10 * 1.05**n for n in range(30)], []),  # growing steadily
    ],
    ids=["alike", "warm-up", "checkpoint", "early", "few", "alternating", "growing"],
)
def test_long_steps(durations: list[float], long: list[int]) -> None:
    """A step is long if it took over three times the median of those before it; the first ones, of the first six."""
    book = stepped(*durations)
    assert long_ones(book) == long
    assert book.totals.long == len(long)
    assert book.totals.count == len(durations)


def test_long_steps_do_not_poison_the_share() -> None:
    """The rolling share leaves long steps out: a checkpoint without communication does not hide 40%."""
    book = stepped(*[100] * 20, comm=0.4)
    now = S + 20 * 100 * MS
    book.mark(record(21, now + 30 * S))
    assert share(book, now + 30 * S) == pytest.approx(0.4)
    assert (book.totals.comm_ns or 0) / book.totals.duration_ns < 0.05


def test_steps_that_take_on_are_taken_on() -> None:
    """Where steps become longer for good, only the first of them are long."""
    book = stepped(*[100] * 40, *[500] * 40)
    assert long_ones(book) == list(range(41, 41 + 5))


@pytest.mark.parametrize("each", [3, 5, 8, 10, 12, 13, 20])
def test_steps_that_are_long_regularly(each: int) -> None:
    """Steps that take longer in more than one of twelve are part of the training, and in its shares; a checkpoint that is rarer is not."""
    number = 400
    durations = [100 if (n + 1) % each else 1000 for n in range(number)]
    book = stepped(*durations)
    every = [n for n in range(1, number + 1) if n % each == 0]
    assert long_ones(book) == (every[:5] if each < 12 else every)


def test_steps_that_are_rare_again() -> None:
    """Steps that were long often, and are now rare, are long again."""
    often = [100 if (n + 1) % 5 else 1000 for n in range(200)]
    book = stepped(*often, *[100] * 59, 1000, *[100] * 20)
    assert long_ones(book) == [5, 10, 15, 20, 25, 260]


def test_long_steps_of_a_report(tmp_path: Path) -> None:
    """Steps and long steps of a report are in one unit: those of a rank, of which several ranks have as many."""
    watch = Watch(tmp_path)
    for rank in (0, 1):
        ends = [n * 100 * MS + (5 * S if n > 10 else 0) for n in range(20)]
        ring = write_ring(tmp_path / "rings", [mark(n, end) for n, end in enumerate(ends)], rank=rank)
        ring.close(30 * S)
        ring.release()
    watch.tick(31 * S)
    made = report.build(watch.agent, "job", watch.agent.path, "again")
    assert made is not None
    assert made.long_steps is not None
    assert (made.steps, made.long_steps.count, made.long_steps.longest_seq) == (19, 1, 11)
    assert made.long_steps.seconds == made.long_steps.longest_s == pytest.approx(5.1)
    assert dict(report_text.headlines(made))["long steps"].startswith(
        "1 on one rank, over three times as long as the steps near them, the longest 5.10 s, number 11 of rank 0"
    )


def test_share_needs_steps() -> None:
    """There is no share of fewer than three steps, nor once a rank has not stepped for a minute and three of its steps."""
    assert stepped().totals.shares(S) is None
    assert stepped(100, 100).totals.shares(S) is None
    book = stepped(100, 100, 100)
    end = book.totals.recent[-1].end_ns
    assert share(book, end) == pytest.approx(0.2)
    assert book.totals.shares(end + SHARE_WINDOW_NS) is not None
    assert book.totals.shares(end + SHARE_WINDOW_NS + 1) is None
    slow = stepped(*[100_000] * 4)
    end = slow.totals.recent[-1].end_ns
    assert share(slow, end + 299 * S) == pytest.approx(0.2)
    assert slow.totals.shares(end + 301 * S) is None


def test_window() -> None:
    """The share is that of the steps of the last minute, and at least of as many as show who is late: five periods, and the two before."""
    book = stepped(*[100] * 700)
    assert 600 <= len(book.totals.recent) <= 602
    assert len(stepped(*[100_000] * 20).totals.recent) == LEAST_PERIODS + 2


seconds = st.integers(0, 30)
some_steps = st.lists(
    st.tuples(seconds, st.none() | seconds, st.none() | seconds, st.booleans(), st.integers(0, 7)), max_size=40
)


@examples(150)
@given(some_steps, st.integers(6, 12))
def test_shares_are_those_of_the_usual_steps(
    steps: list[tuple[int, int | None, int | None, bool, int]], most: int
) -> None:
    """The shares are the sums over the recent steps without long ones, also after steps were dropped, or found to be long."""
    totals = StepTotals()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(step_accounting, "MOST_RECENT", most)
        end, added = 0, list[StepRecord]()
        for seq, (length, comm, exposed, long, back) in enumerate(steps):
            step = StepRecord(seq, end, end + length * S, comm, exposed, long=long)
            end = step.end_ns
            totals.add(step)
            added.append(step)
            if 0 < back <= len(added) and not added[-back].long:  # it may be one that was dropped
                totals.lengthened(added[-back])
                added[-back] = added[-back]._replace(long=True)
            usual = [each for each in totals.recent if not each.long]
            expected = step_accounting.sums_of(usual).shares() if len(usual) >= step_accounting.LEAST_STEPS else None
            assert totals.shares(end) == expected


def test_parts_of_steps() -> None:
    """A share of steps together is their parts over their time; of no steps, of unknown parts, or of no time there is none."""
    step = StepView("job", 0, 1, 0.0, 2.0, 2.0, 0.0, None, None, None, {}, None, long=False)
    other = replace(step, duration_s=6.0, comm_s=2.0, exposed_s=1.0)
    assert (total([0.0, 2.0]), total([0.0]), total([]), total([1.0, None])) == (2.0, 0.0, None, None)
    assert (total([1.0] * 99 + [None]), total([1.0] * 98 + [None])) == (99.0, None)
    assert (comm_share([step, other]), comm_share([step]), comm_share([])) == (0.25, 0.0, None)
    assert exposed_share([step, other]) is None
    assert exposed_share([other]) == 1 / 6
    assert exposed_share([*[other] * 9, replace(step, comm_s=0.5)]) == 1 / 6  # one in ten is not known
    assert exposed_share([*[other] * 8, replace(step, comm_s=0.5)]) is None
    assert comm_share([replace(other, duration_s=0.0)]) is None


def test_share_of_some_ranks() -> None:
    """If the share of one rank is unknown, the share of the other ranks and their number are returned."""
    known = StepView("job", 0, 1, 0.0, 2.0, 2.0, 0.5, 0.5, 0.25, 0.25, {}, None, long=False)
    steps = [[known], [replace(known, rank=1)], [replace(known, rank=2, exposed_s=None, exposed_share=None)]]
    assert of_known(steps, comm_share) == (0.25, 3)
    assert of_known(steps, exposed_share) == (0.125, 2)
    assert of_known([], comm_share) == (None, 0)


def test_operations_without_times(tmp_path: Path) -> None:
    """The share of a step is unknown, and never 0, if the ends of its collectives were not seen, as on NCCL by default."""
    watch = Watch(tmp_path)
    with Trainer(watch.rings / "job.r0.0.ring", identity(world_size=1)) as trainer:
        trainer.call("name", [(group_entry(0, (0, 1), "dp"),)])
        trainer.write([mark(0, 0, exposed_ns=0)])
        for n in range(10):
            at = n * 100 * MS
            known = operation(start_ns=at + MS, end_ns=at + 41 * MS, seq=2 * n)
            unseen = operation(start_ns=at + 50 * MS, end_ns=at + 50 * MS, seq=2 * n + 1, flags=ev.UNTIMED)
            trainer.write([known, *([unseen] if n >= 6 else []), mark(n + 1, at + 100 * MS, exposed_ns=30 * MS)])
            watch.tick(at + 100 * MS)
        steps = watch.agent.steps(0, 1 << 62, "job", None, 100)[::-1]
        assert [step.comm_s for step in steps] == [pytest.approx(0.04)] * 6 + [None] * 4
        assert [(step.comm_share, step.exposed_s, step.group_shares) for step in steps[6:]] == [(None, None, {})] * 4
        exporter = Exporter(watch.aggregate, threading.RLock(), lambda: 1000 * MS, list)
        names = {sample.name for family in exporter.collect() for sample in family.samples}
        assert {"commwatch_steps_total", "commwatch_step_seconds_total"} <= names
        assert not names & {
            "commwatch_comm_share_ratio",
            "commwatch_step_comm_seconds_total",
            "commwatch_exposed_comm_share_ratio",
        }
        assert slots_of(watch.agent.slots(0, 1 << 62, "job")) == []
        said = report.build(watch.agent, "job", watch.path, "")
        assert said is not None
        assert "not known: 29% of the operations have no times; see docs/hooks.md" in report_text.text(said)


@pytest.mark.parametrize(
    ("seqs", "number"),
    [
        ([], None),
        ([7], 7),
        ([7, 8, 9, 11, 12], 12),  # one is missing
        ([884, 886, 888, 892, 890], 446),  # two optimizers
        ([NUMBERS - 2, NUMBERS - 1, 0, 1], 1),
    ],
)
def test_number_of_a_step(seqs: list[int], number: int | None) -> None:
    """A step of several optimizers counts once, although each of its marks has a number."""
    assert step_accounting.step_number(seqs) == number
