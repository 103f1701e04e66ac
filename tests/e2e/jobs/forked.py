"""Rank 0 forks while works are in flight; the child lets go of them and communicates on a group of its own, the parent goes on."""

import os

import torch
import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg  # makes the backend known
from common import begin, end, say

import commwatch
from commwatch.probe.torch_collectives import ring_file


def recorded() -> bytes:
    """The ring, without the heartbeat."""
    path = ring_file()
    ring = path.read_bytes() if path is not None else b""
    return ring[:72] + ring[80:]


def main() -> None:
    rank, _ = begin()
    fake = dist.new_group([0, 1], backend="fake")
    tensor = torch.ones(4)
    dist.all_reduce(tensor)
    dist.all_reduce(tensor, group=fake)
    store = dist.distributed_c10d._get_default_store()
    if rank == 1:
        store.wait(["forked"])  # what rank 0 launches is in flight when it forks
    flying = [dist.all_reduce(torch.ones(3), async_op=True) for _ in range(2)]
    flying += [dist.reduce_scatter_single(torch.zeros(2), torch.ones(4), async_op=True) for _ in range(2)]
    flying += [dist.isend(tensor, 1) if rank == 0 else dist.irecv(tensor, 0)]
    status, before = [], recorded()
    for way in range(3) if rank == 0 else ():
        child = os.fork()
        if child == 0:
            try:
                flying.clear()
                dist.all_reduce(torch.ones(1 << 10), group=fake)
                commwatch.step()
                if way == 1:
                    commwatch.uninstall()
                if way == 2:
                    commwatch.uninstall()
                    os.environ["COMMWATCH_JOB"] = "child"
                    commwatch.install()
                    dist.all_reduce(torch.ones(1 << 11), group=fake)
                os._exit(0)
            finally:
                os._exit(1)
        status.append(os.waitpid(child, 0)[1])
    # Only rank 0's works are sure not to end meanwhile.
    same = recorded() == before if rank == 0 else None
    store.set("forked", "")
    for work in flying:
        assert work is not None
        work.wait()
    commwatch.step()
    dist.all_reduce(tensor)
    say([same, status])
    end()


if __name__ == "__main__":
    main()
