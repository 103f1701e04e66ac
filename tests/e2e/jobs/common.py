"""Begin and end of a test job, and how it says something to the test."""

import json
import os
import time
from typing import Any

import torch
import torch.distributed as dist


def begin() -> tuple[int, int]:
    """Join the Gloo job; returns rank and world size."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group("gloo")
    return dist.get_rank(), dist.get_world_size()


def say(value: Any) -> None:
    """Print something JSON-able for the test, in one write so that ranks do not mix."""
    rank = int(os.environ["RANK"])
    os.write(1, f"said {json.dumps([rank, value])}\n".encode())


def end() -> None:
    """Leave together and cleanly."""
    dist.barrier()
    # Gloo's own thread may be about to drop the barrier, for which it needs the GIL after a backward pass. It deadlocks in PyTorch 2.13,
    # with and without us, where this thread then destroys the group and joins that one without releasing the GIL.
    time.sleep(0.05)
    dist.destroy_process_group()
    os.write(1, b"job done\n")
