"""One profiled step in so many: measures the exposed share of ranks for which it is not known otherwise."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from commwatch.wire.numbers import ahead, in_order
from commwatch_agent.analysis.queries import QueryService
from commwatch_agent.model.views import StepView
from commwatch_agent.sources.profiles import ProfileError, Profiles, RankProfile
from commwatch_collectors.registry import Reading

log = logging.getLogger("commwatch")
#: Largest part of the job's time that the profiles may add to its steps.
BUDGET = 0.001
#: Value of the label ``source`` of the share.
SOURCE = "profile"
#: Seconds for the ranks to reach the step.
_TIMEOUT_S = 600.0
#: Usual steps before a profile with which those around it are compared, and seconds around it in which steps are looked for.
_STEPS_BEFORE, _AROUND_S = 31, 600.0


@dataclass
class _Course:
    """The profiles of one job."""

    #: Steps between two profiles, and the step of the latest.
    interval: int
    latest: int = 0
    #: The profile in progress, and the steps of the job when it was last looked at.
    id: str | None = None
    looked: int = -1
    #: The latest profile that ended, whose traces are kept.
    ended: str | None = None
    #: A failure was logged.
    warned: bool = False


class RegularProfiles:
    """Requests a profile of one step of each running job, once in so many steps. One thread calls ``tick``.

    Args:
        every: steps between two profiles; 0: none.
        agent: supplies jobs and steps.
    """

    def __init__(self, every: int, profiles: Profiles, agent: QueryService) -> None:
        self._every, self._profiles, self._agent = every, profiles, agent
        self._courses: dict[str, _Course] = {}
        #: Exposed share by job and rank.
        self._shares: dict[tuple[str, int], float] = {}
        self._readings: list[Reading] = []

    def readings(self) -> list[tuple[str, list[Reading] | None]]:
        """Return, by collector, the exposed share of the latest profiled step of running ranks for which it is not known otherwise."""
        return [("profiles", self._readings)] if self._every else []

    def tick(self) -> None:
        """Take the results of profiles, and request those that are due."""
        if not self._every:
            return
        steps, unknown = self._running()
        self._courses = {job: self._courses.get(job) or _Course(self._every) for job in steps}
        for job, course in self._courses.items():
            if course.id is not None:
                self._look(job, course, course.id, steps[job])
            elif steps[job] // course.interval > course.latest // course.interval:
                course.latest = steps[job]
                course.id = self._request(job)
        self._shares = {at: share for at, share in self._shares.items() if at[0] in steps}
        self._readings = [
            Reading("exposed_comm_share_ratio", (job, str(rank), SOURCE), share)
            for (job, rank), share in sorted(self._shares.items())
            if (job, rank) in unknown
        ]

    def _running(self) -> tuple[dict[str, int], set[tuple[str, int]]]:
        """Return the steps of each running job, and the profiled ranks whose exposed share is not known otherwise."""
        steps: dict[str, int] = {}
        unknown = set()
        with self._agent.live(None) as (jobs, now_ns):
            for job in jobs:
                for totals in job.rank_totals.values():
                    if not (totals.alive and totals.marked):  # a profile ends with a step
                        continue
                    of_rank = totals.steps.totals
                    steps[job.id] = max(steps.get(job.id, 0), of_rank.count)
                    shares = of_rank.shares(now_ns) if (job.id, totals.rank) in self._shares else None
                    if shares is not None and shares[1] is None:
                        unknown.add((job.id, totals.rank))
        return steps, unknown

    def _request(self, job: str) -> str | None:
        try:
            return self._profiles.ask(job, 1, None, _TIMEOUT_S).id
        except ProfileError:  # a user's profile runs, or the job has just ended
            return None

    def _look(self, job: str, course: _Course, profile_id: str, steps: int) -> None:
        """Take the result of a profile, once it and the step after it are there; only after a step, because that reads the history."""
        profile = self._profiles.get(profile_id)
        if profile is not None and (profile.state in ("waiting", "running") or steps == course.looked):
            return
        course.looked = steps
        ranks = [rank for rank in profile.ranks if rank.state == "done"] if profile is not None else []
        found = [added(self._around(job, rank), rank) for rank in ranks]
        costs = [cost for cost in found if cost is not None]
        if ranks and not costs:
            return
        course.id = None
        if not ranks:
            self._warn(job, course, [rank.error for rank in profile.ranks if rank.error] if profile is not None else [])
            return
        course.interval = interval(self._every, *max(costs))
        self._shares |= {
            (job, rank.rank): rank.profile.exposed_share
            for rank in ranks
            if rank.profile is not None and rank.profile.exposed_share is not None
        }
        if course.ended is not None:
            self._profiles.drop(course.ended)
        course.ended = profile_id

    def _warn(self, job: str, course: _Course, errors: list[str]) -> None:
        if errors and not course.warned:
            course.warned = True
            log.warning("profile_every: no profile of job '%s': %s", job, errors[0])

    def _around(self, job: str, rank: RankProfile) -> list[StepView]:
        """Return the steps of a rank from before its profile until after it, newest first."""
        from_s, until_s = (rank.begin_at or 0) - _AROUND_S, (rank.end_at or 0) + _AROUND_S
        return self._agent.steps(int(from_s * 1e9), int(until_s * 1e9), job, rank.rank, 10_000)


def added(steps: Sequence[StepView], profile: RankProfile) -> tuple[float, float] | None:
    """Return by how many seconds a profile made a rank's steps longer, and the length of a usual step.

    The profiler begins in the step before the profiled ones, and writes the trace in the step after them.

    Args:
        steps: of this rank, newest first.

    Returns:
        ``None`` while the step after the profile is not known.
    """
    first, last = profile.from_seq or 0, profile.until_seq or 0
    after = [step.seq for step in steps if ahead(step.seq, last) > 0]
    if not after:
        return None
    until = in_order(after)[0]
    longer = [step.duration_s for step in steps if ahead(first, step.seq) <= 0 <= ahead(until, step.seq)]
    before = [step.duration_s for step in steps if ahead(step.seq, first) < 0 and not step.long]
    usual_s = median(before[:_STEPS_BEFORE] or longer)
    return max(0.0, sum(longer) - len(longer) * usual_s), usual_s


def interval(every: int, added_s: float, usual_s: float) -> int:
    """Return the steps between two profiles: ``every``, doubled until profiles add at most ``BUDGET`` of the time.

    So the profiled steps of a long interval are among those of a short one, and nodes tend to profile the same steps.
    """
    while added_s > BUDGET * every * usual_s > 0:
        every *= 2
    return every
