"""What other tests rely on."""

from __future__ import annotations

from pathlib import Path

from tests.helpers import free_port


def test_free_port() -> None:
    """A free port is none of those that the system gives to connections, and each call returns another one."""
    first, last = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text(encoding="utf-8").split())
    ports = [free_port() for _ in range(20)]
    assert len({*ports}) == len(ports)
    assert not {*ports} & {*range(first, last + 1)}
