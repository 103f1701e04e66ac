"""Numbers of process groups: the n-th group of a name is the n-th on every rank, however it is made."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from itertools import islice
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, _unregister_process_group
from torch.distributed import ProcessGroup, distributed_c10d

from commwatch.probe.torch_groups import Group, Groups, numbers_from
from commwatch.probe.torch_timing import Batches
from commwatch.wire import events as ev
from commwatch.wire.numbers import NUMBERS

STORE = HashStore()
c10d: Any = distributed_c10d
_unregister: Any = _unregister_process_group


@pytest.fixture
def groups() -> Iterator[Groups]:
    """The groups of a process that has a default group."""
    made = Groups("job")
    made.watch()
    dist.init_process_group("gloo", store=STORE, rank=0, world_size=1)
    yield made
    dist.destroy_process_group()
    made.unwatch()


def split() -> Any:
    """A group as ``split_group`` registers it, which needs NCCL to make one."""
    pg: Any = dist.ProcessGroup(STORE, 0, 1)
    backend = dist.ProcessGroupGloo(STORE, 0, 1, timedelta(seconds=60))
    pg._register_backend(torch.device("cpu"), ProcessGroup.BackendType.GLOO, backend)
    pg._set_group_name("half")
    about = {"backend_name": "gloo", "store": STORE, "group_name": "half", "backend_config": "cpu:gloo"}
    c10d._register_pg_in_world(pg, **about, rank_mapping={0: 0})
    return pg


def test_split_groups_of_one_name(groups: Groups) -> None:
    """A split-off group gets another id than an earlier group of the same name, even an unused one; ``on_made`` is called for each."""
    made: list[str] = []
    groups.on_made = made.append
    first = split()
    _unregister("half")
    second = split()
    _unregister("half")
    ids = [groups.add(pg)[0].id for pg in (second, first)]
    assert made == ["half", "half"]
    assert ids[0] != ids[1]
    alone = Groups("job")
    assert alone.add(first)[0].id == ids[1]
    for pg in (first, second):
        for known in (c10d._world.pg_map, c10d._world.pg_names, c10d._world.pg_group_ranks):
            known.pop(pg)


def test_peers_of_destroyed_groups(groups: Groups) -> None:
    """The limit of peers is one for all groups of a process; a group that was destroyed leaves its room to others."""
    first, second = dist.new_group([0]), dist.new_group([0])
    many, few = groups.add(first)[0], groups.add(second)[0]
    groups.known.update({id(first): many, id(second): few})
    for peer in range(ev.MOST_PEERS - 1):
        assert many.peer_of("send", peer) == peer
    assert [few.peer_of("send", 5), few.peer_of("recv", 5), few.peer_of("recv", -1)] == [5, -1, -1]
    assert many.peer_of("send", 7) == 7
    dist.destroy_process_group(first)
    del first
    third = dist.new_group([0])
    assert groups.add(third)[0].peer_of("send", 3) == 3
    assert few.peer_of("recv", 5) == 5
    dist.destroy_process_group(second)
    dist.destroy_process_group(third)


def test_batches_leave_no_trace() -> None:
    """Methods for batches are PyTorch's own again afterwards, except one that other code has replaced since."""
    names = "_start_coalescing", "_end_coalescing"
    before = [vars(ProcessGroup)[name] for name in names]
    batches = Batches(lambda pg: None, lambda pg, work: None)
    batches.watch()
    batches.unwatch()
    assert [vars(ProcessGroup)[name] for name in names] == before
    batches.watch()
    theirs = ProcessGroup._end_coalescing = lambda *_: None  # type: ignore[method-assign, assignment]
    batches.unwatch()
    assert [vars(ProcessGroup)[name] for name in names] == [before[0], theirs]
    setattr(ProcessGroup, names[1], before[1])
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        world: Any = dist.group.WORLD
        with pytest.raises(
            RuntimeError, match="does not implement"
        ):  # of Gloo; a method that binds nothing raises TypeError
            world._start_coalescing(torch.device("cpu"))
    finally:
        dist.destroy_process_group()


def test_numbers_go_on() -> None:
    """The numbers of a group's operations begin at 0 and go on at 0 after the greatest one, as those of the native hook."""
    group = Group(lambda: None, 2, None, "g", aligned=False)
    assert list(islice(group.seqs[None], 3)) == [0, 1, 2]
    group.seqs["send", 1, 7] = numbers_from(NUMBERS - 2)
    assert list(islice(group.seqs["send", 1, 7], 4)) == [NUMBERS - 2, NUMBERS - 1, 0, 1]
    assert list(islice(group.seqs[None], 1)) == [3]
