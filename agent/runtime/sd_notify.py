"""What a supervisor that asked for it is told of the agent's life: systemd, or whoever sets ``NOTIFY_SOCKET`` as it does."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Mapping

#: The agent answers; its intake has just looked at the rings; it reads its settings again, until it says ready; it ends, which may take
#: a moment.
READY, ALIVE, RELOADING, STOPPING = "READY=1", "WATCHDOG=1", "RELOADING=1", "STOPPING=1"


def tell(state: str, env: Mapping[str, str]) -> None:
    """Send ``state``, one of the above, to the supervisor; without one, or where it does not listen, nothing happens.

    Never waits. Source: sd_notify(3), "Notes".
    """
    address = env.get("NOTIFY_SOCKET", "")
    if not address.startswith(("/", "@")):
        return
    name = address if address[0] == "/" else f"\0{address[1:]}"  # @: an abstract one, without a file
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sender:
        sender.setblocking(False)
        sender.sendto(state.encode(), name)
