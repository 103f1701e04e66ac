"""Two ranks of DDP that fork and exec while they train. Arguments: how the ranks are started (``torchrun``, or a start method
of multiprocessing, after ``import torch``), and how they leave (``end``: the group is destroyed; ``return``: it is not)."""

import os
import subprocess
import sys
import tempfile

import torch
import torch.distributed as dist
from common import say
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

STEPS = 4


class Numbers(Dataset[torch.Tensor]):
    """Eight samples a worker."""

    def __len__(self) -> int:
        return 8 * STEPS

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((4,), float(index))


def forks() -> list[int]:
    """Exit codes of children that execute a program."""
    codes = [subprocess.run(["/bin/true"], check=False).returncode]
    child = os.fork()
    if child == 0:
        os.execv("/bin/false", ["false"])
    return [*codes, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])]


def leaves() -> int:
    """Exit code of a child that leaves by ``sys.exit``, and so through ``atexit``."""
    child = os.fork()
    if child == 0:
        sys.exit(7)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def train(rank: int, leave: str, init_method: str) -> None:
    """What a rank does."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    losses, codes = (
        [],
        [leaves()],
    )  # before there is a group, whose threads its exit would wait for, with and without us
    dist.init_process_group("gloo", init_method=init_method, rank=rank, world_size=2)
    model = DistributedDataParallel(torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
    for batch in DataLoader(Numbers(), batch_size=8, num_workers=2, multiprocessing_context="fork"):
        loss = model(batch + rank).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        codes += forks()
    dist.barrier()
    say([losses, codes])
    if leave == "end":
        dist.destroy_process_group()


def child(rank: int, leave: str, init_method: str) -> None:
    """A rank that another process has started: what names it comes after ``import torch``."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2")
    train(rank, leave, init_method)


if __name__ == "__main__":
    if sys.argv[1] == "torchrun":
        train(int(os.environ["RANK"]), sys.argv[2], "env://")
    else:
        from torch.multiprocessing.spawn import start_processes

        with tempfile.TemporaryDirectory() as place:
            start_processes(child, (sys.argv[2], f"file://{place}/store"), nprocs=2, start_method=sys.argv[1])
        print("launcher done", flush=True)
