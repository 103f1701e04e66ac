"""Raises from a signal handler in the middle of the probe.

``handlers.py lines``: at every line that the main thread comes to, once each, and goes on. Says how often the handler
has raised, how often that did not reach the user, and what the probe makes of it all.
``handlers.py exit ring|group|dtype``: ends with exit code 9 while the probe does that for the first time.
``handlers.py held``: communicates in a new dtype while the probe names a set of replicas, and a GPU. Says how often.
``handlers.py aside``: says what is imported in other threads than the main one, and which threads Python knows at the end.
"""

import faulthandler
import itertools
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from common import begin, end, say

import commwatch
from commwatch.probe import torch_collectives
from commwatch.probe.torch_probe import Probe
from commwatch.wire.ring_reader import RingReader

OURS = str(Path(commwatch.__file__).parent)
PATIENCE_S = 60


class Late(Exception):
    """An exception of the user's own."""


#: What handlers raise in turn: whatever our guards catch for ourselves is among it.
KINDS = itertools.cycle((TimeoutError, RuntimeError, Late, KeyboardInterrupt, SystemExit))
#: The latest of what was raised, no more: their tracebacks hold whatever was in the middle of its call.
latest: list[BaseException] = []
lines: set[tuple[str, int]] = set()


def handler(signum: int, frame: FrameType | None) -> None:
    latest[:] = [next(KINDS)("of the user's")]
    raise latest[0]


def trace(frame: FrameType, event: str, arg: object) -> Any:
    """Raise at a line of ours where that has not been done before.

    Not at the first line of the callback that a future calls: torch swallows what comes before the callback's guard.
    """
    file = frame.f_code.co_filename
    if not file.startswith(OURS):
        return None
    first = frame.f_code.co_name == "_called_back" and frame.f_lineno == frame.f_code.co_firstlineno + 1
    if event == "line" and not first and (file, frame.f_lineno) not in lines:
        lines.add((file, frame.f_lineno))
        signal.raise_signal(signal.SIGUSR1)
    return trace


def under_fire(scene: Callable[[], None]) -> int:
    """Play the scene until it comes to no new line; returns how often what was raised did not arrive."""
    lost = 0
    while True:
        before = len(lines)
        caught: BaseException | None = None
        sys.settrace(trace)
        try:
            scene()
        except (Exception, KeyboardInterrupt, SystemExit) as error:
            caught = error
        finally:
            sys.settrace(None)
        if len(lines) == before:
            if caught is not None:
                raise caught
            return lost
        lost += caught is not latest.pop() or len(lines) != before + 1


def install() -> None:
    """Take the probe out and in again."""
    commwatch.uninstall()
    assert commwatch.install()


def training(model: torch.nn.Module, optimizers: list[torch.optim.Optimizer]) -> Callable[[], None]:
    """A step with every kind of operation and of wait, in a group that is new."""

    def step() -> None:
        tensor = torch.ones(4)
        dist.all_reduce(tensor)
        group = dist.new_group([0])
        flying = dist.all_reduce(tensor, group=group, async_op=True)
        dist.all_gather([torch.zeros(4)], tensor)
        scattered = dist.reduce_scatter_single(torch.zeros(4), tensor, async_op=True)
        dist.all_reduce(torch.ones(3, dtype=torch.float64))
        dist.barrier()
        assert flying is not None
        assert scattered is not None
        scattered.wait()
        flying.wait()
        for optimizer in optimizers:
            optimizer.step()
        dist.destroy_process_group(group)

    return step


def exit_in(what: str) -> None:
    """A handler calls ``sys.exit(9)`` while the probe does this."""
    name = {"ring": "open_ring", "group": "group_of", "dtype": "dtype_code"}[what]
    original = getattr(Probe, name)

    def hit(*arguments: Any) -> Any:
        say("killed")
        setattr(Probe, name, original)
        os.kill(os.getpid(), signal.SIGTERM)
        return original(*arguments)

    setattr(Probe, name, hit)
    signal.signal(signal.SIGTERM, lambda signum, frame: sys.exit(9))
    try:
        dist.all_reduce(torch.ones(3))
        say("went on")
    finally:  # otherwise torch may abort: Gloo's thread must not release the tensor while the interpreter shuts down
        dist.barrier()


def aside() -> None:
    """What the threads do in which the native hook asks Python."""
    main_thread, imported = threading.get_ident(), []

    def listen(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "import" and threading.get_ident() != main_thread:
            imported.append(str(arguments[0]))

    sys.addaudithook(listen)
    for dtype in (torch.float32, torch.float64):
        dist.all_reduce(torch.ones(3, dtype=dtype))
    dist.barrier(group=dist.new_group([0]))
    say({"imported": imported, "threads": [thread.name for thread in threading.enumerate()]})
    end()


def held() -> None:
    """See above."""
    faulthandler.dump_traceback_later(PATIENCE_S, exit=True)
    dist.all_reduce(torch.ones(3))
    probe: Any = torch_collectives._probe
    dtypes, came, communicated = iter((torch.float64, torch.int64)), threading.Semaphore(0), list[str]()

    def communicate(signum: int, frame: FrameType | None) -> None:
        dtype = next(dtypes)
        came.release()
        dist.all_reduce(torch.ones(3, dtype=dtype))
        communicated.append(str(dtype))

    def under_lock(original: Callable[..., Any], restore: Callable[[], None]) -> Callable[..., Any]:
        def hit(*arguments: Any) -> Any:
            restore()
            os.kill(os.getpid(), signal.SIGUSR1)
            # It may have come just before the main thread began to wait, which another one then interrupts.
            while not came.acquire(timeout=0.1):
                os.kill(os.getpid(), signal.SIGUSR2)
            return original(*arguments)

        return hit

    signal.signal(signal.SIGUSR1, communicate)
    signal.signal(signal.SIGUSR2, lambda *_: None)
    add = probe.groups.add
    probe.groups.add = under_lock(add, lambda: setattr(probe.groups, "add", add))
    probe.checks._announce(0, dist.new_group([0]), "key", ["weight"])
    names = probe.ring._names
    write = under_lock(names.memory.write, lambda: setattr(probe.ring, "_names", names))
    probe.ring._names = SimpleNamespace(memory=SimpleNamespace(write=write))
    probe._gpu = SimpleNamespace(find=lambda current: {"index": 3})
    commwatch.step()
    say({"communicated": communicated, "off": probe.off})
    end()


def lines_in_turn() -> None:
    """See above."""
    signal.signal(signal.SIGUSR1, handler)
    model = torch.nn.Linear(2, 2)
    model(torch.ones(1, 2)).sum().backward()
    optimizers: list[torch.optim.Optimizer] = [torch.optim.SGD(model.parameters(), lr=0.1)]
    lost = under_fire(install)
    lost += under_fire(training(model, optimizers))
    lost += under_fire(commwatch.step)
    dist.all_reduce(torch.ones(5))
    probe = torch_collectives._probe
    assert probe is not None
    path = torch_collectives.ring_file()
    assert path is not None
    reader = RingReader(path)
    patience = time.monotonic() + PATIENCE_S
    while reader.in_flight() and time.monotonic() < patience:
        time.sleep(0.1)
    about = {"lost": lost, "raised": len(lines), "in flight": len(reader.in_flight()), "off": probe.off}
    say(about)
    end()


def main() -> None:
    begin()
    if sys.argv[1] == "exit":
        exit_in(sys.argv[2])
    elif sys.argv[1] == "aside":
        aside()
    elif sys.argv[1] == "held":
        held()
    else:
        lines_in_turn()


if __name__ == "__main__":
    main()
