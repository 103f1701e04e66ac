"""Communication by period, for the comparison of ranks on different nodes."""

from __future__ import annotations

import pytest

from commwatch.wire import events as ev
from commwatch.wire.modes import COUNTERS, FULL
from commwatch_agent.ingest.batches import ingest_records
from commwatch_agent.ingest.jobs import JobTable
from commwatch_agent.ingest.periods import Periods
from commwatch_agent.ingest.rank_totals import RankTotals
from tests.helpers import MS, group_entry, identity, mark, operation, packed

S = 1000 * MS


def book() -> RankTotals:
    """The totals of a rank whose group has a second rank elsewhere."""
    made = JobTable().open("ring", identity(rank=0, world_size=2))
    made.learn([group_entry(0, (0, 1), "world", group_id="w")])
    return made


def sums(periods: Periods) -> tuple[int, float, float, float]:
    """How many, and seconds, communication and its squares in all."""
    return periods.count, periods.duration_ns / 1e9, periods.comm_ns / 1e9, periods.comm_squares


def tick(book: RankTotals, now_s: float) -> None:
    """One pass of the agent."""
    book.tick(int(now_s * 1e9) + book.offset_ns)


def train(book: RankTotals, ends_s: list[float], unknown: int | None = None) -> None:
    """Steps that end so, each with 30 ms of communication, or in one case with some of unknown duration."""
    for seq, end_s in enumerate(ends_s):
        at = round(end_s * 1e9)
        known = seq != unknown
        end_ns, flags = (at - 10 * MS, 0) if known else (at - 40 * MS, ev.UNTIMED)
        ingest_records(
            book, packed(operation(start_ns=at - 40 * MS, end_ns=end_ns, seq=seq, flags=flags), mark(seq, at))
        )
    book.steps.finish()
    tick(book, 20)


def test_steps() -> None:
    """Where steps are marked each is a period, however long it is."""
    made = book()
    train(made, [3.0, *(3.0 + 0.3 * n for n in range(1, 11)), 9.0])
    assert sums(made.steps.periods) == pytest.approx((11, 6.0, 11 * 0.03, 11 * 0.03**2))


def test_short_steps() -> None:
    """Short steps are put together until they take 250 ms; where the communication of one is not known, its period is left out."""
    made = book()
    train(made, [3.0 + 0.1 * n for n in range(13)])
    assert sums(made.steps.periods) == pytest.approx((4, 1.2, 12 * 0.03, 4 * 0.09**2))
    made = book()
    train(made, [3.0 + 0.1 * n for n in range(14)], unknown=5)
    assert sums(made.steps.periods) == pytest.approx((3, 0.9, 9 * 0.03, 3 * 0.09**2))


def test_seconds() -> None:
    """Where no steps are marked each whole second is a period, two seconds later; communication is in it as far as it lies there."""
    made = book()
    ingest_records(
        made, packed(*(operation(start_ns=n * S // 2, end_ns=n * S // 2 + 200 * MS, seq=n) for n in range(1, 21)))
    )
    tick(made, 5.5)
    assert sums(made.steps.periods) == pytest.approx((2, 2, 0.8, 2 * 0.16))
    tick(made, 8.0)
    assert sums(made.steps.periods) == pytest.approx((5, 5, 2.0, 5 * 0.16))
    tick(made, 8.5)
    assert made.steps.periods.count == 5


def test_in_flight() -> None:
    """No second is counted before the operations in flight in it have ended: they would be missing."""
    made = book()
    ingest_records(made, packed(operation(start_ns=S, end_ns=S + 500 * MS, seq=1)))
    made.in_flight = [ev.Record._make((0, *operation(start_ns=2 * S + 500 * MS, end_ns=0, seq=2), 0))]
    tick(made, 20)
    assert made.steps.periods.count == 0
    made.in_flight = []
    ingest_records(made, packed(operation(start_ns=2 * S + 500 * MS, end_ns=20 * S, seq=2)))
    tick(made, 23)
    assert sums(made.steps.periods) == pytest.approx((20, 20, 18.0, 17 + 2 * 0.5**2))


def test_unknown() -> None:
    """A second in which an operation has no known end is no period."""
    made = book()
    ingest_records(made, packed(operation(start_ns=S, end_ns=S + 100 * MS, seq=1)))
    ingest_records(made, packed(operation(start_ns=2 * S + 1, end_ns=2 * S + 1, seq=2, flags=ev.UNTIMED)))
    ingest_records(made, packed(operation(start_ns=3 * S, end_ns=3 * S + 300 * MS, seq=3)))
    tick(made, 6)
    assert sums(made.steps.periods) == pytest.approx((2, 2, 0.4, 0.1))


def test_long_silence() -> None:
    """After a silence the latest minute is counted, not hours of nothing."""
    made = book()
    ingest_records(made, packed(operation(start_ns=S, end_ns=S + 100 * MS, seq=1)))
    tick(made, 10_000)
    assert made.steps.periods.count == 60
    tick(made, 10_001)
    assert made.steps.periods.count == 61


def test_shed() -> None:
    """Seconds in which the rank only counts its operations are no periods, nor are those before it was found to record all again."""
    made = book()
    ingest_records(
        made, packed(*(operation(start_ns=n * S, end_ns=n * S + 500 * MS, seq=n, size=1 << n) for n in range(1, 40)))
    )
    tick(made, 12)
    assert sums(made.steps.periods) == pytest.approx((9, 9, 4.5, 9 * 0.25))
    made.mode, made.mode_since_ns = COUNTERS, 10 * S
    tick(made, 22)
    assert made.steps.periods.count == 9
    made.mode, made.mode_since_ns = FULL, 30 * S
    tick(made, 36)
    assert made.steps.periods.count == 9 + 4


def test_lost() -> None:
    """Seconds before records were found to be lost are no periods."""
    made = book()
    ingest_records(made, packed(operation(start_ns=S, end_ns=S + 500 * MS, seq=1)))
    made.lost = 7
    tick(made, 30)
    assert made.steps.periods.count == 0
    ingest_records(made, packed(operation(start_ns=31 * S, end_ns=31 * S + 500 * MS, seq=2)))
    tick(made, 35)
    assert sums(made.steps.periods) == pytest.approx((3, 3, 0.5, 0.25))


def test_no_communication() -> None:
    """A rank that has not communicated has no periods."""
    made = book()
    tick(made, 100)
    assert made.steps.periods.count == 0
