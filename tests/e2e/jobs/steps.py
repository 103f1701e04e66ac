"""Training loops with different ideas of what an optimizer step is; argument: which, how many steps."""

import sys
import time

import torch
import torch.distributed as dist
from common import begin, end
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer

import commwatch

COMPUTE_S = 0.03


def compute(model: nn.Module) -> None:
    time.sleep(COMPUTE_S)
    model(torch.ones(2, 8)).sum().backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)


def main() -> None:
    kind, steps = sys.argv[1], int(sys.argv[2])
    begin()
    model, other = nn.Linear(8, 8), nn.Linear(8, 8)
    optimizers: list[torch.optim.Optimizer]
    if kind == "zero":
        optimizers = [ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)]
    elif kind in ("two", "gan"):
        optimizers = [torch.optim.SGD(model.parameters(), 0.1), torch.optim.Adam(other.parameters(), 0.1)]
    else:
        optimizers = [torch.optim.SGD(model.parameters(), 0.1)]
    for step in range(steps):
        if kind == "accumulate":
            for _ in range(3):
                compute(model)
        compute(model)
        if kind == "gan":
            optimizers[step % 2].step()
        else:
            for optimizer in optimizers:
                optimizer.step()
        if kind == "explicit" and step % 2:
            commwatch.step()
    end()


if __name__ == "__main__":
    main()
