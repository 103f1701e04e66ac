"""Report the agent's state to a supervisor: systemd, or another that sets ``NOTIFY_SOCKET``."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Mapping

#: The agent answers requests; its intake has just read the rings; it reloads its settings, until the next ``READY``; it is
#: shutting down.
READY, ALIVE, RELOADING, STOPPING = "READY=1", "WATCHDOG=1", "RELOADING=1", "STOPPING=1"


def notify(state: str, env: Mapping[str, str]) -> None:
    """Send ``state``, such as ``READY``, to the supervisor; do nothing if there is none or it does not listen.

    Never blocks. Source: sd_notify(3), "Notes".
    """
    address = env.get("NOTIFY_SOCKET", "")
    if not address.startswith(("/", "@")):
        return
    name = address if address[0] == "/" else f"\0{address[1:]}"  # @: an abstract socket, without a file
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sender:
        sender.setblocking(False)
        sender.sendto(state.encode(), name)
