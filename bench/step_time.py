"""What the probe makes of a training step: wall time and CPU time of a step on two Gloo ranks that keep two cores busy.

DistributedDataParallel in two sizes: with 24 small buckets, and with 200 parameters, each a bucket of its own. Blocks of
steps without a tool, with either hook, without again and under torch.profiler follow one another, in balanced order; the
figures are medians over the rounds of each block's ratio to the mean of the two without, whose own ratio is
the noise floor. Wall time is the slower rank's, CPU time that of both, all threads included.
"""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

sys.path.append(str(Path(__file__).parents[1]))

import torch
import torch.distributed as dist
from torch import nn
from torch.profiler import ProfilerActivity, profile

import commwatch
from bench.common import OPS_PER_STEP, emit, last_json, own_cpu_s, scratch
from commwatch.probe import torch_collectives, torch_native
from commwatch.wire.events import OP_CODE, RECORD
from commwatch.wire.ring_reader import RingReader

RANKS = 2
ROUNDS = 40
WARM_UP = 3
PLAIN, NATIVE, PYTHON, AGAIN, PROFILER = ARMS = ("plain", "native", "python", "again", "profiler")
PROBES = (NATIVE, PYTHON)


class Workload(NamedTuple):
    """A model, and how many of its steps make a block."""

    layers: int
    width: int
    batch: int
    bucket_mb: float
    ops_per_step: int
    steps: int


WORKLOADS = {
    "small": Workload(layers=24, width=256, batch=64, bucket_mb=0.25, ops_per_step=24, steps=10),
    "many": Workload(layers=100, width=96, batch=192, bucket_mb=1e-6, ops_per_step=OPS_PER_STEP, steps=5),
}

Block = tuple[float, float]


class Trainer:
    """One rank's model, and its steps."""

    def __init__(self, workload: Workload) -> None:
        torch.manual_seed(0)
        self.workload = workload
        layers = [nn.Linear(workload.width, workload.width) for _ in range(workload.layers)]
        model = nn.Sequential(*layers)
        self._model = nn.parallel.DistributedDataParallel(model, bucket_cap_mb=workload.bucket_mb)
        self._optimizer = torch.optim.SGD(self._model.parameters(), 1e-4)
        self._input = torch.randn(workload.batch, workload.width)

    def steps(self, count: int) -> None:
        """Train that many steps."""
        for _ in range(count):
            loss = self._model(self._input).sum()
            loss.backward()
            self._optimizer.step()
            self._optimizer.zero_grad()


@contextmanager
def probe(hook: str, expected: int) -> Iterator[None]:
    """The probe; at the end, that it has recorded every all_reduce, and is gone without a trace."""
    assert torch_collectives.install({**os.environ, "COMMWATCH_HOOK": hook, "COMMWATCH_BUDGET": "0"}), f"no {hook} hook"
    try:
        yield
        path = torch_collectives.ring_file()
    finally:
        commwatch.uninstall()
        torch_native.unhook()
    assert path is not None, "the probe is off"
    ring = RingReader(path)
    seen = sum(fields[1] == OP_CODE["all_reduce"] for fields in RECORD.iter_unpack(ring.drain(final=True).records))
    ring.close()
    path.unlink()
    assert seen == expected, f"{seen} all_reduces, not {expected}"


def tool_of(arm: str, workload: Workload) -> AbstractContextManager[Any]:
    """What an arm has switched on."""
    if arm in PROBES:
        return probe(arm, (WARM_UP + workload.steps) * workload.ops_per_step)
    return profile(activities=[ProfilerActivity.CPU]) if arm == PROFILER else nullcontext()


def balanced(arms: Sequence[str]) -> list[list[str]]:
    """Orders in which each arm stands equally often in each place, and after each other arm (E. J. Williams, 1949)."""
    n = len(arms)
    zigzag = [(place + 1) // 2 if place % 2 else -place // 2 for place in range(n)]
    squares = [[[arms[(at + shift) % n] for at in zigzag] for shift in range(n)]]
    squares.append([order[::-1] for order in squares[0]])
    return [order for square in squares for order in square]


def block(trainer: Trainer, arm: str) -> Block:
    """Wall and CPU seconds of a step in this rank."""
    steps = trainer.workload.steps
    gc.collect()  # what the arm before has left
    with tool_of(arm, trainer.workload):
        trainer.steps(WARM_UP)
        dist.barrier()
        begin, cpu = time.perf_counter(), own_cpu_s()
        trainer.steps(steps)
        measured = (time.perf_counter() - begin) / steps, (own_cpu_s() - cpu) / steps
        dist.barrier()
    return measured


def train(rank: int, store: Path) -> None:
    """One rank: every arm in every round; prints its blocks."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    rounds: dict[str, list[dict[str, Block]]] = {}
    for name, workload in WORKLOADS.items():
        trainer = Trainer(workload)
        trainer.steps(20)
        orders = balanced(ARMS)
        rounds[name] = [{arm: block(trainer, arm) for arm in orders[n % len(orders)]} for n in range(ROUNDS)]
    emit(rounds)
    # Not by the interpreter's way out: torch 2.13 with Gloo sometimes aborts there, with no tool at all.
    os._exit(0)


def both_ranks(directory: Path, script: str = __file__) -> list[dict[str, Any]]:
    """Run the two ranks of a benchmark; the figures of each one. Of this script these are its rounds, by workload."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", "COMMWATCH_DIR": str(directory / "run")}
    command = [sys.executable, script, str(directory / "store")]
    ranks = [
        subprocess.Popen([*command, str(r)], env={**env, "RANK": str(r)}, stdout=subprocess.PIPE, text=True)
        for r in range(RANKS)
    ]
    try:
        outputs = [rank.communicate(timeout=580)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    return [last_json(output) for output in outputs]


def compare(ranks: list[list[dict[str, Block]]], ops_per_step: int) -> dict[str, float]:
    """Medians over the rounds."""
    wall = [{arm: max(rank[arm][0] for rank in rank_round) for arm in ARMS} for rank_round in zip(*ranks, strict=True)]
    cpu = [{arm: sum(rank[arm][1] for rank in rank_round) for arm in ARMS} for rank_round in zip(*ranks, strict=True)]
    figures = {"wall_ms": 1e3 * median(r[PLAIN] for r in wall), "cpu_ms": 1e3 * median(r[PLAIN] for r in cpu)}
    for kind, rounds in (("wall", wall), ("cpu", cpu)):
        figures[f"{AGAIN}_{kind}_ratio"] = median(r[AGAIN] / r[PLAIN] for r in rounds)
        for arm in (*PROBES, PROFILER):
            figures[f"{arm}_{kind}_ratio"] = median(r[arm] / without(r) for r in rounds)
    for arm in PROBES:
        added = [(r[arm] - without(r)) / (RANKS * ops_per_step) for r in cpu]
        figures[f"{arm}_cpu_us_per_op"] = 1e6 * median(added)
    return figures


def without(block_of: dict[str, float]) -> float:
    """Mean of the two blocks without a tool."""
    return (block_of[PLAIN] + block_of[AGAIN]) / 2


def main() -> None:
    """Measure and print; with a store and a rank as arguments, be that rank."""
    if len(sys.argv) > 1:
        train(int(sys.argv[2]), Path(sys.argv[1]))
    results = {}
    with scratch(in_memory=True) as directory:
        ranks = both_ranks(directory)
    for name, workload in WORKLOADS.items():
        figures = compare([rank[name] for rank in ranks], workload.ops_per_step)
        results[name] = {**figures, "rounds": ROUNDS, **workload._asdict()}
    emit(results)


if __name__ == "__main__":
    main()
