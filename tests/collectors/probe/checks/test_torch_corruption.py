"""When replicas are checked, and what is written of a check. ``tests/e2e/test_corruption.py`` has real jobs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from commwatch.probe.checks.torch_corruption import MOST_SUMS, ReplicaChecks, Schedule, _together, bundled
from commwatch.wire.events import Checksum
from commwatch.wire.variables import wrong

SECOND = 1_000_000_000


def due(schedule: Schedule, counts: range) -> list[int]:
    """The steps at which there is a check."""
    return [count for count in counts if schedule.is_due(count)]


def test_schedule() -> None:
    """The first step is checked, and each multiple of the interval."""
    assert due(Schedule(5, 0.001), range(1, 21)) == [1, 5, 10, 15, 20]
    assert due(Schedule(1, 0.001), range(1, 5)) == [1, 2, 3, 4]


def test_budget() -> None:
    """Above the budget the interval doubles, window by window; far below it, it is halved down to what was set; steps stay in common."""
    schedule = Schedule(5, 0.001)
    for second in range(3):
        schedule.begins(second * SECOND)
        schedule.cost(SECOND // 100)
    assert due(schedule, range(1, 61)) == [1, 20, 40, 60]
    for second in range(3, 20):
        schedule.begins(second * SECOND)
        schedule.cost(10)
    assert due(schedule, range(1, 21)) == [1, 5, 10, 15, 20]


def test_no_budget() -> None:
    """With a budget of 0 the interval stays, at any cost."""
    schedule = Schedule(1, 0)
    for second in range(10):
        schedule.begins(second * SECOND)
        schedule.cost(SECOND)
    assert due(schedule, range(1, 4)) == [1, 2, 3]


def test_bundles() -> None:
    """Of many parameters neighbours share a checksum and a name, and a parameter that changes or moves still changes it."""
    few = [[1, 2], [3, 4]]
    assert _together(few) == [(1, 2), (3, 4)]
    assert bundled(["a", "b"]) == ["a", "b"]
    many = [[at, 2 * at] for at in range(MOST_SUMS * 2 + 1)]
    names = bundled([str(at) for at in range(len(many))])
    assert names[0] == "0 to 2"
    assert names[-1] == "2046 to 2048"
    sums = _together(many)
    assert len(sums) == len(names) <= MOST_SUMS
    many[4], many[5] = many[5], many[4]
    moved = _together(many)
    assert [at for at, pair in enumerate(moved) if pair != sums[at]] == [1]
    assert _together([]) == []


@pytest.mark.parametrize(
    ("name", "value"),
    [("CHECKSUMS", "weights"), ("CHECKSUM_EVERY", "0"), ("CHECKSUM_EVERY", "1e3"), ("CHECKSUM_BUDGET", "2")],
)
def test_settings(name: str, value: str) -> None:
    """A wrong value is named, and a right one is not."""
    assert len(wrong({f"COMMWATCH_{name}": value})) == 1
    right = {"COMMWATCH_CHECKSUMS": "replicas", "COMMWATCH_CHECKSUM_EVERY": "7", "COMMWATCH_CHECKSUM_BUDGET": "0"}
    assert wrong(right) == []


class Trainer:
    """The checks of a trainer in a world of one fake and one real rank, and what they write."""

    def __init__(self, env: Mapping[str, str]) -> None:
        self.sets: list[tuple[str, list[str]]] = []
        self.written: list[Checksum] = []
        self.said: list[str] = []
        self.checks = ReplicaChecks(env, announce=self._announce, write=self.written.append, say=self.said.append)

    def _announce(self, number: int, group: Any, key: str, names: list[str]) -> int:
        assert number == len(self.sets)
        self.sets.append((key, names))
        return 3

    def take(self) -> list[tuple[int, int, int]]:
        """Set, place and step of what was written since the last call."""
        taken = [(each.set, each.place, each.step) for each in self.written]
        self.written.clear()
        return taken


@pytest.fixture
def trainer() -> Iterator[Trainer]:
    """A trainer whose every second step is checked."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    trainer = Trainer({"COMMWATCH_CHECKSUM_EVERY": "2", "COMMWATCH_CHECKSUM_BUDGET": "0"})
    trainer.checks.modules.watch()
    yield trainer
    trainer.checks.modules.unwatch()
    dist.destroy_process_group()


def model() -> DistributedDataParallel:
    """A model with two layers."""
    return DistributedDataParallel(nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)))


def test_what_is_checked(trainer: Trainer) -> None:
    """A set has the parameters of DDP that the optimizer steps or nothing steps, but not those that DDP ignores."""
    layers = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    layers[0].bias.requires_grad_(False)
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(layers, ["1.bias"])
    ddp = DistributedDataParallel(layers)
    named = dict(layers.named_parameters())
    optimizer = torch.optim.SGD([named["0.weight"], named["1.bias"]], 0.1)
    for _ in range(4):
        trainer.checks.step(optimizer)
    assert [names for _, names in trainer.sets] == [["0.weight", "0.bias"]]
    assert trainer.take() == [(0, place, count) for count in (1, 2, 4) for place in (0, 1)]
    assert ddp is not None


def test_new_sets(trainer: Trainer) -> None:
    """An optimizer that gets parameters, or a new model, begins new sets, with keys of their own; what is not DDP has none."""
    first, second = model(), model()
    optimizer = torch.optim.SGD(first.module[0].parameters(), 0.1)
    trainer.checks.step(optimizer)
    trainer.checks.step(optimizer)
    optimizer.add_param_group({"params": list(first.module[1].parameters())})
    trainer.checks.step(optimizer)
    of_second = torch.optim.SGD(second.parameters(), 0.1)
    trainer.checks.step(of_second)
    trainer.checks.step(torch.optim.SGD(nn.Linear(2, 2).parameters(), 0.1))
    trainer.checks.step(object())
    assert [len(names) for _, names in trainer.sets] == [2, 4, 4]
    keys = [key for key, _ in trainer.sets]
    assert keys[1].rpartition("-")[0] == keys[2].rpartition("-")[0]
    assert len(set(keys)) == 3
    assert sorted({(of, count) for of, _, count in trainer.take()}) == [(0, 1), (0, 2), (1, 1), (2, 1)]


def test_freed(trainer: Trainer) -> None:
    """The checks keep neither a model nor an optimizer alive, and parameters without memory are left out."""
    import gc
    import weakref

    ddp = model()
    optimizer = torch.optim.SGD(ddp.parameters(), 0.1)
    trainer.checks.step(optimizer)
    ddp.module[0].weight.untyped_storage().resize_(0)
    trainer.checks.step(optimizer)
    assert [(each.plain, each.weighted) for each in trainer.written if (each.place, each.step) == (0, 2)] == [(0, 0)]
    parts = [weakref.ref(each) for each in (ddp, optimizer, ddp.module[1].weight)]
    del ddp, optimizer
    gc.collect()
    assert [part() for part in parts] == [None] * 3


def test_local_steps(trainer: Trainer) -> None:
    """From the first step on gradients of one rank, replicas are no longer compared, and the user reads why, once."""
    ddp = model()
    optimizer = torch.optim.SGD(ddp.parameters(), 0.1)
    trainer.checks.step(optimizer)
    trainer.take()
    with ddp.no_sync():
        ddp(torch.ones(1, 3))
    trainer.checks.step(optimizer)
    ddp(torch.ones(1, 3))
    trainer.checks.step(optimizer)
    trainer.checks.step(optimizer)
    assert trainer.take() == []
    assert len(trainer.said) == 1
