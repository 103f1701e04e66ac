"""Slow calls made from an event loop that keeps running."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator

import pytest

from commwatch_agent.runtime.offload import SharedCall
from tests.helpers import PATIENCE_S


@pytest.fixture
def go() -> Iterator[threading.Event]:
    """Lets the calls that wait for it end; it is set at the end in any case."""
    event = threading.Event()
    yield event
    event.set()


def test_one_call_for_all_who_ask_meanwhile(go: threading.Event) -> None:
    """Requests during a call get its result; a request after it causes another call."""
    calls: list[int] = []

    def call() -> int:
        calls.append(len(calls))
        go.wait(PATIENCE_S)
        return calls[-1]

    async def ask() -> None:
        aside = SharedCall("slow", call)
        asked = [asyncio.create_task(aside.ask(PATIENCE_S)) for _ in range(5)]
        await asyncio.sleep(0)
        go.set()
        assert await asyncio.gather(*asked) == [0] * 5
        assert await aside.ask(PATIENCE_S) == 1

    asyncio.run(ask())


def test_next_call_begins_before_the_answer_is_taken() -> None:
    """A caller gets the result of its own call, even if the next call has begun before the loop delivers it."""

    async def ask() -> None:
        aside = SharedCall("quick", lambda: 1)
        found: list[int] = []

        async def again() -> None:
            for _ in range(200):
                found.append(await aside.ask(PATIENCE_S))

        await asyncio.gather(*(again() for _ in range(8)))
        assert found == [1] * 1600

    asyncio.run(ask())


def test_patience(go: threading.Event) -> None:
    """A call that takes too long is abandoned by its caller, not begun again, and its result goes to later callers."""
    calls: list[None] = []

    def call() -> str:
        calls.append(None)
        go.wait(PATIENCE_S)
        return "late"

    async def ask() -> None:
        aside = SharedCall("slow", call)
        for _ in range(3):
            with pytest.raises(TimeoutError):
                await aside.ask(0.01)
        asked = asyncio.create_task(aside.ask(PATIENCE_S))
        await asyncio.sleep(0)
        go.set()
        assert (await asked, len(calls)) == ("late", 1)

    asyncio.run(ask())


def test_errors_are_of_who_asks() -> None:
    """An exception of the call is raised at its caller."""

    def call() -> None:
        raise OSError("no disk")

    with pytest.raises(OSError, match="no disk"):
        asyncio.run(SharedCall("broken", call).ask(PATIENCE_S))


def test_loop_that_has_ended(go: threading.Event) -> None:
    """A call that outlives its loop ends quietly."""

    async def ask() -> None:
        with pytest.raises(TimeoutError):
            await SharedCall("late", lambda: go.wait(PATIENCE_S)).ask(0.01)

    asyncio.run(ask())
    (thread,) = [each for each in threading.enumerate() if each.name == "late"]
    go.set()
    thread.join(PATIENCE_S)
    assert not thread.is_alive()
