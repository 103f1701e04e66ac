"""Three ranks, rank 1 always 50 ms late, through every operation."""

import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from common import begin, end

LATE_S = 0.05
REPEATS = 3


def operations(rank: int, world: int) -> dict[str, Callable[[], object]]:
    t, wide = torch.ones(6), torch.ones(6 * world)
    outs = [torch.empty(6) for _ in range(world)]
    return {
        "all_reduce": lambda: dist.all_reduce(t),
        "all_gather": lambda: dist.all_gather_into_tensor(torch.empty_like(wide), t),
        "reduce_scatter": lambda: dist.reduce_scatter_tensor(torch.empty(6), wide),
        "all_to_all": lambda: dist.all_to_all_single(torch.empty(6), t),
        "barrier": dist.barrier,
        "broadcast": lambda: dist.broadcast(t, 0),
        "reduce": lambda: dist.reduce(t, 0),
        "gather": lambda: dist.gather(t, outs if rank == 0 else None, dst=0),
        "scatter": lambda: dist.scatter(torch.empty(6), outs if rank == 0 else None, src=0),
    }


def main() -> None:
    rank, world = begin()
    for operation in operations(rank, world).values():
        operation()  # connections are made at first use
        for _ in range(REPEATS):
            dist.monitored_barrier()
            if rank == 1:
                time.sleep(LATE_S)
            operation()
    dist.barrier()
    if rank == 1:
        time.sleep(LATE_S)
        dist.send(torch.ones(4), 0)
    elif rank == 0:
        dist.recv(torch.ones(4), 1)
    end()


if __name__ == "__main__":
    main()
