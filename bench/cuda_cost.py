"""What timing adds to one NCCL operation in the trainer, in µs of the launching thread (``make bench-cuda``).

The CUDA build of PyTorch and NCCL on the simulated CUDA driver of ``tests/cuda_rig``: two ranks, and a device that is busy while the
operations are launched. Blocks without and with each tool follow one another, many times over; the figures are medians over the rounds,
each block minus the one without a tool in the same round. Two times are measured: the thread's CPU time, to which the budget refers,
and wall time, which includes locks and, where cores are few, the turns of other threads.

The driver is simulated, so its calls cost less or more than a real one's. One row shows what the calls that the hook makes for an
operation cost here if they are made by hand: PyTorch's timing of the operation, an event, and a query whether the stream is captured. The
last row is the difference, our own code.
"""

from __future__ import annotations

import ctypes
import gc
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import median
from time import perf_counter_ns, thread_time_ns
from typing import Any, NamedTuple

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


class Cost(NamedTuple):
    """µs of launching one operation, or the difference of two."""

    cpu_us: float
    wall_us: float

    def over(self, less: Cost) -> Cost:
        """The difference."""
        return Cost(self.cpu_us - less.cpu_us, self.wall_us - less.wall_us)


class Calls:
    """The calls of the driver that the hook makes for one operation, made through ctypes; and empty ones, which cost only ctypes."""

    def __init__(self) -> None:
        cuda = ctypes.CDLL("libtorch_cuda.so")
        self._record, self._capturing, self._nothing = (
            cuda.cudaEventRecord,
            cuda.cudaStreamIsCapturing,
            cuda.cudaPeekAtLastError,
        )
        self._events = [torch.cuda.Event() for _ in range(CALLS)]
        for event in self._events:
            event.record()
        self._handles = [ctypes.c_void_p(event.cuda_event) for event in self._events]
        self._stream, self._status = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream), ctypes.c_int()
        self._out = ctypes.byref(self._status)

    def made(self, number: int) -> None:
        """Record an event, and ask whether the stream is captured."""
        failed = self._record(self._handles[number], self._stream), self._capturing(self._stream, self._out)
        assert failed == (0, 0)

    def empty(self, number: int) -> None:
        """As many calls of the CUDA runtime that do not reach the driver."""
        failed = self._nothing(self._handles[number], self._stream), self._nothing(self._stream, self._out)
        assert failed == (0, 0)


class Ranks:
    """The operations that are measured, in one rank: each tool has a process group of its own, as timing cannot be switched off again."""

    def __init__(self) -> None:
        self.tensor = torch.zeros(1024, device="cuda")
        self.plain, self.watched = dist.new_group([0, 1]), dist.new_group([0, 1])
        os.environ["TORCH_NCCL_ENABLE_TIMING"] = "1"
        self.timed = dist.new_group([0, 1])
        del os.environ["TORCH_NCCL_ENABLE_TIMING"]
        for group in (self.plain, self.watched, self.timed):
            dist.all_reduce(self.tensor, group=group)
        self._calls = Calls()

    def per_call(self, group: Any, beside: Callable[[int], object] | None = None) -> Cost:
        """Mean time of launching one operation, in a block of them, each after a call of ``beside`` with its number."""
        for _ in range(WARM_UP):
            dist.all_reduce(self.tensor, group=group, async_op=True).wait()
        torch.cuda.synchronize()
        torch.cuda._sleep(BUSY_CYCLES)
        works = []
        gc.disable()
        begin, begin_cpu = perf_counter_ns(), thread_time_ns()
        for number in range(CALLS):
            if beside is not None:
                beside(number)
            works.append(dist.all_reduce(self.tensor, group=group, async_op=True))
        took_cpu_ns, took_ns = thread_time_ns() - begin_cpu, perf_counter_ns() - begin
        gc.enable()
        for work in works:
            work.wait()
        torch.cuda.synchronize()
        return Cost(took_cpu_ns / CALLS / 1e3, took_ns / CALLS / 1e3)

    def probed(self) -> Cost:
        """With the probe, native hook and default timing; all operations have durations. Not the first block after the installation."""
        env = {**os.environ, "COMMWATCH_HOOK": "native", "COMMWATCH_BUDGET": "0"}
        assert torch_collectives.install(env), "no native hook"
        try:
            dist.all_reduce(self.tensor, group=self.watched)
            path = torch_collectives.ring_file()
            assert path is not None, "the probe is off"
            self.per_call(self.watched)
            took = self.per_call(self.watched)
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
        return took

    def one_round(self) -> dict[str, Cost]:
        """Every arm once: launches without a tool, and what each tool adds."""
        gc.collect()
        plain = self.per_call(self.plain)
        figures = {"plain": plain, "native": self.probed().over(plain)}
        figures["enable_timing"] = self.per_call(self.timed).over(plain)
        figures["calls"] = self.per_call(self.timed, self._calls.made).over(
            self.per_call(self.plain, self._calls.empty)
        )
        figures["own"] = figures["native"].over(figures["calls"])
        with profile(activities=[ProfilerActivity.CPU]):
            figures["profiler"] = self.per_call(self.plain).over(plain)
        return {**figures, "noise": self.per_call(self.plain).over(plain)}


def measure() -> None:
    """Measure in one rank; rank 0 prints the figures."""
    torch.set_num_threads(1)
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    ranks = Ranks()
    ranks.one_round()
    rounds = [ranks.one_round() for _ in range(ROUNDS)]
    if dist.get_rank() == 0:
        emit(
            {
                name: [median(times) for times in zip(*(each[name] for each in rounds), strict=True)]
                for name in rounds[0]
            }
        )
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
    found = {name: Cost(*times) for name, times in last_json(done.stdout).items()}
    print(f"| one NCCL operation, torch {torch.__version__}, simulated driver | CPU time | wall time |\n|---|---|---|")
    print(f"| without a tool | {found['plain'].cpu_us:.1f} µs | {found['plain'].wall_us:.1f} µs |")
    print(f"| without a tool, again (noise) | {_cells(found['noise'])} |")
    print(
        f"| commwatch, native hook, default settings; budget {BUDGET_US:.0f} µs | {_cells(found['native'], BUDGET_US)} |"
    )
    print(f"| of which PyTorch's timing and calls of the driver, made by hand | {_cells(found['calls'])} |")
    print(f"| of which our own code | {_cells(found['own'])} |")
    print(f"| TORCH_NCCL_ENABLE_TIMING=1 alone | {_cells(found['enable_timing'])} |")
    print(f"| torch.profiler, CPU activities | {_cells(found['profiler'])} |")


def _cells(added: Cost, budget_us: float = float("inf")) -> str:
    cpu = f"{added.cpu_us:+.2f} µs"
    return f"{f'**{cpu}**' if added.cpu_us > budget_us else cpu} | {added.wall_us:+.2f} µs"


if __name__ == "__main__":
    measure() if "RANK" in os.environ else launch()
