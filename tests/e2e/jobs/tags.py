"""Sends with tags: two of some, one that takes the place of another, and many that come once."""

import torch
import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg  # makes the backend known

dist.init_process_group("fake", rank=0, world_size=2, store=torch._C._distributed_c10d.HashStore())
for tag in (0, 0, 5, -1, 5, 256, 0, *range(1000, 6000)):
    dist.send(torch.ones(4), 1, tag=tag)
dist.destroy_process_group()
