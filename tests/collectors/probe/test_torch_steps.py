"""The marks that real optimizers leave."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from commwatch.probe import torch_steps
from commwatch.probe.torch_steps import MOST_CALLS, StepHooks


class Trainer:
    """A model, its hooks, and the marks that came: the optimizer as a letter, small where no forward pass ran since the call before."""

    def __init__(self) -> None:
        self.marks = ""
        self.hooks = StepHooks(self._mark)
        self.model = nn.Linear(4, 4)

    def _mark(self, optimizer: int, began_ns: int, ended_ns: int, same_pass: bool) -> None:
        assert 0 < began_ns <= ended_ns
        self.marks += chr(ord("a" if same_pass else "A") + optimizer)

    def backward(self) -> torch.Tensor:
        """A forward and a backward pass."""
        loss: torch.Tensor = self.model(torch.ones(1, 4)).sum()
        loss.backward()
        return loss

    def sgd(self) -> torch.optim.Optimizer:
        """One more optimizer."""
        return torch.optim.SGD(self.model.parameters(), 0.1)


@pytest.fixture
def trainer() -> Iterator[Trainer]:
    """A trainer in a thread's first step, whose hooks are in until the test is over."""
    trainer = Trainer()
    trainer.backward()
    trainer.hooks.install()
    yield trainer
    trainer.hooks.uninstall()


def test_one_optimizer(trainer: Trainer) -> None:
    """Each call after a forward pass is one of a new pass, however many backward passes there were."""
    optimizer = trainer.sgd()
    for passes in (1, 1, 4, 1):
        for _ in range(passes):
            trainer.backward()
        optimizer.step()
    assert trainer.marks == "AAAA"


def test_calls_for_one_pass(trainer: Trainer) -> None:
    """Calls without a forward pass between them are marked as such: of the same optimizer, and of another one."""
    one, other = trainer.sgd(), trainer.sgd()
    for _ in range(2):
        trainer.backward()
        one.step()
        with torch.no_grad():  # an evaluation is no pass that the optimizer needs
            trainer.model(torch.ones(1, 4))
        one.step()
        other.step()
        trainer.backward()
        other.step()
    assert trainer.marks == "AabB" * 2


def test_swapped_parameter_groups(trainer: Trainer) -> None:
    """An engine that calls the optimizer for each group of its parameters leaves the calls of one pass."""
    weight, bias = trainer.model.weight, trainer.model.bias
    by_parameter: list[dict[str, Any]] = [{"params": [weight]}, {"params": [bias]}]
    optimizer = torch.optim.AdamW(by_parameter)
    groups = optimizer.param_groups
    for _ in range(3):
        trainer.backward()
        for group in groups:
            optimizer.param_groups = [group]
            optimizer.step()
        optimizer.param_groups = groups
    assert trainer.marks == "AaAaAa"


def test_forward_within_the_call(trainer: Trainer) -> None:
    """An optimizer that calls the model itself (L-BFGS) has a pass in every call."""
    optimizer = torch.optim.LBFGS(trainer.model.parameters(), max_iter=2)
    for _ in range(3):
        optimizer.step(trainer.backward)
    assert trainer.marks == "AAA"


def test_passes_that_are_not_seen(trainer: Trainer) -> None:
    """Where forward passes are replayed by a CUDA graph, calls count as those of one pass only for so long."""
    optimizer = trainer.sgd()
    trainer.backward()
    for _ in range(2 * MOST_CALLS):
        optimizer.step()
    assert trainer.marks == "A" + "a" * (MOST_CALLS - 1) + "A" * MOST_CALLS


def test_many_optimizers_in_one_pass(trainer: Trainer) -> None:
    """However many optimizers a pass has (one for each parameter), their calls are those of one pass."""
    optimizers = [trainer.sgd() for _ in range(3 * MOST_CALLS)]
    seen: list[bool] = []
    hooks = StepHooks(lambda optimizer, began, ended, same_pass: seen.append(same_pass))
    trainer.hooks.uninstall()
    hooks.install()
    try:
        for _ in range(2):
            trainer.backward()
            for optimizer in optimizers:
                optimizer.step()
    finally:
        hooks.uninstall()
    assert seen == [place > 0 for place in range(3 * MOST_CALLS)] * 2


def test_thread_without_passes(trainer: Trainer) -> None:
    """In a thread that never has a forward pass (autograd's own, a trainer's second) no call is assigned to the previous pass."""
    optimizer = trainer.sgd()
    thread = threading.Thread(target=lambda: [optimizer.step() for _ in range(3)])
    thread.start()
    thread.join()
    assert trainer.marks == "AAA"


def test_nested_calls(trainer: Trainer) -> None:
    """An optimizer that calls another is one call, and it is the outer one's."""
    inner = trainer.sgd()

    class Outer(torch.optim.Optimizer):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            inner.step()
            inner.step()

    outer = Outer(trainer.model.parameters(), {})
    for _ in range(2):
        trainer.backward()
        outer.step()
    inner.step()
    assert trainer.marks == "AAb"


def test_call_that_raised(trainer: Trainer) -> None:
    """After a call that raised, the calls of this and of any other optimizer are seen."""
    broken, other = trainer.sgd(), trainer.sgd()

    def fail() -> float:
        raise MemoryError

    trainer.backward()
    with pytest.raises(MemoryError):
        broken.step(fail)
    for optimizer in (other, other, broken):
        trainer.backward()
        optimizer.step()
    assert trainer.marks == "AAB"


def test_torch_that_does_not_number_its_nodes(trainer: Trainer, monkeypatch: pytest.MonkeyPatch) -> None:
    """If torch does not show whether a forward pass ran, each call counts separately."""
    monkeypatch.setattr(torch_steps, "_next_node", lambda: 0)
    optimizer = trainer.sgd()
    for _ in range(3):
        optimizer.step()
    assert trainer.marks == "AAA"


def test_compiler_that_does_not_show_its_options(trainer: Trainer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it is unknown whether a graph break is an error, a compiled call leaves no mark; the calls after it do."""
    optimizer = trainer.sgd()
    with monkeypatch.context() as compiling:
        compiling.setattr(torch.compiler, "is_compiling", lambda: True)
        optimizer.step()
    assert trainer.marks == ""
    optimizer.step()
    assert trainer.marks == "A"


@pytest.fixture(params=(register_optimizer_step_pre_hook, register_optimizer_step_post_hook), ids=("before", "after"))
def within(request: pytest.FixtureRequest) -> Iterator[Callable[[Callable[[], None]], None]]:
    """A function that has torch call another within each step, before or after the optimizer's own work, and then one more hook."""
    handles: list[Any] = []

    def register(call: Callable[[], None]) -> None:
        handles.extend(request.param(lambda *_, each=each: each()) for each in (call, lambda: None))

    yield register
    for handle in handles:
        handle.remove()


def test_step_marked_by_a_hook(trainer: Trainer, within: Callable[[Callable[[], None]], None]) -> None:
    """A user's hook of the optimizers can mark the steps: the training goes on, and there are no other marks from then on."""
    within(lambda: trainer.hooks.explicit(time.monotonic_ns()))
    optimizer = trainer.sgd()
    for _ in range(3):
        trainer.backward()
        optimizer.step()
    assert trainer.marks.lstrip("A") == "@@@"


def test_uninstalled_by_a_hook(trainer: Trainer, within: Callable[[Callable[[], None]], None]) -> None:
    """A user's hook of the optimizers can end our marks: the training goes on."""
    within(trainer.hooks.uninstall)
    optimizer = trainer.sgd()
    for _ in range(3):
        trainer.backward()
        optimizer.step()
    assert trainer.marks in ("", "A")


class Engine(nn.Module):
    """A framework's engine in DeepSpeed's manner: one call of its optimizer for each of two groups, none where gradients overflow."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        super().__init__()
        self.optimizer, self.overflow, self.error = optimizer, False, ""

    def _take_model_step(self, lr_kwargs: object) -> object:
        if self.error:
            raise ValueError(self.error)
        for _ in range(0 if self.overflow else 2):
            self.optimizer.step()
        return lr_kwargs


@pytest.fixture
def deepspeed(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Engine]]:
    """A DeepSpeed that has been imported; at the end its engine's method is its own again."""
    module = ModuleType("deepspeed.runtime.engine")
    module.DeepSpeedEngine = Engine  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    own = Engine._take_model_step
    yield Engine
    assert Engine._take_model_step is own


def test_engine(deepspeed: type[Engine], trainer: Trainer) -> None:
    """An engine's step is one call, whether its optimizer is called twice in it or not at all; its result and errors are its own."""
    trainer.hooks.watch_engine()
    engine, apart = deepspeed(trainer.sgd()), trainer.sgd()
    for engine.overflow in (True, False, False, True):
        trainer.backward()
        assert engine._take_model_step({"epoch": 1}) == {"epoch": 1}
    engine.error = "no memory"
    with pytest.raises(ValueError, match="no memory"):
        engine._take_model_step(None)
    assert trainer.marks == "AAAA"
    trainer.backward()
    apart.step()
    assert trainer.marks == "AAAAB"
    trainer.hooks.uninstall()
    engine.error = ""
    engine._take_model_step(None)
    assert trainer.marks == "AAAAB"


def test_engine_imported_late(deepspeed: type[Engine], trainer: Trainer) -> None:
    """An engine that is imported when training has begun is seen from its second step on."""
    engine = deepspeed(trainer.sgd())
    for _ in range(3):
        trainer.backward()
        engine._take_model_step(None)
    assert trainer.marks == "AaBB"


def test_engine_hooked_by_another(deepspeed: type[Engine], trainer: Trainer) -> None:
    """If other code has hooked the engine after us, removing our hooks leaves theirs in, and marks no more."""
    own = deepspeed._take_model_step
    trainer.hooks.watch_engine()
    ours, engine = deepspeed._take_model_step, deepspeed(trainer.sgd())

    def theirs(engine: Engine, lr_kwargs: object) -> object:
        return ours(engine, lr_kwargs)

    deepspeed._take_model_step = theirs  # type: ignore[method-assign, assignment]
    try:
        trainer.hooks.uninstall()
        assert deepspeed._take_model_step is theirs
        assert engine._take_model_step(1) == 1
        assert trainer.marks == ""
    finally:
        deepspeed._take_model_step = own  # type: ignore[method-assign]
