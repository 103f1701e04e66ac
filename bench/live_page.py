"""What the live page costs the agent: eight ranks at 500 operations a second each, 13 (group, op) pairs a rank.

CPU of the agent in periods without a page, with one that reads its stream as a browser does, and with twenty clients that have asked
for it and read nothing. The periods follow one another in turn, each compared with the mean of the two without beside it; what two
without differ by is the noise. The page was open for a moment before, so that what a first look at a job costs is not in it. Then how
long a record takes to show up in ``/metrics``, without and with the twenty.
"""

from __future__ import annotations

import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from http.client import HTTPConnection, HTTPException
from itertools import pairwise
from pathlib import Path
from statistics import median

sys.path.append(str(Path(__file__).parents[1]))

from bench.agent_load import SETTLE_S, Agent, freshness_s, in_metrics, loaded_agent, taken, witness_in
from bench.common import cpu_s, emit, scratch
from bench.synthetic import WORLD_SIZE

PER_SECOND, SLOW = 500, 14  # one client may have 16 streams
ROUNDS, PERIOD_S = 5, 12.0
STREAM = "/api/v1/stream"


@contextmanager
def page(agent: Agent) -> Iterator[list[int]]:
    """A client that takes what comes; yields the bytes that have."""
    connection = HTTPConnection(agent.address, timeout=PERIOD_S)
    connection.request("GET", STREAM)
    response, taken = connection.getresponse(), [0]

    def read() -> None:
        with suppress(HTTPException):  # cut off in the middle of a chunk
            while data := response.read1(1 << 16):
                taken[0] += len(data)

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    try:
        yield taken
    finally:
        sock = connection.sock
        assert sock is not None
        sock.shutdown(socket.SHUT_RDWR)
        reader.join()
        connection.close()


@contextmanager
def slow_clients(agent: Agent) -> Iterator[None]:
    """Clients that have asked, and read nothing."""
    host, _, port = agent.address.partition(":")
    with ExitStack() as stack:
        for _ in range(SLOW):
            client = stack.enter_context(socket.create_connection((host, int(port))))
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.sendall(f"GET {STREAM} HTTP/1.1\r\nHost: {host}\r\n\r\n".encode())
        yield


def load(agent: Agent) -> float:
    """CPU of the agent over a period, in percent of a core."""
    begin, cpu = time.monotonic(), cpu_s(agent.pid)
    time.sleep(PERIOD_S)
    return 100 * (cpu_s(agent.pid) - cpu) / (time.monotonic() - begin)


def rounds(agent: Agent) -> dict[str, float]:
    """What a page, and slow clients, add to the agent's load."""
    without, page_adds, slow_add, read = [load(agent)], [], [], 0
    for _ in range(ROUNDS):
        with page(agent) as received:
            with_page = load(agent)
            read += received[0]
        without.append(load(agent))
        page_adds.append(with_page - (without[-1] + without[-2]) / 2)
        with slow_clients(agent):
            with_slow = load(agent)
        without.append(load(agent))
        slow_add.append(with_slow - (without[-1] + without[-2]) / 2)
    noise = median(abs(a - b) for a, b in pairwise(without))
    return {
        "without_percent": median(without),
        "noise_percent": noise,
        "page_adds_percent": median(page_adds),
        "slow_add_percent": median(slow_add),
        "page_kb_per_s": read / 1e3 / (ROUNDS * PERIOD_S),
    }


def measure(directory: Path, state: Path) -> dict[str, float]:
    """All of it, in one run of agent and job."""
    with loaded_agent(directory, state, PER_SECOND) as agent:
        with page(agent):
            time.sleep(SETTLE_S)
        figures = rounds(agent)
        witness = witness_in(directory)
        alone = freshness_s(witness, partial(in_metrics, agent))
        with slow_clients(agent):
            beside = freshness_s(witness, partial(in_metrics, agent))
        taken(agent.samples())  # nothing was lost
    fresh = {"fresh_s": median(alone), "fresh_beside_slow_s": median(beside)}
    return {**figures, **fresh, "ranks": WORLD_SIZE, "operations_per_s": PER_SECOND, "slow": SLOW}


def main() -> None:
    """Measure and print."""
    with scratch(in_memory=True) as memory, scratch() as disk:
        figures = measure(memory / "run", disk)
    emit(figures)


if __name__ == "__main__":
    main()
