"""Shares of jobs whose shares are known: an all_reduce over a link of known rate beside a compute of known length."""

from __future__ import annotations

from pathlib import Path
from statistics import mean, median

import pytest

from commwatch.views import StepView
from tests.e2e.hosts import Host
from tests.e2e.torchjob import digest, results, run_on

SIZE = 4 << 20
#: What TCP leaves of 200 Mbit/s, measured from outside: 23.0 to 23.3 MB/s. Two ranks pass on S bytes each.
TAKES_S = SIZE / 23.2e6
POINTS = 0.03


@pytest.mark.parametrize("hook", ["native"], indirect=True)
def test_known_shares(hook: str, hosts: list[Host], tmp_path: Path) -> None:
    """A comm share of 10, 30, 60 % is measured within 3 points, overlapped or not; all of it is exposed, or not."""
    for host in hosts:
        host.shape("200mbit")
    arguments = [f"{TAKES_S:.4f}", str(SIZE), "5", "0.1", "0.3", "0.6"]
    (said, _) = results(run_on(hosts, tmp_path, "shares.py", *arguments))
    steps = digest(tmp_path)[0].steps(0, 1 << 62, None, None, 1000)
    assert [share for share, overlapped, *_ in said if overlapped] == [0.1, 0.3, 0.6]
    hidden = []
    for share, overlapped, first, last in said:
        for rank in (0, 1):
            mine = [step for step in steps if step.rank == rank and first < step.seq <= last]
            assert len(mine) == 5
            assert median(step.comm_share for step in mine if step.comm_share is not None) == pytest.approx(
                share, abs=POINTS
            )
            if overlapped:
                hidden.append(1 - exposed(mine) / share)
            else:
                assert exposed(mine) == pytest.approx(share, abs=POINTS)
    # Exposed is an upper bound: a busy machine takes the core from a thread that computes.
    assert mean(hidden) > 0.3


def exposed(steps: list[StepView]) -> float:
    """The median exposed share, which must be known."""
    shares = [step.exposed_share for step in steps if step.exposed_share is not None]
    assert len(shares) == len(steps)
    return median(shares)
