"""The order in which the owners of rings get the time of the intake. Pure: the clock is a parameter.

The owner that has used the least time is next. An owner that had nothing to do saves no time up: it begins where the others are.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Generic, TypeVar

_T = TypeVar("_T")
_Owner = TypeVar("_Owner", bound=Hashable)


class _Queue(Generic[_T]):
    """What an owner still wants in this tick: the rest of the current pass over its things, and the next pass."""

    def __init__(self, things: Sequence[_T], passes: int) -> None:
        self._now, self._next, self._passes = deque(things), list[_T](), passes

    def batch(self, most: int) -> list[_T]:
        return [self._now.popleft() for _ in range(min(most, len(self._now)))]

    def add(self, more: Sequence[_T]) -> None:
        """Keep things for the next pass, and begin it if the current one is over."""
        self._next += more
        if not self._now and self._passes > 1:
            self._now, self._next, self._passes = deque(self._next), [], self._passes - 1

    def __len__(self) -> int:
        return len(self._now)


class Turns:
    """Shares time between owners.

    Args:
        budget_s: time of one ``take``; the batch that is under way at its end is finished.
        now_s: returns the time.
    """

    def __init__(self, budget_s: float, now_s: Callable[[], float]) -> None:
        self._budget_s, self._now_s = budget_s, now_s
        #: Time that each owner has used, and that of the owner who had the latest turn before it.
        self._used_s: dict[Hashable, float] = {}
        self._level_s = 0.0

    def take(
        self,
        wanted: Mapping[_Owner, Sequence[_T]],
        work: Callable[[list[_T]], Sequence[_T]],
        *,
        passes: int = 1,
        together: int = 1,
        is_enough: Callable[[], bool] = lambda: False,
    ) -> bool:
        """Work on the things of all owners until there are none, or the time is over; return whether it was enough.

        Args:
            work: gets a batch of things of one owner, and returns those of them that want another pass.
            passes: most passes over the things of an owner.
            together: most things of a batch.
            is_enough: ends it before the time is over; asked after each batch.
        """
        self._used_s = {owner: max(self._used_s.get(owner, 0.0), self._level_s) for owner in wanted}
        queues = {owner: _Queue(things, passes) for owner, things in wanted.items() if things}
        begin_s = self._now_s()
        while queues:
            owner = min(queues, key=self._used_s.__getitem__)
            self._level_s = self._used_s[owner]
            before_s = self._now_s()
            queues[owner].add(work(queues[owner].batch(together)))
            now_s = self._now_s()
            self._used_s[owner] += now_s - before_s
            if not queues[owner]:
                del queues[owner]
            if queues and (now_s - begin_s >= self._budget_s or is_enough()):
                return False
        return True
