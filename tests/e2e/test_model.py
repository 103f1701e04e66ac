"""The α-β curve of a real job on a link of known rate."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import mean

import numpy as np
import pytest

from commwatch_agent.model.alpha_beta import Curve
from tests.e2e.hosts import Host
from tests.e2e.torchjob import digest, results, run_on

pytestmark = pytest.mark.by_the_clock
#: As in the job.
SIZES = (256 << 10, 768 << 10, 4 << 20)
#: What TCP leaves of 100 Mbit/s. Two ranks pass on S bytes each, in two messages.
BANDWIDTH, WITHIN, MESSAGES = 11.6e6, 0.15, 2


def test_curve_of_a_known_link(hosts: list[Host], tmp_path: Path) -> None:
    """The curve's bandwidth is the link's within 15%, and it foretells a size it has not seen as a clock outside measures it.

    Both fit the shortest transfers, which a busy machine changes least.
    """
    for host in hosts:
        host.shape("100mbit")
    first, second = results(run_on(hosts, tmp_path, "sizes.py"))
    *shortest_s, between_s = (min(*one, *other) for one, other in zip(first, second, strict=True))
    agent, _ = digest(tmp_path)
    efficiency, lines = agent.efficiency(0, 1 << 62, None)
    (line,) = [line for line in lines if line.group == "sizes"]
    assert (line.op, line.sizes, line.smallest_bytes, line.largest_bytes) == ("all_reduce", 3, SIZES[0], SIZES[-1])
    assert line.bandwidth is not None
    assert line.bandwidth == pytest.approx(by_clock(shortest_s), rel=0.1)
    assert line.bandwidth == pytest.approx(BANDWIDTH, rel=WITHIN)
    foretold = Curve(line.alpha_s, 1 / line.bandwidth).time_s("all_reduce", 2, 2 << 20)
    assert foretold == pytest.approx(between_s, rel=WITHIN)
    # Against its own best, a link is as good as it was.
    large = next(each for each in efficiency if each.group == "sizes" and each.size_bytes == SIZES[-1])
    assert (large.reference, large.verdict) == ("own_best", "bandwidth-bound")
    assert large.efficiency == pytest.approx(shortest_s[-1] / mean([*first[2], *second[2]]), rel=WITHIN)


def by_clock(shortest_s: Sequence[float]) -> float:
    """Bytes per second of the line through the times of the sizes, by numpy."""
    rows = [[MESSAGES / time_s, size / time_s] for size, time_s in zip(SIZES, shortest_s, strict=True)]
    (_, per_byte_s), *_ = np.linalg.lstsq(np.array(rows), np.ones(len(rows)), rcond=None)
    return float(1 / per_byte_s)
