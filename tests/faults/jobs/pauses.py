"""Pauses between two steps in which all ranks take part, as healthy jobs have: each is called with its number, from 0 on."""

import hashlib
import os
import pickle
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from work import compute, point

#: How long rank 0 works in the first and in the second pause, in seconds.
ALONE_S = (20.0, 25.0)
#: How long the ranks compile before the first step, and in the middle.
FIRST_S, AGAIN_S = (28.0, 42.0, 33.0, 38.0), (22.0, 15.0, 30.0, 26.0)
#: Reads what it is sent, slowly; and takes a core's time.
READER = """
import socket, sys, time
taken, _ = socket.socket(fileno=int(sys.argv[1])).accept()
while taken.recv(65536):
    time.sleep(0.05)
"""
WORKER = (
    "import sys, time\nend = time.monotonic() + float(sys.argv[1])\nwhile time.monotonic() < end: sum(range(100000))"
)


def write(seconds: float) -> None:
    """Pickle weights, write them to the disk and check them."""
    state, end = {"weights": [torch.randn(500_000) for _ in range(4)]}, time.monotonic() + seconds
    path = Path(f"{os.environ['STORE']}.checkpoint")
    while time.monotonic() < end:
        with path.open("wb") as file:
            pickle.dump(state, file)
            file.flush()
            os.fsync(file.fileno())
        hashlib.sha256(path.read_bytes()).digest()
        time.sleep(0.1)


def evaluate(seconds: float) -> None:
    """Run a model on data that a loader brings."""
    model, end = torch.nn.Linear(512, 512), time.monotonic() + seconds
    while time.monotonic() < end:
        for _ in range(20):
            model(torch.ones(64, 512))
        time.sleep(0.01)


def upload(seconds: float) -> None:
    """Send data to a process that takes it slowly."""
    end = time.monotonic() + seconds
    with socket.create_server(("127.0.0.1", 0)) as server:
        os.set_inheritable(server.fileno(), True)
        reader = subprocess.Popen([sys.executable, "-Sc", READER, str(server.fileno())], pass_fds=[server.fileno()])
        with socket.create_connection(server.getsockname()) as there:
            while time.monotonic() < end:
                there.sendall(bytes(65536))
        # What it has not read yet would take it longer on a loaded machine.
        reader.kill()
        reader.wait()


def compress(seconds: float) -> None:
    """Wait for a child that computes."""
    subprocess.run([sys.executable, "-Sc", WORKER, str(seconds)], check=True, stdout=subprocess.DEVNULL)


def alone(does: str, number: int) -> None:
    """Rank 0 works, and the others wait for it in a barrier."""
    if dist.get_rank() == 0:
        {"saves": write, "evaluates": evaluate, "uploads": upload, "compresses": compress}[does](ALONE_S[number % 2])
    point("barrier")
    dist.barrier()


def compiles(number: int) -> None:
    """Each rank takes a while, some longer than others."""
    compute(FIRST_S[dist.get_rank()])


def compiles_again(number: int) -> None:
    """The same in the middle of a job, for a new length of sequences."""
    compute(AGAIN_S[dist.get_rank()])


PAUSES: dict[str, Callable[[int], None]] = {
    **{does: partial(alone, does) for does in ("saves", "evaluates", "uploads", "compresses")},
    "compiles": compiles,
    "compiles_again": compiles_again,
}
