"""Bus bandwidth against a table worked out by hand from NVIDIA/nccl-tests, doc/PERFORMANCE.md."""

from __future__ import annotations

from fractions import Fraction

import pytest

from commwatch.wire.events import OPS
from commwatch_agent.model.bandwidth import BUS_FACTOR, algbw, bus_factor, busbw_of_one

# PERFORMANCE.md, "Summary", with n put in:  AllReduce 2(n-1)/n; AllGather, ReduceScatter (n-1)/n; Broadcast, Reduce 1.
# src/alltoall.cu, gather.cu, scatter.cu, `GetBw`: (n-1)/n; src/sendrecv.cu: 1.
BY_HAND = {
    "all_reduce": {2: "1", 4: "3/2", 8: "7/4"},
    "all_gather": {2: "1/2", 4: "3/4", 8: "7/8"},
    "reduce_scatter": {2: "1/2", 4: "3/4", 8: "7/8"},
    "all_to_all": {2: "1/2", 4: "3/4", 8: "7/8"},
    "gather": {2: "1/2", 4: "3/4", 8: "7/8"},
    "scatter": {2: "1/2", 4: "3/4", 8: "7/8"},
    "broadcast": {2: "1", 4: "1", 8: "1"},
    "reduce": {2: "1", 4: "1", 8: "1"},
    "send": {2: "1", 4: "1", 8: "1"},
    "recv": {2: "1", 4: "1", 8: "1"},
}


@pytest.mark.parametrize(("op", "n"), [(op, n) for op, row in BY_HAND.items() for n in row])
def test_factor(op: str, n: int) -> None:
    """The factor of every operation is the one nccl-tests uses."""
    assert bus_factor(op, n) == float(Fraction(BY_HAND[op][n]))


@pytest.mark.parametrize(("op", "n"), [(op, n) for op, row in BY_HAND.items() for n in row])
def test_busbw(op: str, n: int) -> None:
    """16 MB in 2 ms are 8 GB/s of algbw, and the factor times that of busbw, whatever the number of ranks."""
    assert algbw(16e6, 2e-3) == pytest.approx(8e9)
    assert busbw_of_one(op, 16e6, 2e-3, n) == pytest.approx(8e9 * float(Fraction(BY_HAND[op][n])))


def test_every_op_has_a_row() -> None:
    """Every canonical operation but barrier has a factor, and nothing else has one."""
    assert set(BY_HAND) == set(BUS_FACTOR) == set(OPS) - {"barrier"}


@pytest.mark.parametrize("op", OPS)
def test_lone_rank(op: str) -> None:
    """A group of one moves nothing over a bus: no bandwidth, which is not a bandwidth of zero."""
    assert bus_factor(op, 1) is None
    assert busbw_of_one(op, 16e6, 2e-3, 1) is None


@pytest.mark.parametrize("op", ["barrier", "allreduce", "all_reduce_", "", "unknown"])
@pytest.mark.parametrize("n", [1, 2, 4, 8])
def test_no_bandwidth(op: str, n: int) -> None:
    """A barrier and operations without a known formula have no bandwidth."""
    assert bus_factor(op, n) is None
    assert busbw_of_one(op, 16e6, 2e-3, n) is None


@pytest.mark.parametrize("n", [0, -1])
def test_group_of_unknown_size(n: int) -> None:
    """A group whose size is not known (0) has no bandwidth and divides nothing."""
    assert busbw_of_one("all_reduce", 16e6, 2e-3, n) is None


@pytest.mark.parametrize(("size", "seconds"), [(0, 1e-3), (4096, 0.0)])
def test_without_size_or_time(size: int, seconds: float) -> None:
    """Without a size, or without a time, there is no bandwidth."""
    assert algbw(size, seconds) is None
    assert busbw_of_one("all_reduce", size, seconds, 4) is None
