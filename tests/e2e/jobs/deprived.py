"""Trains with DDP and then with FSDP2, and loses something on the way: descriptors, room, or the run directory.

After each step the rank writes a checkpoint through a descriptor that it has just opened, and says its losses at the end.
All that it says and writes is the same whatever is lost, and whether the probe is on or off.

deprived.py TROUBLE OWN_FOLDER RUN_DIRECTORY
"""

import hashlib
import os
import resource
import shutil
import signal
import stat
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from common import begin, end, say
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

TROUBLE, OWN, RUN = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
#: Groups that are made once the trouble is there, with names as long as this: more than is reserved for names.
GROUPS, DESCRIPTION = 8, "x" * 4000
#: A user without rights of root's, for whom limits count.
NOBODY = 54_321
_kept: list[int] = []
_kept_names: list[str] = []


# -- troubles: what is done before the ring is made or before the first operation, and what in the middle ----


def nothing() -> None:
    """Nothing is taken."""


def close_descriptors() -> None:
    """As ``os.closerange(3, 4096)``, but for the sockets and the polls of Gloo, without which no job goes on."""
    for fd in descriptors():
        mode = os.fstat(fd).st_mode
        if fd > 2 and (stat.S_ISREG(mode) or stat.S_ISCHR(mode) or stat.S_ISDIR(mode)):
            os.close(fd)


def close_in_a_thread() -> None:
    """The same, by another thread."""
    thread = threading.Thread(target=close_descriptors)
    thread.start()
    thread.join()


def one_descriptor_left() -> None:
    """Every descriptor is in use, but for one."""
    limit(resource.RLIMIT_NOFILE, 2 + max(descriptors()))
    try:
        while True:
            _kept.append(os.open(os.devnull, os.O_RDONLY))
    except OSError:
        os.close(_kept.pop())


def descriptors_again() -> None:
    """As before."""
    while _kept:
        os.close(_kept.pop())
    limit(resource.RLIMIT_NOFILE)


def small_files() -> None:
    """A file past 60,000 bytes ends the process."""
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    limit(resource.RLIMIT_FSIZE, 60_000)


def little_memory() -> None:
    """768 MB more of addresses: enough for Gloo, too few for the ring that the test asks for."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    limit(resource.RLIMIT_AS, used + (768 << 20))


def memory_again() -> None:
    """As before."""
    limit(resource.RLIMIT_AS)


def no_threads() -> None:
    """A user who may have no thread beyond those that run: root may have any number."""
    os.setresuid(NOBODY, NOBODY, 0)
    limit(resource.RLIMIT_NPROC, 1)


def threads_again() -> None:
    """As before."""
    os.setresuid(0, 0, 0)
    limit(resource.RLIMIT_NPROC)


def descriptors() -> list[int]:
    """Those that are open."""
    listed = [int(path.name) for path in Path("/proc/self/fd").iterdir()]
    return [fd for fd in listed if Path(f"/proc/self/fd/{fd}").exists()]  # not the listing's own


def limit(of: int, most: int | None = None) -> None:
    """Set a limit of this process; ``None``: the highest it may have."""
    highest = resource.getrlimit(of)[1]
    resource.setrlimit(of, (highest if most is None else most, highest))


def fill() -> None:
    """The file system of the run directory is full."""
    try:
        with open(RUN / f"filler-{dist.get_rank()}", "wb", buffering=0) as file:
            while file.write(b"x" * 4096):
                pass
    except OSError:
        pass


def take_away() -> None:
    """The run directory is gone; the next time other files have the names of ours."""

    def take() -> None:
        if RUN.is_dir():
            _kept_names.extend(path.name for path in RUN.glob("rings/*"))
            shutil.rmtree(RUN)
        else:
            (RUN / "rings").mkdir(parents=True)
            for name in _kept_names:
                (RUN / "rings" / name).write_bytes(b"of the user\n")

    together(take)


def together(do: Callable[[], None]) -> None:
    """One rank does it, while no other does anything."""
    dist.barrier()
    if dist.get_rank() == 0:
        do()
    dist.barrier()


TROUBLES: dict[str, tuple[Callable[[], None], Callable[[], None]]] = {
    "nothing": (nothing, nothing),
    "closed": (close_descriptors, close_in_a_thread),
    "one descriptor left": (one_descriptor_left, descriptors_again),
    "small files": (small_files, nothing),
    "little memory": (little_memory, memory_again),
    "no threads": (no_threads, threads_again),
    "full": (nothing, fill),
    "taken away": (nothing, take_away),
}

#: Before the default group is made, as the ring is; the others take what that needs, too.
AT_ONCE = ("small files", "little memory")

# -- training -------------------------------------------------------------------------------------


def train(name: str, model: nn.Module, steps: int) -> list[str]:
    """Some steps, each with a checkpoint; returns their losses, exactly."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    data = torch.Generator().manual_seed(dist.get_rank())
    losses = []
    for step in range(steps):
        loss = model(torch.randn(16, 32, generator=data)).pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item().hex())
        checkpoint(f"{name}-{dist.get_rank()}-{step}", model)
    return losses


def checkpoint(name: str, model: nn.Module) -> None:
    """Write down the weights, slowly, so that whoever else writes to this descriptor does so in the middle."""
    local = [p.to_local() if isinstance(p, DTensor) else p for p in model.parameters()]
    fd = os.open(OWN / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for weights in local:
        os.write(fd, hashlib.sha256(weights.detach().numpy().tobytes()).hexdigest().encode() + b"\n")
        dist.all_reduce(torch.ones(1))
    os.close(fd)


def new_names(rank: int) -> None:
    """The probe learns names of groups while a file of the user's is open."""
    fd = os.open(OWN / f"open-{rank}", os.O_RDWR | os.O_CREAT | os.O_APPEND)
    os.write(fd, b"CHECKPOINT")
    for number in range(GROUPS):
        group = dist.new_group(group_desc=f"{number}{DESCRIPTION}")
        dist.all_reduce(torch.ones(number + 1, dtype=torch.float64), group=group)
    os.write(fd, b" WHOLE\n")
    os.close(fd)


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 8))


def main() -> None:
    before, midway = TROUBLES[TROUBLE]
    if TROUBLE in AT_ONCE:
        before()
    rank, _ = begin()
    warm = network()  # what torch makes and imports once, it does now
    warm(torch.ones(2, 32)).sum().backward()
    torch.optim.AdamW(warm.parameters()).step()
    OWN.chmod(0o777)
    if TROUBLE not in AT_ONCE:
        before()
    losses = train("ddp", nn.parallel.DistributedDataParallel(network()), 3)
    midway()
    new_names(rank)
    model = network()
    for layer in model.children():
        fully_shard(layer)
    fully_shard(model)  # shards it in place
    losses += train("fsdp", model, 3)
    midway()
    new_names(rank)
    losses += train("again", nn.parallel.DistributedDataParallel(network()), 2)
    say(
        [losses, [path.name for fd in descriptors() if RUN in (path := Path(f"/proc/self/fd/{fd}").readlink()).parents]]
    )
    end()


if __name__ == "__main__":
    main()
