"""Works written in Python: from a process group written in Python, and from a kernel in Python below the probe's."""

import os
from typing import Any

import torch
import torch.distributed as dist
from common import say
from torch._C._distributed_c10d import Work


class MyWork(Work):
    """Counts how often anybody waits for it."""

    waits = 0
    looks = 0

    def wait(self, timeout: Any = None) -> bool:
        self.waits += 1
        return True

    def is_completed(self) -> bool:
        self.looks += 1
        return True


class MyGroup(dist.ProcessGroup):
    """All collectives are over at once."""

    def allreduce(self, tensors: Any, options: Any = None) -> Work:  # type: ignore[override]
        return MyWork()

    def getBackendName(self) -> str:  # noqa: N802
        return "mine"


def make(store: object, rank: int, size: int, timeout: object) -> MyGroup:
    return MyGroup(rank, size)  # type: ignore[call-arg]


def seen(work: Any) -> list[Any]:
    first = [type(work).__name__, work.waits]
    return [*first, work.wait(), work.wait(), work.waits]


def main() -> None:
    dist.init_process_group("gloo", store=torch._C._distributed_c10d.HashStore(), rank=0, world_size=1)
    dist.Backend.register_backend("mine", make, devices=["cpu"])
    group = dist.new_group([0], backend="mine")
    works = [dist.all_reduce(torch.ones(2), group=group, async_op=True)]
    library = torch.library.Library("c10d", "IMPL")
    mine = MyWork()
    library.impl("allreduce_", lambda tensors, *args: (tensors, mine.boxed()), "SparseCsrCPU")
    works.append(dist.all_reduce(torch.eye(3).to_sparse_csr(), async_op=True))
    say([seen(work) for work in works] + [works[1] is mine])
    say(mine.looks)
    dist.destroy_process_group()
    os.write(1, b"job done\n")


if __name__ == "__main__":
    main()
