"""Which rings of a job belong to its latest run."""

from __future__ import annotations

from typing import Any

from commwatch_agent.history.rows import RingRow, latest_run

S = 10**9


def ring(number: int, rank: int, began_s: int, seen_s: int, pid: int, **more: Any) -> RingRow:
    """A ring."""
    usual: dict[str, Any] = {
        "restart": 0,
        "world_size": 2,
        "wall_offset_ns": 0,
        "next_n": 0,
        "rolled_n": 0,
        "lost": 0,
        "dropped": 0,
    }
    about = {"host": "host", "boot_id": "boot", "pid": pid}
    times = {"started_ns": began_s * S, "seen_ns": seen_s * S}
    return RingRow(
        id=number,
        uid=str(number),
        job="job",
        rank=rank,
        identity=about,
        state="ended",
        steps_unavailable=None,
        **{**usual, **times, **more},
    )


def run_of(*rings: RingRow) -> list[int]:
    """The numbers of the latest run's rings."""
    return sorted(latest_run(sorted(rings, key=lambda ring: ring.started_ns)))


def test_earlier_runs_are_left_out() -> None:
    """Earlier processes of a rank, earlier restarts, other world sizes, and ranks that ended long before are of earlier runs."""
    now = ring(1, 0, 1000, 2000, 10), ring(2, 1, 1001, 2000, 11)
    assert run_of() == []
    assert run_of(*now) == [1, 2]
    assert run_of(*now, ring(3, 0, 100, 990, 5)) == [1, 2], "another process"
    assert run_of(*now, ring(3, 2, 100, 990, 5, world_size=4)) == [1, 2], "another world"
    assert run_of(*now, ring(3, 2, 100, 900, 5)) == [1, 2], "over for long"
    assert run_of(ring(3, 0, 100, 2000, 5), ring(4, 1, 1500, 2000, 6, restart=1)) == [4], "another restart"


def test_all_rings_of_a_run() -> None:
    """All rings of a process are of the run, because the probe makes one each time it is installed; and a clock that is set hides none."""
    assert run_of(ring(1, 0, 1000, 1100, 10), ring(2, 0, 1500, 2000, 10), ring(3, 1, 1000, 2000, 11)) == [1, 2, 3]
    assert run_of(ring(1, 0, 1000, 2000, 10), ring(2, 1, 2030, 2000, 11)) == [1, 2]
