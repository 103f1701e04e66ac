"""What the checks of collectives rely on: with Gloo these operations give equal bits on all ranks, or the bits that were sent. For other backends it is
not shown."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from functools import lru_cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, PrefixStore

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
DTYPES = (*FLOATS, torch.int8, torch.uint8, torch.int32, torch.int64)
#: All types on three ranks, and one type on two and four; the other combinations are for the long tests.
CASES = pytest.mark.parametrize(
    ("dtype", "ranks"),
    [
        pytest.param(
            dtype, ranks, id=f"{dtype}-{ranks}", marks=() if ranks == 3 or dtype == torch.float32 else pytest.mark.long
        )
        for dtype in DTYPES
        for ranks in (2, 3, 4)
    ],
)
#: Elements: less than ranks, odd, prime, and more than a segment of Gloo's ring.
SIZES = (1, 3, 1009, 300_007)


def on_ranks(size: int, do: Callable[[Any, int], Any]) -> list[Any]:
    """Run ``do(group, rank)`` in a thread for each rank of a group of Gloo; return what each has returned."""
    store, found = HashStore(), [None] * size

    def run(rank: int) -> None:
        group = dist.ProcessGroupGloo(PrefixStore("gloo", store), rank, size, timedelta(seconds=60))
        found[rank] = do(group, rank)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def bits(tensor: torch.Tensor) -> bytes:
    """The bits of a tensor."""
    return bytes(tensor.contiguous().view(torch.uint8).numpy())


@lru_cache(maxsize=32)
def drawn(rank: int, size: int) -> torch.Tensor:
    """Random numbers of very different sizes; they are slow to draw, so tests share them."""
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(size, generator=generator) * 10 ** torch.randint(-3, 4, (size,), generator=generator)


def values(rank: int, size: int, dtype: torch.dtype) -> torch.Tensor:
    """Values of one rank, of very different sizes if they are floats: the order of additions shows in the bits of their sum."""
    made = drawn(rank, size)
    return made.to(dtype, copy=True) if dtype.is_floating_point else made.abs().clamp(max=20).to(dtype)


@CASES
def test_equal_bits(ranks: int, dtype: torch.dtype) -> None:
    """The results of all_reduce, broadcast and all_gather have equal bits on all ranks; the data of the last two is that which was given."""

    def do(group: Any, rank: int) -> list[bytes]:
        found = []
        for size in SIZES:
            for op in (dist.ReduceOp.SUM, dist.ReduceOp.PRODUCT, dist.ReduceOp.MAX, dist.ReduceOp.MIN):
                reduced, reducing = values(rank, size, dtype), dist.AllreduceOptions()
                reducing.reduceOp = op  # type: ignore[assignment]
                group.allreduce([reduced], reducing).wait()
                found.append(bits(reduced))
            sending = dist.BroadcastOptions()
            sending.rootRank = size % ranks
            sent = values(rank, size, dtype)
            group.broadcast([sent], sending).wait()
            gathered = [torch.empty(size, dtype=dtype) for _ in range(ranks)]
            group.allgather([gathered], [values(rank, size, dtype)]).wait()
            into = torch.empty(ranks * size, dtype=dtype)
            group._allgather_base(into, values(rank, size, dtype)).wait()
            found += [bits(sent), *map(bits, gathered), bits(into)]
            assert bits(sent) == bits(values(sending.rootRank, size, dtype))
            assert [bits(each) for each in gathered] == [bits(values(other, size, dtype)) for other in range(ranks)]
        return found

    first, *others = on_ranks(ranks, do)
    assert first is not None
    assert all(other == first for other in others)


@CASES
def test_sent_bits(ranks: int, dtype: torch.dtype) -> None:
    """An all_to_all gives each rank the bits that were sent to it, also in slices of different lengths, some of them empty."""

    def given(rank: int, size: int) -> torch.Tensor:
        return values(rank, size, dtype)

    def do(group: Any, rank: int) -> None:
        for size in SIZES:
            equal = torch.empty(ranks * size, dtype=dtype)
            group.alltoall_base(equal, given(rank, ranks * size), [], []).wait()
            sent = [given(other, ranks * size).split(size)[rank] for other in range(ranks)]
            assert bits(equal) == bits(torch.cat(sent))
            each = [torch.empty(size, dtype=dtype) for _ in range(ranks)]
            group.alltoall(each, list(given(rank, ranks * size).split(size))).wait()
            assert [bits(part) for part in each] == [bits(part) for part in sent]
            lengths = [[(of + 2 * to) % 3 * size for to in range(ranks)] for of in range(ranks)]
            received = [lengths[of][rank] for of in range(ranks)]
            uneven = torch.empty(sum(received), dtype=dtype)
            group.alltoall_base(uneven, given(rank, sum(lengths[rank])), received, lengths[rank]).wait()
            sent = [given(of, sum(lengths[of])).split(lengths[of])[rank] for of in range(ranks)]
            assert bits(uneven) == bits(torch.cat(sent))

    on_ranks(ranks, do)
