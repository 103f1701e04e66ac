"""TCP connections as the kernel describes them over ``sock_diag``: requests and answers (linux/inet_diag.h, linux/tcp.h). Pure.

Older kernels send a shorter ``tcp_info``: what it lacks is ``None``.
"""

from __future__ import annotations

import socket
import struct
import sys
from collections.abc import Container, Iterator
from functools import partial
from typing import NamedTuple

#: Families of addresses that are asked for.
FAMILIES = (int(socket.AF_INET), int(socket.AF_INET6))
#: ``SOCK_DIAG_BY_FAMILY``, ``NLM_F_REQUEST | NLM_F_DUMP``, ``1 << (INET_DIAG_INFO - 1)``, ``1 << TCP_ESTABLISHED``.
_BY_FAMILY, _DUMP, _WITH_INFO, _ESTABLISHED = 20, 0x301, 1 << 1, 1 << 1
#: Types of messages and of an attribute: ``NLMSG_ERROR``, ``NLMSG_DONE``, ``INET_DIAG_INFO``.
_ERROR, _DONE, _INFO = 2, 3, 2
_HEADER, _REQUEST, _ATTRIBUTE = struct.Struct("=IHHII"), struct.Struct("=BBBBI48x"), struct.Struct("=HH")
#: ``inet_diag_msg``: family, state, timer, retransmits, ports, addresses, interface, cookie, expiry, queues, uid, inode.
_SOCKET = struct.Struct("=BBBBHH16s16sI8sIIIII")
_INODE = struct.Struct("=I")
#: Ports are in the order of the network.
_PORTS = struct.Struct("!HH")
#: How an IPv6 address begins that is one of IPv4.
_MAPPED = bytes(10) + b"\xff\xff"


class Connection(NamedTuple):
    """One established connection. Counters are since it was made; ``None``: this kernel does not say."""

    inode: int
    local: str
    local_port: int
    remote: str
    remote_port: int
    #: Bytes not sent yet.
    unsent: int | None
    #: Smoothed round trip, and the shortest one of the last minutes.
    rtt_us: int | None
    min_rtt_us: int | None
    #: Time in µs with data to send or not acknowledged, and of it limited by the receiver's window.
    busy_us: int | None
    rwnd_limited_us: int | None
    bytes_acked: int | None
    #: Bytes sent, also again; and again.
    bytes_sent: int | None
    bytes_retrans: int | None


class Answer(NamedTuple):
    """What one read from the kernel contains."""

    connections: list[Connection]
    #: Nothing follows.
    is_last: bool
    #: Why the kernel refuses; 0: it does not.
    errno: int = 0


def request(family: int) -> bytes:
    """Return the request for all established connections of a family."""
    body = _REQUEST.pack(family, socket.IPPROTO_TCP, _WITH_INFO, 0, _ESTABLISHED)
    return _HEADER.pack(_HEADER.size + len(body), _BY_FAMILY, _DUMP, 1, 0) + body


def answer(data: bytes, wanted: Container[int] | None = None) -> Answer:
    """Return what messages of the kernel contain; what is cut or of an unknown type is left out.

    Args:
        wanted: inodes of the sockets that are returned; ``None``: of all.
    """
    found: list[Connection] = []
    for kind, body in _messages(data):
        if kind in (_DONE, _ERROR):
            refused = kind == _ERROR and len(body) >= 4
            return Answer(found, is_last=True, errno=-struct.unpack_from("=i", body)[0] if refused else 0)
        if kind == _BY_FAMILY and len(body) >= _SOCKET.size:
            inode = _INODE.unpack_from(body, _SOCKET.size - _INODE.size)[0]
            if wanted is None or inode in wanted:
                found.append(_connection(body))
    return Answer(found, is_last=False)


def device_addresses(listed: bytes, if_inet6: str) -> dict[str, str]:
    """Return the network device of each address.

    Args:
        listed: the array of ``ifreq`` of 40 bytes that ``SIOCGIFCONF`` gives, with the IPv4 addresses.
        if_inet6: the text of ``/proc/net/if_inet6``.
    """
    found = {}
    for at in range(0, len(listed) - 39, 40):
        name = listed[at : at + 16].split(b"\0")[0].decode(errors="replace").partition(":")[0]
        found[socket.inet_ntop(socket.AF_INET, listed[at + 20 : at + 24])] = name
    for fields in map(str.split, if_inet6.splitlines()):
        if len(fields) == 6 and len(fields[0]) == 32:
            found[socket.inet_ntop(socket.AF_INET6, bytes.fromhex(fields[0]))] = fields[5]
    return found


def _messages(data: bytes) -> Iterator[tuple[int, bytes]]:
    at = 0
    while at + _HEADER.size <= len(data):
        length, kind, *_ = _HEADER.unpack_from(data, at)
        if not _HEADER.size <= length <= len(data) - at:
            return
        yield kind, data[at + _HEADER.size : at + length]
        at += _aligned(length)


def _aligned(length: int) -> int:
    return (length + 3) & ~3


def _connection(body: bytes) -> Connection:
    family, *_, local, remote, _, _, _, _, _, _, inode = _SOCKET.unpack_from(body)
    ports = _PORTS.unpack_from(body, 4)
    info = _info(body[_SOCKET.size :])

    def number(place: int, size: int) -> int | None:
        return int.from_bytes(info[place : place + size], sys.byteorder) if place + size <= len(info) else None

    u32, u64 = partial(number, size=4), partial(number, size=8)
    return Connection(
        inode=inode,
        local=_address(family, local),
        local_port=ports[0],
        remote=_address(family, remote),
        remote_port=ports[1],
        unsent=u32(144),
        rtt_us=u32(68),
        min_rtt_us=u32(148),
        busy_us=u64(168),
        rwnd_limited_us=u64(176),
        bytes_acked=u64(120),
        bytes_sent=u64(200),
        bytes_retrans=u64(208),
    )


def _info(attributes: bytes) -> bytes:
    """Return the ``tcp_info`` among the attributes; empty: there is none."""
    at = 0
    while at + _ATTRIBUTE.size <= len(attributes):
        length, kind = _ATTRIBUTE.unpack_from(attributes, at)
        if not _ATTRIBUTE.size <= length <= len(attributes) - at:
            break
        if kind == _INFO:
            return attributes[at + _ATTRIBUTE.size : at + length]
        at += _aligned(length)
    return b""


def _address(family: int, packed: bytes) -> str:
    """Return an address as text; an IPv4 address that an IPv6 socket has as the IPv4 address."""
    if family == socket.AF_INET6 and not packed.startswith(_MAPPED):
        return socket.inet_ntop(socket.AF_INET6, packed)
    return socket.inet_ntop(socket.AF_INET, packed[12:] if family == socket.AF_INET6 else packed[:4])
