"""Agents of a job's nodes learn each other's addresses through the job's TCPStore, whatever happens to the store or an agent."""

from __future__ import annotations

import fcntl
import os
import socket
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from commwatch.probe import torch_peers
from commwatch.wire import crossing
from commwatch.wire.announcement import LOCK, announce
from commwatch.wire.identity import PEER_ADDRESS
from tests.helpers import PATIENCE_S, free_port, wait_for

KEY, RUN_KEY = "commwatch/agents/job", "commwatch/run/job"


@pytest.fixture
def store() -> TCPStore:
    """The job's own."""
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


@pytest.fixture(autouse=True)
def quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without long pauses."""
    monkeypatch.setattr(torch_peers, "_EVERY_S", 0.05)


def announced(directory: Path, address: str | None) -> Path:
    """The run directory of an agent, with its announcement; the agent runs as long as this process."""
    directory.mkdir(exist_ok=True)
    lock = crossing.lock_file(directory / LOCK, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX)
    announce(
        directory, lock, {"url": "http://127.0.0.1:9477", "history": "/h", "pid": os.getpid(), PEER_ADDRESS: address}
    )
    return directory


class Told:
    """What a node's thread has reported."""

    def __init__(self) -> None:
        self.runs: list[Any] = []
        self.peers: list[Any] = []

    def note(self, entry: dict[str, Any]) -> None:
        for name, found in (("run", self.runs), ("peers", self.peers)):
            if name in entry:
                found.append(entry[name])


def exchange(place: tuple[str, int], directory: Path, nodes: int) -> tuple[threading.Thread, list[list[str]]]:
    """One node's thread, and the addresses that it has reported."""
    thread, told = shared(place, directory, nodes)
    return thread, told.peers


def shared(place: tuple[str, int], directory: Path, nodes: int) -> tuple[threading.Thread, Told]:
    """One node's thread, and all that it has reported."""
    told = Told()
    arguments = (place, directory, "job", nodes, told.note)
    thread = threading.Thread(target=torch_peers._exchange, args=arguments, daemon=True)
    thread.start()
    return thread, told


def test_nodes_find_each_other(store: TCPStore, tmp_path: Path) -> None:
    """Each node reports the addresses of all nodes, whichever agent starts last, and then the threads end."""
    place = ("127.0.0.1", store.port)
    folders = [tmp_path / f"node{n}" for n in range(3)]
    parts = [exchange(place, folder, len(folders)) for folder in folders]
    addresses = [f"http://node{n}:9477" for n in range(3)]
    for n in (2, 0, 1):
        announced(folders[n], addresses[n])
    for thread, found in parts:
        thread.join(PATIENCE_S)
        assert not thread.is_alive()
        assert sorted(found[-1]) == addresses


def test_run(store: TCPStore, tmp_path: Path) -> None:
    """All nodes report the same random id of the run, also a later life of it over the same store; another store has another id."""
    place = ("127.0.0.1", store.port)
    parts = [shared(place, tmp_path, nodes) for nodes in (0, 0, 2)]
    wait_for(lambda: all(told.runs for _, told in parts), "the id on all nodes")
    for thread, _ in parts[:2]:
        thread.join(PATIENCE_S)
        assert not thread.is_alive()
    assert {tuple(told.runs) for _, told in parts} == {(store.get(RUN_KEY).decode(),)}
    other = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    thread, told = shared(("127.0.0.1", other.port), tmp_path, 0)
    thread.join(PATIENCE_S)
    assert len(told.runs[0]) == 16
    assert told.runs != parts[0][1].runs


def test_rendezvous(job: int) -> None:
    """A ring's header has the address of the store behind the default group."""
    assert torch_peers.rendezvous() == {"rendezvous": f"127.0.0.1:{job}"}


def test_rendezvous_at_a_file(tmp_path: Path) -> None:
    """Ranks that meet at a file have its path."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        assert torch_peers.rendezvous() == {"rendezvous": f"file:{tmp_path}/store"}
    finally:
        dist.destroy_process_group()
    assert torch_peers.rendezvous() == {}


def test_agent_on_loopback(store: TCPStore, tmp_path: Path) -> None:
    """The address of an agent that other machines cannot reach is not written into the store."""
    thread, found = exchange(("127.0.0.1", store.port), announced(tmp_path / "here", None), 2)
    other, theirs = exchange(("127.0.0.1", store.port), announced(tmp_path / "there", "http://node1:1"), 1)
    other.join(PATIENCE_S)
    assert theirs == [["http://node1:1"]]
    assert (thread.is_alive(), found) == (True, [])


@pytest.mark.parametrize(
    ("announced_as", "reported"),
    [
        ("http://10.0.0.7:9477", "http://10.0.0.7:9477"),
        ("https://node1:9477", "https://node1:9477"),
        # The store is on this machine, under an address that no other machine can use.
        ("http://0.0.0.0:9477", f"http://{socket.gethostname()}:9477"),
    ],
)
def test_reported_address(store: TCPStore, tmp_path: Path, announced_as: str, reported: str) -> None:
    """An agent that listens on all addresses is reported under one that other machines can use, any other as it announces itself."""
    thread, found = exchange(("127.0.0.1", store.port), announced(tmp_path / "here", announced_as), 1)
    thread.join(PATIENCE_S)
    assert found == [[reported]]


def test_store_that_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without its store, the thread gives up after a time, and reports nothing."""
    monkeypatch.setattr(torch_peers, "_PATIENCE_S", 0.5)
    monkeypatch.setattr(torch_peers, "_STORE_S", 0.2)
    thread, found = exchange(("127.0.0.1", free_port()), announced(tmp_path / "here", "http://node1:1"), 2)
    thread.join(PATIENCE_S)
    assert (thread.is_alive(), found) == (False, [])


@pytest.fixture
def job(tmp_path: Path) -> Iterator[int]:
    """A default group over a TCPStore; its port."""
    port = free_port()
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=0, world_size=1)
    yield port
    with suppress(ValueError):
        dist.destroy_process_group()


@pytest.mark.parametrize(
    ("env", "begins"),
    [
        ({"LOCAL_RANK": "0", "WORLD_SIZE": "16", "LOCAL_WORLD_SIZE": "8"}, True),
        ({"LOCAL_RANK": "1", "WORLD_SIZE": "16", "LOCAL_WORLD_SIZE": "8"}, False),
        ({"LOCAL_RANK": "0", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "8"}, False),
        # How many nodes there are is not known: each rank asks for the run's id.
        ({"LOCAL_RANK": "0", "WORLD_SIZE": "many", "LOCAL_WORLD_SIZE": "0"}, True),
        ({"LOCAL_RANK": "1", "WORLD_SIZE": "8"}, False),
        ({"RANK": "1", "WORLD_SIZE": "8"}, True),
        ({}, True),
    ],
)
def test_who_does_it(
    job: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, env: dict[str, str], begins: bool
) -> None:
    """One rank of each node of a job on several nodes does it, over the store of the default group."""
    monkeypatch.setattr(dist, "get_world_size", lambda: 16)
    asked: list[tuple[str, int]] = []
    monkeypatch.setattr(torch_peers, "_exchange", lambda place, *_: asked.append(place))
    torch_peers.share(env, tmp_path, "job", lambda entry: None)
    if begins:
        wait_for(lambda: asked, "the thread")
    assert asked == [("127.0.0.1", job)] * begins


def test_one_rank(job: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A world of one rank shares nothing with others."""
    monkeypatch.setattr(torch_peers, "_exchange", lambda *_: pytest.fail("it began"))
    torch_peers.share({}, tmp_path, "job", lambda entry: None)


def test_no_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a default group there is no store, and nothing begins."""
    monkeypatch.setattr(torch_peers, "_exchange", lambda *_: pytest.fail("it began"))
    env = {"LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1"}
    torch_peers.share(env, tmp_path, "job", lambda entry: None)


def test_end_of_the_process(store: TCPStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once the process is about to end, the thread no longer uses the store: a return from there would abort the process."""
    monkeypatch.setattr(torch_peers, "_using", threading.Lock())
    monkeypatch.setattr(torch_peers, "_pid", os.getpid())
    torch_peers.before_exit()
    thread, found = exchange(("127.0.0.1", store.port), announced(tmp_path / "here", "http://node1:1"), 1)
    thread.join(0.3)
    assert (thread.is_alive(), found, store.check([KEY]) or store.check([RUN_KEY])) == (True, [], False)
    torch_peers._using.release()
    thread.join(PATIENCE_S)
    assert found == [["http://node1:1"]]
