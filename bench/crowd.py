"""Clients that ask an agent its dearest questions without pause: ``python bench/crowd.py ADDRESS CLIENTS [PATH...]``.

They run on one event loop in one process of low priority, each on a connection of its own, and take no notice of ``Retry-After``. Ended by
SIGTERM they print one JSON line: how many answers of each status they got, and how many connections were closed on them.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys
from collections import Counter
from contextlib import suppress
from itertools import count
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))

from bench.common import emit

#: Low, so that what is measured is the agent and not who gets the machine's cores.
NICE = 10
#: Every route that reads much of the history or goes through all of the books, and the metrics.
PATHS = (
    "/api/v1/summary?by=job_id,group,op,rank,size",
    "/metrics",
    "/api/v1/ops?limit=10000",
    "/api/v1/ops?min_seconds=1000",
    "/api/v1/advice",
    "/api/v1/steps?limit=10000",
    "/api/v1/efficiency",
    "/api/v1/parts",
    "/api/v1/verdicts",
    "/api/v1/pipelines",
    "/api/v1/ranks",
    "/api/v1/groups",
    "/api/v1/stream",
)
#: A stream is left at this.
_MOMENT = b"event: moment"
_LENGTH = re.compile(rb"(?i)\r\ncontent-length: *(\d+)")


async def client(host: str, port: int, paths: list[str], counts: Counter[str]) -> None:
    """Ask one path after the other, for ever."""
    for turn in count():
        try:
            reader, writer = await asyncio.open_connection(host, port)
        except OSError:
            counts["refused"] += 1
            await asyncio.sleep(0.01)
            continue
        with suppress(OSError, asyncio.IncompleteReadError, AttributeError):
            for path in paths[turn % len(paths) :] + paths[: turn % len(paths)]:
                writer.write(f"GET {path} HTTP/1.1\r\nHost: {host}:{port}\r\n\r\n".encode())
                head = await reader.readuntil(b"\r\n\r\n")
                length = _LENGTH.search(head)
                if length is None:
                    await reader.readuntil(_MOMENT)
                left = 0 if length is None else int(length[1])
                while left:
                    data = await reader.read(min(left, 1 << 20))
                    if not data:
                        raise asyncio.IncompleteReadError(b"", left)
                    left -= len(data)
                counts[head[9:12].decode()] += 1
                if length is None:
                    break
        counts["closed"] += 1
        writer.close()


async def crowd(host: str, port: int, clients: int, paths: list[str]) -> Counter[str]:
    """So many clients, until SIGTERM."""
    counts: Counter[str] = Counter()
    over = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, over.set)
    turned = (paths[n % len(paths) :] + paths[: n % len(paths)] for n in range(clients))
    tasks = [asyncio.create_task(client(host, port, each, counts)) for each in turned]
    await over.wait()
    for task in tasks:
        task.cancel()
    return counts


def main() -> None:
    """Ask until ended, then print."""
    os.nice(NICE)
    host, _, port = sys.argv[1].rpartition(":")
    emit(asyncio.run(crowd(host, int(port), int(sys.argv[2]), sys.argv[3:] or list(PATHS))))


if __name__ == "__main__":
    main()
