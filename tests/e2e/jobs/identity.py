"""Groups that are easy to mix up: meshes with one description, plain groups, a second life after a re-init. Four ranks."""

import sys

import torch
import torch.distributed as dist
from common import begin, end
from torch.distributed.device_mesh import init_device_mesh


def life(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    again = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    dist.all_reduce(torch.ones(2), group=mesh.get_group("dp"))
    dist.all_reduce(torch.ones(3), group=mesh.get_group("tp"))
    dist.all_reduce(torch.ones(4), group=again.get_group("tp"))
    one, two = dist.new_group([0, 1, 2, 3]), dist.new_group([0, 1, 2, 3])
    dist.all_reduce(torch.ones(5), group=one)
    if rank == 0:
        dist.send(torch.ones(6), 1, group=two)
    elif rank == 1:
        dist.recv(torch.ones(6), 0, group=two)
    dist.all_reduce(torch.ones(7), group=two)
    dist.all_reduce(torch.ones(8))


def main() -> None:
    rank, world = begin()
    life(rank)
    dist.barrier()
    dist.destroy_process_group()
    # A store of its own: in the old one the addresses of the first life are still to be found.
    store = torch._C._distributed_c10d.FileStore(f"{sys.argv[1]}/second-life", world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    life(rank)
    end()


if __name__ == "__main__":
    main()
