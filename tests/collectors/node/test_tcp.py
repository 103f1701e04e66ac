"""TCP connections from the kernel: what its messages say, whose connections they are, and what they did between two samples."""

from __future__ import annotations

import errno
import os
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from commwatch_collectors.node import tcp_connections
from commwatch_collectors.node.tcp_connections import Lister, Sockets, Unknown, sockets
from commwatch_collectors.node.tcp_info import Answer, Connection, answer, device_addresses
from commwatch_collectors.node.tcp_peers import TcpPeer, peers
from tests.helpers import needs, wait_for

#: Of Linux 6.18, from 10.77.9.2 over a link of 20 Mbit/s: a ``tcp_info`` of 280 bytes.
RECORDED = (Path(__file__).parent / "sock_diag.hex").read_text()
DONE = struct.pack("=IHHIIi", 20, 3, 2, 1, 0, 0)
PLACE = ("10.0.0.1", "10.0.0.2")
IDLE = Connection(
    7, PLACE[0], 5000, PLACE[1], 6000, unsent=0, rtt_us=200, min_rtt_us=100, busy_us=0, rwnd_limited_us=0, bytes_acked=0,
    bytes_sent=0, bytes_retrans=0,
)  # fmt: skip


def message(info: bytes, family: int = socket.AF_INET, local: bytes = bytes([10, 0, 0, 1])) -> bytes:
    """One connection as the kernel lists it."""
    remote = bytes([10, 0, 0, 2])
    body = struct.pack(
        "=BBBBHH16s16sI8sIIIII",
        family,
        1,
        0,
        0,
        socket.htons(5000),
        socket.htons(6000),
        local,
        remote,
        0,
        b"",
        0,
        0,
        0,
        1000,
        7,
    )
    body += struct.pack("=HHB3x", 5, 8, 0) + struct.pack("=HH", 4 + len(info), 2) + info
    return struct.pack("=IHHII", 16 + len(body), 20, 2, 1, 0) + body


def test_recorded() -> None:
    """A message of a kernel says whose connection it is, and what it has done since it was made."""
    (one,), is_last, refused = answer(bytes.fromhex(RECORDED) + DONE)
    assert (is_last, refused) == (True, 0)
    assert (one.local, one.remote, one.local_port, one.remote_port) == ("10.77.9.2", "10.77.9.1", 43132, 7000)
    assert (one.busy_us, one.bytes_acked, one.unsent) == (1_988_000, 4_105_081, 1_665_200)
    assert (one.rtt_us, one.min_rtt_us, one.rwnd_limited_us) == (43_158, 25, 0)
    assert (one.bytes_sent, one.bytes_retrans) == (20_377_704, 5_448_824)


def test_older_kernel() -> None:
    """What a shorter ``tcp_info`` lacks is unknown: Linux 4.9 has no busy time, 4.18 has no bytes that were sent again."""
    info = bytes(range(1, 233))
    (new,), (middle,), (old,), (none,) = (answer(message(info[:size])).connections for size in (232, 192, 160, 0))
    assert None not in new
    assert (middle.bytes_retrans, middle.bytes_sent) == (None, None)
    assert middle.rwnd_limited_us == new.rwnd_limited_us == int.from_bytes(info[176:184], sys.byteorder)
    assert (old.busy_us, old.bytes_acked) == (None, new.bytes_acked)
    assert none == none._replace(unsent=None, rtt_us=None, busy_us=None)


@pytest.mark.parametrize("size", range(0, 120, 7))
def test_cut(size: int) -> None:
    """A message that is cut, or of another type, is left out, and nothing of it is believed."""
    whole = message(bytes(232))
    assert answer(whole[:size]) == Answer([], is_last=False)
    assert len(answer(whole + whole[:size]).connections) == 1
    assert answer(struct.pack("=IHHII", 16 + size, 99, 0, 1, 0) + bytes(size)).connections == []


def test_refused() -> None:
    """A kernel without ``sock_diag`` answers with an error."""
    assert answer(struct.pack("=IHHIIi", 20, 2, 0, 1, 0, -errno.ENOENT)).errno == errno.ENOENT


def test_addresses() -> None:
    """An IPv4 address that an IPv6 socket has is an IPv4 address; each address of a device is known with its name."""
    mapped, own = bytes(10) + b"\xff\xff" + bytes([10, 0, 0, 9]), bytes([0xFD, *bytes(14), 2])
    found = [answer(message(b"", socket.AF_INET6, each)).connections[0].local for each in (mapped, own)]
    assert found == ["10.0.0.9", "fd00::2"]
    listed = struct.pack("=16sHH4s16x", b"eth0:1", 2, 0, bytes([10, 0, 0, 9]))
    if_inet6 = "fd000000000000000000000000000002 02 40 00 80     eth1\nnonsense\n"
    assert device_addresses(listed + b"cut", if_inet6) == {"10.0.0.9": "eth0", "fd00::2": "eth1"}


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    """Two ends of a connection of this process."""
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as one:
        other, _ = server.accept()
        with other:
            yield one, other


def test_of_this_process(pair: tuple[socket.socket, socket.socket]) -> None:
    """A process has its own connections, with what they have sent; another one has not."""
    one, other = pair
    one.sendall(bytes(5000))
    other.recv(5000, socket.MSG_WAITALL)
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:

        def listed() -> tuple[list[Connection], list[Connection]]:
            found = sockets([os.getpid(), process.pid])
            mine, theirs = found[os.getpid()], found[process.pid]
            assert isinstance(mine, Sockets)
            assert isinstance(theirs, Sockets)
            assert mine.devices["127.0.0.1"] == "lo"
            return [each for each in mine.connections if each.local_port == one.getsockname()[1]], theirs.connections

        wait_for(lambda: listed()[0][0].bytes_acked == 5001, "the acknowledgement")
        (sent,), others = listed()
        process.communicate(b"\n")
    assert sent.remote_port == other.getsockname()[1]
    assert others == []


def test_again(pair: tuple[socket.socket, socket.socket]) -> None:
    """Which sockets a process has is looked up again after ten seconds; what they have sent is always new."""
    one, other = pair
    now = [0.0]
    lister = Lister(lambda: now[0])

    def seen(at_s: float) -> dict[int, int | None]:
        now[0] = at_s
        mine = lister([os.getpid()])[os.getpid()]
        assert isinstance(mine, Sockets)
        return {each.local_port: each.bytes_acked for each in mine.connections}

    before, port = seen(0.0), one.getsockname()[1]
    one.sendall(b"12345")
    other.recv(5, socket.MSG_WAITALL)
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as new:
        wait_for(lambda: (seen(9.0)[port] or 0) - (before[port] or 0) == 5, "the acknowledgement")
        assert new.getsockname()[1] not in seen(9.0)
        assert new.getsockname()[1] in seen(10.0)


def test_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that has ended, or a node with too many connections, is unknown with the reason, and not without connections."""
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        process.wait()
        gone = process.pid
    assert isinstance(sockets([gone])[gone], Unknown)
    monkeypatch.setattr(tcp_connections, "_MOST_BYTES", 1)
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()):
        assert sockets([os.getpid()])[os.getpid()] == Unknown("sock_diag: too many connections")


def test_another_network_namespace() -> None:
    """Connections in another network namespace are listed there, and the agent stays where it is."""
    needs(os.geteuid() == 0, "root, for a network namespace")
    script = (
        "import socket, subprocess; subprocess.run(['ip', 'link', 'set', 'lo', 'up'], check=True);"
        "s = socket.create_server(('127.0.0.1', 0)); c = socket.create_connection(s.getsockname()); print(c.getsockname()[1], flush=True); input()"
    )
    command = ["unshare", "--net", sys.executable, "-c", script]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        port, before = int(process.stdout.readline()), Path("/proc/self/ns/net").readlink()
        found = sockets([process.pid])[process.pid]
        process.communicate(b"\n")
    assert isinstance(found, Sockets)
    assert port in [each.local_port for each in found.connections]
    assert Path("/proc/self/ns/net").readlink() == before


def sample(*connections: Connection) -> Sockets:
    return Sockets(list(connections), {PLACE[0]: "eth0"})


def test_between_two_samples() -> None:
    """The connections to one address together have sent what each has; they are as busy as the busiest of them."""
    later = IDLE._replace(busy_us=900_000, bytes_acked=2_000_000, unsent=100, rtt_us=5000)
    second = IDLE._replace(inode=8, local_port=5001)
    also = second._replace(busy_us=500_000, rwnd_limited_us=300_000, bytes_acked=1_000_000)
    (found,) = peers([sample(IDLE, second), sample(later, also)], 2.0)
    assert found == TcpPeer(*PLACE, "eth0", 2.0, 3_000_000, 0.45, 0.15, 0.5, None, 0.005, 0.0001)


def test_what_does_not_count() -> None:
    """New connections, those within the node, and those of which the kernel does not know the busy time do not count."""
    local = IDLE._replace(remote=PLACE[0])
    loop = IDLE._replace(inode=9, local="127.0.0.1", remote="127.0.0.2")
    unknown = IDLE._replace(inode=10, busy_us=None)
    here = Sockets([IDLE], {PLACE[0]: "eth0", PLACE[1]: "eth1"})
    assert peers([here, here], 2.0) == []
    assert peers([sample(local, loop, unknown), sample(local, loop, unknown, IDLE._replace(inode=11))], 2.0) == []
    other = IDLE._replace(busy_us=5, bytes_acked=5)  # another connection got its inode
    assert peers([sample(other), sample(IDLE)], 2.0) == []


def test_kernel_that_does_not_count() -> None:
    """What an older kernel does not count is unknown, and not zero."""
    old = IDLE._replace(bytes_sent=None, bytes_retrans=None, min_rtt_us=None)
    (found,) = peers([sample(old), sample(old)], 2.0)
    assert (found.retransmitted, found.min_rtt_s) == (None, None)


@pytest.mark.parametrize(
    ("lost", "expected"), [((0, 400, 0, 0, 0), 0.0), ((10, 12, 9, 400, 11), 0.011), ((400, 300, 200), None)]
)
def test_sent_again(lost: tuple[int, ...], expected: float | None) -> None:
    """Data that is sent again all the time is a loss; once in ten seconds, a queue that overflowed; of a few seconds, it is not known."""
    samples, again = [sample(IDLE)], 0
    for number, each in enumerate(lost, 1):
        again += each
        samples.append(sample(IDLE._replace(bytes_sent=1000 * number, bytes_retrans=again)))
    assert [each.retransmitted for each in peers(samples, 10.0)] == [expected and pytest.approx(expected)]
