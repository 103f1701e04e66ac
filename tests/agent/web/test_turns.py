"""Turns: client by client, none lost, none given twice."""

from __future__ import annotations

import asyncio

import pytest

from commwatch_agent.web.turns import Turns
from tests.helpers import PATIENCE_S


async def _line(turns: Turns, clients: str, order: list[str]) -> list[asyncio.Task[None]]:
    """Requests of clients, each a letter, that wait in this order; each notes when its turn comes, and gives it back."""

    async def one(client: str) -> None:
        await turns.take(client, PATIENCE_S)
        order.append(client)
        turns.give_back(client)

    tasks = [asyncio.create_task(one(client)) for client in clients]
    await asyncio.sleep(0)  # each has asked
    return tasks


def test_client_by_client() -> None:
    """A client with one request waits for at most one request of each other client, however many those have."""

    async def play() -> str:
        turns, order = Turns(1), list[str]()
        await turns.take("z", PATIENCE_S)
        tasks = await _line(turns, "aaaaabbc", order)
        turns.give_back("z")
        await asyncio.gather(*tasks)
        return "".join(order)

    assert asyncio.run(play()) == "abcabaaa"


def test_at_once() -> None:
    """As many have a turn at once as there are, and no more."""

    async def play() -> None:
        turns = Turns(2)
        for client in "ab":
            await turns.take(client, PATIENCE_S)
        with pytest.raises(TimeoutError):
            await turns.take("c", 0.0)
        turns.give_back("a")
        await turns.take("c", PATIENCE_S)

    asyncio.run(play())


def test_gone_while_waiting() -> None:
    """Who gives up or is cancelled in the line takes no turn with it, also where the turn came at that moment."""

    async def play() -> list[str]:
        turns, order = Turns(1), list[str]()
        await turns.take("z", PATIENCE_S)
        with pytest.raises(TimeoutError):
            await turns.take("a", 0.0)
        tasks = await _line(turns, "abcd", order)
        tasks[0].cancel()
        await asyncio.sleep(0)
        turns.give_back("z")  # it is b's turn
        tasks[1].cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await turns.take("e", PATIENCE_S)
        return order

    assert asyncio.run(play()) == ["c", "d"]


def test_one_client_leaves_a_turn() -> None:
    """A client has at most its number of turns at once: another one gets the free turn at once, and the first its next one only after that."""

    async def play() -> list[str]:
        turns, order = Turns(3, of_one=2), list[str]()
        for _ in range(2):
            await turns.take("a", PATIENCE_S)
        tasks = await _line(turns, "aab", order)
        await asyncio.wait({tasks[2]}, timeout=PATIENCE_S)
        assert order == ["b"]
        turns.give_back("a")
        await asyncio.gather(*tasks)
        return order

    assert asyncio.run(play()) == ["b", "a", "a"]
