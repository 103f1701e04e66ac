"""Sends to more peers than are numbered separately, then again to the first and to the last."""

import torch
import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg  # makes the backend known

PEERS = 16_384 + 3
dist.init_process_group("fake", rank=0, world_size=PEERS + 1, store=torch._C._distributed_c10d.HashStore())
for peer in (*range(1, PEERS + 1), 1, PEERS):
    dist.send(torch.ones(1), peer)
dist.destroy_process_group()
