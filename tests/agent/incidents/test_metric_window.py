"""The last minutes of the metrics: what has grown, what was there, and how much is kept."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from commwatch_agent.incidents.metric_window import MOST_SNAPSHOTS, Labels, MetricWindow, by, labels_of, where
from tests.agent.incidents.metric_series import family
from tests.helpers import examples

TOTAL, RATIO = "commwatch_events_total", "commwatch_comm_share_ratio"
JOB: Labels = (("job_id", "j"),)
#: Samples of a counter, 15 s apart; ``None``: not there.
COUNTS = st.lists(st.one_of(st.none(), st.integers(0, 1000)), min_size=1, max_size=40)


def window(
    values: Sequence[float | None], name: str = TOTAL, every_s: float = 15.0, instance: str = ""
) -> MetricWindow:
    """A window with one series."""
    found = MetricWindow({TOTAL, RATIO}, instance)
    for step, value in enumerate(values):
        found.add(step * every_s, [] if value is None else [family(name, ({"job_id": "j"}, value))])
    return found


@given(COUNTS)
@examples(200)
def test_increase_is_what_was_counted(values: list[int | None]) -> None:
    """An increase is the sum of the steps up, where a counter that falls has counted from 0; it is never negative."""
    kept = [value for value in values[-21:] if value is not None]
    if values[-1] is None or len(kept) < 2:
        assert window(values).increase(TOTAL) == {}
    else:
        steps = [after - before if after >= before else after for before, after in pairwise(kept)]
        assert window(values).increase(TOTAL) == {JOB: sum(steps)}
        assert all(step >= 0 for step in steps)


@given(COUNTS, st.integers(0, 20))
@examples(100)
def test_longer_is_more(values: list[int | None], steps: int) -> None:
    """What a counter has grown by in a shorter time is at most what it has grown by in a longer one."""
    found = window(values)
    longer = found.increase(TOTAL, 300)
    assert all(growth <= longer[labels] for labels, growth in found.increase(TOTAL, 15.0 * steps).items())


def test_reset() -> None:
    """A counter that begins again has grown by what it shows since then, as in Prometheus."""
    assert window([5, 7, 0, 0]).increase(TOTAL) == {JOB: 2}
    assert window([5, 7, 3, 4, 1]).increase(TOTAL) == {JOB: 2 + 3 + 1 + 1}


def test_both_ends_count() -> None:
    """Five minutes are 21 snapshots: the oldest is the one of exactly then."""
    assert window(range(100)).increase(TOTAL) == {JOB: 20}
    assert window(range(100), every_s=15.1).increase(TOTAL) == {JOB: 19}
    assert window(range(100)).increase(TOTAL, 30) == {JOB: 2}


def test_rate() -> None:
    """A rate is per second of the time that the window covers: right after the start, and with snapshots a little late."""
    assert window([0, 30]).rate(TOTAL) == {JOB: 2}
    assert window([30 * step for step in range(40)]).rate(TOTAL) == {JOB: 2}
    assert window([151 * step for step in range(40)], every_s=15.1).rate(TOTAL)[JOB] == pytest.approx(10)
    assert window([0]).rate(TOTAL) == {}
    assert MetricWindow({TOTAL}).rate(TOTAL) == {}


def test_rate_of_a_new_series() -> None:
    """A series that is new is averaged over the time in which it was not there, as in Prometheus."""
    assert window([None] * 18 + [0, 15, 30]).rate(TOTAL) == {JOB: 0.1}


def test_rate_of_the_time_of_a_series() -> None:
    """The own rate of a series is of the time since it began, at most of so many seconds; that of a single sample is not known."""
    assert window([None] * 18 + [0, 15, 30]).own_rate(TOTAL, 60) == {JOB: 1}
    assert window([0] * 18 + [0, 15, 30]).own_rate(TOTAL, 60) == {JOB: 0.5}
    assert window([None] * 18 + [0]).own_rate(TOTAL, 60) == {}
    assert window([0, 15, None]).own_rate(TOTAL, 60) == {}


def test_mean() -> None:
    """A mean is that of the samples that there are."""
    assert window([1, None, 0, 1, 0], RATIO).mean(RATIO) == {JOB: 0.5}
    assert window([9] * 10 + [1] * 21, RATIO).mean(RATIO) == {JOB: 1}


def test_ended_series() -> None:
    """A series that is no longer there has no value, increase or mean, but is in the snapshots that had it."""
    found = window([1, 2, None])
    assert (found.latest(TOTAL), found.increase(TOTAL), found.mean(TOTAL)) == ({}, {}, {})
    assert list(found.snapshots(TOTAL)) == [{JOB: 1}, {JOB: 2}, {}]
    assert list(found.snapshots(TOTAL, 15)) == [{JOB: 2}, {}]


def test_ended_series_are_forgotten() -> None:
    """A series leaves the window five minutes after its last sample, and one that comes back later counts from there."""
    assert window([1] + [None] * 20).size == 1
    assert window([1] + [None] * 21).size == 0
    assert window([1] + [None] * 21 + [7, 9]).increase(TOTAL) == {JOB: 2}


def test_no_number() -> None:
    """A sample that is no finite number is absent: it is not known."""
    assert window([0.5, math.nan], RATIO).latest(RATIO) == {}
    assert window([0.5, math.inf, 0.7], RATIO).mean(RATIO) == {JOB: 0.6}


def test_labels() -> None:
    """Series have the label of their node, no empty labels, and are equal in any order of labels."""
    assert window([1], instance="a:9477").latest(TOTAL) == {(("instance", "a:9477"), *JOB): 1}
    assert labels_of({"b": "2", "a": "1", "c": ""}) == (("a", "1"), ("b", "2"))


def test_only_what_is_needed() -> None:
    """Other metrics are not kept, and to read one is an error."""
    found = window([1], "commwatch_other")
    assert found.size == 0
    with pytest.raises(KeyError):
        found.latest("commwatch_other")


def test_first_of_two() -> None:
    """Of two samples with equal labels in one snapshot, the first counts."""
    found = MetricWindow({TOTAL})
    found.add(0.0, [family(TOTAL, ({"job_id": "j"}, 1), ({"job_id": "j"}, 2))])
    found.add(15.0, [family(TOTAL, ({"job_id": "j"}, 3), ({"job_id": "j"}, 4))])
    assert found.increase(TOTAL) == {JOB: 2}


def test_order_of_time() -> None:
    """A snapshot that is not after the latest is refused, and so is a question about more time than is kept."""
    found = window([1, 2])
    for at_s in (15.0, 3.0):
        with pytest.raises(ValueError, match="comes after"):
            found.add(at_s, [])
    with pytest.raises(ValueError, match="301 s are asked for"):
        found.increase(TOTAL, 301)
    assert found.increase(TOTAL) == {JOB: 1}


def test_most_series() -> None:
    """Series beyond the limit are refused and counted; those that are known go on, and one that ends makes room for another."""
    found = MetricWindow({TOTAL, RATIO}, most_series=3)

    def add(at_s: float, *jobs: str) -> None:
        found.add(at_s, [family(name, *(({"job_id": job}, at_s) for job in jobs)) for name in (TOTAL, RATIO)])

    add(0.0, "a", "b")
    assert (found.size, found.refused) == (3, 1)
    add(15.0, "b", "a")
    assert (found.size, found.refused) == (3, 2)
    assert set(found.increase(TOTAL)) == {(("job_id", "a"),), (("job_id", "b"),)}
    add(330.0, "c")
    assert (found.size, found.refused) == (2, 2)


def test_most_snapshots() -> None:
    """Snapshots that come too fast push out old ones: memory is bounded, and the rate stays right."""
    found = window([step * 0.5 for step in range(300)], every_s=1.0)
    assert len(list(found.snapshots(TOTAL))) == MOST_SNAPSHOTS
    assert found.rate(TOTAL) == {JOB: 0.5}


def test_groups() -> None:
    """Series are grouped by labels that may be missing, and chosen by one that may be missing."""
    values = {labels_of({"job_id": "a", "rank": str(rank)}): float(rank) for rank in range(3)} | {(): 7.0}
    assert by(values, ["job_id"], sum) == {(("job_id", "a"),): 3, (): 7}
    assert where(values, "rank", lambda rank: rank != "1") == {
        labels_of({"job_id": "a", "rank": "0"}): 0,
        labels_of({"job_id": "a", "rank": "2"}): 2,
        (): 7,
    }
