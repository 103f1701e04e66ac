"""One rank of training on one device, for ``check.py``: a scene, its loss, its step times, and what torch.profiler saw.

Prints one line of JSON. Run by hand: ``python bench/gpu/job.py ddp --device cuda``.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

WARM_UP, WIDTH, LAYERS, BATCH = 5, 1024, 8, 64
#: Elements of the out-of-place all_gather that the profiler is to see: with one rank NCCL copies, in place it does nothing.
GATHERED = 64 << 20


def ddp(device: torch.device) -> Callable[[], torch.Tensor]:
    """DistributedDataParallel with small buckets."""
    return _step(DistributedDataParallel(_model(device), bucket_cap_mb=4), device)


def fsdp2(device: torch.device) -> Callable[[], torch.Tensor]:
    """``fully_shard`` of each layer and of the whole."""
    from torch.distributed.fsdp import fully_shard

    model = _model(device)
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    return _step(model, device)


def graphs(device: torch.device) -> Callable[[], torch.Tensor]:
    """An all_reduce captured into a CUDA graph while others are in flight, replayed each step beside a usual one."""
    training, buffer = _step(_model(device), device), torch.ones(1 << 20, device=device)
    graph = torch.cuda.CUDAGraph()
    works = [dist.all_reduce(torch.ones(16 << 20, device=device), async_op=True) for _ in range(8)]
    with torch.cuda.graph(graph):
        dist.all_reduce(buffer)
    for work in works:
        if work is not None:
            work.wait()

    def step() -> torch.Tensor:
        graph.replay()
        dist.all_reduce(torch.ones(1 << 20, device=device))
        return training()

    return step


SCENES = {scene.__name__: scene for scene in (ddp, fsdp2, graphs)}


def _model(device: torch.device) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))).to(device)


def _step(model: nn.Module, device: torch.device) -> Callable[[], torch.Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    data = torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(1)).to(device)

    def step() -> torch.Tensor:
        loss = model(data).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        final: torch.Tensor = loss.detach()
        return final

    return step


def gathers(device: torch.device, count: int) -> list[float]:
    """Seconds on the device of so many all_gathers, by torch.profiler."""
    piece = torch.ones(GATHERED if device.type == "cuda" else 1024, device=device)
    whole = torch.empty_like(piece)
    activities = [torch.profiler.ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    dist.all_gather_into_tensor(whole, piece)
    with torch.profiler.profile(activities=activities) as profiler:
        for _ in range(count):
            dist.all_gather_into_tensor(whole, piece)
        _finish(device)
    copies = [e for e in profiler.events() or () if "memcpy dtod" in e.name.lower() or "allgather" in e.name.lower()]
    return [e.device_time_total / 1e6 for e in copies if e.device_type.name == "CUDA"]


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def main() -> None:
    """Run a scene."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("scene", choices=SCENES)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--gathers", type=int, default=0)
    given = parser.parse_args()
    os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0")
    device = torch.device(given.device, 0) if given.device == "cuda" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        store=torch._C._distributed_c10d.HashStore(),
        rank=0,
        world_size=1,
    )
    result: dict[str, Any] = {"scene": given.scene, "torch": str(torch.__version__)}
    with nullcontext() if device.type == "cpu" else torch.cuda.stream(torch.cuda.Stream()):
        step, took, loss = SCENES[given.scene](device), [], torch.zeros(())
        for number in range(WARM_UP + given.steps):
            began = time.perf_counter()
            loss = step()
            _finish(device)
            if number >= WARM_UP:
                took.append(time.perf_counter() - began)
        result |= {"loss": float(loss), "step_s": statistics.median(took)}
        if given.gathers:
            result["gathers_s"] = gathers(device, given.gathers)
    dist.destroy_process_group()
    os.write(1, (json.dumps(result) + "\n").encode())


if __name__ == "__main__":
    main()
