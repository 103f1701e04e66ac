"""What a culprit is doing is evidence of its incident: its stack, and what the kernel says; and what to install where there is no stack."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from socket import gethostname

import pytest

from commwatch_agent.incidents.incident import EvidenceItem, Incident
from commwatch_agent.incidents.stacks import counted, longer_at, main_thread, of_trainer, place_of, shares, stack_at
from commwatch_agent.sources.culprits import Culprits, doing, taken
from commwatch_collectors.node.judged_activity import Activity
from tests.agent.sources.test_stack_capture import rank_view
from tests.helpers import needs, wait_for

HANG = Incident("id", "hang", "warning", "open", "job", "key", ("g", "1"), 0.0, 0.0, 0.0, ranks=(3,))
WRITING = Activity("writing", "is writing 210 MB/s", 12.0, is_working=True)
ASLEEP = Activity("asleep", "is asleep in a lock", 3.0, is_working=False)
#: As py-spy prints it: the innermost frame first.
STACK = """Process 7: python train.py
Python v3.11.7

Thread 7 (idle): "MainThread"
    wait (/usr/lib/python3.11/threading.py:320)
    get (/venv/site-packages/torch/utils/data/dataloader.py:100)
    load (/home/me/train.py:88)
    <module> (/home/me/train.py:120)
Thread 9 (active): "loader"
    other (/home/me/train.py:5)
"""

#: As py-spy counts stacks over time: the outermost frame first.
COUNTED = """thread (7): MainThread;<module> (/home/me/train.py:120);load (/home/me/train.py:88);wait (/usr/lib/python3.11/threading.py:320) 40
thread (7): MainThread;<module> (/home/me/train.py:120);load (/home/me/train.py:88) 20
thread (7): MainThread;<module> (/home/me/train.py:122);backward (/venv/site-packages/torch/_tensor.py:9) 40
thread (9): loader;other (/home/me/train.py:5) 100
thread (11);_serve (/venv/site-packages/commwatch/probe/thread.py:40) 100
Sampling process 97 times a second
"""


class Scene:
    """A look at culprits, and what it adds."""

    def __init__(self, *incidents: Incident, pid: int) -> None:
        self.incidents, self.added = list(incidents), list[tuple[str, Sequence[EvidenceItem]]]()
        self.view = replace(rank_view(pid), host=gethostname())
        self.culprits = Culprits(
            lambda: self.incidents, lambda job: [self.view], lambda *added: self.added.append(added), clock=lambda: 5.0
        )


def test_place() -> None:
    """The place is the innermost frame of the main thread that is the user's."""
    assert place_of(STACK) == "load (train.py:88)"
    assert place_of("") == ""
    assert place_of(STACK.replace("/home/me", "/venv/site-packages")) == "wait (threading.py:320)"
    assert place_of(STACK.replace("load (/home/me/", "noting (/run/x/commwatch/probe/")) == "<module> (train.py:120)"
    assert main_thread(STACK)[-2:] == ["load (/home/me/train.py:88)", "<module> (/home/me/train.py:120)"]


def test_threads_of_the_trainer() -> None:
    """Threads that the probe started are not among the stacks, however they were started; the trainer's are, also with frames of the probe in them."""
    head = "Process 7: python train.py\nPython v3.11.7 (/usr/bin/python3.11)\n\n"
    main = 'Thread 7 (idle): "MainThread"\n    noting (/v/site-packages/commwatch/probe/hooks.py:9)\n    <module> (/me/train.py:14)\n'
    started = (
        "    Thread.run (/l/python3.11/threading.py:982)\n    Thread._bootstrap (/l/python3.11/threading.py:1002)\n"
    )
    loader = f'Thread 9 (idle): "loader"\n    noting (/v/commwatch/wire/ring.py:9)\n    load (/me/commwatch/load.py:9)\n{started}'
    watcher = (
        "Thread 8 (idle)\n    loop (/v/commwatch/probe/x.py:5)\n    Watcher._main (/v/commwatch/probe/watcher.py:44)\n"
    )
    metrics = f'Thread 10 (idle): "commwatch-metrics"\n    wait (/l/python3.11/threading.py:320)\n    _run (/v/commwatch/api/training.py:90)\n{started}'
    assert of_trainer(head + main + watcher + loader + metrics) == (head + main + loader).rstrip()
    of_probe = 'Thread 7 (active): "MainThread"\n    <module> (/v/commwatch/probe/run.py:3)'
    assert of_trainer(of_probe) == of_probe
    assert of_trainer("") == ""
    assert of_trainer("not as py-spy prints it") == "not as py-spy prints it"


def test_longer_at_a_place() -> None:
    """The place of a late rank is where it spends a larger part of its time than another rank; a place where both are as long is none."""
    stacks = counted(COUNTED)
    assert shares(stacks) == {"load (train.py:88)": 0.6, "<module> (train.py:120)": 0.6, "<module> (train.py:122)": 0.4}
    assert longer_at(stacks, {}) == "load (train.py:88)"
    there = {"load (train.py:88)": 0.55, "<module> (train.py:120)": 0.55}
    assert longer_at(stacks, {**there, "<module> (train.py:122)": 0.2}) == "<module> (train.py:122)"
    assert longer_at(stacks, {**there, "<module> (train.py:122)": 0.45}) == ""
    assert longer_at({}, {"load (train.py:88)": 1.0}) == ""
    assert stack_at(stacks, "load (train.py:88)")[0] == "wait (/usr/lib/python3.11/threading.py:320)"
    assert stack_at(stacks, "elsewhere (train.py:1)") == []


def test_unnamed_threads() -> None:
    """A thread without a name is the main thread only where no thread has that name: else places would have a part of their true share."""
    unnamed = COUNTED.replace(": MainThread", "")
    assert sum(counted(COUNTED).values()) == 100
    assert shares(counted(COUNTED))["load (train.py:88)"] == 0.6
    assert sum(counted(unnamed).values()) == 200


def test_longer_by_another_call() -> None:
    """Where a late rank does more of what all do, the place is the call by which only it comes there, with the user's frames of that stack."""
    forward = ("mm (/v/site-packages/torch/x.py:3)", "Block.forward (/me/model.py:9)", "GPT.forward (/me/model.py:20)")
    usual, more = ("step (/me/ddp.py:50)", "main (/me/ddp.py:60)"), ("extra (/me/ddp.py:23)", "main (/me/ddp.py:59)")
    late = {(*forward, *usual): 40, (*forward, *more): 30, ("wait (/me/ddp.py:51)", *usual): 30}
    other = shares({(*forward, *usual): 55, ("wait (/me/ddp.py:51)", *usual): 45})
    assert longer_at(late, other) == "extra (ddp.py:23)"
    assert stack_at(late, "extra (ddp.py:23)") == [*forward, *more]


def test_late_rank() -> None:
    """Of a late rank, the place is evidence where it spends more of its time than another rank: not one at which it happens to be."""
    needs(shutil.which("py-spy", path=f"{os.environ['PATH']}:{Path(sys.executable).parent}"), "py-spy")
    code = (
        "import sys, time\ndef load():\n    time.sleep(float(sys.argv[1]))\n"
        "def wait():\n    time.sleep(float(sys.argv[2]))\nprint(flush=True)\nwhile True:\n    load()\n    wait()"
    )
    commands = [[sys.executable, "-c", code, *pace] for pace in (("0.01", "0.05"), ("0.03", "0.03"))]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE) for command in commands]
    late = Incident("id", "straggler", "warning", "open", "job", "key", ("g", "1"), 0.0, 0.0, 0.0, ranks=(1,))
    scene = Scene(late, pid=0)
    views = [replace(scene.view, rank=rank, visible_pid=each.pid, pid=each.pid) for rank, each in enumerate(processes)]
    scene.culprits = Culprits(lambda: [late], lambda job: views, lambda *added: scene.added.append(added))
    try:
        for process in processes:
            assert process.stdout is not None
            process.stdout.readline()
        scene.culprits.tick()
    finally:
        for process in processes:
            with process:
                process.kill()
    ((_, (item,)),) = scene.added
    assert item.data["place"] == "load (<string>:3)"
    assert re.fullmatch(
        r"in \d+ samples, rank 1 was in load \(<string>:3\) \d+% of the time, another rank \d+%", item.text
    )
    assert main_thread(str(item.data["stack"]))[0] == "load (<string>:3)"


def test_stopped_process() -> None:
    """A stopped process is called stopped; one that is gone is not described."""
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"]) as process:
        try:
            process.send_signal(signal.SIGSTOP)
            wait_for(lambda: doing(process.pid).startswith("is stopped"), "the stop")
        finally:
            process.kill()
    assert doing(process.pid) == ""


def test_each_once() -> None:
    """The culprits of an open incident are looked at once, also after a restart of the agent; those that are learned later, too."""
    scene = Scene(HANG, pid=os.getpid())
    scene.culprits.tick()
    scene.culprits.tick()
    ((incident, items),) = scene.added
    assert incident == "id"
    assert {item.source for item in items} == {"process", "stack"}
    known = Scene(replace(HANG, evidence=tuple(items)), pid=os.getpid())
    known.culprits.tick()
    assert known.added == []


@pytest.mark.parametrize(
    "incident",
    [
        replace(HANG, state="pending"),
        replace(HANG, kind="corruption"),
        replace(HANG, ranks=(2,)),
        replace(HANG, ranks=()),
    ],
)
def test_not_of_others(incident: Incident) -> None:
    """Nothing is taken where an incident is not open, has no culprit here, or is not about what a rank does."""
    scene = Scene(incident, pid=os.getpid())
    scene.culprits.tick()
    assert scene.added == []


def test_one_of_each_side(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of ranks that disagree, one of each side is looked at first, also one that is none of the culprits; then further culprits, four in all."""
    looked: list[int] = []

    def note(culprits: Culprits, job: str, ranks: Sequence[int]) -> list[EvidenceItem]:
        looked.extend(ranks)
        return []

    monkeypatch.setattr(Culprits, "of", note)
    sides = {"sides": [[0, 4], [1, 2, 3, 5], [6]]}
    disagree = replace(HANG, kind="desync", ranks=(1, 2, 3, 5, 6), waiting=(0, 4), details=sides)
    scene = Scene(disagree, pid=os.getpid())
    views = [replace(scene.view, rank=rank) for rank in range(7)]
    scene.culprits._ranks = lambda job: views
    scene.culprits.tick()
    assert looked == [0, 1, 6, 2]


def test_on_another_node() -> None:
    """What a culprit on another node does is taken by the agent there, which answers at most once in some seconds."""
    here, there = Scene(HANG, pid=os.getpid()), Scene(replace(HANG, ranks=(3, 5)), pid=os.getpid())
    asked: list[tuple[str, Sequence[int]]] = []

    def elsewhere(job: str, ranks: Sequence[int]) -> list[EvidenceItem]:
        asked.append((job, ranks))
        return [EvidenceItem("stack", 5.0, "rank 5", {"rank": 5})]

    there.culprits = Culprits(
        lambda: there.incidents, lambda job: [], lambda *added: there.added.append(added), elsewhere
    )
    there.culprits.tick()
    assert (asked, [item.text for item in there.added[0][1]]) == ([("job", [3, 5])], ["rank 5"])
    lent = here.culprits.lent("job", [3, 5])
    assert {item.source for item in lent} == {"process", "stack"}
    assert here.culprits.lent("job", [3, 5]) is lent
    assert here.culprits.lent("job", [5]) == []


@pytest.mark.parametrize("kind", ["hang", "stalled", "waiting", "init_incomplete"])
def test_activity(kind: str) -> None:
    """An open wait has what its culprit does while others wait for it, once for each kind of activity."""
    scene, seconds = Scene(replace(HANG, kind=kind), pid=os.getpid()), iter(range(100))
    scene.culprits._clock = lambda: float(next(seconds))
    for activity in (None, WRITING, replace(WRITING, says="is writing 1 MB/s"), ASLEEP, WRITING, None):
        scene.view = replace(scene.view, activity=activity)
        scene.culprits.tick()
    told = [item for _, items in scene.added for item in items if "activity" in item.data]
    assert [item.text for item in told] == ["rank 3 is writing 210 MB/s", "rank 3 is asleep in a lock"]
    assert {item.source for item in told} == {"process"}


@pytest.mark.parametrize(
    "incident",
    [replace(HANG, kind="straggler"), replace(HANG, ranks=(2,)), replace(HANG, state="ended")],
)
def test_no_activity(incident: Incident) -> None:
    """What a rank does is no evidence where others do not wait for it all the time."""
    scene = Scene(incident, pid=os.getpid())
    scene.view = replace(scene.view, activity=WRITING)
    scene.culprits.tick()
    assert not any("activity" in item.data for _, items in scene.added for item in items)
    assert any("activity" in item.data for item in scene.culprits.lent("job", [3]))


def test_stack() -> None:
    """py-spy's stack is there with its place."""
    needs(shutil.which("py-spy", path=f"{os.environ['PATH']}:{Path(sys.executable).parent}"), "py-spy")
    code = (
        "import time; from commwatch.probe.watcher import Watcher; w = Watcher(lambda: w.sleep(1000)); w.start()\n"
        "def saving():\n    print(flush=True)\n    time.sleep(1000)\nsaving()"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            process.stdout.readline()
            wait_for(lambda: doing(process.pid).startswith("is sleeping"), "its sleep")
            items = {item.source: item for item in taken(3, process.pid, 5.0)}
        finally:
            process.kill()
    assert items["stack"].text == "rank 3 is in saving (<string>:4)"
    assert "saving" in str(items["stack"].data["stack"])
    assert "watcher.py" not in str(items["stack"].data["stack"])
    assert items["process"].text.startswith(f"rank 3: process {process.pid} is sleeping")


def test_without_py_spy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there is no stack, the text names what to install, or what to permit where that is there."""
    for program, says in ((None, "pip install py-spy"), ("/bin/false", "py-spy could not read the process")):
        monkeypatch.setattr("commwatch_agent.sources.stack_capture._py_spy", lambda found=program: found)
        (item,) = [item for item in taken(3, os.getpid(), 5.0) if item.source == "stack"]
        assert says in item.text
        assert "SYS_PTRACE" in str(item.data["needs"])
