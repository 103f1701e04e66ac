"""Says everything a user can see of works: ordinary ones, of a destroyed group, of Python's own kind, and ones that fail.

Two ranks; the last rank leaves in the middle, so that the other's operations fail.
"""

import gc
import os
import re
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from common import begin, say
from torch._C._distributed_c10d import Work

Behaviour = dict[str, Any]


def outcome(call: Callable[[], Any]) -> Any:
    """Return what a call returns or raises, without the parts that differ between runs."""
    try:
        result = call()
    except Exception as error:
        return f"{type(error).__name__}: {re.sub(r'[0-9]+', '#', str(error)).splitlines()[0]}"
    return [t.tolist() for t in result] if isinstance(result, list) else repr(result)


def about(work: Work) -> Behaviour:
    """What a work says without waiting."""
    calls = {
        "class": lambda: type(work),
        "is_success": work.is_success,
        "exception": work.exception,
        "source_rank": work._source_rank,
        "synchronize": work.synchronize,
        "future": lambda: type(work.get_future()),
        "future_result": lambda: type(work.get_future_result()),  # type: ignore[attr-defined]
        "duration": work._get_duration,  # type: ignore[attr-defined]
        "op": lambda: work._get_op_type() if hasattr(work, "_get_op_type") else None,
        "boxed": lambda: type(Work.unbox(work.boxed())),
    }
    return {name: outcome(call) for name, call in calls.items()}


def waited(work: Work, *timeout: timedelta, again: bool = True) -> Behaviour:
    """A work before and after its wait, and after another."""
    before = about(work)
    first = outcome(lambda: work.wait(*timeout))
    after = {"completed": outcome(work.is_completed), **about(work), "result": outcome(work.result)}
    # A second wait for a send or recv waits for another one: so does Gloo.
    second = outcome(lambda: work.wait(*timeout)) if again else None
    return {"before": before, "wait": first, "after": after, "again": second}


def works(rank: int, other: int) -> Behaviour:
    """Ordinary works."""
    found: Behaviour = {}
    minute = timedelta(seconds=60)
    calls: dict[str, Callable[[], Any]] = {
        "all_reduce": lambda: dist.all_reduce(torch.ones(3), async_op=True),
        "reduce_scatter": lambda: dist.reduce_scatter(torch.zeros(2), [torch.ones(2)] * 2, async_op=True),
        "reduce_scatter_tensor": lambda: dist.reduce_scatter_single(torch.zeros(2), torch.ones(4), async_op=True),
        "barrier": lambda: dist.barrier(async_op=True),
    }
    for name, call in calls.items():
        found[name] = waited(call())
        found[f"{name}, with a timeout"] = waited(call(), minute)
    tensor = torch.full((4,), float(rank))
    for name, timeout in (("", ()), (", with a timeout", (minute,))):
        if rank == 0:
            found[f"send{name}"] = waited(dist.isend(tensor, other), *timeout, again=False)  # type: ignore[arg-type]
            found[f"send to any{name}"] = waited(dist.isend(tensor, other), *timeout, again=False)  # type: ignore[arg-type]
        else:
            found[f"recv{name}"] = waited(dist.irecv(tensor, other), *timeout, again=False)  # type: ignore[arg-type]
            found[f"recv from any{name}"] = waited(dist.irecv(tensor), *timeout, again=False)  # type: ignore[arg-type]
    if rank == 0:
        dist.send(tensor + 5, other)
    else:
        found["source of a recv from any"] = dist.recv(tensor)
    found["received"] = tensor.tolist()
    return found


def destroyed(rank: int, other: int) -> Behaviour:
    """A group that is destroyed with works in flight, and one that takes its place."""
    found = {}
    for life in range(3):
        group, tensor = dist.new_group([0, 1]), torch.ones(5)
        if rank == 1:
            time.sleep(0.2)
        flying = [dist.all_reduce(tensor, group=group, async_op=True) for _ in range(3)]
        flying.append(dist.reduce_scatter_single(torch.zeros(1), torch.ones(2), group=group, async_op=True))
        if rank == 0:
            dist.destroy_process_group(group)
        found[str(life)] = [outcome(work.wait) for work in flying if work is not None]
        if rank == 1:
            dist.destroy_process_group(group)
        del group, flying
        gc.collect()
        dist.barrier()
    return found


def failing(rank: int, other: int) -> Behaviour:
    """Operations that come to nothing: a timeout, then a peer that is gone."""
    late, waiting, *gone = (dist.new_group([0, 1], timeout=timedelta(seconds=1)) for _ in range(7))
    for group in (late, waiting, *gone):  # all are connected
        dist.all_reduce(torch.ones(1), group=group)
    dist.barrier()
    if rank == 1:
        time.sleep(2)
        os.write(1, b"job done\n")
        os._exit(0)
    pending = dist.irecv(torch.ones(4), other, group=waiting)
    assert pending is not None
    found: Behaviour = {
        "timeout of a recv": waited(pending, timedelta(milliseconds=100), again=False),
        "timeout of an all_reduce": outcome(lambda: dist.all_reduce(torch.ones(3), group=late)),
    }
    time.sleep(2)
    calls: dict[str, Callable[[dist.ProcessGroup], Any]] = {
        "all_reduce": lambda group: dist.all_reduce(torch.ones(3), group=group),
        "all_reduce, async": lambda group: dist.all_reduce(torch.ones(3), group=group, async_op=True).wait(),
        "reduce_scatter": lambda group: dist.reduce_scatter_single(torch.zeros(2), torch.ones(4), group=group),
        "send": lambda group: dist.send(torch.ones(4), other, group=group),
        "recv": lambda group: dist.recv(torch.ones(4), other, group=group),
    }
    for (name, call), group in zip(calls.items(), gone, strict=True):
        found[f"peer gone, {name}"] = outcome(partial(call, group))
    return found


def main() -> None:
    rank, _ = begin()
    found = {"works": works(rank, 1 - rank), "destroyed": destroyed(rank, 1 - rank)}
    say(found)
    say(failing(rank, 1 - rank))
    os.write(1, b"job done\n")
    os._exit(0)


if __name__ == "__main__":
    main()
