"""When the names of buckets and units are announced, and that nothing of the training depends on it. Real jobs: tests/e2e/test_parts.py."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, TypeVar

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from commwatch.probe.units import torch_fsdp
from commwatch.probe.units.part_tables import Carried
from commwatch.probe.units.torch_buckets import Buckets
from commwatch.probe.units.torch_fsdp import FsdpUnits
from commwatch.probe.units.torch_units import MOST_TABLES, Units

Announced = list[tuple[Sequence[str], list[tuple[int, int]]]]


class Group:
    """A process group of two ranks."""

    def size(self) -> int:
        return 2


class Ddp:
    """A DDP module of three parameters, each 8 bytes, as its logger has it."""

    def __init__(self, **logged: Any) -> None:
        self.module = nn.ParameterDict({name: nn.Parameter(torch.zeros(2)) for name in "abc"})
        self.parameters_to_ignore: set[str] = set()
        self.process_group = Group()
        self.find_unused_parameters = self.static_graph = False
        self.require_backward_grad_sync = self._has_rebuilt_buckets = True
        self.bucket_bytes_cap = 8
        self.logged = {
            "has_rebuilt_buckets": 1,
            "rebuilt_per_bucket_param_indices": "2 1, 0",
            "rebuilt_bucket_sizes": "16, 8",
            **logged,
        }
        self.asked = 0

    def _get_ddp_logging_data(self) -> dict[str, Any]:
        self.asked += 1
        return self.logged


@pytest.fixture
def announced() -> Announced:
    return []


@pytest.fixture
def forward(announced: Announced) -> Callable[[Any], None]:
    """A forward pass of a module."""

    def announce(since_ns: int, names: Sequence[str], order: Sequence[Carried]) -> None:
        announced.append((names, [(each.elements, each.part) for each in order]))

    buckets = Buckets(lambda do, *args: do(*args), announce)
    return buckets._watching(lambda ddp, *inputs: None)  # type: ignore[no-any-return]


def test_announced_once(forward: Callable[[Any], None], announced: Announced) -> None:
    """Buckets are announced once, in the first pass in which the logger has them; then it is not asked any more."""
    ddp = Ddp(has_rebuilt_buckets=0)
    ddp._has_rebuilt_buckets = False
    forward(ddp)
    assert ddp.asked == 0
    ddp._has_rebuilt_buckets = True
    forward(ddp)
    assert (announced, ddp.asked) == ([], 1)
    ddp.logged["has_rebuilt_buckets"] = 1
    for _ in range(5):
        forward(ddp)
    assert announced == [(["bucket 0: c, b", "bucket 1: a"], [(4, 0), (2, 1)])]
    assert ddp.asked == 2


def test_not_in_other_passes(forward: Callable[[Any], None]) -> None:
    """The logger is not asked in a pass without gradients, or without their reduction."""
    ddp = Ddp()
    with torch.no_grad():
        forward(ddp)
    ddp.require_backward_grad_sync = False
    forward(ddp)
    assert ddp.asked == 0


def test_logger_without_buckets(forward: Callable[[Any], None], announced: Announced) -> None:
    """A logger that never has the buckets is not asked forever."""
    ddp = Ddp(has_rebuilt_buckets=0)
    for _ in range(1000):
        forward(ddp)
    assert ddp.asked == 200
    assert announced == []


@pytest.mark.parametrize(
    "logged",
    [
        {"rebuilt_bucket_sizes": "16, 12"},
        {"rebuilt_bucket_sizes": "16"},
        {"rebuilt_per_bucket_param_indices": "3 2 1, 0"},
        {"rebuilt_per_bucket_param_indices": ""},
    ],
)
def test_other_parameters(forward: Callable[[Any], None], announced: Announced, logged: dict[str, str]) -> None:
    """Where the parameters are not those of the logger (some were frozen since), no bucket is announced."""
    forward(Ddp(**logged))
    assert announced == []


def test_sparse_gradients(forward: Callable[[Any], None], announced: Announced) -> None:
    """A bucket of sparse gradients has its index, but no collective whose elements are known."""
    ddp = Ddp(rebuilt_per_bucket_param_indices="1, 0", rebuilt_bucket_sizes="8, 8")
    ddp.module = nn.ModuleDict({"table": nn.Embedding(1, 2, sparse=True), "last": nn.Linear(2, 1, bias=False)})  # type: ignore[assignment]
    forward(ddp)
    assert announced == [(["bucket 0: last.weight", "bucket 1: table.weight"], [(2, 0)])]


# -- FSDP2 ----------------------------------------------------------------------------------------


@pytest.fixture
def fsdp(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """FSDP's modules with two units; ``gather(n)`` gathers unit n."""
    units = [
        SimpleNamespace(fsdp_params=[object()], _module_fqn=name, mesh_info=SimpleNamespace()) for name in ("", "layer")
    ]
    states = {n: (lambda unit=unit: SimpleNamespace(_fsdp_param_group=unit)) for n, unit in enumerate(units)}
    original = lambda parameters, group: SimpleNamespace(all_gather_output=torch.zeros(4))  # noqa: E731
    made = SimpleNamespace(foreach_all_gather=original, foreach_reduce=lambda *args: None)
    monkeypatch.setitem(sys.modules, torch_fsdp._STATES[0], SimpleNamespace(**{torch_fsdp._STATES[1]: states}))
    monkeypatch.setitem(sys.modules, torch_fsdp._MAKES, made)
    group = Group()
    return SimpleNamespace(
        states=states,
        made=made,
        is_own=lambda: made.foreach_all_gather is original,
        gather=lambda n: made.foreach_all_gather(units[n].fsdp_params, group),
    )


@pytest.fixture
def learner(announced: Announced) -> FsdpUnits:
    def announce(since_ns: int, names: Sequence[str], order: Sequence[Carried]) -> None:
        announced.append((names, [(since_ns, each.part) for each in order]))

    return FsdpUnits(lambda do, *args: do(*args), announce)


def test_two_equal_steps(fsdp: SimpleNamespace, learner: FsdpUnits, announced: Announced) -> None:
    """Units are announced after two equal steps, from the begin of the first of them; FSDP then has its own functions again."""
    learner.step(100)
    for end, units in ((200, (0, 1)), (300, (0, 1, 1)), (310, ()), (400, (0, 1, 1))):
        assert announced == []
        for unit in units:
            fsdp.gather(unit)
        learner.step(end)
    assert announced == [(["unit (root)", "unit layer"], [(200, 0), (200, 1), (200, 1)])]
    assert fsdp.is_own()
    learner.step(500)
    assert fsdp.is_own()


def test_steps_that_differ(fsdp: SimpleNamespace, learner: FsdpUnits, announced: Announced) -> None:
    """Where steps keep changing, watching ends after eight of them."""
    learner.step(0)
    for number in range(1, 9):
        assert not fsdp.is_own()
        for _ in range(number):
            fsdp.gather(0)
        learner.step(number)
    assert fsdp.is_own()
    assert announced == []


def test_more_units(fsdp: SimpleNamespace, learner: FsdpUnits, announced: Announced) -> None:
    """Units that are made later are learnt with the others."""
    learner.step(0)
    learner.unwatch()
    fsdp.states[2] = lambda: SimpleNamespace(_fsdp_param_groups=[])
    learner.step(1)
    assert not fsdp.is_own()
    for end in (2, 3):
        fsdp.gather(1)
        learner.step(end)
    assert len(announced) == 1


def test_unknown_unit(fsdp: SimpleNamespace, learner: FsdpUnits, announced: Announced) -> None:
    """A collective of a unit that is not known ends the watching: the order would be incomplete."""
    learner.step(0)
    fsdp.made.foreach_all_gather([object()], Group())
    assert fsdp.is_own()
    learner.step(1)
    assert announced == []


# -- both -----------------------------------------------------------------------------------------

_T = TypeVar("_T")


class FakeProbe:
    """A probe that keeps what is written and said."""

    off, ring, place = False, object(), ("job", 3)

    def __init__(self) -> None:
        self.said: list[str] = []
        self.written: list[dict[str, Any]] = []

    def say(self, text: str, about: str) -> None:
        self.said.append(text)

    def with_probe_locks(self, do: Callable[[], _T]) -> _T:
        return do()

    def group_of(self, pg: Any) -> Any:
        return SimpleNamespace(small_id=5)

    def intern(self, kind: str, code: int, entry: dict[str, Any], otherwise: int) -> int:
        self.written.append({kind: code, **entry})
        return code


def test_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """An error of a torch that is not known ends the names with one line; neither the pass nor the records notice."""
    monkeypatch.setattr(DistributedDataParallel, "_pre_forward", lambda ddp: "result")
    own, probe = DistributedDataParallel._pre_forward, FakeProbe()
    units = Units(probe)
    units.watch()
    ddp = Ddp()
    del ddp.module
    watched: Any = DistributedDataParallel._pre_forward
    assert [watched(ddp), watched(Ddp())] == ["result"] * 2
    assert DistributedDataParallel._pre_forward is own
    (said,) = probe.said
    assert said.startswith("buckets and units of the model have no names in rank 3: AttributeError: ")


def test_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """A probe that is off, or has no ring, looks at nothing."""
    monkeypatch.setattr(DistributedDataParallel, "_pre_forward", lambda ddp: None)
    for name, value in (("off", True), ("ring", None)):
        probe = FakeProbe()
        monkeypatch.setattr(probe, name, value)
        units = Units(probe)
        units.watch()
        ddp = Ddp()
        DistributedDataParallel._pre_forward(ddp)  # type: ignore[arg-type]
        units.unwatch()
        assert (ddp.asked, probe.written) == (0, [])


def test_table(monkeypatch: pytest.MonkeyPatch) -> None:
    """A table has the parts of each kind of collective in their order; a process writes a bounded number of tables, and bounded names."""
    monkeypatch.setattr(DistributedDataParallel, "_pre_forward", lambda ddp: None)
    probe = FakeProbe()
    units = Units(probe)
    units.watch()
    modules = [Ddp() for _ in range(MOST_TABLES + 3)]
    for ddp in modules:
        DistributedDataParallel._pre_forward(ddp)  # type: ignore[arg-type]
    units.unwatch()
    assert [each["parts"] for each in probe.written] == list(range(1, MOST_TABLES + 1))
    first = probe.written[0]
    assert first["names"] == ["bucket 0: c, b", "bucket 1: a"]
    assert first["order"] == [[5, "all_reduce", 4, [0]], [5, "all_reduce", 2, [1]]]
