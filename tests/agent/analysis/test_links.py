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
    assert found.busy == pytest.approx(0.93)
    assert found.speed == pytest.approx(11.6e6, rel=0.01)
    halves = of((20.0, 0.8), (20.0, 0.78))
    assert halves is not None
    assert halves.busy == pytest.approx(0.79)


def test_not_full() -> None:
    """Links that wait for data are not busy, and no more are those beside a slow one; where little waits, or the receivers are slow, nothing is known."""
    for sent in (HEALTHY, SMALL, TENTH_OF_THREE):
        found = of(*sent)
        assert found is not None
        assert found.busy < 0.2
    assert of() is None
    full = links(ring(*ALIKE))
    assert sending([replace(link, window_limited=link.busy) for link in full]) is None
    assert sending([replace(link, unsent=0.2) for link in full]) is None
