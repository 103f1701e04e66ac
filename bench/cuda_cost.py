"""What timing adds to one NCCL operation in the trainer, in µs of wall time at its launch (``make bench-cuda``).

The CUDA build of PyTorch and NCCL on the simulated CUDA driver of ``tests/cuda_rig``: two ranks, and a device that is busy while the
operations are launched. Blocks without and with each tool follow one another, many times over; the figures are medians over the rounds,
each block minus the one without a tool in the same round. The driver is simulated, so its own calls cost less or more than a real one's.
"""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from pathlib import Path
from statistics import median
from time import perf_counter_ns
from typing import Any

sys.path.append(str(Path(__file__).parents[1]))

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

import commwatch
from bench.common import emit, last_json, scratch
from commwatch.collectors.probe import torch_collectives, torch_native
from commwatch.collectors.wire import events as ev
from commwatch.collectors.wire.ring_reader import RingReader
from tests.cuda_rig.build import build

GPUS = Path(__file__).parents[1] / "tests" / "collectors" / "fake_nvml" / "two_h100.txt"
ROUNDS, CALLS, WARM_UP = 40, 200, 20
#: For how long the device is busy: longer than the launches of a block.
BUSY_CYCLES = 200 * 1_980_000
BUDGET_US = 2.0


class Ranks:
    """The operations that are measured, in one rank: each tool has a process group of its own, as timing cannot be switched off again."""

    def __init__(self) -> None:
        self.tensor = torch.zeros(1024, device="cuda")
        self.plain, self.probed = dist.new_group([0, 1]), dist.new_group([0, 1])
        os.environ["TORCH_NCCL_ENABLE_TIMING"] = "1"
        self.timed = dist.new_group([0, 1])
        del os.environ["TORCH_NCCL_ENABLE_TIMING"]
        for group in (self.plain, self.probed, self.timed):
            dist.all_reduce(self.tensor, group=group)

    def per_call_us(self, group: Any) -> float:
        """Mean wall time of launching one operation, in a block of them."""
        for _ in range(WARM_UP):
            dist.all_reduce(self.tensor, group=group, async_op=True).wait()
        torch.cuda.synchronize()
        torch.cuda._sleep(BUSY_CYCLES)
        works = []
        gc.disable()
        begin = perf_counter_ns()
        for _ in range(CALLS):
            works.append(dist.all_reduce(self.tensor, group=group, async_op=True))
        took_ns = perf_counter_ns() - begin
        gc.enable()
        for work in works:
            work.wait()
        torch.cuda.synchronize()
        return took_ns / CALLS / 1e3

    def probed_us(self) -> float:
        """With the probe, native hook and default timing; all operations have durations. Not the first block after the installation."""
        env = {**os.environ, "COMMWATCH_HOOK": "native", "COMMWATCH_BUDGET": "0"}
        assert torch_collectives.install(env), "no native hook"
        try:
            dist.all_reduce(self.tensor, group=self.probed)
            path = torch_collectives.ring_file()
            assert path is not None, "the probe is off"
            self.per_call_us(self.probed)
            took_us = self.per_call_us(self.probed)
        finally:
            commwatch.uninstall()
            torch_native.unhook()
        ring = RingReader(path)
        try:
            records = [ev.Record._make(fields) for fields in ev.RECORD.iter_unpack(ring.drain(final=True).records)]
            assert len(records) == 1 + 2 * (WARM_UP + CALLS), f"{len(records)} records"
            timed = sum(record.timing == ev.BY_EVENTS for record in records)
            # The first of the group has none, nor have those that were in flight when the probe was removed.
            assert timed >= 2 * CALLS, f"{timed} of {len(records)} operations have a duration"
        finally:
            ring.close()
            path.unlink()
        return took_us

    def one_round(self) -> dict[str, float]:
        """Every arm once, in added µs a call."""
        gc.collect()
        plain = self.per_call_us(self.plain)
        figures = {"plain_us": plain, "native_us": self.probed_us() - plain}
        figures["enable_timing_us"] = self.per_call_us(self.timed) - plain
        with profile(activities=[ProfilerActivity.CPU]):
            figures["profiler_us"] = self.per_call_us(self.plain) - plain
        return {**figures, "noise_us": self.per_call_us(self.plain) - plain}


def measure() -> None:
    """Measure in one rank; rank 0 prints the figures."""
    torch.set_num_threads(1)
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    ranks = Ranks()
    ranks.one_round()
    rounds = [ranks.one_round() for _ in range(ROUNDS)]
    if dist.get_rank() == 0:
        emit({name: median(figures[name] for figures in rounds) for name in rounds[0]})
    dist.destroy_process_group()


def launch() -> None:
    """Run both ranks on the simulated driver, and print a table."""
    libraries = build()
    with scratch(in_memory=True) as directory:
        env = {
            **os.environ,
            "COMMWATCH_DIR": str(directory),
            "LD_LIBRARY_PATH": str(libraries),
            "LD_PRELOAD": str(libraries / "libcuda.so.1"),
            "FAKE_NVML": str(GPUS),
            "OMP_NUM_THREADS": "1",
            "PYTHONWARNINGS": "ignore",
        }
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", __file__]
        done = subprocess.run(command, env=env, stdout=subprocess.PIPE, text=True, check=True)
    f = last_json(done.stdout)
    print(f"| one NCCL operation, torch {torch.__version__}, simulated driver | added at its launch |\n|---|---|")
    over = f["native_us"] > BUDGET_US
    ours = f"+{f['native_us']:.2f} µs (budget {BUDGET_US:.0f} µs; without: {f['plain_us']:.1f} µs, noise {f['noise_us']:+.2f} µs)"
    print(f"| commwatch, native hook, default settings | {f'**{ours}**' if over else ours} |")
    print(f"| TORCH_NCCL_ENABLE_TIMING=1 alone | {f['enable_timing_us']:+.2f} µs |")
    print(f"| torch.profiler, CPU activities | {f['profiler_us']:+.2f} µs |")


if __name__ == "__main__":
    measure() if "RANK" in os.environ else launch()
