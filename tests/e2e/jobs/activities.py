"""Ranks that do something else each, while the last one waits for them in a barrier. Arguments: what the others do, and a file to write."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist


def write() -> None:
    """Save a checkpoint again and again, each on the disk before the next one."""
    with Path(sys.argv[2]).open("wb") as file:
        while True:
            file.seek(0)
            torch.save({"weight": torch.zeros(2_000_000)}, file)
            file.flush()
            os.fsync(file.fileno())
            time.sleep(0.2)


def lock() -> None:
    """Wait for a lock that never comes, while another thread does a little."""

    def little() -> None:
        while True:
            until_s = time.thread_time() + 0.002
            while time.thread_time() < until_s:
                pass
            time.sleep(0.1)

    threading.Thread(target=little, daemon=True).start()
    mine = threading.Lock()
    mine.acquire()
    mine.acquire()


def compute() -> None:
    """Multiply, for half of the time."""
    while True:
        until_s = time.thread_time() + 0.02
        while time.thread_time() < until_s:
            torch.ones(200, 200) @ torch.ones(200, 200)
        time.sleep(0.02)


#: For half of the time. It ends with the process that has begun it.
COMPUTES = """
import os, time
parent = os.getppid()
while os.getppid() == parent:
    until_s = time.thread_time() + 0.02
    while time.thread_time() < until_s:
        pass
    time.sleep(0.02)
"""


def child() -> None:
    """Wait for a program that computes."""
    subprocess.run([sys.executable, "-c", COMPUTES], check=True)


WHAT: dict[str, Callable[[], None]] = {each.__name__: each for each in (write, lock, compute, child)}

dist.init_process_group("gloo")
for _ in range(20):
    dist.all_reduce(torch.ones(1000))
does = sys.argv[1].split(",")
if dist.get_rank() < len(does):
    WHAT[does[dist.get_rank()]]()
dist.barrier()
