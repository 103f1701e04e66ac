"""A healthy job of one kind (the argument), which trains until it is killed. The ranks meet in the file ``STORE`` of the environment."""

import os
import sys
import time
from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

PAUSE_S = 0.02
WIDTH = 64

Step = Callable[[], None]


def network(layers: int = 4) -> nn.Sequential:
    """Linear layers."""
    return nn.Sequential(*(layer for _ in range(layers) for layer in (nn.Linear(WIDTH, WIDTH), nn.ReLU())))


def data(rows: int = 16) -> torch.Tensor:
    """This rank's own."""
    return torch.randn(rows, WIDTH)


def trained(model: nn.Module, *optimizers: torch.optim.Optimizer) -> Step:
    """A step of optimizers; by default of one for all weights."""
    used: Iterable[torch.optim.Optimizer] = optimizers or (torch.optim.AdamW(model.parameters(), lr=1e-4),)

    def step() -> None:
        model(data()).square().mean().backward()
        for each in used:
            each.step()
            each.zero_grad()

    return step


def ddp() -> Step:
    """Gradients in several buckets."""
    return trained(DistributedDataParallel(network(), bucket_cap_mb=0.02))


def hsdp() -> Step:
    """Two replicas of two shards."""
    model = network()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=mesh)
    return trained(model)


def fsdp2() -> Step:
    """Four shards."""
    model = network()
    for layer in (model[0], model[2], model):
        fully_shard(layer)
    return trained(model)


def tensor_parallel() -> Step:
    """Layers split over pairs of ranks, and the same data in both; data-parallel over the pairs."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    model = network(2)
    parallelize_module(model, mesh["tensor"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    fully_shard(model, mesh=mesh["data"])
    torch.manual_seed(mesh["data"].get_local_rank())
    return trained(model)


def pipeline() -> Step:
    """Two stages, each on two ranks that train it data-parallel."""
    rank = dist.get_rank()
    groups = [dist.new_group(pair) for pair in ([0, 1], [2, 3])]
    stage = DistributedDataParallel(network(2), process_group=groups[rank // 2])
    optimizer = torch.optim.SGD(stage.parameters(), lr=0.01, momentum=0.9)
    other = (rank + 2) % 4

    def step() -> None:
        buffer = torch.empty(16, WIDTH)
        if rank < 2:
            passed = stage(data())
            dist.send(passed.detach(), other)
            dist.recv(buffer, other)
            passed.backward(buffer)
        else:
            dist.recv(buffer, other)
            given = buffer.requires_grad_()
            stage(given).square().mean().backward()
            assert given.grad is not None
            dist.send(given.grad, other)
        optimizer.step()
        optimizer.zero_grad()

    return step


def experts() -> Step:
    """An expert on each rank: a router, which is replicated, sends each different numbers of tokens; they come back to where they were."""
    size = dist.get_world_size()
    world = dist.group.WORLD
    assert world is not None
    expert, router = network(1), DistributedDataParallel(nn.Linear(WIDTH, size))
    optimizer = torch.optim.AdamW([*expert.parameters(), *router.parameters()], lr=1e-3)

    def step() -> None:
        tokens = data(17 + dist.get_rank())
        scores = router(tokens).softmax(1)
        chosen = scores.argmax(1)
        sent = torch.bincount(chosen, minlength=size)
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent)
        there, here = sent.tolist(), received.tolist()
        given = functional.all_to_all_single_autograd(tokens[chosen.argsort()], here, there, world)
        back = functional.all_to_all_single_autograd(expert(given), there, here, world)
        (back.square().mean() + scores.amax(1).mean()).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def accumulated() -> Step:
    """Gradients of three micro-batches, of which the last one communicates."""
    model = DistributedDataParallel(network())
    last = trained(model)

    def step() -> None:
        for _ in range(2):
            with model.no_sync():
                model(data()).square().mean().backward()
        last()

    return step


def frozen() -> Step:
    """Half of the layers do not learn."""
    model = network()
    for layer in list(model)[:4]:
        layer.requires_grad_(False)
    learning = [each for each in model.parameters() if each.requires_grad]
    return trained(DistributedDataParallel(model), torch.optim.SGD(learning, lr=0.01, momentum=0.9))


def two_optimizers() -> Step:
    """One for the first half of the weights and one for the rest, with buffers that differ."""
    layers = network(2).append(nn.BatchNorm1d(WIDTH)).append(nn.Linear(WIDTH, WIDTH))
    weights = list(layers.parameters())
    first, second = torch.optim.SGD(weights[:4], lr=0.01), torch.optim.AdamW(weights[4:])
    return trained(DistributedDataParallel(layers, broadcast_buffers=False), first, second)


def half_gradients() -> Step:
    """Gradients that are sent as 16-bit floats, in several buckets."""
    model = DistributedDataParallel(network(), bucket_cap_mb=0.02)
    model.register_comm_hook(None, fp16_compress_hook)
    return trained(model)


KINDS: dict[str, Callable[[], Step]] = {
    kind.__name__: kind
    for kind in (
        ddp,
        hsdp,
        fsdp2,
        tensor_parallel,
        pipeline,
        experts,
        accumulated,
        frozen,
        two_optimizers,
        half_gradients,
    )
}


def main() -> None:
    torch.set_num_threads(1)
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", init_method=f"file://{os.environ['STORE']}", rank=rank, world_size=size)
    torch.manual_seed(rank)
    step = KINDS[sys.argv[1]]()
    while True:
        step()
        time.sleep(PAUSE_S)


if __name__ == "__main__":
    main()
