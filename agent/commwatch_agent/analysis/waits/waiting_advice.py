"""Advice on ranks that wait: for CPU cores, for a late rank, for one another. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from statistics import fmean

from commwatch_agent.analysis.advice_facts import (
    CORES_RULE,
    LATE_RULE,
    UP_TO,
    WORTH,
    Facts,
    Found,
    Whys,
    on_condition,
)
from commwatch_agent.analysis.headline import awaited, first
from commwatch_agent.analysis.waits.uneven_work import StepWaits, Why, at_most_exposed, says, uneven
from commwatch_agent.ingest.why_late import IN_SHORT, NO_CORE, QUOTA, SCARCE_CORES, common_why
from commwatch_agent.model.api_views import Advice, Remedy
from commwatch_agent.text.units import counted, percent, seconds
from commwatch_alerts.remedies import remedy as remedy_of
from commwatch_collectors.node.cores import Cores
from commwatch_collectors.spans import ranks

#: Waits up to this factor above communication are explained by it, because their times differ a little.
_ALIKE = 1.2
#: A rank that waits for this part of the longest wait, at most, hardly ever waits.
_HARDLY = 0.1
_BEFORE_COLLECTIVES = (
    "Find out what it does before its collectives (data loading, low clocks, other processes, an uneven batch)."
)
#: Where an incident has it.
_SHOWN = " Its incident and `commwatch diagnose` show where in its code."
#: Of a slow link, ranks leave a long transfer one after the other, which looks as if they came to it so.
_LONG_TRANSFERS = "ranks leave long transfers at different times"
_SHARED_CORES = (
    "On one node, Gloo communicates on the CPU, and ranks that share cores leave a transfer at different times: give each rank cores of its own "
    "(fewer ranks, threads or loader workers). If it has them, give all ranks the same work in each step."
)
#: Where OMP_NUM_THREADS is 1: how a rank gets a core, and that for all ranks, or for a late one.
_FEWER = (
    "fewer threads if the script asks for more (OMP_NUM_THREADS is 1 already), or other processes elsewhere. "
    "`top` on the node shows what uses its cores."
)
_ONE_THREAD = (
    f"Give each rank cores of its own: fewer ranks or loader workers on the node, {_FEWER} "
    "Then look again: a rank without a core is late, and so is its communication."
)
_ONE_CORE = f"Give that rank a core of its own: fewer ranks or loader workers on its node, {_FEWER}"
_SLOW_LINK = "Compare the links of the ranks (`commwatch doctor`): one may be slow. If they are alike, give all ranks the same work in each step."


def first_of(facts: Facts) -> str:
    """Return the rule whose advice comes first, as ``headline.first`` does; of facts with or without the waiting."""
    waiting, comm = facts.left_out or facts.waiting, facts.of_step(facts.comm) + facts.left_out
    late = awaited(facts.late, waiting)
    return first(comm, waiting, late, common_why(facts.whys.late, late), facts.for_cores)


def scarce_cores(facts: Facts) -> Iterator[Found]:
    """The ranks starve, and no late rank, which comes first, starves more than the others."""
    waited = facts.for_cores
    if waited is not None and waited >= SCARCE_CORES and not (first_of(facts) == LATE_RULE and _starves(facts)):
        because = [
            f"their main threads were ready to run, but had no core, {percent(waited)} of the time (mean of the ranks, over half a minute at most)"
        ]
        because += filter(None, [_threads(facts.cores)])
        yield Found(because, _up_to(waited), waited, _ONE_THREAD if _have_one_thread(facts) else "")


def _threads(nodes: Mapping[str, Sequence[Cores]]) -> str:
    """Return how many threads compute on how many cores, on the node with the most threads; empty: not known."""
    known = {
        host: [(each.usable, each.threads) for each in ranks if each.usable and each.threads]
        for host, ranks in nodes.items()
    }
    host, every = max(known.items(), key=lambda item: sum(threads for _, threads in item[1]), default=("", []))
    if not every:
        return ""
    usable = sorted({f"{of:.3g}" for of, _ in every})
    of_each = f"may use {' or '.join(usable)} cores, which others may use, too"
    return f"{counted(sum(threads for _, threads in every), 'thread')} of {counted(len(every), 'rank')} on {host} compute, and each rank {of_each}"


def _have_one_thread(facts: Facts) -> bool:
    """Return whether all ranks are known to have one thread of OpenMP each, unless their script asks for more."""
    found = [each.omp_threads for ranks in facts.cores.values() for each in ranks]
    return bool(found) and len(found) == facts.ranks and set(found) == {1}


def on_cores(facts: Facts | None, advice: Iterable[Advice]) -> list[Advice]:
    """Return advice whose estimates state that they assume cores, if the ranks lack them; what the lack costs, and advice on that, is no such estimate."""
    assumes = "" if facts is None else on_condition(facts.for_cores)
    if facts is None or not assumes:
        return list(advice)
    measured = {CORES_RULE, *((LATE_RULE,) if _starves(facts) else ())}
    return [
        each
        if each.saves_share is None or each.rule in measured
        else replace(each, gain=f"{each.gain}; this assumes {assumes}")
        for each in advice
    ]


def _starves(facts: Facts) -> bool:
    """Return whether the late ranks have too little CPU time, which the advice on them says."""
    return common_why(facts.whys.late, facts.late) in (NO_CORE, QUOTA)


def late_ranks(facts: Facts) -> Iterator[Found]:
    """Some ranks are late all the time."""
    if facts.late:
        cost, late = max(facts.late.values()), sorted(facts.late)
        because = [
            f"the others wait {percent(facts.late[rank])} of the time for rank {rank}{_spent(facts.whys, rank)}{_basis(facts, facts.late[rank])}"
            for rank in late
        ]
        if facts.waits:
            cost = at_most_exposed(cost, facts.all_exposed, len(facts.waits))
        remedy = Remedy("", {"no_late_rank": late}, cost)
        why = common_why(facts.whys.late, late)
        yield Found(because, _up_to(cost), cost, _what_to_do(facts, late, why), _are_late(late, why), [remedy])


def _what_to_do(facts: Facts, late: Sequence[int], why: str) -> str:
    """Return what fits the reason of late ranks, after the place in their code, as far as these are known."""
    whys = facts.whys
    places = {whys.places.get(rank, "") for rank in late}
    place = places.pop() if len(places) == 1 else ""
    if why in IN_SHORT:
        return _ONE_CORE if why == NO_CORE and _have_one_thread(facts) else remedy_of("straggler", why, {})
    do = remedy_of("straggler", why, {"place": place} if place else {}) if why or place else _BEFORE_COLLECTIVES
    return do if place or not whys.have_incidents.issuperset(late) else f"{do}{_SHOWN}"


def _spent(whys: Whys, rank: int) -> str:
    """Return what a late rank has cost, as its incidents and the report's headline have it; empty: it has none with a cost."""
    return f", which cost {seconds(whys.costs[rank])} of rank time" if rank in whys.costs else ""


def _basis(facts: Facts, share: float) -> str:
    """Return why the communication share is below a share of time that others wait; empty: it is not."""
    comm = facts.of_step(facts.comm) + facts.left_out
    if share <= comm:
        return ""
    if share * (1 - 1 / max(2, facts.ranks)) <= _ALIKE * comm:
        return " (the comm share is lower, as a mean of all ranks)"
    return " (the comm share is lower: a mean of all ranks over the whole period, without long steps)"


def uneven_ranks(facts: Facts) -> Iterator[Found]:
    """Ranks wait for one another, and none is known to be late all the time."""
    if facts.late or facts.pipeline or 2 * facts.whys.slow_link >= facts.comm > 0:
        return
    transfer = facts.comm * (1 - facts.left_out) if facts.left_out > 0 else None
    found = uneven(StepWaits(facts.waits, transfer, facts.all_exposed, facts.for_cores))
    if found is None:
        return
    because, gain = [f"{says(found)}, {percent(fmean(facts.waits.values()))} on average"], _up_to(found.saves)
    if found.why is Why.TRANSFERS:
        do = _SHARED_CORES if facts.on_one_cpu else _SLOW_LINK
        yield Found(because, gain, found.saves, title=_LONG_TRANSFERS, do=do)
    else:
        title = "" if found.why is Why.TURNS else _who_waits(facts.waits)
        yield Found(because, gain, found.saves, title=title, remedies=[Remedy("", {"no_late": True}, found.saves)])


def _who_waits(waits: Mapping[int, float]) -> str:
    """Return which ranks wait for others, and which hardly ever do: the others may wait for these."""
    never = [rank for rank, share in sorted(waits.items()) if share <= _HARDLY * max(waits.values())]
    if not never:
        return "ranks wait for others, some much longer than others"
    return f"{ranks(sorted(waits.keys() - set(never)))} wait for others, and {ranks(never)} hardly ever"


def pausing_rank(facts: Facts) -> Iterator[Found]:
    """One rank pauses in some steps; one that is late all the time has its own advice."""
    found = facts.pauses
    if found is None or found.rank in facts.late or found.cost < WORTH:
        return
    because = [
        f"the others wait {percent(found.cost)} of the time for rank {found.rank} in its {found.number} longest of {found.steps} steps "
        f"(up to {seconds(found.longest_s)}), which the shares of the steps leave out"
    ]
    gain = f"would save {UP_TO}{percent(found.cost)} of the time"
    yield Found(
        because, gain, found.cost, title=f"{ranks([found.rank])} pauses now and then, and the others wait for it"
    )


def _up_to(share: float) -> str:
    return f"would save {UP_TO}{percent(share)} of a step"


def _are_late(late: Sequence[int], why: str) -> str:
    reason = f", {IN_SHORT[why]}," if why in IN_SHORT else ""
    if len(late) == 1:
        return f"{ranks(late)} is late{reason} and the others wait for it"
    return f"{ranks(late)} are late{reason} and the others wait for them"
