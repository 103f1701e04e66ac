"""Training steps on a real GPU without commwatch, with each way of timing, and with its plugin in NCCL.

Two ranks, which share the GPU if there is only one.

    python bench/gpu_steps.py [--rounds 3]

Needs NCCL 2.30 for two ranks on one GPU, and an MPS server, so that their kernels run at the same time. Each round runs one job with each
setting, in turn. A figure is the median of all rounds. Two are measured: the time of a step of DDP with a hundred buckets, and the time of a
small all_reduce, a thousand of which are launched one after another; the second is the worst case.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path
from statistics import median
from time import perf_counter

sys.path.append(str(Path(__file__).parents[1]))

import torch
import torch.distributed as dist

from bench.common import emit, last_json, scratch

ARMS = {
    "without commwatch": {"COMMWATCH": "0"},
    "without commwatch, TORCH_NCCL_ENABLE_TIMING=1": {"COMMWATCH": "0", "TORCH_NCCL_ENABLE_TIMING": "1"},
    "commwatch, COMMWATCH_TIMING=off": {"COMMWATCH": "1", "COMMWATCH_TIMING": "off"},
    "commwatch, COMMWATCH_TIMING=poll": {"COMMWATCH": "1", "COMMWATCH_TIMING": "poll"},
    "commwatch, default settings": {"COMMWATCH": "1"},
    "commwatch, COMMWATCH_NCCL_PLUGIN=on": {"COMMWATCH": "1", "COMMWATCH_NCCL_PLUGIN": "on"},
}
LAYERS, WIDTH, BATCH, STEPS = 50, 1024, 4096, 60
BLOCKS, SMALL_OPS, SMALL = 20, 1000, 1024


def measure() -> None:
    """Measure in one rank; rank 0 prints the median time of a step, and that of a small operation."""
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    dist.init_process_group("nccl")
    found = {"step_s": median(_step_times()), "small_s": median(_small_times())}
    if dist.get_rank() == 0:
        emit(found)
    dist.destroy_process_group()


def _step_times() -> list[float]:
    layers = (torch.nn.Linear(WIDTH, WIDTH, device="cuda") for _ in range(LAYERS))
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Sequential(*layers), bucket_cap_mb=1)
    optimizer, data = torch.optim.SGD(model.parameters(), lr=1e-3), torch.randn(BATCH, WIDTH, device="cuda")
    took = []
    for _ in range(10 + STEPS):
        began = perf_counter()
        model(data).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        torch.cuda.synchronize()
        took.append(perf_counter() - began)
    return took[10:]


def _small_times() -> list[float]:
    tensor, took = torch.zeros(SMALL, device="cuda"), []
    for _ in range(2 + BLOCKS):
        began = perf_counter()
        for _ in range(SMALL_OPS):
            dist.all_reduce(tensor)
        torch.cuda.synchronize()
        took.append((perf_counter() - began) / SMALL_OPS)
    return took[2:]


def job(settings: dict[str, str]) -> dict[str, float]:
    """Run both ranks; return what they measured."""
    with scratch(in_memory=True) as directory:
        gpu = {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_MAX_CTAS": "4", "NCCL_ALLGATHERV_ENABLE": "0"}
        env = {
            **os.environ,
            "COMMWATCH_DIR": str(directory),
            "COMMWATCH_BUDGET": "0",
            "OMP_NUM_THREADS": "1",
            **gpu,
            **settings,
        }
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", __file__]
        done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        sys.exit(done.stderr)
    found: dict[str, float] = last_json(done.stdout)
    return found


def launch() -> None:
    """Run the jobs, and print a table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=3)
    rounds: list[dict[str, dict[str, float]]] = []
    for _ in range(parser.parse_args().rounds):
        rounds.append({})
        for name, settings in ARMS.items():
            found = rounds[-1][name] = job(settings)
            print(f"{name}: {_cells(found['step_s'], found['small_s'])}", file=sys.stderr, flush=True)
    print(
        f"| two ranks on {torch.cuda.get_device_name()}, torch {torch.__version__} | step | an all_reduce of 4 KiB |\n|---|---|---|"
    )
    for name in ARMS:
        medians = (median(each[name][figure] for each in rounds) for figure in ("step_s", "small_s"))
        print(f"| {name} | {_cells(*medians)} |")


def _cells(step_s: float, small_s: float) -> str:
    return f"{step_s * 1e3:.2f} ms | {small_s * 1e6:.1f} µs"


if __name__ == "__main__":
    measure() if "RANK" in os.environ else launch()
