"""Two ranks that train, and a thread of each in operations beside that. The number of elements shows which is which.

1: the training; 2: another thread, before the first step; 3: another thread after it, and 4, if it asks for a handle; 5: one that the training thread
calls in between; 6: in a backward pass of another thread; 7: a message of another thread. ``MARKS_ONLY``: the thread that marks the steps calls none.
"""

import os
import threading
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

import commwatch


def reduced(elements: int, **how: Any) -> Any:
    return dist.all_reduce(torch.ones(elements), **how)


def elsewhere(call: Callable[[], object]) -> None:
    """Call a function in another thread, and wait for it."""
    thread = threading.Thread(target=call)
    thread.start()
    thread.join()


def in_backward() -> None:
    """Another thread trains: its backward pass, on the CPU in the same thread, communicates."""
    weight = torch.ones(6, requires_grad=True)
    weight.register_hook(lambda gradient: reduced(6))
    weight.sum().backward()


def message() -> None:
    if dist.get_rank() == 0:
        dist.send(torch.ones(7), 1)
    else:
        dist.recv(torch.ones(7), 0)


def main() -> None:
    dist.init_process_group("gloo")
    elsewhere(lambda: reduced(2))
    commwatch.step()
    if "MARKS_ONLY" not in os.environ:
        reduced(1)
    elsewhere(lambda: reduced(3))
    elsewhere(lambda: reduced(4, async_op=True).wait())
    elsewhere(in_backward)
    elsewhere(message)
    if "MARKS_ONLY" not in os.environ:
        reduced(5)
    commwatch.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
