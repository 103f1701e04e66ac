"""Finds which ranks of a job wait outside operations, in calls that make or destroy groups and in stores, and who has not come. Pure."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from typing import NamedTuple

from commwatch.wire import events as ev
from commwatch_agent.analysis.calls.differences import CERTAIN_S
from commwatch_agent.analysis.waits.patience import WORKING_S, goes_on
from commwatch_agent.analysis.waits.wait_graph import HANG_S, SILENT_S, absence, age
from commwatch_agent.model.endings import DIED
from commwatch_agent.model.views import InFlight, OutsideCall, RankView
from commwatch_agent.text.units import seconds
from commwatch_collectors.spans import ranks as named
from commwatch_collectors.spans import spans

#: Ranks come unevenly, because they import and compile: so long one that waits for nothing may take; and so long all of them may take to connect.
_PATIENCE_S, _CONNECTING_S = 45.0, 120.0
#: Ranks beyond so many are judged only if there are data from them, or if they run on the node of one that has data.
_MOST_RANKS = 4096
#: Why a rank has not come, worst first.
_CAUSES = ("dead", "gone", "stopped", "not_come", "unseen")
#: Calls to which all ranks of the job come, or those that the call is about.
_OF_ALL = frozenset({"init_process_group", "store_based_barrier"})
_OF_MEMBERS = frozenset({"new_group", "destroy_process_group"})

_Ranks = Mapping[int, RankView]


class OutsideWait(NamedTuple):
    """Ranks that wait in one call outside operations."""

    job_id: str
    call: str
    #: What the call is about: its ranks, or a key; empty: all ranks.
    about: str
    inside: Collection[int]
    since_s: float
    #: Why others have not come, the worst cause; and who has that.
    cause: str
    culprits: list[int]
    says: str
    is_due: bool


class _Call(NamedTuple):
    name: str
    #: ``None``: all ranks of the job, or not known.
    ranks: tuple[int, ...] | None
    key: str
    number: int

    @property
    def says(self) -> str:
        if self.key:
            return f"a wait for {self.key} in a store"
        return self.name if self.ranks is None else f"{self.name} of {named(list(self.ranks))}"


def outside_waits(known: Mapping[tuple[str, int], RankView]) -> Iterator[OutsideWait]:
    """Yield the waits outside operations that last; ``known``: the ranks of all jobs, by job and rank."""
    for job_id, views in of_jobs(known).items():
        together: dict[_Call, dict[int, OutsideCall]] = {}
        for rank, view in views.items():
            for each in view.outside:
                together.setdefault(_call(each), {})[rank] = each
        for call, inside in together.items():
            since_s = max(each.age_s for each in inside.values())
            if since_s >= CERTAIN_S:
                yield from _judged(job_id, call, sorted(inside), since_s, views)


def of_jobs(known: Mapping[tuple[str, int], RankView]) -> dict[str, dict[int, RankView]]:
    """Return the ranks of each job, by rank."""
    jobs: dict[str, dict[int, RankView]] = {}
    for (job_id, rank), view in known.items():
        jobs.setdefault(job_id, {})[rank] = view
    return jobs


def near_ranks(views: _Ranks) -> set[int]:
    """Return the ranks of a job that run on a node with a known rank, by the launcher's variables."""
    return {rank for view in views.values() for rank in view.node_ranks or ()}


def _call(each: OutsideCall) -> _Call:
    return _Call(each.call, None if each.ranks is None else tuple(each.ranks), each.key, each.number)


def _judged(job_id: str, call: _Call, inside: list[int], since_s: float, views: _Ranks) -> Iterator[OutsideWait]:
    size = max(view.world_size for view in views.values())
    near = near_ranks(views)
    every = sorted({*range(min(size, _MOST_RANKS)), *views, *near})
    if call.name in _OF_ALL or call.name in _OF_MEMBERS:
        members = every if call.ranks is None else call.ranks
        if not members:  # not known
            return
        missing = [rank for rank in members if rank not in inside and not _has_come(views.get(rank), call)]
    else:  # it is not known who is to set the key
        missing = [rank for rank in every if rank not in inside and _may_set_it(views.get(rank), since_s)]
        missing = missing if len(missing) == 1 else []
    why = {rank: _why(views.get(rank)) for rank in missing}
    cause = next((each for each in _CAUSES if each in why.values()), "stuck" if call.name in _OF_ALL else "not_come")
    if not why and call.name in _OF_MEMBERS:
        cause = "stuck"
    culprits = [rank for rank in missing if why[rank] == cause]
    culprits = [rank for rank in culprits if rank in near] or culprits  # those of other nodes may wait, too
    whom = f"{named(inside)} in {call.says} for {seconds(since_s)}"
    about = call.key or ("" if call.ranks is None else named(list(call.ranks)))
    says = f"{_says(call, why, views, near)} ({whom})"
    is_due = since_s >= _limit_s(call, cause, missing, views, since_s)
    yield OutsideWait(job_id, call.name, about, inside, since_s, cause, culprits, says, is_due)


def _has_come(view: RankView | None, call: _Call) -> bool:
    """Return whether a rank has gone on after this call."""
    if view is None:
        return False
    if call.name == "destroy_process_group":
        return view.state in ("left", "ended") or bool(view.destroyed)
    begun = view.begun.get(call.name, 0)
    in_such = any(each.call == call.name for each in view.outside)
    return bool(call.number) and (begun > call.number or (begun == call.number and not in_such))


def _may_set_it(view: RankView | None, since_s: float) -> bool:
    """Return whether a rank may be the one that is to set a key: not if it has waited elsewhere for most of the time."""
    if view is None:
        return True
    waits_s = max((*map(age, _waited_for(view)), *(each.age_s for each in view.outside)), default=0.0)
    return view.state in ("running", "gone") and 2 * waits_s < since_s


def _why(view: RankView | None) -> str:
    cause = absence(view, "")
    return cause if cause in _CAUSES else "not_come"


def _where(view: RankView) -> str:
    """Return in which operation or call a rank waits; empty: in none."""
    if view.outside:
        return _call(view.outside[0]).says
    op = max(_waited_for(view), key=age, default=None)
    return "" if op is None else f"{op.op} {op.seq} of group {op.group}"


def _waited_for(view: RankView) -> list[InFlight]:
    return [op for op in view.in_flight if not op.queued and (op.op not in ev.P2P or op.waited_s is not None)]


def _limit_s(call: _Call, cause: str, missing: list[int], views: _Ranks, since_s: float) -> float:
    if cause in ("dead", "gone"):
        return CERTAIN_S
    if cause == "stuck":
        return _CONNECTING_S
    if cause == "stopped" or (missing and all(rank in views and _waits_long(views[rank]) for rank in missing)):
        return HANG_S
    # At a job's end, some ranks may have much left to do; and a spare waits for a key while the others train.
    if call.name == "destroy_process_group" or (call.key and any(goes_on(view, since_s) for view in views.values())):
        return math.inf
    known = [views[rank].activity for rank in missing if rank in views]
    works = len(known) == len(missing) > 0 and all(each is not None and each.is_working for each in known)
    return WORKING_S if works else _PATIENCE_S


def _waits_long(view: RankView) -> bool:
    return any(age_s >= HANG_S for age_s in (*map(age, _waited_for(view)), *(each.age_s for each in view.outside)))


# -- words -------------------------------------------------------------------------------------------


def _says(call: _Call, why: Mapping[int, str], views: _Ranks, near: Collection[int]) -> str:
    if call.name not in _OF_ALL | _OF_MEMBERS:
        return _says_of_key(call, why, views)
    if not why:
        return f"every rank has come to {call.says}, but it does not end: check the network between them, and the address where they meet"
    parts: dict[str, list[int]] = {}
    for rank, cause in why.items():
        parts.setdefault(_of_one(call, cause, views.get(rank), rank in near), []).append(rank)
    return "; ".join(text.format(*_grammar(ranks)) for text, ranks in parts.items())


def _grammar(ranks: list[int]) -> tuple[str, str, str, str, str, str]:
    """Return the ranks, and words that agree with their number."""
    many = len(ranks) > 1
    whom = f"{'ranks' if many else 'rank'} {spans(ranks)}"
    return (whom, *(("have", "are", "were", "they", "each of them") if many else ("has", "is", "was", "it", "it")))


def _of_one(call: _Call, cause: str, view: RankView | None, is_near: bool) -> str:
    """Return what is known of a rank that has not come, as a template for ``_grammar``."""
    if cause == "unseen" and not is_near:
        return f"no data from {{0}}: {{4}} {{1}} not come to {call.says}, or {{2}} on a node whose agent is to be queried as well"
    if view is None:
        return f"{{0}} {{1}} not come to {call.says}: {{4}} {{1}} not started, or {{1}} not called it"
    come = f"{{0}} {{1}} not come to {call.says}"
    return come + {
        "dead": f", because {{4}} {DIED}",
        "gone": ", because {4} {1} ended",
        "stopped": "; {4} {2} stopped",
    }.get(cause, f"; {_does(view)}")


def _does(view: RankView) -> str:
    if where := _where(view):
        return f"{{4}} {{2}} in {where}"
    says = "" if view.activity is None else view.activity.says.replace("{", "{{").replace("}", "}}")
    if (view.heartbeat_age_s or 0.0) > SILENT_S:
        return "{4} {2} alive, but no Python code runs there" + (f", and {{5}} {says}" if says else "")
    return f"{{5}} {says}" if says else "{4} {2} alive but {2} doing something else"


def _says_of_key(call: _Call, why: Mapping[int, str], views: _Ranks) -> str:
    says = f"key {call.key} of a store is not set"
    for rank, cause in why.items():
        view = views.get(rank)
        how = {"dead": DIED, "gone": "has ended", "stopped": "is stopped"}.get(cause)
        how = how or ("has sent no data" if view is None else "is alive and does not wait for it")
        return f"{says}; rank {rank} {how}"
    return says
