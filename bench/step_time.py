"""What the probe makes of a training step: wall time and CPU time of a step with 200 all_reduces on two Gloo ranks.

DistributedDataParallel over 200 parameters, each a bucket of its own. Blocks of steps without a tool, with the
probe, without again and under torch.profiler follow one another, shuffled anew in each round; the figures are medians
over the rounds of each block's ratio to the mean of the two without, whose own ratio is the noise floor. Wall time is
the slower rank's, CPU time that of both, all threads included.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from statistics import median
from typing import Any

sys.path.append(str(Path(__file__).parents[1]))

import torch
import torch.distributed as dist
from torch import nn
from torch.profiler import ProfilerActivity, profile

import commwatch
from bench.common import OPS_PER_STEP, emit, last_json, own_cpu_s, scratch
from commwatch.collectors import torch_collectives
from commwatch.collectors.events import OP_CODE, RECORD
from commwatch.collectors.ring import RingReader

RANKS = 2
ROUNDS = 24
STEPS = 5
WARM_UP = 2
WIDTH, BATCH = 96, 192
PLAIN, PROBE, AGAIN, PROFILER = ARMS = ("plain", "python", "again", "profiler")

Block = tuple[float, float]


class Trainer:
    """One rank's model, and its steps."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        layers = [nn.Linear(WIDTH, WIDTH) for _ in range(OPS_PER_STEP // 2)]
        self._model = nn.parallel.DistributedDataParallel(nn.Sequential(*layers), bucket_cap_mb=1e-6)
        self._optimizer = torch.optim.SGD(self._model.parameters(), 1e-4)
        self._input = torch.randn(BATCH, WIDTH)

    def steps(self, count: int) -> None:
        """Train that many steps."""
        for _ in range(count):
            loss = self._model(self._input).sum()
            loss.backward()
            self._optimizer.step()
            self._optimizer.zero_grad()


@contextmanager
def probe() -> Iterator[None]:
    """The probe; at the end, that it has recorded every all_reduce."""
    commwatch.install()
    try:
        yield
        path = torch_collectives.ring_file()
    finally:
        commwatch.uninstall()
    assert path is not None, "the probe is off"
    ring = RingReader(path)
    seen = sum(fields[1] == OP_CODE["all_reduce"] for fields in RECORD.iter_unpack(ring.drain(final=True).records))
    ring.close()
    path.unlink()
    assert seen == (WARM_UP + STEPS) * OPS_PER_STEP, f"{seen} all_reduces in {WARM_UP + STEPS} steps"


def tool_of(arm: str) -> AbstractContextManager[Any]:
    """What an arm has switched on."""
    if arm == PROBE:
        return probe()
    return profile(activities=[ProfilerActivity.CPU]) if arm == PROFILER else nullcontext()


def block(trainer: Trainer, arm: str) -> Block:
    """Wall and CPU seconds of a step in this rank."""
    with tool_of(arm):
        trainer.steps(WARM_UP)
        dist.barrier()
        begin, cpu = time.perf_counter(), own_cpu_s()
        trainer.steps(STEPS)
        measured = (time.perf_counter() - begin) / STEPS, (own_cpu_s() - cpu) / STEPS
        dist.barrier()
    return measured


def train(rank: int, store: Path) -> None:
    """One rank: every arm in every round; prints its blocks."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    trainer = Trainer()
    trainer.steps(20)
    rounds = []
    for n in range(ROUNDS):
        # Shuffled, for all ranks alike: no arm always comes after the same other one.
        order = random.Random(n).sample(ARMS, len(ARMS))  # noqa: S311
        rounds.append({arm: block(trainer, arm) for arm in order})
    emit({"rounds": rounds})
    # Not by the interpreter's way out: torch 2.13 with Gloo sometimes aborts there, with no tool at all.
    os._exit(0)


def both_ranks(directory: Path) -> list[list[dict[str, Block]]]:
    """Run the two ranks; each one's rounds."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", "COMMWATCH_DIR": str(directory / "run"), "COMMWATCH_HOOK": "python"}
    command = [sys.executable, __file__, str(directory / "store")]
    ranks = [
        subprocess.Popen([*command, str(r)], env={**env, "RANK": str(r)}, stdout=subprocess.PIPE, text=True)
        for r in range(RANKS)
    ]
    try:
        outputs = [rank.communicate(timeout=400)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    return [last_json(output)["rounds"] for output in outputs]


def compare(ranks: list[list[dict[str, Block]]]) -> dict[str, float]:
    """Medians over the rounds."""
    wall = [{arm: max(rank[arm][0] for rank in rank_round) for arm in ARMS} for rank_round in zip(*ranks, strict=True)]
    cpu = [{arm: sum(rank[arm][1] for rank in rank_round) for arm in ARMS} for rank_round in zip(*ranks, strict=True)]
    figures = {"wall_ms": 1e3 * median(r[PLAIN] for r in wall), "cpu_ms": 1e3 * median(r[PLAIN] for r in cpu)}
    for kind, rounds in (("wall", wall), ("cpu", cpu)):
        figures[f"{AGAIN}_{kind}_ratio"] = median(r[AGAIN] / r[PLAIN] for r in rounds)
        for arm in (PROBE, PROFILER):
            figures[f"{arm}_{kind}_ratio"] = median(r[arm] / without(r) for r in rounds)
    added = [(r[PROBE] - without(r)) / (RANKS * OPS_PER_STEP) for r in cpu]
    return {**figures, "python_cpu_us_per_op": 1e6 * median(added)}


def without(block_of: dict[str, float]) -> float:
    """Mean of the two blocks without a tool."""
    return (block_of[PLAIN] + block_of[AGAIN]) / 2


def main() -> None:
    """Measure and print; with a store and a rank as arguments, be that rank."""
    if len(sys.argv) > 1:
        train(int(sys.argv[2]), Path(sys.argv[1]))
    with scratch(in_memory=True) as directory:
        ranks = both_ranks(directory)
    emit({**compare(ranks), "rounds": ROUNDS, "steps": STEPS, "ops_per_step": OPS_PER_STEP})


if __name__ == "__main__":
    main()
