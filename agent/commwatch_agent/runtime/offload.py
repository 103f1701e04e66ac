"""Slow calls, such as reads from a file server, in a thread, so that they do not block the event loop."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

_T = TypeVar("_T")


class SharedCall(Generic[_T]):
    """Runs a call in a thread beside the event loop, one at a time; requests during a call share its result.

    Args:
        name: of the thread, a daemon thread.
    """

    def __init__(self, name: str, call: Callable[[], _T]) -> None:
        self._name, self._call = name, call
        self._under_way: asyncio.Future[_T] | None = None

    async def ask(self, patience_s: float) -> _T:
        """Return what the call returns, or raise what it raises.

        Raises:
            TimeoutError: the call took longer than ``patience_s``; it goes on.
        """
        if self._under_way is None or self._under_way.done():
            self._under_way = self._begin()
        mine = self._under_way  # another call may have begun when this one is awaited
        done, _ = await asyncio.wait({mine}, timeout=patience_s)
        if not done:
            raise TimeoutError
        return mine.result()

    def _begin(self) -> asyncio.Future[_T]:
        loop, call = asyncio.get_running_loop(), self._call
        answer: asyncio.Future[_T] = loop.create_future()

        def work() -> None:
            try:
                found = call()
            except Exception as error:  # raised in ``ask``
                resolve(answer.set_exception, error)
            else:
                resolve(answer.set_result, found)

        def resolve(how: Callable[..., None], what: object) -> None:
            with contextlib.suppress(RuntimeError):  # the loop has been closed
                loop.call_soon_threadsafe(how, what)

        threading.Thread(target=work, name=self._name, daemon=True).start()
        return answer
