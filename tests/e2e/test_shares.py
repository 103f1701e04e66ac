"""Shares of jobs whose shares are known: an all_reduce over a link of known rate beside a compute of known length."""

from __future__ import annotations

from pathlib import Path
from statistics import median

import pytest

from tests.e2e.hosts import Host
from tests.e2e.torchjob import digest, results, run_on

SIZE = 4 << 20
#: What TCP leaves of 200 Mbit/s, measured from outside: 23.0 to 23.3 MB/s. Two ranks pass on S bytes each.
TAKES_S = SIZE / 23.2e6
POINTS = 0.03


@pytest.mark.by_the_clock
def test_known_shares(hosts: list[Host], tmp_path: Path) -> None:
    """A comm share of 10, 30, 60% is measured within 3 points, overlapped or not, and so is what of it is exposed.

    The link cannot be faster than it is; a busy machine can make a job slower, so what is true of a step its script says.
    """
    for host in hosts:
        host.shape("200mbit")
    arguments = [f"{TAKES_S:.4f}", str(SIZE), "3", "0.1", "0.3", "0.6"]
    told = results(run_on(hosts, tmp_path, "shares.py", *arguments))
    steps = digest(tmp_path)[0].steps(0, 1 << 62, None, None, 1000)
    hidden: dict[bool, list[float]] = {False: [], True: []}
    for rank, said in enumerate(told):
        assert [(share, overlapped) for share, overlapped, *_ in said] == [
            (share, overlapped) for share in (0.1, 0.3, 0.6) for overlapped in (False, True)
        ]
        for _, overlapped, first, own in said:
            mine = {step.seq: step for step in steps if step.rank == rank and first < step.seq <= first + len(own)}
            pairs = [(mine[seq], *true) for seq, true in enumerate(own, first + 1)]
            assert median(known(step.comm_share) - true for step, true, _ in pairs) == pytest.approx(0, abs=POINTS)
            assert median(known(step.exposed_share) - true for step, _, true in pairs) == pytest.approx(0, abs=POINTS)
            assert all(known(step.comm_share) * step.duration_s > 0.95 * TAKES_S for step, *_ in pairs)
            hidden[overlapped] += [1 - known(step.exposed_share) / known(step.comm_share) for step, *_ in pairs]
    assert median(hidden[True]) > median(hidden[False]) + 0.1


def known(share: float | None) -> float:
    """A share that must be known."""
    assert share is not None
    return share
