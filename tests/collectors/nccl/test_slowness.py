"""Findings about slow transports: what was requested, and what only looks like it."""

from __future__ import annotations

import pytest

from commwatch_collectors.nccl.account import Account
from commwatch_collectors.nccl.checks.findings import findings


def log(algorithms: str, ranks: int = 4) -> Account:
    """The log of a communicator without NVLS channels, with a value of ``NCCL_ALGO``."""
    account = Account()
    for rank in range(ranks):
        where = f"node1:{100 + rank}:{100 + rank} [{rank}] NCCL INFO "
        about = (
            f"comm 0x55{rank} rank {rank} nranks {ranks} cudaDev {rank} nvmlDev {rank} busId {rank + 1}000 commId 0xabc"
        )
        channels = "16 coll channels, 16 collnet channels, 0 nvls channels, 16 p2p channels, 2 p2p channels per peer"
        for said in (
            f"NCCL_ALGO set by environment to {algorithms}",
            f"ncclCommInitRank {about} - Init START",
            channels,
            f"ncclCommInitRank {about} - Init COMPLETE",
        ):
            account.add(where + said, "log", 1)
    return account


@pytest.mark.parametrize(
    ("algorithms", "requested"),
    [
        ("NVLS", True),
        ("ring,nvlstree", True),
        ("allreduce:nvls;broadcast:ring", True),
        ("^NVLS,NVLSTree", False),
        ("allreduce:^nvls", False),
        ("broadcast:ring;allreduce:^nvls,tree", False),
        ("Ring", False),
    ],
)
def test_nvls_is_requested(algorithms: str, requested: bool) -> None:
    """NVLS that is not used is reported if it was requested, not if it was excluded."""
    found = [finding.name for finding in findings(log(algorithms))]
    assert ("nvls_unused" in found) == requested
