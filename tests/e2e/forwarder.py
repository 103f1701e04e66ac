"""Joins two network namespaces by a wire with a delay, which this kernel's queues cannot make (no netem): frames between two TAP devices.

Arguments: namespace and device at the end whose frames are delayed, namespace and device at the other end, seconds. It writes a line once
both devices exist, and ends when it is killed.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import select
import struct
import sys
import time
from collections import deque
from contextlib import suppress
from pathlib import Path

_NEW_NET = 0x40000000
#: Of linux/if_tun.h: TUNSETIFF, IFF_TAP, IFF_NO_PI. Without offloads the kernel cuts and checks what is read.
_SET_DEVICE, _TAP, _NO_HEADER = 0x400454CA, 0x2, 0x1000
_LONGEST_FRAME = 65536


def tap(namespace: str, device: str) -> int:
    """Make a TAP device in a network namespace; returns its file."""
    with open(Path("/run/netns") / namespace, "rb") as into:
        if ctypes.CDLL(None, use_errno=True).setns(into.fileno(), _NEW_NET) != 0:
            raise OSError(ctypes.get_errno(), "setns")
    file = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(file, _SET_DEVICE, struct.pack("16sH22x", device.encode(), _TAP | _NO_HEADER))
    return file


def forward(delayed: int, prompt: int, delay_s: float) -> None:
    """Pass frames on both ways, those of the first device after a delay, until the process is killed."""
    waiting: deque[tuple[float, bytes]] = deque()
    while True:
        left_s = max(0.0, waiting[0][0] - time.monotonic()) if waiting else None
        ready, _, _ = select.select([delayed, prompt], [], [], left_s)
        if delayed in ready:
            due_s = time.monotonic() + delay_s
            waiting.extend((due_s, frame) for frame in _read(delayed))
        for frame in _read(prompt) if prompt in ready else ():
            _write(delayed, frame)
        while waiting and waiting[0][0] <= time.monotonic():
            _write(prompt, waiting.popleft()[1])


def _read(file: int) -> list[bytes]:
    frames: list[bytes] = []
    try:
        while len(frames) < 64:
            frames.append(os.read(file, _LONGEST_FRAME))
    except BlockingIOError:
        pass
    return frames


def _write(file: int, frame: bytes) -> None:
    with suppress(OSError):  # a full queue or a device that is down: the wire loses the frame
        os.write(file, frame)


if __name__ == "__main__":
    first, other = tap(*sys.argv[1:3]), tap(*sys.argv[3:5])
    print(flush=True)
    forward(first, other, float(sys.argv[5]))
