"""Works of operations on GPUs in the Python hook: none is asked while its communicator is destroyed."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from commwatch.probe.torch_device import Devices, Watch
from commwatch.probe.torch_groups import Groups
from commwatch.probe.torch_timing import POLL, Timing
from commwatch.wire import events as ev

CPU = torch.device("cpu")


GROUP: Any = object()


def watched(is_completed: Callable[[], bool]) -> tuple[Devices, list[Any]]:
    """Devices with one operation of ``GROUP`` whose Work answers so, and how operations were finished."""
    finished: list[Any] = []
    devices = Devices(
        Timing(POLL, ""),
        finish=lambda _, *how: finished.append(how),
        in_flight=lambda _: None,
        blocked=lambda *_: None,
        wake=lambda: None,
        complain=lambda _: None,
    )
    devices._on = CPU
    watch = Watch(CPU, GROUP, None, first=False, timed=False, here=False)
    flight: Any = SimpleNamespace(head=[0] * 6, launch=0, queue=None)
    devices.follow(watch, flight, SimpleNamespace(is_completed=is_completed))
    return devices, finished


def test_no_work_is_asked_after_shutdown() -> None:
    """From the begin of a shutdown on, the Work of an operation in flight is not asked; the operation is recorded without a duration."""
    asked = []

    def is_completed() -> bool:
        asked.append(True)
        return False

    devices, finished = watched(is_completed)
    devices.poll()
    assert (len(asked), len(finished), bool(devices)) == (1, 0, True)
    devices.let_go_of_works(GROUP)
    devices.poll()
    (how,) = finished
    assert (len(asked), how[1:3], bool(devices)) == (1, (ev.BY_NONE, ev.UNTIMED), False)


def test_shutdown_of_another_group() -> None:
    """While another group is shut down, an operation in flight is followed to its end."""
    ended = False
    devices, finished = watched(lambda: ended)
    devices.poll()
    devices.let_go_of_works(object())
    devices.poll()
    assert (finished, bool(devices)) == ([], True)
    ended = True
    devices.poll()
    (how,) = finished
    assert (how[1], bool(devices)) == (ev.BY_POLL, False)


def test_shutdown_waits_for_a_question() -> None:
    """A shutdown begins after the question that is under way."""
    asking, let_go = threading.Event(), threading.Event()
    let_go_meanwhile = []

    def is_completed() -> bool:
        asking.set()
        let_go_meanwhile.append(let_go.wait(0.2))
        return False

    devices, _ = watched(is_completed)
    polling = threading.Thread(target=devices.poll)
    polling.start()
    asking.wait(30)

    def shut_down() -> None:
        devices.let_go_of_works(GROUP)
        let_go.set()

    shutting_down = threading.Thread(target=shut_down)
    shutting_down.start()
    for thread in (polling, shutting_down):
        thread.join(30)
    assert (let_go_meanwhile, let_go.is_set()) == ([False], True)


def test_shutdown_is_noticed() -> None:
    """The probe is called with a group before it is shut down; afterwards PyTorch's functions are its own again."""
    original, noticed = vars(c10d.ProcessGroup)["shutdown"], []
    groups = Groups("job")
    groups.on_shutdown = lambda pg: noticed.append((pg is dist.group.WORLD, dist.is_initialized()))
    groups.watch()
    try:
        come_and_go()
    finally:
        groups.unwatch()
    come_and_go()
    assert noticed == [(True, True)]
    assert vars(c10d.ProcessGroup)["shutdown"] is original


def come_and_go() -> None:
    """Make a process group, and destroy it."""
    dist.init_process_group("gloo", store=torch._C._distributed_c10d.HashStore(), rank=0, world_size=1)
    dist.destroy_process_group()
