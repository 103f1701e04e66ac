"""All-to-alls with split sizes, without, with a list of tensors, with no data, and some that are not valid; argument: the number of ranks."""

import contextlib
import sys

import torch
import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg  # makes the backend known

size = int(sys.argv[1])
dist.init_process_group("fake", rank=0, world_size=size, store=torch._C._distributed_c10d.HashStore())
more = [0] * (size - 3)
dist.all_to_all_single(torch.ones(6, 2), torch.ones(5, 2), [1, 2, 3, *more], [2, 0, 3, *more])
dist.all_to_all_single(torch.ones(2 * size), torch.ones(2 * size))
dist.all_to_all([torch.ones(n) for n in range(size)], [torch.ones(n) for n in range(size)], async_op=True)
dist.all_to_all_single(torch.ones(0, 7), torch.ones(0, 7), [0] * size, [0] * size)
for wrong in ([1, 2], [-4, 4, 3, *more], [1 << 60, 1, 1, *more]):
    with contextlib.suppress(RuntimeError, IndexError):
        dist.all_to_all_single(torch.ones(3), torch.ones(3), wrong, wrong)
dist.destroy_process_group()
