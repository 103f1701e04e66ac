"""Faults: each is called in every step of a rank at fault, from its begin on."""

import ctypes
import os
import random
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from work import SLOW_TIMES, Agreed, Pace, Weights

#: Longer than anybody looks.
FOREVER_S = 600
#: By how much a rank at fault is late, in seconds.
LATE_S = 0.06
#: By how much a random rank is late, in seconds.
IN_TURN_S = 0.04
#: Keeps a core busy for as long as its parent lives.
BURN = "import os, sys\nwhile os.getppid() == int(sys.argv[1]): sum(range(1000000))"


def late(step: int) -> None:
    time.sleep(LATE_S)


def late_once(step: int) -> None:
    """From now on it does all a little later than the others, and takes no longer for it."""
    if step == 0:
        time.sleep(LATE_S)


def late_now_and_then(step: int) -> None:
    if step % 2:
        time.sleep(2 * LATE_S)


def late_in_four(step: int) -> None:
    if step % 4 == 0:
        time.sleep(4 * LATE_S)


def late_in_four_by_far(step: int) -> None:
    if step % 4 == 0:
        time.sleep(0.8)


def late_in_eight(step: int) -> None:
    if step % 8 == 0:
        time.sleep(0.4)


def slow(step: int) -> None:
    Pace.times = SLOW_TIMES


def starved(step: int) -> None:
    """Four other processes want this rank's core."""
    if step == 0:
        os.sched_setaffinity(0, {0})
        for _ in range(4):
            subprocess.Popen([sys.executable, "-Sc", BURN, str(os.getpid())], stdout=subprocess.DEVNULL)


def throttled(step: int) -> None:
    """Its cgroup may use a quarter of a core."""
    if step == 0:
        # As the parent sees them: `ip netns exec` mounts another /sys.
        cgroups = Path(f"/proc/{os.getppid()}/root/sys/fs/cgroup")
        whole = (cgroups / "cgroup.controllers").exists()  # version 2
        folder = (cgroups if whole else cgroups / "cpu") / f"commwatch-{os.getpid()}"
        folder.mkdir()
        for name, value in (("cpu.max", "25000 100000"),) if whole else (("cpu.cfs_quota_us", "25000"),):
            (folder / name).write_text(value)
        clear = (
            "import os, sys, time\nwhile os.path.exists('/proc/' + sys.argv[1]): time.sleep(1)\nos.rmdir(sys.argv[2])"
        )
        os.chdir("/")
        subprocess.Popen([sys.executable, "-Sc", clear, str(os.getpid()), str(folder)], start_new_session=True)
        (folder / "cgroup.procs").write_text(str(os.getpid()))


def very_late(step: int) -> None:
    time.sleep(1.5)


def in_turn(step: int) -> None:
    if step % dist.get_world_size() == dist.get_rank():
        time.sleep(LATE_S)


def by_chance(step: int) -> None:
    """In each step one rank is late, a random one."""
    if InTurn.of_all.randrange(dist.get_world_size()) == dist.get_rank():
        time.sleep(IN_TURN_S)


def all_slow(step: int) -> None:
    time.sleep(LATE_S)


def uneven(step: int) -> None:
    time.sleep(2 * LATE_S * random.random())


def very_uneven(step: int) -> None:
    time.sleep(random.uniform(8, 24))


def checkpoint(step: int) -> None:
    if step % 60 == 0:
        time.sleep(1.0)


def evaluation(step: int) -> None:
    if step % 60 == 0:
        time.sleep(2.0)


def slower_and_slower(step: int) -> None:
    Pace.times = min(SLOW_TIMES, 1 + step / 50)


def slower_each_second(step: int) -> None:
    """By 1 % of what it computes without a fault."""
    Slower.since = Slower.since or time.monotonic()
    Pace.times = 1 + (time.monotonic() - Slower.since) / 100


class InTurn:
    """The same choice on all ranks."""

    of_all = random.Random(7)


class Slower:
    """Since when, by the monotonic clock."""

    since = 0.0


def restart(step: int, after_s: float = 0.0) -> None:
    """Every rank begins anew, as an elastic job does."""
    if "TORCHELASTIC_RESTART_COUNT" not in os.environ:
        env = {**os.environ, "TORCHELASTIC_RESTART_COUNT": "1"}
        # Sockets of Gloo outlive exec, and the other ranks would wait. Closed now, its thread would abort the process.
        for each in list(Path("/proc/self/fd").iterdir()):
            with suppress(OSError):  # of the listing itself
                os.set_inheritable(int(each.name), int(each.name) <= 2)
        later = "import os, sys, time\ntime.sleep(float(sys.argv[1]))\nos.execv(sys.executable, [sys.executable, *sys.argv[2:]])"
        before = ["-Sc", later, str(after_s)] if after_s else []
        os.execve(sys.executable, [sys.executable, *before, *sys.argv], env)


def restart_apart(step: int) -> None:
    """Every rank begins anew, one soon and the last one 20 s later."""
    restart(step, (0.0, 5.0, 12.0, 20.0)[int(os.environ["RANK"])])


def stop(step: int) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def stop_inside(step: int) -> None:
    """It stops a moment after it has begun to communicate."""
    threading.Timer(0.001, stop, (step,)).start()


def die_inside(step: int) -> None:
    """It is killed a moment after it has begun to communicate."""
    threading.Timer(0.001, die, (step,)).start()


def leave(step: int) -> None:
    """It ends as if its work were done."""
    sys.exit()


def fail(step: int) -> None:
    raise ValueError("a fault of the user's")


def want_memory(step: int) -> None:
    raise torch.OutOfMemoryError("CUDA out of memory")


def die(step: int) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def hold_gil(step: int) -> None:
    ctypes.PyDLL(None).sleep(FOREVER_S)


def asleep(step: int) -> None:
    time.sleep(FOREVER_S)


def spin(step: int) -> None:
    while True:
        pass


def other_operation(step: int) -> None:
    dist.broadcast(torch.ones(5), src=dist.get_rank())


def other_size(step: int) -> None:
    dist.all_reduce(torch.ones(10))


def other_size_and_fail(step: int) -> None:
    """It calls with another size, and an exception ends it while the others are inside."""
    dist.all_reduce(torch.ones(10), async_op=True)
    time.sleep(0.5)
    fail(step)


def other_root(step: int) -> None:
    """It takes another rank for the root, from now on."""
    Agreed.root = 1


def other_splits(step: int) -> None:
    """It sends more to the next rank and less to the one after it than these expect, from now on."""
    Agreed.more = 16


def receive_from_the_next(step: int) -> None:
    """It waits for a message of the next rank, which waits for one of this rank."""
    dist.recv(torch.ones(1000), dist.get_rank() + 1)


def skip(step: int) -> bool:
    """It leaves out a call that the others make."""
    return True


def destroy(step: int) -> None:
    """It destroys its group, and goes on with other work."""
    dist.destroy_process_group()
    time.sleep(FOREVER_S)


def flip_bit(tensor: torch.Tensor) -> None:
    tensor.detach().reshape(-1).view(torch.int32)[37] ^= 1 << 9


def flip(step: int) -> None:
    """A bit of a weight is wrong from now on."""
    if step == 0:
        flip_bit(Weights.tensors[-1])


class Received:
    """Kernels below the hook that call Gloo, and flip a bit of what an operation has given to this rank; in an all_to_all, of what each rank has."""

    library: Any = None
    #: Whether the next operation of this step is to be wrong.
    due = False

    @classmethod
    def end(cls, work: Any, *received: torch.Tensor) -> Any:
        if cls.due and received[0].numel() > 37:
            cls.due = False
            work.wait()
            for each in received:
                flip_bit(each)
        return work.boxed()

    @classmethod
    def all_reduce(cls, tensors: Any, group: Any, *_: Any) -> Any:
        return tensors, cls.end(gloo_of(group).allreduce(tensors, dist.AllreduceOptions()), tensors[0])

    @classmethod
    def all_gather(cls, output: torch.Tensor, given: torch.Tensor, group: Any, *_: Any) -> Any:
        return output, cls.end(gloo_of(group)._allgather_base(output, given), output)

    @classmethod
    def all_to_all(cls, output: Any, given: Any, group: Any, outputs: list[int], inputs: list[int], *_: Any) -> Any:
        return cls.end(
            gloo_of(group).alltoall_base(output, given, outputs, inputs), *output.chunk(dist.get_world_size())
        )


def gloo_of(group: Any) -> Any:
    return dist.ProcessGroup.unbox(group)._get_backend(torch.device("cpu"))


def flip_received(step: int) -> None:
    """In each step, a bit of what this rank receives is wrong."""
    if step == 0:
        Received.library = torch.library.Library("c10d", "IMPL")
        Received.library.impl("allreduce_", Received.all_reduce, "CPU", allow_override=True)
        Received.library.impl("_allgather_base_", Received.all_gather, "CPU", allow_override=True)
        Received.library.impl("alltoall_base_", Received.all_to_all, "CPU", allow_override=True)
    Received.due = True


def nothing(step: int) -> None:
    pass


def compiles(step: int) -> None:
    if step == 0:
        time.sleep(6)


FAULTS = {
    fault.__name__: fault
    for fault in (
        *(
            late,
            late_once,
            late_now_and_then,
            late_in_four,
            late_in_four_by_far,
            late_in_eight,
            very_late,
            slow,
            starved,
            throttled,
            in_turn,
            by_chance,
            all_slow,
            uneven,
            very_uneven,
            checkpoint,
            evaluation,
            compiles,
            restart,
            restart_apart,
            slower_and_slower,
            slower_each_second,
            nothing,
        ),
        *(
            stop,
            stop_inside,
            die_inside,
            leave,
            fail,
            want_memory,
            die,
            hold_gil,
            asleep,
            spin,
            other_operation,
            other_size,
            other_size_and_fail,
            other_root,
            other_splits,
            receive_from_the_next,
            skip,
            destroy,
            flip,
            flip_received,
        ),
    )
}
