"""Shared by the jobs: a small model with its data, and the report that each rank writes for the test."""

import atexit
import json
import os
from collections import Counter
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import _dump_fr_trace_json

FEATURES = 16
STEPS = 12
_report: dict[str, Any] = {}
_trace: torch.profiler.ExecutionTraceObserver | None = None


def made(seed: int = 0) -> nn.Module:
    """A small model, the same on every rank."""
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(FEATURES, 32), nn.ReLU(), nn.Linear(32, 1))


def batches(rank: int, number: int = STEPS, size: int = 4) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """This rank's data."""
    source = torch.Generator().manual_seed(100 + rank)
    inputs = [torch.randn(size, FEATURES, generator=source) for _ in range(number)]
    return [(x, x.sum(1, keepdim=True)) for x in inputs]


def show(loss: Any, rank: int | None = None) -> None:
    """Print a loss with all its digits; the test compares it with that of a run without commwatch."""
    os.write(1, f"rank {dist.get_rank() if rank is None else rank} loss {float(loss)!r}\n".encode())


def count_messages() -> None:
    """Count sends and receives from now on, because the Flight Recorder does not record them on Gloo."""
    global _trace
    _trace = torch.profiler.ExecutionTraceObserver()
    _trace.register_callback(str(Path(os.environ["WITNESS_DIR"]) / f"{os.getpid()}.trace"))
    _trace.start()


def tell(steps: int, rank: int | None = None) -> None:
    """Write the report of this rank for the test: the framework's own count of steps, and the Flight Recorder's entries.

    The entries are read again at the end of the process, because operations may follow. Messages are counted until now.
    """
    _report.update(rank=dist.get_rank() if rank is None else rank, steps=steps, pid=os.getpid(), messages=_messages())
    _write()
    atexit.register(_write)
    Finalize(None, _write, exitpriority=0)  # a forked child runs finalizers, but not the functions of atexit


def _write() -> None:
    if _report.get("pid") != os.getpid():
        return
    wanted = ("profiling_name", "input_sizes", "output_sizes", "input_dtypes", "output_dtypes", "process_group")
    entries = json.loads(_dump_fr_trace_json()).get("entries", [])  # absent if there are none
    seen = [{key: entry[key] for key in wanted} for entry in entries]
    path = Path(os.environ["WITNESS_DIR"]) / f"{os.getpid()}.json"
    path.write_text(json.dumps({**_report, "entries": seen}))


def _messages() -> dict[str, int]:
    if _trace is None:
        return {}
    _trace.unregister_callback()  # this completes the file
    path = Path(os.environ["WITNESS_DIR"]) / f"{os.getpid()}.trace"
    names = Counter(node["name"] for node in json.loads(path.read_text())["nodes"])
    return {"send": names["c10d::send"], "recv": names["c10d::recv_"] + names["c10d::recv_any_source_"]}
