"""Trains while a signal handler raises at random moments; whatever is hit is done again from the state before it.

``storm.py ddp|fsdp STEPS HITS``: so many steps, with so many hits in each. One process: a rank that leaves a collective
half way would leave the others waiting in it, with or without us.
"""

import faulthandler
import random
import signal
import sys
import time
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from common import begin, say
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import commwatch
from commwatch.probe import torch_collectives
from commwatch.wire.ring_reader import RingReader

State = dict[str, torch.Tensor]
PATIENCE_S = 60
#: Then it prints where each of its threads is, and ends: less than the patience of its test.
HANGS_AFTER_S = 240
OURS = str(Path(commwatch.__file__).parent)


class Late(Exception):
    """A user's own way to say that something takes too long."""


KINDS = (Late, TimeoutError, RuntimeError, ValueError, OSError, KeyboardInterrupt, SystemExit)
latest: list[BaseException] = []


def handler(signum: int, frame: FrameType | None) -> None:
    latest[:] = [random.choice(KINDS)("too late")]
    raise latest[0]


def build() -> torch.nn.Sequential:
    return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))


def train(kind: str, state: State, step: int) -> tuple[float, State]:
    """One step from ``state``, which it leaves as it is; returns the loss, and the state after it."""
    torch.set_grad_enabled(True)  # a handler may have raised in the middle of torch's own ``no_grad``
    model = build()
    model.load_state_dict(state)
    trained: Any = fully_shard(model) if kind == "fsdp" else DistributedDataParallel(model)
    optimizer = torch.optim.SGD(trained.parameters(), lr=0.1)
    inputs = torch.randn(4, 8, generator=torch.Generator().manual_seed(step))
    loss = trained(inputs).square().mean()
    loss.backward()
    optimizer.step()
    group = dist.new_group([0])
    mean = loss.detach().clone()
    flying = dist.all_reduce(mean, group=group, async_op=True)
    shard = torch.zeros(4)
    dist.reduce_scatter_single(shard, inputs[0, :4].clone())
    dist.all_gather([torch.zeros(4)], shard)
    assert flying is not None
    flying.wait()
    dist.destroy_process_group(group)
    after = {name: getattr(value, "_local_tensor", value).clone() for name, value in model.state_dict().items()}
    return mean.item(), after


def holds(error: BaseException | None, what: BaseException) -> bool:
    """Whether ``error`` is it, or was raised on account of it: torch wraps what hooks raise."""
    while error is not None and error is not what:
        error = error.__cause__ or error.__context__
    return error is what


def came_through_us(error: BaseException) -> bool:
    """Whether our code was in the middle of something."""
    entry = error.__traceback__
    while entry is not None:
        if entry.tb_frame.f_code.co_filename.startswith(OURS):
            return True
        entry = entry.tb_next
    return False


def main() -> None:
    kind, steps, hits = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    faulthandler.dump_traceback_later(HANGS_AFTER_S, exit=True)
    begin()
    random.seed(len(kind))
    signal.signal(signal.SIGALRM, handler)
    state: State = {name: value.clone() for name, value in build().state_dict().items()}
    losses: list[float] = []
    told = {"hit": 0, "in our code": 0, "swallowed": 0, "swallowed in our code": 0}
    for step in range(steps):
        began = time.monotonic()
        expected = train(kind, state, step)
        duration = time.monotonic() - began
        hit = 0
        while hit < hits:
            try:
                signal.setitimer(signal.ITIMER_REAL, random.uniform(1e-5, duration))
                train(kind, state, step)
                signal.setitimer(signal.ITIMER_REAL, 0)
                error = None
            except BaseException as caught:
                error = caught
            if not latest:
                if error is not None:
                    raise error
                continue  # it was over before
            raised, hit = latest.pop(), hit + 1
            told["hit"] += 1
            told["in our code"] += came_through_us(raised)
            if not holds(error, raised):
                told["swallowed"] += 1
                told["swallowed in our code"] += came_through_us(raised)
            del error, raised
        loss, state = train(kind, state, step)
        assert loss == expected[0]
        losses.append(loss)
    group: Any = dist.distributed_c10d._get_default_group()
    launched = group._get_sequence_number_for_group()
    ring_file = torch_collectives.ring_file()
    if ring_file is not None:  # the probe's thread ends what the handler has cut off
        reader, patience = RingReader(ring_file), time.monotonic() + PATIENCE_S
        while reader.in_flight() and time.monotonic() < patience:
            time.sleep(0.1)
        reader.close()
    say({"losses": losses, "launched": launched, **told})
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
