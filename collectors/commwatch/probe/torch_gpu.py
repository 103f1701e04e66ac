"""Find out once which GPU this process computes on, after the training itself has initialised CUDA.

This code never initialises CUDA, makes a context, or touches the device.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch

from commwatch.wire.handlers import raised_by_handler

#: Calls of ``find`` that find no memory of torch on any device, before the current device is accepted.
_PATIENCE = 20
_VISIBLE = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")


class Finder:
    """Finds the device once it can be known.

    Args:
        env: of the trainer.
        cuda: ``torch.cuda``.
    """

    def __init__(self, env: Mapping[str, str], cuda: Any = torch.cuda) -> None:
        self._env, self._cuda = env, cuda
        self._looks = 0

    @property
    def over(self) -> bool:
        """Whether nothing can ever be found: this torch has no CUDA."""
        return not self._cuda._is_compiled()

    def find(self, current: int | None = None) -> dict[str, Any] | None:
        """Return the entry for the names file; ``None`` if the device is not known, or not yet.

        Args:
            current: the device of the trainer's thread, if another thread calls.
        """
        if not self._cuda.is_initialized():
            return None
        self._looks += 1
        index = self._device(int(self._cuda.current_device()) if current is None else current)
        return None if index is None else self._describe(index)

    def _device(self, current: int) -> int | None:
        """Return the current device if torch has memory there, else the only one where it has: scripts that name ``cuda:3`` in each
        call leave the current device at 0."""
        try:
            used = [at for at in range(self._cuda.device_count()) if self._cuda.memory_allocated(at)]
        except RuntimeError as error:  # an allocator that does not count
            if raised_by_handler(error):
                raise
            return current
        if current in used:
            return current
        if len(used) == 1:
            return used[0]
        return current if self._looks >= _PATIENCE else None

    def _describe(self, index: int) -> dict[str, Any]:
        about = self._cuda.get_device_properties(index)
        entry = {"uuid": _uuid(str(getattr(about, "uuid", ""))), "bus_id": _bus_id(about), "index": index}
        visible = next((self._env[name] for name in _VISIBLE if self._env.get(name)), "").split(",")
        named = visible[index].strip() if index < len(visible) else ""
        return {**entry, "mig": named} if named.upper().startswith("MIG-") else entry


def _uuid(text: str) -> str:
    """Return a UUID as the driver writes it. ROCm's has 16 ASCII letters, which torch takes for the bytes of a UUID."""
    plain = text.replace("-", "")
    if re.fullmatch(r"(3[0-9]|6[1-6]|4[1-6]){16}", plain):
        return bytes.fromhex(plain).decode("ascii")
    return text


def _bus_id(about: Any) -> str:
    """Return its PCI address; empty if this torch does not have it."""
    domain, bus, device = (getattr(about, f"pci_{name}_id", None) for name in ("domain", "bus", "device"))
    if domain is None or bus is None or device is None:
        return ""
    return f"{domain:04x}:{bus:02x}:{device:02x}.0"
