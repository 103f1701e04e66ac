"""For how long a rank was blocked in the wait for an asynchronous operation, as both hooks record it."""

from __future__ import annotations

from pathlib import Path

from commwatch.wire import events as ev
from tests.e2e.torchjob import read_rings, run_job
from tests.helpers import BOTH_HOOKS


def waits(place: Path, script: str, hook: str, rank: int = 0) -> dict[int, int | None]:
    """How long a rank was blocked in waits during its operations, in µs, by size; ``None``: not known."""
    run_job(place, script, COMMWATCH_HOOK=hook, COMMWATCH_JOB="awaited")
    records = read_rings(place)[rank].operations
    return {each.size_bytes: each.waited_us if each.flags & ev.WAIT_SEEN else None for each in records}


@BOTH_HOOKS
def test_waits(hook: str, tmp_path: Path) -> None:
    """A wait that blocks is known, for whichever operation, and one that does not is known to be none; nothing is, where a rank may wait otherwise."""
    found = waits(tmp_path, "awaited.py", hook)
    assert {size // 4: waited is not None and waited > 0 for size, waited in found.items() if size} == {
        **dict.fromkeys(range(1, 8), False), 1: True, 7: hook == "native", 8: True, 9: True
    }  # fmt: skip
    assert found[8] == 0
    assert [found[4 * case] for case in (3, 4, 6)] == [None] * 3


@BOTH_HOOKS
def test_buckets(hook: str, tmp_path: Path) -> None:
    """DDP waits for its buckets by their futures: no wait for one is known, but that there was none if it ended before."""
    run_job(tmp_path, "train.py", COMMWATCH_HOOK=hook, COMMWATCH_JOB="awaited")
    for rank in read_rings(tmp_path):
        buckets = rank.of("all_reduce")
        assert buckets
        assert {each.waited_us for each in buckets} == {0}
