"""What the live page reads, requested by several threads at once."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from commwatch_agent.analysis import live_ranks
from commwatch_agent.incidents.incident import Incident
from commwatch_agent.model.nccl_views import NcclOperations
from commwatch_agent.questions.live_feed import LiveFeed
from commwatch_agent.questions.node_now import OperationsNow
from tests.helpers import PATIENCE_S, Watch, idle_services, operation, write_ring


class Moment(float):
    """A time that lets something happen when it is compared the first time."""

    def __new__(cls, at: float, then: list[threading.Thread]) -> Moment:
        made = super().__new__(cls, at)
        made.then = then
        return made

    then: list[threading.Thread]

    def __lt__(self, other: float) -> bool:
        while self.then:
            other_thread = self.then.pop()
            other_thread.start()
            other_thread.join(1.0)  # where a lock keeps it waiting it goes on later
        return super().__lt__(other)


def test_what_is_told_of_two_jobs_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads that ask about different jobs at the same moment each get their own job's, and neither is worked out again."""
    watch = Watch(tmp_path)
    for job in ("a", "b", "c"):
        write_ring(watch.rings, [operation(start_ns=0, end_ns=9)], job=job)
    watch.tick()
    told: list[str] = []

    def tell(self: LiveFeed, job: str) -> bytes:
        told.append(job)
        return json.dumps(job).encode()

    monkeypatch.setattr(LiveFeed, "_compute_insights", tell)
    then: list[threading.Thread] = []
    look = LiveFeed(idle_services(watch.agent), lambda: Moment(100.0, then))
    assert look.insights("c") == b'"c"'
    found: list[bytes] = []
    meanwhile = threading.Thread(target=lambda: found.append(look.insights("b")))
    original = LiveFeed._compute_insights

    def told_then_disturbed(self: LiveFeed, job: str) -> bytes:
        text = original(self, job)
        if job == "a":
            then.append(meanwhile)
        return text

    monkeypatch.setattr(LiveFeed, "_compute_insights", told_then_disturbed)
    assert look.insights("a") == b'"a"'
    meanwhile.join(PATIENCE_S)
    assert found == [b'"b"']
    assert [look.insights(job) for job in "abc"] == [b'"a"', b'"b"', b'"c"']
    assert told == ["c", "a", "b"]


@pytest.mark.parametrize(("peers", "expected"), [(2, [100.0, 105.0, 110.0, 115.0, 120.0]), (64, [100.0, 115.0])])
def test_operations_of_many_nodes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, peers: int, expected: list[float]
) -> None:
    """All agents are asked for their operations at most once in 0.2 s for each of them; until then the answer is the one before."""
    watch, now, asked = Watch(tmp_path), [100.0], list[float]()
    write_ring(watch.rings, [operation(start_ns=0, end_ns=9)], job="job")
    watch.tick()

    def joined(self: LiveFeed, job: str, chosen: list[NcclOperations]) -> OperationsNow:
        asked.append(now[0])
        return OperationsNow(job, now[0], [], chosen)

    monkeypatch.setattr(LiveFeed, "_operations_of_nodes", joined)
    services = idle_services(watch.agent)
    monkeypatch.setattr(services.peers, "views", lambda: [SimpleNamespace(state="answers")] * peers)
    look = LiveFeed(services, lambda: now[0])
    for now[0] in (100.0, 105.0, 110.0, 115.0, 120.0):
        assert json.loads(look.operations("job"))["covered_s"] == asked[-1]
    assert asked == expected


def test_incidents_of_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A moment has the incidents of this run and of the node in its time, not those of an earlier run of the same name, or of another job."""
    watch = Watch(tmp_path)
    write_ring(watch.rings, [operation(start_ns=0, end_ns=9)], job="job")
    watch.tick()
    services = idle_services(watch.agent)
    look = LiveFeed(services, lambda: 100.0)
    with watch.agent.live("job") as ((job,), _):
        key, began = live_ranks.run_key(job), watch.agent.jobs()[0].started_at

    def incident(name: str, job_id: str, run: str, ended_at: float | None = None) -> Incident:
        state = "open" if ended_at is None else "ended"
        return Incident(name, "hang", "warning", state, job_id, run, (name,), 0.0, 0.0, 0.0, ended_at=ended_at)

    here = [incident("own", "job", key), incident("past", "job", key, began + 1), incident("node", "", "", began + 1)]
    others = [
        incident("earlier", "job", "other", 1.0),
        incident("other", "b", "b"),
        incident("before", "", "", began - 1),
    ]
    monkeypatch.setattr(services.incidents, "incidents", lambda: [*here, *others])
    found = json.loads(look.moment("job"))["incidents"]
    assert {each["id"] for each in found} == {"own", "past", "node"}
    part = look.node("job")
    assert part
    assert {each.id for each in part.incidents} == {"own", "past"}
