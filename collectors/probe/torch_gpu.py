"""Which GPU does this process compute on: asked once, of a torch that has begun to use CUDA by itself.

Nothing here begins with CUDA, makes a context, or touches the device.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch

from commwatch.collectors.wire.handlers import raised_by_handler

#: Looks at a CUDA that has no memory of torch's anywhere, before the current device is believed.
_PATIENCE = 20
_VISIBLE = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")


class Finder:
    """Finds out when the device is plain to see.

    Args:
        env: of the trainer.
        cuda: ``torch.cuda``.
    """

    def __init__(self, env: Mapping[str, str], cuda: Any = torch.cuda) -> None:
        self._env, self._cuda = env, cuda
        self._looks = 0

    @property
    def over(self) -> bool:
        """There will never be anything to find: this torch knows no CUDA."""
        return not self._cuda._is_compiled()

    def look(self, current: int | None = None) -> dict[str, Any] | None:
        """The entry for the names file; ``None``: not to be known, or not yet.

        Args:
            current: the device that the trainer's thread uses, where another thread asks.
        """
        if not self._cuda.is_initialized():
            return None
        self._looks += 1
        index = self._device(int(self._cuda.current_device()) if current is None else current)
        return None if index is None else self._describe(index)

    def _device(self, current: int) -> int | None:
        """The current device if torch has memory there, else the only one where it has; scripts that name ``cuda:3`` in each call
        leave the current device at 0."""
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
    """As the driver writes it. ROCm's are 16 letters of ASCII, which torch takes for 16 bytes of a UUID."""
    plain = text.replace("-", "")
    if re.fullmatch(r"(3[0-9]|6[1-6]|4[1-6]){16}", plain):
        return bytes.fromhex(plain).decode("ascii")
    return text


def _bus_id(about: Any) -> str:
    """Its PCI address, of a torch that knows it; empty elsewhere."""
    domain, bus, device = (getattr(about, f"pci_{name}_id", None) for name in ("domain", "bus", "device"))
    if domain is None or bus is None or device is None:
        return ""
    return f"{domain:04x}:{bus:02x}:{device:02x}.0"
