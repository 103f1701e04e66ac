"""Hosts on one machine: network namespaces joined by a bridge, whose rates can be held down and whose clocks can differ."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple, TypeVar

from tests.helpers import fetch, needs

_NEW_NET = 0x40000000
_T = TypeVar("_T")


class Host(NamedTuple):
    """A network namespace with one device."""

    name: str
    device: str
    address: str
    #: A process on it, which does nothing.
    process: int
    #: Time namespace of its processes; ``None``: the machine's own.
    clock: Path | None = None

    @property
    def there(self) -> tuple[str, ...]:
        """What runs a command on it, in the same process."""
        return _there(self.name, self.clock)

    def fetch(self, url: str) -> tuple[bytes, str]:
        """Body and content type of a URL, fetched on that host."""
        return self.call(fetch, url)

    def call(self, function: Callable[[str], _T], argument: str) -> _T:
        """Call a function in a thread in the network namespace of that host."""
        with ThreadPoolExecutor(1, initializer=self._enter) as inside:
            return inside.submit(function, argument).result()

    def _enter(self) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        with open(Path("/run/netns") / self.name, "rb") as namespace:
            assert libc.setns(namespace.fileno(), _NEW_NET) == 0, os.strerror(ctypes.get_errno())

    def shape(self, rate: str) -> None:
        """Hold what it sends to a rate, such as ``200mbit``."""
        _shape(self.there, self.device, rate)

    def shape_received(self, rate: str) -> None:
        """Hold what is sent to it to a rate, as long as it exists."""
        switch, _, number = self.name.rpartition("-")
        _shape(_there(switch, None), f"port{number}", rate)

    def free_received(self) -> None:
        """Let others send to it as fast as they can again."""
        switch, _, number = self.name.rpartition("-")
        subprocess.run([*_there(switch, None), "tc", "qdisc", "del", "dev", f"port{number}", "root"], check=True)

    def free(self) -> None:
        """Let it send as fast as it can again."""
        subprocess.run([*self.there, "tc", "qdisc", "del", "dev", self.device, "root"], check=True)

    def lose(self, percent: int) -> None:
        """Lose a part of the packets that it sends, between it and the switch, as long as it exists."""
        switch, _, number = self.name.rpartition("-")
        # Else one loss is that of a piece of 64 KiB, which the sender cuts no earlier than at its device.
        subprocess.run([*self.there, "ip", "link", "set", "dev", self.device, "gso_max_segs", "1"], check=True)
        hook = f"type filter hook ingress device port{number} priority 0"
        rule = f"table netdev loss {{ chain lost {{ {hook}; numgen random mod 100 < {percent} drop; }}; }}"
        subprocess.run([*_there(switch, None), "nft", rule], check=True)

    def lose_nothing(self) -> None:
        """Pass all packets on again."""
        switch = self.name.rpartition("-")[0]
        subprocess.run([*_there(switch, None), "nft", "delete table netdev loss"], check=True)


def _shape(there: Sequence[str], device: str, rate: str) -> None:
    words = ("root", "tbf", "rate", rate, "burst", "32kb", "latency", "50ms")
    subprocess.run([*there, "tc", "qdisc", "add", "dev", device, *words], check=True)


@contextmanager
def joined_hosts(
    count: int, ahead_s: Sequence[int] = (), delays_s: Mapping[int, float] | None = None
) -> Iterator[list[Host]]:
    """10.77.9.1, .2 and so on.

    Args:
        ahead_s: by how many seconds the monotonic clock of each host is ahead of this machine's; empty: all have this machine's.
        delays_s: how much later than at once what a host sends arrives, by the host's number from 0.
    """
    needs(os.geteuid() == 0 and shutil.which("tc"), "root and iproute2, for network namespaces")
    switch = f"commwatch{os.getpid()}"
    with ExitStack() as stack:
        _namespace(stack, switch)
        _ip("-n", switch, "link", "add", "bridge", "type", "bridge")
        _ip("-n", switch, "link", "set", "bridge", "up")
        made = []
        for number in range(1, count + 1):
            clock = _clock(stack, ahead_s[number - 1]) if ahead_s else None
            name = f"{switch}-{number}"
            _namespace(stack, name)
            process = _idle(stack, _there(name, clock))
            host = Host(name, f"cw{os.getpid()}-{number}", f"10.77.9.{number}", process, clock)
            port = f"port{number}"
            delay_s = (delays_s or {}).get(number - 1)
            if delay_s is None:
                _ip("-n", switch, "link", "add", port, "type", "veth", "peer", "name", host.device, "netns", host.name)
            else:
                _delayed_wire(stack, host, switch, port, delay_s)
            _ip("-n", switch, "link", "set", port, "master", "bridge", "up")
            _ip("-n", host.name, "addr", "add", f"{host.address}/24", "dev", host.device)
            _ip("-n", host.name, "link", "set", host.device, "up")
            _ip("-n", host.name, "link", "set", "lo", "up")
            made.append(host)
        yield made


def _run(*words: str) -> None:
    subprocess.run(words, check=True)


def _ip(*words: str) -> None:
    _run("ip", *words)


def _namespace(stack: ExitStack, name: str) -> None:
    _ip("netns", "add", name)
    stack.callback(_ip, "netns", "del", name)


def _there(name: str, clock: Path | None) -> tuple[str, ...]:
    enter = () if clock is None else ("nsenter", f"--time={clock}")
    return ("ip", "netns", "exec", name, *enter)


def _idle(stack: ExitStack, there: tuple[str, ...]) -> int:
    """A process on a host, which is there at once."""
    process = stack.enter_context(
        subprocess.Popen([*there, "sh", "-c", "echo; exec sleep infinity"], stdout=subprocess.PIPE)
    )
    stack.callback(process.kill)
    assert process.stdout is not None
    assert process.stdout.readline() == b"\n"
    return process.pid


def _delayed_wire(stack: ExitStack, host: Host, switch: str, port: str, delay_s: float) -> None:
    forwarder = (sys.executable, str(Path(__file__).with_name("forwarder.py")))
    command = [*forwarder, host.name, host.device, switch, port, str(delay_s)]
    process = stack.enter_context(subprocess.Popen(command, stdout=subprocess.PIPE))
    stack.callback(process.kill)
    assert process.stdout is not None
    assert process.stdout.readline() == b"\n"


def _clock(stack: ExitStack, ahead_s: int) -> Path:
    """A time namespace, which a file holds until the end."""
    file = Path(stack.enter_context(TemporaryDirectory())) / "clock"
    file.touch()
    ahead = (f"--monotonic={ahead_s}", f"--boottime={ahead_s}")
    _run("unshare", f"--time={file}", *ahead, "--fork", "true")
    stack.callback(_run, "umount", str(file))
    return file
