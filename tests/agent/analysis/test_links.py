"""How busy the links between the nodes of a job are, from the TCP connections of its ranks."""

from __future__ import annotations

from dataclasses import replace

import pytest

from commwatch_agent.analysis.waits.links import Sending, links, sending
from tests.agent.incidents.test_slow_links import ALIKE, HEALTHY, SMALL, TENTH_OF_THREE, ring


def of(*sent: tuple[float, float]) -> Sending | None:
    return sending(links(ring(*sent)))


def test_full() -> None:
    """Links that have data to send all of the time limit a job, and so do the two between the halves of a ring."""
    found = of(*ALIKE)
    assert found is not None
    assert found == (pytest.approx(0.93), pytest.approx(11.6e6, rel=0.01))
    halves = of((20.0, 0.8), (20.0, 0.78))
    assert halves is not None
    assert halves.busy == pytest.approx(0.79)


def test_not_full() -> None:
    """Links that wait for data limit no job, and one that is slow is named itself; so is a receiver that is slow, and nothing is known of none."""
    assert [of(*each) for each in (HEALTHY, SMALL, TENTH_OF_THREE, ())] == [None] * 4
    held_up = [replace(link, window_limited=link.busy) for link in links(ring(*ALIKE))]
    assert sending(held_up) is None
