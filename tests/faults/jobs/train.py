"""A small real job with one fault. Arguments: the shape of the job, the fault, the ranks at fault, and when it begins.

Prints the Unix time at which the fault begins, on the first rank at fault.
"""

import argparse
import ctypes
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import commwatch

#: Longer than anybody looks.
FOREVER_S = 600
#: What a step computes without a fault, and by how much a rank at fault is late.
WORK_S, LATE_S = 0.03, 0.06
#: How many times as long as without a fault a rank at fault takes, and what a micro-batch or a layer computes.
SLOW_TIMES, PIECE_S = 3.0, 0.004


class Pace:
    """How this rank computes: asleep or busy, and how many times as long as without a fault."""

    busy = False
    times = 1.0


def compute(seconds: float) -> None:
    """Take so long; busy, so much time of a core."""
    if not Pace.busy:
        time.sleep(Pace.times * seconds)
        return
    end = time.thread_time() + Pace.times * seconds
    while time.thread_time() < end:
        pass


#: Keeps a core busy for as long as its parent lives.
BURN = "import os, sys\nwhile os.getppid() == int(sys.argv[1]): sum(range(1000000))"


def network(layers: int) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(160, 160) for _ in range(layers)))


# -- shapes: each returns what one step does after its computation ---------------------------------


def ddp(layers: int) -> Callable[[], None]:
    """Gradients in as many buckets as there are layers."""
    model = nn.parallel.DistributedDataParallel(network(layers), bucket_cap_mb=0.1)
    return trained(model)


def overlap() -> Callable[[], None]:
    """Buckets of gradients that are sent while the backward pass goes on: each layer takes its time."""
    model = network(8)
    for layer in model:
        layer.register_full_backward_hook(lambda *_: compute(PIECE_S))
    return trained(nn.parallel.DistributedDataParallel(model, bucket_cap_mb=0.1))


def accumulated() -> Callable[[], None]:
    """Gradients of three micro-batches, of which only the last one communicates."""
    model = nn.parallel.DistributedDataParallel(network(4), bucket_cap_mb=0.1)
    last = trained(model)

    def step() -> None:
        for _ in range(2):
            with model.no_sync():
                model(torch.ones(8, 160)).sum().backward()
            compute(PIECE_S)
        last()

    return step


def fsdp() -> Callable[[], None]:
    """Each layer gathered by itself, twice a step."""
    model = network(6)
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    return trained(model)


def trained(model: nn.Module) -> Callable[[], None]:
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def step() -> None:
        model(torch.ones(8, 160)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def grid() -> Callable[[], None]:
    """Two by two: tensor parallel pairs (0, 1) and (2, 3), data parallel pairs (0, 2) and (1, 3)."""
    rank = dist.get_rank()
    tensor = [dist.new_group(pair, group_desc="tp") for pair in ([0, 1], [2, 3])][rank // 2]
    data = [dist.new_group(pair, group_desc="dp") for pair in ([0, 2], [1, 3])][rank % 2]

    def step() -> None:
        for _ in range(4):
            dist.all_reduce(torch.ones(20_000), group=tensor)
            time.sleep(0.002)
        dist.all_reduce(torch.ones(100_000), group=data)
        commwatch.step()

    return step


def mesh() -> Callable[[], None]:
    """Two pipelines of two stages, (0, 2) and (1, 3); stages of one place, (0, 1) and (2, 3), share their gradients."""
    rank = dist.get_rank()
    stages = [dist.new_group(pair, group_desc="pp") for pair in ([0, 2], [1, 3])][rank % 2]
    data = [dist.new_group(pair, group_desc="dp") for pair in ([0, 1], [2, 3])][rank // 2]
    first, peer, message = rank < 2, (rank + 2) % 4, torch.ones(1000)

    def step() -> None:
        for forward in (True, False):
            for _ in range(4):
                if first != forward:
                    dist.recv(message, peer, group=stages)
                compute(PIECE_S)
                if first == forward:
                    dist.send(message, peer, group=stages)
        dist.all_reduce(torch.ones(100_000), group=data)
        commwatch.step()

    return step


def experts() -> Callable[[], None]:
    """Tokens to their experts and back in two layers, and then the gradients."""
    tokens, received = torch.ones(40_000), torch.empty(40_000)

    def step() -> None:
        for _ in range(2):
            dist.all_to_all_single(received, tokens)
            compute(PIECE_S)
            dist.all_to_all_single(tokens, received)
        dist.all_reduce(torch.ones(50_000))
        commwatch.step()

    return step


def shards() -> Callable[[], None]:
    """Gradients reduced to shards, each rank updates its own, and gathers the others: without asynchronous operations."""
    size = dist.get_world_size()
    whole, shard = torch.ones(40_000 * size), torch.empty(40_000)

    def step() -> None:
        for _ in range(4):
            dist.reduce_scatter_tensor(shard, whole)
        compute(PIECE_S)
        for _ in range(4):
            dist.all_gather_into_tensor(whole, shard)
        commwatch.step()

    return step


def pipe() -> Callable[[], None]:
    """A pipeline: each rank is a stage, four micro-batches forward and then back."""
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    data = torch.ones(1000)

    def through(before: int, after: int) -> None:
        for _ in range(4):
            if 0 <= before <= last:
                dist.recv(data, before)
            compute(PIECE_S)
            if 0 <= after <= last:
                dist.send(data, after)

    def step() -> None:
        through(rank - 1, rank + 1)
        through(rank + 1, rank - 1)
        commwatch.step()

    return step


def loader() -> Callable[[], None]:
    """Rank 0 has the data and hands it to the others; then the gradients."""

    def step() -> None:
        dist.broadcast(torch.ones(1000), src=0)
        compute(PIECE_S)
        dist.all_reduce(torch.ones(50_000))
        commwatch.step()

    return step


def unmarked() -> Callable[[], None]:
    """Collectives without steps, as inference has."""

    def step() -> None:
        dist.all_reduce(torch.ones(50_000))

    return step


def plain() -> Callable[[], None]:
    """One all_reduce a step, and a barrier of metrics."""

    def step() -> None:
        dist.all_reduce(torch.ones(50_000))
        dist.all_reduce(torch.ones(1))
        commwatch.step()

    return step


SHAPES: dict[str, Callable[[], Callable[[], None]]] = {
    "plain": plain,
    "ddp1": lambda: ddp(1),
    "ddp4": lambda: ddp(4),
    "ddp8": lambda: ddp(8),
    "overlap": overlap,
    "accumulated": accumulated,
    "fsdp": fsdp,
    "shards": shards,
    "grid": grid,
    "mesh": mesh,
    "experts": experts,
    "pipe": pipe,
    "loader": loader,
    "unmarked": unmarked,
}

# -- faults: each is called in every step of a rank at fault, from its begin on ---------------------


def late(step: int) -> None:
    time.sleep(LATE_S)


def late_now_and_then(step: int) -> None:
    if step % 2:
        time.sleep(2 * LATE_S)


def late_in_four(step: int) -> None:
    if step % 4 == 0:
        time.sleep(4 * LATE_S)


def slow(step: int) -> None:
    Pace.times = SLOW_TIMES


def starved(step: int) -> None:
    """Four other processes want this rank's core."""
    if step == 0:
        os.sched_setaffinity(0, {0})
        for _ in range(4):
            subprocess.Popen([sys.executable, "-Sc", BURN, str(os.getpid())], stdout=subprocess.DEVNULL)


def throttled(step: int) -> None:
    """Its cgroup may use a quarter of a core."""
    if step == 0:
        # As the parent sees them: `ip netns exec` mounts another /sys.
        cgroups = Path(f"/proc/{os.getppid()}/root/sys/fs/cgroup")
        whole = (cgroups / "cgroup.controllers").exists()  # version 2
        folder = (cgroups if whole else cgroups / "cpu") / f"commwatch-{os.getpid()}"
        folder.mkdir()
        for name, value in (("cpu.max", "25000 100000"),) if whole else (("cpu.cfs_quota_us", "25000"),):
            (folder / name).write_text(value)
        clear = (
            "import os, sys, time\nwhile os.path.exists('/proc/' + sys.argv[1]): time.sleep(1)\nos.rmdir(sys.argv[2])"
        )
        os.chdir("/")
        subprocess.Popen([sys.executable, "-Sc", clear, str(os.getpid()), str(folder)], start_new_session=True)
        (folder / "cgroup.procs").write_text(str(os.getpid()))


def very_late(step: int) -> None:
    time.sleep(1.5)


def in_turn(step: int) -> None:
    if step % dist.get_world_size() == dist.get_rank():
        time.sleep(LATE_S)


def all_slow(step: int) -> None:
    time.sleep(LATE_S)


def uneven(step: int) -> None:
    time.sleep(2 * LATE_S * random.random())


def checkpoint(step: int) -> None:
    if step % 60 == 0:
        time.sleep(1.0)


def evaluation(step: int) -> None:
    if step % 60 == 0:
        time.sleep(2.0)


def slower_and_slower(step: int) -> None:
    Pace.times = min(SLOW_TIMES, 1 + step / 50)


def restart(step: int) -> None:
    """Every rank begins anew, as an elastic job does."""
    if "TORCHELASTIC_RESTART_COUNT" not in os.environ:
        env = {**os.environ, "TORCHELASTIC_RESTART_COUNT": "1", "MASTER_PORT": os.environ["NEXT_MASTER_PORT"]}
        os.closerange(3, os.sysconf("SC_OPEN_MAX"))  # sockets of Gloo outlive exec, and the other ranks would wait
        os.execve(sys.executable, [sys.executable, *sys.argv], env)


def stop(step: int) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def stop_inside(step: int) -> None:
    """It stops a moment after it has begun to communicate."""
    threading.Timer(0.001, stop, (step,)).start()


def leave(step: int) -> None:
    """It ends as if its work were done."""
    sys.exit()


def fail(step: int) -> None:
    raise ValueError("a fault of the user's")


def die(step: int) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def hold_gil(step: int) -> None:
    ctypes.PyDLL(None).sleep(FOREVER_S)


def asleep(step: int) -> None:
    time.sleep(FOREVER_S)


def spin(step: int) -> None:
    while True:
        pass


def other_operation(step: int) -> None:
    dist.broadcast(torch.ones(5), src=dist.get_rank())


def other_size(step: int) -> None:
    dist.all_reduce(torch.ones(10))


def nothing(step: int) -> None:
    pass


def compiles(step: int) -> None:
    if step == 0:
        time.sleep(6)


FAULTS = {
    fault.__name__: fault
    for fault in (
        *(
            late,
            late_now_and_then,
            late_in_four,
            very_late,
            slow,
            starved,
            throttled,
            in_turn,
            all_slow,
            uneven,
            checkpoint,
            evaluation,
            compiles,
            restart,
            slower_and_slower,
            nothing,
        ),
        *(stop, stop_inside, leave, fail, die, hold_gil, asleep, spin, other_operation, other_size),
    )
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("fault", choices=FAULTS)
    parser.add_argument("ranks", help="at fault, with commas between them")
    parser.add_argument("--after", type=float, default=8.0, help="seconds of steps before the fault")
    parser.add_argument("--lasts", type=float, default=FOREVER_S, help="seconds from its begin to its end")
    parser.add_argument("--work", type=float, default=WORK_S, help="seconds that a step computes")
    parser.add_argument("--busy", action="store_true", help="it takes a core's time, and not only time")
    arguments = parser.parse_args()
    Pace.busy = arguments.busy
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    random.seed(rank)
    at_fault = [int(each) for each in arguments.ranks.split(",")]
    step, fault = SHAPES[arguments.shape](), FAULTS[arguments.fault]
    began, faulty = time.monotonic(), 0
    while True:
        compute(arguments.work)
        if rank in at_fault and 0 <= time.monotonic() - began - arguments.after < arguments.lasts:
            if not faulty and rank == at_fault[0]:
                print(time.time(), flush=True)
            fault(faulty)
            faulty += 1
        try:
            step()
        except RuntimeError as error:  # a rank is gone: stay, as a job does until its launcher ends it
            print(error, file=sys.stderr)
            if fault is restart:
                restart(faulty)
            time.sleep(FOREVER_S)


if __name__ == "__main__":
    main()
