"""What may be slow, such as a file on a server, asked by an event loop that nobody may hold up."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

_T = TypeVar("_T")


class Aside(Generic[_T]):
    """Calls something in a thread beside the event loop, once at a time: who asks meanwhile gets the same answer.

    Args:
        name: of the thread, which holds up nobody's end.
    """

    def __init__(self, name: str, call: Callable[[], _T]) -> None:
        self._name, self._call = name, call
        self._under_way: asyncio.Future[_T] | None = None

    async def ask(self, patience_s: float) -> _T:
        """What it returns, or raises.

        Raises:
            TimeoutError: that took longer; the call goes on.
        """
        if self._under_way is None or self._under_way.done():
            self._under_way = self._begin()
        mine = self._under_way  # the next may have begun before this one is looked at
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
            except Exception as error:  # whatever it is, it is for who asks
                tell(answer.set_exception, error)
            else:
                tell(answer.set_result, found)

        def tell(how: Callable[..., None], what: object) -> None:
            with contextlib.suppress(RuntimeError):  # the loop has ended meanwhile
                loop.call_soon_threadsafe(how, what)

        threading.Thread(target=work, name=self._name, daemon=True).start()
        return answer
