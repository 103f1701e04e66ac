"""Jobs over several hosts whose links are shaped: which link is named, how soon, and what else (``make faults-links``).

Arguments: words of a name; only the cases whose names have them are run.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from tests import prefork
from tests.e2e.hosts import Host, joined_hosts
from tests.e2e.torchjob import JOBS
from tests.helpers import RunningAgent, agent, clean_env, wait_for

#: How long a job is watched.
WATCHED_S = 60.0
JOB = "ring"


class Case(NamedTuple):
    """A job, and the rates at which its hosts send."""

    name: str
    #: Of each host; empty: as fast as it can.
    rates: Sequence[str]
    #: Host, from 0, whose link to the next one in the ring is slow; ``None``: none is.
    slow: int | None = None
    #: The late rank, and by how much.
    late: int | None = None
    late_ms: int = 0
    #: What all compute in a step, and numbers of 4 bytes in its all_reduce.
    work_ms: int = 50
    numbers: int = 1 << 20
    op: str = "all_reduce"
    #: Host to which all send slowly, and at which rate.
    received: tuple[int, str] | None = None


CASES = (
    Case("a tenth of three", ("200mbit", "20mbit", "200mbit"), slow=1),
    Case("a tenth of four", ("200mbit", "200mbit", "20mbit", "200mbit"), slow=2),
    Case("a fifth of four", ("40mbit", "200mbit", "200mbit", "200mbit"), slow=0),
    Case("a half of four", ("200mbit", "200mbit", "200mbit", "100mbit"), slow=3),
    Case("a tenth and a late rank", ("200mbit", "20mbit", "200mbit", "200mbit"), slow=1, late=3, late_ms=400),
    Case("a fifth and its own late rank", ("200mbit", "40mbit", "200mbit", "200mbit"), slow=1, late=1, late_ms=400),
    Case("both directions of a node", ("200mbit", "200mbit", "20mbit", "200mbit"), slow=2, received=(2, "20mbit")),
    Case("both directions of a node of three", ("200mbit", "40mbit", "200mbit"), slow=1, received=(1, "40mbit")),
    Case("to one node", ("200mbit",) * 4, slow=2, received=(1, "20mbit")),
    Case("a tenth in all_to_all", ("200mbit", "200mbit", "20mbit", "200mbit"), slow=2, op="all_to_all"),
    Case("a tenth in a chain", ("200mbit", "20mbit", "200mbit", "200mbit"), slow=1, op="buckets"),
    Case("all equally slow", ("50mbit",) * 4),
    Case("all equally slow and a late rank", ("100mbit",) * 4, late=2, late_ms=400),
    Case("healthy", ("",) * 4),
    Case("healthy, only communication", ("",) * 4, work_ms=0, numbers=1 << 22),
    Case("healthy, small operations", ("",) * 4, work_ms=0, numbers=1 << 13),
    Case("healthy all_to_all", ("",) * 4, work_ms=10, op="all_to_all"),
    Case("healthy buckets", ("",) * 4, work_ms=10, op="buckets"),
    Case("late rank", ("",) * 4, late=0, late_ms=200),
)


class Seen(NamedTuple):
    """An incident, and how many seconds after the first step it was first open."""

    after_s: float
    incident: dict[str, Any]


@contextmanager
def running(case: Case, hosts: Sequence[Host], directory: Path) -> Iterator[list[RunningAgent]]:
    """The job on shaped hosts with a rank and an agent each, from its first step on."""
    with ExitStack() as stack:
        for host, rate in zip(hosts, case.rates, strict=True):
            if rate:
                host.shape(rate)
                stack.callback(host.free)
        if case.received is not None:
            hosts[case.received[0]].shape_received(case.received[1])
        agents = []
        for host in hosts:
            folder = directory / host.address
            folder.mkdir(mode=0o700)
            flags = (folder, "--host", host.address, "--insecure", "--quiet")
            agents.append(stack.enter_context(agent(*flags, beside=host.process, fetch=host.fetch)))
        for rank, host in enumerate(hosts):
            stack.callback(_end, _rank(case, rank, hosts, directory / host.address))
        wait_for(lambda: agents[0].get("/api/v1/jobs") and agents[0].get(f"/api/v1/steps?job={JOB}"), "a step")
        yield agents


def _rank(case: Case, rank: int, hosts: Sequence[Host], directory: Path) -> subprocess.Popen[bytes]:
    host = hosts[rank]
    env = clean_env(
        MASTER_ADDR=hosts[0].address, MASTER_PORT="29700", GLOO_SOCKET_IFNAME=host.device,
        RANK=str(rank), WORLD_SIZE=str(len(hosts)), LOCAL_RANK="0", LOCAL_WORLD_SIZE="1",
        COMMWATCH="1", COMMWATCH_DIR=str(directory), COMMWATCH_JOB=JOB,
    )  # fmt: skip
    words = (case.numbers, -1 if case.late is None else case.late, case.late_ms, case.work_ms, case.op)
    command = [*host.there, *prefork.command(JOBS / "ring.py", *map(str, words))]
    return subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()


def open_incidents(agents: Sequence[RunningAgent]) -> list[dict[str, Any]]:
    """The open incidents of the job by all agents, each once, without those that others explain."""
    found: list[dict[str, Any]] = agents[0].get(f"/api/v1/incidents?job={JOB}&scope=job&state=open")["data"]
    return [each for each in found if not each["consequence_of"]]


def watch(case: Case, directory: Path, watched_s: float = WATCHED_S) -> list[Seen]:
    """Run a case; return the incidents in the order in which they opened."""
    seen: dict[str, Seen] = {}
    with joined_hosts(len(case.rates)) as hosts, running(case, hosts, directory) as agents:
        began_s = time.monotonic()
        while time.monotonic() < began_s + watched_s:
            for each in open_incidents(agents):
                seen.setdefault(each["id"], Seen(time.monotonic() - began_s, each))
            time.sleep(0.5)
    return sorted(seen.values(), key=lambda each: each.after_s)


if __name__ == "__main__":
    words = " ".join(sys.argv[1:])
    for chosen in CASES:
        if words in chosen.name:
            with tempfile.TemporaryDirectory() as folder:
                found = watch(chosen, Path(folder))
            print(f"{chosen.name}:", "nothing" if not found else "", flush=True)
            for after_s, incident in found:
                print(f"  {after_s:.0f} s: {incident['title']}: {incident['says']}", flush=True)
