"""The rule on one slow link between nodes: from the TCP connections of all ranks of a job that are seen. Pure.

In a ring all nodes send the same, equally slowly. But only the sender before the slow link has data to send nearly all of the time: the others
wait for data. While it is busy, each link shows its speed, and one that is far slower than the others is named.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator
from statistics import median
from typing import NamedTuple

from commwatch_agent.analysis.verdict import Verdict
from commwatch_agent.analysis.verdicts import by_job
from commwatch_agent.analysis.waits.links import Link, links, of_role
from commwatch_agent.incidents.evidence import Evidence
from commwatch_agent.incidents.incident import Condition, EvidenceItem
from commwatch_agent.model.views import RankTraffic, RankView
from commwatch_agent.text.units import percent, rate, seconds

#: Least part of the time in which a slow link is busy, and most part of the speed of the others that it has: more if it loses data, which alone shows
#: that it is faulty.
_BUSY, _SLOW, _SLOW_WITH_LOSS = 0.3, 0.6, 0.9
#: By how many standard deviations, estimated from the median absolute deviation, it is slower than the others.
_DEVIATIONS, _PER_MAD = 3.0, 1.4826
#: Least part of their time that ranks lose because of it; and if it loses data.
_LEAST_COST, _LEAST_COST_WITH_LOSS = 0.1, 0.05
#: Others are as slow as the slowest link if that has more than this part of their speed; and least number of others.
_DISTINCT, _DISTINCT_OF_QUEUE, _LEAST_OTHERS = 0.8, 0.5, 2
#: Part of the sent bytes that is sent again from which on a link loses data, and how many times as much as of the others.
_LOSS, _OF_OTHERS = 0.005, 3
#: A sender that loses a part p of its packets has 1.22/√p of them on their way (Mathis, Semke, Mahdavi, Ott: "The Macroscopic Behavior of the TCP
#: Congestion Avoidance Algorithm", 1997), here with a margin; and bytes of a packet.
_MATHIS, _MORE_THAN_MATHIS, _PACKET = 1.22, 1.5, 1460
#: How many times the round trip of the others, and at least how many seconds, make a delay.
_DELAY, _LEAST_DELAY_S = 5.0, 0.001


class Slow(NamedTuple):
    """A link that is slow, or the slowest one of a node."""

    link: Link
    #: Address of the node whose links are slow; empty: it is one link.
    node: str
    #: The slow links.
    alike: list[Link]
    #: Those that they are compared with.
    peers: list[Link]
    #: It loses data, and they do not.
    is_lossy: bool


def slow_links(evidence: Evidence) -> Iterator[Condition]:
    """Yield the slow link of each job, if it has one."""
    for job_id, views in by_job(view for view in evidence.ranks if view.state == "running").items():
        job = evidence.jobs.get(job_id)
        found = None if job is None else slow_link(links(views))
        if job is not None and found is not None:
            late = (verdict.cost_share or 0.0 for verdict in evidence.verdicts if _is_late(verdict, job_id))
            condition = _condition(found, views, job.run, evidence.now, max(late, default=0.0))
            if (condition.share or 0.0) >= (_LEAST_COST_WITH_LOSS if condition.cause == "loss" else _LEAST_COST):
                yield condition


def _is_late(verdict: Verdict, job_id: str) -> bool:
    return (verdict.kind, verdict.job_id) == ("straggler", job_id)


def slow_link(found: Collection[Link]) -> Slow | None:
    """Return the link that is slow, or the node whose links are; ``None``: there is none, or too little is known."""
    peers = of_role(found)
    slowest = min((link for link in peers if link.busy >= _BUSY), key=lambda link: link.speed, default=None)
    if slowest is None or slowest.by_receiver:
        return None
    others = [link for link in peers if link is not slowest and not link.by_receiver]
    is_delayed = _is_delayed(slowest, others)
    is_lossy = _is_lossy(slowest, others)
    if not (slowest.is_full or is_delayed or is_lossy):
        return None
    is_whole = any(link.local == slowest.remote for link in others)
    if len(others) < _LEAST_OTHERS or not is_whole:
        return None
    alike = [
        slowest,
        *(each for each in others if _is_alike(slowest, each, others, is_lossy=is_lossy, is_delayed=is_delayed)),
    ]
    node = "" if len(alike) == 1 else _common(alike)
    if len(alike) > 1 and not node:
        return None
    usual = _unaffected(slowest, node, others)
    most = _SLOW_WITH_LOSS if is_lossy else _SLOW
    return Slow(slowest, node, alike, usual, is_lossy) if usual and _is_slower(slowest, usual, most) else None


def _is_alike(slowest: Link, other: Link, others: list[Link], *, is_lossy: bool, is_delayed: bool) -> bool:
    """Return whether another link has the same fault: it loses data, too, or is as slow.

    Links of one sender, or to one receiver, share a queue, but not evenly.
    """
    if is_lossy:
        return _is_lossy(other, others)
    shares = slowest.local == other.local or slowest.remote == other.remote
    is_as_slow = slowest.speed > (_DISTINCT_OF_QUEUE if shares else _DISTINCT) * other.speed
    return is_as_slow or (is_delayed and _is_delayed(other, others))


def _is_delayed(slowest: Link, others: Iterable[Link]) -> bool:
    """Return whether a link waits for acknowledgements that take far longer than those of another one, even the quickest."""
    known = [link.min_rtt_s for link in others if link.min_rtt_s is not None]
    return slowest.min_rtt_s is not None and bool(known) and _is_long(slowest.min_rtt_s, min(known))


def _is_lossy(slowest: Link, others: Iterable[Link]) -> bool:
    """Return whether a link is slow because it loses data, far more than others.

    A link of little bandwidth loses data, too, where its queue overflows. But then the queue delays the data, which takes longer than on other links,
    and more is on its way than a sender has that loses so much.
    """
    lost, trip_s = slowest.retransmitted, slowest.rtt_s
    again = [link.retransmitted for link in others if link.retransmitted is not None]
    if lost is None or trip_s is None or lost < max(_LOSS, _OF_OTHERS * median([0.0, *again])):
        return False
    trips_s = [link.rtt_s for link in others if link.rtt_s is not None]
    if trips_s and trip_s <= median(trips_s):
        return True
    return slowest.speed * trip_s <= _MORE_THAN_MATHIS * _MATHIS * _PACKET / math.sqrt(lost)


def _is_long(trip_s: float, usual_s: float) -> bool:
    return trip_s >= max(_LEAST_DELAY_S, _DELAY * usual_s)


def _common(alike: Iterable[Link]) -> str:
    """Return the only address that all links have; empty: there is none, or two."""
    both = set.intersection(*({link.local, link.remote} for link in alike))
    return both.pop() if len(both) == 1 else ""


def _unaffected(slowest: Link, node: str, others: list[Link]) -> list[Link]:
    """Return the links to compare with: those whose acknowledgements do not wait in the queue before the slow link.

    On three nodes there are none: then the slow link must be far slower than each other one.
    """
    if node:
        return [link for link in others if node not in (link.local, link.remote)]
    apart = [link for link in others if link.remote != slowest.local and link.local != slowest.remote]
    return apart or [min(others, key=lambda link: link.speed)]


def _is_slower(slowest: Link, usual: list[Link], most: float) -> bool:
    """Return whether a link has at most this part of the speed of others, which scatters by factors."""
    if any(not link.speed for link in (slowest, *usual)):
        return False
    logs = [math.log(link.speed) for link in usual]
    middle = median(logs)
    deviation = _PER_MAD * median(abs(each - middle) for each in logs)
    below = middle - math.log(slowest.speed)
    return below >= -math.log(most) and below > _DEVIATIONS * deviation


def _condition(found: Slow, views: list[RankView], run: str, now: float, late: float) -> Condition:
    slow, peers = found.link, found.peers
    traffic = [view.traffic for view in views if view.traffic is not None]
    usual = median(link.speed for link in peers)
    cost, cause = _cost(found, usual, traffic, late), _cause(found)
    steps = [each.step_s for each in traffic if each.step_s is not None]
    lost = f", {seconds(cost * median(steps))} of a step of {seconds(median(steps))}" if steps else ""
    device = _device(found, traffic)
    says = (
        f"{_what(found)}{f' over {device}' if device else ''} {_HOW[cause]}: "
        f"it sends {rate(slow.speed)} while it has data to send, {percent(slow.busy)} of the time; "
        f"{_others(peers)}{_retransmitted(slow, peers)}{_round_trip(slow, peers)}; "
        f"ranks wait for it {percent(cost)} of the time{lost}"
    )
    data = {"from": slow.local, "to": slow.remote, "node": found.node, "device": device, "behind": _behind(slow, views)}
    return Condition(
        kind="slow_link",
        subject=(found.node,) if found.node else (slow.local, slow.remote),
        says=says,
        began_at=now - slow.seconds,
        job_id=views[0].job_id,
        run=run,
        cause=cause,
        value=cost,
        waiting=tuple(sorted(view.rank for view in views)),
        nodes=_nodes(found),
        idle_ranks=cost * len(views),
        share=cost,
        labels={"device": device} if device else {},
        evidence=(EvidenceItem("tcp", now, says, data),),
    )


def _nodes(found: Slow) -> tuple[str, ...]:
    """Return the names of the nodes that it is about, as far as known."""
    slow = found.link
    names = dict(zip((slow.local, slow.remote), slow.nodes, strict=True))
    return tuple(sorted({name for at, name in names.items() if name and found.node in ("", at)}))


def _what(found: Slow) -> str:
    slow = found.link
    names = dict(zip((slow.local, slow.remote), slow.nodes, strict=True))
    if not found.node:
        return f"the link from {_at(slow.nodes[0], slow.local)} to {_at(slow.nodes[1], slow.remote)}"
    does = {"sending" if link.local == found.node else "receiving" for link in found.alike}
    return f"{' and '.join(sorted(does, reverse=True))} on {_at(names[found.node], found.node)}"


def _device(found: Slow, traffic: Iterable[RankTraffic]) -> str:
    """Return the device of the node, or of the sender; empty: not known."""
    at = found.node or found.link.local
    return next((peer.device for each in traffic for peer in each.peers if peer.local == at), "")


def _others(peers: list[Link]) -> str:
    if len(peers) == 1:
        return f"the link from {peers[0].local} to {peers[0].remote} sends {rate(peers[0].speed)}"
    speeds = [link.speed for link in peers]
    return f"{len(peers)} others send {rate(median(speeds))} ({rate(min(speeds))} to {rate(max(speeds))})"


def _behind(slow: Link, views: Iterable[RankView]) -> list[int]:
    """Return the ranks at the far end that may seem late because of the link: on GPUs, what is a rank's own time is not known."""
    at = {view.rank for view in views if view.traffic and any(each.local == slow.remote for each in view.traffic.peers)}
    return sorted(view.rank for view in views if view.rank in at and view.gpu_timing)


def _busy(found: Slow) -> float:
    """Return the part of the time (0 to 1) in which a link is busy, or at most the links from or to a node, which may take turns."""
    if not found.node:
        return found.link.busy
    sends = sum(link.busy for link in found.alike if link.local == found.node)
    receives = sum(link.busy for link in found.alike if link.remote == found.node)
    return min(1.0, max(sends, receives))


def _cost(found: Slow, usual: float, traffic: list[RankTraffic], late: float) -> float:
    """Return the part of the time (0 to 1) that ranks lose: what the link is busy for longer than at the speed of the others.

    Args:
        late: part of the time in which ranks wait for a late one: what the link sends meanwhile costs nothing.
    """
    longer = min(_busy(found), 1 - late) * (1 - found.link.speed / usual)
    waits = [each.comm if each.exposed is None else each.exposed for each in traffic]
    known = [wait for wait in waits if wait is not None]
    return max(0.0, min(longer, median(known) - late)) if known else longer


#: By cause.
_HOW = {"": "is slow", "loss": "is slow and loses data", "delay": "is slow and has a long delay"}


def _cause(found: Slow) -> str:
    slow, peers = found.link, found.peers
    if found.is_lossy:
        return "loss"
    trips = [link.min_rtt_s for link in peers if link.min_rtt_s is not None]
    if slow.min_rtt_s is not None and trips and _is_long(slow.min_rtt_s, median(trips)):
        return "delay"
    return ""


def _at(node: str, address: str) -> str:
    return f"{node} ({address})" if node else address


def _retransmitted(slow: Link, peers: list[Link]) -> str:
    if slow.retransmitted is None:
        return ""
    again = [link.retransmitted for link in peers if link.retransmitted is not None]
    usual = f" ({percent(median(again))})" if again else ""
    return f"; {percent(slow.retransmitted)} of its data is sent again{usual}"


def _round_trip(slow: Link, peers: list[Link]) -> str:
    if slow.rtt_s is None:
        return ""
    trips = [link.rtt_s for link in peers if link.rtt_s is not None]
    return f"; round trip {seconds(slow.rtt_s)}{f' ({seconds(median(trips))})' if trips else ''}"
