"""One profiled step in so many: when it is requested, what it may cost, and the share that it gives, with ranks played by hand."""

from __future__ import annotations

import logging
import threading
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from commwatch.wire.numbers import NUMBERS
from commwatch_agent.analysis.queries import QueryService
from commwatch_agent.model.views import StepView
from commwatch_agent.sources.profiles import RankProfile
from commwatch_agent.sources.regular_profiles import BUDGET, RegularProfiles, added, interval
from tests.agent.sources.test_profiles import JOB, STEP, STEPS, Node
from tests.helpers import MS, mark

EVERY = 4


class Course:
    """Two ranks with steps of 100 ms, and an agent that profiles one step in so many."""

    def __init__(self, directory: Path, exposed_ns: int | None, every: int = EVERY) -> None:
        self.node, self.steps, self._exposed_ns = Node(directory, exposed_ns), STEPS, exposed_ns
        agent = QueryService(self.node.watch.path, self.node.watch.aggregate, threading.RLock(), self.now_ns)
        self.regular = RegularProfiles(every, self.node.profiles, agent)

    def now_ns(self) -> int:
        """The clock of the trainers."""
        return (self.steps + 1) * STEP

    def tick(self) -> None:
        """What the agent's thread does."""
        self.node.watch.tick(self.now_ns())
        self.node.profiles.tick()
        self.regular.tick()

    def step(self, took_ns: int = STEP) -> None:
        """Both ranks make a step, and the agent reads it."""
        ended_ns = self.now_ns() + took_ns
        self.steps += 1
        for trainer in self.node.trainers:
            trainer.write([mark(self.steps, ended_ns, exposed_ns=self._exposed_ns)])
        self.tick()

    def close(self) -> None:
        """End the trainers."""
        self.node.close()


def requested(course: Course) -> str | None:
    """The profile that the trainers find."""
    found = course.node.standing()
    assert found is None or (found.job, found.steps, found.ranks) == (JOB, 1, [0, 1])
    return None if found is None else found.id


def test_share_that_is_not_known_otherwise(tmp_path: Path) -> None:
    """After so many steps one is profiled; its exposed share is exported for the ranks that have no other, until they end."""
    with closing(Course(tmp_path, None)) as course:
        course.tick()
        first = requested(course)
        assert first is not None
        assert course.regular.readings() == [("profiles", [])]
        course.node.finish(first, 0)
        course.node.finish(first, 1, error="the training itself runs a profiler")
        course.tick()
        course.tick()  # the share is taken in one tick, and exported with what is known in the next
        # Played: of 200 ms, 40 ms are exposed. The step after the profile ended at mark 4.
        [(name, readings)] = course.regular.readings()
        (reading,) = readings or []
        assert (name, reading[:2]) == ("profiles", ("exposed_comm_share_ratio", (JOB, "0", "profile")))
        assert reading.value == pytest.approx(0.2)
        assert requested(course) is None
        while (second := requested(course)) is None:
            course.step()
        assert course.steps == 2 * EVERY
        course.node.finish(second, 0)
        course.step()
        course.node.finish(second, 1, error="no step ended in time")
        course.step()
        # Only the latest is kept: one a minute would fill the disk.
        assert [path.name for path in course.node.kept.glob("*")] == [f"{JOB}-{second}"]
        assert course.node.profiles.get(first) is None
        for trainer in course.node.trainers:
            trainer.kill()
        course.tick()
        assert course.regular.readings() == [("profiles", [])]


def test_share_that_is_known(tmp_path: Path) -> None:
    """A rank whose exposed share is measured all the time keeps that one alone."""
    with closing(Course(tmp_path, 20 * MS)) as course:
        course.tick()
        asked = requested(course)
        assert asked is not None
        for rank in (0, 1):
            course.node.finish(asked, rank)
        course.tick()
        assert course.node.seen(asked).state == "done"
        assert course.regular.readings() == [("profiles", [])]


def test_off(tmp_path: Path) -> None:
    """Without the setting, nothing is requested and no collector is listed."""
    with closing(Course(tmp_path, None, 0)) as course:
        for _ in range(3 * EVERY):
            course.step()
        assert requested(course) is None
        assert course.regular.readings() == []


def test_profiles_that_fail(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A job that cannot be profiled is tried again each time, with one line in the log; a user's own profile comes first."""
    with closing(Course(tmp_path, None)) as course, caplog.at_level(logging.WARNING):
        users = course.node.ask(steps=2)
        course.tick()
        standing = course.node.standing()
        assert standing is not None
        assert standing.id == users.id
        for rank in (0, 1):
            course.node.finish(users.id, rank)
        course.tick()
        for _ in range(2):
            while (asked := requested(course)) is None:
                course.step()
            for rank in (0, 1):
                course.node.finish(asked, rank, error="the training itself runs a profiler")
            course.step()
            course.step()
        assert course.regular.readings() == [("profiles", [])]
        assert caplog.messages == ["profile_every: no profile of job 'job': the training itself runs a profiler"]
        assert course.node.seen(users.id).state == "done"


def step(seq: int, took_s: float, long: bool = False) -> StepView:
    """A step of rank 0."""
    return StepView(JOB, 0, seq, 0.0, took_s, took_s, None, None, None, None, {}, None, long)


#: The step that ends at mark 11 was profiled.
PROFILE = RankProfile(0, "done", steps=1, from_seq=10, until_seq=11)


def test_what_a_profile_adds() -> None:
    """The steps in which the profiler began, ran, and wrote the trace, less as many usual ones; unknown before the last of them."""
    usual = [step(seq, 0.1) for seq in range(9, 0, -1)]
    around = [step(12, 0.5), step(11, 0.15), step(10, 0.25)]
    assert added([*around[1:], *usual], PROFILE) is None
    assert added([*around, *usual], PROFILE) == pytest.approx((0.6, 0.1))
    assert added([step(13, 9.0), *around, *usual], PROFILE) == pytest.approx((0.6, 0.1))
    assert added([*around, step(9, 5.0, long=True), *usual[1:]], PROFILE) == pytest.approx((0.6, 0.1))
    assert added([step(seq, 0.01) for seq in (12, 11, 10)] + usual, PROFILE) == pytest.approx((0.0, 0.1))


@given(st.integers(1, 10**6), st.floats(0, 1e4), st.floats(1e-6, 1e4))
def test_interval(every: int, added_s: float, usual_s: float) -> None:
    """Profiles add at most their budget to the time; no interval is longer than it has to be, and each is a multiple of the shorter ones."""
    found = interval(every, added_s, usual_s)
    assert added_s <= BUDGET * found * usual_s
    times = found // every
    assert (found % every, times & (times - 1)) == (0, 0)
    assert times == 1 or added_s > BUDGET * (found // 2) * usual_s


@pytest.mark.parametrize("before_zero", [8, 10, 11, 12])
def test_numbers_go_on(before_zero: int) -> None:
    """What a profile adds is the same where the numbers of steps go on at 0 before, in or after it."""

    def moved(seq: int) -> int:
        return (seq - before_zero) % NUMBERS

    steps = [step(moved(seq), took_s) for seq, took_s in [(13, 9.0), (12, 0.5), (11, 0.15), (10, 0.25), *((seq, 0.1) for seq in range(9, 0, -1))]]  # fmt: skip
    profile = replace(PROFILE, from_seq=moved(10), until_seq=moved(11))
    assert added(steps, profile) == pytest.approx((0.6, 0.1))
    assert added(steps[2:], profile) is None
