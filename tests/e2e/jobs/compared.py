"""DDP over layers whose backward pass sleeps, so that ranks leave the cores to others; arguments: steps, megabytes of a bucket."""

import sys
import time

import torch
from common import begin, end
from torch import nn

LAYERS, WIDTH, LAYER_S = 8, 256, 0.002


def main() -> None:
    steps, bucket_mb = int(sys.argv[1]), float(sys.argv[2])
    begin()
    layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))
    for layer in layers:
        layer.register_full_backward_hook(lambda *_: time.sleep(LAYER_S))
    model = nn.parallel.DistributedDataParallel(layers, bucket_cap_mb=bucket_mb)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for _ in range(steps):
        model(torch.ones(4, WIDTH)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    end()


if __name__ == "__main__":
    main()
