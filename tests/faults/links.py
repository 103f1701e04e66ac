"""Jobs over several hosts whose links are shaped: which link is named, how soon, what else, and what mending it saves (``make faults-links``).

Arguments: words of a name; only the cases whose names have them are run. Environment: ``RUNS``, how often each is run.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from commwatch_agent.text.units import percent
from tests import prefork
from tests.e2e.hosts import Host, joined_hosts
from tests.e2e.torchjob import JOBS
from tests.helpers import RunningAgent, agent, clean_env, wait_for

#: How long a job is watched, and how long after its link was mended until its steps are as long as they are then.
WATCHED_S, MENDED_S = 60.0, 12.0
JOB = "ring"
FAST = "200mbit"


class Case(NamedTuple):
    """A job, and the rates at which its hosts send."""

    name: str
    #: Of each host; empty: as fast as it can.
    rates: Sequence[str] = (FAST,) * 4
    #: Host, from 0, that sends or receives slowly; ``None``: none does.
    slow: int | None = None
    #: The late rank, and by how much.
    late: int | None = None
    late_ms: int = 0
    #: What all compute in a step, and numbers of 4 bytes that they communicate.
    work_ms: int = 50
    numbers: int = 1 << 20
    op: str = "all_reduce"
    #: Host to which all send slowly, and at which rate.
    received: tuple[int, str] | None = None
    #: Percent of the packets of the slow host that are lost, and by how much later all of them arrive.
    lost: int = 0
    delay_s: float = 0.0
    #: Ranks on each host; and whether one agent watches all of them, as pods of one node.
    ranks: int = 1
    one_agent: bool = False


def at(host: int, rate: str, hosts: int = 4) -> tuple[str, ...]:
    """One host at this rate, and all others fast."""
    return tuple(rate if number == host else FAST for number in range(hosts))


CASES = (
    Case("a tenth of three", at(1, "20mbit", 3), slow=1),
    Case("a tenth of four", at(2, "20mbit"), slow=2),
    Case("a fifth of four", at(0, "40mbit"), slow=0),
    Case("a half of four", at(3, "100mbit"), slow=3),
    Case("a tenth and a late rank", at(1, "20mbit"), slow=1, late=3, late_ms=400),
    Case("a fifth and a late rank", at(0, "40mbit"), slow=0, late=2, late_ms=400),
    Case("a half and a late rank", at(2, "100mbit"), slow=2, late=1, late_ms=400),
    Case("a fifth and its own late rank", at(1, "40mbit"), slow=1, late=1, late_ms=400),
    Case("both directions of a node", at(2, "20mbit"), slow=2, received=(2, "20mbit")),
    Case("both directions of a node of three", at(1, "40mbit", 3), slow=1, received=(1, "40mbit")),
    Case("both directions and a late rank", at(2, "20mbit"), slow=2, received=(2, "20mbit"), late=0, late_ms=400),
    Case("to one node", slow=1, received=(1, "20mbit")),
    Case("to one node and a late rank", slow=1, received=(1, "20mbit"), late=3, late_ms=400),
    Case("loss", slow=2, lost=1),
    Case("loss and a late rank", slow=2, lost=1, late=0, late_ms=400),
    Case("loss of a tenth", slow=2, lost=10),
    Case("loss of a tenth and a late rank", slow=2, lost=10, late=0, late_ms=400),
    Case("delay", slow=1, delay_s=0.02),
    Case("long delay", slow=1, delay_s=0.1),
    Case("delay and a late rank", slow=1, delay_s=0.1, late=3, late_ms=400),
    Case("a tenth in all_to_all", at(2, "20mbit"), slow=2, op="all_to_all"),
    Case("a tenth in all_to_all and a late rank", at(2, "20mbit"), slow=2, op="all_to_all", late=0, late_ms=400),
    Case("a tenth in a chain", at(1, "20mbit"), slow=1, op="buckets"),
    Case("a tenth in DDP", at(2, "20mbit"), slow=2, op="ddp"),
    Case("a fifth in DDP and a late rank", at(1, "40mbit"), slow=1, op="ddp", late=3, late_ms=400),
    Case("a tenth in FSDP", at(2, "20mbit"), slow=2, op="fsdp"),
    Case("a fifth in FSDP and a late rank", at(1, "40mbit"), slow=1, op="fsdp", late=3, late_ms=400),
    Case("a tenth in a pipeline", at(1, "20mbit"), slow=1, op="pipeline"),
    Case("a fifth in a pipeline and a late rank", at(2, "40mbit"), slow=2, op="pipeline", late=0, late_ms=400),
    Case("all equally slow", ("50mbit",) * 4),
    Case("all equally slow and a late rank", ("100mbit",) * 4, late=2, late_ms=400),
    Case("two halves, one agent", (FAST,) * 2, op="ddp", ranks=2, one_agent=True),
    Case("two halves, two agents", (FAST,) * 2, op="ddp", ranks=2),
    Case("all equally slow in FSDP", ("50mbit",) * 4, op="fsdp"),
    Case("healthy", ("",) * 4),
    Case("healthy, only communication", ("",) * 4, work_ms=0, numbers=1 << 22),
    Case("healthy, small operations", ("",) * 4, work_ms=0, numbers=1 << 13),
    Case("healthy all_to_all", ("",) * 4, work_ms=10, op="all_to_all"),
    Case("healthy buckets", ("",) * 4, work_ms=10, op="buckets"),
    Case("healthy DDP", ("",) * 4, work_ms=10, op="ddp"),
    Case("healthy FSDP", ("",) * 4, work_ms=10, op="fsdp"),
    Case("healthy pipeline", ("",) * 4, work_ms=10, op="pipeline"),
    Case("late rank", ("",) * 4, late=0, late_ms=200),
)


class Seen(NamedTuple):
    """An incident, and how many seconds after the first step it was first open."""

    after_s: float
    incident: dict[str, Any]


@contextmanager
def hosts_of(case: Case) -> Iterator[list[Host]]:
    """The hosts of a job, on wires with its delay."""
    delays_s = {case.slow: case.delay_s} if case.slow is not None and case.delay_s else {}
    with joined_hosts(len(case.rates), delays_s=delays_s) as hosts:
        yield hosts


@contextmanager
def running(case: Case, hosts: Sequence[Host], directory: Path) -> Iterator[list[RunningAgent]]:
    """The job on shaped hosts with a rank and an agent each, from its first step on."""
    with ExitStack() as stack:
        for host, rate in zip(hosts, case.rates, strict=True):
            if rate:
                host.shape(rate)
        if case.received is not None:
            hosts[case.received[0]].shape_received(case.received[1])
        if case.lost and case.slow is not None:
            hosts[case.slow].lose(case.lost)
        agents = []
        for host in hosts[:1] if case.one_agent else hosts:
            folder = directory / host.address
            folder.mkdir(mode=0o700)
            flags = (folder, "--host", host.address, "--insecure", "--quiet")
            agents.append(stack.enter_context(agent(*flags, beside=host.process, fetch=host.fetch)))
        for rank in range(case.ranks * len(hosts)):
            watched_by = hosts[0 if case.one_agent else rank // case.ranks]
            stack.callback(_end, _rank(case, rank, hosts, directory / watched_by.address))
        wait_for(lambda: agents[0].get("/api/v1/jobs") and agents[0].get(f"/api/v1/steps?job={JOB}"), "a step")
        yield agents


def mend(case: Case, hosts: Sequence[Host]) -> None:
    """Let the slow host of a running job send and receive as fast as the others, but for its delay."""
    if case.slow is not None and case.rates[case.slow] != FAST:
        hosts[case.slow].free()
        hosts[case.slow].shape(FAST)
    if case.received is not None:
        hosts[case.received[0]].free_received()
    if case.lost and case.slow is not None:
        hosts[case.slow].lose_nothing()


def _rank(case: Case, rank: int, hosts: Sequence[Host], directory: Path) -> subprocess.Popen[bytes]:
    host = hosts[rank // case.ranks]
    env = clean_env(
        MASTER_ADDR=hosts[0].address, MASTER_PORT="29700", GLOO_SOCKET_IFNAME=host.device,
        RANK=str(rank), WORLD_SIZE=str(case.ranks * len(hosts)),
        LOCAL_RANK=str(rank % case.ranks), LOCAL_WORLD_SIZE=str(case.ranks),
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


class Watched(NamedTuple):
    """What was seen of a job."""

    #: In the order in which they opened.
    seen: list[Seen]
    #: Part of a step that mending the link saved; ``None``: not measured.
    saved: float | None
    #: The advice at the end, and what each link did then.
    advice: list[str]
    links: list[str]


def watch(case: Case, directory: Path, watched_s: float = WATCHED_S) -> Watched:
    """Run a case, mend its link, and return what was seen."""
    seen: dict[str, Seen] = {}
    with hosts_of(case) as hosts, running(case, hosts, directory) as agents:
        began_s = time.monotonic()
        while time.monotonic() < began_s + watched_s:
            with suppress(OSError):  # a busy machine
                for each in open_incidents(agents):
                    after_s = seen[each["id"]].after_s if each["id"] in seen else time.monotonic() - began_s
                    seen[each["id"]] = Seen(after_s, each)
            time.sleep(0.5)
        advice, sent = _advice(agents[0]), [*_links(agents)]
        saved, before_s = None, step_s(agents[0])
        if case.slow is not None and not case.delay_s:
            mend(case, hosts)
            time.sleep(MENDED_S)
            saved = 1 - step_s(agents[0]) / before_s
    return Watched(sorted(seen.values(), key=lambda each: each.after_s), saved, advice, sent)


def _advice(watched: RunningAgent) -> list[str]:
    try:
        found = watched.get(f"/api/v1/advice?job={JOB}&scope=job")["data"]
    except OSError as error:
        return [f"not known: {error}"]
    return [f"{each['title']}: {each['gain']}" for each in found]


def _links(agents: Sequence[RunningAgent]) -> Iterator[str]:
    for each in agents:
        with suppress(OSError):
            for rank in each.get(f"/api/v1/ranks?job={JOB}"):
                for peer in (rank["traffic"] or {"peers": []})["peers"]:
                    yield (
                        f"{peer['local']} to {peer['remote']}: {peer['sent_bytes'] / peer['seconds'] / 1e6:.3g} MB/s, busy {peer['busy']:.2f}, "
                        f"unsent {peer['unsent']:.2f}, window {peer['window_limited']:.2f}, again {peer['retransmitted']}, "
                        f"rtt {peer['rtt_s']}, least {peer['min_rtt_s']}"
                    )


def step_s(watched: RunningAgent) -> float:
    """The median of the latest steps."""
    return median(float(step["duration_s"]) for step in watched.get(f"/api/v1/steps?job={JOB}&limit=5"))


def judged(case: Case, seen: Sequence[Seen]) -> Iterator[str]:
    """What is wrong with what was named: a link or a rank that is not, or one that is and was not named."""
    slow = None if case.slow is None else f"10.77.9.{case.slow + 1}"
    named = [each.incident for each in seen if each.incident["kind"] == "slow_link"]
    late = {rank for each in seen if each.incident["kind"] == "straggler" for rank in each.incident["ranks"]}
    if slow is not None and not named:
        yield "the slow link is not named"
    for each in named:
        if slow is None or slow not in each["says"].partition(" is slow")[0]:
            yield f"a link is named wrongly: {each['says'].partition(': ')[0]}"
    if case.late is not None and case.late not in late:
        yield f"rank {case.late} is not named"
    if late - {case.late}:
        yield f"ranks {sorted(late - {case.late})} are named as late"
    others = {each.incident["kind"] for each in seen} - {
        "slow_link",
        "straggler",
        "comm_bound",
        "bandwidth_low",
        "exposed_comm",
    }
    if others:
        yield f"{sorted(others)} are named"


def shown(case: Case, watched: Watched) -> Iterator[str]:
    """A run in lines."""
    yield f"{case.name}: {'; '.join(judged(case, watched.seen)) or 'right'}"
    for after_s, incident in watched.seen:
        cost = incident["share"]
        yield f"  {after_s:.0f} s: {incident['title']} (cost {percent(cost or 0)}): {incident['says']}"
    if watched.saved is not None:
        yield f"  mending the link saved {watched.saved:.0%} of a step"
    yield from (f"  advice: {each}" for each in watched.advice)
    yield from (f"  link {each}" for each in watched.links)


if __name__ == "__main__":
    words = " ".join(sys.argv[1:])
    for chosen in CASES:
        for _ in range(int(os.environ.get("RUNS", "1")) if words in chosen.name else 0):
            with tempfile.TemporaryDirectory() as folder:
                print(*shown(chosen, watch(chosen, Path(folder))), sep="\n", flush=True)
