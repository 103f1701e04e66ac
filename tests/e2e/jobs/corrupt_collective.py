"""Collectives in which a bit flips on one rank, below the hook: in what it has received, or in what it sends; and healthy jobs of several kinds.

Arguments: the operation, or ``healthy``; on which rank; in which operation of the group; ``received``, ``everywhere`` (in each slice of it) or ``sent``;
``async`` if it is.
"""

from __future__ import annotations

import contextlib
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

sys.path.insert(0, __file__.rpartition("/")[0])

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from common import begin
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

PAUSE_S = 0.01
SIZE = 1009


def flip(tensor: torch.Tensor) -> None:
    """Flip one bit of one value."""
    tensor.detach().reshape(-1).view(torch.int32)[37] ^= 1 << 9


class Faulty:
    """Kernels below the hook that call Gloo, and flip a bit in one operation.

    Args:
        where: ``received``, ``everywhere`` or ``sent``.
        at: number of the operation in the group.
    """

    def __init__(self, where: str, at: int) -> None:
        self._where, self._at, self._number = where, at, 0

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Replace torch's kernels by these."""
        library = torch.library.Library("c10d", "IMPL")
        with warnings.catch_warnings(action="ignore"):  # that they are replaced
            for name in ("allreduce_", "broadcast_", "allgather_", "_allgather_base_", "alltoall_", "alltoall_base_"):
                library.impl(name, getattr(self, name.strip("_")), "CPU", allow_override=True)
        yield
        library._destroy()

    def _call(self, boxed: Any, do: Callable[[Any], Any], sent: torch.Tensor, received: Any) -> Any:
        number, self._number = self._number, self._number + 1
        group = dist.ProcessGroup.unbox(boxed)._get_backend(torch.device("cpu"))
        if number != self._at:
            return do(group).boxed()
        if self._where == "sent":
            flip(sent)
        work = do(group)
        work.wait()
        if self._where == "received":
            flip(received)
        elif self._where == "everywhere":
            for each in received.split(SIZE):
                flip(each)
        return work.boxed()

    def allreduce(self, tensors: Any, group: Any, op: Any, *_: Any) -> Any:
        options = dist.AllreduceOptions()
        return tensors, self._call(group, lambda gloo: gloo.allreduce(tensors, options), tensors[0], tensors[0])

    def broadcast(self, tensors: Any, group: Any, root: int, *_: Any) -> Any:
        options = dist.BroadcastOptions()
        options.rootRank = root
        return tensors, self._call(group, lambda gloo: gloo.broadcast(tensors, options), tensors[0], tensors[0])

    def allgather(self, outputs: Any, inputs: Any, group: Any, *_: Any) -> Any:
        inputs = [each.clone() for each in inputs]
        return outputs, self._call(group, lambda gloo: gloo.allgather(outputs, inputs), inputs[0], outputs[0][0])

    def allgather_base(self, output: Any, given: Any, group: Any, *_: Any) -> Any:
        given = given.clone()
        return output, self._call(group, lambda gloo: gloo._allgather_base(output, given), given, output)

    def alltoall(self, outputs: Any, inputs: Any, group: Any, *_: Any) -> Any:
        inputs = [each.clone() for each in inputs]
        return outputs, self._call(group, lambda gloo: gloo.alltoall(outputs, inputs), inputs[0], outputs[0])

    def alltoall_base(self, output: Any, given: Any, group: Any, outputs: list[int], inputs: list[int], *_: Any) -> Any:
        given = given.clone()
        return self._call(group, lambda gloo: gloo.alltoall_base(output, given, outputs, inputs), given, output)


def corrupted(op: str, asynchronous: bool) -> None:
    """Call one operation again and again, until killed."""
    rank, size = dist.get_rank(), dist.get_world_size()
    while True:
        mine = torch.randn(SIZE)
        if op == "all_reduce":
            work = dist.all_reduce(mine, async_op=asynchronous)
        elif op == "broadcast":
            work = dist.broadcast(mine, 1, async_op=asynchronous)
        elif op == "all_gather":
            work = dist.all_gather([torch.empty(SIZE) for _ in range(size)], mine, async_op=asynchronous)
        elif op == "all_to_all":
            mine, given = torch.empty(size * SIZE), torch.randn(size * SIZE)
            work = dist.all_to_all(list(mine.split(SIZE)), list(given.split(SIZE)), async_op=asynchronous)
        elif op == "all_to_all_single":
            mine = torch.empty(size * SIZE)
            work = dist.all_to_all_single(mine, torch.randn(size * SIZE), async_op=asynchronous)
        else:
            work = dist.all_gather_into_tensor(torch.empty(size * SIZE), mine, async_op=asynchronous)
        if work is not None:
            work.wait()
            mine.fill_(rank)  # at once: the check must have read it before
        time.sleep(PAUSE_S)


# -- healthy ------------------------------------------------------------------------------------


class Branches(nn.Module):
    """A model of which each rank uses another part in each step."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(24, 24)
        self.branches = nn.ModuleList(nn.Linear(24, 7) for _ in range(3))

    def forward(self, given: torch.Tensor, number: int) -> torch.Tensor:
        """One branch."""
        found: torch.Tensor = self.branches[(number + dist.get_rank()) % 3](self.first(given).relu())
        return found


def train(model: Callable[..., torch.Tensor], parameters: Any, steps: int, *more: int) -> None:
    """Train on this rank's own data."""
    optimizer = torch.optim.AdamW(parameters, lr=1e-3)
    for number in range(steps):
        model(torch.randn(8, 24), *(number for _ in more)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def unused_parameters() -> None:
    """DDP in which ranks use different parameters; gradients are views of the buckets, and change right after the step."""
    model = DistributedDataParallel(Branches(), find_unused_parameters=True, gradient_as_bucket_view=True)
    train(model, model.parameters(), 12, 0)


def sharded() -> None:
    """FSDP2, with shards of different sizes."""
    model = nn.Sequential(nn.Linear(24, 33), nn.ReLU(), nn.Linear(33, 7))
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    train(model, model.parameters(), 8)


def tensor_parallel() -> None:
    """Layers that are split over the ranks."""
    model = nn.Sequential(nn.Linear(24, 36), nn.ReLU(), nn.Linear(36, 6))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    train(model, model.parameters(), 8)


def pipelined() -> None:
    """Two stages, each on half of the ranks, which train it data-parallel."""
    rank, half = dist.get_rank(), dist.get_world_size() // 2
    first, second = (dist.new_group(list(range(at, at + half))) for at in (0, half))
    is_first = rank < half
    stage = DistributedDataParallel(nn.Linear(24, 24), process_group=first if is_first else second)
    optimizer = torch.optim.SGD(stage.parameters(), lr=0.01)
    for _ in range(8):
        if is_first:
            passed = stage(torch.randn(8, 24))
            dist.send(passed.detach(), rank + half)
            gradient = torch.empty(8, 24)
            dist.recv(gradient, rank + half)
            passed.backward(gradient)
        else:
            given = torch.empty(8, 24, requires_grad=True)
            with torch.no_grad():
                dist.recv(given, rank - half)
            stage(given).square().mean().backward()
            assert given.grad is not None
            dist.send(given.grad, rank - half)
        optimizer.step()
        optimizer.zero_grad()


def experts() -> None:
    """Each rank has an expert: the router decides how many tokens go to which, none to some, and each comes back to where it was."""
    rank, size = dist.get_rank(), dist.get_world_size()
    world = dist.group.WORLD
    assert world is not None
    torch.manual_seed(rank)
    expert, router = nn.Linear(24, 24), DistributedDataParallel(nn.Linear(24, size))
    optimizer = torch.optim.SGD([*expert.parameters(), *router.parameters()], lr=0.01)
    for number in range(12):
        tokens = torch.randn(17 + rank, 24)
        scores = router(tokens).softmax(1)
        chosen = scores.argmax(1) if number % 3 else torch.zeros(len(tokens), dtype=torch.int64)
        sent = torch.bincount(chosen, minlength=size)
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent)
        there, here = sent.tolist(), received.tolist()
        given = functional.all_to_all_single_autograd(tokens[chosen.argsort()], here, there, world)
        back = functional.all_to_all_single_autograd(expert(given), there, here, world)
        (back.square().mean() + scores.amax(1).mean()).backward()
        optimizer.step()
        optimizer.zero_grad()


def unusual() -> None:
    """Outputs that share memory, that have gaps, that are of other types or empty; a world of which ranks have groups of their own."""
    rank, size = dist.get_rank(), dist.get_world_size()
    shared, strided = torch.empty(8), torch.empty(size, 8, 2)
    some = dist.new_group([0, 2])
    for number in range(8):
        dist.all_gather([shared] * size, torch.full((8,), float(rank)))
        dist.all_gather([strided[at, :, 0] for at in range(size)], torch.full((8,), float(rank)))
        buffer = torch.full((size, 5), rank, dtype=torch.int8)
        dist.all_gather(list(buffer), buffer[0].clone())
        dist.all_gather(list(buffer), buffer[0])  # all give from the place of the first
        dist.broadcast(torch.full((3,), complex(rank, number)), number % size)
        dist.all_reduce(torch.empty(0))
        dist.all_reduce(torch.tensor([True, rank == 1]), dist.ReduceOp.MAX)
        objects: list[Any] = [None] * size
        dist.all_gather_object(objects, {"rank": rank, "text": "x" * rank})
        if rank != 1:
            dist.all_reduce(torch.randn(5), group=some)
        given = torch.full((size, 3), complex(rank, number))
        dist.all_to_all_single(torch.empty_like(given), given)
        dist.all_to_all(list(torch.empty(size, 3)), [torch.full((3,), float(rank))] * size)
        dist.all_to_all_single(torch.empty(size, 0), torch.empty(size, 0))


HEALTHY = (unused_parameters, sharded, tensor_parallel, pipelined, experts, unusual)


def main() -> None:
    what, rank, at, where = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
    begin()
    torch.manual_seed(dist.get_rank())
    if what == "healthy":
        for job in HEALTHY:
            torch.manual_seed(0)
            job()
            print(job.__name__, file=sys.stderr, flush=True)
        while True:
            dist.all_reduce(torch.randn(SIZE))
            time.sleep(PAUSE_S)
    faulty = Faulty(where, at if dist.get_rank() == rank else -1)
    with faulty.installed():
        corrupted(what, asynchronous=sys.argv[5] == "async")


if __name__ == "__main__":
    main()
