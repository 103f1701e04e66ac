"""All ranks compute, then communicate, until they are killed. One rank can be late.

Arguments: how many numbers, the late rank (-1: none), by how many ms it is late, how long all compute, in ms, and how they communicate:
a name of ``SHAPES``.
"""

import sys
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from common import begin
from torch import nn
from torch.distributed.fsdp import fully_shard

import commwatch


def all_reduce(numbers: int) -> Callable[[], None]:
    values = torch.ones(numbers)
    return lambda: void(dist.all_reduce(values))


def all_to_all(numbers: int) -> Callable[[], None]:
    values, received = torch.ones(numbers), torch.empty(numbers)
    return lambda: void(dist.all_to_all_single(received, values))


def void(_: object) -> None:
    commwatch.step()


def buckets(numbers: int) -> Callable[[], None]:
    """Eight all_reduces that begin one after the other and are awaited together."""
    values = torch.ones(numbers)

    def step() -> None:
        for work in [dist.all_reduce(part, async_op=True) for part in values.chunk(8)]:
            work.wait()
        commwatch.step()

    return step


def ddp(numbers: int) -> Callable[[], None]:
    """Gradients in buckets of a quarter, as the backward pass makes them."""
    model = nn.parallel.DistributedDataParallel(Layers(numbers), bucket_cap_mb=numbers / 2**20)
    return trained(model, numbers)


def fsdp(numbers: int) -> Callable[[], None]:
    """Each of four layers gathered by itself, twice a step, and its gradients scattered."""
    model = Layers(numbers)
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    return trained(model, numbers)


class Layers(nn.Module):
    """Four layers beside each other with so many parameters together."""

    def __init__(self, numbers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(numbers // 1024, 256, bias=False) for _ in range(4))

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return torch.stack([layer(values).sum() for layer in self.layers]).sum()


def trained(model: nn.Module, numbers: int) -> Callable[[], None]:
    optimizer, values = torch.optim.SGD(model.parameters(), lr=1e-3), torch.ones(numbers // 1024)

    def step() -> None:
        model(values).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def pipeline(numbers: int) -> Callable[[], None]:
    """Each rank is a stage: four micro-batches forward and then back."""
    rank, last, data = dist.get_rank(), dist.get_world_size() - 1, torch.ones(numbers // 4)

    def through(before: int, after: int) -> None:
        for _ in range(4):
            if 0 <= before <= last:
                dist.recv(data, before)
            if 0 <= after <= last:
                dist.send(data, after)

    def step() -> None:
        through(rank - 1, rank + 1)
        through(rank + 1, rank - 1)
        commwatch.step()

    return step


SHAPES = {
    "all_reduce": all_reduce, "all_to_all": all_to_all, "buckets": buckets, "ddp": ddp, "fsdp": fsdp, "pipeline": pipeline,
}  # fmt: skip


def main() -> None:
    numbers, culprit, late_ms, work_ms = map(int, sys.argv[1:5])
    rank, _ = begin()
    step = SHAPES[sys.argv[5]](numbers)
    while True:
        time.sleep((work_ms + (late_ms if rank == culprit else 0)) / 1000)
        step()


if __name__ == "__main__":
    main()
