"""A real agent that has 128 agents of a job of 1,024 ranks as its peers, and the same with dead, slow and hanging ones among them: its
answers about the whole job, and ``commwatch diagnose`` beside it.

    python bench/fan_out.py [--nodes 128] [--bad 8]

The agents are small servers that answer what ``fleet.py`` answered for half a minute of a job with a straggler whose group spans
nodes, so that what is timed is the asking, the joining and the conclusion. Of each kind of bad agent there are ``--bad``: dead (refuses),
slow (answers after 30 s), hanging (accepts, and answers never).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any
from urllib.parse import parse_qs, urlsplit

sys.path.append(str(Path(__file__).parents[1]))

from bench.common import cpu_s, emit, scratch
from bench.fleet import JOB, STEP_NS, Layout, Node
from bench.scale import LATE
from tests.agent.web.routes.test_jobs import rings_of
from tests.helpers import RunningAgent, agent, clean_env, end_rank, mark, wait_for, write_ring

#: Seconds of the job that the agents tell of: as many as `diagnose` looks back.
STEPS, SLOW_S, ROUNDS = 30, 30.0, 3
KINDS = ("dead", "slow", "hanging")
#: What the real agent is asked about the job on all nodes.
QUESTIONS = (f"ranks?job={JOB}", f"summary?job={JOB}&by=group,op", f"verdicts?job={JOB}")
Answer = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


def healthy(node: Node, after_s: float = 0.0) -> Answer:
    """Answers as the node does; what is asked twice is not worked out again."""
    recorded: dict[str, bytes] = {}

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        path = (await reader.readuntil(b"\r\n\r\n")).split()[1].decode()
        await asyncio.sleep(after_s)
        if path not in recorded:
            asked = urlsplit(path)
            answered = node.answer(asked.path.removeprefix("/api/v1/"), parse_qs(asked.query))
            recorded[path] = json.dumps(answered).encode()
        writer.write(b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n" + recorded[path])
        await writer.drain()
        writer.close()

    return answer


async def hanging(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Says nothing for as long as anybody listens."""
    await reader.read()
    await asyncio.Event().wait()


def behaviours(nodes: int, bad: int) -> list[Answer | None]:
    """What each agent does, ``None`` is dead: the bad ones first, all healthy ones after half a minute of the job."""
    layout, began = Layout(nodes), time.monotonic_ns()
    # Their clock stands still: however long it takes to make all this up, the last step has just ended.
    whole = [Node(layout, number, began, lambda: began + STEPS * STEP_NS) for number in range(nodes)]
    for step in range(STEPS):
        for node in whole:
            node.step(began + step * STEP_NS, LATE)
            node.alive()
    made: list[Answer | None] = [healthy(node) for node in whole]
    for n in range(bad):  # from the end, so that the straggler's group is in sight
        made[-1 - 3 * n], made[-2 - 3 * n], made[-3 - 3 * n] = None, healthy(whole[-2 - 3 * n], SLOW_S), hanging
    return made


async def serve(nodes: int, bad: int, tell: Connection) -> None:
    """Answer on ports of their own, and tell which."""
    urls = []
    for behaviour in behaviours(nodes, bad):
        server = await asyncio.start_server(behaviour or hanging, "127.0.0.1", 0)
        urls.append(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
        if behaviour is None:
            server.close()
    tell.send(urls)
    await asyncio.Event().wait()


def serving(nodes: int, bad: int, tell: Connection) -> None:
    """The process of the agents."""
    asyncio.run(serve(nodes, bad, tell))


def diagnosed(directory: Path) -> dict[str, Any]:
    """Seconds that ``commwatch diagnose`` takes, its start included, and what it says."""
    took = list[float]()
    for _ in range(ROUNDS):
        begin = time.perf_counter()
        command = [sys.executable, "-m", "commwatch", "diagnose", "--dir", str(directory), "--json"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        took.append(time.perf_counter() - begin)
    diagnosis = json.loads(done.stdout)
    stragglers = [each["ranks"] for each in diagnosis["verdicts"] if each["kind"] == "straggler"]
    reasons: dict[str, int] = {}
    for why in diagnosis["silent"].values():
        reasons[why] = reasons.get(why, 0) + 1
    return {"seconds": median(took), "worst_s": max(took), "stragglers": stragglers, "silent": reasons}


def whole_job(nodes: int, bad: int) -> dict[str, Any]:
    """Seconds that a real agent with these peers takes for answers about the whole job, and its cost while a live page is open."""
    here, there = multiprocessing.Pipe()
    agents = multiprocessing.get_context("spawn").Process(target=serving, args=(nodes, bad, there), daemon=True)
    agents.start()
    with scratch(in_memory=True) as folder:
        try:
            directory = folder / "run"
            peers = folder / "peers.json"
            peers.write_text(json.dumps([{"targets": here.recv()}]))
            mine = write_ring(rings_of(directory), [mark(0, 1)], job=JOB, rank=8 * nodes, world_size=8 * nodes + 1)
            with agent(directory, env=clean_env(COMMWATCH_PEERS=str(peers))) as running:
                good = nodes - len(KINDS) * bad
                wait_for(lambda: len(answering(running)) == good, "the agents to answer")
                found: dict[str, Any] = {question: answer_s(running, question, good + 1) for question in QUESTIONS}
                found["diagnose"] = diagnosed(directory)
                idle = used_s(running.process.pid)
                with subprocess.Popen(
                    ["curl", "-sN", "-o", "/dev/null", f"{running.url}/api/v1/stream?job={JOB}"]
                ) as page:
                    found["page_cpu"] = used_s(running.process.pid) - idle
                    page.kill()
            end_rank(mine)
        finally:
            agents.kill()
    return {"bad": len(KINDS) * bad, **found}


def answering(running: RunningAgent) -> list[dict[str, Any]]:
    """The peers that answer."""
    return [peer for peer in running.get("/api/v1/peers") if peer["state"] == "answers"]


def answer_s(running: RunningAgent, question: str, nodes: int) -> dict[str, Any]:
    """Median seconds of an answer, not from memory, and how many nodes it covers at the worst.

    Answers count from the first one that covers ``nodes``: before, the process of the simulated agents works out what each of them answers.
    """

    def ask() -> tuple[float, int]:
        time.sleep(1.5)  # answers are kept for a second
        begin = time.perf_counter()
        covered = running.get(f"/api/v1/{question}&scope=job")["nodes"]["answered"]
        return time.perf_counter() - begin, covered

    wait_for(lambda: ask()[1] == nodes, "all agents to know their answers")
    took, covered = zip(*(ask() for _ in range(2 * ROUNDS)), strict=True)
    return {"seconds": median(took), "worst_s": max(took), "nodes": min(covered)}


def used_s(pid: int) -> float:
    """CPU seconds that an agent uses per second."""
    began_s, used = time.monotonic(), cpu_s(pid)
    time.sleep(20)
    return (cpu_s(pid) - used) / (time.monotonic() - began_s)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--nodes", type=int, default=128)
    parser.add_argument("--bad", type=int, default=8, help="agents of each bad kind")
    arguments = parser.parse_args()
    figures: dict[str, Any] = {"nodes": arguments.nodes}
    for name, bad in (("healthy", 0), ("some", arguments.bad)):
        figures[name] = whole_job(arguments.nodes, bad)
    emit(figures)


if __name__ == "__main__":
    main()
