"""Which rank computes on which GPU, as reported by real ranks with a simulated CUDA."""

from __future__ import annotations

from pathlib import Path

from commwatch_collectors.node.gpu import GpuPlace
from tests.e2e.torchjob import digest, read_rings, run_job


def test_ranks_tell_their_card(tmp_path: Path) -> None:
    """Each rank reports the device it has memory on, once CUDA is initialised in it, and its agent reads it; nothing is lost by it."""
    run_job(tmp_path, "gpus.py")
    assert [(len(rank.of("all_reduce")), len(rank.marks)) for rank in read_rings(tmp_path)] == [(4, 4)] * 2
    _, aggregate = digest(tmp_path)
    places = {book.rank: book.gpu for book in aggregate.rank_totals()}
    assert places == {rank: GpuPlace(f"5a0e1f2c-3b4d-4e6f-8a9b-00000000000{7 - rank}", "", rank) for rank in range(2)}
