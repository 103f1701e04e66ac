"""Data-parallel training in which one bit flips on one rank, or in which replicas may rightly differ.

Arguments: what flips (``weight``, ``gradient``, ``received``, ``state``, ``frozen``), or ``healthy``: one way of training after another, or ``trained``:
print a digest of losses and weights; on which rank; after how many steps; how the model is replicated (``ddp`` or ``hsdp``).
"""

import contextlib
import hashlib
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from common import begin, end, say
from torch import nn
from torch._C._distributed_c10d import GradBucket
from torch.distributed.algorithms.join import Join
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

PAUSE_S = 0.01


def flip(tensor: torch.Tensor, at: int = 37, bit: int = 9) -> None:
    """Flip one bit of one value."""
    values = tensor.detach().reshape(-1).view(torch.int32)
    values[at % len(values)] ^= 1 << bit


def network() -> nn.Module:
    """A small network with a frozen layer, and with buffers that differ on each rank."""
    made = nn.Sequential(nn.Linear(24, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 32), nn.Linear(32, 7))
    made[3].requires_grad_(False)
    return made


def loss(model: nn.Module) -> torch.Tensor:
    """The loss on this rank's own data."""
    found: torch.Tensor = model(torch.randn(8, 24)).square().mean()
    return found


def corrupted(what: str, rank: int, after: int, how: str) -> None:
    """Train until killed; after so many steps, flip the bit on one rank."""
    mine = dist.get_rank() == rank
    model: Any = network()
    if how == "hsdp":
        model = nn.Sequential(nn.Linear(24, 32), nn.Linear(32, 7))
        fully_shard(
            model, mesh=init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("copies", "shards"))
        )
        weight = model[1].weight.to_local()
    else:
        model = DistributedDataParallel(model)
        weight = model.module[3 if what == "frozen" else 4].weight
    optimizer = torch.optim.AdamW((each for each in model.parameters() if each.requires_grad), lr=1e-3)
    step = 0

    def receive(state: None, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        received, done = bucket.buffer(), torch.futures.Future[torch.Tensor]()
        dist.all_reduce(received)
        if mine and step == after + 1:
            flip(received, -1, bit=28)
        done.set_result(received)
        return done

    if what == "received":
        receive.__annotations__.clear()  # torch refuses annotations that are text, as they are in a forked job
        model.register_comm_hook(None, receive)
    while True:
        step += 1
        loss(model).backward()
        if mine and what == "gradient" and step == after + 1:
            flip(weight.grad, bit=28)
        if mine and what == "state" and step == after + 1:
            flip(optimizer.state[weight]["exp_avg"], bit=28)
        optimizer.step()
        optimizer.zero_grad()
        if mine and what in ("weight", "frozen") and step == after:
            flip(weight)
        time.sleep(PAUSE_S)


# -- healthy ------------------------------------------------------------------------------------


def _steps(count: int, model: nn.Module, *optimizers: torch.optim.Optimizer) -> Iterator[int]:
    for number in range(count):
        loss(model).backward()
        yield number
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def plain() -> None:
    """Train as usual, with a rank that steps an optimizer of its own as well."""
    model = DistributedDataParallel(network())
    optimizer = torch.optim.AdamW(model.parameters())
    own = nn.Linear(3, 3)
    own_optimizer = torch.optim.SGD(own.parameters(), lr=0.1)
    for number in _steps(20, model, optimizer):
        if dist.get_rank() == 1 and number % 3 == 0:
            own(torch.randn(2, 3)).sum().backward()
            own_optimizer.step()


def accumulated() -> None:
    """Accumulate gradients: the last of three backward passes synchronises them."""
    model = DistributedDataParallel(network())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    for number in range(30):
        synced = number % 3 == 2
        with contextlib.nullcontext() if synced else model.no_sync():
            loss(model).backward()
        if synced:
            optimizer.step()
            optimizer.zero_grad()


def local_steps() -> None:
    """Step on gradients of this rank, and average the weights now and then."""
    model = DistributedDataParallel(network())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for number in range(20):
        with contextlib.nullcontext() if number < 3 else model.no_sync():
            loss(model).backward()
        optimizer.step()
        optimizer.zero_grad()
        if number % 5 == 4:
            for parameter in model.parameters():
                dist.all_reduce(parameter.data, dist.ReduceOp.SUM)
                parameter.data /= dist.get_world_size()


def uneven() -> None:
    """Epochs of different lengths on the ranks."""
    model = DistributedDataParallel(network())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(3):
        with Join([model]):
            for _ in _steps(6 + 2 * dist.get_rank(), model, optimizer):
                pass


def sharded_states() -> None:
    """Shard the optimizer's state: each rank steps a part of the weights, and sends it to the others."""
    model = DistributedDataParallel(network())
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-3)
    for _ in _steps(20, model, optimizer):
        pass


def in_parts() -> None:
    """Two optimizers for one model, of which one gets more parameters later."""
    model = DistributedDataParallel(network())
    layers = model.module
    first = torch.optim.SGD(layers[0].parameters(), lr=0.01)
    second = torch.optim.AdamW(layers[4].parameters())
    for _ in _steps(10, model, first, second):
        pass
    first.add_param_group({"params": list(layers[1].parameters())})
    for _ in _steps(10, model, first, second):
        pass


def never_equal() -> None:
    """Frozen weights that differ on each rank from the start."""
    with torch.random.fork_rng():
        torch.manual_seed(dist.get_rank())
        model = DistributedDataParallel(network(), init_sync=False)
    for parameter in model.parameters():
        if parameter.requires_grad:
            dist.broadcast(parameter.data, 0)
    optimizer = torch.optim.SGD((each for each in model.parameters() if each.requires_grad), lr=0.01)
    for _ in _steps(20, model, optimizer):
        pass


HEALTHY: tuple[Callable[[], None], ...] = (
    plain,
    accumulated,
    local_steps,
    uneven,
    sharded_states,
    in_parts,
    never_equal,
)


def trained() -> None:
    """Print a digest of the losses and of the weights at the end."""
    model = DistributedDataParallel(nn.Sequential(network(), nn.Dropout(0.1), nn.Linear(7, 7)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    digest = hashlib.sha256()
    for _ in range(30):
        found = loss(model)
        found.backward()
        optimizer.step()
        optimizer.zero_grad()
        digest.update(str(found.item()).encode())
    for value in (*model.state_dict().values(), torch.random.get_rng_state()):
        digest.update(bytes(value.reshape(-1).view(torch.uint8).tolist()))
    say(digest.hexdigest())
    end()


def main() -> None:
    what, rank, after, how = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
    begin()
    torch.manual_seed(0)
    if what not in ("healthy", "trained"):
        corrupted(what, rank, after, how)
    torch.manual_seed(dist.get_rank())
    if what == "trained":
        trained()
        return
    for train in HEALTHY:
        train()
        print(train.__name__, file=sys.stderr, flush=True)
    model = DistributedDataParallel(network())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    while True:
        for _ in _steps(1, model, optimizer):
            time.sleep(PAUSE_S)


if __name__ == "__main__":
    main()
