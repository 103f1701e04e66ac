"""The TCP connections of ranks are looked at while communication takes much of their time, and only then."""

from __future__ import annotations

import threading
from collections.abc import Iterable

from commwatch_agent.analysis.live_ranks import rank as view
from commwatch_agent.ingest.jobs import JobTable
from commwatch_agent.ingest.rank_totals import RankTotals
from commwatch_agent.model.views import RankTraffic
from commwatch_agent.sources.connections import Connections
from commwatch_collectors.node.tcp_connections import Sockets, Unknown
from tests.agent.analysis.test_live_ranks import NOW, S, lost, rank
from tests.agent.test_lock import free
from tests.collectors.node.test_tcp import IDLE, PLACE, sample


class Scene:
    """Ranks of a job on two nodes; its clock goes on by a second with each tick, in which they communicate for a part of the time."""

    def __init__(self, *, world_size: int = 4, share: float = 0.5, unknown: str = "") -> None:
        self.aggregate, self.lock, self.now_ns = JobTable(), threading.RLock(), NOW
        self.ranks = [rank(self.aggregate, number, size=world_size) for number in range(2)]
        for book in self.ranks:
            book.pid = 1000 + book.rank
        self.share, self.unknown, self.asked = share, unknown, list[tuple[float, list[int]]]()
        self.connections = Connections(self.aggregate, self.lock, listed=self._listed, now_ns=lambda: self.now_ns)

    def _listed(self, pids: Iterable[int]) -> dict[int, Sockets | Unknown]:
        assert free(self.lock)
        known, passed_us = list(pids), (self.now_ns - NOW) // 1000
        self.asked.append((passed_us / 1e6, known))
        later = IDLE._replace(busy_us=passed_us // 2, bytes_acked=passed_us)
        return {pid: Unknown(self.unknown) if self.unknown else sample(later) for pid in known}

    def go_on(self, seconds: int) -> None:
        for _ in range(seconds):
            self.now_ns += S
            for book in self.ranks:
                book.steps.periods.add(S, int(self.share * S))
            self.connections.tick()

    def traffic(self, book: RankTotals) -> RankTraffic | None:
        return view("job", book, self.now_ns).traffic


def test_while_communication_takes_much() -> None:
    """Ranks that communicate much are looked at every other second without the lock; what they send is known from the third look on."""
    scene = Scene()
    scene.go_on(5)
    assert scene.asked == [(2, [1000, 1001]), (4, [1000, 1001])]
    assert scene.traffic(scene.ranks[0]) is None
    scene.go_on(15)
    found = scene.traffic(scene.ranks[0])
    assert found is not None
    assert [(each.local, each.remote, each.device, each.busy, each.seconds) for each in found.peers] == [
        (*PLACE, "eth0", 0.5, 10.0)
    ]
    scene.share = 0.0
    scene.go_on(20)
    asked = len(scene.asked)
    scene.go_on(20)
    assert (len(scene.asked), scene.traffic(scene.ranks[0])) == (asked, None)


def test_nothing_otherwise() -> None:
    """No process is looked at while communication takes little, or in a job whose ranks are all on this node, or that has ended."""
    for scene in (Scene(share=0.15), Scene(world_size=2)):
        scene.go_on(20)
        assert scene.asked == []
    scene = Scene()
    for book in scene.ranks:
        lost(book)
    scene.go_on(20)
    assert scene.asked == []


def test_pods_of_one_node() -> None:
    """Ranks of one node in two networks, as pods have, are looked at; what was known of them when they end is kept."""
    scene = Scene(world_size=2)
    for number, book in enumerate(scene.ranks):
        book.identity = {**book.identity, "network_namespace": 4_026_531_840 + number}
    scene.go_on(20)
    found = scene.traffic(scene.ranks[0])
    assert found is not None
    for book in scene.ranks:
        lost(book)
    scene.go_on(20)
    assert scene.traffic(scene.ranks[0]) == found


def test_long_operation() -> None:
    """A rank that is inside one long transfer is looked at before it ends."""
    scene = Scene(share=0.0)
    scene.ranks[0].in_flight = rank(JobTable(), 0, inside_s=2.0).in_flight
    scene.go_on(3)
    assert {tuple(pids) for _, pids in scene.asked} == {(1000,)}


def test_unknown() -> None:
    """Why connections are not known is known, and they are not taken for idle."""
    scene = Scene(unknown="another network namespace")
    scene.go_on(3)
    assert scene.traffic(scene.ranks[0]) == RankTraffic(unknown="another network namespace")
