"""Hooks of CUDA graphs. A captured operation runs at each replay of its graph, without a call of the dispatcher."""

from __future__ import annotations

import functools
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable
from itertools import count
from typing import Any

import torch.cuda.graphs


class GraphEvents(ABC):
    """Receives the events of CUDA graphs. ``graph`` is a number that identifies one capture."""

    @abstractmethod
    def capture_begins(self, graph: int) -> None:
        """Called when a capture begins, in its thread."""

    @abstractmethod
    def capture_ends(self, graph: int) -> None:
        """Called when the capture has ended, successfully or not."""

    @abstractmethod
    def replay(self, graph: int) -> None:
        """Called before each replay of the graph."""

    @abstractmethod
    def replayed(self) -> None:
        """Called in the same thread after a replay has been launched."""

    @abstractmethod
    def forget_graph(self, graph: int) -> None:
        """Called when the graph was destroyed, or is captured again under another number."""


class GraphHooks:
    """Watches all CUDA graphs of the process, by PyTorch's hooks if it has them, else by wrapped methods.

    Args:
        events: receives the events.
        guard: calls a function with its arguments, and handles its errors.
    """

    def __init__(self, events: GraphEvents, guard: Callable[..., None]) -> None:
        self._events, self._guard = events, guard
        self._undo: list[Callable[[], None]] = []
        #: Numbers of graphs, by id; ids are used again. Not a WeakKeyDictionary, for the reason in torch_steps.py.
        self._numbers: dict[int, tuple[weakref.ref[Any], int]] = {}
        self._next = count(1).__next__

    def watch(self) -> None:
        """Install the hooks."""
        graphs: Any = torch.cuda.graphs
        on = {
            "capture_start": self._begin,
            "capture_end": self._end,
            "replay_start": self._replay,
            "replay_end": self._replayed,
        }
        register: dict[str, Any] = {name: getattr(graphs, f"register_graph_{name}_hook", None) for name in on}
        if all(register.values()):
            self._undo = [register[name](functools.partial(self._guard, do)).remove for name, do in on.items()]
        else:
            self._wrap(graphs.CUDAGraph)

    def unwatch(self) -> None:
        """Remove the hooks."""
        for undo in self._undo:
            undo()
        self._undo = []

    def _wrap(self, graph_class: Any) -> None:
        own = graph_class.capture_begin, graph_class.capture_end, graph_class.replay
        guard, begins, ends, replays, replayed = self._guard, self._begin, self._end, self._replay, self._replayed

        @functools.wraps(own[0])
        def capture_begin(graph: Any, *args: Any, **kwargs: Any) -> None:
            own[0](graph, *args, **kwargs)
            guard(begins, graph)

        @functools.wraps(own[1])
        def capture_end(graph: Any) -> None:
            try:
                own[1](graph)
            finally:
                guard(ends, graph)

        @functools.wraps(own[2])
        def replay(graph: Any) -> None:
            guard(replays, graph)
            own[2](graph)
            guard(replayed, graph)

        ours = capture_begin, capture_end, replay
        for function in ours:
            setattr(graph_class, function.__name__, function)

        def undo() -> None:
            for function, before in zip(ours, own, strict=True):
                if getattr(graph_class, function.__name__) is function:
                    setattr(graph_class, function.__name__, before)

        self._undo = [undo]

    def _begin(self, graph: Any) -> None:
        for key, (known, number) in list(self._numbers.items()):
            if known() is None or known() is graph:
                del self._numbers[key]
                self._events.forget_graph(number)
        number = self._next()
        self._numbers[id(graph)] = weakref.ref(graph), number
        self._events.capture_begins(number)

    def _end(self, graph: Any) -> None:
        if (number := self._number(graph)) is not None:
            self._events.capture_ends(number)

    def _replay(self, graph: Any) -> None:
        if (number := self._number(graph)) is not None:
            self._events.replay(number)

    def _replayed(self, graph: Any) -> None:
        if self._number(graph) is not None:
            self._events.replayed()

    def _number(self, graph: Any) -> int | None:
        """Return a graph's number; ``None`` if its capture was not seen."""
        known = self._numbers.get(id(graph))
        return known[1] if known is not None and known[0]() is graph else None
