"""The client of a connection: on loopback all clients share one address, but the kernel has the user of each."""

from __future__ import annotations

import contextlib
import socket
import struct
from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network

#: Constants of <linux/netlink.h>, <linux/sock_diag.h> and <linux/inet_diag.h>.
_NETLINK_SOCK_DIAG, _SOCK_DIAG_BY_FAMILY, _NLM_F_REQUEST = 4, 20, 1
_HEADER = struct.Struct("=IHHII")
_ABOUT = struct.Struct("=BBBxI")
_ENDS = struct.Struct("!HH16s16s")
#: Any interface and any cookie.
_ANY = struct.pack("=III", 0, 0xFFFFFFFF, 0xFFFFFFFF)
#: Offset of the user id in the reply: after its header, four bytes, the ends with interface and cookie, three numbers.
_UID_AT = _HEADER.size + 4 + _ENDS.size + len(_ANY) + 12
#: Seconds to wait for the kernel, which answers at once.
_PATIENCE_S = 0.1
Address = tuple[str, int]


def client(peer: Address | None, here: Address | None) -> str:
    """Return a name for the client: ``user UID`` if it runs on this machine, else its address, or its network for IPv6.

    A machine may use any address of its IPv6 network of 64 bits, so an address alone would be as many clients as it likes.

    Args:
        peer: address and port of the client; ``None``: not known.
        here: address and port of the agent's end.
    """
    if peer is None:
        return "unknown"
    try:
        address = ip_address(peer[0])
    except ValueError:
        return peer[0]
    uid = _uid(peer, here) if address.is_loopback and here is not None else None
    return _network(address) if uid is None else f"user {uid}"


def _network(address: IPv4Address | IPv6Address) -> str:
    """Return the address of a machine, or the network that an IPv6 address is of."""
    plain = address.ipv4_mapped if isinstance(address, IPv6Address) and address.ipv4_mapped else address
    if isinstance(plain, IPv4Address) or plain.is_loopback:
        return str(plain)
    return str(ip_network((plain.packed[:8] + bytes(8), 64)))


def _uid(peer: Address, here: Address) -> int | None:
    """Return the user id of the client's end of a TCP connection in this network namespace; ``None``: not known."""
    with contextlib.suppress(OSError, ValueError, struct.error):
        family = socket.AF_INET6 if ":" in peer[0] else socket.AF_INET
        ends = (socket.inet_pton(family, at[0]) for at in (peer, here))
        about = _ABOUT.pack(family, socket.IPPROTO_TCP, 0, 0xFFFFFFFF) + _ENDS.pack(peer[1], here[1], *ends) + _ANY
        with socket.socket(socket.AF_NETLINK, socket.SOCK_DGRAM, _NETLINK_SOCK_DIAG) as kernel:
            kernel.settimeout(_PATIENCE_S)
            kernel.send(_HEADER.pack(_HEADER.size + len(about), _SOCK_DIAG_BY_FAMILY, _NLM_F_REQUEST, 1, 0) + about)
            data = kernel.recv(4096)
        if _HEADER.unpack_from(data)[1] == _SOCK_DIAG_BY_FAMILY:
            return int(struct.unpack_from("=I", data, _UID_AT)[0])
    return None
