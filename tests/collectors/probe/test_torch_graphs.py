"""CUDA graphs: each capture and each replay is seen once, by PyTorch's hooks or without them, and operations are kept for their graph."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch.cuda.graphs

from commwatch.probe.torch_graphs import GraphEvents, GraphHooks
from commwatch.probe.torch_groups import Group
from commwatch.probe.torch_replay import Captured, Operation

HOOKS = ("capture_start", "capture_end", "replay_start", "replay_end")


class Graph:
    """What the hooks use of ``CUDAGraph``."""

    def capture_begin(self, pool: object = None, capture_error_mode: str = "global") -> None:
        """Begin."""

    def capture_end(self) -> None:
        """End, or fail."""
        if getattr(self, "broken", False):
            raise RuntimeError("the capture was broken")

    def replay(self) -> None:
        """Replay."""


class HookedGraph(Graph):
    """A graph that calls hooks, as PyTorch 2.14 does."""

    hooks: dict[str, list[Callable[[Any], None]]]

    def _run(self, name: str) -> None:
        for hook in self.hooks[name]:
            hook(self)

    def capture_begin(self, pool: object = None, capture_error_mode: str = "global") -> None:
        self._run("capture_start")

    def capture_end(self) -> None:
        self._run("capture_end")
        super().capture_end()

    def replay(self) -> None:
        self._run("replay_start")
        self._run("replay_end")


class Seen(GraphEvents):
    """Keeps what happens, in order."""

    def __init__(self) -> None:
        self.events: list[tuple[str, int]] = []

    def capture_begins(self, graph: int) -> None:
        self.events.append(("begins", graph))

    def capture_ends(self, graph: int) -> None:
        self.events.append(("ends", graph))

    def replay(self, graph: int) -> None:
        self.events.append(("replay", graph))

    def replayed(self) -> None:
        self.events.append(("replayed", self.events[-1][1]))

    def forget_graph(self, graph: int) -> None:
        self.events.append(("forget", graph))


def guard(do: Callable[..., None], *args: Any) -> None:
    do(*args)


@pytest.fixture(params=["methods", "hooks"])
def graph_class(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> type[Graph]:
    """The class of graphs, in a torch without and with hooks."""
    if request.param == "methods":
        made: type[Graph] = type("Wrapped", (), dict(vars(Graph)))
        for name in HOOKS:
            monkeypatch.delattr(torch.cuda.graphs, f"register_graph_{name}_hook", raising=False)
    else:
        hooks: dict[str, list[Callable[[Any], None]]] = {name: [] for name in HOOKS}
        made = type("Hooked", (HookedGraph,), {"hooks": hooks})

        def register(name: str, hook: Callable[[Any], None]) -> Any:
            hooks[name].append(hook)
            return SimpleNamespace(remove=lambda: hooks[name].remove(hook))

        for name in HOOKS:
            there = f"register_graph_{name}_hook"
            monkeypatch.setattr(torch.cuda.graphs, there, lambda hook, name=name: register(name, hook), raising=False)
    monkeypatch.setattr(torch.cuda.graphs, "CUDAGraph", made)
    return made


def test_life_of_graphs(graph_class: type[Graph]) -> None:
    """Captures and replays are seen in their order; a graph that is captured anew, or freed, is forgotten; one from before is not seen."""
    seen, earlier = Seen(), graph_class()
    hooks = GraphHooks(seen, guard)
    earlier.capture_begin()
    hooks.watch()
    earlier.capture_end()
    earlier.replay()
    assert seen.events == []
    first, second = graph_class(), graph_class()
    first.capture_begin(pool=None, capture_error_mode="thread_local")
    first.capture_end()
    second.capture_begin()
    second.capture_end()
    for graph in (first, second, second):
        graph.replay()
    assert seen.events == [
        *(("begins", 1), ("ends", 1), ("begins", 2), ("ends", 2)),
        *(("replay", 1), ("replayed", 1), ("replay", 2), ("replayed", 2), ("replay", 2), ("replayed", 2)),
    ]
    seen.events.clear()
    first.capture_begin()
    assert seen.events == [("forget", 1), ("begins", 3)]
    del first, graph
    gc.collect()
    second.capture_begin()
    assert sorted(seen.events[2:]) == [("begins", 4), ("forget", 2), ("forget", 3)]


def test_capture_that_fails(graph_class: type[Graph]) -> None:
    """A capture whose end raises has ended, and the user gets the exception."""
    seen = Seen()
    GraphHooks(seen, guard).watch()
    graph = graph_class()
    graph.broken = True  # type: ignore[attr-defined]
    graph.capture_begin()
    with pytest.raises(RuntimeError, match="the capture was broken"):
        graph.capture_end()
    assert seen.events == [("begins", 1), ("ends", 1)]


def test_unwatch(graph_class: type[Graph]) -> None:
    """Nothing is seen before ``watch`` and after ``unwatch``, and PyTorch's own methods are back."""
    before = dict(vars(graph_class))
    seen = Seen()
    hooks = GraphHooks(seen, guard)
    hooks.watch()
    hooks.unwatch()
    hooks.unwatch()
    graph = graph_class()
    graph.capture_begin()
    graph.capture_end()
    graph.replay()
    assert seen.events == []
    assert dict(vars(graph_class)) == before


def operation(number: int, group: Group) -> Operation:
    """An operation with this size."""
    return Operation(group, "all_reduce", 1, 1, -1, 0, number, 0)


def test_operations_of_graphs() -> None:
    """Operations go to the capture of their thread, else to the only one; a capture that was broken off is replaced by the next."""
    group = Group(lambda: group, 2, (0, 1), "id", True)
    captured = Captured()
    assert not captured.add(operation(0, group))
    captured.begin(1)
    captured.begin(2)
    assert captured
    in_another_thread(lambda: captured.add(operation(1, group)))
    assert [each.size_bytes for each in captured.of(2)] == [1]
    assert captured.of(1) == []
    added = []

    def other() -> None:
        captured.begin(3)
        added.append(captured.add(operation(3, group)))
        in_another_thread(lambda: added.append(captured.add(operation(4, group))))
        captured.end(3)

    in_another_thread(other)
    assert added == [True, False]
    captured.end(2)
    assert not captured
    captured.forget(2)
    assert (captured.of(2), [each.size_bytes for each in captured.of(3)]) == ([], [3])


def in_another_thread(do: Callable[[], object]) -> None:
    thread = threading.Thread(target=do)
    thread.start()
    thread.join()


def test_group_that_is_gone() -> None:
    """Operations of a group that has been destroyed are not replayed."""
    alive: list[object] = [object()]
    group = Group(lambda: alive[0] if alive else None, 2, (0, 1), "id", True)
    captured = Captured()
    captured.begin(1)
    captured.add(operation(1, group))
    assert len(captured.of(1)) == 1
    alive.clear()
    assert captured.of(1) == []
