"""Profiles a step now and then, for the exposed time of ranks on which it cannot be measured continuously (``profile_every``)."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median

from commwatch.analysis import live_ranks
from commwatch.analysis.queries import QueryService
from commwatch.core.views import StepView
from commwatch.watchers.profiles import Profile, ProfileError, Profiles

log = logging.getLogger("commwatch")
#: The greatest share of a job's time that the regular profiles of all its nodes may take: their agents profile at different steps.
MOST_COST = 0.001
#: Seconds between two looks at the steps, and those in which a rank must reach two step marks.
_LOOK_S, _TIMEOUT_S = 5.0, 600.0
#: Seconds before a profile from which the usual duration of a step is taken, and most steps that are read.
_BEFORE_S, _MOST_STEPS = 300.0, 10_000


@dataclass
class _Job:
    """The regular profiles of one job."""

    #: Its steps, and Unix time, when the latest profile was requested.
    asked_steps: int
    asked_at: float = 0.0
    #: The profile in progress, or whose cost is not known yet, and its first rank.
    running: str | None = None
    rank: int = 0
    ended_at: float | None = None
    #: Unix time before which the next one would cost too much.
    not_before: float = 0.0
    #: By rank: exposed share of the profiled step, 0 to 1.
    shares: dict[int, float] = field(default_factory=dict)


class RegularProfiles:
    """Requests a profile of one step in ``every`` from ranks whose exposed time is unknown, within ``MOST_COST`` of the job's time.

    Args:
        profiles: makes the profiles.
        agent: supplies jobs and steps.
        every: number of steps from one profile of a job to the next; 0: there are none.
        clock: Unix time.
    """

    def __init__(
        self, profiles: Profiles, agent: QueryService, every: int, clock: Callable[[], float] = time.time
    ) -> None:
        self._profiles, self._agent, self._every, self._clock = profiles, agent, every, clock
        self._jobs: dict[str, _Job] = {}
        self._looked_at = 0.0

    def exposed_share(self, job: str, rank: int) -> float | None:
        """Return the exposed share of the rank's latest profiled step; ``None``: there is none."""
        known = self._jobs.get(job)
        return None if known is None else known.shares.get(rank)

    def tick(self) -> None:
        """Request the profiles that are due, and take over those that have ended. Called after ``Profiles.tick``."""
        now = self._clock()
        if not self._every or now < self._looked_at + _LOOK_S:
            return
        self._looked_at = now
        with self._agent.live(None) as (jobs, now_ns):
            steps = {job.id: live_ranks.without_exposed_time(job, now_ns) for job in jobs}
            nodes = {job.id: live_ranks.nodes(job) for job in jobs}
        self._jobs = {job: known for job, known in self._jobs.items() if job in steps}
        for job, ranks in steps.items():
            latest = max(ranks.values(), default=0)
            known = self._jobs.setdefault(job, _Job(latest))
            if ranks:
                known.asked_steps = min(known.asked_steps, latest)  # a job that is restarted counts again from 0
            if known.running is not None:
                self._follow(job, known, nodes[job])
            elif ranks and latest >= known.asked_steps + self._every and now >= known.not_before:
                self._ask(job, known, ranks)

    def _ask(self, job: str, known: _Job, ranks: dict[int, int]) -> None:
        known.asked_steps, known.asked_at, known.rank = max(ranks.values()), self._clock(), min(ranks)
        try:
            known.running = self._profiles.ask(job, 1, sorted(ranks), _TIMEOUT_S, keep_traces=False).id
        except ProfileError as error:  # one that the user has requested, or the job is ending
            log.info("no regular profile of job '%s': %s", job, error)

    def _follow(self, job: str, known: _Job, nodes: int) -> None:
        """Take over the shares of a profile that has ended; forget it once its cost is known."""
        profile = self._profiles.get(known.running or "")
        if profile is not None and profile.state not in ("done", "failed"):
            return
        if known.ended_at is None:
            known.ended_at = self._clock()
            known.shares = {} if profile is None else _shares(profile)
        begin, end = int((known.asked_at - _BEFORE_S) * 1e9), int(self._clock() * 1e9)
        steps = self._agent.steps(begin, end, job, known.rank, _MOST_STEPS)
        # The trace is written in the step after the profiled one.
        after = any(step.start_at > known.ended_at for step in steps)
        if after or self._clock() > known.ended_at + _TIMEOUT_S:
            taken_s = cost_s(steps, known.asked_at, known.ended_at)
            known.running, known.not_before = None, known.ended_at + taken_s * nodes / MOST_COST
            known.ended_at = None


def cost_s(steps: Sequence[StepView], asked_at: float, ended_at: float) -> float:
    """Return how much longer than usual the steps of a rank took while a profile was made, in s.

    Args:
        steps: of one rank (a rank that is profiled delays the others as much), from some minutes before the profile on.
        asked_at: Unix time of the request.
        ended_at: Unix time of the result.

    Returns:
        The whole time of the profile if the usual duration is unknown.
    """
    usual = [step.duration_s for step in steps if step.end_at < asked_at]
    if not usual:
        return ended_at - asked_at
    meanwhile = [step for step in steps if step.end_at >= asked_at and step.start_at <= ended_at]
    return sum(max(0.0, step.duration_s - median(usual)) for step in meanwhile)


def _shares(profile: Profile) -> dict[int, float]:
    """Return the exposed share by rank, of ranks whose trace shows it."""
    figures = {rank.rank: rank.profile for rank in profile.ranks if rank.profile is not None}
    return {rank: each.exposed_share for rank, each in figures.items() if each.exposed_share is not None}
