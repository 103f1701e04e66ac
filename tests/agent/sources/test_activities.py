"""What a rank does is looked at while others wait for it, and only then; it reaches every view of ranks."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest
from pydantic import TypeAdapter

from commwatch.wire import events as ev
from commwatch.wire.ring import Outside
from commwatch_agent.analysis.live_ranks import rank as view
from commwatch_agent.incidents.incident import Incident
from commwatch_agent.ingest.jobs import JobTable
from commwatch_agent.ingest.rank_totals import RankTotals
from commwatch_agent.model.views import RankView
from commwatch_agent.sources.activities import Activities
from commwatch_collectors.node import activity
from commwatch_collectors.node.gpu import GpuPlace
from commwatch_collectors.node.judged_activity import Activity
from tests.agent.analysis.test_live_ranks import NOW, S, lost, rank
from tests.agent.test_lock import free
from tests.helpers import Trainer, agent, group_entry, identity, operation, wait_for

WRITING = Activity("writing", "is writing 210 MB/s", 12.0, is_working=True)
STALLED = Incident("id", "stalled", "warning", "open", "job", "key", ("w", "7"), 0.0, 0.0, 0.0, ranks=(1,))


@pytest.fixture
def pid() -> Iterator[int]:
    """A process that is asleep."""
    with subprocess.Popen([sys.executable, "-c", "import time\ntime.sleep(1000)"]) as process:
        yield process.pid
        process.kill()


class Scene:
    """Ranks of one job, and what watches them; its clock goes on from ``NOW``."""

    def __init__(self, *ranks: RankTotals, aggregate: JobTable, pid: int, incidents: tuple[Incident, ...] = ()) -> None:
        self.ranks, self.incidents, self.lock = ranks, incidents, threading.RLock()
        self.asked: list[GpuPlace] = []
        self.later_ns, began_ns = 0, time.monotonic_ns()
        for book in ranks:
            book.pid = pid
        self.activities = Activities(
            aggregate,
            self.lock,
            incidents=lambda: self.incidents,
            gpu_busy=self._busy,
            now_ns=lambda: NOW + self.later_ns + time.monotonic_ns() - began_ns,
        )

    def _busy(self, place: GpuPlace) -> float:
        assert free(self.lock)
        self.asked.append(place)
        return 0.97

    def looked_at(self) -> list[int]:
        """The ranks that are looked at now."""
        self.activities.tick()
        return sorted(book.rank for book in self.activities._samples)

    def until(self, known: Callable[[], object]) -> None:
        """Look again and again until something is known."""

        def looked() -> object:
            self.activities.tick()
            return known()

        wait_for(looked, "an activity")


def inside(book: RankTotals, for_s: float, group: int = 0, flags: int = 0) -> None:
    """This rank is in collective 7 of the group of all for so long."""
    fields = operation(start_ns=0, end_ns=0, launch_ns=NOW - int(for_s * S), seq=7, group=group, flags=flags)
    book.in_flight = [ev.Record._make((1, *fields, 1))]


def test_while_others_wait(pid: int) -> None:
    """A rank is looked at, without the lock, as long as another one waits for it; what it does is known from the second look on."""
    aggregate = JobTable()
    scene = Scene(rank(aggregate, 0, inside_s=2.0), rank(aggregate, 1), aggregate=aggregate, pid=pid)
    waiting, late = scene.ranks
    assert scene.looked_at() == [1]
    assert view("job", late, NOW).activity is None
    scene.until(lambda: late.activity)
    assert late.activity is not None
    found_ns, found = late.activity
    assert (found.kind, found.says, found.is_working) == ("asleep", "is asleep in a timer", False)
    assert (view("job", late, found_ns).activity, view("job", waiting, found_ns).activity) == (found, None)
    assert view("job", late, found_ns + 6 * S).activity is None  # it may do something else by now
    inside(late, 0.1)
    assert scene.looked_at() == []
    assert late.activity is None


def test_idle(pid: int) -> None:
    """While no rank waits for another one for long, no process is looked at."""
    aggregate = JobTable()
    scene = Scene(rank(aggregate, 0, inside_s=0.2), rank(aggregate, 1), aggregate=aggregate, pid=pid)
    assert scene.looked_at() == []
    inside(scene.ranks[0], 50.0)
    inside(scene.ranks[1], 50.0)
    assert scene.looked_at() == []
    assert scene.activities._parents._known == {}


def test_message(pid: int) -> None:
    """The rank from which a message should come is looked at."""
    aggregate = JobTable()
    scene = Scene(rank(aggregate, 0), rank(aggregate, 1), aggregate=aggregate, pid=pid)
    waits = operation("recv", start_ns=NOW - 3 * S, launch_ns=NOW - 3 * S, end_ns=0, peer=1, flags=ev.BLOCKED)
    scene.ranks[0].in_flight = [ev.Record._make((1, *waits, 1))]
    assert scene.looked_at() == [1]


def test_outside_operations(pid: int) -> None:
    """The rank that has not come to ``new_group`` is looked at, and not those that are inside."""
    aggregate = JobTable()
    scene = Scene(*(rank(aggregate, n, size=3) for n in range(3)), aggregate=aggregate, pid=pid)
    for book in scene.ranks[:2]:
        book.outside = Outside(NOW - 3 * S, 1, 1, "new_group", "")
    scene.ranks[2].outside = Outside(0, 1, 0, "", "")
    assert scene.looked_at() == [2]


@pytest.mark.parametrize(
    ("incident", "looked_at"),
    [
        (STALLED, [1]),
        (replace(STALLED, kind="init_incomplete", ranks=(0, 1)), [0, 1]),
        (replace(STALLED, state="ended"), []),
        (replace(STALLED, kind="straggler"), []),
        (replace(STALLED, job_id="other"), []),
        (replace(STALLED, ranks=()), []),
    ],
)
def test_culprits(pid: int, incident: Incident, looked_at: list[int]) -> None:
    """The culprits of an open incident in which others wait are looked at, wherever these wait."""
    aggregate = JobTable()
    scene = Scene(rank(aggregate, 0), rank(aggregate, 1), aggregate=aggregate, pid=pid, incidents=(incident,))
    assert scene.looked_at() == looked_at


def test_ranks_of_several_nodes(pid: int) -> None:
    """In a job with ranks on other nodes, whose waits are not seen here, a rank is looked at that has been in no operation for some seconds."""
    aggregate = JobTable()
    ranks = [rank(aggregate, number, size=4) for number in (0, 1)]
    scene = Scene(*ranks, aggregate=aggregate, pid=pid)
    for book, quiet_s in zip(ranks, (6, 3), strict=True):
        book.recorded_ns = NOW - quiet_s * S
    assert scene.looked_at() == [0]
    inside(ranks[0], 0.2)
    assert scene.looked_at() == []


def test_lost(pid: int) -> None:
    """A rank that has ended, or whose process is not visible, is not looked at."""
    aggregate = JobTable()
    scene = Scene(
        *(rank(aggregate, n, size=3, inside_s=2.0 if n == 0 else None) for n in range(3)), aggregate=aggregate, pid=pid
    )
    lost(scene.ranks[1])
    scene.ranks[2].pid = None
    assert scene.looked_at() == []


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        (lambda late: None, "gpu"),
        (lambda late: late.unseen.update({0: 6}), "asleep"),
        (lambda late: inside(late, 0.1, group=1, flags=ev.ON_DEVICE | ev.BLOCKED), "asleep"),
    ],
)
def test_gpu(pid: int, change: Callable[[RankTotals], None], kind: str) -> None:
    """A busy GPU works for a rank, unless a kernel of NCCL may wait there."""
    aggregate = JobTable()
    scene = Scene(rank(aggregate, 0, inside_s=2.0), rank(aggregate, 1), aggregate=aggregate, pid=pid)
    late = scene.ranks[1]
    late.gpu = GpuPlace("gpu", "", 0)
    change(late)
    scene.until(lambda: late.activity and late.activity[1].kind == kind)
    assert late.activity is not None
    assert late.activity[1].is_working is (True if kind == "gpu" else None)
    assert set(scene.asked) == {late.gpu}


def test_agent_of_a_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """An agent that a rank has begun is no child for which the rank waits, nor are other ranks, nor what these have begun."""
    monkeypatch.setattr(activity, "_MOST_CHILDREN", 100_000)  # the parent of the tests may have many
    aggregate = JobTable()
    scene = Scene(rank(aggregate, 0, inside_s=2.0), rank(aggregate, 1), aggregate=aggregate, pid=os.getppid())
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as busy:
        scene.activities.tick()
        busy.kill()
    (taken,) = scene.activities._samples[scene.ranks[1]]
    assert taken.children is not None
    assert not {os.getpid(), busy.pid} & taken.children.keys()


def test_processes_that_end(pid: int) -> None:
    """A process that ends between two looks stops nothing, and what it did is forgotten."""
    aggregate = JobTable()
    scene = Scene(rank(aggregate, 0, inside_s=2.0), rank(aggregate, 1), aggregate=aggregate, pid=pid)
    late = scene.ranks[1]
    scene.until(lambda: late.activity)
    os.kill(pid, 9)
    scene.until(lambda: late.activity is None)
    late.pid = 2**22 + 1
    assert scene.looked_at() == [1]
    assert late.activity is None


def test_other_agents() -> None:
    """The agents of other nodes understand what a rank does, and ranks of agents that do not send it."""
    adapter = TypeAdapter(RankView)
    aggregate = JobTable()
    book = rank(aggregate, 0)
    book.activity = NOW, WRITING
    here = view("job", book, NOW)
    sent = adapter.dump_json(here)
    assert adapter.validate_json(sent) == here
    assert here.activity == WRITING
    old = adapter.dump_python(here, mode="json")
    del old["activity"]
    assert adapter.validate_python(old) == replace(here, activity=None)


def test_api(tmp_path: Path) -> None:
    """``/api/v1/ranks`` has what a rank does for which another one waits."""
    now = time.monotonic_ns()
    offset_ns = time.time_ns() - now
    with agent(tmp_path) as running, ExitStack() as stack:
        trainers = [
            stack.enter_context(
                Trainer(
                    tmp_path / "rings" / f"job.r0.{n}.ring", identity(rank=n, wall_offset_ns=offset_ns, started_ns=now)
                )
            )
            for n in (0, 1)
        ]
        for trainer in trainers:
            trainer.call("name", [(group_entry(),)])
            trainer.write([operation(start_ns=now, end_ns=now + 1, seq=0)])
        trainers[0].call("begin", [operation(start_ns=0, end_ns=0, launch_ns=now, seq=1)])

        def activities() -> list[dict[str, object] | None]:
            return [each["activity"] for each in running.get("/api/v1/ranks")]

        wait_for(lambda: len(activities()) == 2 and activities()[1], "what rank 1 does")
        waiting, late = activities()
    assert waiting is None
    assert late is not None
    assert (late["kind"], late["says"], late["is_working"]) == ("asleep", "is asleep in a pipe", False)
