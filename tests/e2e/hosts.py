"""Two hosts on one machine: network namespaces joined by a veth pair, whose rate can be held down."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from tests.helpers import fetch, needs

_NEW_NET = 0x40000000


class Host(NamedTuple):
    """A network namespace with one device."""

    name: str
    device: str
    address: str

    @property
    def there(self) -> tuple[str, ...]:
        """What runs a command on it, in the same process."""
        return ("ip", "netns", "exec", self.name)

    def fetch(self, url: str) -> tuple[bytes, str]:
        """Body and content type of a URL, fetched on that host, by a thread in its network namespace."""
        with ThreadPoolExecutor(1, initializer=self._enter) as inside:
            return inside.submit(fetch, url).result()

    def _enter(self) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        with open(Path("/run/netns") / self.name, "rb") as namespace:
            assert libc.setns(namespace.fileno(), _NEW_NET) == 0, os.strerror(ctypes.get_errno())

    def shape(self, rate: str) -> None:
        """Hold what it sends to a rate, such as ``200mbit``."""
        words = ("root", "tbf", "rate", rate, "burst", "32kb", "latency", "50ms")
        subprocess.run([*self.there, "tc", "qdisc", "add", "dev", self.device, *words], check=True)

    def free(self) -> None:
        """Let it send as fast as it can again."""
        subprocess.run([*self.there, "tc", "qdisc", "del", "dev", self.device, "root"], check=True)


@contextmanager
def two_hosts() -> Iterator[list[Host]]:
    """10.77.9.1 and .2."""
    needs(os.geteuid() == 0 and shutil.which("tc"), "root and iproute2, for network namespaces")
    made = [Host(f"commwatch{os.getpid()}{i}", f"cw{os.getpid()}{i}", f"10.77.9.{n}") for n, i in enumerate("ab", 1)]

    def ip(*words: str) -> None:
        subprocess.run(["ip", *words], check=True)

    try:
        for host in made:
            ip("netns", "add", host.name)
        ip("link", "add", made[0].device, "type", "veth", "peer", "name", made[1].device)
        for host in made:
            ip("link", "set", host.device, "netns", host.name)
            ip("-n", host.name, "addr", "add", f"{host.address}/24", "dev", host.device)
            ip("-n", host.name, "link", "set", host.device, "up")
            ip("-n", host.name, "link", "set", "lo", "up")
        yield made
    finally:
        for host in made:
            subprocess.run(["ip", "netns", "del", host.name], check=False)
