"""Shapes of jobs: each returns what one step does after its computation."""

import itertools
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from work import PIECE_S, Weights, compute

import commwatch


def network(layers: int) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(160, 160) for _ in range(layers)))


def ddp(layers: int) -> Callable[[], None]:
    """Gradients in as many buckets as there are layers."""
    model = nn.parallel.DistributedDataParallel(network(layers), bucket_cap_mb=0.1)
    return trained(model)


def overlap() -> Callable[[], None]:
    """Buckets of gradients that are sent while the backward pass goes on: each layer takes its time."""
    model = network(8)
    for layer in model:
        layer.register_full_backward_hook(lambda *_: compute(PIECE_S))
    return trained(nn.parallel.DistributedDataParallel(model, bucket_cap_mb=0.1))


def accumulated() -> Callable[[], None]:
    """Gradients of three micro-batches, of which only the last one communicates."""
    model = nn.parallel.DistributedDataParallel(network(4), bucket_cap_mb=0.1)
    last = trained(model)

    def step() -> None:
        for _ in range(2):
            with model.no_sync():
                model(torch.ones(8, 160)).sum().backward()
            compute(PIECE_S)
        last()

    return step


def fsdp() -> Callable[[], None]:
    """Each layer gathered by itself, twice a step."""
    model = network(6)
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    return trained(model)


def trained(model: nn.Module) -> Callable[[], None]:
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    Weights.tensors = tuple(model.parameters())

    def step() -> None:
        model(torch.ones(8, 160)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def grid() -> Callable[[], None]:
    """Two by two: tensor parallel pairs (0, 1) and (2, 3), data parallel pairs (0, 2) and (1, 3)."""
    rank = dist.get_rank()
    tensor = [dist.new_group(pair, group_desc="tp") for pair in ([0, 1], [2, 3])][rank // 2]
    data = [dist.new_group(pair, group_desc="dp") for pair in ([0, 2], [1, 3])][rank % 2]

    def step() -> None:
        for _ in range(4):
            dist.all_reduce(torch.ones(20_000), group=tensor)
            time.sleep(0.002)
        dist.all_reduce(torch.ones(100_000), group=data)
        commwatch.step()

    return step


def mesh() -> Callable[[], None]:
    """Two pipelines of two stages, (0, 2) and (1, 3); stages of one place, (0, 1) and (2, 3), share their gradients."""
    rank = dist.get_rank()
    stages = [dist.new_group(pair, group_desc="pp") for pair in ([0, 2], [1, 3])][rank % 2]
    data = [dist.new_group(pair, group_desc="dp") for pair in ([0, 1], [2, 3])][rank // 2]
    first, peer, message = rank < 2, (rank + 2) % 4, torch.ones(1000)

    def step() -> None:
        for forward in (True, False):
            for _ in range(4):
                if first != forward:
                    dist.recv(message, peer, group=stages)
                compute(PIECE_S)
                if first == forward:
                    dist.send(message, peer, group=stages)
        dist.all_reduce(torch.ones(100_000), group=data)
        commwatch.step()

    return step


def experts() -> Callable[[], None]:
    """Tokens to their experts and back in two layers, and then the gradients."""
    tokens, received = torch.ones(40_000), torch.empty(40_000)

    def step() -> None:
        for _ in range(2):
            dist.all_to_all_single(received, tokens)
            compute(PIECE_S)
            dist.all_to_all_single(tokens, received)
        dist.all_reduce(torch.ones(50_000))
        commwatch.step()

    return step


def shards() -> Callable[[], None]:
    """Gradients reduced to shards, each rank updates its own, and gathers the others: without asynchronous operations."""
    size = dist.get_world_size()
    whole, shard = torch.ones(40_000 * size), torch.empty(40_000)

    def step() -> None:
        for _ in range(4):
            dist.reduce_scatter_tensor(shard, whole)
        compute(PIECE_S)
        for _ in range(4):
            dist.all_gather_into_tensor(whole, shard)
        commwatch.step()

    return step


def pipe() -> Callable[[], None]:
    """A pipeline: each rank is a stage, four micro-batches forward and then back."""
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    data = torch.ones(1000)

    def through(before: int, after: int) -> None:
        for _ in range(4):
            if 0 <= before <= last:
                dist.recv(data, before)
            compute(PIECE_S)
            if 0 <= after <= last:
                dist.send(data, after)

    def step() -> None:
        through(rank - 1, rank + 1)
        through(rank + 1, rank - 1)
        commwatch.step()

    return step


def loader() -> Callable[[], None]:
    """Rank 0 has the data and hands it to the others; then the gradients."""

    def step() -> None:
        dist.broadcast(torch.ones(1000), src=0)
        compute(PIECE_S)
        dist.all_reduce(torch.ones(50_000))
        commwatch.step()

    return step


def unmarked() -> Callable[[], None]:
    """Collectives without steps, as inference has."""

    def step() -> None:
        dist.all_reduce(torch.ones(50_000))

    return step


def plain() -> Callable[[], None]:
    """One all_reduce a step, and a barrier of metrics."""

    def step() -> None:
        dist.all_reduce(torch.ones(50_000))
        dist.all_reduce(torch.ones(1))
        commwatch.step()

    return step


def delayed() -> Callable[[], None]:
    """Gradients of a step that are reduced while the next one computes, and awaited after it."""
    pending: list[dist.Work] = []

    def step() -> None:
        for work in pending:
            work.wait()
        pending[:] = [dist.all_reduce(torch.ones(50_000), async_op=True)]
        commwatch.step()

    return step


def outer() -> Callable[[], None]:
    """Ranks that train alone, as with DiLoCo: each fifth step they begin to average, and two steps later they take the result."""
    steps, pending = itertools.count(), list[dist.Work]()

    def step() -> None:
        place = next(steps) % 5
        if place == 0:
            pending.append(dist.all_reduce(torch.ones(200_000), async_op=True))
        elif place == 2:
            pending.pop().wait()
        commwatch.step()

    return step


def prefetched() -> Callable[[], None]:
    """Parameters of the next step gathered, and the gradients of this one reduced, while the next one computes."""
    whole, pending = 20_000 * dist.get_world_size(), list[dist.Work]()

    def step() -> None:
        for work in pending:
            work.wait()
        pending[:] = [
            dist.all_reduce(torch.ones(50_000), async_op=True),
            dist.all_gather_into_tensor(torch.empty(whole), torch.ones(20_000), async_op=True),
        ]
        commwatch.step()

    return step


SHAPES: dict[str, Callable[[], Callable[[], None]]] = {
    "plain": plain,
    "ddp1": lambda: ddp(1),
    "ddp4": lambda: ddp(4),
    "ddp8": lambda: ddp(8),
    "overlap": overlap,
    "accumulated": accumulated,
    "fsdp": fsdp,
    "shards": shards,
    "grid": grid,
    "mesh": mesh,
    "experts": experts,
    "pipe": pipe,
    "loader": loader,
    "unmarked": unmarked,
    "delayed": delayed,
    "outer": outer,
    "prefetched": prefetched,
}
