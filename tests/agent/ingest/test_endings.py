"""How ranks ended, as the agent finds it in their rings."""

from __future__ import annotations

from pathlib import Path

import pytest

from commwatch.wire import ring
from commwatch_agent.analysis import live_ranks
from commwatch_agent.model.endings import first_to_fail
from tests.helpers import Watch, end_rank, operation, write_ring

S = 10**9


@pytest.mark.parametrize("looks_s", [(), (6.95,), (6.95, 7.05)])
def test_raised_with_an_operation_in_flight(tmp_path: Path, looks_s: tuple[float, ...]) -> None:
    """A rank that ended by its own exception is the first to fail, whenever the agent looked; its asynchronous operation did not fail."""
    watch = Watch(tmp_path)
    done = [operation(start_ns=n * S, end_ns=n * S + S // 2, seq=n) for n in range(5)]
    ranks = [write_ring(watch.rings, done, rank=number, slots=64) for number in (0, 1)]
    looks = [int(at * S) for at in looks_s]
    for rank in ranks:
        rank.begin(*operation(start_ns=0, end_ns=0, launch_ns=int(6.9 * S), seq=5))
        rank.counters[ring.HEARTBEAT] = int(6.5 * S)
    for at in looks[:1]:
        watch.tick(at)
    ranks[0].name({"raised": "ValueError"})
    ranks[0].close(7 * S)
    for at in looks[1:]:
        watch.tick(at)
    for rank in ranks:  # the launcher kills the other one
        end_rank(rank)
    watch.tick(int(7.2 * S))
    endings = live_ranks.endings(watch.aggregate.jobs["job"])
    assert (first_to_fail(endings), endings[0].raised, endings[0].in_operation) == ([0], "ValueError", False)
