"""Where the times of a ring lie in wall time. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from commwatch.wire import ring

#: Most difference of two clocks that agree.
_AGREE_NS = 10_000_000_000


def offset_of(identity: Mapping[str, Any], counters: Sequence[int], now_ns: int, wall_ns: int, boot_id: str) -> int:
    """Return wall time minus a trainer's clock, for a ring that is new to the history.

    The monotonic clock of one boot is the same for all, so the agent's own wall clock counts if that of the trainer was wrong when the ring
    began. Of a ring of another boot, only the times in the identity are known: its last sign of life is not in the future.

    Args:
        counters: of the ring.
        now_ns: the monotonic clock of the agent.
        boot_id: of the agent; empty: not known.
    """
    offset_ns, own_ns = int(identity["wall_offset_ns"]), wall_ns - now_ns
    if boot_id and identity.get("boot_id") == boot_id:
        return offset_ns if abs(offset_ns - own_ns) <= _AGREE_NS else own_ns
    # A sign of life after so long an uptime is none.
    signs = (int(identity["started_ns"]), counters[ring.HEARTBEAT], counters[ring.CLOSED])
    latest_ns = max((sign for sign in signs if sign <= wall_ns), default=0)
    return offset_ns if offset_ns + latest_ns <= wall_ns + _AGREE_NS else wall_ns - latest_ns
