"""What ``commwatch top`` shows: the combined answers of an agent's query API."""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.parse
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from functools import cache, partial
from http import HTTPStatus
from typing import Any, TypeVar

from pydantic import TypeAdapter

from commwatch.api.client import NO_KEYS, Keys, detail, fetch, get
from commwatch.wire.concurrency import at_once
from commwatch_agent.analysis.verdict import Verdict
from commwatch_agent.incidents.answers import IncidentView
from commwatch_agent.job.merging import JobWide, Nodes
from commwatch_agent.model.api_views import About, Advice, Summary
from commwatch_agent.model.views import JobView, RankView, StepView
from commwatch_agent.sources.gpus import GpuViews
from commwatch_collectors.nccl.views import Finding

#: Seconds of the past that are shown.
WINDOW_S = 30
#: Most steps, of all ranks, that are read.
MOST_STEPS = 2_000
#: Seconds between requests for advice and findings: they change slowly, and advice reads much of the history of all nodes. Seconds that
#: the agent has for advice, as it asks the agents of the other nodes for up to 20 s; and most bytes of it.
_SELDOM_S, _ADVICE_S, _MOST_ADVICE_BYTES = 30.0, 45.0, 1 << 20
_T = TypeVar("_T")


@dataclass(frozen=True)
class OfJob:
    """An agent's answers on one job on all nodes. Steps and operations are those of the last ``WINDOW_S`` seconds, of an ended job those up to its
    last step.
    """

    job: JobView
    ranks: list[RankView]
    #: Newest first.
    steps: list[StepView]
    #: By rank, operations before its first step apart.
    by_rank: Summary
    by_operation: Summary
    verdicts: list[Verdict]
    incidents: list[IncidentView]
    advice: list[Advice]
    #: From this agent's node.
    findings: list[Finding]
    #: The nodes that the other answers cover.
    nodes: Nodes


@dataclass(frozen=True)
class Answers:
    """An agent's answers at one moment."""

    url: str
    about: About
    #: The job that is shown; ``None``: the agent has no job yet.
    shown: OfJob | None
    #: Ids of other running jobs.
    others: list[str]
    #: Open and pending incidents of the node.
    incidents: list[IncidentView]
    gpus: GpuViews


class NoSuchJob(str):
    """A text that explains why there are no answers: no agent knows the job that was named."""

    __slots__ = ()


_Insights = tuple[list[Advice], list[Finding]]


@dataclass
class _Slow:
    """The latest advice and findings, and the request for newer ones."""

    #: Agent and job.
    of: tuple[str, str]
    asked_s: float
    asking: Future[_Insights]
    known: _Insights | None


class Asker:
    """Queries the agents at each call, and chooses the job to show.

    Args:
        urls: returns the agents' URLs; called each time, because a restarted agent may have another port.
        no_agent: the text to return if there are no agents.
        job: ``None``: the latest running job, else the latest.
        clock: monotonic seconds.
        keys: credentials for the agents.
    """

    def __init__(
        self,
        urls: Callable[[], list[str]],
        no_agent: str,
        job: str | None,
        clock: Callable[[], float] = time.monotonic,
        keys: Keys = NO_KEYS,
    ) -> None:
        self._urls, self._no_agent, self._job, self._clock = urls, no_agent, job, clock
        self._keys = keys
        self._slow: _Slow | None = None

    def __call__(self) -> Answers | str:
        """Return the answers, or a text that explains why there are none."""
        silent: list[str] = []
        places: list[tuple[str, list[JobView]]] = []
        for url in self._urls():
            found = _answer(url, partial(self._ask, list[JobView], url, "jobs"))
            if isinstance(found, str):
                silent.append(found)
            else:
                places.append((url, found))
        if not places:
            return "; ".join(silent) or self._no_agent
        jobs = [(url, job) for url, known in places for job in known if self._job in (None, job.job_id)]
        if self._job is not None and not jobs:
            known = ", ".join(job.job_id for _, found in places for job in found[:5]) or "none"
            return NoSuchJob(f"no job '{self._job}' here yet; there are: {known}")
        url, shown = max(
            jobs, key=lambda at: (at[1].state == "running", at[1].started_at), default=(places[0][0], None)
        )
        running = (job.job_id for _, found in places for job in found if job.state == "running")
        others = sorted({job for job in running if shown is None or job != shown.job_id})
        return _answer(url, partial(self._answers, url, shown, others))

    def _answers(self, url: str, job: JobView | None, others: list[str]) -> Answers:
        incidents = self._ask(list[IncidentView], url, "incidents?state=open&state=pending")
        return Answers(
            url=url,
            about=self._ask(About, url, "about"),
            shown=None if job is None else self._of_job(url, job),
            others=others,
            incidents=[each for each in incidents if not each.job_id],
            gpus=self._ask(GpuViews, url, "gpus"),
        )

    def _of_job(self, url: str, job: JobView) -> OfJob:
        which = f"job={urllib.parse.quote(job.job_id, safe='')}"
        lately = f"{which}&since={self._since(url, job, which)}"
        advice, findings = self._seldom(url, job.job_id, which)
        every = self._ask_all(list[JobView], url, "jobs?")
        ranks = self._ask_all(list[RankView], url, f"ranks?{which}&")
        steps = self._ask_all(list[StepView], url, f"steps?{lately}&limit={MOST_STEPS}&")
        by_rank = self._by_rank(url, lately)
        by_operation = self._ask_all(Summary, url, f"summary?{lately}&by=group,op&")
        verdicts = self._ask_all(list[Verdict], url, f"verdicts?{which}&")
        incidents = self._ask_all(list[IncidentView], url, f"incidents?{which}&")
        answers: list[JobWide[Any]] = [ranks, steps, by_rank, by_operation, verdicts, incidents]
        silent = {agent: why for answer in answers for agent, why in answer.nodes.silent.items()}
        return OfJob(
            job=next((each for each in every.data if each.job_id == job.job_id), job),
            ranks=ranks.data,
            steps=steps.data,
            by_rank=by_rank.data,
            by_operation=by_operation.data,
            verdicts=verdicts.data,
            incidents=incidents.data,
            advice=advice,
            findings=findings,
            nodes=Nodes(min(answer.nodes.answered for answer in answers), silent),
        )

    def _since(self, url: str, job: JobView, which: str) -> str:
        """Return the begin of the time that is shown: of an ended job it does not move."""
        if job.state == "running":
            return f"{WINDOW_S}s"
        last = self._ask_all(list[StepView], url, f"steps?{which}&limit=1&").data
        return f"{max((step.end_at for step in last), default=job.last_seen_at) - WINDOW_S:.3f}"

    def _by_rank(self, url: str, lately: str) -> JobWide[Summary]:
        """Return the sums by rank; those of an agent of an earlier version have all operations together."""
        try:
            return self._ask_all(Summary, url, f"summary?{lately}&by=rank,startup&")
        except urllib.error.HTTPError as error:
            if error.code != HTTPStatus.BAD_REQUEST:
                raise
            return self._ask_all(Summary, url, f"summary?{lately}&by=rank&")

    def _seldom(self, url: str, job: str, which: str) -> _Insights:
        """Return advice and findings: the first time those of now, later the latest, and start a request for newer ones if it is time."""
        slow = self._slow if self._slow is not None and self._slow.of == (url, job) else None
        if slow is None or (slow.asking.done() and self._clock() - slow.asked_s > _SELDOM_S):
            (asking,) = at_once(lambda _: self._insights(url, which), [None], 1)
            slow = self._slow = _Slow((url, job), self._clock(), asking, None if slow is None else slow.known)
        if slow.known is None or slow.asking.done():
            self._slow = None  # where there is no answer, the next call asks again
            slow.known = slow.asking.result()
            self._slow = slow
        return slow.known

    def _insights(self, url: str, which: str) -> _Insights:
        found = [finding for view in get(url, f"topology?{which}", self._keys) for finding in view["findings"]]
        wide = f"advice?{which}&scope=job"
        text = fetch(url, wide, self._keys, timeout_s=_ADVICE_S, most_bytes=_MOST_ADVICE_BYTES)
        advice: JobWide[list[Advice]] = _adapter(JobWide[list[Advice]]).validate_json(text)
        return advice.data, _adapter(list[Finding]).validate_python(found)

    def _ask(self, kind: type[_T], url: str, path: str) -> _T:
        adapter: Any = _adapter
        answer: _T = adapter(kind).validate_python(get(url, path, self._keys))
        return answer

    def _ask_all(self, kind: type[_T], url: str, path: str) -> JobWide[_T]:
        wide: Any = JobWide
        answer: JobWide[_T] = self._ask(wide[kind], url, f"{path}scope=job")
        return answer


def as_json(answers: Answers) -> str:
    """Return the answers as JSON text for programs; durations in seconds, bandwidths in bytes per second."""
    return json.dumps(asdict(answers), indent=2)


@cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


def _answer(url: str, question: Callable[[], _T]) -> _T | str:
    """Return the result of ``question``, or a text that explains why there is none."""
    try:
        return question()
    except urllib.error.HTTPError as error:
        why = detail(error)
        answer = f"{url} answers {error.code} ({error.reason}) to {urllib.parse.urlsplit(error.url).path}"
        return f"{answer}: {why}" if why else answer
    except OSError as error:
        return f"{url} does not answer: {getattr(error, 'reason', error)}"
    except (ValueError, KeyError, TypeError) as error:
        return f"{url} does not answer as an agent of this version: {str(error).partition(chr(10))[0]}"
