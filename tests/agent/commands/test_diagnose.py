"""``commwatch diagnose`` against real agents: what they answer comes through whole."""

from __future__ import annotations

import contextlib
import json
import re
import socket
import threading
import time
import urllib.error
from collections.abc import Iterator
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from starlette.responses import JSONResponse
from starlette.types import Receive, Scope, Send

from commwatch.wire import events as ev
from commwatch_agent.commands.diagnose import CannotDiagnose, _rank, ask
from commwatch_agent.commands.diagnosis import Diagnosis
from commwatch_agent.model.views import Usual
from commwatch_collectors.node.judged_activity import Activity
from tests.agent.commands.test_top import in_flight, incident
from tests.agent.commands.test_top import rank as view
from tests.agent.web.routes.test_jobs import rings_of
from tests.helpers import (
    MS,
    SOON_MET,
    RunningAgent,
    Trainer,
    agent,
    clean_env,
    commwatch,
    end_rank,
    group_entry,
    identity,
    operation,
    wait_for,
    write_ring,
)
from tests.serving import serving


def test_ranks_with_failures(tmp_path: Path) -> None:
    """Operations that raised are judged as those in flight are: a rank that passed another size is named."""
    with agent(tmp_path) as running:
        trainers = [Trainer(rings_of(tmp_path) / f"job.r0.{n}.ring", identity(rank=n)) for n in (0, 1)]
        try:
            for n, trainer in enumerate(trainers):
                trainer.call("name", [(group_entry(),)])
                trainer.write([operation(start_ns=MS, end_ns=2 * MS, seq=3, size=8 << n, flags=ev.FAILED)])
            wait_for(lambda: sum(len(rank["failed"]) for rank in running.get("/api/v1/ranks")) == 2, "the failures")
            seen = ask([running.url], None)
            assert [failed.size_bytes for rank in seen.ranks for failed in rank.failed] == [8, 16]
            assert seen.verdicts == []  # they raised when this machine was started
            done = commwatch("diagnose", "--dir", tmp_path)
            assert (done.returncode, done.stderr) == (0, ""), done.stdout
            for name in (("latest",), ("jo",), ("--job", "jo"), ("--job", "latest")):
                done = commwatch("diagnose", "--dir", tmp_path, *name)
                assert (done.returncode, "job" in done.stdout) == (0, True), done
                assert "1 running job" in done.stdout
            done = commwatch("diagnose", "--dir", tmp_path, "--job", "jbo")
            assert (done.returncode, done.stdout, done.stderr) == (2, "", "commwatch: diagnose: no job 'jbo'\n")
        finally:
            for trainer in trainers:
                trainer.kill()


def test_agent_of_an_earlier_version(tmp_path: Path) -> None:
    """What the views of an earlier version's agent lack has its default: the lists of a rank, the texts of an incident."""
    answers: dict[str, Any] = {}

    async def earlier(scope: Scope, receive: Receive, send: Send) -> None:
        found = answers.get(scope["path"].rpartition("/")[2], [])
        wide = {"nodes": {"answered": 1, "silent": {}}, "data": found}
        await JSONResponse(wide if b"scope=job" in scope["query_string"] else found)(scope, receive, send)

    with agent(tmp_path / "run") as running, serving(tmp_path / "earlier", earlier) as served:
        trainer = Trainer(rings_of(tmp_path / "run") / "job.r0.0.ring", identity())
        try:
            trainer.call("name", [(group_entry(),)])
            trainer.write([operation("broadcast", start_ns=MS, end_ns=2 * MS, seq=3, peer=0)])
            wait_for(
                lambda: [rank["ended"] for rank in running.get("/api/v1/ranks")] > [[]], "the operation that has ended"
            )
            (rank,) = ask([running.url], None).ranks
            assert [(each.op, each.root) for each in rank.ended] == [("broadcast", 0)]
            answers |= {name: running.get(f"/api/v1/{name}") for name in ("jobs", "ranks", "verdicts")}
            for name in ("ended", "destroyed"):
                del answers["ranks"][0][name]
            texts = {"title", "place", "remedy"}
            answers["incidents"] = [
                {name: value for name, value in asdict(incident("hang", 1)).items() if name not in texts}
            ]
            answers["incidents"][0]["job_id"] = "job"
            seen = ask([f"http://127.0.0.1:{served.port}"], None)
            assert [(each.title, each.place, each.remedy) for each in seen.incidents] == [("Hang: rank 1", "", "")]
            (earlier_rank,) = seen.ranks
            assert (earlier_rank.ended, earlier_rank.destroyed, earlier_rank.rank) == ([], [], 0)
            answers["jobs"][0]["state"] = "ended"
            seen = ask([f"http://127.0.0.1:{served.port}"], None)
            assert (seen.incidents, [each.title for each in seen.of_latest]) == ([], ["Hang: rank 1"])
        finally:
            trainer.kill()


def test_dripping_agent(monkeypatch: pytest.MonkeyPatch) -> None:
    """An agent that sends its answer byte by byte without end delays a query no longer than a silent one."""
    monkeypatch.setattr("commwatch.api.client._TIMEOUT_S", 0.5)
    stop = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as server:

        def drip() -> None:
            connection, _ = server.accept()
            with connection:
                connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n\r\n[")
                while not stop.wait(0.05):
                    with contextlib.suppress(OSError):
                        connection.sendall(b" ")

        dripping = threading.Thread(target=drip)
        dripping.start()
        try:
            with pytest.raises(CannotDiagnose, match="did not send its whole answer"):
                ask([f"http://127.0.0.1:{server.getsockname()[1]}"], None)
        finally:
            stop.set()
            dripping.join()


def test_endless_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """An agent that sends without end does not fill the memory: its connection is closed, and it is named."""
    monkeypatch.setattr("commwatch.api.client._MOST_BYTES", 1 << 16)
    with socket.create_server(("127.0.0.1", 0)) as server:

        def pour() -> None:
            connection, _ = server.accept()
            with connection, contextlib.suppress(OSError):
                connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n\r\n[")
                while True:
                    connection.sendall(b" " * 4096)

        pouring = threading.Thread(target=pour)
        pouring.start()
        try:
            with pytest.raises(CannotDiagnose, match="its answer is longer than"):
                ask([f"http://127.0.0.1:{server.getsockname()[1]}"], None)
        finally:
            pouring.join()


def test_addresses_of_something_else() -> None:
    """Only an http or https URL is an agent's address: no file is read instead."""
    done = commwatch("diagnose", "file:///etc/passwd")
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert "file:///etc/passwd: not an agent's address" in line


def has_read(running: RunningAgent, records: int) -> bool:
    """The agent has taken in so many."""
    return bool(sum(rank["records"] for rank in running.get("/api/v1/ranks")) == records)


@contextlib.contextmanager
def two_nodes(directory: Path, peers: Path) -> Iterator[list[RunningAgent]]:
    """Two agents, each with two ranks of four, of which rank 3 is late; they know the agents in ``peers``."""
    names = [group_entry(0, (0, 1, 2, 3), "world", group_id="w"), group_entry(1, (2, 3), "local", group_id="l")]
    begin, count, writers = time.monotonic_ns() - 6_000 * MS, 100, []
    for rank in range(4):
        took = (5 if rank == 3 else 35) * MS
        ends = [begin + seq * 50 * MS for seq in range(count)]
        made = [operation(start_ns=end - took, end_ns=end, seq=seq) for seq, end in enumerate(ends)]
        if rank > 1:  # a group of one node, in which nobody is late
            made += [operation(start_ns=end, end_ns=end + MS, seq=seq, group=1) for seq, end in enumerate(ends)]
        where = rings_of(directory / "ab"[rank // 2])
        writers.append(write_ring(where, made, names, rank=rank, world_size=4, wall_offset_ns=0))
    env = clean_env(COMMWATCH_PEERS=str(peers))
    starting = [agent(directory / name, env=env, constants=SOON_MET) for name in "ab"]
    with starting[0] as a, starting[1] as b:
        for each, read in ((a, 2 * count), (b, 4 * count)):
            wait_for(partial(has_read, each, read), "the records")
            assert each.get("/api/v1/verdicts") == []
        yield [a, b]
    for writer in writers:
        end_rank(writer)


def are_apart(a: RunningAgent, b: RunningAgent) -> None:
    """Of agents with ranks of one job that do not know each other all ranks are heard; that no agent sees them together is in the answer."""
    seen = ask([a.url, b.url], None)
    assert (seen.apart, [view.rank for view in seen.ranks], seen.silent) == (["job"], [0, 1, 2, 3], {})
    assert "the agents of job do not know each other" in commwatch("diagnose", a.url, b.url).stdout
    (alone,) = [line for line in commwatch("diagnose", b.url).stdout.splitlines() if "no data" in line]
    assert alone == "not yet certain: no data from ranks 0-1 (job)"


def whole_with_verdicts(urls: list[str]) -> Diagnosis | None:
    """All four ranks, once something is wrong with them."""
    seen = ask(urls, None)
    return seen if len(seen.ranks) == 4 and seen.verdicts else None


def test_straggler_over_two_agents(tmp_path: Path) -> None:
    """Each agent sees two ranks of four and names none; two that know each other name the late one, once, whichever is asked, under whatever names."""
    peers = tmp_path / "peers.json"
    peers.write_text("[]")
    with two_nodes(tmp_path, peers) as (a, b):
        are_apart(a, b)
        peers.write_text(json.dumps([{"targets": [a.url, b.url]}]))
        answering = {"answers", "this agent"}
        for each in (a, b):
            wait_for(
                lambda: {peer["state"] for peer in each.get("/api/v1/peers")} == answering,  # noqa: B023
                "the other agent",
            )
        for urls in ([a.url], [b.url], [a.url, b.url], [a.url, b.url, b.url.replace("127.0.0.1", "localhost")]):
            # On a busy machine an agent may not answer the other one in time; one of them asks the other every other second.
            seen = wait_for(partial(whole_with_verdicts, urls), "all ranks, and the verdict")
            assert (seen.apart, [view.rank for view in seen.ranks]) == ([], [0, 1, 2, 3])
            (verdict,) = seen.verdicts
            assert (verdict.kind, verdict.group, verdict.ranks) == ("straggler", "world", [3])
            assert verdict.waiting == [0, 1, 2]
            assert re.search(
                r"rank 3 is late in group world; in 4\.\d\d s .* (59|60|61)% of the time for it$", verdict.says
            )
        done = commwatch("diagnose", a.url, b.url, "--json")
        assert (done.returncode, done.stderr) == (1, "")
        assert [each["ranks"] for each in json.loads(done.stdout)["verdicts"]] == [[3]]
        told = a.get("/api/v1/parts?job=job&limit=20")
        assert told["limit"] == 20
        assert [(part["group_id"], len(part["seq"])) for part in told["parts"]] == [("w", 20), ("w", 20)]
        for wrong in ("job=none", "limit=0", "limit=2000", "group=w"):
            with pytest.raises(urllib.error.HTTPError):
                a.get(f"/api/v1/parts?{wrong}")


def test_verdicts_count_once(tmp_path: Path) -> None:
    """An agent that is queried under two names reports a straggler once."""
    names, begin = [group_entry(0, (0, 1), "world", group_id="w")], time.monotonic_ns() - 9_000 * MS
    writers = []
    for rank in range(2):
        ends = [begin + seq * 50 * MS for seq in range(160)]
        made = [operation(start_ns=end - (5 + 30 * rank) * MS, end_ns=end, seq=seq) for seq, end in enumerate(ends)]
        writers.append(write_ring(rings_of(tmp_path), made, names, rank=rank, wall_offset_ns=0))
    with agent(tmp_path) as running:
        wait_for(lambda: running.get("/api/v1/jobs") and running.get("/api/v1/verdicts"), "the verdict")
        (verdict,) = ask([running.url, running.url.replace("127.0.0.1", "localhost")], None).verdicts
        assert verdict.ranks == [0]
    for writer in writers:
        end_rank(writer)


def test_job_or_address(tmp_path: Path) -> None:
    """An argument that is the name of a job known here is that job, with or without its agent; anything else is an address; two jobs are too many."""
    for job in ("node1", "node2", "other-20261130"):
        writer = write_ring(rings_of(tmp_path), [operation(start_ns=MS, end_ns=2 * MS)], [group_entry()], job=job)
        writer.close(1)
        end_rank(writer)
    with agent(tmp_path) as running:
        wait_for(lambda: [job["state"] for job in running.get("/api/v1/jobs")] == ["ended"] * 3, "the jobs")
        assert commwatch("diagnose", "other", "--dir", tmp_path).stdout.startswith("other-20261130 ended at ")
        done = commwatch("diagnose", "node1", "--dir", tmp_path)
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout.startswith("node1 ended at ")
        assert (
            json.loads(commwatch("diagnose", running.url, "node1", "--dir", tmp_path, "--json").stdout)["job"]["job_id"]
            == "node1"
        )
        assert "node" in commwatch("diagnose", "node", "--dir", tmp_path).stderr  # of two jobs
        done = commwatch("diagnose", "--dir", tmp_path)
        assert (done.returncode, done.stdout.splitlines()[0]) == (0, "no running job")
        assert f"`commwatch diagnose --dir {tmp_path} node" in done.stdout
        for wrong in (("node1", "node2"), ("node1", "--job", "node2")):
            assert "one job at a time" in commwatch("diagnose", *wrong, "--dir", tmp_path).stderr
    stored = commwatch("diagnose", "node1", "--dir", tmp_path)
    assert (stored.returncode, stored.stdout.startswith("node1 ended at ")) == (0, True)
    none = commwatch("diagnose", "--dir", tmp_path)
    assert (none.returncode, none.stdout) == (2, "")
    assert none.stderr.startswith("commwatch: diagnose: no agent runs here, so no job is watched; start one with ")
    assert "--dir; node" in none.stderr
    assert none.stderr.endswith("` shows what happened\n")
    unknown = commwatch("diagnose", "--job", "node3", "--dir", tmp_path)
    assert (unknown.returncode, "no job 'node3' in " in unknown.stderr) == (2, True)
    for name, ends in (
        ("http://node3.invalid:1", ""),
        ("node3", "; no job 'node3' is known here: `commwatch jobs` lists them"),
    ):
        unknown = commwatch("diagnose", name, "--dir", tmp_path)
        assert (unknown.returncode, "node3" in unknown.stderr) == (2, True)
        assert unknown.stderr.endswith(f"{ends}\n")
        assert ("commwatch jobs" in unknown.stderr) == bool(ends)


def test_ranks_of_answers() -> None:
    """A rank comes back from the JSON of an agent as it was, with what it is in, what it did before there, and what it does."""
    doing = Activity("asleep", "is asleep in a timer", 4.0, is_working=False)
    for of in (view(0), view(1, in_flight=[in_flight(1), replace(in_flight(4), place=Usual(3, 1.5))], activity=doing)):
        assert _rank(json.loads(json.dumps(asdict(of)))) == of
