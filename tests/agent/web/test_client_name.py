"""Who asks: the user on this machine, else the address."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

import pytest

from commwatch_agent.web import client_name
from tests.helpers import NOBODY, PATIENCE_S, needs


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
def test_user(address: str) -> None:
    """On loopback a client is the user whose process it is."""
    needs(os.getuid() == 0, "root, to be another user")
    # What the interpreter still has to load it loads before: the other user may not read our libraries.
    change = f"import os, socket, sys; 'a'.encode('idna'); os.setuid({NOBODY})"
    code = f"{change}; made = socket.create_connection(sys.argv[1:], 60); made.recv(1)"
    with socket.create_server((address, 0), family=socket.AF_INET6 if ":" in address else socket.AF_INET) as listener:
        listener.settimeout(PATIENCE_S)
        here = listener.getsockname()[:2]
        with socket.create_connection(here, 60):
            mine, peer = listener.accept()
            with mine:
                assert client_name.client(peer[:2], here) == f"user {os.getuid()}"
        with subprocess.Popen([sys.executable, "-c", code, here[0], str(here[1])]):
            theirs, peer = listener.accept()
            with theirs:
                assert client_name.client(peer[:2], here) == f"user {NOBODY}"


@pytest.mark.parametrize(
    ("peer", "said"),
    [
        (("192.0.2.1", 1), "192.0.2.1"),
        (("2001:db8::1", 1), "2001:db8::/64"),
        (("2001:db8::ffff:1", 1), "2001:db8::/64"),
        (("2001:db8:0:1::1", 1), "2001:db8:0:1::/64"),
        (("fe80::1%eth0", 1), "fe80::/64"),
        (("::ffff:192.0.2.1", 1), "192.0.2.1"),
        (("a proxy", 1), "a proxy"),
        # Of a connection that does not exist the kernel has no user.
        (("127.0.0.1", 1), "127.0.0.1"),
        (("127.0.0.1", 1 << 20), "127.0.0.1"),
        (None, "unknown"),
    ],
)
def test_address(peer: tuple[str, int] | None, said: str) -> None:
    """Anybody else is an address, or a network of 64 bits for IPv6, and where the kernel does not say whose it is, so is a client of this machine."""
    assert client_name.client(peer, ("127.0.0.1", 2)) == said
