"""The parts of other nodes in the live view of a job; they are requested in the background, so that no agent delays an event."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from functools import cache
from urllib.parse import quote

from pydantic import TypeAdapter, ValidationError

from commwatch.analysis.job_wide import Nodes
from commwatch.analysis.verdicts import Verdict
from commwatch.core.errors import CommwatchError
from commwatch.runtime.concurrency import at_once
from commwatch.runtime.peers import SELF
from commwatch.server.current_verdicts import question_of_job
from commwatch.server.node_now import NodeNow
from commwatch.server.services import Services

#: Seconds between two requests to each agent, or so many seconds for each agent if that is longer: with 128 agents 6.4 s.
_EVERY_S, _PER_AGENT_S = 1.0, 0.05
#: Seconds between two joins of the operations of groups with ranks on several nodes.
_JOIN_S = 5.0
#: Seconds that the first event of a job waits for the other nodes; seconds without a watcher after which a job is forgotten.
_FIRST_S, _FORGET_S = 1.0, 60.0


@dataclass
class _Job:
    """What is known of one job."""

    parts: list[NodeNow] = field(default_factory=list)
    nodes: Nodes = field(default_factory=lambda: Nodes(1, {}))
    #: Verdicts on groups with ranks on several nodes.
    late: list[Verdict] = field(default_factory=list)
    wanted_s: float = 0.0
    #: Monotonic times of the latest requests, and those in progress.
    asked_s: float = -1e9
    joined_s: float = -1e9
    asking: Future[None] | None = None
    joining: Future[None] | None = None


class OtherNodes:
    """The other nodes of the jobs that someone watches; any thread may call it.

    Args:
        clock: monotonic seconds.
    """

    def __init__(self, services: Services, clock: Callable[[], float] = time.monotonic) -> None:
        self._services, self._clock = services, clock
        self._jobs: dict[str, _Job] = {}
        self._lock = threading.Lock()

    def exist(self) -> bool:
        """Return whether the agent has peers."""
        return any(peer.state != SELF for peer in self._services.peers.views())

    def now(self, job_id: str) -> tuple[list[NodeNow], list[Verdict], Nodes]:
        """Return the latest known parts of the other nodes, verdicts that need several nodes, and which nodes these are."""
        if not self.exist():
            return [], [], Nodes(1, {})
        now_s = self._clock()
        with self._lock:
            self._jobs = {name: job for name, job in self._jobs.items() if now_s - job.wanted_s < _FORGET_S}
            job = self._jobs.setdefault(job_id, _Job())
            job.wanted_s = now_s
            first = job.asking is None
            every_s = max(_EVERY_S, _PER_AGENT_S * len(self._services.peers.views()))
            if _is_over(job.asking) and now_s - job.asked_s >= every_s:
                job.asked_s = now_s
                (job.asking,) = at_once(lambda name: self._ask(name, job), [job_id], 1)
            if _is_over(job.joining) and now_s - job.joined_s >= _JOIN_S:
                job.joined_s = now_s
                (job.joining,) = at_once(lambda name: self._join(name, job), [job_id], 1)
        if first and job.asking is not None:
            wait([job.asking], _FIRST_S)
        return job.parts, job.late, job.nodes

    def _ask(self, job_id: str, job: _Job) -> None:
        heard = self._services.peers.ask(f"now?job={quote(job_id, safe='')}")
        parts, silent = [], dict(heard.silent)
        for url, (text,) in heard.answers.items():
            try:
                parts.append(_adapter().validate_json(text))
            except ValidationError as error:
                silent[url] = (
                    f"does not answer as an agent of this version: {error.errors(include_url=False)[0]['msg']}"
                )
        job.parts, job.nodes = parts, Nodes(1 + len(parts), silent)

    def _join(self, job_id: str, job: _Job) -> None:
        try:
            found = self._services.worker.find("job_verdicts", **question_of_job(self._services, job_id))
        except CommwatchError:  # the worker is busy or ends; the next join may succeed
            return
        job.late = [verdict for verdict in found.data if verdict.kind == "straggler"]


def _is_over(request: Future[None] | None) -> bool:
    return request is None or request.done()


@cache
def _adapter() -> TypeAdapter[NodeNow]:
    return TypeAdapter(NodeNow)
