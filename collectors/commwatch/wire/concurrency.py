"""Wait for a condition with a timeout; run several calls in parallel."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import TypeVar

_T = TypeVar("_T")
_R = TypeVar("_R")


def wait_until(condition: Callable[[], bool], timeout_s: float) -> bool:
    """Poll ``condition`` until it holds; return False if it does not within ``timeout_s``."""
    end = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
    return True


def at_once(do: Callable[[_T], _R], items: Iterable[_T], most: int) -> list[Future[_R]]:
    """Call ``do`` for every item, ``most`` at a time, in daemon threads; a pool's threads would delay the end of the process.

    Returns:
        A future for each item, in order; its ``result`` raises what ``do`` raised. Cancelled items are not begun.
    """
    todo, futures = SimpleQueue[tuple[Future[_R], _T]](), list[Future[_R]]()
    for item in items:
        futures.append(Future())
        todo.put((futures[-1], item))
    for _ in range(min(most, len(futures))):
        threading.Thread(target=_work, args=(do, todo), daemon=True).start()
    return futures


def _work(do: Callable[[_T], _R], todo: SimpleQueue[tuple[Future[_R], _T]]) -> None:
    with suppress(Empty):
        while True:
            future, item = todo.get_nowait()
            if future.set_running_or_notify_cancel():
                _fulfil(future, do, item)


def _fulfil(future: Future[_R], do: Callable[[_T], _R], item: _T) -> None:
    try:
        future.set_result(do(item))
    except BaseException as error:  # raised by the future's result, as with a pool
        future.set_exception(error)
