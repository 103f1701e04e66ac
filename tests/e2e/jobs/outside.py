"""Ranks that wait for each other outside operations: the culprit does not come, or goes elsewhere."""

import os
import signal
import sys
import time
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store
from torch.distributed import distributed_c10d

#: Longer than anybody looks.
FOREVER = timedelta(seconds=600)
CULPRIT = 1


def _sum(group: dist.ProcessGroup | None = None) -> None:
    dist.all_reduce(torch.ones(8), group=group)


def _sleep() -> None:
    time.sleep(FOREVER.total_seconds())


def _stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def _die() -> None:
    os._exit(0)


def _store() -> Store:
    return distributed_c10d._get_default_store()


#: By trouble: what the culprit does, and what the others do after two good operations.
TROUBLES: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {
    "new_group": (_sleep, dist.new_group),
    "stopped": (_stop, dist.new_group),
    "dead": (_die, dist.new_group),
    "order": (_sum, dist.new_group),
    "store": (_sleep, lambda: _store().wait(["ready"], FOREVER)),
    "store_barrier": (
        _sleep,
        lambda: distributed_c10d._store_based_barrier(
            dist.get_rank(), _store(), distributed_c10d.GroupName("mine"), dist.get_world_size(), FOREVER
        ),
    ),
    "monitored": (_sleep, lambda: dist.monitored_barrier(timeout=FOREVER)),
}


def healthy() -> None:
    """All that a job may do outside operations, twice: with waits of some seconds for one rank."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    for turn in range(2):
        where = f"file://{os.environ['COMMWATCH_DIR']}/meet{turn}"
        dist.init_process_group("gloo", where, FOREVER, world_size=size, rank=rank)
        if rank == CULPRIT:
            time.sleep(4)
        pairs = [dist.new_group([first, (first + 1) % size]) for first in range(size)]
        for pair in pairs:
            if not isinstance(pair, int) and pair is not None and rank in dist.get_process_group_ranks(pair):
                _sum(pair)
        if rank == 0:
            _store().set("ready", "1")
        _store().wait(["ready"])
        _sum()
        dist.monitored_barrier()
        dist.destroy_process_group()


def main() -> None:
    """Run the named trouble."""
    trouble, rank = sys.argv[1], int(os.environ["RANK"])
    if trouble == "healthy":
        healthy()
        _sleep()
    if trouble == "init" and rank == CULPRIT:
        _sleep()
    dist.init_process_group("gloo", timeout=FOREVER)
    _sum()
    _sum()
    culprit, others = TROUBLES[trouble]
    (culprit if rank == CULPRIT else others)()
    _sleep()


if __name__ == "__main__":
    main()
