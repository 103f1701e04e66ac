"""The stream behind the live page: one read for all, slow listeners delay none, and nothing is read without listeners."""

from __future__ import annotations

import asyncio
import json
import os
import selectors
import socket
import subprocess
import sys
import threading
import time
import urllib.error
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import ExitStack, aclosing, contextmanager
from http.client import HTTPResponse
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest

from commwatch_agent.history.opening import StoreError
from commwatch_agent.web.event_stream import EventStream, Topic
from commwatch_agent.web.gate import MOST_STREAMS, MOST_STREAMS_OF_ONE
from tests.helpers import (
    NOBODY,
    PATIENCE_S,
    RunningAgent,
    Trainer,
    agent,
    group_entry,
    identity,
    mark,
    needs,
    operation,
    wait_for,
)


class Looks:
    """Counts reads; each returns its number."""

    def __init__(self) -> None:
        self.jobs: list[str | None] = []

    def __call__(self, job: str | None) -> bytes:
        self.jobs.append(job)
        return str(len(self.jobs)).encode()


def feed(
    looks: Callable[[str | None], bytes], every_s: float = 0.01, ending: Callable[[], bool] = lambda: False
) -> EventStream:
    """One with a single topic."""
    return EventStream(Topic("past", lambda job: b"[]", 0.0), [Topic("moment", looks, every_s)], ending)


async def take(events: AsyncIterator[bytes], number: int) -> list[bytes]:
    """The next moments."""
    found: list[bytes] = []
    async for event in events:
        if event.startswith(b"event: moment"):
            found.append(event)
            if len(found) == number:
                break
    return found


def run(main: Coroutine[Any, Any, None]) -> None:
    """To its end, which must come."""
    asyncio.run(asyncio.wait_for(main, PATIENCE_S))


def test_begins_with_the_past() -> None:
    """A listener gets the time after which to reconnect, then the past, then the present, as server-sent events."""

    async def main() -> None:
        async with aclosing(feed(Looks()).follow(None)) as events:
            assert [await anext(events) for _ in range(3)] == [
                b"retry: 1000\n\n", b"event: past\ndata: []\n\n", b"event: moment\ndata: 1\n\n",
            ]  # fmt: skip

    run(main())


def test_one_read_at_a_time() -> None:
    """However many jobs are watched, one live read runs at a time; a read of another source does not delay it."""
    under_way, most, history = 0, 0, threading.Event()

    def look(job: str | None) -> bytes:
        nonlocal under_way, most
        under_way += 1
        most = max(most, under_way)
        time.sleep(0.001)  # lets others in
        under_way -= 1
        return b"1"

    def slow(_: str | None) -> bytes:
        history.wait(PATIENCE_S)
        return b"2"

    async def main() -> None:
        topics = [Topic("moment", look, 0.0), Topic("told", slow, 0.0, "worker")]
        many = EventStream(Topic("past", lambda _: b"[]", 0.0), topics, lambda: False)
        try:
            await asyncio.gather(*(take(many.follow(f"job{n}"), 5) for n in range(8)))
        finally:
            history.set()

    run(main())
    assert most == 1


def test_one_look_for_all() -> None:
    """All listeners of a job share one read at a time; another job has its own; without listeners there is none."""

    async def main() -> None:
        looks = Looks()
        shared = feed(looks)
        async with AsyncExit() as stack:
            listeners = [await stack.enter(shared.follow("a")) for _ in range(20)]
            found = await asyncio.gather(*(take(events, 3) for events in listeners))
            assert {len(events) for events in found} == {3}
            assert len(looks.jobs) < 20
            await take(await stack.enter(shared.follow("b")), 1)
            assert set(looks.jobs) == {"a", "b"}
        await asyncio.sleep(0)
        seen = len(looks.jobs)
        await asyncio.sleep(0.1)
        assert len(looks.jobs) <= seen + 1  # one that was under way

    run(main())


class AsyncExit:
    """Closes streams at the end."""

    def __init__(self) -> None:
        self._open: list[Any] = []

    async def __aenter__(self) -> AsyncExit:
        return self

    async def enter(self, events: Any) -> Any:
        """Have it begun, and closed at the end."""
        await anext(events)
        self._open.append(events)
        return events

    async def __aexit__(self, *_: object) -> None:
        for events in self._open:
            await events.aclose()


def test_slow_listener_misses_events() -> None:
    """A listener that reads nothing for a while gets the latest afterwards, and has delayed no other."""

    async def main() -> None:
        looks = Looks()
        shared = feed(looks)
        async with aclosing(shared.follow(None)) as slow, aclosing(shared.follow(None)) as quick:
            first = (await take(slow, 1))[0]
            latest = (await take(quick, 50))[-1]
            after = (await take(slow, 1))[0]
            assert _number(first) < 10
            assert _number(after) >= _number(latest)

    run(main())


def _number(event: bytes) -> int:
    return int(event.split(b"data: ")[1])


def test_history_that_cannot_be_read() -> None:
    """A read that fails for now leaves out its event; the stream continues."""

    async def main() -> None:
        answers = iter([StoreError("busy"), OSError("disk"), None])

        def look(job: str | None) -> bytes:
            failure = next(answers, None)
            if failure is not None:
                raise failure
            return b"7"

        async with aclosing(feed(look).follow(None)) as events:
            assert (await take(events, 1))[0] == b"event: moment\ndata: 7\n\n"

    run(main())


def test_ends_with_the_agent_and_with_a_defect() -> None:
    """If the agent shuts down, or a read has a defect, streams end, so that pages try again; a new stream starts afresh."""

    async def main() -> None:
        ending = threading.Event()
        shared = feed(Looks(), ending=ending.is_set)
        async with aclosing(shared.follow(None)) as events:
            await take(events, 1)
            ending.set()
            assert len([event async for event in events]) <= 1

        calls: list[int] = []

        def defective(job: str | None) -> bytes:
            calls.append(1)
            if len(calls) == 1:
                raise ZeroDivisionError
            return b"1"

        shared = feed(defective)
        async with aclosing(shared.follow(None)) as events:
            assert [event async for event in events][2:] == []
        async with aclosing(shared.follow(None)) as events:
            assert len(await take(events, 1)) == 1

    run(main())


# -- with a real agent ------------------------------------------------------------------------


@contextmanager
def job_of(directory: Path, ranks: int = 2, **who: Any) -> Iterator[list[Trainer]]:
    """A running job with some steps behind it."""
    now = time.monotonic_ns()
    about = {"wall_offset_ns": time.time_ns() - now, "started_ns": now - 3_000_000_000, **who}
    with ExitStack() as stack:
        trainers = []
        for rank in range(ranks):
            identified = identity(rank=rank, world_size=ranks, **about)
            path = directory / "rings" / f"{identified['job']}.r0.{rank}.ring"
            trainer = stack.enter_context(Trainer(path, identified))
            trainer.call("name", [(group_entry(0, tuple(range(ranks)), "dp"),)])
            trainer.write(record for n in range(20) for record in _step(now - (20 - n) * 100_000_000, n))
            trainers.append(trainer)
        yield trainers


def _step(begin_ns: int, n: int) -> Iterator[tuple[int, ...]]:
    yield operation(start_ns=begin_ns, end_ns=begin_ns + 40_000_000, seq=n)
    yield mark(n, begin_ns + 90_000_000)


@contextmanager
def listening(running: RunningAgent, query: str = "") -> Iterator[HTTPResponse]:
    """A stream of a real agent."""
    with urlopen(f"{running.url}/api/v1/stream{query}", timeout=PATIENCE_S) as response:
        yield response


def events_of(response: HTTPResponse, wanted: Callable[[str, Any], bool]) -> Any:
    """The data of the first event that is wanted."""
    name = ""
    for line in response:
        key, _, value = line.decode().rstrip("\n").partition(": ")
        if key == "event":
            name = value
        elif key == "data" and wanted(name, data := json.loads(value)):
            return data
    raise AssertionError("the stream has ended")


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningAgent]:
    """An agent with a job."""
    directory = tmp_path_factory.mktemp("stream") / "run"
    with job_of(directory, job="train"), agent(directory) as running:
        wait_for(lambda: running.get("/api/v1/jobs"), "the job")
        yield running


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[RunningAgent]:
    """An agent whose streams are all free: it notices some time after the end of a client that a stream has ended."""
    with agent(tmp_path / "run") as running:
        yield running


def test_says_what_the_api_says(watched: RunningAgent) -> None:
    """Each event of a real agent, against the answers of its query API."""
    with listening(watched) as response:
        assert response.headers["Content-Type"].startswith("text/event-stream")
        assert response.headers["Cache-Control"] == "no-store"
        moment = events_of(
            response, lambda name, data: name == "moment" and data["job"] and data["job"]["comm"] is not None
        )
        line = events_of(response, lambda name, data: name == "timeline" and data is not None)
        sums = events_of(response, lambda name, data: name == "operations" and data["rows"])
    assert (moment["job"]["job_id"], moment["job"]["state"], moment["jobs"]) == (
        "train",
        "running",
        [{"job_id": "train", "running": True}],
    )
    ranks = watched.get("/api/v1/ranks?job=train")
    assert [rank["rank"] for rank in moment["job"]["ranks"]] == [rank["rank"] for rank in ranks]
    steps = watched.get("/api/v1/steps?job=train")
    assert [rank["step"] for rank in moment["job"]["ranks"]] == [
        max(s["seq"] for s in steps if s["rank"] == r) for r in (0, 1)
    ]
    usual = [step for step in steps if not step["long"]]
    assert moment["job"]["comm"] == pytest.approx(sum(s["comm_s"] for s in usual) / sum(s["duration_s"] for s in usual))
    (row,), (kept,) = sums["rows"], watched.get("/api/v1/summary?job=train")["rows"]
    assert (row["by"], row["count"], row["busbw"]) == (kept["by"], kept["count"], kept["busbw"])
    assert [len(track["bars"]) for track in line["tracks"]] == [20, 20]


def test_job_that_is_asked_for(watched: RunningAgent) -> None:
    """`job` names the job; an unknown one gives an empty moment with the known jobs, not an error: it may start later."""
    with listening(watched, "?job=nobody") as response:
        moment = events_of(response, lambda name, data: name == "moment")
    assert (moment["job"], [job["job_id"] for job in moment["jobs"]]) == (None, ["train"])
    with pytest.raises(urllib.error.HTTPError, match="400"), listening(watched, "?jop=train"):
        pass


def test_not_more_than_there_is_room_for(watched: RunningAgent) -> None:
    """One stream of a client too many is refused with a 429 and the reason; when one ends there is room again."""
    with ExitStack() as stack:
        for _ in range(MOST_STREAMS_OF_ONE - 1):
            stack.enter_context(listening(watched))
        with listening(watched) as last:
            events_of(last, lambda name, data: name == "moment")
            with pytest.raises(urllib.error.HTTPError) as refused, listening(watched):
                pass
            problem = json.loads(refused.value.read())
            detail = f"{MOST_STREAMS_OF_ONE} streams of this client (user {os.getuid()}) are open"
            assert (problem["status"], problem["detail"].split(",")[0]) == (429, detail)

        def room() -> bool:
            try:
                with listening(watched) as again:
                    return bool(events_of(again, lambda name, data: name == "moment"))
            except urllib.error.HTTPError:
                return False

        wait_for(room, "room for another")


#: Opens so many streams of an agent as a user, and prints a line when they have begun, and one when one of them has ended.
_STREAMS_OF = """
import os, select, socket, sys
uid, host, port, number = int(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
"a".encode("idna")
os.setuid(uid)
streams = [socket.create_connection((host, port)) for _ in range(number)]
for stream in streams:
    stream.sendall(b"GET /api/v1/stream HTTP/1.1\\r\\nHost: localhost\\r\\n\\r\\n")
    assert b" 200 " in stream.recv(64)
print("begun", flush=True)
while True:
    for stream in select.select(streams, [], [])[0]:
        if stream.recv(1 << 16).endswith(b"0\\r\\n\\r\\n"):
            print("ended", flush=True)
"""


def test_two_users_do_not_lock_out_a_third(alone: RunningAgent) -> None:
    """If two users have all streams of an agent, a third one gets one, and one of theirs ends as a complete response."""
    needs(os.getuid() == 0, "root, to be other users")
    host, _, port = alone.url.removeprefix("http://").partition(":")
    with ExitStack() as stack:
        users = []
        for uid in (NOBODY, NOBODY - 1):
            command = [sys.executable, "-c", _STREAMS_OF, str(uid), host, port, str(MOST_STREAMS // 2)]
            user = stack.enter_context(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
            stack.callback(user.kill)
            assert user.stdout is not None
            assert user.stdout.readline() == "begun\n"
            users.append(user.stdout)
        with listening(alone) as mine:
            events_of(mine, lambda name, data: name == "moment")
            with selectors.DefaultSelector() as either:  # ``select`` takes no descriptor above 1023
                for stream in users:
                    either.register(stream, selectors.EVENT_READ)
                (ready,) = either.select(PATIENCE_S)
            (each,) = [stream for stream in users if stream is ready[0].fileobj]
            assert each.readline() == "ended\n"


def test_client_that_does_not_read(alone: RunningAgent) -> None:
    """A client that never reads its answer slows neither the intake nor another client."""
    host, _, port = alone.url.removeprefix("http://").partition(":")
    with ExitStack() as stack:
        for _ in range(MOST_STREAMS_OF_ONE - 1):
            deaf = stack.enter_context(socket.create_connection((host, int(port))))
            deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            deaf.sendall(b"GET /api/v1/stream HTTP/1.1\r\nHost: localhost\r\n\r\n")
        with listening(alone) as response:
            ats = [events_of(response, lambda name, data: name == "moment")["at"] for _ in range(3)]
        assert ats == sorted(set(ats))
        assert alone.get("/readyz") == "ok\n"


def test_agent_that_ends_ends_its_streams(tmp_path: Path) -> None:
    """An open page does not hold up the end of the agent."""
    with agent(tmp_path / "run") as running, listening(running) as response:
        events_of(response, lambda name, data: name == "moment")
        running.process.terminate()
        assert running.process.wait(PATIENCE_S) == 0
        response.read()
