"""A small real job in one of the forms that ``whatif.py`` compares. Its compute is sleep, so that it does not depend on other users of the cores.

Arguments as in ``--help``; it prints nothing. The ranks get RANK, WORLD_SIZE and STORE from the environment.
"""

import argparse
import os
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.fsdp import fully_shard

#: Layers of 1 MiB of parameters each, and the seconds of one in a forward and in a backward pass.
LAYERS, WIDTH, FORWARD_S, BACKWARD_S = 16, 512, 0.008, 0.016


class Layer(nn.Linear):
    """A layer whose passes take a fixed time."""

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        time.sleep(FORWARD_S)
        return super().forward(given)


def _model(options: argparse.Namespace) -> Any:
    """Return the model, wrapped by DDP or FSDP2."""
    model = nn.Sequential(*(Layer(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))
    for layer in model:
        layer.register_full_backward_hook(lambda *_: time.sleep(BACKWARD_S))
    if options.units:
        of_unit = LAYERS // options.units
        model = nn.Sequential(*(model[at : at + of_unit] for at in range(0, LAYERS, of_unit)))
        for unit in model:
            fully_shard(unit)
        return fully_shard(model)
    replicated = nn.parallel.DistributedDataParallel(model, bucket_cap_mb=options.buckets)
    if options.half:
        replicated.register_comm_hook(None, default_hooks.fp16_compress_hook)
    return replicated


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--buckets", type=float, default=4.0, help="bucket_cap_mb of DDP")
    parser.add_argument("--units", type=int, default=0, help="FSDP2 with so many units; 0: DDP")
    parser.add_argument("--half", action="store_true")
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--late", type=float, default=0.0, help="seconds that the last rank is late in each step")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", init_method=f"file://{os.environ['STORE']}", rank=rank, world_size=size)
    model = _model(options)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    given = torch.ones(4, WIDTH)
    for _ in range(options.steps):
        if rank == size - 1:
            time.sleep(options.late)
        for _ in range(options.accumulate - 1):
            with model.no_sync():
                model(given).sum().backward()
        model(given).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
