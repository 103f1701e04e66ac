"""Eight threads, each with a group of the fake backend: so many all_reduces each once a file exists; 0: until killed."""

import sys
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

THREADS = 8


def flood(group: dist.ProcessGroup, floats: int, count: int) -> None:
    tensor, done = torch.ones(floats), 0
    while done < count or not count:
        dist.all_reduce(tensor, group=group)
        done += 1


def run(count: int, go: Path) -> None:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    groups = [dist.new_group([0, 1]) for _ in range(THREADS)]
    dist.barrier()  # there is a ring now
    while not go.exists():
        time.sleep(0.01)
    threads = [threading.Thread(target=flood, args=(group, n + 1, count)) for n, group in enumerate(groups)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


if __name__ == "__main__":
    run(int(sys.argv[1]), Path(sys.argv[2]))
