"""Step marks: the ends of optimizer calls, by optimizer. The agent derives steps from them."""

from __future__ import annotations

import functools
import sys
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from itertools import count
from typing import Any, TypeVar

import torch
from torch.optim import optimizer as optim

EXPLICIT = -1
#: Most calls of one optimizer in one forward pass. With more, the passes are not visible: a CUDA graph replays them.
MOST_CALLS = 64
#: Method that a framework calls for each training step, even if its gradients overflowed: module, class, method.
_ENGINE = "deepspeed.runtime.engine", "DeepSpeedEngine", "_take_model_step"
#: Number of the next node of this thread's autograd graph: each forward pass that will have a backward makes some.
_next_node: Callable[[], int] = getattr(torch.autograd, "_get_sequence_nr", lambda: 0)


class _Calls(threading.local):
    """The optimizer calls of one thread."""

    def __init__(self) -> None:
        #: Optimizers whose step is running, outermost first, and when it began.
        self.running: list[tuple[int, int]] = []
        #: ``_next_node`` when the latest outermost call began; whether it was unchanged since the call before.
        self.node = 0
        self.same_pass = False
        #: The first optimizer of this pass, and the number of its later calls; whether passes are visible.
        self.first = EXPLICIT
        self.again = 0
        self.passes_seen = True
        #: An engine's step is running: its optimizer calls are part of it.
        self.in_engine = False

    def begin(self, node: int) -> int:
        """Note that an outermost call begins; return the time in ns."""
        self.same_pass, self.node = node == self.node and node > 0, node
        return time.monotonic_ns()

    def in_same_pass(self, number: int) -> bool:
        """Return whether the latest outermost call is in the forward pass of the call before; False if passes are not visible."""
        if not self.same_pass:
            self.first, self.again = number, 0
        elif number == self.first:
            self.again += 1
            self.passes_seen = self.passes_seen and self.again < MOST_CALLS
        return self.same_pass and self.passes_seen


class StepHooks:
    """Watches all optimizers of the process.

    Args:
        mark: called as ``mark(optimizer, began_ns, ended_ns, same_pass)`` at the end of each outermost call;
            ``optimizer`` counts the optimizers in the order they first stepped, -1 is an explicit mark; ``same_pass``:
            no forward pass ran between the begin of the call before and the begin of this one.
    """

    def __init__(self, mark: Callable[[int, int, int, bool], None]) -> None:
        self._mark = mark
        #: Optimizers and engines by id; ids are used again. Not a WeakKeyDictionary: its Python code runs while an optimizer is
        #: freed, and an exception of a signal handler is lost there.
        self._numbers: dict[int, tuple[weakref.ref[Any], int]] = {}
        self._next_number = count().__next__
        self._calls = _Calls()
        #: The class of a framework's engine, its own method, and our replacement.
        self._engine: tuple[Any, Callable[..., Any], Callable[..., Any]] | None = None
        self._last_explicit = 0
        #: Called with the optimizer or the engine after the end of each outermost call.
        self.on_step: Callable[[Any], object] | None = None
        #: The user marks the steps: there are no other marks.
        self._only_explicit = False

    def install(self) -> None:
        """Hook the begin and the end of every optimizer's step."""
        global _installed, _registered
        _installed = *_installed, self
        if not _registered:
            optim.register_optimizer_step_pre_hook(_before)
            optim.register_optimizer_step_post_hook(_after)
            _registered = True

    def uninstall(self) -> None:
        """End the marks. May be called inside a step."""
        global _installed
        _installed = tuple(hooks for hooks in _installed if hooks is not self)
        if self._engine is not None:
            (engine, own, ours), self._engine = self._engine, None
            if getattr(engine, _ENGINE[2]) is ours:
                setattr(engine, _ENGINE[2], own)

    def watch_engine(self) -> None:
        """Hook the steps of a framework's engine, if it has been imported: its optimizer calls are part of them."""
        if self._engine is not None or self not in _installed:
            return
        module, name, method = _ENGINE
        engine = getattr(sys.modules.get(module), name, None)
        own = getattr(engine, method, None)
        if own is None:
            return

        @functools.wraps(own)
        def step(engine: Any, *args: Any, **kwargs: Any) -> Any:
            calls = self._calls
            if self._engine is None or calls.in_engine:
                return own(engine, *args, **kwargs)
            began = calls.begin(_next_node())
            calls.in_engine = True
            try:
                result = own(engine, *args, **kwargs)
            finally:
                calls.in_engine = False
            self._end(engine, began)
            return result

        setattr(engine, method, step)
        self._engine = engine, own, step

    def seen(self) -> list[Any]:
        """Return the optimizers and engines that have stepped, and live."""
        return [each for reference, _ in self._numbers.values() if (each := reference()) is not None]

    def explicit(self, now_ns: int) -> None:
        """Write the user's own mark; from now on there are no others."""
        self._only_explicit = True
        if self.on_step is None:
            self.uninstall()
        self._mark(EXPLICIT, self._last_explicit or now_ns, now_ns, False)
        self._last_explicit = now_ns

    def before(self, optimizer: Any) -> None:
        """Note that a call of this optimizer begins."""
        me, calls, node = id(optimizer), self._calls, _next_node()
        self.watch_engine()
        if calls.in_engine:
            return
        # A step that raised left its entry: an optimizer cannot begin again inside its own step, or after a forward pass in it.
        if node != calls.node:
            calls.running.clear()
        for depth, (running, _) in enumerate(calls.running):
            if running == me:
                del calls.running[depth:]
                break
        calls.running.append((me, time.monotonic_ns() if calls.running else calls.begin(node)))

    def after(self, optimizer: Any) -> None:
        """Note that a call of this optimizer has ended, and mark the end of an outermost one."""
        me, calls = id(optimizer), self._calls
        while calls.running:
            running, began = calls.running.pop()
            if running == me:
                if not calls.running:  # nested calls (ZeroRedundancyOptimizer) are one
                    self._end(optimizer, began)
                return

    def _end(self, optimizer: Any, began_ns: int) -> None:
        """Mark the end of an outermost call of an optimizer or an engine."""
        if not self._only_explicit:
            number = self._number_of(optimizer)
            self._mark(number, began_ns, time.monotonic_ns(), self._calls.in_same_pass(number))
        if self.on_step is not None:
            self.on_step(optimizer)

    def _number_of(self, optimizer: Any) -> int:
        known = self._numbers.get(id(optimizer))
        if known is not None and known[0]() is optimizer:
            return known[1]
        self._numbers = {key: known for key, known in self._numbers.items() if known[0]() is not None}
        number = self._next_number()
        self._numbers[id(optimizer)] = weakref.ref(optimizer), number
        return number


#: The hooks that watch now, and whether torch calls them. Torch's tables keep our two functions for good: torch walks over a table during
#: a step, and raises in it if another entry is removed, such as by a user's own hook that marks a step.
_installed: tuple[StepHooks, ...] = ()
_registered = False
_Function = TypeVar("_Function", bound=Callable[..., Any])


def _must_be_one_graph() -> bool:
    """Return whether a graph break is an error where Dynamo traces now; it calls this while it traces, and keeps the answer."""
    try:
        dynamo: Any = sys.modules["torch._dynamo.symbolic_convert"]
        return dynamo.tls.current_tx.one_graph or getattr(dynamo, "_get_error_on_graph_break", bool)()
    except (KeyError, AttributeError, TypeError):  # unknown: a missing mark is better than an error in the training
        return True


def as_it_is(function: _Function) -> _Function:
    """Decorate a function that Dynamo may inline, but must not compile by itself, nor what it calls."""
    with suppress(AttributeError, TypeError):  # older torch: Dynamo looks at our code, too
        frames = torch._C._dynamo.eval_frame
        skip = frames._FrameAction.SKIP
        frames.set_code_exec_strategy(function.__code__, frames._FrameExecStrategy(skip, skip))
    return function


@as_it_is
def _before(optimizer: Any, args: Any, kwargs: Any) -> None:
    if _installed and not (torch.compiler.is_compiling() and _must_be_one_graph()):
        _call_begins(optimizer)


@as_it_is
def _after(optimizer: Any, args: Any, kwargs: Any) -> None:
    if _installed and not (torch.compiler.is_compiling() and _must_be_one_graph()):
        _call_ended(optimizer)


@as_it_is
def _call_begins(optimizer: Any) -> None:
    for hooks in _installed:
        hooks.before(optimizer)


@as_it_is
def _call_ended(optimizer: Any) -> None:
    for hooks in _installed:
        hooks.after(optimizer)


# What the decorators of ``torch.compiler`` set; they import Dynamo, which takes seconds.
_must_be_one_graph._dynamo_marked_constant = True  # type: ignore[attr-defined]
_call_begins._torchdynamo_disable = True  # type: ignore[attr-defined]
_call_ended._torchdynamo_disable = True  # type: ignore[attr-defined]
