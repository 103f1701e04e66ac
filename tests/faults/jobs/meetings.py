"""Shapes of jobs whose ranks must agree on a root or on sizes, or meet outside of collectives."""

import itertools
from collections.abc import Callable
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore
from work import Agreed, point

import commwatch

Step = Callable[[], None]

#: In which step a group is made, and in which steps the ranks meet.
GROUP_AT, MEET_EVERY = 150, 50
#: Longer than anybody looks.
PATIENCE = timedelta(minutes=10)


def broadcast(root: int) -> None:
    dist.broadcast(torch.ones(20_000), src=root)


def reduce(root: int) -> None:
    dist.reduce(torch.ones(20_000), dst=root)


def gather(root: int) -> None:
    parts = [torch.ones(5000) for _ in range(dist.get_world_size())]
    dist.gather(torch.ones(5000), parts if dist.get_rank() == root else None, dst=root)


def scatter(root: int) -> None:
    parts = [torch.ones(5000) for _ in range(dist.get_world_size())]
    dist.scatter(torch.ones(5000), parts if dist.get_rank() == root else None, src=root)


def rooted(call: Callable[[int], None]) -> Step:
    """An operation with a root, and then the gradients."""

    def step() -> None:
        call(Agreed.root)
        dist.all_reduce(torch.ones(50_000))
        commwatch.step()

    return step


def splits() -> Step:
    """Tokens to their experts and back, different numbers of them to each."""
    rank, size = dist.get_rank(), dist.get_world_size()

    def step() -> None:
        given = [100 + 16 * ((rank + peer) % size) for peer in range(size)]
        taken = list(given)
        given[(rank + 1) % size] += Agreed.more
        given[(rank + 2) % size] -= Agreed.more
        received = torch.empty(sum(taken))
        dist.all_to_all_single(received, torch.ones(sum(given)), taken, given)
        dist.all_to_all_single(torch.empty(sum(given)), received, given, taken)
        commwatch.step()

    return step


def new_group() -> Step:
    """After some steps the ranks make a group of all, and use it too."""
    numbers, made = itertools.count(), list[dist.ProcessGroup]()

    def step() -> None:
        if next(numbers) == GROUP_AT and not point("new_group"):
            made.append(dist.new_group(group_desc="late"))
        for group in (None, *made):
            dist.all_reduce(torch.ones(50_000), group=group)
        commwatch.step()

    return step


def meeting(meet: Callable[[int], None]) -> Step:
    """A meeting after each so many steps."""
    numbers = itertools.count(1)

    def step() -> None:
        number = next(numbers)
        if number % MEET_EVERY == 0:
            point("meeting")
            meet(number)
        dist.all_reduce(torch.ones(50_000))
        commwatch.step()

    return step


def store() -> Step:
    """Each rank sets its key, and waits for those of all others."""
    rank, size = dist.get_rank(), dist.get_world_size()
    own = TCPStore("127.0.0.1", 0, is_master=True) if rank == 0 else None
    port = [own.port if own else 0]
    dist.broadcast_object_list(port, src=0)
    there = own or TCPStore("127.0.0.1", port[0], is_master=False)

    def meet(number: int) -> None:
        there.set(f"{number}/{rank}", "come")
        there.wait([f"{number}/{each}" for each in range(size)], PATIENCE)

    return meeting(meet)


MEETINGS: dict[str, Callable[[], Step]] = {
    **{f"root_{call.__name__}": partial(rooted, call) for call in (broadcast, reduce, gather, scatter)},
    "splits": splits,
    "new_group": new_group,
    "store": store,
    "monitored": lambda: meeting(lambda _: dist.monitored_barrier(timeout=PATIENCE)),
}
