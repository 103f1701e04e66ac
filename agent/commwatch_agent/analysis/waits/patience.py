"""How long a wait may last before it is a fault: by what happened before at that place of the work, and by what the missing rank does. Pure.

docs/verdicts.md (Rhythm) has the rules. A place that has always been quick is overdue after seconds; a new one, and one whose waits
vary, after a minute; a rank that works, and a root that waits for the outside world, get minutes.
"""

from __future__ import annotations

from collections.abc import Iterable

from commwatch.wire import events as ev
from commwatch_agent.analysis.waits.wait_graph import HANG_S, Wait
from commwatch_agent.model.views import InFlight, RankView, Usual

#: What a rank does that reads or writes.
_MOVES_DATA = frozenset({"reading", "writing", "disk"})
#: The rank that gets requests by convention, where messages take the place of operations with a root.
_FIRST = 0
#: Least limit at a place that is new, or whose waits vary; and the limit for a rank that works.
NEW_S, WORKING_S = 60.0, 600.0
#: A place that occurred less often is new; one that was quick so often must not take long even if the rank computes.
_SELDOM, _OFTEN = 3, 20
#: How many times as long as the longest so far a wait may take, from the first number on up to ``NEW_S``, and then by the second one.
_TIMES, _TIMES_OF_LONG = 5.0, 3.0


def limit_s(place: Usual | None, working: bool | None, *, moves_data: bool = False) -> float:
    """Return for how many seconds a wait is no fault.

    Args:
        place: what is known of the place; ``None``: nothing, and nothing will be.
        working: whether the missing rank does something; ``None``: not known.
        moves_data: it reads or writes: that takes long now and then where it has always been quick.
    """
    if place is None:
        return HANG_S
    is_quick = place.longest_s is None and place.times >= _SELDOM
    if working and (moves_data or not is_quick or place.times < _OFTEN):
        return WORKING_S
    if is_quick:
        return HANG_S
    longest_s = place.longest_s or 0.0
    least = NEW_S if place.times < _SELDOM else max(HANG_S, min(NEW_S, _TIMES * longest_s))
    return max(least, _TIMES_OF_LONG * longest_s)


def overdue(wait: Wait, missing: RankView | None, steps: bool | None, *, is_here: bool = False) -> bool:
    """Return whether a wait for a rank that lives, or that no agent sees, is a fault.

    Args:
        missing: the rank; ``None``: no agent sees it.
        steps: whether ranks of the job mark steps; ``None``: not known.
        is_here: a rank that no agent sees runs on a node with an agent.
    """
    place = _place_of(wait)
    if place is None:
        return True
    if missing is None:
        return wait.since_s > (WORKING_S if place.times < _SELDOM and not is_here else limit_s(place, None))
    if goes_on(missing, wait.since_s) and missing.rank in _senders(
        wait
    ):  # as a trainer does whose evaluator waits for weights
        return False
    sources = _senders(wait, messages_of_all=False) if steps is False else set()
    if missing.rank in sources:
        return wait.since_s > WORKING_S
    if wait.since_s <= min(WORKING_S, _TIMES_OF_LONG * _absent_s(wait, sources)):
        return False
    is_long = wait.since_s > _limit_of(place, missing) and (_always_quick(place) or not _is_away_as_usual(missing))
    return is_long or _does_nothing_where_it_was_quick(missing)


def goes_on(view: RankView, since_s: float) -> bool:
    """Return whether a rank for which others wait since ``since_s`` seconds has made training steps meanwhile: it is at its work."""
    return view.stepped_s is not None and 2 * view.stepped_s < since_s


def is_behind(missing: RankView, since_s: float) -> bool:
    """Return whether it is a fault that a rank has launched nothing for so long, while others have; where no ends are seen."""
    return since_s > _limit_of(missing.absence, missing)


def _is_away_as_usual(missing: RankView) -> bool:
    absence = missing.absence
    if absence is None or absence.longest_s is None or missing.quiet_s is None:
        return False
    return missing.quiet_s <= _limit_of(absence, missing)


def _does_nothing_where_it_was_quick(missing: RankView) -> bool:
    doing = missing.activity
    return doing is not None and doing.is_working is False and _always_quick(missing.absence)


def _always_quick(place: Usual | None) -> bool:
    return place is not None and place.longest_s is None and place.times >= _OFTEN


def _limit_of(place: Usual | None, missing: RankView) -> float:
    doing = missing.activity
    if doing is None:
        return limit_s(place, None)
    working = doing.is_working or doing.kind == "network"
    return limit_s(place, working, moves_data=doing.kind in _MOVES_DATA)


def stuck_limit_s(wait: Wait) -> float:
    """Return for how many seconds all ranks may be inside an operation."""
    return limit_s(_place_of(wait), None)


def _place_of(wait: Wait) -> Usual | None:
    """Return what is known of the place of a wait: by the rank that may take longest; ``None``: nothing."""
    places = [op.place for op in wait.inside.values() if isinstance(op, InFlight)]
    known = [place for place in places if place is not None]
    return max(known, key=lambda place: limit_s(place, None), default=None)


def marks_steps(ranks: Iterable[RankView]) -> bool | None:
    """Return whether any of some ranks marks steps; ``None``: not known."""
    known = [view.steps for view in ranks if view.steps is not None]
    return any(known) if known else None


def _absent_s(wait: Wait, sources: set[int]) -> float:
    """Return for how many seconds each of those that wait was in no operation itself before, at least: all may compile, or read data.

    A rank of ``sources`` does not count: that it waited for the outside world is no reason for others to take long.
    """
    absent = (
        op.absent_s
        for rank, op in wait.inside.items()
        if isinstance(op, InFlight) and op.absent_s is not None and rank not in sources
    )
    return min(absent, default=0.0)


def _senders(wait: Wait, *, messages_of_all: bool = True) -> set[int]:
    """Return the ranks that are to send what the others wait for: the root of an operation, or the peer of a receive.

    Args:
        messages_of_all: if not, only the first rank counts as a peer: in a job without steps, these ranks hand out what came from outside.
    """
    return {
        op.peer
        for op in wait.inside.values()
        if isinstance(op, InFlight) and op.peer is not None
        if op.op in ev.FROM_ROOT or (op.op == "recv" and (messages_of_all or op.peer == _FIRST))
    }
