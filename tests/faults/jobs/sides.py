"""Shapes of jobs in which not all that ranks do together holds up their training: what a thread beside it does, ranks that have run out of inputs,
and a server of parameters."""

import itertools
import tempfile
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from shapes import ddp, network, pipe, trained
from torch import nn
from torch.distributed import checkpoint
from torch.distributed.algorithms.join import Join
from work import WORK_S, compute, point

import commwatch

Step = Callable[[], None]

#: Seconds between two heartbeats, and how long rank 0 makes the others wait for each.
BEAT_S, BEHIND_S = 0.2, 0.08
#: Inputs of a rank in an epoch, and those of the last rank.
INPUTS, FEWER = 240, 60
#: Steps between two checkpoints.
SAVE_EVERY = 40


def beside(meet: Callable[[dist.ProcessGroup], None], training: Callable[[], Step] = lambda: ddp(4)) -> Step:
    """A thread of each rank meets those of the others in a group of its own, and that of rank 0 comes late."""
    group = dist.new_group(group_desc="heartbeat")

    def beat() -> None:
        while True:
            time.sleep(BEAT_S)
            if dist.get_rank() == 0:
                time.sleep(BEHIND_S)
            meet(group)

    step = training()
    threading.Thread(target=beat, daemon=True).start()
    return step


def reduce(group: dist.ProcessGroup) -> None:
    dist.all_reduce(torch.ones(8), group=group)


class Joined(nn.parallel.DistributedDataParallel):
    """A model whose rank has a point in each step of others, too, once it has no inputs left."""

    def join_hook(self, **kwargs: Any) -> Any:
        hook = super().join_hook(**kwargs)  # type: ignore[no-untyped-call]
        meet = hook.main_hook
        hook.main_hook = lambda: (point("no_input"), meet())
        return hook


def joined() -> Step:
    """Epochs in which the last rank has fewer inputs than the others. When it has none left, it meets them in what they do."""
    model = Joined(network(4), bucket_cap_mb=0.1)
    step, inputs = trained(model), FEWER if dist.get_rank() == dist.get_world_size() - 1 else INPUTS

    def epoch() -> None:
        with Join([model]):
            for _ in range(inputs):
                compute(WORK_S)
                point("input")
                step()

    return epoch


def saved() -> Step:
    """Checkpoints that a thread writes, with a group of its own."""
    group, numbers, folder = dist.new_group(group_desc="checkpoint"), itertools.count(1), tempfile.mkdtemp()
    model = network(4)
    step, pending = trained(nn.parallel.DistributedDataParallel(model, bucket_cap_mb=0.1)), list[Any]()

    def save_now_and_then() -> None:
        step()
        number = next(numbers)
        if number % SAVE_EVERY == 0:
            if pending:
                pending.pop().result()
            state = {"model": model.state_dict()}
            pending.append(checkpoint.async_save(state, checkpoint_id=f"{folder}/{number % 3}", process_group=group))  # type: ignore[attr-defined]

    return save_now_and_then


def parameters() -> Step:
    """Rank 0 has the parameters: it takes the gradients of each other rank in turn, and returns its parameters."""
    rank, workers = dist.get_rank(), range(1, dist.get_world_size())
    data = torch.ones(20_000)

    def step() -> None:
        for worker in workers if rank == 0 else ():
            dist.recv(data, worker)
            dist.send(data, worker)
        if rank:
            dist.send(data, 0)
            dist.recv(data, 0)
        commwatch.step()

    return step


def checked() -> Step:
    """Each step ends in a barrier that names who is missing."""

    def step() -> None:
        dist.all_reduce(torch.ones(50_000))
        dist.monitored_barrier(timeout=timedelta(minutes=10))
        commwatch.step()

    return step


SIDES: dict[str, Callable[[], Step]] = {
    "heartbeat": lambda: beside(reduce),
    "heartbeat_barrier": lambda: beside(lambda group: dist.barrier(group=group)),
    "heartbeat_pipe": lambda: beside(reduce, pipe),
    "joined": joined,
    "saved": saved,
    "parameters": parameters,
    "checked": checked,
}
