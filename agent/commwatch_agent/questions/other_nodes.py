"""The parts of other nodes in the live view of a job; they are requested in the background, so that no agent delays an event."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar
from urllib.parse import quote

from commwatch.wire.concurrency import at_once
from commwatch_agent.analysis.timeline import NodeBars
from commwatch_agent.job.merging import Nodes
from commwatch_agent.questions.heard import read
from commwatch_agent.questions.node_now import NodeNow
from commwatch_agent.questions.services import Services
from commwatch_agent.runtime.peers import SELF

_T = TypeVar("_T")
#: Seconds between two requests to each agent, or so many seconds for each agent if that is longer: with 128 agents 6.4 s.
_EVERY_S, _PER_AGENT_S = 1.0, 0.05
#: Seconds between two requests for bars.
_BARS_S = 2.0
#: Seconds that the first event of each kind waits for the other nodes; seconds without a watcher after which a job is forgotten.
_FIRST_S, _FORGET_S = 1.0, 60.0


@dataclass
class _Known(Generic[_T]):
    """What is known of one kind, and the request for more."""

    value: _T
    asked_s: float = -1e9
    asking: Future[None] | None = None


@dataclass
class _Job:
    """What is known of the other nodes of one job."""

    parts: _Known[tuple[list[NodeNow], Nodes]] = field(default_factory=lambda: _Known(([], Nodes(1, {}))))
    bars: _Known[list[NodeBars]] = field(default_factory=lambda: _Known([]))
    wanted_s: float = 0.0


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

    def now(self, job_id: str) -> tuple[list[NodeNow], Nodes]:
        """Return the latest known parts of the other nodes, and which nodes these are."""
        if not self.exist():
            return [], Nodes(1, {})
        job = self._job(job_id)
        self._refresh(job.parts, self.every_s(_EVERY_S), lambda: self._parts(job_id))
        return job.parts.value

    def bars(self, job_id: str) -> list[NodeBars]:
        """Return the latest operations of the other nodes, as far as they are known."""
        if not self.exist():
            return []
        job = self._job(job_id)
        self._refresh(job.bars, self.every_s(_BARS_S), lambda: self._bars(job_id))
        return job.bars.value

    def every_s(self, least_s: float, per_agent_s: float = _PER_AGENT_S) -> float:
        """Return the seconds between two requests to all agents, at least ``least_s``."""
        return max(least_s, per_agent_s * len(self._services.peers.views()))

    def _job(self, job_id: str) -> _Job:
        now_s = self._clock()
        with self._lock:
            self._jobs = {name: job for name, job in self._jobs.items() if now_s - job.wanted_s < _FORGET_S}
            job = self._jobs.setdefault(job_id, _Job())
            job.wanted_s = now_s
            return job

    def _refresh(self, known: _Known[_T], every_s: float, read: Callable[[], _T]) -> None:
        """Start a request in the background if it is time; the first one of its kind is waited for, for a moment."""

        def ask(_: None) -> None:
            known.value = read()

        with self._lock:
            first = known.asking is None
            if (known.asking is None or known.asking.done()) and self._clock() - known.asked_s >= every_s:
                known.asked_s = self._clock()
                (known.asking,) = at_once(ask, [None], 1)
        if first and known.asking is not None:
            wait([known.asking], _FIRST_S)

    def _parts(self, job_id: str) -> tuple[list[NodeNow], Nodes]:
        found, nodes = self._read(NodeNow, "now", job_id)
        return [part for (part,) in found], nodes

    def _bars(self, job_id: str) -> list[NodeBars]:
        return [part for (part,) in self._read(NodeBars, "bars", job_id)[0]]

    def _read(self, kind: Any, route: str, job_id: str) -> tuple[list[list[Any]], Nodes]:
        return read(self._services.peers.ask(f"{route}?job={quote(job_id, safe='')}"), kind)
