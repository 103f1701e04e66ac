"""What collectives should have sent to other nodes, worked by hand, and which device carries it."""

from __future__ import annotations

from typing import Any

import pytest

from commwatch_agent.analysis.traffic import NOT_COUNTED, Sample, carriers, parts, traffic
from commwatch_agent.ingest.batches import ingest_records
from commwatch_agent.ingest.jobs import JobTable
from commwatch_agent.model.host_views import TrafficView
from tests.helpers import MS, group_entry, operation, packed

S = 1000 * MS
MB = 1_000_000


def node(ranks: tuple[int, ...], members: tuple[int, ...], *made: tuple[int, ...], **more: Any) -> JobTable:
    """A node with some ranks of a job, each of which has done the same in a group of these members."""
    aggregate = JobTable()
    for rank in ranks:
        add(aggregate, rank, members, *made, **more)
    return aggregate


def add(aggregate: JobTable, rank: int, members: tuple[int, ...], *made: tuple[int, ...], **more: Any) -> None:
    """One more rank."""
    about = {
        "job": "train",
        "restart": 0,
        "rank": rank,
        "world_size": len(members),
        "wall_offset_ns": 0,
        "started_ns": 0,
    }
    book = aggregate.open(f"ring-{rank}-{more.get('restart', 0)}", {**about, "restart": more.pop("restart", 0)})
    book.learn([{**group_entry(0, members, "data"), **more}])
    ingest_records(book, packed(*made))


def sent(aggregate: JobTable) -> float:
    """What all ranks of a node should have sent to others."""
    return sum(part.sent_since(None, part) for part in parts(aggregate.jobs.values()).values())


def one(op: str = "all_reduce", size: int = MB, **more: Any) -> tuple[int, ...]:
    return operation(op, start_ns=0, end_ns=MS, size=size, **more)


def test_one_rank_a_node() -> None:
    """Of two ranks on two nodes each sends the bus bytes: 2 (n-1)/n S of an all_reduce, (n-1)/n S of the others."""
    assert sent(node((0,), (0, 1), one())) == MB
    assert sent(node((0,), (0, 1), one("all_gather"), one("reduce_scatter", seq=1))) == MB
    assert sent(node((0,), (0, 1, 2, 3), one())) == 1.5 * MB


def test_reduce_scatter_of_gloo() -> None:
    """Gloo reduces everything everywhere and keeps a part: twice the bytes. NCCL does not."""
    for backend, factor in (("gloo", 2), ("nccl", 1), ("cpu:gloo,cuda:nccl", 1), (None, 1)):
        assert sent(node((0,), (0, 1), one("reduce_scatter"), backend=backend)) == factor * MB / 2


def test_one_edge_leaves_the_node() -> None:
    """A ring through all four ranks of a node leaves it once: the node sends what one rank sends, not four times that."""
    members = tuple(range(8))
    assert sent(node((0, 1, 2, 3), members, one())) == pytest.approx(2 * 7 / 8 * MB)


def test_ranks_that_take_turns() -> None:
    """Gloo keeps the order of the group: where every neighbour is on another node, all edges leave. NCCL finds its own way."""
    members = (0, 1, 2, 3)
    assert sent(node((0, 2), members, one(), backend="gloo")) == pytest.approx(2 * 1.5 * MB)
    assert sent(node((0, 2), members, one(), backend="nccl")) == pytest.approx(1.5 * MB)
    assert sent(node((0, 2), members, one(), backend="cpu:gloo,cuda:nccl")) == pytest.approx(1.5 * MB)


def test_all_to_all_goes_to_every_rank_elsewhere() -> None:
    """Of S = 1 MB each of four ranks keeps 1/8 and gives 3/8 to its own node: half a MB leaves per rank."""
    assert sent(node((0, 1, 2, 3), tuple(range(8)), one("all_to_all"))) == pytest.approx(4 * MB / 2)


def test_messages_to_ranks_elsewhere() -> None:
    """A message counts where its receiver is on another node, and where it is sent."""
    made = (one("send", peer=2), one("send", peer=1), one("recv", peer=2))
    assert sent(node((0, 1), (0, 1, 2, 3), made[0], made[1])) == 2 * MB  # of both ranks one to rank 2
    assert sent(node((0,), (0, 1), made[2])) == 0


def test_untimed_operations_count() -> None:
    """Bytes are sent whether the duration is known or not: on CUDA it is not, by default."""
    from commwatch.wire import events as ev

    assert sent(node((0,), (0, 1), one(flags=ev.UNTIMED, timing=ev.BY_NONE))) == MB


def test_a_ring_that_is_found_later() -> None:
    """Where a look finds one of a node's two ranks first, its bytes count by the edges that leave the node, as in later looks."""
    aggregate = node((2,), (0, 1, 2, 3), one(), backend="gloo")
    early = parts(aggregate.jobs.values())
    add(aggregate, 3, (0, 1, 2, 3), one(), backend="gloo")
    late = parts(aggregate.jobs.values())
    samples = [Sample(0, {}, {}), Sample(S, {}, early), Sample(2 * S, {}, late)]
    assert traffic(samples, 0, None, ()).expected_sent_bytes == pytest.approx(1.5 * MB)


def test_within_the_node() -> None:
    """Groups of which all ranks are here send nothing out, nor do those of unknown members."""
    assert parts(node((0, 1), (0, 1), one()).jobs.values()) == {}
    aggregate = JobTable()
    add(aggregate, 0, (0, 1), one(), ranks=None)
    assert parts(aggregate.jobs.values()) == {}


def test_rooted_operations_are_named() -> None:
    """What a broadcast sends depends on the place in its tree: it is named and not reckoned."""
    (part,) = parts(node((0,), (0, 1), one(), one("broadcast", seq=1)).jobs.values()).values()
    assert (part.sent_since(None, part), sorted(part.left_out)) == (MB, ["broadcast"])


def test_an_earlier_life_elsewhere() -> None:
    """A rank that ran here in an earlier life of the job is not here any more."""
    aggregate = node((0, 1), (0, 1), one())
    for totals in aggregate.rank_totals():
        totals.alive = False
    add(aggregate, 0, (0, 1), one(), restart=1, group_id="second")
    (part,) = [part for part in parts(aggregate.jobs.values()).values() if part.group.group_id == "second"]
    assert part.sent_since(None, part) == MB


def test_an_earlier_life_within_the_node() -> None:
    """While one rank of a new life is found and the other is not, the life before it still had all its ranks here: it sent nothing out."""
    aggregate = node((0, 1), (0, 1), one(), group_id="first")
    for totals in aggregate.rank_totals():
        totals.alive = False
    add(aggregate, 0, (0, 1), one(), restart=1, group_id="second")
    assert {part.group.group_id for part in parts(aggregate.jobs.values()).values()} == {"second"}


# -- windows ------------------------------------------------------------------------------------


def window(*looks: tuple[dict[str, int], int], watched_ns: int = -1, beside: tuple[str, ...] = ()) -> TrafficView:
    """Looks a second apart: what devices had sent, and how many all_reduces of 1 MB had been done between two nodes."""
    samples = [
        Sample(at * S, dict(devices), parts(node((0,), (0, 1), *(one(seq=n) for n in range(count))).jobs.values()))
        for at, (devices, count) in enumerate(looks)
    ]
    return traffic(samples, watched_ns, None, beside)


def test_one_device() -> None:
    """The difference over the window, by group and by device; the one device carries it."""
    view = window(({"eth0": 10 * MB}, 0), ({"eth0": 12 * MB}, 2), ({"eth0": 15 * MB}, 5))
    (group,) = view.groups
    assert (group.group, group.job_id, group.expected_sent_bytes) == ("data", "train", 5 * MB)
    assert (view.seconds, view.expected_sent_bytes, view.sent_bytes) == (2.0, 5 * MB, {"eth0": 5 * MB})
    assert (view.carriers, view.says) == (["eth0"], None)


def test_nobody_has_counted_it() -> None:
    """If no device has moved any bytes (another network namespace), the view gives that reason."""
    view = window(({"eth0": 0}, 0), ({"eth0": 100}, 5))
    assert view.carriers is None
    assert view.says == NOT_COUNTED


def test_nothing_to_carry() -> None:
    """Without collectives across nodes, or before the first sample, there is no statement on traffic, whatever devices do."""
    assert window(({"eth0": 0}, 0), ({"eth0": MB}, 0)).carriers is None
    view = traffic([], 0, None, ())
    assert (view.groups, view.sent_bytes, view.carriers) == ([], {}, None)


def test_the_other_rank_of_the_node_is_found_later() -> None:
    """A look between the rings of a node's two ranks takes one for elsewhere; once both are found, nothing was to be sent."""
    aggregate = node((0,), (0, 1), one())
    early = parts(aggregate.jobs.values())
    add(aggregate, 1, (0, 1), one())
    late = parts(aggregate.jobs.values())
    samples = [Sample(at * S, {"eth0": 0}, look) for at, look in enumerate(({}, early, late))]
    view = traffic(samples, 0, None, ())
    assert (view.groups, view.expected_sent_bytes, view.says) == ([], 0.0, None)


def test_before_the_agent_looked() -> None:
    """A rank that was there before the agent did much that no device was seen to send: that does not count."""
    looks = (({"eth0": 0}, 0), ({"eth0": 0}, 500))
    assert window(*looks, watched_ns=-1).expected_sent_bytes == 500 * MB
    first = Sample(0, {"eth0": 0}, {})
    last = Sample(S, {"eth0": 0}, parts(node((0,), (0, 1), *(one(seq=n) for n in range(500))).jobs.values()))
    assert traffic([first, last], 1, None, ()).expected_sent_bytes == 0
    assert traffic([first, last], 0, None, ()).expected_sent_bytes == 500 * MB


def test_devices_that_come_and_begin_again() -> None:
    """A device that was not there at first, and one whose counter began again, have no bytes; the job's stay."""
    view = window(({"eth0": 5 * MB}, 0), ({"eth0": 1 * MB, "eth1": 9 * MB}, 5))
    assert view.sent_bytes == {}
    assert view.expected_sent_bytes == 5 * MB


def test_what_counts_again_is_left_out() -> None:
    """A bond counts what its parts count: it is left out, and the sum is right."""
    looks = (({"eth0": 0, "bond0": 0}, 0), ({"eth0": 5 * MB, "bond0": 5 * MB}, 5))
    view = window(*looks, beside=("bond0",))
    assert (view.sent_bytes, view.carriers) == ({"eth0": 5 * MB}, ["eth0"])


def test_two_rails() -> None:
    """Two devices that together sent it carry it, the busier first; a third that did little does not."""
    for other in (1.0, 20.0):
        sent_ = {"mlx5_0:1": 60.0, "eth0": other, "mlx5_1:1": 45.0}
        assert carriers(sent_, {name: [] for name in sent_}, [100.0])[0] == ["mlx5_0:1", "mlx5_1:1"]


def test_port_and_its_network_device() -> None:
    """TCP is counted by the network device, RDMA by the port; where the device counts the port's bytes again, the port is named."""
    ports = {"ens1": "mlx5_0:1"}
    for sent_, carrying in (
        ({"mlx5_0:1": 0.0, "ens1": 103.0}, ["ens1"]),
        ({"mlx5_0:1": 103.0, "ens1": 1.0}, ["mlx5_0:1"]),
        ({"mlx5_0:1": 103.0, "ens1": 106.0}, ["mlx5_0:1"]),
    ):
        assert carriers(sent_, {name: [] for name in sent_}, [100.0], ports) == (carrying, None)


def test_beside_other_traffic() -> None:
    """Where another device sends far more (checkpoints), the one whose bytes rise and fall with the collectives carries them."""
    expected = [10.0, 0.0, 0.0] * 8 + [0.0] * 6 + [10.0, 10.0, 10.0] * 4
    series = {"eth1": [1.02 * each for each in expected], "eth0": [100.0] * len(expected)}
    sent_ = {name: sum(each) for name, each in series.items()}
    assert carriers(sent_, series, expected) == (["eth1"], None)
    # Steady traffic on both: nothing tells them apart, so it is not known.
    steady = [10.0] * 30
    flat = {"eth1": [10.2] * 30, "eth0": [100.0] * 30}
    found, says = carriers({"eth1": 306.0, "eth0": 3000.0}, flat, steady)
    assert found is None
    assert "match the expected bytes" in str(says)
    assert carriers({"eth1": 51.0, "eth0": 500.0}, {"eth1": [10.2] * 5, "eth0": [100.0] * 5}, [10.0] * 5)[0] is None
