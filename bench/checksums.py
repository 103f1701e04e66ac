"""What comparing replicas and collectives makes of a training step: wall time, CPU time and memory of two Gloo ranks that keep two cores busy.

DistributedDataParallel with 24 layers. Blocks of 100 steps with the native hook follow one another in balanced order: without checksums (twice), and
replicas and collectives each at the default rate (one check in 100 steps or collectives) and with a check at each step or of each collective. Figures are
medians over the rounds of each block's ratio to the mean of the two without, whose own ratio is the noise floor. Wall time is the slower rank's, CPU time
that of both, all threads included.
"""

from __future__ import annotations

import gc
import os
import sys
import time
from pathlib import Path
from statistics import median

sys.path.append(str(Path(__file__).parents[1]))

import torch
import torch.distributed as dist
from torch import nn

import commwatch
from bench.common import emit, memory_mb, own_cpu_s, scratch
from bench.step_time import RANKS, balanced, both_ranks
from commwatch.probe import torch_collectives, torch_native
from commwatch.wire.events import CHECKSUM, OP_CODE, RECORD, Record
from commwatch.wire.ring_reader import RingReader

ROUNDS, WARM_UP, STEPS = 4, 3, 100
LAYERS, WIDTH, BATCH = 24, 256, 64
OFF, DEFAULT, EACH, RARE, ALL, AGAIN = ARMS = ("off", "default", "each", "collectives", "each_collective", "again")
#: What is checked, and one in how many steps or collectives.
EVERY = {DEFAULT: ("replicas", 100), EACH: ("replicas", 1), RARE: ("collectives", 100), ALL: ("collectives", 1)}
#: Checks of replicas in a block, the first one in its warm-up included.
CHECKS = {DEFAULT: 2, EACH: WARM_UP + STEPS}
#: Parameters, so checksums of a check.
PARAMETERS = 2 * LAYERS

#: Wall and CPU seconds of a step; memory in MB.
Block = tuple[float, float, float]


def block(arm: str) -> Block:
    """Measure one arm in this rank."""
    gc.collect()
    env = {**os.environ, "COMMWATCH_HOOK": "native", "COMMWATCH_BUDGET": "0", "COMMWATCH_CHECKSUM_BUDGET": "0"}
    if arm in EVERY:
        env |= dict(zip(("COMMWATCH_CHECKSUMS", "COMMWATCH_CHECKSUM_EVERY"), map(str, EVERY[arm]), strict=True))
    assert torch_collectives.install(env), "no native hook"
    try:
        torch.manual_seed(0)
        layers = [nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)]
        group = dist.new_group()  # collectives of a group that was used before are not compared
        model = nn.parallel.DistributedDataParallel(nn.Sequential(*layers), bucket_cap_mb=0.25, process_group=group)
        optimizer, given = torch.optim.SGD(model.parameters(), 1e-4), torch.randn(BATCH, WIDTH)

        def steps(count: int) -> None:
            for _ in range(count):
                model(given).sum().backward()
                optimizer.step()
                optimizer.zero_grad()

        steps(WARM_UP)
        dist.barrier()
        begin, cpu = time.perf_counter(), own_cpu_s()
        steps(STEPS)
        measured = (time.perf_counter() - begin) / STEPS, (own_cpu_s() - cpu) / STEPS, memory_mb()
        dist.barrier()
        dist.destroy_process_group(group)
        path = torch_collectives.ring_file()
    finally:
        commwatch.uninstall()
        torch_native.unhook()
    assert path is not None, "the probe is off"
    ring = RingReader(path)
    records = [Record._make(fields) for fields in RECORD.iter_unpack(ring.drain(final=True).records)]
    ring.close()
    path.unlink()
    check_records(arm, records)
    return measured


def check_records(arm: str, records: list[Record]) -> None:
    """Raise ``AssertionError`` unless an arm has made its checks, and no others."""
    seen = [record for record in records if record.op == CHECKSUM]
    replicas = sum(record.tag >= 0 for record in seen)
    checked = {record.seq for record in seen if record.tag < 0}
    launched = {record.seq for record in records if record.op in (OP_CODE["all_reduce"], OP_CODE["broadcast"])}
    assert replicas == PARAMETERS * CHECKS.get(arm, 0), f"{arm}: {replicas} checksums of parameters"
    if arm == ALL:
        assert checked >= launched, f"{len(launched - checked)} collectives without a check"
    elif arm == RARE:
        assert 0 < len(checked) < len(launched) / 20, f"{len(checked)} of {len(launched)} collectives checked"
    else:
        assert not checked


def train(rank: int, store: Path) -> None:
    """One rank: every arm in every round; prints its blocks."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    for arm in ARMS:
        block(arm)
    orders = balanced(ARMS)
    emit({"rounds": [{arm: block(arm) for arm in orders[n % len(orders)]} for n in range(ROUNDS)]})
    # Not by the interpreter's way out: torch 2.13 with Gloo sometimes aborts there, with no tool at all.
    os._exit(0)


def compare(ranks: list[list[dict[str, Block]]]) -> dict[str, float]:
    """Medians over the rounds."""
    pairs = list(zip(*ranks, strict=True))
    wall = [{arm: max(rank[arm][0] for rank in pair) for arm in ARMS} for pair in pairs]
    cpu = [{arm: sum(rank[arm][1] for rank in pair) for arm in ARMS} for pair in pairs]
    memory = [{arm: max(rank[arm][2] for rank in pair) for arm in ARMS} for pair in pairs]
    figures = {"wall_ms": 1e3 * median(r[OFF] for r in wall), "cpu_ms": 1e3 * median(r[OFF] for r in cpu)}
    for kind, rounds in (("wall", wall), ("cpu", cpu)):
        figures[f"{AGAIN}_{kind}_ratio"] = median(r[AGAIN] / r[OFF] for r in rounds)
        for arm in EVERY:
            figures[f"{arm}_{kind}_ratio"] = median(2 * r[arm] / (r[OFF] + r[AGAIN]) for r in rounds)
    figures["check_cpu_ms"] = 1e3 * median((r[EACH] - (r[OFF] + r[AGAIN]) / 2) / RANKS for r in cpu)
    figures["collectives_cpu_ms"] = 1e3 * median((r[ALL] - (r[OFF] + r[AGAIN]) / 2) / RANKS for r in cpu)
    figures["memory_mb"] = median(r[EACH] - (r[OFF] + r[AGAIN]) / 2 for r in memory)
    return figures


def main() -> None:
    """Measure and print; with a store and a rank as arguments, be that rank."""
    if len(sys.argv) > 1:
        train(int(sys.argv[2]), Path(sys.argv[1]))
    with scratch(in_memory=True) as directory:
        figures = compare([rank["rounds"] for rank in both_ranks(directory, __file__)])
    emit({**figures, "rounds": ROUNDS, "parameters": PARAMETERS, "megabytes": 4e-6 * LAYERS * WIDTH * (WIDTH + 1)})


if __name__ == "__main__":
    main()
