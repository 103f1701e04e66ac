"""PCI functions from ``/sys``: their place, the speed of their link, and the distance between two.

No driver's library is used: a GPU is found by its class. In a virtual machine the values are those of the virtual hardware,
which may differ from the real one.
"""

from __future__ import annotations

import os
import re
from itertools import takewhile
from pathlib import Path
from typing import NamedTuple

from commwatch.wire.files import names, number, text

_ADDRESS = re.compile(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")
_ANY_ADDRESS = re.compile(r"(?:([0-9a-f]{1,8}):)?([0-9a-f]{2}):([0-9a-f]{2})\.([0-7])")
#: VGA, 3D, other display, processing accelerator (MI300X).
_GPU_CLASSES = (0x0300, 0x0302, 0x0380, 0x1200)
GPU_VENDORS = {0x10DE: "nvidia", 0x1002: "amd"}
#: Share of the bits on the line that is left, by least giga-transfers per second: 8b/10b, 128b/130b, flits without CRC and FEC.
_LINE_CODES = ((64.0, 242 / 256), (8.0, 128 / 130), (0.0, 8 / 10))

#: Distances of two functions, as NCCL names them, the nearest first.
PIX, PXB, PHB, NODE, SYS = DISTANCES = ("PIX", "PXB", "PHB", "NODE", "SYS")


class PciLink(NamedTuple):
    """A PCI Express link: giga-transfers per second and lane, and lanes."""

    gts: float
    lanes: int

    @property
    def bandwidth(self) -> float:
        """Bytes per second and direction, without line code; packet headers take some more."""
        code = next(share for least, share in _LINE_CODES if self.gts >= least)
        return self.gts * 1e9 * code * self.lanes / 8

    def __str__(self) -> str:
        return f"{self.gts:g} GT/s x{self.lanes}"


class Function(NamedTuple):
    """A PCI function."""

    #: As the kernel spells it, such as ``0000:17:00.0``.
    address: str
    #: Its place: from host bridge, root port and switches to itself.
    path: tuple[str, ...]
    #: ``None`` if the firmware does not give it.
    numa_node: int | None
    vendor: int | None
    model: int | None
    #: Its current and its best link; ``None`` if not known (virtual functions and devices inside a chip have none).
    link: PciLink | None
    most: PciLink | None


def function_of(directory: str) -> Function | None:
    """Return the PCI function behind a folder of ``/sys/class``; ``None`` if there is none."""
    return function_at(os.path.realpath(directory))


def function_at(real: str) -> Function | None:
    """Return the innermost PCI function of a path under ``/sys/devices``; ``None`` if there is none."""
    parts = real.split("/")
    at = next((i for i in range(len(parts) - 1, -1, -1) if _ADDRESS.fullmatch(parts[i])), None)
    if at is None:
        return None
    folder = "/".join(parts[: at + 1])
    root = next((i for i in range(at) if parts[i].startswith("pci")), at)
    numa = number(f"{folder}/numa_node")
    return Function(
        address=parts[at],
        path=tuple(parts[root : at + 1]),
        numa_node=None if numa is None or numa < 0 else numa,
        vendor=number(f"{folder}/vendor", 16),
        model=number(f"{folder}/device", 16),
        link=_link(folder, "current"),
        most=_link(folder, "max"),
    )


def _link(folder: str, which: str) -> PciLink | None:
    speed, lanes = text(f"{folder}/{which}_link_speed"), number(f"{folder}/{which}_link_width")
    matched = re.match(r"(\d{1,3}(?:\.\d)?) GT/s", speed or "")
    # A link that is down or missing has 0 or 255 lanes.
    return PciLink(float(matched[1]), lanes) if matched and lanes is not None and 0 < lanes <= 32 else None


def gpus(sys: Path = Path("/sys")) -> list[Function]:
    """Return the GPUs of NVIDIA and AMD, by address."""
    devices = f"{sys}/bus/pci/devices"
    found = []
    for name in names(devices):
        kind, vendor = number(f"{devices}/{name}/class", 16), number(f"{devices}/{name}/vendor", 16)
        if kind is not None and kind >> 8 in _GPU_CLASSES and vendor in GPU_VENDORS:
            function = function_of(f"{devices}/{name}")
            found += [function] if function is not None else []
    return found


def numa_nodes(sys: Path = Path("/sys")) -> int:
    """Return the number of NUMA nodes; 1 if the kernel does not give it."""
    return max(1, sum(bool(re.fullmatch(r"node\d+", name)) for name in names(f"{sys}/devices/system/node")))


def distance(one: Function, other: Function, nodes: int) -> str | None:
    """Return the distance of two functions, as NCCL and ``nvidia-smi topo`` name it; ``None`` if not known.

    Args:
        nodes: NUMA nodes of the machine.

    Returns:
        ``PIX``: one switch between them at most. ``PXB``: several. ``PHB``: they meet in a host bridge, so in the CPU. ``NODE``: in
        different host bridges of one NUMA node. ``SYS``: in different NUMA nodes.
    """
    common = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one.path, other.path, strict=False)))
    if common == 0:
        if one.numa_node is None or other.numa_node is None:
            return NODE if nodes == 1 else None
        return NODE if one.numa_node == other.numa_node else SYS
    if common == 1:
        return PHB
    # Below the common part, each has at most a port of the common switch, and itself.
    return PIX if max(len(one.path), len(other.path)) - common <= 2 else PXB


def address(written: str) -> str | None:
    """Return a PCI address as the kernel spells it, from any spelling (NVML: ``00000000:17:00.0``), or ``None``."""
    matched = _ANY_ADDRESS.fullmatch(written.strip().lower())
    if matched is None:
        return None
    return f"{int(matched[1] or '0', 16):04x}:{matched[2]}:{matched[3]}.{matched[4]}"
