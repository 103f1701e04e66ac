"""Twenty good all_reduces; then the culprit does something wrong, and the others go on until they cannot."""

import ctypes
import os
import signal
import sys
import time

import torch
import torch.distributed as dist
from common import begin, say

import commwatch

#: Longer than anybody looks.
FOREVER_S = 600
#: CPU seconds, for half of the time, after which what computes only sleeps, in the same function: an agent has seen it compute by then.
COMPUTES_S = 6
#: The group of ``destroy_group``, beside the default one.
GROUPS: list[dist.ProcessGroup | None] = []


def stop() -> None:
    """Stopped, as by a debugger or a scheduler."""
    os.kill(os.getpid(), signal.SIGSTOP)


def stop_inside() -> None:
    """Stopped in the middle of a collective, which it enters first."""
    dist.all_reduce(torch.ones(1000), async_op=True)
    time.sleep(0.1)
    stop()


def die() -> None:
    """Gone without a word."""
    os._exit(0)


def leave() -> None:
    """Ended as a script does that is done."""
    commwatch.uninstall()
    os._exit(0)


def destroy() -> None:
    """Done with communication, but not with its work."""
    dist.destroy_process_group()
    time.sleep(FOREVER_S)


def destroy_group() -> None:
    """Done with one group, and alive in the other one."""
    dist.destroy_process_group(GROUPS.pop())
    time.sleep(FOREVER_S)


def hold_gil() -> None:
    """In a C function that does not let go of the GIL."""
    ctypes.PyDLL(None).sleep(FOREVER_S)


def save() -> None:
    """Writes a long checkpoint."""
    end, part = time.monotonic() + FOREVER_S, bytes(1_000_000)
    with open(os.devnull, "wb") as file:
        while time.monotonic() < end:
            file.write(part)
            time.sleep(0.03)


def other_op() -> None:
    """Calls another collective than the others."""
    dist.broadcast(torch.ones(1000), src=int(os.environ["RANK"]))


def other_op_ends() -> None:
    """Calls another collective than the others, which ends at once; then it does something else for long."""
    other_op()
    save()


def other_root() -> None:
    """Broadcasts from another root than the others, and waits for that one, which goes on."""
    dist.broadcast(torch.ones(10), src=1)


def other_dtype() -> None:
    """Calls the same with as many bytes of another type: it ends, with nonsense."""
    dist.all_reduce(torch.ones(500, dtype=torch.float64))


def other_size() -> None:
    """Calls the same with another size."""
    dist.all_reduce(torch.ones(10))


def compute() -> None:
    """Compiles, say."""
    for _ in range(50 * COMPUTES_S):
        until_s = time.thread_time() + 0.02
        while time.thread_time() < until_s:
            torch.ones(200, 200) @ torch.ones(200, 200)
        time.sleep(0.02)
    time.sleep(FOREVER_S)


def new_group() -> None:
    """Does not come to the group that the others make."""
    time.sleep(FOREVER_S)


def nothing() -> None:
    """Has posted a receive that nobody answers, and goes on as all do."""
    dist.irecv(torch.ones(1), src=(int(os.environ["RANK"]) + 1) % 3, tag=77)


def main() -> None:
    trouble, culprit, good = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    rank, size = begin()
    if trouble == "late":  # ``culprit`` at first, after ``good`` collectives the next one
        for number in range(1 << 30):
            if rank == (culprit + (number >= good)) % size:
                time.sleep(0.05)
            dist.all_reduce(torch.ones(1000))
            commwatch.step()
    GROUPS.append(dist.new_group() if trouble == "destroy_group" else None)
    for _ in range(good):
        dist.all_reduce(torch.ones(1000), group=GROUPS[0])
    say("begins")
    try:
        if rank == culprit:
            globals()[trouble]()
        elif trouble == "stop_inside":
            time.sleep(1)  # the culprit is inside first
        elif trouble == "new_group":
            dist.new_group()
        elif trouble == "other_root":
            dist.broadcast(torch.ones(10), src=0)
        while True:
            dist.all_reduce(torch.ones(1000), group=GROUPS[0])
            time.sleep(0.05)
    except RuntimeError as error:
        say(str(error)[:200])
        time.sleep(FOREVER_S)


if __name__ == "__main__":
    main()
