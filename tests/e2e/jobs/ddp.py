"""DDP for ever: a gradient of so many bytes is reduced once a step, and the rest of a step takes so many seconds.

That rest is a sleep, so what is communication of a step does not hang on who else uses the cores.
"""

import sys
import time

import torch
from common import begin
from torch import nn


class Slow(nn.Module):
    """One parameter, and a forward pass that takes its time."""

    def __init__(self, seconds: float, size: int) -> None:
        super().__init__()
        self._seconds = seconds
        self.weight = nn.Parameter(torch.zeros(size // 4))

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        time.sleep(self._seconds)
        return (self.weight * given).mean()


def main() -> None:
    seconds, size = float(sys.argv[1]), int(sys.argv[2])
    begin()
    model = nn.parallel.DistributedDataParallel(Slow(seconds, size))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    while True:
        model(torch.ones(1)).backward()
        optimizer.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    main()
