"""What timing adds to one NCCL operation in the trainer, in µs of the launching thread (``make bench-cuda``).

The CUDA build of PyTorch and NCCL on the simulated CUDA driver of ``tests/cuda_rig``: two ranks, and a device that is busy while the
operations are launched. One rank launches at a time, while the other sleeps, so that on a machine with few cores the ranks do not slow down
each other. Each round measures one block of operations with each tool, in a new random order, after a block that warms the caches, and there
are several jobs, because the addresses of a process make a difference of their own. PyTorch's profiler has its own jobs, because the other
figures were higher with it in theirs. A figure is the lower quartile of all blocks: what disturbs a block makes it slower, never faster. Two
times are measured: the thread's CPU time, to which the budget refers, and wall time, which includes locks and, where cores are few, the turns
of other threads.

``--real-gpu``: on this machine's GPUs instead, or on one GPU that both ranks share, which NCCL allows since 2.30.

The simulated driver's calls cost less or more than a real one's. For an operation, the hook makes PyTorch record its begin, which the row of
``TORCH_NCCL_ENABLE_TIMING=1`` shows, and asks whether the stream is captured.
"""

from __future__ import annotations

import argparse
import gc
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from random import Random
from statistics import quantiles
from time import perf_counter_ns, thread_time_ns
from typing import Any, NamedTuple

sys.path.append(str(Path(__file__).parents[1]))

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore
from torch.profiler import ProfilerActivity, profile

import commwatch
from bench.common import emit, last_json, scratch
from commwatch.probe import torch_collectives, torch_native
from commwatch.wire import events as ev
from commwatch.wire.ring_reader import RingReader
from tests.cuda_rig.build import build

GPUS = Path(__file__).parents[1] / "tests" / "collectors" / "fake_nvml" / "two_h100.txt"
JOBS, ROUNDS, CALLS, WARM_UP = 8, 15, 200, 20
#: What is measured in the same jobs, in each of them beside operations without a tool.
TOGETHER = (("again", "native", "enable_timing"), ("profiler",))
#: For how long the device is busy: longer than the launches of a block.
BUSY_CYCLES = 30 * 1_980_000
BUDGET_US = 2.0


class Cost(NamedTuple):
    """µs of launching one operation, or the difference of two."""

    cpu_us: float
    wall_us: float

    def over(self, less: Cost) -> Cost:
        """The difference."""
        return Cost(self.cpu_us - less.cpu_us, self.wall_us - less.wall_us)


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
        self._store = FileStore(str(Path(os.environ["COMMWATCH_DIR"]) / "turns"), dist.get_world_size())
        self._blocks = 0

    @contextmanager
    def _turn(self) -> Iterator[None]:
        """Both ranks begin the block, rank 0 first; rank 1 begins when rank 0 has left it."""
        self._blocks += 1
        ready, left = f"ready {self._blocks}", f"left {self._blocks}"
        if dist.get_rank() == 0:
            self._store.wait([ready])
            yield
            self._store.set(left, "")
        else:
            self._store.set(ready, "")
            self._store.wait([left])
            yield

    def per_call(self, group: Any) -> Cost:
        """Mean time of launching one operation, in a block of them."""
        for _ in range(WARM_UP):
            dist.all_reduce(self.tensor, group=group, async_op=True).wait()
        torch.cuda.synchronize()
        works = []
        with self._turn():
            torch.cuda._sleep(BUSY_CYCLES)
            gc.disable()
            begin, begin_cpu = perf_counter_ns(), thread_time_ns()
            for _ in range(CALLS):
                works.append(dist.all_reduce(self.tensor, group=group, async_op=True))
            took_cpu_ns, took_ns = thread_time_ns() - begin_cpu, perf_counter_ns() - begin
            gc.enable()
        for work in works:
            work.wait()
        torch.cuda.synchronize()
        return Cost(took_cpu_ns / CALLS / 1e3, took_ns / CALLS / 1e3)

    def probed(self) -> Cost:
        """With the probe, native hook and default timing; all operations have durations."""
        env = {**os.environ, "COMMWATCH_HOOK": "native", "COMMWATCH_BUDGET": "0"}
        assert torch_collectives.install(env), "no native hook"
        try:
            dist.all_reduce(self.tensor, group=self.watched)
            path = torch_collectives.ring_file()
            assert path is not None, "the probe is off"
            took = self.warm(self.watched)
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

    def warm(self, group: Any) -> Cost:
        """The second of two blocks. The first finds cold caches, and has to make events."""
        self.per_call(group)
        return self.per_call(group)

    def profiled(self) -> Cost:
        """With PyTorch's profiler, CPU activities only."""
        with profile(activities=[ProfilerActivity.CPU]):
            return self.warm(self.plain)

    def one_round(self, random: Random, names: Sequence[str]) -> dict[str, Cost]:
        """Each of these arms once."""
        arms: dict[str, Callable[[], Cost]] = {
            "plain": lambda: self.warm(self.plain),
            "again": lambda: self.warm(self.plain),
            "native": self.probed,
            "enable_timing": lambda: self.warm(self.timed),
            "profiler": self.profiled,
        }
        gc.collect()
        return {name: arms[name]() for name in random.sample(names, len(names))}


def lower_quartile(costs: Iterable[Cost]) -> Cost:
    """Of each of the two times."""
    return Cost(*(quantiles(times, n=4)[0] for times in zip(*costs, strict=True)))


def measure(seed: int, names: Sequence[str]) -> None:
    """Measure these arms in one rank, in orders that the seed gives; rank 0 prints the times of all blocks."""
    torch.set_num_threads(1)
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    dist.init_process_group("nccl")
    ranks, random = Ranks(), Random(seed)  # noqa: S311  both ranks have the same order
    ranks.one_round(random, names)
    rounds = [ranks.one_round(random, names) for _ in range(ROUNDS)]
    if dist.get_rank() == 0:
        emit({name: [each[name] for each in rounds] for name in rounds[0]})
    dist.destroy_process_group()


def job(device: Mapping[str, str], seed: int, names: Iterable[str]) -> dict[str, list[Cost]]:
    """Run both ranks with the settings of a device, and return the times of all blocks of these arms."""
    with scratch(in_memory=True) as directory:
        common = {"COMMWATCH_DIR": str(directory), "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
        env = {**os.environ, **common, **device}
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
        command = [*launcher, __file__, str(seed), *names]
        done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        sys.exit(done.stderr)
    return {name: [Cost(*times) for times in blocks] for name, blocks in last_json(done.stdout).items()}


def simulated() -> dict[str, str]:
    """Settings of a job on the simulated driver."""
    libraries = build()
    preloaded = str(libraries / "libcuda.so.1")
    return {"LD_LIBRARY_PATH": str(libraries), "LD_PRELOAD": preloaded, "FAKE_NVML": str(GPUS)}


def compared(device: Mapping[str, str], names: Sequence[str], number: int) -> tuple[Cost, dict[str, Cost]]:
    """Run so many jobs; return the cost of an operation without a tool, and what each arm adds."""
    jobs = [job(device, seed, ("plain", *names)) for seed in range(number)]
    found = {name: lower_quartile(cost for each in jobs for cost in each[name]) for name in jobs[0]}
    plain = found.pop("plain")
    return plain, {name: cost.over(plain) for name, cost in found.items()}


def launch() -> None:
    """Run the jobs, and print a table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--real-gpu", action="store_true")
    parser.add_argument("--jobs", type=int, default=JOBS)
    given = parser.parse_args()
    device = {"NCCL_MULTI_RANK_GPU_ENABLE": "1"} if given.real_gpu else simulated()
    plain, added = compared(device, TOGETHER[0], given.jobs)
    added |= compared(device, TOGETHER[1], max(given.jobs // 4, 1))[1]
    on = torch.cuda.get_device_name() if given.real_gpu else "simulated driver"
    print(f"| one NCCL operation, torch {torch.__version__}, {on} | CPU time | wall time |\n|---|---|---|")
    print(f"| without a tool | {plain.cpu_us:.1f} µs | {plain.wall_us:.1f} µs |")
    print(f"| without a tool, again (noise) | {_cells(added['again'])} |")
    print(
        f"| commwatch, native hook, default settings; budget {BUDGET_US:.0f} µs | {_cells(added['native'], BUDGET_US)} |"
    )
    print(f"| TORCH_NCCL_ENABLE_TIMING=1 alone | {_cells(added['enable_timing'])} |")
    print(f"| torch.profiler, CPU activities | {_cells(added['profiler'])} |")


def _cells(added: Cost, budget_us: float = float("inf")) -> str:
    cpu = f"{added.cpu_us:+.2f} µs"
    return f"{f'**{cpu}**' if added.cpu_us > budget_us else cpu} | {added.wall_us:+.2f} µs"


if __name__ == "__main__":
    measure(int(sys.argv[1]), sys.argv[2:]) if "RANK" in os.environ else launch()
