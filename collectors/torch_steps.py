"""Step marks: the ends of optimizer calls, told apart by optimizer. The agent makes steps of them."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable
from typing import Any

from torch.optim import optimizer as optim

EXPLICIT = -1


class StepHooks:
    """Watches all optimizers of the process.

    Args:
        mark: called as ``mark(optimizer, began_ns, ended_ns)`` at the end of each outermost call;
            ``optimizer`` counts the optimizers in the order they first stepped, -1 is an explicit mark.
    """

    def __init__(self, mark: Callable[[int, int, int], None]) -> None:
        self._mark = mark
        self._handles: list[Any] = []
        self._numbers: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        #: Optimizers whose step is running, outermost first, and when it began.
        self._running: list[tuple[int, int]] = []
        self._last_explicit = 0

    def install(self) -> None:
        """Hook the begin and the end of every optimizer's step."""
        self._handles = [
            optim.register_optimizer_step_pre_hook(self._before),
            optim.register_optimizer_step_post_hook(self._after),
        ]

    def uninstall(self) -> None:
        """Take the hooks out."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def explicit(self, now_ns: int) -> None:
        """The user's own mark: from now on the only ones."""
        self.uninstall()
        self._mark(EXPLICIT, self._last_explicit or now_ns, now_ns)
        self._last_explicit = now_ns

    def _before(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        me = id(optimizer)
        # A step that raised left its entry behind: whoever begins again cannot be inside itself.
        for depth, (running, _) in enumerate(self._running):
            if running == me:
                del self._running[depth:]
                break
        self._running.append((me, time.monotonic_ns()))

    def _after(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        me = id(optimizer)
        while self._running:
            running, began = self._running.pop()
            if running == me:
                if not self._running:  # nested calls (ZeroRedundancyOptimizer) are one
                    number = self._numbers.setdefault(optimizer, len(self._numbers))
                    self._mark(number, began, time.monotonic_ns())
                return
