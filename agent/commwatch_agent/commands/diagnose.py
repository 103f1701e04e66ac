"""``commwatch diagnose``: what is wrong right now, or was with an ended job, by the incidents of the agents of one or many nodes."""

from __future__ import annotations

import urllib.parse
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, NamedTuple, TypeVar

from commwatch.api.client import NO_KEYS, TOGETHER_S, Keys, get, reason, together
from commwatch.wire.errors import UsageError
from commwatch_agent.analysis.verdict import Verdict
from commwatch_agent.commands.diagnosis import Diagnosis
from commwatch_agent.incidents.answers import IncidentDetails, IncidentView, merged
from commwatch_agent.incidents.incident import EvidenceItem
from commwatch_agent.incidents.words import title
from commwatch_agent.job.merging import by_run, merged_jobs, merged_ranks
from commwatch_agent.model.views import Ended, Failed, InFlight, JobView, OutsideCall, RankView, Usual
from commwatch_agent.text.units import seconds
from commwatch_collectors.node.judged_activity import Activity

_T = TypeVar("_T")
_Target = TypeVar("_Target")
_OfJob = TypeVar("_OfJob", RankView, Verdict, IncidentView)
#: Lists in the view of a rank.
_OF_RANK: Mapping[str, type[InFlight | Failed | Ended | OutsideCall]] = {
    "in_flight": InFlight, "failed": Failed, "ended": Ended, "outside": OutsideCall,
}  # fmt: skip


class CannotDiagnose(UsageError):
    """There is no agent, none answers, or the job is unknown; the message names it."""


class _Place(NamedTuple):
    """An agent that has ranks of a run, and its view of it."""

    url: str
    job: JobView


@dataclass
class _Heard:
    """What agents have answered, by the names that runs have here."""

    silent: dict[str, str] = field(default_factory=dict)
    runs: dict[str, list[_Place]] = field(default_factory=dict)
    ranks: list[RankView] = field(default_factory=list)
    verdicts: list[Verdict] = field(default_factory=list)
    incidents: list[list[IncidentView]] = field(default_factory=list)
    #: By id of an incident: the agents that know it.
    knowing: dict[str, list[str]] = field(default_factory=dict)

    def add_incidents(self, url: str, views: Iterable[IncidentView]) -> None:
        """Add the incidents of an agent."""
        self.incidents.append(list(views))
        for each in self.incidents[-1]:
            self.knowing.setdefault(each.id, []).append(url)


def with_peers(urls: list[str], keys: Keys = NO_KEYS) -> list[str]:
    """Return agents and the agents of other nodes that they know; ``ask`` reports those that do not answer."""

    def others(url: str) -> list[str]:
        return [str(peer["url"]) for peer in get(url, "peers", keys) if peer["state"] != "this agent"]

    known = [url for _, answer in _all(urls, others) if not isinstance(answer, str) for url in answer]
    return list(dict.fromkeys([*urls, *known]))


def ask(urls: list[str], job: str | None, keys: Keys = NO_KEYS) -> Diagnosis:
    """Ask all agents at once for their jobs and incidents, then some for the ranks of the running ones, or of the one that is named.

    Raises:
        CannotDiagnose: no agent answers, or those that answer do not know the job.
    """
    heard = _Heard()
    names = _jobs_and_incidents(heard, urls, keys)
    if len(heard.silent) == len(urls):
        reasons = "; ".join(f"{url}: {why}" for url, why in heard.silent.items())
        raise CannotDiagnose(
            reasons
            or "no agent runs here, so no job is watched; start one with `commwatch run`, name an agent, or give its run directory with --dir"
        )
    views = merged_jobs(place.job for places in heard.runs.values() for place in places)
    running = {view.job_id: view for view in views if view.state == "running"}
    if job is not None and job not in running:
        return _ended(heard, job, keys)
    wanted = {name: view for name, view in running.items() if job in (None, name)}
    apart = _of_ranks(heard, wanted, names, keys)
    open_or_pending = [
        each for each in merged(heard.incidents) if each.job_id in wanted or (job is None and not each.job_id)
    ]
    latest = max((view for view in views if view.state != "running"), key=lambda view: view.last_seen_at, default=None)
    found = Diagnosis(
        list(wanted.values()),
        merged_ranks(heard.ranks),
        _once(heard.verdicts),
        _with_evidence(heard, open_or_pending, keys),
        heard.silent,
        apart,
        latest=latest,
    )
    if latest is not None and not running:
        found.of_latest = _ended(heard, latest.job_id, keys).incidents
    return found


def _jobs_and_incidents(heard: _Heard, urls: list[str], keys: Keys) -> dict[tuple[str, str], str]:
    """Add jobs and incidents; return the names of runs here, by agent and their name there: nodes may give a run different names."""

    def question(url: str) -> tuple[list[JobView], list[IncidentView]]:
        found = get(url, "incidents?state=open&state=pending", keys)
        return [_view(JobView, each) for each in get(url, "jobs", keys)], [_incident(each) for each in found]

    answers = _answered(heard, _all(urls, question))
    heard.runs = by_run([_Place(url, view) for url, (jobs, _) in answers for view in jobs], lambda place: place.job)
    names = {(place.url, place.job.job_id): name for name, places in heard.runs.items() for place in places}
    for url, (_, incidents) in answers:
        heard.add_incidents(url, _named(names, url, incidents))
    return names


def _of_ranks(heard: _Heard, wanted: Iterable[str], names: Mapping[tuple[str, str], str], keys: Keys) -> list[str]:
    """Add the ranks of runs and what is wrong with them; return the runs of which several agents had to be asked.

    The first agent of a run asks those of the other nodes that it knows. Those with ranks that are still missing are asked themselves.
    """
    running = {name: [place for place in heard.runs[name] if place.job.state == "running"] for name in wanted}
    first = [places[0] for places in running.values()]
    _add_ranks(heard, [(place, place.job.world_size > len(place.job.ranks)) for place in first], names, keys)
    known = {(view.job_id, view.rank) for view in heard.ranks}
    more = {
        name: [place for place in places[1:] if not {(name, rank) for rank in place.job.ranks} <= known]
        for name, places in running.items()
    }
    _add_ranks(heard, [(place, False) for places in more.values() for place in places], names, keys)
    return [name for name, places in more.items() if places and not heard.silent]


def _add_ranks(
    heard: _Heard, asked: list[tuple[_Place, bool]], names: Mapping[tuple[str, str], str], keys: Keys
) -> None:
    def question(of: tuple[_Place, bool]) -> list[list[dict[str, Any]]]:
        (url, job), wide = of
        which = f"job={urllib.parse.quote(job.job_id, safe='')}{'&scope=job' if wide else ''}"
        routes = ("ranks?", "verdicts?", *(["incidents?state=open&state=pending&"] if wide else []))
        found = [get(url, f"{route}{which}", keys) for route in routes]
        if not wide:
            return found
        heard.silent.update((url, why) for each in found for url, why in each["nodes"]["silent"].items())
        return [each["data"] for each in found]

    by_url = ((place.url, answer) for (place, _), answer in _all(asked, question))
    for url, (ranks, verdicts, *incidents) in _answered(heard, by_url):
        heard.ranks += _named(names, url, map(_rank, ranks))
        heard.verdicts += _named(names, url, (_view(Verdict, each) for each in verdicts))
        for found in incidents:
            heard.add_incidents(url, _named(names, url, map(_incident, found)))


def _ended(heard: _Heard, job: str, keys: Keys) -> Diagnosis:
    """Return what happened to a job that does not run, by the agents of its nodes."""
    if job not in heard.runs:
        raise CannotDiagnose(f"no job '{job}'")
    heard.incidents.clear()
    places = heard.runs[job]
    is_whole = len({rank for place in places for rank in place.job.ranks}) >= places[0].job.world_size

    def question(place: _Place) -> list[IncidentView]:
        which = f"job={urllib.parse.quote(place.job.job_id, safe='')}&state=open&state=ended"
        if is_whole or place is not places[0]:
            found = get(place.url, f"incidents?{which}", keys)
        else:
            found = get(place.url, f"incidents?{which}&scope=job", keys)["data"]
        return [replace(_incident(each), job_id=job) for each in found]

    for url, found in _answered(heard, ((place.url, answer) for place, answer in _all(places, question))):
        heard.add_incidents(url, found)
    (view,) = merged_jobs(place.job for place in places)
    incidents = _with_evidence(heard, merged(heard.incidents), keys)
    return Diagnosis(incidents=incidents, silent=heard.silent, ended=replace(view, job_id=job))


def _with_evidence(heard: _Heard, views: Iterable[IncidentView], keys: Keys) -> list[IncidentDetails]:
    """Return incidents with what all agents know as evidence: the stack of a rank is taken by the agent of its node."""
    found = [IncidentDetails(**vars(view), evidence=[]) for view in views]
    asked = [(each.id, url) for each in found if each.state != "pending" for url in heard.knowing[each.id]]

    def question(of: tuple[str, str]) -> IncidentDetails:
        answer = get(of[1], f"incidents/{of[0]}", keys)
        items = [_view(EvidenceItem, item) for item in answer["evidence"]]
        return IncidentDetails(**vars(_incident(answer)), evidence=items)

    more: dict[str, list[IncidentDetails]] = {}
    for (at, _), answer in _all(asked, question):
        if not isinstance(answer, str):  # it is over, or another agent has answered for this one
            more.setdefault(at, []).append(answer)
    return [replace(merged([[each], more.get(each.id, [])])[0], job_id=each.job_id) for each in found]


def jobs_of(urls: list[str], keys: Keys) -> dict[str, None]:
    """Return the names of the jobs that agents know, the latest of each agent first."""
    answers = _all(urls, lambda url: [str(each["job_id"]) for each in get(url, "jobs", keys)])
    return dict.fromkeys(name for _, names in answers if not isinstance(names, str) for name in names)


# -- answers of agents -------------------------------------------------------------------------------


def _all(targets: list[_Target], question: Callable[[_Target], _T]) -> Iterator[tuple[_Target, _T | str]]:
    """Yield each target with the answer, or with the reason why there is none."""
    for target, answer in zip(targets, together(lambda target: _answer(question, target), targets), strict=True):
        yield target, f"no answer within {seconds(TOGETHER_S)}" if answer is None else answer


def _answer(question: Callable[[_Target], _T], target: _Target) -> _T | str:
    try:
        return question(target)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return reason(error)


def _answered(heard: _Heard, answers: Iterable[tuple[str, _T | str]]) -> list[tuple[str, _T]]:
    """Return the answers by URL; note the agents without one as silent."""
    found: list[tuple[str, _T]] = []
    for url, answer in answers:
        if isinstance(answer, str):
            heard.silent[url] = answer
        else:
            found.append((url, answer))
    return found


def _named(names: Mapping[tuple[str, str], str], url: str, views: Iterable[_OfJob]) -> list[_OfJob]:
    """Return what an agent has answered with the names that its runs have here."""
    return [replace(view, job_id=names.get((url, view.job_id), view.job_id)) for view in views]


def _rank(answer: dict[str, Any]) -> RankView:
    lists: dict[str, Any] = {
        name: [_view(kind, each) for each in answer.get(name, ())] for name, kind in _OF_RANK.items()
    }
    lists["in_flight"] = [
        replace(op, place=None if op.place is None else _view(Usual, vars(op)["place"])) for op in lists["in_flight"]
    ]
    doing = answer.get("activity")
    return _view(RankView, answer | lists | {"activity": None if doing is None else _view(Activity, doing)})


def _incident(answer: dict[str, Any]) -> IncidentView:
    """Return an incident; agents of earlier versions lack the texts."""
    return _view(IncidentView, {"title": title(answer["kind"], answer["ranks"]), "place": "", "remedy": "", **answer})


def _view(kind: type[_T], answer: dict[str, Any]) -> _T:
    """Return an agent's answer as a view. An agent of another version may lack what has a default, and have more."""
    return kind(**{field.name: answer[field.name] for field in fields(kind) if field.name in answer})  # type: ignore[arg-type]


def _once(found: Iterable[Verdict]) -> list[Verdict]:
    """Return verdicts without those that several agents have given, or one under two names; the longest first."""
    once = {
        (each.kind, each.cause, each.job_id, each.group_id, each.seq, each.source, each.parameter, *each.ranks): each
        for each in found
    }
    return sorted(once.values(), key=lambda each: -each.since_s)
