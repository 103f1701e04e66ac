"""Compiles a function with a collective, and waits for fake tensors, while an operation is pending that only a wait ends."""

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch._C._distributed_c10d import HashStore
from torch._subclasses.fake_tensor import FakeTensorMode

dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
pending = dist.reduce_scatter_tensor(torch.empty(4), torch.ones(4), async_op=True)


@torch.compile(fullgraph=True, backend="eager")
def twice(tensor: torch.Tensor) -> torch.Tensor:
    group = dist.group.WORLD
    assert group is not None
    summed: torch.Tensor = functional.all_reduce(tensor * 2, "sum", group)
    return summed + 0


assert twice(torch.ones(4)).tolist() == [2.0] * 4
with FakeTensorMode():
    torch.ops._c10d_functional.wait_tensor(torch.ones(4))
pending.wait()
dist.all_reduce(torch.ones(4))
dist.destroy_process_group()
print("job done")
