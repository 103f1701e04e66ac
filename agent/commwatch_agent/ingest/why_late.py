"""Why a straggler is late, from samples of its node. Pure.

Each sign is compared with the other ranks on the node. Times must be large enough to explain half of the lateness.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from statistics import median
from typing import NamedTuple

from commwatch_agent.text.units import percent
from commwatch_collectors.node.process import Usage

#: Samples of a rank that are kept, one a second.
MOST_SAMPLES = 35
#: Least share of the lateness that a sign must explain.
_EXPLAINS = 0.5
#: A process is slowed down by this many pages read from disk per second, if it is this many times those of the others.
_FAULTS_PER_S, _TIMES = 50.0, 5
#: Least ratio of the times that a rank and the others run by which it has more work, where cores are scarce.
_MORE_WORK = 1.25
#: Differences below this part of the lateness do not count.
_NO_DIFFERENCE = 0.25
#: Share of the time from which on main threads that wait for a CPU core make all other figures doubtful.
SCARCE_CORES = 0.20
#: All ranks lack cores if each does so for so many times as long as the others wait for the late one; and alike, if that one does so for at most so
#: many times as long as they.
_MUCH_LONGER, _ALIKE = 2, 1.5
#: By chance, a rank is late for no larger share of the time than this.
_BY_CHANCE = 0.20


#: Codes of reasons.
THROTTLED, QUOTA, NO_CORE, COMPUTES, PAGES, IDLE = "throttled", "quota", "no_core", "computes", "pages", "idle"
#: All ranks lack cores alike, for much longer than one is late: by chance one is the latest, and it is no culprit.
ALL_LACK_CORES = "all_lack_cores"


#: Reasons that are the cause by themselves, whatever the rank does, in a few words.
IN_SHORT: Mapping[str, str] = {
    NO_CORE: "waiting for a CPU core",
    QUOTA: "stopped by a CPU quota",
    THROTTLED: "with a throttled GPU",
}


#: Reasons that are the rank's own, also where all ranks lack cores.
OWN = frozenset({*IN_SHORT, IDLE})


class Why(NamedTuple):
    """Why a straggler is late: the code of the reason, and a phrase with its numbers."""

    code: str
    says: str


class Sample(NamedTuple):
    """A sample of a rank's process and GPU."""

    now_ns: int
    #: ``None``: not known.
    usage: Usage | None
    #: Why its GPU throttles its clock.
    held_back: tuple[str, ...] = ()


class Shares(NamedTuple):
    """Times of a rank between two samples, as shares (0 to 1); and its page faults per second."""

    ran: float
    wanted: float
    throttled: float
    faults_per_s: float


def reason(rank: int, late: float, samples: Mapping[int, Sequence[Sample]], since_ns: int, until_ns: int) -> Why | None:
    """Return why a straggler is late; ``None``: not known.

    Args:
        rank: the straggler.
        late: share of the time (0 to 1) that the others wait for it.
        samples: oldest first, by rank of the job on this node.
        since_ns, until_ns: earlier and later samples are ignored.
    """
    recent = {
        each: [sample for sample in of_rank if since_ns <= sample.now_ns <= until_ns]
        for each, of_rank in samples.items()
    }
    held_back = {each: _held_back(of_rank) for each, of_rank in recent.items()}
    mine = held_back.pop(rank, set())
    slowed = sorted(why for why in mine if 2 * sum(why in theirs for theirs in held_back.values()) <= len(held_back))
    if slowed:
        return Why(THROTTLED, f"its GPU throttles its clock: {', '.join(slowed)}")
    known = {each: shares for each, of_rank in recent.items() if (shares := _shares(of_rank)) is not None}
    culprit = known.pop(rank, None)
    if culprit is None or not known or late <= 0:
        return None
    others = Shares(*(median(values) for values in zip(*known.values(), strict=True)))
    why = _of_process(culprit, others, late)
    if (why is None or why.code == NO_CORE) and _all_lack_cores(culprit, others, late):
        return Why(ALL_LACK_CORES, "all ranks wait for cores, for much longer than the others wait for it")
    return why


def waited_for_core(samples: Sequence[Sample]) -> float | None:
    """Return the share of the time (0 to 1) that a main thread was ready to run but had no core; ``None``: not known."""
    shares = _shares(samples)
    return None if shares is None else shares.wanted + shares.throttled


def common_why(whys: Mapping[int, str | None], late: Collection[int]) -> str:
    """Return why the ranks ``late`` are late, as a code; empty: not known of all of them, or not for one reason.

    Args:
        whys: by rank, a code; ``None``: not known.
    """
    found = {whys.get(rank) for rank in late}
    return (found.pop() or "") if len(found) == 1 else ""


def _held_back(samples: Sequence[Sample]) -> set[str]:
    """Return why the GPU throttled its clock in most of the samples."""
    counts = Counter(why for sample in samples for why in sample.held_back)
    return {why for why, count in counts.items() if 2 * count > len(samples)}


def _shares(samples: Sequence[Sample]) -> Shares | None:
    """Return the shares of the time from the first sample to the last; ``None`` without two samples of one process."""
    looks = [(sample.now_ns, sample.usage) for sample in samples if sample.usage is not None]
    if len(looks) < 2:
        return None
    (first_ns, first), (last_ns, last) = looks[0], looks[-1]
    span = last_ns - first_ns
    if span <= 0 or last.ran_ns < first.ran_ns:  # another process
        return None
    known = first.throttled_ns is not None and last.throttled_ns is not None
    # Limited, because it is summed over the cgroup's cores, and the process may have moved to another cgroup.
    throttled = max(0, min(span, (last.throttled_ns or 0) - (first.throttled_ns or 0))) if known else 0
    return Shares(
        (last.ran_ns - first.ran_ns) / span,
        (last.wanted_ns - first.wanted_ns) / span,
        throttled / span,
        (last.major_faults - first.major_faults) / span * 1e9,
    )


def _of_process(mine: Shares, others: Shares, late: float) -> Why | None:
    enough = _EXPLAINS * late
    if mine.throttled - others.throttled >= enough:
        says = f"its cgroup was stopped {percent(mine.throttled)} of the time because its CPU quota was used up"
        return Why(QUOTA, says)
    # Where all ranks lack cores, one with more work also waits longer for them: as much longer as it runs.
    scarce = others.wanted / others.ran if others.ran > 0 else 0.0
    works = mine.ran - others.ran
    more = works * (1 + scarce) if mine.ran >= _MORE_WORK * others.ran else works
    if mine.wanted - max(others.wanted, mine.ran * scarce) >= max(enough, more):
        theirs = f"those of the others {percent(others.wanted)}"
        return Why(NO_CORE, f"its main thread waited {percent(mine.wanted)} of the time for a core, {theirs}")
    if more >= enough:
        theirs = f"those of the others {percent(others.ran)}"
        there = "" if works >= enough else ", on cores for which all ranks wait"
        return Why(
            COMPUTES, f"its main thread ran {percent(mine.ran)} of the time, {theirs}: it computes longer{there}"
        )
    if mine.faults_per_s >= max(_FAULTS_PER_S, _TIMES * others.faults_per_s):
        return Why(PAGES, f"it read {mine.faults_per_s:.0f} pages a second from disk (swap, or memory-mapped files)")
    used = mine.ran + mine.wanted - others.ran - others.wanted
    if abs(used) <= _NO_DIFFERENCE * late and mine.ran + mine.wanted <= 1 - enough:
        waits = "it waits for data, a disk, a lock, its GPU or another of its threads"
        return Why(IDLE, f"meanwhile its main thread neither ran nor was ready to run: {waits}")
    return None


def _all_lack_cores(mine: Shares, others: Shares, late: float) -> bool:
    """Return whether each rank loses much more time for want of cores than the others wait for the late one, and that one not much more than they."""
    here, there = mine.wanted + mine.throttled, others.wanted + others.throttled
    return late <= _BY_CHANCE and min(here, there) >= max(SCARCE_CORES, _MUCH_LONGER * late) and here <= _ALIKE * there
