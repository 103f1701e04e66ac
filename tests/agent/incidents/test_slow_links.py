"""One slow link is named from the TCP connections of a job's ranks; what is slow for another reason, or on all links, is not."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from commwatch_agent.analysis.waits.links import links
from commwatch_agent.incidents.conclude import conclude
from commwatch_agent.incidents.evidence import Evidence, WholeJob
from commwatch_agent.incidents.incident import Condition, Incident
from commwatch_agent.incidents.lifecycle import Around
from commwatch_agent.incidents.slow_links import slow_link, slow_links
from commwatch_agent.model.views import RankTraffic, RankView
from commwatch_collectors.node.tcp_peers import TcpPeer
from tests.agent.incidents.test_job_rules import HANG, JOBS, NOW, TABLE, rank

#: Recorded of rings on links of 200 Mbit/s, one of them slower: by rank, MB/s over all of the time, and the part of it in which it was busy.
TENTH_OF_THREE = ((2.6, 0.15), (2.35, 0.99), (2.35, 0.15))
FIFTH_OF_FOUR = ((4.6, 0.20), (4.65, 0.98), (4.6, 0.45), (4.7, 0.20))
LATE_RANK, WITH_ITS_LATE_RANK = (
    ((8.2, 0.18), (8.0, 0.18), (8.2, 0.85), (8.2, 0.44)),
    ((3.0, 0.12), (3.0, 0.64), (3.0, 0.3), (3.0, 0.12)),
)
#: What one node receives is held to a tenth; and both directions of one node, of four and of three.
RECEIVED = ((2.35, 0.09), (2.33, 0.20), (2.31, 0.98), (2.30, 0.13))
BOTH, BOTH_OF_THREE = ((2.1, 0.1), (2.1, 0.13), (2.1, 0.99), (2.1, 0.96)), ((4.0, 0.2), (3.9, 0.97), (4.0, 0.95))
#: All at 100 Mbit/s; and as fast as they can, with all_reduces of 4 MiB, of 80 kB, and with a rank that is late by 100 ms.
ALIKE = ((10.8, 0.95), (10.7, 0.93), (10.8, 0.93), (10.9, 0.93))
HEALTHY = ((128, 0.16), (134, 0.14), (134, 0.14), (133, 0.14))
SMALL, LATE = ((3.3, 0.06), (3.3, 0.06), (3.3, 0.05), (3.3, 0.08)), ((13, 0.02), (13, 0.02), (13, 0.02), (13, 0.05))


def peer(number: int, size: int, mb_s: float, busy: float) -> TcpPeer:
    """What a rank sends to the one before it, as Gloo's ring does."""
    return TcpPeer(
        f"10.0.0.{number}",
        f"10.0.0.{(number - 1) % size}",
        "eth0",
        10.0,
        int(mb_s * 1e7),
        busy,
        0.0,
        busy,
        0.0001,
        0.005,
        0.0002,
    )


def ring(*sent: tuple[float, float], **shares: Any) -> list[RankView]:
    """The ranks of a job, one a node."""
    known: dict[str, Any] = {"comm": 0.95, "exposed": 0.9, "step_s": 1.4, **shares}
    return [
        rank(number, host=f"node{number}", traffic=RankTraffic([peer(number, len(sent), *each)], **known))
        for number, each in enumerate(sent)
    ]


def changed(views: list[RankView], number: int, **about: object) -> list[RankView]:
    """The same, where the connections of one rank differ."""
    traffic = views[number].traffic
    assert traffic is not None
    peers = [replace(each, **about) for each in traffic.peers]  # type: ignore[arg-type]
    return [*views[:number], replace(views[number], traffic=replace(traffic, peers=peers)), *views[number + 1 :]]


def found(views: list[RankView]) -> list[Condition]:
    return list(slow_links(Evidence(NOW, JOBS, ranks=views)))


@pytest.mark.parametrize(
    ("sent", "slow"),
    [(TENTH_OF_THREE, 1), (FIFTH_OF_FOUR, 1), (RECEIVED, 2), (LATE_RANK, 2), (WITH_ITS_LATE_RANK, 1)],
)
def test_named(sent: tuple[tuple[float, float], ...], slow: int) -> None:
    """The sender that is busy while the others wait for data is before the slow link, also if a rank is late at the same time."""
    (one,) = found(ring(*sent))
    assert (one.kind, one.subject) == ("slow_link", (f"10.0.0.{slow}", f"10.0.0.{slow - 1}"))
    assert (one.ranks, one.waiting) == ((), tuple(range(len(sent))))
    assert one.nodes == (f"node{slow - 1}", f"node{slow}")


def test_node() -> None:
    """A node that sends and receives slowly is named itself, and not one of its links, also among three."""
    (one,) = found(ring(*BOTH))
    assert (one.subject, one.nodes) == (("10.0.0.2",), ("node2",))
    assert one.says.startswith("sending and receiving on node2 (10.0.0.2) over eth0 is slow: it sends 2.12 MB/s while")
    (one,) = found(ring(*BOTH_OF_THREE))
    assert one.subject == ("10.0.0.1",)


def test_node_among_all() -> None:
    """If all exchange data with all, a node from which all links are slow sends slowly; two slow links with no node in common name nothing."""
    views = [
        rank(
            number,
            host=f"node{number}",
            traffic=RankTraffic(
                [
                    replace(peer(number, 4, 1.5, 0.9 if number == 2 else 0.1), remote=f"10.0.0.{to}")
                    for to in range(4)
                    if to != number
                ],
                comm=0.9,
            ),
        )
        for number in range(4)
    ]
    traffic = views[2].traffic
    assert traffic is not None
    unevenly = [
        replace(each, sent_bytes=int(each.sent_bytes * part))
        for each, part in zip(traffic.peers, (0.7, 1.0, 1.2), strict=True)
    ]
    (one,) = found([*views[:2], replace(views[2], traffic=replace(traffic, peers=unevenly)), views[3]])
    assert one.subject == ("10.0.0.2",)
    (one,) = found(views)
    assert (one.subject, one.says.partition(" is slow")[0]) == (("10.0.0.2",), "sending on node2 (10.0.0.2) over eth0")
    assert "6 others send 15 MB/s (15 MB/s to 15 MB/s)" in one.says
    assert found(ring((2.1, 0.1), (2.1, 0.95), (2.1, 0.1), (2.1, 0.95))) == []


def test_delay() -> None:
    """A node whose links wait for acknowledgements that take far longer than those of others is named, although all data is sent at once."""
    sent = [(3.5, 0.17), (3.9, 0.93), (3.8, 0.94), (3.7, 0.2)]
    views = ring(*sent)
    for number, (unsent, trip_s) in enumerate([(0.17, 15e-6), (0.17, 0.098), (0.3, 0.1), (0.0, 7e-6)]):
        views = changed(views, number, unsent=unsent, min_rtt_s=trip_s)
    (one,) = found(views)
    assert (one.subject, one.cause) == (("10.0.0.1",), "delay")
    assert one.says.startswith("sending and receiving on node1 (10.0.0.1) over eth0 is slow and has a long delay: ")
    for number in range(4):
        views = changed(views, number, min_rtt_s=0.1)
    assert found(views) == []


def test_loss() -> None:
    """A link that loses data and waits for what is sent again is named, although all data has been sent once."""
    views = ring((4.1, 0.28), (3.9, 0.28), (4.2, 0.9), (4.1, 0.32))
    for number in range(4):
        views = changed(views, number, unsent=0.2)
    assert found(views) == []
    (one,) = found(changed(views, 2, retransmitted=0.0096))
    assert (one.subject, one.cause) == (("10.0.0.2", "10.0.0.1"), "loss")


def test_little_loss() -> None:
    """A link that loses one packet of a hundred is named although it has nine tenths of the speed of the others, which lose none, if ranks wait for it.

    Not if its data takes longer than that of others: then the queue before it overflows.
    """
    views = ring((14.3, 0.69), (14.3, 0.69), (14.0, 0.77), (14.4, 0.7))
    for number in range(4):
        views = changed(views, number, rtt_s=0.0066, retransmitted=0.0)
    assert found(views) == []
    (one,) = found(changed(views, 2, retransmitted=0.011, rtt_s=0.0052))
    assert (one.subject, one.cause) == (("10.0.0.2", "10.0.0.1"), "loss")
    assert found(changed(views, 2, retransmitted=0.011, rtt_s=0.02)) == []
    assert found(changed(views, 2, retransmitted=0.004, rtt_s=0.0052)) == []
    quick = changed(ring((14.3, 0.32), (14.3, 0.32), (14.0, 0.35), (14.4, 0.32)), 2, retransmitted=0.011)
    assert found(quick) == []


def test_queue() -> None:
    """A link whose queue overflows is slow and does not lose data for another reason: as much as before it was lost is on its way."""
    for again, trip_s, cause in (
        (0.097, 0.001, "loss"),
        (0.1, 0.0004, "loss"),
        (0.07, 0.009, ""),
        (0.11, 0.006, ""),
        (0.02, 0.0094, ""),
    ):
        (one,) = found(changed(ring((2.26, 0.1), (2.33, 0.98), (2.3, 0.12)), 1, retransmitted=again, rtt_s=trip_s))
        assert one.cause == cause


def test_scattered() -> None:
    """Speeds scatter by factors: among links of 8 to 23 MB/s, one of 1 MB/s is slow, and one of 6 MB/s is not."""
    speeds = (16.5, 1.0, 11.4, 8.0, 23.1, 11.7, 21.5, 10.0)
    assert [each.subject[0] for each in found(ring(*((0.7, 0.7 / speed) for speed in speeds)))] == ["10.0.0.1"]
    assert found(ring(*((3.0, 3.0 / speed) for speed in (16.5, 6.0, *speeds[2:])))) == []


@pytest.mark.parametrize("sent", [ALIKE, HEALTHY, SMALL, LATE])
def test_nothing(sent: tuple[tuple[float, float], ...]) -> None:
    """No link is named where all are alike, however slow, or where links are idle most of the time."""
    assert found(ring(*sent)) == []


def test_sentence() -> None:
    """The sentence names both ends and the device, and has the speeds, what is sent again, the round trip and the cost in a step."""
    (one,) = found(changed(ring(*FIFTH_OF_FOUR), 1, rtt_s=0.05))
    assert one.says == (
        "the link from node1 (10.0.0.1) to node0 (10.0.0.0) over eth0 is slow: it sends 4.74 MB/s while it has data to send, 98% of the time; "
        "the link from 10.0.0.3 to 10.0.0.2 sends 23.5 MB/s; 0.01% of its data is sent again (0.01%); "
        "round trip 50 ms (5 ms); ranks wait for it 78% of the time, 1.09 s of a step of 1.40 s"
    )
    assert one.share == pytest.approx(0.98 * (1 - 4.745 / 23.5), rel=0.01)
    assert one.idle_ranks == pytest.approx(4 * (one.share or 0))
    assert one.began_at == NOW - 10
    assert [(item.source, item.data) for item in one.evidence] == [
        ("tcp", {"from": "10.0.0.1", "to": "10.0.0.0", "node": "", "device": "eth0", "behind": []})
    ]


def test_cost_is_what_compute_waits_for() -> None:
    """What is hidden behind compute is not lost: a slow link costs no more than the exposed share, else the communication share; little is nothing."""
    shares = [{"exposed": 0.3}, {"exposed": None, "comm": 0.5}, {"exposed": 0.05}]
    assert [[each.share for each in found(ring(*FIFTH_OF_FOUR, **of))] for of in shares] == [[0.3], [0.5], []]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("about", "cause", "words"),
    [
        ({"retransmitted": 0.012}, "loss", "is slow and loses data: "),
        ({"min_rtt_s": 0.02}, "delay", "is slow and has a long delay: "),
        ({"min_rtt_s": 0.0009, "retransmitted": 0.004}, "", "is slow: "),
        ({"min_rtt_s": None, "retransmitted": None, "rtt_s": None}, "", "is slow: "),
    ],
)
def test_loss_and_delay(about: dict[str, float | None], cause: str, words: str) -> None:
    """Loss and delay are named as such; the queue before a slow link is neither, and what the kernel does not say is left out."""
    (one,) = found(changed(ring(*FIFTH_OF_FOUR), 1, **about))
    assert one.cause == cause
    assert f"over eth0 {words}" in one.says
    assert ("sent again" in one.says, "round trip" in one.says) == (
        about.get("retransmitted", 0) is not None,
        about.get("rtt_s", 0) is not None,
    )


def test_cost_beside_a_late_rank() -> None:
    """What a link sends while ranks wait for a late one costs nothing: both costs together are at most what the ranks wait."""
    late = replace(HANG, kind="straggler", cause="late", cost_share=0.28)
    views = ring((4.4, 0.3), (4.45, 0.94), (4.4, 0.3), (4.4, 0.2))
    (one,) = slow_links(Evidence(NOW, JOBS, [late], ranks=views))
    assert one.share == pytest.approx(0.72 * (1 - 4.734 / 22), rel=0.01)
    (one,) = slow_links(
        Evidence(NOW, JOBS, [late], ranks=ring((4.4, 0.3), (4.45, 0.94), (4.4, 0.3), (4.4, 0.2), exposed=0.6))
    )
    assert one.share == pytest.approx(0.32)
    (one,) = slow_links(Evidence(NOW, JOBS, [replace(late, job_id="other")], ranks=views))
    assert one.share == pytest.approx(0.94 * (1 - 4.734 / 22), rel=0.01)


def test_cost_of_a_node() -> None:
    """The links from a node may be busy in turn: all of them together take the time."""
    views = ring((1.2, 0.14), (1.24, 0.12), (1.24, 0.6), (1.23, 0.2))
    back = [
        replace(peer(number, 4, 1.06, busy), remote=f"10.0.0.{(number + 1) % 4}")
        for number, busy in enumerate((0.16, 0.2, 0.5, 0.12))
    ]
    both = [
        replace(view, traffic=replace(view.traffic, peers=[*view.traffic.peers, back[number]]))
        for number, view in enumerate(views)
        if view.traffic
    ]
    (one,) = found(both)
    assert one.subject == ("10.0.0.2",)
    assert one.share is not None
    assert 0.7 < one.share < 0.9


def test_slow_receiver() -> None:
    """A receiver that reads slowly is a slow rank, and no slow link; neither is the link to the sender that waits for it."""
    assert found(changed(ring(*FIFTH_OF_FOUR), 1, window_limited=0.7)) == []


def test_too_few_to_compare() -> None:
    """With two nodes, or where the others send little, it is not known what a link should do."""
    assert found(ring((2.3, 0.99), (2.4, 0.15))) == []
    few = changed(ring(*TENTH_OF_THREE), 0, sent_bytes=100_000)
    assert found(few) == []


def test_waits_for_acknowledgements() -> None:
    """A link that has sent all and waits for acknowledgements, which the receiver may delay, is not slow; nor is one that sends hardly anything."""
    assert found(changed(ring(*FIFTH_OF_FOUR), 1, unsent=0.3)) == []
    assert found(changed(ring((6.4, 0.28), (6.4, 0.28), (6.4, 0.55), (6.3, 0.43)), 2, unsent=0.2)) != []
    views = ring(*FIFTH_OF_FOUR)
    little = replace(peer(1, 4, 0.0017, 0.43), remote="10.0.0.2")
    assert views[1].traffic is not None
    also = replace(views[1], traffic=replace(views[1].traffic, peers=[*views[1].traffic.peers, little]))
    assert [each.subject for each in found([views[0], also, *views[2:]])] == [("10.0.0.1", "10.0.0.0")]
    assert found([views[0], replace(also, traffic=RankTraffic([little])), *views[2:]]) == []


def test_other_addresses() -> None:
    """Connections to addresses of no rank, such as a file system, are no links of the job; neither are those of ranks that have ended.

    Without them nothing is named: the link to a sender is slow, too, if what that one sends is.
    """
    views = ring(*FIFTH_OF_FOUR)
    assert len(links(views)) == 4
    assert found(changed(views, 1, remote="10.9.9.9")) == []
    assert found([views[0], replace(views[1], state="gone"), *views[2:]]) == []


def test_several_ranks_on_a_node() -> None:
    """Connections of several ranks between two nodes are one link: as busy as the busiest, and with all that they send."""
    views = ring(*FIFTH_OF_FOUR)
    both = [*views, replace(views[1], rank=4)]
    (of_both,) = (link for link in links(both) if link.local == "10.0.0.1")
    assert (of_both.busy, of_both.sent) == (0.98, 2 * 4.65e6)
    named = slow_link(links(both))
    assert named is not None
    assert named.link == of_both


def incidents(views: list[RankView], *others: Condition) -> dict[str, Incident]:
    """The incidents after half a minute, by kind."""
    known: list[Incident] = []
    for second in range(30):
        conditions = [*found(views), *others]
        evidence = Evidence(NOW + second, JOBS, whole={"train": WholeJob(conditions, ended=False)})
        known = conclude(evidence, known, TABLE, Around(NOW + second))
    return {each.kind: each for each in known}


def late(number: int, share: float = 0.3) -> Condition:
    return Condition(
        "straggler", (str(number),), "late", NOW, "train", "key", ranks=(number,), share=share, value=share
    )


def test_opens() -> None:
    """A slow link that is seen for some seconds is an incident, and a warning."""
    one = incidents(ring(*FIFTH_OF_FOUR))["slow_link"]
    assert (one.state, one.severity, one.ranks) == ("open", "warning", ())
    assert one.cost_rank_s == pytest.approx(4 * (one.share or 0) * 39, rel=0.01)


@pytest.mark.parametrize(("exposed", "explained"), [(0.9, True), (0.5, True), (0.4, False)])
def test_share_of_communication(exposed: float, explained: bool) -> None:
    """Operations are slow because of a slow link, if that is at least half of what they cost."""
    slow = Condition("bandwidth_low", ("g", "all_reduce"), "slow", NOW, "train", "key", share=0.9, value=0.2)
    by_kind = incidents(ring(*FIFTH_OF_FOUR, exposed=exposed), slow)
    cause = by_kind["slow_link"].id if explained else None
    assert by_kind["bandwidth_low"].consequence_of == cause


def test_late_rank_beside_it() -> None:
    """A rank that is late by itself is named beside a slow link, wherever it is."""
    for number in range(4):
        by_kind = incidents(ring(*FIFTH_OF_FOUR), late(number))
        assert (by_kind["straggler"].consequence_of, by_kind["slow_link"].consequence_of) == (None, None)


def test_last_rank_of_a_slow_link() -> None:
    """On GPUs, the rank behind a slow link leaves operations last, and so seems late: that is the link's fault; another rank is late."""
    views = [replace(view, gpu_timing="events") for view in ring(*FIFTH_OF_FOUR)]
    by_number = {number: incidents(views, late(number)) for number in range(4)}
    explained = {number: of["straggler"].consequence_of for number, of in by_number.items()}
    assert explained == {0: by_number[0]["slow_link"].id, 1: None, 2: None, 3: None}
