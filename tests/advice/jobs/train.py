"""A small real job that communicates in one of several ways, before and after advice is applied.

It trains for a given time, and prints the samples per second of the first rank.
"""

import argparse
import os
import random
import time
from collections.abc import Callable
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

import commwatch

#: Steps before the clock starts, because DDP rebuilds its buckets after the first step. A block of steps has this length, too.
WARM = 5
LAYERS, WIDTH = 8, 256
#: Compute time of a layer, a micro-batch or a stage, in seconds.
PIECE_S = 0.005


def compute(seconds: float) -> None:
    """Use this much CPU time."""
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


def wait(seconds: float) -> None:
    """Sleep, and leave the core to the other ranks, because four ranks may share two cores."""
    time.sleep(seconds)


def layers(sizes: list[int]) -> nn.Sequential:
    """Return a model whose layers each take ``PIECE_S`` in the backward pass."""
    model = nn.Sequential(*(nn.Linear(before, after, bias=False) for before, after in pairwise(sizes)))
    for layer in model:
        layer.register_full_backward_hook(lambda *_: compute(PIECE_S))
    return model


def ddp(options: argparse.Namespace) -> Callable[[], None]:
    """DDP reduces gradients in buckets, after one or more micro-batches, optionally compressed to fp16."""
    model = nn.parallel.DistributedDataParallel(layers([WIDTH] * (LAYERS + 1)), bucket_cap_mb=0.25)
    if options.half:
        model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def step() -> None:
        with model.no_sync():
            for _ in range(options.accumulate - 1):
                model(torch.ones(4, WIDTH)).sum().backward()
        model(torch.ones(4, WIDTH)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def values(options: argparse.Namespace) -> Callable[[], None]:
    """Each step reduces many small tensors, one by one or as one tensor, and two larger ones."""
    small = [torch.ones(1000) for _ in range(60)]

    def step() -> None:
        compute(2 * PIECE_S)
        for tensor in [torch.cat(small)] if options.together else small:
            dist.all_reduce(tensor)
        dist.all_reduce(torch.ones(16_000))
        dist.all_reduce(torch.ones(160_000))
        commwatch.step()

    return step


def by_hand(options: argparse.Namespace) -> Callable[[], None]:
    """Gradients are reduced one after another after the backward pass, so nothing overlaps with it."""
    model = layers([WIDTH] * (LAYERS + 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def step() -> None:
        model(torch.ones(4, WIDTH)).sum().backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
        optimizer.step()
        optimizer.zero_grad()

    return step


def plain(options: argparse.Namespace) -> Callable[[], None]:
    """Each step is work, which may be uneven, and one all_reduce."""

    def step() -> None:
        compute(0.03 + 0.08 * (random.random() if options.uneven else 0.5))
        dist.all_reduce(torch.ones(50_000))
        commwatch.step()

    return step


def of_mine(pairs: list[list[int]], description: str) -> dist.ProcessGroup:
    """Create all groups, as every rank must, and return the group of this rank."""
    groups = [dist.new_group(pair, group_desc=description) for pair in pairs]
    mine: dist.ProcessGroup = groups[[dist.get_rank() in pair for pair in pairs].index(True)]
    return mine


def tensor(options: argparse.Namespace) -> Callable[[], None]:
    """Two by two ranks: tensor parallel pairs reduce activations, data parallel pairs reduce gradients."""
    near, far = ([[0, 1], [2, 3]], [[0, 2], [1, 3]])
    pairs, others = (near, far) if options.in_node else (far, near)
    tp, dp = of_mine(pairs, "tp"), of_mine(others, "dp")

    def step() -> None:
        for _ in range(LAYERS):
            compute(PIECE_S)
            dist.all_reduce(torch.ones(100_000), group=tp)
        dist.all_reduce(torch.ones(200_000), group=dp)
        commwatch.step()

    return step


def pipe(options: argparse.Namespace) -> Callable[[], None]:
    """A pipeline with one stage per rank: all micro-batches of a batch go forward, then backward."""
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    data = torch.ones(1000)

    def through(before: int, after: int) -> None:
        for _ in range(options.micro):
            if 0 <= before <= last:
                dist.recv(data, before)
            compute(PIECE_S)
            if 0 <= after <= last:
                dist.send(data, after)

    def step() -> None:
        through(rank - 1, rank + 1)
        through(rank + 1, rank - 1)
        commwatch.step()

    return step


SHAPES = {shape.__name__: shape for shape in (ddp, values, by_hand, plain, tensor, pipe)}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--late", type=float, default=0.0, help="seconds that the last rank is late in each step")
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--together", action="store_true")
    parser.add_argument("--half", action="store_true")
    parser.add_argument("--uneven", action="store_true")
    parser.add_argument("--in-node", action="store_true")
    parser.add_argument("--micro", type=int, default=4)
    options = parser.parse_args()
    torch.set_num_threads(1)
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", init_method=f"file://{os.environ['STORE']}", rank=rank, world_size=size)
    random.seed(dist.get_rank())
    step, done, began = SHAPES[options.shape](options), 0, 0.0
    # The first rank decides for all ranks whether to continue.
    more = torch.ones(1)
    while more.item():
        if done == WARM:
            began = time.monotonic()
        for _ in range(WARM):
            if dist.get_rank() == dist.get_world_size() - 1:
                wait(options.late)
            step()
            done += 1
        more[0] = not began or time.monotonic() - began < options.seconds
        dist.broadcast(more, src=0)
    if dist.get_rank() == 0:
        samples = options.accumulate * (options.micro if options.shape == "pipe" else 1)
        print((done - WARM) * samples / (time.monotonic() - began), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
