"""The established TCP connections of processes, from the kernel (``sock_diag``): no packet is captured, and no privilege is needed.

Those in another network namespace need the right to enter it; else they are not known.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import socket
import struct
import threading
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from commwatch.wire import files
from commwatch_collectors.node.tcp_info import FAMILIES, Connection, answer, device_addresses, request

_PROC = "/proc"
#: Most descriptors of a process, and connections and addresses of a network namespace; with more they are not known.
_MOST_DESCRIPTORS, _MOST_CONNECTIONS, _MOST_ADDRESSES = 4096, 4096, 256
_NETLINK, _SOCK_DIAG, _NEW_NET, _ADDRESSES_OF_DEVICES = 16, 4, 0x40000000, 0x8912
_READ_BYTES, _PATIENCE_S = 1 << 16, 1.0


class Unknown(NamedTuple):
    """Why connections are not known."""

    reason: str


class Sockets(NamedTuple):
    """Connections, and the network device that has each local address, as far as known."""

    connections: list[Connection]
    devices: Mapping[str, str]


def sockets(pids: Iterable[int]) -> dict[int, Sockets | Unknown]:
    """Return the connections of each process."""
    found: dict[int, Sockets | Unknown] = {}
    spaces: dict[str | None, Sockets | Unknown] = {}
    here = _link(f"{_PROC}/self/ns/net")
    for pid in pids:
        inodes, space = _inodes(pid), _link(f"{_PROC}/{pid}/ns/net")
        if inodes is None or space is None:
            found[pid] = Unknown("its descriptors cannot be read (another user), or are too many")
            continue
        if space not in spaces:
            spaces[space] = _listed() if space == here else _listed_in(f"{_PROC}/{pid}/ns/net")
        there = spaces[space]
        found[pid] = (
            there
            if isinstance(there, Unknown)
            else Sockets([each for each in there.connections if each.inode in inodes], there.devices)
        )
    return found


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


def _listed_in(namespace: str) -> Sockets | Unknown:
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
        found.append(Unknown("another network namespace, which this agent may not enter") if failed else _listed())

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    return found[0]


def _listed() -> Sockets | Unknown:
    """Return what the kernel lists in the network namespace of this thread."""
    try:
        with socket.socket(_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, _SOCK_DIAG) as asked:
            asked.settimeout(_PATIENCE_S)
            found: list[Connection] = []
            for each in (each for family in FAMILIES for each in _dumped(asked, family)):
                found.append(each)
                if len(found) > _MOST_CONNECTIONS:
                    return Unknown(f"more than {_MOST_CONNECTIONS} connections")
        return Sockets(found, _devices())
    except OSError as error:
        return Unknown(f"sock_diag: {error.strerror or error}")


def _dumped(asked: socket.socket, family: int) -> Iterator[Connection]:
    asked.send(request(family))
    is_last = False
    while not is_last:
        found, is_last, errno = answer(asked.recv(_READ_BYTES))
        if errno:
            raise OSError(errno, os.strerror(errno))
        yield from found


def _devices() -> Mapping[str, str]:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as asked:
        room = ctypes.create_string_buffer(40 * _MOST_ADDRESSES)
        head = struct.pack("@iP", len(room), ctypes.addressof(room))
        used = struct.unpack("@iP", fcntl.ioctl(asked, _ADDRESSES_OF_DEVICES, head))[0]
    return device_addresses(room.raw[:used], files.text(f"{_PROC}/thread-self/net/if_inet6", 1 << 16) or "")
