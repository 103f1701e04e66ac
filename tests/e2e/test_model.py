"""The α-β curve of a real job on a link of known rate."""

from __future__ import annotations

from pathlib import Path
from statistics import mean

import pytest

from commwatch.core.alpha_beta import Curve
from tests.e2e.hosts import Host
from tests.e2e.torchjob import digest, results, run_on

pytestmark = [
    pytest.mark.usefixtures("hook"),
    pytest.mark.by_the_clock,
    pytest.mark.parametrize("hook", ["native"], indirect=True),
]
#: What TCP leaves of 200 Mbit/s, measured from outside: 23.0 to 23.3 MB/s.
BANDWIDTH, WITHIN = 23.2e6, 0.15
#: By how much the mean of equal transfers may exceed the shortest, and how often that is tried.
STEADY, ATTEMPTS = 1.1, 8


def test_curve_of_a_known_link(hosts: list[Host], tmp_path: Path) -> None:
    """The curve's bandwidth is the link's within 15 %, and it foretells a size it has not seen as a clock outside measures it."""
    for host in hosts:
        host.shape("200mbit")
    attempts = (_measured(hosts, tmp_path / str(attempt)) for attempt in range(ATTEMPTS))
    assert any(attempts), f"the link was not steady by the job's own clock, {ATTEMPTS} times"


def _measured(hosts: list[Host], place: Path) -> bool:
    """Run the job and compare; return False where the link itself was not steady, as on a machine that others slow down."""
    place.mkdir(mode=0o700)
    clocks = results(run_on(hosts, place, "sizes.py"))
    if any(mean(clock) > STEADY * min(clock) for of_rank in clocks for clock in of_rank):
        return False
    agent, _ = digest(place)
    efficiency, lines = agent.efficiency(0, 1 << 62, None)
    (line,) = [line for line in lines if line.group == "sizes"]
    assert (line.op, line.sizes, line.smallest_bytes, line.largest_bytes) == ("all_reduce", 3, 256 << 10, 4 << 20)
    assert line.bandwidth is not None
    assert line.bandwidth == pytest.approx(BANDWIDTH, rel=WITHIN)
    foretold = Curve(line.alpha_s, 1 / line.bandwidth).time_s("all_reduce", 2, 2 << 20)
    assert foretold == pytest.approx(min(min(of_rank[-1]) for of_rank in clocks), rel=WITHIN)
    # Against its own best a link is as good as it was.
    large = next(each for each in efficiency if each.group == "sizes" and each.size_bytes == 4 << 20)
    assert (large.reference, large.verdict) == ("own_best", "bandwidth-bound")
    assert 0.8 < large.efficiency < 1.2
    return True
