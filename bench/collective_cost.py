"""What a tool adds to one all_reduce in the trainer, in µs of wall time, record and completion included.

On the ``fake`` backend, whose operations complete at once, so that nothing but the tool is measured. Blocks of calls
without and with each tool follow one another, many times over; the figures are medians over the rounds, each block
minus the one without a tool in the same round.
"""

from __future__ import annotations

import gc
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from statistics import median
from typing import Any

sys.path.append(str(Path(__file__).parents[1]))

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile
from torch.testing._internal.distributed.fake_pg import FakeStore

import commwatch
from bench.common import OPS_PER_STEP, emit, scratch
from commwatch.probe import torch_collectives, torch_native
from commwatch.wire.ring import CURSOR
from commwatch.wire.ring_reader import RingReader

ROUNDS = 60
CALLS = OPS_PER_STEP
WARM_UP = 20
#: Earlier calls in the second measurement of DeepSpeed: 50 steps. Its logger keeps a list of all durations of an
#: operation, and makes a new list of it and adds it up at every call.
EARLIER_CALLS = 10_000

Call = Callable[[torch.Tensor], Any]


def per_call_us(call: Call, calls: int = CALLS) -> float:
    """Mean duration of one call in a block of them, after a few that do not count."""
    buffer = torch.ones(1024)
    for _ in range(WARM_UP):
        call(buffer)
    begin = time.perf_counter_ns()
    for _ in range(calls):
        call(buffer)
    return (time.perf_counter_ns() - begin) / calls / 1e3


def plain_us() -> float:
    """``torch.distributed`` as it is."""
    return per_call_us(dist.all_reduce)


@contextmanager
def probe(hook: str) -> Iterator[None]:
    """The probe, its ring made; at the end, that it has recorded every call, and is gone without a trace."""
    assert torch_collectives.install({**os.environ, "COMMWATCH_HOOK": hook, "COMMWATCH_BUDGET": "0"}), f"no {hook} hook"
    try:
        dist.all_reduce(torch.ones(1))
        path = torch_collectives.ring_file()
        assert path is not None, "the probe is off"
        yield
    finally:
        commwatch.uninstall()
        torch_native.unhook()
    ring = RingReader(path)
    expected = 1 + WARM_UP + CALLS
    assert ring.counter(CURSOR) == expected, f"{ring.counter(CURSOR)} records of {expected} calls"
    ring.close()
    path.unlink()


def probed_us(hook: str) -> float:
    """With our probe."""
    with probe(hook):
        return per_call_us(dist.all_reduce)


def profiled_us() -> tuple[float, float]:
    """With torch.profiler: what the call takes while it records, and what stopping and reading take per call."""
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        recording = per_call_us(dist.all_reduce)
        begin = time.perf_counter_ns()
    events = profiler.events()
    reading = (time.perf_counter_ns() - begin) / (WARM_UP + CALLS) / 1e3
    assert events is not None
    assert len(events) >= WARM_UP + CALLS, "the profiler has not seen every call"
    return recording, reading


class DeepSpeed:
    """DeepSpeed's communication logger. Raises ``ImportError`` where there is no DeepSpeed."""

    def __init__(self) -> None:
        self._comm = import_module("deepspeed.comm")
        # Its shared-memory operator has no part in this; left alone, it would be compiled now.
        available = import_module("deepspeed.ops").__compatible_ops__
        available.update(dict.fromkeys(available, False))
        self._comm.init_distributed(dist_backend="fake", verbose=False)
        self._comm.configure(enabled=False, prof_all=True, verbose=False, debug=False)

    def added_us(self, earlier_calls: int) -> float:
        """What the logger adds to a call after so many others."""
        off = per_call_us(self._comm.all_reduce)
        timer = self._comm.timers("all_reduce")
        timer.event_timers[:] = [1e-5] * earlier_calls
        self._comm.configure(enabled=True)
        logged = self._logged()
        on = per_call_us(self._comm.all_reduce)
        self._comm.configure(enabled=False)
        assert self._logged() - logged == WARM_UP + CALLS, "DeepSpeed has not logged every call"
        return on - off

    def _logged(self) -> int:
        return int(self._comm.comms_logger.get_total_operations())


def one_round(deepspeed: DeepSpeed | None) -> dict[str, float]:
    """Every arm once; added µs a call."""
    gc.collect()
    plain = plain_us()
    figures = {"plain_us": plain, "noise_us": plain_us() - plain}
    for hook in ("native", "python"):
        figures[f"{hook}_us"] = probed_us(hook) - plain
    recording, figures["profiler_read_us"] = profiled_us()
    figures["profiler_us"] = recording - plain
    if deepspeed is not None:
        figures["deepspeed_first_us"] = deepspeed.added_us(0)
        figures["deepspeed_us"] = deepspeed.added_us(EARLIER_CALLS)
    return figures


def main() -> None:
    """Measure and print."""
    torch.set_num_threads(1)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        deepspeed = DeepSpeed()
    except ImportError as error:
        print(f"without DeepSpeed: {error}", file=sys.stderr)
        deepspeed = None
    with scratch(in_memory=True) as directory:
        os.environ["COMMWATCH_DIR"] = str(directory)
        one_round(deepspeed)
        rounds = [one_round(deepspeed) for _ in range(ROUNDS)]
    figures = {name: median(r[name] for r in rounds) for name in rounds[0]}
    emit({**figures, "rounds": ROUNDS, "calls": CALLS, "earlier_calls": EARLIER_CALLS})
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
