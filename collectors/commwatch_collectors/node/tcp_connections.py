"""The established TCP connections of processes, from the kernel (``sock_diag``): no packet is captured, and no privilege is needed.

Those in another network namespace need the right to enter it; else they are not known.
"""

from __future__ import annotations

import ctypes
import fcntl
import math
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple

from commwatch.wire import files
from commwatch_collectors.node.tcp_info import FAMILIES, Connection, answer, device_addresses, request

_PROC = "/proc"
#: Most descriptors of a process, bytes about connections of a network namespace (some 400 for each), and addresses; with more they are not known.
_MOST_DESCRIPTORS, _MOST_BYTES, _MOST_ADDRESSES = 4096, 4 << 20, 256
#: For how long it is taken as known which sockets a process has.
_INODES_S = 10.0
_NETLINK, _SOCK_DIAG, _NEW_NET, _ADDRESSES_OF_DEVICES = 16, 4, 0x40000000, 0x8912
_READ_BYTES, _PATIENCE_S = 1 << 16, 1.0


class Unknown(NamedTuple):
    """Why connections are not known."""

    reason: str


class Sockets(NamedTuple):
    """Connections, and the network device that has each local address, as far as known."""

    connections: list[Connection]
    devices: Mapping[str, str]


class Lister:
    """Lists the connections of processes again and again. Which sockets a process has is looked up every ten seconds.

    Args:
        now_s: returns the monotonic time.
    """

    def __init__(self, now_s: Callable[[], float] = time.monotonic) -> None:
        self._now_s = now_s
        #: By pid: the inodes of its sockets, and when they were read.
        self._known: dict[int, tuple[float, set[int] | None]] = {}

    def __call__(self, pids: Iterable[int]) -> dict[int, Sockets | Unknown]:
        """Return the connections of each process."""
        now_s, before = self._now_s(), self._known
        self._known = {pid: before.get(pid, (-math.inf, None)) for pid in pids}
        for pid, (read_s, _) in self._known.items():
            if now_s - read_s >= _INODES_S:
                self._known[pid] = now_s, _inodes(pid)
        inodes = {pid: of_process for pid, (_, of_process) in self._known.items()}
        wanted = {inode for of_process in inodes.values() for inode in of_process or ()}
        spaces: dict[str, Sockets | Unknown] = {}
        return {pid: _sockets(pid, of_process, wanted, spaces) for pid, of_process in inodes.items()}


def sockets(pids: Iterable[int]) -> dict[int, Sockets | Unknown]:
    """Return the connections of each process."""
    return Lister()(pids)


def _sockets(
    pid: int, inodes: set[int] | None, wanted: set[int], spaces: dict[str, Sockets | Unknown]
) -> Sockets | Unknown:
    """Return the connections of a process; ``spaces``: those that are wanted of the network namespaces asked so far."""
    space = _link(f"{_PROC}/{pid}/ns/net")
    if inodes is None or space is None:
        return Unknown("its descriptors cannot be read (another user), or are too many")
    if space not in spaces:
        is_here = space == _link(f"{_PROC}/self/ns/net")
        spaces[space] = _listed(wanted) if is_here else _listed_in(f"{_PROC}/{pid}/ns/net", wanted)
    there = spaces[space]
    if isinstance(there, Unknown):
        return there
    return Sockets([each for each in there.connections if each.inode in inodes], there.devices)


def _inodes(pid: int) -> set[int] | None:
    """Return the inodes of the sockets of a process; ``None``: not known."""
    names = files.names(f"{_PROC}/{pid}/fd")
    if not names or len(names) > _MOST_DESCRIPTORS:
        return None
    links = (_link(f"{_PROC}/{pid}/fd/{name}") for name in names)
    return {int(link[8:-1]) for link in links if link is not None and link.startswith("socket:[")}


def _link(path: str) -> str | None:
    try:
        return os.readlink(path)  # noqa: PTH115
    except OSError:
        return None


def _listed_in(namespace: str, wanted: set[int]) -> Sockets | Unknown:
    """Return what a thread lists that enters a network namespace and ends."""
    found: list[Sockets | Unknown] = []

    def enter() -> None:
        try:
            space = os.open(namespace, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            found.append(Unknown(f"network namespace: {error.strerror}"))
            return
        try:
            failed = ctypes.CDLL(None, use_errno=True).setns(space, _NEW_NET)
        finally:
            os.close(space)
        found.append(
            Unknown("another network namespace, which this agent may not enter") if failed else _listed(wanted)
        )

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    return found[0]


def _listed(wanted: set[int]) -> Sockets | Unknown:
    """Return what the kernel lists in the network namespace of this thread."""
    try:
        with socket.socket(_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, _SOCK_DIAG) as asked:
            asked.settimeout(_PATIENCE_S)
            found = [each for family in FAMILIES for each in _dumped(asked, family, wanted)]
        return Sockets(found, _devices())
    except OSError as error:
        return Unknown(f"sock_diag: {error.strerror or error}")


def _dumped(asked: socket.socket, family: int, wanted: set[int]) -> Iterator[Connection]:
    asked.send(request(family))
    is_last, left = False, _MOST_BYTES
    while not is_last:
        data = asked.recv(_READ_BYTES)
        left -= len(data)
        found, is_last, refused = answer(data, wanted)
        if refused or left < 0:
            raise OSError(refused, os.strerror(refused) if refused else "too many connections")
        yield from found


def _devices() -> Mapping[str, str]:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as asked:
        room = ctypes.create_string_buffer(40 * _MOST_ADDRESSES)
        head = struct.pack("@iP", len(room), ctypes.addressof(room))
        used = struct.unpack("@iP", fcntl.ioctl(asked, _ADDRESSES_OF_DEVICES, head))[0]
    return device_addresses(room.raw[:used], files.text(f"{_PROC}/thread-self/net/if_inet6", 1 << 16) or "")
