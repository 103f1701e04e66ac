"""Conditions on links and operations: only where they matter, by node, and each operation once."""

from __future__ import annotations

import pytest

from commwatch_agent.incidents.link_rules import bandwidth_low, idle_links, link_saturated
from commwatch_agent.incidents.share_rules import comm_bound
from tests.agent.incidents.metric_series import at_end, variants
from tests.alerts.cases import OP, Series, counter, gauge, nic, rank_info, series, share

TWO_NODES = ("a:9477", "b:9477")


def took(part: float, **more: str) -> Series:
    """An operation that takes this part of the time."""
    return counter("collective_seconds_total", 15 * part, **{**OP, "rank": "0", **more})


def efficiency(value: float, reference: str = "bench", **more: str) -> Series:
    """The efficiency of an operation."""
    return gauge("collective_efficiency_ratio", value, **{**OP, "reference": reference, **more})


def job_info(world_size: int, **more: str) -> Series:
    """A job of so many ranks."""
    return gauge("job_info", 1, **{"job_id": "j", "world_size": str(world_size), "restart": "0", **more})


def test_link_saturated() -> None:
    """The busier direction counts, in bytes per second of the link's speed."""
    (found,) = at_end(link_saturated, nic(950), rank_info())
    assert (found.subject, found.nodes, found.job_id) == (("eth0",), ("a",), "")
    assert [found.value, found.numbers["speed"]] == pytest.approx([0.95, 1000])
    assert found.says == "network device eth0 uses 95% of its speed, 1 kB/s"
    assert at_end(link_saturated, nic(900), rank_info()) == []


def test_link_of_a_node_without_ranks() -> None:
    """Of two nodes with equal traffic, only the one with ranks has a saturated link."""
    both = nic(950) | nic(950, instance="b:9477")
    found = at_end(link_saturated, both, rank_info(instance="b:9477"))
    assert [(one.nodes, one.labels["instance"]) for one in found] == [(("b",), "b:9477")]
    assert at_end(link_saturated, both) == []


def test_link_whose_speed_is_not_known() -> None:
    """Without a speed, or with a speed of 0, nothing is known of the utilization."""
    moves = counter("network_bytes_total", 1e9, device="eth0", direction="transmit")
    for speed in ({}, gauge("network_speed_bytes_per_second", 0, device="eth0")):
        assert at_end(link_saturated, moves, speed, rank_info()) == []


def test_link_whose_counter_begins_again() -> None:
    """A driver that counts from 0 again makes neither a negative rate nor a huge one."""
    speed = gauge("network_speed_bytes_per_second", 1000, device="eth0")
    reset = f"{10**12}+14250x70 0+14250x17"
    moves = series("commwatch_network_bytes_total", reset, device="eth0", direction="receive")
    (found,) = at_end(link_saturated, moves, speed, rank_info())
    assert 0.9 < found.value <= 0.95


def test_idle_links() -> None:
    """A node with a job on several nodes that is bound, and with links that are nearly idle, is found once, for its busiest device."""
    devices = nic(20) | nic(50, device="eth1")
    (found,) = at_end(idle_links, devices, share(0.4), rank_info(), job_info(16))
    assert (found.variant, found.job_id, found.nodes) == ("idle_links", "", ("a",))
    assert found.value == pytest.approx(0.05)
    assert "takes 40%" in found.says
    assert "uses 5% of its speed" in found.says


def test_idle_links_of_two_jobs() -> None:
    """Of two jobs on a node, the one that communicates most is in the sentence."""
    other = gauge("comm_share_ratio", 0.7, job_id="k", rank="0") | rank_info(job_id="k") | job_info(16, job_id="k")
    (found,) = at_end(idle_links, nic(20), share(0.4), rank_info(), job_info(16), other)
    assert "takes 70%" in found.says


def test_idle_links_beside_the_job() -> None:
    """That links are idle is a condition beside that of the job, with a key of its own."""
    found = at_end(comm_bound, nic(20), share(0.4), rank_info(), job_info(16))
    assert variants(found) == ["", "idle_links"]
    assert len({one.key for one in found}) == 2


def test_idle_links_of_one_node() -> None:
    """Links between nodes do not matter to a job whose ranks are all on this node, nor those of a job on another node."""
    assert at_end(idle_links, nic(20), share(0.4), rank_info() | rank_info(rank="1"), job_info(2)) == []
    elsewhere = {"instance": "b:9477"}
    bound = gauge("comm_share_ratio", 0.4, job_id="j", rank="0", **elsewhere)
    assert at_end(idle_links, nic(20), bound, rank_info(**elsewhere), job_info(16, **elsewhere)) == []
    assert at_end(idle_links, share(0.4), rank_info(), job_info(16)) == []


def test_slow_operation() -> None:
    """An operation below its reference that takes much time is found, with what it takes longer as its share."""
    (found,) = at_end(bandwidth_low, took(0.4), efficiency(0.25))
    assert (found.job_id, found.group, found.op, found.subject) == ("j", "dp", "all_reduce", ("dp", "all_reduce"))
    assert (found.variant, found.value) == ("reference", 0.25)
    assert found.share == pytest.approx(0.4 * 0.75)
    assert dict(found.labels) == {"instance": "a:9477", **OP, "reference": "bench"}
    assert found.says == (
        "all_reduce of group dp runs at 25% of the speed expected by its reference (bench), and takes 40% of the time"
    )


@pytest.mark.parametrize(("value", "part", "number"), [(0.5, 0.4, 0), (0.499, 0.4, 1), (0.1, 0.05, 0), (0.1, 0.051, 1)])
def test_slow_operation_at_the_thresholds(value: float, part: float, number: int) -> None:
    """An operation must be below the threshold of its speed, and above that of its time."""
    for reference in ("nccl_tests", "own_best"):
        assert len(at_end(bandwidth_low, took(part), efficiency(value, reference))) == number


def test_thresholds_of_the_references() -> None:
    """A link's reference and the job's own best have a threshold each, which may be above 1."""
    both = efficiency(0.9) | efficiency(0.9, "own_best")
    assert variants(at_end(bandwidth_low, took(0.4), both, efficiency=0.95)) == ["reference"]
    (found,) = at_end(bandwidth_low, took(0.4), efficiency(1.2, "own_best"), efficiency_own_best=2)
    assert (found.variant, found.share) == ("own_best", 0)


def test_one_incident_an_operation() -> None:
    """All that is slow about an operation is one incident; of several references of a link, the one that it misses most."""
    slow = efficiency(0.4, "catalogue") | efficiency(0.2) | efficiency(0.3, "own_best")
    moved = counter("collective_bus_bytes_total", 1e6, **OP, rank="0")
    found = at_end(bandwidth_low, took(0.4), slow, moved)
    assert [(one.variant, one.labels.get("reference")) for one in sorted(found, key=lambda one: one.variant)] == [
        ("bus", None),
        ("own_best", "own_best"),
        ("reference", "bench"),
    ]
    assert len({one.key for one in found}) == 1


def test_operations_of_two_jobs() -> None:
    """Operations of another job, group or kind with equal figures are others, and the time of one does not count for another."""
    others = [{"job_id": "k"}, {"group": "tp"}, {"op": "all_gather"}]
    assert at_end(bandwidth_low, took(0.4), *(efficiency(0.1, **other) for other in others)) == []
    found = at_end(bandwidth_low, *(took(0.4, **other) | efficiency(0.1, **other) for other in others))
    assert len({one.key for one in found}) == 3


def test_operations_of_two_nodes() -> None:
    """Each node has its own efficiency and its own share of time."""
    times = took(0.4, instance=TWO_NODES[0]) | took(0.01, instance=TWO_NODES[1])
    values = efficiency(0.1, instance=TWO_NODES[0]) | efficiency(0.1, instance=TWO_NODES[1])
    assert [one.nodes for one in at_end(bandwidth_low, times, values)] == [("a",)]


def test_bus_bandwidth() -> None:
    """Bus bandwidth is that of all ranks; without a floor in the settings it is not checked, and without bytes not known."""
    ranks = took(0.4) | took(0.2, rank="1")
    moved = counter("collective_bus_bytes_total", 8e8, **OP, rank="0")
    moved |= counter("collective_bus_bytes_total", 1e8, **OP, rank="1")
    (found,) = at_end(bandwidth_low, ranks, moved, bus_bandwidth_floor=4e8)
    assert [found.value, found.share] == pytest.approx([1e8, 0.4 * 0.75])
    assert (found.variant, dict(found.labels), found.nodes) == ("bus", OP, ())
    assert found.says == "all_reduce of group dp has a bus bandwidth of 100 MB/s; the floor is 400 MB/s"
    assert at_end(bandwidth_low, ranks, moved, bus_bandwidth_floor=0) == []
    assert at_end(bandwidth_low, ranks) == []


def test_bus_bandwidth_of_two_nodes() -> None:
    """Bus bandwidth is that of the ranks of all nodes in sight, and the longest share of time counts."""
    times = took(0.01, instance=TWO_NODES[0]) | took(0.4, instance=TWO_NODES[1], rank="1")
    moved = counter("collective_bus_bytes_total", 15 * 0.41 * 1e6, **OP, rank="1")
    (found,) = at_end(bandwidth_low, times, moved)
    assert [found.value, found.share] == pytest.approx([1e6, 0.4], rel=1e-2)


def test_operation_that_ended() -> None:
    """An operation that is no longer counted has no condition, although its figures are still in the window."""
    ended = series("commwatch_collective_seconds_total", "0+6x80 stale", **OP, rank="0")
    assert at_end(bandwidth_low, ended, efficiency(0.1)) == []
