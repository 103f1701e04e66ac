"""Memory the probe adds to a trainer, in MB (10^6 bytes) of resident memory.

Trainers with and without the probe run in turn, one after another: a one-rank Gloo group and so many all_reduces that
the ring has been filled once. The figure is the difference of the medians; the ring itself (1 MB) is part of it.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from statistics import median

sys.path.append(str(Path(__file__).parents[1]))

import torch
import torch.distributed as dist

from bench.common import emit, last_json, memory_mb, scratch

RUNS = 5
PLAIN, *_ = ARMS = ("plain", "native", "python")
#: More than the ring has slots.
CALLS = 20_000


def install() -> None:
    """The probe. Imported here, so that the trainers without it do not have its code in memory."""
    import commwatch

    assert commwatch.install(), "the probe is off"


def check() -> None:
    """The probe has seen every call."""
    from commwatch.probe import torch_collectives
    from commwatch.wire.ring import CURSOR
    from commwatch.wire.ring_reader import RingReader

    path = torch_collectives.ring_file()
    assert path is not None, "the probe is off"
    reader = RingReader(path)
    written = reader.counter(CURSOR)
    assert written >= CALLS > reader.slots, f"{written} records of {CALLS} calls in {reader.slots} slots"


def train(directory: Path, arm: str) -> None:
    """A trainer: prints its memory after its collectives."""
    torch.set_num_threads(1)
    if arm != PLAIN:
        install()
    dist.init_process_group("gloo", init_method=f"file://{directory / 'store'}", rank=0, world_size=1)
    buffer = torch.ones(1024)
    for _ in range(CALLS):
        dist.all_reduce(buffer)
    memory = memory_mb()
    if arm != PLAIN:
        check()
    emit({"memory_mb": memory})
    # Not by the interpreter's way out: torch 2.13 with Gloo sometimes aborts there, with no tool at all.
    os._exit(0)


def trainer_mb(arm: str) -> float:
    """Memory of one trainer."""
    with scratch(in_memory=True) as directory:
        probe = {"COMMWATCH_DIR": str(directory), "COMMWATCH_HOOK": arm, "COMMWATCH_BUDGET": "0"}
        env = {**os.environ, "OMP_NUM_THREADS": "1", **probe}
        command = [sys.executable, __file__, str(directory), arm]
        result = subprocess.run(command, env=env, stdout=subprocess.PIPE, text=True, timeout=120, check=True)
    return float(last_json(result.stdout)["memory_mb"])


def main() -> None:
    """Measure and print; with a directory and an arm as arguments, be that trainer."""
    if len(sys.argv) > 1:
        train(Path(sys.argv[1]), sys.argv[2])
    runs = [{arm: trainer_mb(arm) for arm in ARMS} for _ in range(RUNS)]
    figures = {arm: median(run[arm] for run in runs) for arm in ARMS}
    spread = max(run[PLAIN] for run in runs) - min(run[PLAIN] for run in runs)
    added = {f"{arm}_mb": figures[arm] - figures[PLAIN] for arm in ARMS if arm != PLAIN}
    emit({**added, "plain_mb": figures[PLAIN], "noise_mb": spread, "runs": RUNS, "calls": CALLS})


if __name__ == "__main__":
    main()
