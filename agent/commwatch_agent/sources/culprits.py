"""What a culprit is doing, as evidence of its incident: its Python stack by py-spy, and what the kernel says of its process."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from socket import gethostname

from commwatch.wire import files
from commwatch.wire.concurrency import at_once
from commwatch_agent.incidents.incident import WAITED_FOR, EvidenceItem, Incident
from commwatch_agent.incidents.stacks import counted, longer_at, place_of, shares, stack_at
from commwatch_agent.model.views import RankView
from commwatch_agent.sources.stack_capture import stack, stacks_over_time, what_a_stack_needs
from commwatch_agent.text.units import percent
from commwatch_collectors.node.process import STATES

#: Kinds whose culprits do something else than the others; most culprits of one incident that are looked at.
_KINDS, _MOST = WAITED_FOR | {"desync", "straggler"}, 4
#: So long, in s, what was taken for another agent is taken for the next one, too; pause, in s, between two looks at what culprits do.
_FRESH_S, _TELL_S = 10.0, 1.0


class Culprits:
    """Takes the stacks of culprits when incidents open; one thread calls ``tick``, any thread the other methods.

    Args:
        incidents: returns those in memory.
        ranks: returns the ranks of a job.
        add: takes evidence of an incident, by its id.
        elsewhere: returns what the agents of other nodes take of ranks of a job.
    """

    def __init__(
        self,
        incidents: Callable[[], Iterable[Incident]],
        ranks: Callable[[str], Iterable[RankView]],
        add: Callable[[str, Sequence[EvidenceItem]], object],
        elsewhere: Callable[[str, Sequence[int]], Iterable[EvidenceItem]] = lambda job, ranks: (),
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._incidents, self._ranks, self._add, self._clock = incidents, ranks, add, clock
        self._elsewhere, self._host = elsewhere, gethostname()
        #: Incident and rank.
        self._taken: set[tuple[str, int]] = set()
        #: Incident, rank and kind of activity; and when culprits were last looked at for these.
        self._told: set[tuple[str, object, object]] = set()
        self._told_s = float("-inf")
        #: What was taken last for others, and of whom.
        self._lent: tuple[tuple[str, tuple[int, ...]], list[EvidenceItem]] | None = None
        self._lending = threading.Lock()

    def tick(self) -> None:
        """Look at the culprits of incidents that have opened, each once; and what they do, each time that this is something else."""
        found = [each for each in self._incidents() if each.state == "open" and each.kind in _KINDS]
        self._taken = {at for at in self._taken if any(at[0] == each.id for each in found)}
        self._tell([each for each in found if each.kind in WAITED_FOR and each.ranks])
        for incident in found:
            new = [rank for rank in _looked_at(incident) if (incident.id, rank) not in self._taken]
            if not new or _is_known(incident, new):
                continue
            self._taken |= {(incident.id, rank) for rank in new}
            here = {view.rank for view in self._here(incident.job_id)}
            there = [rank for rank in new if rank not in here]
            is_late = incident.kind == "straggler"
            look = self._late if is_late else self.of
            items = look(incident.job_id, [rank for rank in new if rank in here])
            lent = self._elsewhere(incident.job_id, there) if there else ()
            items += (item for item in lent if item.source != "stack" or not is_late)  # of one look
            if items:
                self._add(incident.id, items)

    def _tell(self, waits: Collection[Incident]) -> None:
        """Add what culprits on this node do, as far as that is new; at most once a second."""
        now = self._clock()
        if abs(now - self._told_s) < _TELL_S:
            return
        self._told_s = now
        self._told = {at for at in self._told if any(at[0] == each.id for each in waits)}
        for incident in waits:
            items = {_known_by(incident, item): item for item in self._doing(incident.job_id, incident.ranks)}
            new = [item for at, item in items.items() if at not in self._told]
            self._told |= items.keys()
            if new:
                self._add(incident.id, new)

    def of(self, job: str, ranks: Sequence[int]) -> list[EvidenceItem]:
        """Return stacks of ranks of this node and what the kernel knows of them, at most of four."""
        views = {view.rank: view for view in self._here(job)}
        pids = [(rank, views[rank].visible_pid) for rank in ranks[:_MOST] if rank in views]
        return [item for rank, pid in pids if pid for item in taken(rank, pid, self._clock())]

    def _late(self, job: str, ranks: Sequence[int]) -> list[EvidenceItem]:
        """Return where late ranks of this node spend their time for a second, beside a rank that is not late.

        A single look would find any place of a step.
        """
        pids = {view.rank: view.visible_pid for view in self._here(job) if view.visible_pid}
        late = [rank for rank in ranks[:_MOST] if rank in pids]
        other = [rank for rank in sorted(pids) if rank not in ranks][: bool(late)]
        looks = at_once(stacks_over_time, [pids[rank] for rank in (*late, *other)], _MOST + 1)
        seen = {rank: counted(look.result() or "") for rank, look in zip((*late, *other), looks, strict=True)}
        usual = shares(seen[other[0]]) if other else {}
        return [item for rank in late for item in longer(rank, pids[rank], self._clock(), seen[rank], usual)]

    def _doing(self, job: str, ranks: Sequence[int]) -> list[EvidenceItem]:
        """Return what ranks of this node do while others wait for them, as far as known, at most of four."""
        views = [view for view in self._here(job) if view.rank in ranks[:_MOST]]
        return [item for view in views for item in does(view, self._clock())]

    def lent(self, job: str, ranks: Sequence[int]) -> list[EvidenceItem]:
        """Return all that ranks of this node do for the agent of another node: one question at a time, and the same answer for some seconds."""
        about = job, tuple(ranks)
        with self._lending:
            if self._lent is None or self._lent[0] != about or not _is_fresh(self._lent[1], self._clock()):
                self._lent = about, [*self._doing(job, ranks), *self.of(job, ranks)]
            return self._lent[1]

    def _here(self, job: str) -> list[RankView]:
        return [view for view in self._ranks(job) if view.host == self._host and view.state == "running"]


def _looked_at(incident: Incident) -> list[int]:
    """Return the ranks whose stacks are taken: culprits, and of ranks that disagree one of each side first."""
    sides = incident.details.get("sides")
    firsts = [int(side[0]) for side in sides if side] if isinstance(sides, list) else []
    return list(dict.fromkeys([*firsts, *incident.ranks]))[:_MOST]


def _known_by(incident: Incident, item: EvidenceItem) -> tuple[str, object, object]:
    return incident.id, item.data["rank"], item.data["activity"]


def _is_fresh(items: Iterable[EvidenceItem], now: float) -> bool:
    return any(abs(now - item.at) < _FRESH_S for item in items)


def _is_known(incident: Incident, ranks: list[int]) -> bool:
    """Return whether an earlier agent has looked at these ranks."""
    known = {item.data.get("rank") for item in incident.evidence if item.source in ("process", "stack")}
    return set(ranks) <= known


def does(view: RankView, at: float) -> Iterator[EvidenceItem]:
    """Yield what a rank does while others wait for it, if that is known."""
    if view.activity is not None:
        data = {"rank": view.rank, "pid": view.visible_pid, "activity": view.activity.kind}
        yield EvidenceItem("process", at, f"rank {view.rank} {view.activity.says}", data)


def taken(rank: int, pid: int, at: float) -> Iterator[EvidenceItem]:
    """Yield what a rank's process does: by the kernel, and its Python stack, or why there is none."""
    kernel = doing(pid)
    if kernel:
        yield EvidenceItem("process", at, f"rank {rank}: process {pid} {kernel}", {"rank": rank, "pid": pid})
    text = stack(pid)
    if text is None:
        yield _missing(rank, pid, at)
        return
    place = place_of(text)
    where = f"rank {rank} is in {place}" if place else f"rank {rank}: Python stack"
    yield EvidenceItem("stack", at, where, {"rank": rank, "pid": pid, "place": place, "stack": text})


def _missing(rank: int, pid: int, at: float) -> EvidenceItem:
    """Return that there is no stack, and what it needs."""
    needs = what_a_stack_needs()
    return EvidenceItem(
        "stack", at, f"rank {rank}: no Python stack: {needs}", {"rank": rank, "pid": pid, "needs": needs}
    )


def longer(
    rank: int, pid: int, at: float, stacks: Mapping[tuple[str, ...], int], other: Mapping[str, float]
) -> Iterator[EvidenceItem]:
    """Yield where a late rank spends more of its time than another rank, or why that is not known.

    Args:
        stacks: how often it was in each.
        other: parts of the time of a rank that is not late, by place; empty: not known.
    """
    about = {"rank": rank, "pid": pid}
    if not stacks:
        yield _missing(rank, pid, at)
        return
    own = shares(stacks)
    place = longer_at(stacks, other)
    if not place:
        says = (
            f"in {sum(stacks.values())} samples, rank {rank} spent no more of its time at any place than another rank"
        )
        yield EvidenceItem("stack", at, says, about)
        return
    beside = f", another rank {percent(other.get(place, 0.0))}" if other else ""
    text = f"in {sum(stacks.values())} samples, rank {rank} was in {place} {percent(own[place])} of the time{beside}"
    stack = "\n    ".join([f'Thread {pid}: "MainThread"', *stack_at(stacks, place)])
    yield EvidenceItem("stack", at, text, {**about, "place": place, "part": round(own[place], 3), "stack": stack})


def doing(pid: int, proc: str = "/proc") -> str:
    """Return what a process does by the kernel: its state, and the function of the kernel in which it waits; empty: not known."""
    state = "".join(files.of_process(pid, proc)[:1])
    channel = files.text(f"{proc}/{pid}/wchan") or "0"
    waits = "" if channel == "0" else f", in {channel} of the kernel"
    return f"is {STATES.get(state, state)}{waits}" if state else ""
