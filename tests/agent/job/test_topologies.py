"""What NCCL's logs on several nodes show together."""

from __future__ import annotations

from dataclasses import replace

from commwatch_agent.job.topologies import merged_topology
from commwatch_agent.model.nccl_views import Topology
from commwatch_collectors.nccl.views import MOST_ENTRIES, ChoiceView, CommunicatorView, Finding, HostView, LinkView

COMM = CommunicatorView(
    comm_id="0x1", name="c", nranks=4, pooled=False, parent_comm_id=None, color=None, hosts={"a": [0, 1]}, nnodes=2, complete=False,
    in_sight="0-1", missing_ranks=[2, 3], coll_channels=2, nvls_channels=None, p2p_channels=2, transports={"NET/IB": 2, "P2P": 1},
    links=[LinkView(0, 2, "NET/IB", "0", True, 2)], rings={0: [0, 1, 2, 3]}, group_ids=["world"],
)  # fmt: skip
FINDING = Finding("slow", "warning", "title", "says", "means", "do", [])


def topology(host: str, *communicators: CommunicatorView, **more: object) -> Topology:
    """The topology in the logs of a node."""
    found = Topology(
        "job", "NCCL", ["2.28.3"], {"NCCL_DEBUG": "INFO"}, [HostView(host, 2, ["mlx5_0"], ["IB"], [])], list(communicators),
        [ChoiceView("AllReduce", "Ring", "LL", 0, 1024, 3)], [FINDING], [f"{host}.log"], 10, 1, 0,
    )  # fmt: skip
    return replace(found, **more)  # type: ignore[arg-type]


def test_one_or_none() -> None:
    """Without logs there is no topology; that of a single node with logs is unchanged."""
    assert merged_topology([]) is None
    assert merged_topology([None, None]) is None
    only = topology("a", COMM)
    assert merged_topology([None, only]) is only


def test_a_communicator_on_two_nodes() -> None:
    """Its ranks on all hosts are in one entry, with the sums of its connections, all links, and the ranks that no log shows."""
    there = replace(
        COMM, hosts={"b": [2]}, complete=True, in_sight="2", missing_ranks=[0, 1, 3], transports={"NET/IB": 4},
        links=[LinkView(2, 0, "NET/IB", "1", False, 2)], rings={0: [2, 3, 0, 1], 1: [3, 2, 1, 0]}, group_ids=["world", "dp"],
    )  # fmt: skip
    found = merged_topology([topology("a", COMM), topology("b", there)])
    assert found is not None
    assert found.communicators == [
        replace(
            COMM, hosts={"a": [0, 1], "b": [2]}, complete=True, in_sight="0-2", missing_ranks=[3], transports={"NET/IB": 6, "P2P": 1},
            links=[*COMM.links, *there.links], rings={0: [0, 1, 2, 3], 1: [3, 2, 1, 0]}, group_ids=["world", "dp"],
        )
    ]  # fmt: skip


def test_different_communicators() -> None:
    """Communicators with other ids or sizes, or, without ids, other names, are entries of their own; a host has its ranks once."""
    others = [
        replace(COMM, comm_id="0x2"),
        replace(COMM, nranks=8),
        replace(COMM, pooled=True),
        replace(COMM, comm_id=None, name="d"),
    ]
    found = merged_topology(
        [topology("a", COMM), topology("b", *others), topology("c", replace(COMM, comm_id=None, name="d"))]
    )
    assert found is not None
    assert [(each.comm_id, each.name, each.nranks, each.pooled) for each in found.communicators] == [
        ("0x1", "c", 4, False), ("0x2", "c", 4, False), ("0x1", "c", 8, False), ("0x1", "c", 4, True), (None, "d", 4, False),
    ]  # fmt: skip
    assert found.communicators[-1].hosts == {"a": [0, 1]}


def test_the_rest() -> None:
    """Versions are listed once, hosts, files and choices of all nodes, counts are sums, the first node's settings win, findings are left out."""
    there = topology(
        "b", versions=["2.29.1", "2.28.3"], env={"NCCL_DEBUG": "WARN", "NCCL_ALGO": "Ring"}, skipped_bytes=5
    )
    found = merged_topology([topology("a"), there])
    assert found is not None
    assert (found.versions, found.env) == (["2.28.3", "2.29.1"], {"NCCL_DEBUG": "INFO", "NCCL_ALGO": "Ring"})
    assert ([host.host for host in found.hosts], found.files) == (["a", "b"], ["a.log", "b.log"])
    assert (found.messages, found.unknown_messages, found.skipped_bytes) == (20, 2, 5)
    assert (len(found.choices), found.findings) == (2, [])


def test_limits() -> None:
    """Lists that grow with the ranks have at most so many entries."""
    links = [LinkView(0, at, "NET/IB", "0", True, 1) for at in range(300)]
    many = replace(COMM, nranks=2000, links=links)
    found = merged_topology(
        [
            topology("a", many, choices=300 * topology("a").choices),
            topology("b", many, choices=300 * topology("a").choices),
        ]
    )
    assert found is not None
    assert {len(found.communicators[0].links), len(found.communicators[0].missing_ranks), len(found.choices)} == {
        MOST_ENTRIES
    }
