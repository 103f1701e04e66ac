"""The job of ``commwatch doctor --gpu-proof``: one rank of training on one device. Prints one line of JSON.

    python -m commwatch.probe.torch_proof ddp --device cuda

The scene ``about`` trains nothing: it describes torch and the GPUs that it sees.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from commwatch.probe.torch_timing import nccl_version

WARM_UP, LAYERS = 5, 8
#: Width of a layer and rows of a batch, by type of device. On a GPU a step is so long that the host is ahead of it, as in real jobs.
WIDTH, BATCH = {"cuda": 4096, "cpu": 256}, {"cuda": 256, "cpu": 64}
#: Elements of an all_gather that is to take long. With one rank, NCCL copies if input and output differ, and else does nothing.
GATHERED = {"cuda": 64 << 20, "cpu": 1024}
#: Elements of an operation in the scene ``graphs``, and number and elements of those in flight while it captures.
SMALL, IN_FLIGHT, LARGE = 1 << 20, 8, 16 << 20
_CYCLES = 10_000_000

Step = Callable[[], torch.Tensor]


# -- scenes: each returns a function that trains one step and returns the loss ----------------------------------


def ddp(device: torch.device) -> Step:
    """DistributedDataParallel with small buckets."""
    return _training(DistributedDataParallel(_model(device), bucket_cap_mb=4), device)


def sharded(device: torch.device) -> Step:
    """What FSDP does in each step, by hand: with one rank, its own version 2 does not communicate."""
    return _training(_model(device), device, exchange=_exchange)


def _exchange(model: nn.Module) -> None:
    """Reduce all gradients and gather all parameters, each into another buffer, so that NCCL copies."""
    parameters = [parameter for parameter in model.parameters() if parameter.grad is not None]
    reduced, whole = ([torch.empty_like(parameter) for parameter in parameters] for _ in range(2))
    with torch.no_grad():
        works = []
        for parameter, target, gathered in zip(parameters, reduced, whole, strict=True):
            works.append(dist.reduce_scatter_tensor(target, parameter.grad, async_op=True))
            works.append(dist.all_gather_into_tensor(gathered, parameter.detach(), async_op=True))
        for work in works:
            if work is not None:
                work.wait()
        for parameter, target, gathered in zip(parameters, reduced, whole, strict=True):
            parameter.grad = target
            parameter.copy_(gathered)


def graphs(device: torch.device) -> Step:
    """An all_gather captured into a CUDA graph while other operations are in flight, and replayed in each step beside an all_reduce."""
    training, graph = _training(_model(device), device), torch.cuda.CUDAGraph()
    part, whole = torch.ones(SMALL, device=device), torch.empty(SMALL, device=device)
    works = [dist.all_reduce(torch.ones(LARGE, device=device), async_op=True) for _ in range(IN_FLIGHT)]
    with torch.cuda.graph(graph):
        dist.all_gather_into_tensor(whole, part)
    for work in works:
        if work is not None:
            work.wait()

    def step() -> torch.Tensor:
        graph.replay()
        dist.all_reduce(torch.ones(SMALL, device=device))
        return training()

    return step


def exposed(device: torch.device) -> Step:
    """An all_gather in each step, for which the compute stream waits at once."""
    return _gathering(device, 0)


def hidden(device: torch.device) -> Step:
    """An all_gather in each step beside computation that takes three times as long."""
    return _gathering(device, 3)


SCENES = {scene.__name__: scene for scene in (ddp, sharded, graphs, exposed, hidden)}


def _gathering(device: torch.device, beside: int) -> Step:
    """Return steps with an all_gather, and computation beside it that takes ``beside`` times as long.

    The GPU is busy before the all_gather, so that the host has launched the rest of the step when it begins.
    """
    part = torch.ones(GATHERED[device.type], device=device)
    whole = torch.empty_like(part)
    training = _training(nn.Sequential(nn.Linear(8, 8, device=device)), device, width=8)
    dist.all_gather_into_tensor(whole, part)
    gather_s = _on_device_s(lambda: dist.all_gather_into_tensor(whole, part))
    cycles = int(beside * _CYCLES * gather_s / _on_device_s(lambda: torch.cuda._sleep(_CYCLES)))

    def step() -> torch.Tensor:
        torch.cuda._sleep(_CYCLES)
        work = dist.all_gather_into_tensor(whole, part, async_op=True)
        if cycles:
            torch.cuda._sleep(cycles)
        if work is not None:
            work.wait()
        return training()

    return step


def _model(device: torch.device) -> nn.Sequential:
    width = WIDTH[device.type]
    return nn.Sequential(*(nn.Linear(width, width, device=device) for _ in range(LAYERS)))


def _training(
    model: nn.Module,
    device: torch.device,
    width: int | None = None,
    exchange: Callable[[nn.Module], None] | None = None,
) -> Step:
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    data = torch.randn(BATCH[device.type], width or WIDTH[device.type], device=device)

    def step() -> torch.Tensor:
        loss = model(data).square().mean()
        loss.backward()
        if exchange is not None:
            exchange(model)
        optimizer.step()
        optimizer.zero_grad()
        final: torch.Tensor = loss.detach()
        return final

    return step


def _on_device_s(work: Callable[[], object]) -> float:
    """Return the seconds that the current stream takes for something, by events of our own: the least of five times."""
    took = []
    for _ in range(5):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        work()
        end.record()
        torch.cuda.synchronize()
        took.append(float(begin.elapsed_time(end)) / 1e3)
    return min(took)


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


# -- durations --------------------------------------------------------------------------------


def gathers(device: torch.device, count: int, profile: bool) -> list[float]:
    """Run all_gathers; return their seconds on the GPU, by torch.profiler or by events around them; none on the CPU."""
    part = torch.ones(GATHERED[device.type], device=device)
    whole = torch.empty_like(part)
    dist.all_gather_into_tensor(whole, part)
    if profile:
        return _profiled(lambda: dist.all_gather_into_tensor(whole, part), device, count)
    around = []
    for _ in range(count):
        if device.type == "cuda":
            torch.cuda._sleep(_CYCLES)  # the host is ahead of the GPU, so no launch is measured
            around.append((torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)))
            around[-1][0].record()
        dist.all_gather_into_tensor(whole, part)
        if device.type == "cuda":
            around[-1][1].record()
    _finish(device)
    return [begin.elapsed_time(end) / 1e3 for begin, end in around]


def _profiled(gather: Callable[[], object], device: torch.device, count: int) -> list[float]:
    activities = [torch.profiler.ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities) as profiler:
        for _ in range(count):
            gather()
        _finish(device)
    copies = [e for e in profiler.events() or () if "memcpy dtod" in e.name.lower() or "allgather" in e.name.lower()]
    return [e.device_time_total / 1e6 for e in copies if e.device_type.name == "CUDA"]


# -- main -------------------------------------------------------------------------------------


def about() -> dict[str, Any]:
    """Return the versions of torch and its libraries, and the GPUs that it sees; ``why`` says why it sees none."""
    found: dict[str, Any] = {"torch": str(torch.__version__), "cuda": torch.version.cuda, "rocm": torch.version.hip}
    found |= {"nccl": None, "gpus": [], "uuid": "", "why": ""}
    if not torch.cuda.is_available():
        try:
            torch.cuda.init()
        except (RuntimeError, AssertionError) as error:
            found["why"] = str(error).partition("\n")[0]
        return found
    found["gpus"] = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
    found["uuid"] = str(getattr(torch.cuda.get_device_properties(0), "uuid", ""))
    if (nccl := nccl_version()) is not None:
        found["nccl"] = ".".join(map(str, nccl))
    return found


def recorded(device: torch.device) -> bytes | None:
    """Return a dump of PyTorch's Flight Recorder for the default group's backend; ``None`` if this torch has none."""
    backend = dist.distributed_c10d._get_default_group()._get_backend(device).name()
    older = backend in ("nccl", "nccl-legacy")
    dump = getattr(torch._C._distributed_c10d, f"_dump_{'nccl' if older else 'fr'}_trace", None)
    if dump is None or older:
        return None if dump is None else bytes(dump())
    try:
        return bytes(dump(backend=backend))  # since torch 2.15 each backend has a recorder of its own
    except TypeError:
        return bytes(dump())


def train(given: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """Run a scene; return its loss, the median time of a step, and what else was asked for."""
    torch.manual_seed(0)
    step, took, loss = SCENES[given.scene](device), [], torch.zeros(())
    for number in range(WARM_UP + given.steps):
        began = time.perf_counter()
        loss = step()
        _finish(device)
        if number >= WARM_UP:
            took.append(time.perf_counter() - began)
    # As text: a loss that is not a number would differ from itself.
    result: dict[str, Any] = {"loss": float(loss).hex(), "step_s": statistics.median(took)}
    if given.gathers:
        result["gathers"] = gathers(device, given.gathers, given.profile)
    if given.scene == "graphs":  # the Flight Recorder does not see replays
        result["ran"] = {"all_gather": WARM_UP + given.steps, "all_reduce": WARM_UP + given.steps + IN_FLIGHT}
    elif given.recorder is not None and (dump := recorded(device)) is not None:
        given.recorder.write_bytes(dump)
    return result


def main() -> None:
    """Run a scene."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("scene", choices=[*SCENES, "about"])
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--gathers", type=int, default=0, help="number of all_gathers to time")
    parser.add_argument("--profile", action="store_true", help="time them with torch.profiler, not with CUDA events")
    parser.add_argument("--recorder", type=Path, help="file for a dump of PyTorch's Flight Recorder")
    given = parser.parse_args()
    if given.scene == "about":
        os.write(1, (json.dumps(about()) + "\n").encode())
        return
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
    with nullcontext() if device.type == "cpu" else torch.cuda.stream(torch.cuda.Stream()):
        result = train(given, device)
    dist.destroy_process_group()
    os.write(1, (json.dumps(result) + "\n").encode())


if __name__ == "__main__":
    main()
