"""Several calls at once: in order, a limited number of them, and calls that are no longer needed do not begin."""

from __future__ import annotations

import threading

import pytest

from commwatch.api.client import together
from commwatch.wire.concurrency import at_once
from tests.helpers import PATIENCE_S, wait_for


def test_in_order_and_bounded() -> None:
    """At most the given number of calls run at a time; the results are in the order of the items, whichever ends first."""
    running, most = list[int](), list[int]()
    may_end = [threading.Event() for _ in range(5)]

    def do(n: int) -> int:
        running.append(n)
        most.append(len(running))
        may_end[n].wait(PATIENCE_S)
        running.remove(n)
        return 10 * n

    futures = at_once(do, range(5), 2)
    wait_for(lambda: len(running) == 2, "two at a time")
    for n in (1, 0, 3, 2, 4):
        may_end[n].set()
        assert futures[n].result(PATIENCE_S) == 10 * n
        assert futures[0].done() == (n != 1)
    assert max(most) == 2


def test_what_fails_and_what_is_cancelled() -> None:
    """An exception of one item is raised for the caller that takes its result, and disturbs no other; an item cancelled in time never begins."""
    begun, go = list[int](), threading.Event()

    def do(n: int) -> float:
        begun.append(n)
        go.wait(PATIENCE_S)
        return 1 / n

    futures = at_once(do, [0, 1, 2], 1)
    wait_for(lambda: begun, "the first to begin")
    assert (futures[0].cancel(), futures[1].cancel()) == (False, True)
    go.set()
    assert futures[2].result(PATIENCE_S) == 0.5
    with pytest.raises(ZeroDivisionError):
        futures[0].result(PATIENCE_S)
    assert begun == [0, 2]


def test_together_leaves_the_late_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of questions asked together, those without an answer in time have none, and those that have not begun by then never begin."""
    monkeypatch.setattr("commwatch.api.client.TOGETHER_S", 0.5)
    monkeypatch.setattr("commwatch.api.client._AT_ONCE", 2)
    begun, go, before = list[int](), threading.Event(), threading.active_count()

    def question(n: int) -> int:
        begun.append(n)
        if n:
            go.wait(PATIENCE_S)
        return n

    assert together(question, range(4)) == [0, None, None, None]
    go.set()
    wait_for(lambda: threading.active_count() <= before, "the threads to end")
    assert sorted(begun) == [0, 1, 2]
