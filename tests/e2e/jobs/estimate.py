"""Collectives of tensors without data, before, between and beside those that communicate."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from common import say
from torch._C._distributed_c10d import HashStore
from torch._subclasses.fake_tensor import FakeTensorMode


def estimate(ones: Callable[[], torch.Tensor]) -> None:
    """As an estimate of a training's shapes and memory does, also on the rank that is not the root of a gather."""
    world: Any = dist.group.WORLD
    dist.all_reduce(ones())
    dist.all_gather([ones()], ones())
    dist.gather(ones(), [ones()])
    world.scatter([ones()], [[ones()]]).wait()
    torch.ops.c10d.gather_([], [ones()], world.boxed(), 0, False, -1)


class Doubtful(torch.Tensor):
    """A tensor with data that also Python dispatches."""

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Run the operator on the data."""
        with torch._C._DisableTorchDispatch():
            return function(*args, **(kwargs or {}))


def main() -> None:
    dist.init_process_group("gloo", rank=0, world_size=1, store=HashStore())
    with FakeTensorMode():
        estimate(lambda: torch.ones(1000))
        estimate(lambda: torch.empty(1000, device="cuda"))
        dist.barrier()
    dist.all_reduce(torch.ones(1))
    estimate(lambda: torch.ones(1000, device="meta"))
    world: Any = dist.group.WORLD
    awaited = functional.all_reduce(torch.ones(2), "sum", world)
    dist.all_reduce(awaited)
    dist.all_reduce(torch.Tensor._make_subclass(Doubtful, torch.ones(3)))
    dist.destroy_process_group()
    say("done")


if __name__ == "__main__":
    main()
