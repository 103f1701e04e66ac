"""What a communication share means, in words."""

from __future__ import annotations

import pytest

from commwatch_agent.analysis.headline import awaited, bottleneck, of_some, split
from commwatch_agent.ingest.why_late import COMPUTES, IDLE, NO_CORE, QUOTA, THROTTLED


@pytest.mark.parametrize(
    ("comm", "exposed", "waiting", "messages", "says"),
    [
        (0.3, 0.3, None, None, ""),
        (None, None, None, None, ""),
        (0.52, 0.5, None, None, "above 30%; how much of it is waiting for late ranks is not known"),
        (0.52, 0.5, 0.0, None, "above 30%: communication is the bottleneck"),
        (0.37, 0.26, 0.16, None, "above 30% only because ranks wait for one another"),
        (0.37, 0.26, None, 0.16, "above 30% only because ranks wait for one another"),
        (0.52, 0.5, 0.15, 0.05, "above 30%: communication is the bottleneck"),
        (0.52, 0.05, 0.44, None, "above 30%, but hidden behind compute"),
        (
            0.52,
            0.5,
            0.44,
            None,
            "above 30%: late ranks are the bottleneck, not the network",
        ),
        (
            0.52,
            0.5,
            0.1,
            0.3,
            "above 30%: uneven stages or a late rank are more likely the cause than the network",
        ),
        (
            0.41,
            0.4,
            0.2,
            0.01,
            "above 30%: uneven stages or a late rank are more likely the cause than the network",
        ),
    ],
)
def test_bottleneck(
    comm: float | None, exposed: float | None, waiting: float | None, messages: float | None, says: str
) -> None:
    """Communication is the bottleneck only if its transfer alone is above 30%, and not hidden."""
    assert bottleneck(comm, exposed, waiting, messages) == says


@pytest.mark.parametrize(("late", "named"), [([2], "rank 2 is"), ([1, 3], "ranks 1, 3 are"), ([], "late ranks are")])
def test_bottleneck_is_named(late: list[int], named: str) -> None:
    """The stragglers are named also where the share has no split, for it was measured over another time."""
    assert split(0.37, 0.46, None, late) == ""
    assert bottleneck(0.37, 0.37, 0.46, None, late) == f"above 30%: {named} the bottleneck, not the network"


@pytest.mark.parametrize(
    ("why", "named"),
    [
        (NO_CORE, "rank 2, waiting for a CPU core, is"),
        (QUOTA, "rank 2, stopped by a CPU quota, is"),
        (THROTTLED, "rank 2, with a throttled GPU, is"),
        (COMPUTES, "rank 2 is"),
        ("", "rank 2 is"),
    ],
)
def test_bottleneck_has_the_reason(why: str, named: str) -> None:
    """If a late rank lacks CPU time or GPU clock, that is a part of the sentence about it."""
    assert bottleneck(0.5, 0.5, 0.46, None, [2], why=why) == f"above 30%: {named} the bottleneck, not the network"


def test_a_cause_comes_before_the_transfer() -> None:
    """A rank that lacks CPU time is named also where most of the communication is transfer, if the others wait for it a tenth of the time."""
    said = "above 30%: look first at rank 1, waiting for a CPU core"
    assert bottleneck(0.51, 0.5, 0.2, None, [1], why=NO_CORE) == said
    for waiting, late in ((0.05, [1]), (0.2, [])):
        assert bottleneck(0.51, 0.5, waiting, None, late, why=NO_CORE) == "above 30%: communication is the bottleneck"


def test_a_late_rank_comes_before_the_transfer() -> None:
    """Beside a rank for which the others wait a tenth of the time or more, communication is not called the bottleneck."""
    both = "above 30%: look first at rank 1, which is late; transfer alone is above 30%, too"
    assert bottleneck(0.64, 0.6, 0.32, None, [1], why=COMPUTES) == both
    assert bottleneck(0.37, 0.3, 0.16, None, [1, 2]) == "above 30%: look first at ranks 1-2, which are late"


@pytest.mark.parametrize(
    ("waiting", "late", "why", "says"),
    [
        (0.0, [], "", "look first at the CPUs, as main threads wait for a core 55% of the time"),
        (None, [], "", "look first at the CPUs, as main threads wait for a core 55% of the time"),
        (0.4, [], "", "look first at the CPUs, as main threads wait for a core 55% of the time"),
        (0.1, [1], COMPUTES, "look first at the CPUs, as main threads wait for a core 55% of the time"),
        (0.1, [1], IDLE, "look first at rank 1, which is late; transfer alone is above 30%, too"),
        (0.2, [1], NO_CORE, "look first at rank 1, waiting for a CPU core"),
        (0.4, [1], COMPUTES, "rank 1 is the bottleneck, not the network"),
    ],
)
def test_cores_come_before_communication(waiting: float | None, late: list[int], why: str, says: str) -> None:
    """If main threads wait for CPU cores, the sentence is on that, unless a late rank is known to cost more."""
    assert bottleneck(0.5, 0.5, waiting, None, late, why=why, cores=0.55) == f"above 30%: {says}"
    assert bottleneck(0.5, 0.5, 0.0, None, [], cores=0.19) == "above 30%: communication is the bottleneck"
    assert bottleneck(0.25, 0.25, 0.0, None, [], cores=0.55) == ""


@pytest.mark.parametrize(("waiting", "messages"), [(0.4, None), (None, 0.6), (0.2, 0.3)])
def test_iterations_may_wait_for_requests(waiting: float | None, messages: float | None) -> None:
    """Of iterations, which may be a server's, no sentence calls a rank late or stages uneven."""
    said = "above 30%: ranks wait for one another, or for the next request, rather than for the network"
    assert bottleneck(0.66, None, waiting, messages, iterations=True) == said
    assert bottleneck(0.66, None, 0.1, None, iterations=True) == "above 30%: communication is the bottleneck"


def test_a_straggler_of_little_cost_is_named() -> None:
    """A straggler is named also where less than half of the waiting is for it, once; not where the share is at most 30%."""
    assert (
        bottleneck(0.4, 0.4, 0.17, stragglers=[2]) == "above 30% only because ranks wait for one another; late: rank 2"
    )
    said = "above 30%: communication is the bottleneck; late: ranks 1, 3"
    assert bottleneck(0.8, 0.8, 0.2, stragglers=[3, 1]) == said
    assert (
        bottleneck(0.8, 0.8, 0.5, None, [2], stragglers=[2]) == "above 30%: rank 2 is the bottleneck, not the network"
    )
    assert bottleneck(0.2, 0.2, 0.17, stragglers=[2]) == ""


def test_split() -> None:
    """A share is split into transfer and waiting, as far as that is known, and names the stragglers; of some ranks, their number is shown."""
    assert split(0.52, 0.44, None, [2]) == "8% transfer, 44% waiting for rank 2"
    assert split(0.52, 0.44, None, [1, 3]) == "8% transfer, 44% waiting for ranks 1, 3"
    assert split(0.52, 0.1, 0.3) == "12% transfer, 10% waiting for late ranks, 30% waiting for messages"
    assert split(0.52, 0.55) == split(0.52, 0.518) == "mostly waiting for late ranks"
    assert split(0.52, 0.55, None, [2]) == "mostly waiting for rank 2"
    assert split(0.004, 0.004) == ""
    assert split(0.08, 0.3) == split(0.08, None, 0.3) == ""  # not of the same time
    assert split(0.52, 0.004) == split(0.52, None) == split(None, 0.4) == ""
    assert (of_some(3, 4), of_some(4, 4), of_some(0, 4)) == (" (3 of 4 ranks)", "", "")


def test_awaited() -> None:
    """The late ranks are those that ranks wait for, if at least half of the waiting is for them."""
    assert awaited({2: 0.3, 1: 0.1}, 0.5) == [1, 2]
    assert awaited({2: 0.2}, 0.4) == [2]
    assert awaited({2: 0.2}, 0.5) == awaited({}, 0.5) == awaited({}, None) == []
    assert awaited({2: 0.2}, None) == [2]
