"""Training loops with different ideas of what an optimizer step is; argument: which, how many steps."""

import random
import sys
import time
from collections.abc import Sequence

import torch
import torch.distributed as dist
from common import begin, end
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer

import commwatch

COMPUTE_S = 0.03
#: A discriminator's calls to one of the generator's.
CRITICS = 5


def compute(model: nn.Module, took_s: float = COMPUTE_S) -> None:
    time.sleep(took_s)
    model(torch.ones(2, 8)).sum().backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)


def plain(model: nn.Module, optimizers: list[torch.optim.Optimizer], took_s: float = COMPUTE_S) -> None:
    """One pass, and all optimizers one after another."""
    compute(model, took_s)
    for optimizer in optimizers:
        optimizer.step()


def in_turns(models: Sequence[nn.Module], optimizers: list[torch.optim.Optimizer], turns: list[int]) -> None:
    """A pass for each of these turns, and the optimizer whose turn it is."""
    for turn in turns:
        compute(models[turn])
        optimizers[turn].step()


def by_groups(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """One pass, and the optimizer for each group of its parameters, as engines that shard its state call it."""
    compute(model)
    groups = optimizer.param_groups
    for group in groups:
        optimizer.param_groups = [group]
        optimizer.step()
    optimizer.param_groups = groups


def main() -> None:
    kind, steps = sys.argv[1], int(sys.argv[2])
    begin()
    models = [nn.Linear(8, 8), nn.Linear(8, 8)]
    model = models[0]
    one = torch.optim.SGD(model.parameters(), 0.1)
    both: list[torch.optim.Optimizer] = [one, torch.optim.Adam(models[1].parameters(), 0.1)]
    zero = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
    grouped = torch.optim.AdamW([{"params": [model.weight]}, {"params": [model.bias]}])  # type: ignore[arg-type]
    chance = random.Random(1)
    for step in range(steps):
        if kind == "zero":
            plain(model, [zero])
        elif kind == "two":
            plain(model, both)
        elif kind == "quick":
            plain(model, both, 0.002)
        elif kind == "groups":
            by_groups(model, grouped)
        elif kind == "gan":
            in_turns(models, both, [0, 1])
        elif kind == "critic":
            in_turns(models, both, [0] * CRITICS + [1])
        elif kind == "random":
            in_turns(models, both, [chance.randrange(2)])
        else:
            for _ in range(3 if kind == "accumulate" else 0):
                compute(model)
            plain(model, [one])
        if kind == "explicit" and step % 2:
            commwatch.step()
    end()


if __name__ == "__main__":
    main()
