"""Profiles of one step in N: when they are requested, what they may cost, and the share that they give."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from commwatch.collectors.wire import profile_files as files
from commwatch.core.views import StepView
from commwatch.prometheus.exporter import Exporter
from commwatch.watchers.regular_profiles import RegularProfiles, cost_s
from tests.agent.watchers.test_profiles import JOB, STEP, STEPS, Node
from tests.helpers import EPOCH_NS, MS, mark, operation

EPOCH_S = EPOCH_NS / 1e9


class Regular(Node):
    """Such a node, whose agent requests a profile of one step in a hundred; training is the only thing that takes time."""

    def __init__(self, directory: Path, exposed_ns: int | None = None, every: int = 100, world_size: int = 2) -> None:
        super().__init__(directory, exposed_ns, world_size)
        self.regular = RegularProfiles(self.profiles, self.watch.agent, every, lambda: self.now)
        self.steps, self.now = STEPS, EPOCH_S + (STEPS + 1) * STEP / 1e9
        self.look()

    def train(self, steps: int, step_ns: int = STEP) -> None:
        """So many more steps; fifty take as long as the agent pauses between two looks."""
        end = round((self.now - EPOCH_S) * 1e9)
        made = []
        for n in range(self.steps + 1, self.steps + steps + 1):
            made.append(operation(start_ns=end + 10 * MS, end_ns=end + 40 * MS, seq=n))
            end += step_ns
            made.append(mark(n, end, exposed_ns=self.exposed_ns))
        for trainer in self.trainers:
            trainer.write(made)
        self.steps += steps
        self.now = EPOCH_S + end / 1e9
        self.watch.tick(STEP)

    def look(self) -> None:
        """The agent looks at files and steps."""
        self.profiles.tick()
        self.regular.tick()

    def requested(self) -> files.Request:
        """The request that there is after another hundred steps."""
        for _ in range(2):
            assert self.standing() is None
            self.train(50)
            self.look()
        request = self.standing()
        assert request is not None
        return request

    def share(self, rank: int) -> float | None:
        """The rank's series in ``/metrics`` whose source is the profile."""
        registry, lock = CollectorRegistry(), threading.RLock()
        registry.register(Exporter(self.watch.aggregate, lock, lambda: 0, list, profiled=self.regular.exposed_share))
        labels = {"job_id": JOB, "rank": str(rank), "source": "profile"}
        return registry.get_sample_value("commwatch_exposed_comm_share_ratio", labels)


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Regular]:
    """Two ranks whose exposed time is not measured."""
    with closing(Regular(tmp_path)) as made:
        yield made


def test_from_steps_to_share(node: Regular) -> None:
    """After N steps, one step of all ranks is profiled; the share is in the metrics, for those whose trace shows it."""
    request = node.requested()
    assert (request.steps, request.ranks) == (1, [0, 1])
    assert node.share(0) is None
    node.finish(request.id, 0)
    node.finish(request.id, 1, error="the training itself runs a profiler")
    node.train(50)
    node.look()
    # Of 200 ms, 60 have communication, 20 of these beside computation.
    assert node.share(0) == pytest.approx(0.2)
    assert node.share(1) is None
    assert list(node.kept.glob("*/*.gz")) == []


@pytest.mark.parametrize(("world_size", "after_s"), [(2, 100), (6, 300)])
def test_what_it_may_cost(tmp_path: Path, world_size: int, after_s: float) -> None:
    """The next profile begins only when the lost time of the previous one, on all nodes, is a thousandth of the time since."""
    with closing(Regular(tmp_path, world_size=world_size)) as node:
        request = node.requested()
        for rank in (0, 1):
            node.finish(request.id, rank)
        node.train(1, step_ns=STEP + 100 * MS)
        node.train(49)
        node.look()
        ended = node.now
        for _ in range(100):
            node.train(50)
            node.look()
            if node.standing() is not None:
                break
        assert ended + after_s <= node.now < ended + after_s + 6


@pytest.mark.parametrize(("exposed_ns", "every"), [(20 * MS, 100), (None, 0)], ids=["measured", "off"])
def test_not_requested(tmp_path: Path, exposed_ns: int | None, every: int) -> None:
    """A rank whose exposed time is measured is left alone, and so is every rank without the setting."""
    with closing(Regular(tmp_path, exposed_ns, every)) as node:
        for _ in range(4):
            node.train(50)
            node.look()
            assert node.standing() is None


def test_beside_the_users(node: Regular) -> None:
    """A profile that the user has requested goes on undisturbed; the regular one follows N steps later."""
    asked = node.ask(timeout_s=3600.0)
    for _ in range(3):
        node.train(50)
        node.look()
        request = node.standing()
        assert request is not None
        assert request.id == asked.id
    for rank in (0, 1):
        node.finish(asked.id, rank)
    node.train(50)
    node.look()
    request = node.standing()
    assert request is not None
    assert request.id != asked.id
    assert node.share(0) is None


def test_restarted(node: Regular) -> None:
    """Whoever begins to count its steps again is profiled N steps later, not when it has as many as before."""
    request = node.requested()
    for rank in (0, 1):
        node.finish(request.id, rank, error="out of space")
    node.train(50)
    node.look()
    node.train(1)
    node.restart()
    node.train(50)
    node.look()
    assert node.requested().id != request.id


def step(start_s: float, duration_s: float) -> StepView:
    """A step of which only the time matters."""
    return StepView(JOB, 0, 0, start_s, start_s + duration_s, duration_s, None, None, None, None, {}, None, False)


def test_cost() -> None:
    """What a profile cost is what its steps took beyond the usual one; without a usual one, its whole time."""
    before = [step(at, 1.0) for at in range(10)]
    assert cost_s([*before, step(10, 1.0), step(11, 1.5), step(12.5, 1.25)], 10.5, 13.0) == pytest.approx(0.75)
    assert cost_s([*before, step(10, 0.5)], 10.2, 10.5) == 0.0
    assert cost_s([*before, step(20, 9.0)], 10.2, 10.5) == 0.0
    assert cost_s([], 10.0, 12.0) == 2.0
    assert cost_s([step(11, 1.0)], 10.0, 12.0) == 2.0
