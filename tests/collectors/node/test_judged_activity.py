"""An activity is named where samples show it, does not change for a quiet second, and is unknown where something is not known."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest

from commwatch_collectors.node.activity import GpuUse, Io, Process, Sample
from commwatch_collectors.node.judged_activity import Activity, judged

S = 1_000_000_000
NOTHING = Io(0, 0, 0, 0)


def own(
    state: str = "S", cpu_s: float = 0.0, ended_s: float = 0.0, io: Io | None = NOTHING, name: str = "python"
) -> Process:
    return Process(name, state, 1, 50, cpu_s, ended_s, io)


def samples(
    *each: Process,
    waits_in: str = "futex_do_wait",
    children: Sequence[Mapping[int, Process] | None] = (),
    gpu: GpuUse | None = None,
    on_socket: bool = False,
) -> list[Sample]:
    """Samples of a process, one a second, that has these children in each."""
    below = [*children, *({} for _ in each[len(children) :])]
    return [Sample(at * S, one, waits_in, on_socket, below[at], gpu, one.state == "R") for at, one in enumerate(each)]


def doing(given: Sequence[Sample], before: Activity | None = None) -> tuple[str, str, bool | None] | None:
    found = judged(given, before)
    return None if found is None else (found.kind, found.says, found.is_working)


def wrote(*megabytes: float, state: str = "S", cpu: float = 0.0) -> list[Process]:
    """A process that has written so much by each second."""
    return [own(state, at * cpu, io=Io(0, int(done * 1e6), 0, 0)) for at, done in enumerate(megabytes)]


ASLEEP = ("asleep", "is asleep in a lock", False)
COMPUTES = ("computing", "computes", True)
FIVE = [own() for _ in range(5)]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        # CPU time
        (samples(own(), own(cpu_s=0.9)), COMPUTES),
        (samples(own(), own(cpu_s=0.02)), ASLEEP),
        (samples(own(), own(cpu_s=0.2)), ("asleep", "is asleep in a lock", None)),  # or it gets no core
        (samples(*[own("R")] * 3), COMPUTES),
        (samples(own("R"), own(), own()), ASLEEP),
        # reading and writing
        (samples(*wrote(0, 212)), ("writing", "is writing 210 MB/s", True)),
        (samples(*wrote(0, 2140)), ("writing", "is writing 2.1 GB/s", True)),
        (samples(*wrote(0, 40, 40, 80)), ("writing", "is writing 27 MB/s", True)),
        (samples(*wrote(0, 0.1)), ASLEEP),
        (samples(*wrote(0, 100, cpu=0.9)), ("writing", "is writing 100 MB/s", True)),
        (samples(*wrote(0, 5, cpu=0.9)), COMPUTES),
        (samples(own(), own(io=Io(0, 0, 35_400_000, 0))), ("reading", "is reading 35 MB/s", True)),
        (samples(own(), own(io=Io(9_000_000, 0, 35_400_000, 0))), ("reading", "is reading 35 MB/s", True)),
        # disks
        (samples(*[own("D")] * 3, waits_in="folio_wait_bit"), ("disk", "waits for a disk or file system", True)),
        (samples(*[own("D")] * 3, waits_in="jbd2_log_wait_commit"), ("disk", "waits for a disk or file system", True)),
        (samples(*FIVE, waits_in="request_wait_answer"), ("disk", "waits for a disk or file system", True)),
        (samples(*[own("D")] * 3, waits_in="nv_lock"), ("disk", "waits in the kernel, for a disk or a driver", None)),
        (samples(own("D"), own(), own(), waits_in="x"), ("asleep", "is asleep", False)),
        (samples(*[own("D")] * 3, waits_in="wait_for_vfork_done"), None),
        # sockets
        (samples(*FIVE, waits_in="sk_wait_data"), ("network", "waits for data from the network", None)),
        (samples(*FIVE, waits_in="inet_csk_accept"), ("network", "waits for a connection", None)),
        (samples(*FIVE, waits_in="wait_woken", on_socket=True), ("network", "waits for the network", None)),
        (samples(*FIVE, waits_in="wait_woken"), ("asleep", "is asleep in a socket or terminal", False)),
        (samples(*FIVE, waits_in="ep_poll"), ("asleep", "is asleep until a file or socket is ready", False)),
        (samples(*FIVE, waits_in="hrtimer_nanosleep"), ("asleep", "is asleep in a timer", False)),
        (samples(*FIVE, waits_in="do_wait"), ("asleep", "is asleep until a child process ends", False)),
        (samples(*FIVE, waits_in=""), ("asleep", "is asleep", False)),
        # states
        (samples(own(), own("T", 0.9), own("T", 0.9)), ("stopped", "is stopped", False)),
        (samples(own(), own("t", 0.9), own(cpu_s=0.9)), COMPUTES),  # a debugger has looked at it
        (samples(own(), own("Z")), None),
        # unknown activities
        (samples(own(io=None), own(io=None)), None),
        (samples(own(io=None), own(cpu_s=0.9, io=None)), COMPUTES),
        (samples(own(), own(), children=[None, None]), None),
        (samples(own(), own(), children=[None, {8: own(cpu_s=100)}]), None),
        (samples(own(), own(), children=[{8: own(io=None)}, {8: own(io=None)}]), None),
        (samples(own()), None),
        ([], None),
    ],
)  # fmt: skip
def test_kinds(given: Sequence[Sample], expected: tuple[str, str, bool | None] | None) -> None:
    """Each activity has its word; an unknown one has none."""
    assert doing(given) == expected


@pytest.mark.parametrize(
    ("children", "parent", "says"),
    [
        ([{8: own(cpu_s=3)}, {8: own(cpu_s=3.9)}], own(), "waits while its child process 8 (ptxas) computes"),
        ([{8: own(), 9: own()}, {8: own(cpu_s=0.5), 9: own(cpu_s=0.5)}], own(), "waits while one of its child processes computes"),
        ([{}, {9: own(cpu_s=0.9)}], own(), "waits while one of its child processes computes"),
        ([{8: own(cpu_s=3)}, {}], own(ended_s=3.9), "waits while one of its child processes computes"),
        ([{8: own(cpu_s=3)}, {}], own(ended_s=3.0), None),
        ([{8: own(cpu_s=3)}, {}], own(), None),  # its parent has not waited for it
        ([{8: own(cpu_s=3)}, {8: own(cpu_s=3.02)}], own(), None),
        ([{8: own(ended_s=3)}, {8: own(ended_s=3.9)}], own(), "waits while its child process 8 (ptxas) computes"),
        ([{8: own()}, {8: own(io=Io(0, 0, 60_000_000, 0))}], own(), "waits while its child process 8 (ptxas) is reading 60 MB/s"),
        ([{8: own(io=Io(0, 0, 0, 10**9))}, {}], own(io=Io(0, 0, 0, 10**9)), None),
        ([{8: own("D")}] * 3, own(), "waits while its child process 8 (ptxas) waits for a disk or file system"),
        ([{8: own("R")}] * 3, own(), "waits while its child process 8 (ptxas) computes"),
    ],
)  # fmt: skip
def test_children(children: list[Mapping[int, Process]], parent: Process, says: str | None) -> None:
    """A busy child is named while it lasts; what a child has done before it ended is not done by its parent."""
    named = [{pid: child._replace(name="ptxas") for pid, child in of.items()} for of in children]
    found = doing(samples(*[own()] * (len(children) - 1), parent, children=named))
    assert found == (ASLEEP if says is None else ("child", says, True))


@pytest.mark.parametrize(
    ("gpu", "expected"),
    [
        (GpuUse(0.98, is_own=True), ("gpu", "waits while its GPU is busy", True)),
        (GpuUse(0.98, is_own=False), ("asleep", "is asleep in a lock", None)),
        (GpuUse(None, is_own=True), ("asleep", "is asleep in a lock", None)),
        (GpuUse(0.0, is_own=False), ASLEEP),
        (None, ASLEEP),
    ],
)
def test_gpu(gpu: GpuUse | None, expected: tuple[str, str, bool | None]) -> None:
    """A busy GPU works for a rank if it has it for itself and no kernel waits there; else it is not known whether the rank works."""
    assert doing(samples(*FIVE, gpu=gpu)) == expected


@pytest.mark.parametrize(
    ("gpu", "works"),
    [
        (None, True),
        (GpuUse(0.98, is_own=True), True),
        (GpuUse(0.0, is_own=False), True),
        (GpuUse(0.98, is_own=False), None),
        (GpuUse(None, is_own=False), None),
    ],
)
def test_waiting_in_a_loop(gpu: GpuUse | None, works: bool | None) -> None:
    """A thread that takes a core may wait for a kernel of NCCL, as CUDA does by default: whether the rank works is not known then."""
    assert doing(samples(own(), own(cpu_s=0.9), gpu=gpu)) == ("computing", "computes", works)


def test_steady() -> None:
    """A quiet second does not change the words, a threshold is left later than entered, and ``for_s`` counts since it began."""
    given = samples(*wrote(0, 50, 100, 100, 150, 150, 200, 200, 200, 200, 200, 200, 200))
    before, kinds = None, list[tuple[str, float]]()
    for at in range(1, len(given)):
        before = judged(given[: at + 1], before)
        assert before is not None
        kinds.append((before.kind, before.for_s))
    assert kinds == [
        *(("writing", float(at)) for at in range(1, 10)),
        ("asleep", 1.0),
        ("asleep", 2.0),
        ("asleep", 3.0),
    ]
    less = samples(own(), own(cpu_s=0.25))
    assert doing(less) == ("asleep", "is asleep in a lock", None)
    assert doing(less, Activity("computing", "computes", 1.0, is_working=True)) == COMPUTES


def test_another_process() -> None:
    """A process that got the number of another one is judged by itself."""
    first, second = samples(own(cpu_s=100), own())
    assert judged([first, second._replace(own=second.own._replace(began=90, cpu_s=500))]) is None
