"""A job that watches itself with ``commwatch.watch``, without a launcher of ours, until its own figures are known to it."""

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from common import begin, end, say

import commwatch

#: Steps between two looks; rank 1 is that late in each.
_BETWEEN, _LATE_S = 20, 0.03


def found(ask: Callable[[], Any]) -> Any:
    """What a function returns once it returns something: on a busy machine, the agent may not answer within a second."""
    until_s = time.monotonic() + 60
    while not (answer := ask()) and time.monotonic() < until_s:
        pass
    return answer


with commwatch.watch():
    rank, size = begin()
    known, steps = torch.zeros(1), 0
    end_s = time.monotonic() + 120
    while not known.item() and time.monotonic() < end_s:
        for _ in range(_BETWEEN):
            time.sleep(_LATE_S if rank == 1 else 0.001)
            dist.all_reduce(torch.ones(1000))
            commwatch.step()
            steps += 1
        figures = commwatch.metrics()
        known[0] = float("comm/straggler_rank" in figures)
        dist.all_reduce(known, dist.ReduceOp.MIN)  # each rank asks by itself
    step = found(commwatch.last_step)
    say({
        "steps": steps,
        "metrics": figures,
        "step": step["seq"],
        "ops": sorted(row["by"]["op"] for row in found(commwatch.summary)),
        "late": [verdict["ranks"] for verdict in found(commwatch.verdicts)],
    })  # fmt: skip
    end()
