"""What is wrong in jobs with ranks on several nodes: one agent of the job asks the others now and then, and concludes for all of them.

Only Prometheus sees jobs on more nodes than an agent asks: its rules ``StragglerAcrossNodes`` and ``CollectiveStuck`` are for those.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from urllib.parse import quote

from commwatch_agent.incidents.evidence import KnownJob, WholeJob
from commwatch_agent.incidents.incident import STANDSTILLS, EvidenceItem
from commwatch_agent.ingest.collective_join import MOST_PENDING
from commwatch_agent.job.merging import Heard
from commwatch_agent.job.rank_parts import most_collectives
from commwatch_agent.questions.answer import ApiError
from commwatch_agent.questions.heard import read
from commwatch_agent.questions.incidents import Parts, conditions, parts
from commwatch_agent.questions.services import Services
from commwatch_agent.runtime.peers import ANSWERS, MOST_AGENTS, Peers

log = logging.getLogger("commwatch")
#: Seconds between two questions: usually, and while ranks wait or someone asks; and for each agent, if that is longer.
_EVERY_S, _SOON_S, _PER_AGENT_S = 10.0, 2.0, 0.1
#: Seconds between two questions while ranks communicate much, so that a slow link is known soon; and questions before that, in which a job begins.
_TRAFFIC_S, _OF_BEGIN = 5.0, 2
#: What was concluded longer ago no longer counts.
_STALE_S = 60.0
#: py-spy may take 20 s for each of them, but takes less than one.
_STACKS_S = 30.0
#: Assumed pairs of a rank and a group that also has ranks on other nodes, on each node.
_COLUMNS = 64


def records_of_job(services: Services, job: str) -> tuple[Parts, Heard]:
    """Return what this node and the others know of a job right now; waits for the agents of other nodes, at most 2 s."""
    own = parts(services.queries, job, MOST_PENDING, services.ranks.of_records(job))
    which = f"job={quote(job, safe='')}"
    limit = most_collectives(_COLUMNS * len(services.peers.views()))
    return own, services.peers.ask(f"ranks?{which}", f"groups?{which}", f"parts?{which}&limit={limit}")


def culprits_elsewhere(peers: Peers, job: str, ranks: Sequence[int]) -> list[EvidenceItem]:
    """Return what the agents of other nodes see ranks of a job do; waits for them, at most 30 s."""
    which = "&".join((f"job={quote(job, safe='')}", *(f"rank={rank}" for rank in ranks)))
    found, _ = read(peers.ask(f"culprits?{which}", within_s=_STACKS_S), list[EvidenceItem])
    return [item for (items,) in found for item in items]


@dataclass
class _Job:
    """What was concluded of a job, and when, in monotonic seconds."""

    found: WholeJob | None = None
    at_s: float = float("-inf")
    asked_s: float = float("-inf")
    #: Number of questions.
    asked: int = 0


class WholeJobs:
    """Concludes for the jobs that this agent leads; any thread may call it.

    Args:
        services: of the agent.
        clock: monotonic seconds.
    """

    def __init__(self, services: Services, clock: Callable[[], float] = time.monotonic) -> None:
        self._services, self._clock = services, clock
        self._jobs: dict[str, _Job] = {}
        self._lock = threading.Lock()

    def tick(self) -> None:
        """Ask the agents of other nodes about each job that is due."""
        with self._lock:
            self._ask_about(None, soon=False)

    def soon(self, job: str) -> None:
        """Ask about a job unless that was done a moment ago."""
        with self._lock:
            self._ask_about(job, soon=True)

    def _ask_about(self, wanted: str | None, *, soon: bool) -> None:
        agents = sum(peer.state == ANSWERS for peer in self._services.peers.views())
        if not 0 < agents <= MOST_AGENTS:  # most agents are alone, and need not look at their ranks for this
            return
        here = self._services.ranks.look()
        ranks = Counter(view.job_id for view in here.ranks)
        waits = {verdict.job_id for verdict in here.verdicts if verdict.kind in STANDSTILLS}
        waits |= {view.job_id for view in here.ranks if view.state == "gone"}
        sends = {view.job_id for view in here.ranks if view.traffic is not None}
        shared = {name: job for name, job in here.jobs.items() if job.world_size > ranks[name]}
        self._jobs = {name: self._jobs.get(name, _Job()) for name in shared}
        for name, job in shared.items():
            often = name in sends and self._jobs[name].asked >= _OF_BEGIN
            every_s = _SOON_S if soon or name in waits else _TRAFFIC_S if often else _EVERY_S
            if (
                wanted in (None, name)
                and self.leads(here.common.get(job.run, ""))
                and self._is_due(name, agents, every_s)
            ):
                self._ask(name, job)

    def leads(self, common: str) -> bool:
        """Return whether this agent concludes for all nodes of a run, by what all its nodes know it by."""
        return self._services.peers.leads(common)

    def found(self, job: str) -> WholeJob | None:
        """Return what was found of a job on all its nodes; ``None``: nothing lately."""
        known = self._jobs.get(job)
        return None if known is None or self._clock() - known.at_s > _STALE_S else known.found

    def _is_due(self, job: str, agents: int, every_s: float) -> bool:
        return self._clock() - self._jobs[job].asked_s >= max(every_s, _PER_AGENT_S * agents)

    def _ask(self, name: str, job: KnownJob) -> None:
        known = self._jobs[name]
        known.asked_s, known.asked = self._clock(), known.asked + 1
        try:
            own, heard = records_of_job(self._services, name)
            found = self._services.worker.ask(conditions, name, own=own, heard=heard, known=job, now=time.time())
        except ApiError as error:
            log.debug("job %s: %s", name, error)
            return
        known.found, known.at_s = found, self._clock()
