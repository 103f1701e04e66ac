"""Eight threads that communicate at once on eight groups, in every way whose end is seen another way; argument: rounds."""

import sys
import threading

import torch
import torch.distributed as dist
from common import begin, end

THREADS = 8


def main() -> None:
    rank, world = begin()
    rounds = int(sys.argv[1])
    groups = [dist.new_group(list(range(world))) for _ in range(THREADS)]

    def work(n: int) -> None:
        group, other = groups[n], 1 - rank
        mine, shards = torch.ones(n + 1), torch.ones(world * (n + 1))
        for _ in range(rounds):
            dist.all_reduce(mine, group=group)
            dist.reduce_scatter_tensor(mine, shards, group=group)
            if rank == 0:
                dist.send(mine, other, group=group)
            else:
                dist.recv(mine, other, group=group)
            for pending in [dist.all_reduce(mine, group=group, async_op=True) for _ in range(3)]:
                pending.wait()

    threads = [threading.Thread(target=work, args=(n,)) for n in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    end()


if __name__ == "__main__":
    main()
