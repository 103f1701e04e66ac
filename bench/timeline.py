"""Time and memory of `commwatch timeline` over many operations: eight ranks in groups of two, four and eight; by default a million.

    python bench/timeline.py [--nodes 1 2 4] [--operations 10000 100000 1000000]

The histories are made up, in chunks as an agent writes them. The ranks are on one node or on several; each of several has an agent, and
they are each other's peers. Each command has a process of its own, so that its highest memory is that of one export; so has the worker of
each agent that sends its operations.
"""

from __future__ import annotations

import argparse
import io
import json
import random
import subprocess
import sys
import time
from contextlib import ExitStack, closing, redirect_stdout
from itertools import product
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))

from bench.common import emit, last_json, memory_mb, scratch
from commwatch.wire import events as ev
from commwatch_agent import cli
from commwatch_agent.config_sources import load
from commwatch_agent.history.chunks import CHUNK_RECORDS, OpenChunk, statements
from commwatch_agent.history.opening import Transaction, connect
from commwatch_agent.history.store import Writer
from commwatch_agent.model.cells import GroupInfo
from commwatch_agent.runtime.peers import ANSWERS

RANKS, JOB = 8, "job"
#: Begin of the job: an agent keeps what is of the last days.
EPOCH_NS = (int(time.time()) - 3600) * 10**9
#: Sizes of the groups, and what runs in them in turn, each 500 µs after the one before.
GROUPS, PERIOD_NS = (8, 4, 2), 500_000
KINDS = ((0, "all_reduce"), (1, "all_gather"), (2, "all_reduce"), (1, "reduce_scatter"), (2, "send"))


def members_of(rank: int, size: int) -> tuple[int, ...]:
    """The group of that size that a rank is in."""
    first = rank // size * size
    return tuple(range(first, first + size))


def records_of(rank: int, first: int, number: int) -> bytes:
    """Successive operations of a rank, from number ``first`` on. All ranks end them together; each begins up to 200 µs late."""
    found = bytearray()
    for n in range(first, first + number):
        group, op = KINDS[n % len(KINDS)]
        late = random.Random(n * RANKS + rank).randrange(200_000)  # noqa: S311 - made-up data
        begin, end, peer = n * PERIOD_NS + late, n * PERIOD_NS + 400_000, -1
        if op == "send":
            peer, op = rank ^ 1, ("send", "recv")[rank % 2]
        fields = (ev.OP_CODE[op], 1, group, peer, 0, 1 << 20, begin, n, 0, begin, end, 1, ev.BY_FUTURE, 0)
        found += ev.RECORD.pack(n + 1, *fields, n + 1)
    return bytes(found)


def fill(path: Path, operations: int, ranks: range) -> None:
    """Write the history of a node with some of the ranks, which have so many operations."""
    store, each = Writer(path), operations // len(ranks)
    rings = []
    for rank in ranks:
        who = {"job": JOB, "restart": 0, "rank": rank, "world_size": RANKS, "local_rank": rank, "host": "host"}
        when = {"pid": 1, "boot_id": "", "wall_offset_ns": EPOCH_NS, "started_ns": 0, "hook": "native"}
        row = store.ring(f"{rank}.ring", {**who, **when}, EPOCH_NS + each * PERIOD_NS)
        rings.append(row.id)
        for small_id, size in enumerate(GROUPS):
            members = members_of(rank, size)
            name = f"groups of {size}"
            group = GroupInfo(f"{size}-{members[0]}", name, name, "", members, size, True)
            store.group(row.id, small_id, group)
        store.end(row.id, "ended")
    store.close()
    with closing(connect(path, True)) as db, Transaction(db):
        for first in range(0, each, CHUNK_RECORDS):
            for rank, ring in zip(ranks, rings, strict=True):
                chunk, number = OpenChunk(ring, EPOCH_NS), min(CHUNK_RECORDS, each - first)
                chunk.append(records_of(rank, first, number), first + number)
                for statement in statements([chunk], time.time_ns())[0]:
                    db.execute(*statement)


def exported(directory: str, out: str) -> None:
    """Run the command in this process, and print its figures."""
    begin, printed = time.process_time(), io.StringIO()
    with redirect_stdout(printed):
        assert cli.main(["timeline", JOB, "--last", "all", "--dir", directory, "--out", out]) == 0
    cpu_s, says = time.process_time() - begin, printed.getvalue().strip().partition(": ")[2]
    emit({"says": says, "cpu_s": cpu_s, "mb": memory_mb(field="VmHWM"), "file_mb": Path(out).stat().st_size / 1e6})


def measured(directory: Path, nodes: int, operations: int) -> dict[str, object]:
    """Export the job from its first node, with agents if there are others; return the figures."""
    # Not in the process that exports: they take more memory than the export.
    from tests.agent.web.routes.test_jobs import rings_of
    from tests.helpers import agent, clean_env, wait_for

    places = [directory / str(number) for number in range(nodes)]
    for number, place in enumerate(places):
        rings_of(place)
        here = range(number * RANKS // nodes, (number + 1) * RANKS // nodes)
        fill(load(clean_env(), dir=place).history, operations // nodes, here)
    peers = directory / "peers.json"
    peers.write_text("[]")
    with ExitStack() as stack:
        agents = []
        if nodes > 1:
            env = clean_env(COMMWATCH_PEERS=str(peers))
            agents = [stack.enter_context(agent(place, env=env)) for place in places]
            peers.write_text(json.dumps([{"targets": [each.url for each in agents]}]))
            answer = {each.url for each in agents[1:]}
            wait_for(
                lambda: {each["url"] for each in agents[0].get("/api/v1/peers") if each["state"] == ANSWERS} >= answer,
                "peers",
            )
        command = [sys.executable, __file__, "--export", str(places[0]), str(directory / "trace.json.gz")]
        begin = time.perf_counter()
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
        found = {"nodes": nodes, **last_json(done.stdout), "s": time.perf_counter() - begin}
        workers = [memory_mb(pid, "VmHWM") for each in agents for pid in children(each.process.pid)]
        return {**found, "worker_mb": max(workers, default=None)}


def children(pid: int) -> list[int]:
    """The processes that a process has started and that run."""
    return [int(each) for path in Path(f"/proc/{pid}/task").glob("*/children") for each in path.read_text().split()]


def main() -> None:
    """Measure and print, for each number of nodes and operations."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--nodes", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--operations", type=int, nargs="+", default=[10_000, 100_000, 1_000_000])
    parser.add_argument("--export", nargs=2)
    arguments = parser.parse_args()
    if arguments.export:
        exported(*arguments.export)
        return
    for nodes, operations in product(arguments.nodes, arguments.operations):
        with scratch() as place:
            emit(measured(place, nodes, operations))


if __name__ == "__main__":
    main()
