"""Waiting: for a condition, with an end; for several things at once."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")


def wait_until(condition: Callable[[], bool], timeout_s: float) -> bool:
    """Look at ``condition`` until it holds; False if it does not in time."""
    end = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
    return True


def at_once(do: Callable[[T], R], items: Iterable[T], most: int) -> list[R]:
    """``do`` of every item, ``most`` at a time, in threads that do not keep the process from ending, as a pool's would."""
    futures, room = [], threading.Semaphore(most)
    for item in items:
        future: Future[R] = Future()
        room.acquire()
        threading.Thread(target=_fulfil, args=(future, do, item, room), daemon=True).start()
        futures.append(future)
    return [future.result() for future in futures]


def _fulfil(future: Future[R], do: Callable[[T], R], item: T, room: threading.Semaphore) -> None:
    try:
        future.set_result(do(item))
    except BaseException as error:  # for whoever waits, as a pool does it
        future.set_exception(error)
    finally:
        room.release()
