"""Communicators: which ranks belong together, where they run, how they reach each other. Lines are made up."""

from __future__ import annotations

import pytest

from commwatch_collectors.nccl.account import Account
from commwatch_collectors.nccl.communicators import Communicator, Link, communicators
from commwatch_collectors.spans import spans


def _comms(*lines: str) -> list[Communicator]:
    account = Account()
    for number, line in enumerate(lines, start=1):
        account.add(line, "job.log", number)
    return communicators(account)


def _one(*lines: str) -> Communicator:
    (comm,) = _comms(*lines)
    return comm


def _said(host: str, pid: int, text: str, tid: int = 1) -> str:
    return f"{host}:{pid}:{tid} [0] NCCL INFO {text}"


def _init(host: str, pid: int, rank: int, nranks: int, end: str = "COMPLETE", **more: str) -> str:
    """An init of 2.23 and later; ``more``: ``comm``, ``comm_id``, ``split`` (from ``parent`` on)."""
    tail = more.get("split", f"commId {more.get('comm_id', '0xfee')}")
    comm = more.get("comm", f"0x{pid:x}0")
    glued = "" if "split" in more and end == "START" else " "
    text = f"comm {comm} rank {rank} nranks {nranks} cudaDev 0 nvmlDev 0 busId 1b000 {tail}{glued}- Init {end}"
    return _said(host, pid, f"ncclCommInitRank {text}")


def test_join_by_comm_id() -> None:
    """Ranks of one commId are one communicator, whatever their pointers and the order of their lines."""
    lines = [
        _init("ant", 1, 0, 2, comm_id="0xa"),
        _init("ant", 1, 0, 2, comm="0xbb", comm_id="0xb"),
        _init("bee", 2, 1, 2, comm_id="0xb"),
        _init("bee", 2, 1, 2, comm="0xcc", comm_id="0xa"),
    ]
    comms = _comms(*lines)
    assert [(comm.comm_id, comm.ranks, comm.pooled, comm.complete) for comm in comms] == [
        ("0xa", {0, 1}, False, True),
        ("0xb", {0, 1}, False, True),
    ]
    assert comms[0].hosts == comms[1].hosts == {"ant": [0], "bee": [1]}
    assert comms[0].name == "communicator 0xa (2 ranks)"


def test_same_pids_in_containers() -> None:
    """One pid on two hosts, or behind two marks of the launcher, is two ranks of one communicator."""
    assert _one(_init("ant", 7, 0, 2), _init("bee", 7, 1, 2)).ranks == {0, 1}
    assert _one("[1,0]<stdout>:" + _init("ant", 7, 0, 2), "[1,1]<stdout>:" + _init("ant", 7, 1, 2)).ranks == {0, 1}


def test_one_process_with_many_ranks() -> None:
    """Threads of one process can be ranks of one communicator."""
    comm = _one(_init("ant", 7, 0, 2, comm="0xa"), _init("ant", 7, 1, 2, comm="0xb"))
    assert (comm.ranks, comm.hosts, comm.nodes) == ({0, 1}, {"ant": [0, 1]}, 1)


def test_begun_but_not_complete() -> None:
    """A communicator in which no rank has finished its init is not complete, and has the ranks that began."""
    comm = _one(_init("ant", 1, 0, 3, "START"), _init("bee", 2, 2, 3, "START"))
    assert (comm.complete, comm.ranks) == (False, {0, 2})
    comm = _one(_init("ant", 1, 0, 3, "START"), _init("bee", 2, 2, 3, "START"), _init("ant", 1, 0, 3))
    assert comm.complete


@pytest.mark.parametrize("child", ["splitCount {} ", "childCount {} ", ""])
def test_splits(child: str) -> None:
    """Splits have no commId: ranks are joined by parent, number of the child (where it is printed) and colour."""
    parents = [_init(host, pid, pid, 4) for host in ("ant",) for pid in range(4)]
    lines = list(parents)
    for count in (0, 1):
        for pid in range(4):
            colour = pid % 2
            split = f"parent 0x{pid:x}0 {child.format(count)}color {colour} key {pid}"
            for end in ("START", "COMPLETE"):
                lines.append(_init("ant", pid, pid // 2, 2, end, comm=f"0x{count + 8}{pid:x}", split=split))
    whole, *halves = _comms(*lines)
    assert whole.comm_id == "0xfee"
    assert all(half.parent is whole and not half.pooled and half.complete for half in halves)
    processes = [(half.color, [member.process.pid for member in half.members]) for half in halves]
    assert processes == [(0, [0, 2]), (0, [0, 2]), (1, [1, 3]), (1, [1, 3])]
    assert halves[0].name == "split of 0xfee, color 0 (2 ranks)"


def test_split_of_a_pointer_used_again() -> None:
    """A parent is the communicator with that pointer at that time: pointers are reused after a destroy."""
    comms = _comms(
        _init("ant", 1, 0, 1, comm="0xa", comm_id="0x1"),
        _said("ant", 1, "comm 0xa rank 0 nranks 1 cudaDev 0 busId 1b000 - Destroy COMPLETE"),
        _init("ant", 1, 0, 1, comm="0xa", comm_id="0x2"),
        _init("ant", 1, 0, 1, comm="0xb", split="parent 0xa color 3 key 0"),
    )
    assert [comm.comm_id for comm in comms] == ["0x1", "0x2", None]
    assert comms[2].parent is comms[1]
    assert comms[0].members[0].ended == "Destroy"


def test_split_of_an_unknown_parent() -> None:
    """If the parent's init is not in the log, splits of one size cannot be distinguished."""
    comm = _one(_init("ant", 1, 0, 2, split="parent 0xdead color 3 key 0"))
    assert (comm.pooled, comm.parent, comm.name) == (True, None, "communicators of 2 ranks")


def _old(host: str, pid: int, rank: int, nranks: int) -> str:
    text = f"comm 0x{pid:x}{nranks} rank {rank} nranks {nranks} cudaDev 0 busId 1b000 - Init COMPLETE"
    return _said(host, pid, text)


def test_old_ones_are_pooled() -> None:
    """Before 2.16 all communicators of a size are one entry; hosts are given only if no rank was seen on two."""
    pairs, whole = _comms(_old("ant", 1, 0, 2), _old("ant", 1, 0, 4), _old("bee", 2, 1, 2), _old("cat", 3, 0, 2))
    assert (pairs.pooled, pairs.nranks, pairs.ranks, len(pairs.members)) == (True, 2, {0, 1}, 3)
    assert pairs.hosts == {}
    assert pairs.nodes == 0
    assert whole.hosts == {"ant": [0]}
    assert pairs.name == "communicators of 2 ranks"


def test_old_ones_connect_before_their_end() -> None:
    """If no line marks the begin of an init, a thread's lines before its end belong to it, as far as ranks fit."""
    comm = _one(
        _said("ant", 1, "Channel 00 : 0[1b000] -> 1[2b000] via P2P/IPC"),
        _said("ant", 1, "Channel 00 : 5[1b000] -> 6[2b000] via P2P/IPC"),
        _said("ant", 1, "2 coll channels, 2 p2p channels, 1 p2p channels per peer"),
        _old("ant", 1, 0, 2),
    )
    assert comm.links() == {Link(0, 1, "P2P/IPC", None, False): 1}
    assert comm.channels is not None
    assert (comm.channels.coll, comm.channels.nvls) == (2, None)


def test_two_inits_of_two_threads() -> None:
    """What a thread says belongs to the communicator that this thread makes."""
    comms = _comms(
        _init("ant", 1, 0, 2, "START", comm="0xa", comm_id="0x1").replace("ant:1:1", "ant:1:11"),
        _init("ant", 1, 0, 2, "START", comm="0xb", comm_id="0x2").replace("ant:1:1", "ant:1:22"),
        _said("ant", 1, "Channel 00/0 : 0[0] -> 1[1] via SHM/direct/direct", 11),
        _said("ant", 1, "Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM", 22),
    )
    assert [comm.transports() for comm in comms] == [{"SHM": 1}, {"P2P/CUMEM": 1}]


def test_connected_later() -> None:
    """Connections made at the first collective, by another thread, go to the only communicator whose rank fits."""
    whole, half = _comms(
        _init("ant", 1, 3, 4, "START", comm="0xa", comm_id="0x1"),
        _init("ant", 1, 3, 4, comm="0xa", comm_id="0x1"),
        _init("ant", 1, 1, 2, "START", comm="0xb", comm_id="0x2"),
        _init("ant", 1, 1, 2, comm="0xb", comm_id="0x2"),
        _said("ant", 1, "Channel 00/0 : 3[3] -> 0[0] via P2P/CUMEM", 9),
        _said("ant", 1, "Channel 00/0 : 1[1] -> 0[0] via SHM/direct/direct", 9),
        _said("ant", 1, "Channel 00/0 : 2[1] -> 0[0] via P2P/IPC", 9),
    )
    assert (whole.transports(), half.transports()) == ({"P2P/CUMEM": 1}, {"SHM": 1})


def test_rccl_names_the_communicator() -> None:
    """RCCL's lines end with the pointer: they belong to that communicator, whichever thread prints them."""
    lines = [_init("ant", 1, 0, 2, comm=comm, comm_id=comm_id) for comm, comm_id in (("0xa1", "0x1"), ("0xa2", "0x2"))]
    first, second = _comms(
        *lines,
        _said("ant", 1, "Channel 00/0 : 0[c1000] -> 1[c6000] via P2P/IPC comm 0xa2 nRanks 02", 9),
        _said("ant", 1, "Channel 00/0 : 0[c1000] -> 1[c6000] via SHM/direct/direct comm 0xa1 nRanks 02", 9),
    )
    assert (first.transports(), second.transports()) == ({"SHM": 1}, {"P2P/IPC": 1})


def test_links_over_the_network() -> None:
    """Both ends print a connection over the network: the sender's count; the receiver's has to do where it is alone."""
    lines = [_init("ant", 1, 0, 2, "START"), _init("bee", 2, 1, 2, "START")]
    for channel in (0, 1):
        via = f"Channel 0{channel}/0 : 0[0] -> 1[0] {{}} via NET/IB/3/GDRDMA"
        lines += [_said("ant", 1, via.format("[send]")), _said("bee", 2, via.format("[receive]"))]
    lines.append(_said("ant", 1, "Channel 00/0 : 1[0] -> 0[0] [receive] via NET/AWS Libfabric/0/Shared"))
    comm = _one(*lines)
    assert comm.links() == {
        Link(0, 1, "NET/IB", "3", True): 2,
        Link(1, 0, "NET/AWS Libfabric", "0", False): 1,
    }
    assert comm.transports() == {"NET/IB": 2, "NET/AWS Libfabric": 1}


def test_transports_without_links() -> None:
    """CollNet counts by its sends, NVLS by the channels of the ranks in sight, and only where it is used."""
    channels = _said(
        "ant", 1, "8 coll channels, 2 collnet channels, 4 nvls channels, 8 p2p channels, 2 p2p channels per peer"
    )
    sends = [_said("ant", 1, f"CollNet 0{n}/0 : 0 [send] via COLLNET/SHARP/{n}/GDRDMA") for n in (0, 1)]
    receive = _said("ant", 1, "CollNet 00/0 : 0 [receive] via COLLNET/SHARP/0/GDRDMA")
    begun = _init("ant", 1, 0, 2, "START")
    assert _one(begun, *sends, receive, channels).transports() == {"COLLNET/SHARP": 2}
    used = _said("ant", 1, "NVLS comm 0x10 headRank 0 nHeads 2 buffSize 1 memSize 1 nvlsPerRankSize 1 nvlsTotalSize 2")
    assert _one(begun, channels, used).transports() == {"NVLS": 4}


def test_rings() -> None:
    """Rings are as rank 0 printed them: by channel, the ranks in their order."""
    comm = _one(
        _init("ant", 1, 0, 4, "START"),
        _said("ant", 1, "Channel 00/02 :    0   2   1   3"),
        _said("ant", 1, "Channel 01/02 : 0 3 1 2"),
    )
    assert comm.rings() == {0: (0, 2, 1, 3), 1: (0, 3, 1, 2)}


def test_nodes() -> None:
    """The number of nodes is the one in NCCL's log; without it, the number of host names in the logs."""
    begun = _init("ant", 1, 0, 4, "START")
    layout = _said("ant", 1, "comm 0x10 rank 0 nRanks 4 nNodes 2 localRanks 2 localRank 0 MNNVL 0")
    assert (_one(begun).nodes, _one(begun, layout).nodes) == (1, 2)
    comm = _one(begun, layout)
    assert comm.layout is not None
    assert (comm.layout.nranks, comm.layout.nnodes, comm.layout.local_ranks) == (4, 2, 2)


def test_hosts_and_missing_ranks() -> None:
    """Ranks are listed by host in their order; missing ranks are those that remain."""
    comm = _one(_init("bee", 3, 2, 4), _init("ant", 2, 1, 4), _init("ant", 1, 0, 4))
    assert comm.hosts == {"ant": [0, 1], "bee": [2]}
    assert set(range(comm.nranks)) - comm.ranks == {3}


def test_no_communicators() -> None:
    """A log without inits has none; an init without a rank (its line is cut) is none."""
    assert _comms(_said("ant", 1, "Using network IB"), _said("ant", 1, "nvmlDev 0 busId 1b000 - Init COMPLETE")) == []


@pytest.mark.parametrize(
    ("numbers", "said"),
    [((), ""), ((4,), "4"), ((0, 1, 2, 3), "0-3"), ((7, 0, 1, 3, 3), "0-1, 3, 7")],
)
def test_spans(numbers: tuple[int, ...], said: str) -> None:
    """Neighbours are joined, in order, each once."""
    assert spans(numbers) == said
