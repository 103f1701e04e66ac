"""A DDP training that goes on until a file exists, and says its losses bit for bit. It pauses after each step that ours does not profile.

Arguments: the file; how many steps it makes at least; what the training does with torch's profiler: nothing | runs (it has its own on all the while) |
starts (it starts one as soon as ours runs) | warms (its own warms up all the while) | evenly (nothing, and it pauses after every step).
"""

import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from common import begin, end, say
from torch import nn
from torch.autograd import profiler as backend
from torch.profiler import ProfilerActivity, profile, schedule


def own(kind: str) -> profile:
    if kind == "warms":
        return profile(activities=[ProfilerActivity.CPU], schedule=schedule(wait=0, warmup=1 << 30, active=1))
    return profile(activities=[ProfilerActivity.CPU])


def main() -> None:
    stop, least, kind = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    rank, _ = begin()
    layers = [layer for _ in range(4) for layer in (nn.Linear(256, 256), nn.ReLU())]
    model = nn.parallel.DistributedDataParallel(nn.Sequential(*layers), bucket_cap_mb=0.3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    data = torch.Generator().manual_seed(rank)
    losses, more, mine = [], torch.ones(1), None
    if kind in ("runs", "warms"):
        mine = own(kind)
        mine.start()
    seen = 0
    while more.item():
        loss = model(torch.randn(64, 256, generator=data)).pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item().hex())
        if kind == "starts" and mine is None and backend._is_profiler_enabled:
            mine = own(kind)
            with mine:
                model(torch.randn(64, 256))
            seen = len(mine.events() or ())
        more.fill_(float(len(losses) < least or not stop.exists()))
        dist.all_reduce(more, op=dist.ReduceOp.MIN)
        if kind == "evenly" or mine is not None or not backend._is_profiler_enabled:
            time.sleep(0.01)
    if kind == "runs" and mine is not None:
        mine.stop()
        seen = len(mine.events() or ())
    say([losses, seen])
    end()


if __name__ == "__main__":
    main()
