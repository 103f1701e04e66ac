"""A few steps with a model of one framework, or of none; argument: which, or that the probe is installed after the model was made."""

import sys

import torch
import torch.distributed as dist
from common import begin, end
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import commwatch


class Derived(DistributedDataParallel):
    """As users derive their own."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)


def model_of(kind: str) -> nn.Module:
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    if kind == "derived":
        return Derived(model)
    if kind in ("ddp", "late"):
        return DistributedDataParallel(model)
    if kind == "fsdp2":
        from torch.distributed.fsdp import fully_shard

        fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    elif kind == "fsdp":
        from torch.distributed.fsdp import FullyShardedDataParallel

        return FullyShardedDataParallel(model, device_id=torch.device("cpu"))
    return model


def main() -> None:
    kind = sys.argv[1]
    begin()
    model = model_of(kind)
    if kind == "late":
        assert commwatch.install()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(4):
        model(torch.randn(8, 64)).sum().backward()
        if kind == "plain":
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad)
        optimizer.step()
        optimizer.zero_grad()
    own = DistributedDataParallel.__init__
    commwatch.uninstall()
    assert kind == "late" or DistributedDataParallel.__init__ is not own
    assert not hasattr(DistributedDataParallel.__init__, "__wrapped__")
    end()


if __name__ == "__main__":
    main()
