"""Which exceptions are the user's: those that a signal handler has raised in the middle of our code."""

from __future__ import annotations

import functools
import gc
import signal
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from commwatch.wire.handlers import raised_by_handler


def plain(signum: int, frame: FrameType | None) -> None:
    raise TimeoutError("the user's")


def wrapped(*arguments: Any) -> None:
    plain(*arguments)


def once(signum: int, frame: FrameType | None) -> None:
    signal.signal(signum, signal.SIG_DFL)
    raise OSError("the user's")


def lent(signum: int, frame: FrameType | None) -> None:
    def look() -> FrameType | None:
        return frame

    raise ValueError(str(look()))


def by_name(*, given: FrameType | None) -> None:
    raise RuntimeError(str(given))


class Handler:
    """Handlers that are no functions."""

    def __call__(self, signum: int, frame: FrameType | None) -> None:
        raise RuntimeError("the user's")

    def method(self, signum: int, frame: FrameType | None) -> None:
        raise RuntimeError("the user's")


@pytest.fixture(autouse=True)
def _handler_of_old() -> Iterator[None]:
    before = signal.getsignal(signal.SIGUSR1)
    yield
    signal.signal(signal.SIGUSR1, before)


def raised(call: Callable[[], object]) -> BaseException:
    """What the call raises."""
    try:
        call()
    except BaseException as error:
        return error
    raise AssertionError("it has raised nothing")


HANDLERS: dict[str, Callable[[int, FrameType | None], Any]] = {
    "function": plain,
    "wrapper": wrapped,
    "takes itself out": once,
    "keeps its frame in a cell": lent,
    "keyword": lambda signum, frame: by_name(given=frame),
    "object": Handler(),
    "method": Handler().method,
    "partial": functools.partial(lambda more, signum, frame: plain(signum, frame), "more"),
    "generator": lambda *_: next(iter([]) if not _ else (_ for _ in ()).throw(LookupError())),
}


@pytest.mark.parametrize("name", HANDLERS)
def test_handlers(name: str) -> None:
    """An exception of a handler reaches the user, whatever kind of callable it is, even if it is no longer installed."""
    signal.signal(signal.SIGUSR1, HANDLERS[name])
    error = raised(lambda: signal.raise_signal(signal.SIGUSR1))
    signal.signal(signal.SIGUSR1, signal.SIG_DFL)
    assert raised_by_handler(error)


def test_faults() -> None:
    """What our own code raises is not the user's, though handlers are installed that would raise the same."""
    signal.signal(signal.SIGUSR1, plain)

    def fault() -> None:
        raise TimeoutError("ours")

    assert not raised_by_handler(raised(fault))
    assert not raised_by_handler(raised(lambda: Path("/nowhere/at/all").read_text()))
    assert not raised_by_handler(TimeoutError("never raised"))


def test_ends() -> None:
    """What ends the process is never ours, wherever it comes from."""
    assert raised_by_handler(KeyboardInterrupt())
    assert raised_by_handler(SystemExit(9))


class Tensor:
    """Something of the user's that must not be kept."""


def test_nothing_is_kept() -> None:
    """Once an error that was looked at is dropped, nothing keeps the local variables of the functions it has passed."""

    def guarded(given: Tensor) -> weakref.ref[Tensor]:
        found = None
        try:
            raise RuntimeError(str(given))
        except RuntimeError as error:
            found = raised_by_handler(error)
        assert found is False
        return weakref.ref(given)

    gc.disable()
    try:
        kept = guarded(Tensor())
        assert kept() is None
    finally:
        gc.enable()
