"""Groups made without ``init_process_group``, and training after it. Arguments: the rank in the bare group, and ranks after each ``init_process_group``."""

import sys
from typing import Any

import torch
import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg  # makes the backend known
from common import say
from torch._C._distributed_c10d import FakeProcessGroup, HashStore
from torch.testing._internal.distributed.fake_pg import FakeStore


def bare(rank: int, name: str | None, size: int = 2) -> Any:
    """A group as torchft makes it; torch.distributed does not know it."""
    group: Any = dist.ProcessGroup(HashStore(), rank, size)
    backend = FakeProcessGroup._create_internal(rank, size)
    group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.CUSTOM, backend)
    if name is not None:
        group._set_group_name(name)
    return group


def main() -> None:
    rank = int(sys.argv[1])
    nameless, named = bare(rank, None), bare(rank, "replicas")
    for _ in range(3):
        dist.all_reduce(torch.ones(4), group=nameless)
    nameless.allreduce([torch.ones(4)]).wait()
    for _ in range(2):
        dist.all_reduce(torch.ones(8), group=named)
        dist.all_reduce(torch.ones(16), group=bare(rank, "replicas", 4))
    for world_rank in map(int, sys.argv[2:]):
        dist.init_process_group("fake", store=FakeStore(), rank=world_rank, world_size=8)
        for _ in range(5):
            dist.all_reduce(torch.ones(32))
        dist.all_reduce(torch.ones(8), group=named)
        dist.destroy_process_group()
    say("done")


if __name__ == "__main__":
    main()
