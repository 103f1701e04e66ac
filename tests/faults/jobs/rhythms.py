"""Shapes of jobs that wait long and are healthy: servers, whose rank 0 waits for requests, and reinforcement learning, whose trainers wait for rollouts."""

import itertools
import queue
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from pauses import WORKER
from shapes import network, trained
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from work import PIECE_S, compute, point

Step = Callable[[], None]

#: Seconds until each request, of which servers begin with different ones; until those of a job that is idle after many of them; and how many these are.
WAITS_S = (6.0, 19.0, 11.0, 33.0, 8.0, 40.0, 14.0, 26.0)
IDLE_S, QUICK_S, QUICK = 75.0, 0.15, 30
#: What a request takes: so many tokens, each through so many layers.
TOKENS, LAYERS = 10, 2
#: Seconds that a rollout takes at least and at most; steps of the training after it, and what each computes.
ROLLOUT_S, TRAINING_STEPS, TRAINING_S = (15.0, 25.0), 60, 0.045


def request(number: int) -> None:
    """Wait for one."""
    time.sleep(WAITS_S[number % len(WAITS_S)])


def beginning(first: int) -> Callable[[int], None]:
    """Wait for one, from another one on."""
    return lambda number: request(first + number)


def burst(number: int) -> None:
    """Wait for one of many, and long for the next ones."""
    time.sleep(QUICK_S if number < QUICK else IDLE_S)


def queued() -> Callable[[int], None]:
    """Requests that a thread puts into a queue, as a server of HTTP does."""
    waiting: queue.Queue[int] = queue.Queue()

    def listen() -> None:
        for number in itertools.count():
            request(number)
            waiting.put(number)

    threading.Thread(target=listen, daemon=True).start()
    return lambda number: (waiting.get(), None)[1]


def broadcast() -> None:
    dist.broadcast(torch.ones(1000), src=0)


def broadcast_objects() -> None:
    dist.broadcast_object_list([{"prompt": "x" * 100, "length": 10}] if dist.get_rank() == 0 else [None], src=0)


def scatter_objects() -> None:
    given: list[Any] | None = [{"prompt": rank} for rank in range(dist.get_world_size())]
    dist.scatter_object_list([None], given if dist.get_rank() == 0 else None, src=0)


def sends() -> None:
    """To each worker its own part."""
    if dist.get_rank() == 0:
        for worker in range(1, dist.get_world_size()):
            dist.send(torch.ones(1000), worker)
    else:
        dist.recv(torch.ones(1000), 0)


def all_gather() -> None:
    results = [torch.ones(1000) for _ in range(dist.get_world_size())]
    dist.all_gather(results, torch.ones(1000))


def gather() -> None:
    results = [torch.ones(1000) for _ in range(dist.get_world_size())]
    dist.gather(torch.ones(1000), results if dist.get_rank() == 0 else None, dst=0)


def forward(group: dist.ProcessGroup | None = None) -> None:
    """Tokens through layers that are split over the ranks of a group."""
    for token, _ in itertools.product(range(TOKENS), range(LAYERS)):
        if token == TOKENS // 2:
            point("serving")
        compute(PIECE_S)
        dist.all_reduce(torch.ones(20_000), group=group)


def server(
    hand_out: Callable[[], None],
    *,
    wait: Callable[[int], None] = request,
    answer: Callable[[], None] = lambda: None,
    serve: Callable[[], None] = forward,
) -> Step:
    """Rank 0 waits for a request and hands it out; all ranks serve it."""
    numbers = itertools.count()

    def step() -> None:
        number = next(numbers)
        if dist.get_rank() == 0:
            wait(number)
        point("idle")
        hand_out()
        serve()
        answer()

    return step


def server_grid() -> Step:
    """Two stages of two ranks each: the first one hands its tokens to the second."""
    rank = dist.get_rank()
    tensor = [dist.new_group(pair, group_desc="tp") for pair in ([0, 1], [2, 3])][rank // 2]

    def serve() -> None:
        if rank >= 2:
            dist.recv(torch.ones(1000), rank - 2)
        forward(tensor)
        if rank < 2:
            dist.send(torch.ones(1000), rank + 2)

    return server(broadcast, wait=beginning(3), serve=serve, answer=gather)


def server_pipe() -> Step:
    """Each rank is a stage; rank 0 sends each token through all of them and gets it back."""
    rank, size, message = dist.get_rank(), dist.get_world_size(), torch.ones(1000)

    def serve() -> None:
        for token in range(TOKENS):
            if rank:
                dist.recv(message, rank - 1)
            if token == TOKENS // 2:
                point("serving")
            compute(PIECE_S)
            dist.send(message, (rank + 1) % size)
            if not rank:
                dist.recv(message, size - 1)

    return server(lambda: None, wait=beginning(5), serve=serve)


def trainer(group: dist.ProcessGroup, kind: str) -> Step:
    """Training of the ranks of a group."""
    model = network(4)
    if kind == "ddp":
        return trained(nn.parallel.DistributedDataParallel(model, process_group=group, bucket_cap_mb=0.1))
    mesh = DeviceMesh.from_group(group, "cpu")
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return trained(model)


def child(seconds: float) -> None:
    """An engine in a process of its own makes the rollouts."""
    subprocess.run([sys.executable, "-Sc", WORKER, str(seconds)], check=True, stdout=subprocess.DEVNULL)


def learning(collect: Callable[[], None], kind: str = "ddp", make: Callable[[float], None] = compute) -> Step:
    """Ranks 0 and 1 train on what ranks 2 and 3 make, and hand their weights back."""
    trainers, rank = dist.new_group([0, 1], group_desc="trainers"), dist.get_rank()
    train = trainer(trainers, kind) if rank < 2 else lambda: None
    took = random.Random(rank)

    def step() -> None:
        if rank >= 2:
            seconds = took.uniform(*ROLLOUT_S)
            make(0.3 * seconds)
            point("rollout")
            make(0.7 * seconds)
        collect()
        for number in range(TRAINING_STEPS) if rank < 2 else ():
            compute(TRAINING_S)
            if number == TRAINING_STEPS // 2:
                point("training")
            train()
        dist.broadcast(torch.ones(50_000), src=0)

    return step


def from_rollouts() -> None:
    dist.broadcast(torch.ones(50_000), src=2)


def gather_objects() -> None:
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, {"rewards": [0.5] * 100})


RHYTHMS: dict[str, Callable[[], Step]] = {
    "server_broadcast": lambda: server(broadcast),
    "server_scatter": lambda: server(scatter_objects, wait=beginning(3)),
    "server_objects": lambda: server(broadcast_objects, wait=beginning(1)),
    "server_queue": lambda: server(broadcast, wait=queued() if dist.get_rank() == 0 else request),
    "server_sends": lambda: server(sends, wait=beginning(2)),
    "server_burst": lambda: server(broadcast, wait=burst),
    "server_all_gather": lambda: server(broadcast, wait=beginning(5), answer=all_gather),
    "server_gather": lambda: server(broadcast_objects, answer=gather),
    "server_grid": server_grid,
    "server_pipe": server_pipe,
    "rl_broadcast": lambda: learning(from_rollouts),
    "rl_gather": lambda: learning(gather),
    "rl_objects": lambda: learning(gather_objects),
    "rl_barrier": lambda: learning(dist.barrier),
    "rl_child": lambda: learning(gather, make=child),
    "rl_fsdp": lambda: learning(gather, "fsdp"),
    "rl_fsdp_broadcast": lambda: learning(from_rollouts, "fsdp"),
}
