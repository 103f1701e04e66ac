"""The calls outside operations in which a rank waits are in its ring while they last, and do what they did."""

from __future__ import annotations

import pickle
import sys
import threading
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch._C._distributed_c10d import HashStore, PrefixStore, Store, TCPStore
from torch.distributed import device_mesh

from commwatch.probe import torch_outside
from commwatch.probe.torch_outside import Start, launched, start_of
from commwatch.wire.ring import Outside, RingFile
from commwatch.wire.ring_reader import RingReader
from tests.helpers import free_port, identity

ENV = {"RANK": "1", "WORLD_SIZE": "4"}
SHORT = timedelta(milliseconds=30)


class Watched:
    """A process that notes its calls."""

    def __init__(self, path: Path) -> None:
        self.file: RingFile | None = RingFile(path, identity(), 64)
        self.reader = RingReader(path)
        self.starts: list[Start] = []
        self.outside = torch_outside.Outside(ENV, lambda: self.file, self._starting)

    def _starting(self, start: Start) -> torch_outside.Outside:
        self.starts.append(start)
        return self.outside

    def now(self) -> tuple[str, str]:
        """What it waits for."""
        return self.reader.outside()[3:]


@pytest.fixture
def watched(tmp_path: Path) -> Iterator[Watched]:
    process = Watched(tmp_path / "a.ring")
    process.outside.watch()
    yield process
    process.outside.unwatch()
    process.reader.close()


class Seen(Store):
    """A store that looks at the ring while a call waits in it."""

    def __init__(self, process: Watched) -> None:
        super().__init__()
        self.process, self.seen = process, list[tuple[str, str]]()

    def wait(self, keys: list[str], timeout: timedelta = SHORT) -> None:
        self.seen.append(self.process.now())
        raise RuntimeError("timed out")

    def add(self, key: str, amount: int) -> int:
        return 1


def test_store(watched: Watched) -> None:
    """A wait of the main thread in a store is noted with its key until it ends or raises; one that begins again at once goes on."""
    store, seen = HashStore(), list[Any]()
    look = threading.Timer(0.1, lambda: seen.append((watched.now(), watched.reader.outside().since_ns)))
    look.start()
    with pytest.raises(RuntimeError):
        store.wait(["a", "b"], timedelta(milliseconds=400))
    assert watched.now() == ("", "")
    again = threading.Timer(0.1, lambda: seen.append((watched.now(), watched.reader.outside().since_ns)))
    again.start()
    with pytest.raises(RuntimeError):
        store.wait(["a", "b"], timedelta(milliseconds=400))
    look.join()
    again.join()
    assert seen == [(("store.wait", "a, b"), seen[0][1])] * 2
    store.set("a", "1")
    assert store.get("a") == b"1"
    assert watched.now() == ("", "")


def test_other_threads(watched: Watched) -> None:
    """A thread beside the training may wait in a store as long as it likes."""
    seen: list[tuple[str, str]] = []

    def wait() -> None:
        look = threading.Timer(0.1, lambda: seen.append(watched.now()))
        look.start()
        with pytest.raises(RuntimeError):
            HashStore().wait(["a"], timedelta(milliseconds=300))
        look.join()

    thread = threading.Thread(target=wait)
    thread.start()
    thread.join()
    assert seen == [("", "")]


def test_outermost(watched: Watched) -> None:
    """Of calls within each other, the outermost is noted; a store that is written in Python is called as ever."""
    store = Seen(watched)
    with pytest.raises(RuntimeError):
        c10d._store_based_barrier(0, store, c10d.GroupName("group"), 2, timedelta(seconds=-1))
    assert store.seen == [("store_based_barrier", "?")]
    assert watched.now() == ("", "")


def test_store_of_the_group(watched: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    """The store at which ranks meet counts as a part of ``init_process_group``; other stores and those of a launcher are as they were."""
    monkeypatch.delitem(sys.modules, "torch.distributed.launcher.api", raising=False)  # other tests use it
    port, seen = free_port(), list[Any]()
    look = threading.Timer(0.1, lambda: seen.append((watched.now(), watched.reader.outside().inits)))
    look.start()
    with pytest.raises(RuntimeError):
        TCPStore("127.0.0.1", port, 4, is_master=True, timeout=timedelta(milliseconds=400))
    look.join()
    assert seen == [(("init_process_group", ""), 1)]
    assert watched.starts == [Start(1, 4, {"rendezvous": f"127.0.0.1:{port}"})]
    assert watched.reader.outside() == Outside(0, 0, 0, "", "")
    store = TCPStore("127.0.0.1", 0, 1, True)
    with pytest.raises(TypeError):
        TCPStore("127.0.0.1", nonsense=True)  # type: ignore[call-arg]
    assert type(store) is TCPStore
    assert len(watched.starts) == 1


def test_counts(watched: Watched) -> None:
    """Calls that make groups are counted, also those that raise; wrong arguments are refused by torch, not by us."""
    with pytest.raises(ValueError, match="has not been initialized"):
        dist.new_group([0, 1])
    with pytest.raises(TypeError):
        dist.init_process_group(nonsense=1)  # type: ignore[call-arg]
    with pytest.raises(TypeError):
        c10d._new_group_with_tag(ranks=7, nonsense=1)  # type: ignore[call-arg]
    assert watched.reader.outside()[:3] == (0, 1, 1)


def test_without_a_ring(watched: Watched) -> None:
    """Without a ring, calls are as they were."""
    watched.file = None
    store = HashStore()
    store.set("a", "1")
    assert store.get("a") == b"1"


def test_names(watched: Watched) -> None:
    """Watched functions are pickled by their names, and are again what they were once nothing is watched."""
    assert pickle.loads(pickle.dumps(dist.init_process_group)) is dist.init_process_group is c10d.init_process_group
    watched.outside.unwatch()
    for owner, name in (
        (dist, "init_process_group"),
        (c10d, "_new_group_with_tag"),
        (Store, "get"),
        (device_mesh, "split_group"),
    ):
        assert getattr(owner, name).__module__ != torch_outside.__name__
        assert not hasattr(getattr(owner, name), "__closure__") or "noting" not in repr(getattr(owner, name))


@pytest.mark.parametrize(
    ("args", "kwargs", "start"),
    [
        ((), {}, Start(1, 4, {})),
        (("gloo",), {"rank": 2, "world_size": 3}, Start(2, 3, {})),
        (("nccl", "tcp://10.0.0.1:29500", None, 2, 0), {}, Start(0, 2, {"rendezvous": "10.0.0.1:29500"})),
        ((), {"init_method": "tcp://[::1]:29500?rank=3&world_size=5"}, Start(3, 5, {"rendezvous": "::1:29500"})),
        ((), {"init_method": "file:///tmp/meet"}, Start(1, 4, {"rendezvous": "file:/tmp/meet"})),
        (("mpi",), {}, None),
        (("fake",), {"rank": 0, "world_size": 8}, None),
        ((), {"rank": 5, "world_size": 3}, None),
    ],
)
def test_start(args: tuple[Any, ...], kwargs: dict[str, Any], start: Start | None) -> None:
    """Rank, size and meeting place of the group that ``init_process_group`` is to make, as torch finds them."""
    assert start_of(ENV, args, kwargs) == start


def test_no_place() -> None:
    """Without rank or size nothing is begun."""
    assert start_of({"RANK": "1"}, (), {}) is None


def test_start_of_a_store() -> None:
    """Ranks that meet in a store of their own meet at its address."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    start = start_of({}, (), {"rank": 0, "world_size": 2, "store": PrefixStore("mine", store)})
    assert start == Start(0, 2, {"rendezvous": f"127.0.0.1:{store.port}"})


def test_launched() -> None:
    """A process with a rank's variables is a rank if its parent is known to have none of them, and several ranks are to meet."""

    def refused() -> bytes:
        raise PermissionError

    def of_parent() -> bytes:
        return b"HOME=/\0FRANK=1\0"

    assert launched(ENV, of_parent) == Start(1, 4, {})
    assert launched(ENV, lambda: b"RANK=1\0HOME=/\0") is None
    assert launched(ENV, lambda: b"HOME=/\0RANK=1\0") is None
    assert launched(ENV, refused) is None
    for variables in (
        {"RANK": "0", "WORLD_SIZE": "1"},
        {"RANK": "4", "WORLD_SIZE": "4"},
        {"RANK": "a", "WORLD_SIZE": "4"},
        {},
    ):
        assert launched(variables, of_parent) is None
