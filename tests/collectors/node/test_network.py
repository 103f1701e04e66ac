"""Network devices, from a recorded ``/proc/net/dev`` and recorded ``/sys`` trees."""

from __future__ import annotations

from pathlib import Path

import pytest

from commwatch_collectors.node.network import Network
from commwatch_collectors.node.nics import Counts, Nic, Traffic
from tests.trees import procfs, say, unpack, vanish

PROC = Path(__file__).parents[2] / "fixtures" / "proc"
HEAD = b"Inter-| Receive | Transmit\n face |bytes ... |bytes ...\n"


def nics(tree: Path) -> dict[str, Nic]:
    """The devices of a tree by name."""
    return {nic.name: nic for nic in Network(tree / "sys").nics()}


def test_recorded_counters() -> None:
    """Bytes, packets, errors and drops of each device but the loopback, in both directions."""
    with procfs(PROC):
        counts = Network.counts()
    assert list(counts) == ["eth0", "eno1np1", "ibs2", "docker0"]
    assert counts["eth0"] == Counts(
        Traffic(734_981_227_654, 1_090_224_315, 0, 17), Traffic(18_446_744_073_709_551_000, 918_273_645, 0, 0)
    )
    assert counts["eno1np1"].received.bytes == 1_500_000  # an old kernel leaves no space behind the colon


def counts_of(tmp_path: Path, text: bytes) -> dict[str, Counts]:
    """The counters in such a file."""
    (tmp_path / "net").mkdir()
    (tmp_path / "net" / "dev").write_bytes(text)
    with procfs(tmp_path):
        return Network.counts()


@pytest.mark.parametrize("text", [b"", HEAD])
def test_no_devices(tmp_path: Path, text: bytes) -> None:
    """No devices give nothing and no error."""
    assert counts_of(tmp_path, text) == {}


@pytest.mark.parametrize("line", [b"", b"eth0: 1 2 3", b"nonsense", b"a: " + b"x " * 16])
def test_damaged(tmp_path: Path, line: bytes) -> None:
    """A line that is no device is an ``OSError`` that names the file."""
    with pytest.raises(OSError, match="net/dev cannot be parsed"):
        counts_of(tmp_path, HEAD + line + b"\n")


def test_any_name(tmp_path: Path) -> None:
    """A device may be called almost anything, and what is exported of it is text that can be sent."""
    names = (b"\xffeth", b"a\xc2\x85b", "訓練".encode(), b"\x1b[2J", b"\xed\xa0\x80")
    counts = counts_of(tmp_path, HEAD + b"".join(name + b": " + b"7 " * 16 + b"\n" for name in names))
    assert list(counts) == [name.decode(errors="replace") for name in names]
    assert "".join(counts).encode()


def test_restart(tmp_path: Path) -> None:
    """A counter that starts again from 0 is exported unchanged, so that a rate can detect the reset."""
    for n, value in enumerate((b"9 ", b"3 ")):
        (tmp_path / str(n)).mkdir()
        counts = counts_of(tmp_path / str(n), HEAD + b"eth0: " + value * 16 + b"\n")
        assert counts["eth0"].received.bytes == int(value)


def test_this_machine() -> None:
    """The kernel's own files are read."""
    network = Network()
    counts = network.counts()
    assert "lo" not in counts
    assert {nic.name for nic in network.nics()} <= {*counts}
    assert all(nic.state for nic in network.nics())


def test_no_file(tmp_path: Path) -> None:
    """Where there are no counters that is an ``OSError``; where there is no sysfs there are no devices."""
    with procfs(tmp_path), pytest.raises(OSError, match="net/dev"):
        Network.counts()
    assert Network(tmp_path).nics() == []


def test_hardware(tmp_path: Path) -> None:
    """A hardware device has kind, state, speed and PCI function; the loopback is left out, IPoIB is distinguished."""
    found = nics(unpack("infiniband", tmp_path))
    assert list(found) == ["eth0", "ibs1"]
    eth0 = found["eth0"]
    assert (eth0.kind, eth0.state, eth0.up, eth0.speed) == ("ethernet", "up", True, 125e6)
    assert eth0.function is not None
    assert (eth0.function.address, eth0.function.numa_node) == ("0000:05:00.0", 0)
    # The driver of IPoIB refuses to tell a speed.
    assert (found["ibs1"].kind, found["ibs1"].speed) == ("ipoib", None)


def test_virtual(tmp_path: Path) -> None:
    """A veth has no speed, a bond has; a device above others is marked as such; the oldest come first."""
    found = nics(unpack("roce", tmp_path))
    assert list(found) == ["ens1f0np0", "ens1f1np1", "bond0", "bond0.7", "veth1"]
    assert {name: nic.kind for name, nic in found.items() if nic.kind == "virtual"}.keys() == {
        "bond0",
        "bond0.7",
        "veth1",
    }
    assert {name: nic.speed for name, nic in found.items()} == {
        "ens1f0np0": 12.5e9, "ens1f1np1": None, "bond0": 12.5e9, "bond0.7": None, "veth1": None,
    }  # fmt: skip
    assert found["bond0"].over == ("ens1f0np0", "ens1f1np1")
    assert found["bond0.7"].over == ("bond0",)
    assert (found["ens1f1np1"].up, found["ens1f1np1"].state) == (False, "down")
    assert found["bond0"].function is None


@pytest.mark.parametrize("speed", ["-1", "0", "4294967295", "", "fast"])
def test_unknown_speed(tmp_path: Path, speed: str) -> None:
    """A speed that the driver does not know is absent, however the driver reports that."""
    tree = unpack("infiniband", tmp_path)
    say(tree, "sys/class/net/eth0/speed", speed)
    assert nics(tree)["eth0"].speed is None


def test_link_downs(tmp_path: Path) -> None:
    """How often the link was lost is counted where the kernel counts it (4.16 and later)."""
    tree = unpack("infiniband", tmp_path)
    network = Network(tree / "sys")
    eth0 = nics(tree)["eth0"]
    assert network.events(eth0) == {"link_downed": 1}
    vanish(tree, "sys/class/net/eth0/carrier_down_count")
    assert network.events(eth0) == {}


def test_no_speed_of_a_virtual_machine(tmp_path: Path) -> None:
    """virtio reports -1 and is found behind its PCI function; firmware without a NUMA node does not give -1."""
    eth0 = nics(unpack("bare", tmp_path))["eth0"]
    assert eth0.speed is None
    assert eth0.function is not None
    assert (eth0.function.address, eth0.function.numa_node) == ("0000:00:03.0", None)
