"""What the nodes of a run share through the job's own TCPStore: a random id of the run, and the addresses of the nodes' agents.

One rank of each node does this, in a thread of its own and over a connection of its own, so that neither the training nor its use of
the store ever waits. Addresses need an agent that other machines can reach; the agent announces its address in the run directory.
"""

from __future__ import annotations

import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import torch.distributed as dist
from torch._C._distributed_c10d import FileStore, PrefixStore, TCPStore

from commwatch.wire.announcement import answering
from commwatch.wire.crossing import ANYBODY

#: Keys in the store, before the name of the job: of the agents' addresses, and of the run's id.
_KEY, _RUN_KEY = "commwatch/agents/", "commwatch/run/"
#: Seconds for each use of the store; seconds between two; seconds after which the nodes that are missing count as without an agent.
_STORE_S, _EVERY_S, _PATIENCE_S = 10.0, 2.0, 300.0
#: Random bytes of a run's id; characters of a host's name or a path.
_ID_BYTES, MOST_PATH = 8, 255
#: Held while the thread uses the store; for good once the process ends. A thread that returns from C++ after that would abort the process.
_using = threading.Lock()
#: The process that has the thread: a forked child has not.
_pid = 0
#: Addresses that mean all addresses of a machine.
_ALL = {"0.0.0.0": socket.AF_INET, "::": socket.AF_INET6}  # noqa: S104 - nothing is bound here


def share(env: Mapping[str, str], directory: Path, job: str, note: Callable[[dict[str, Any]], object]) -> None:
    """Start the exchange in the background, if this rank does it for its node.

    A run whose launcher says that it has one node needs none. Where the launcher does not say how many it has, each rank asks for the id.

    Args:
        directory: the run directory.
        note: called with what is known: ``run``, the run's id, and ``peers``, the addresses of all nodes, each time there are more.
    """
    nodes = _nodes(env)
    place = _store_of_job() if nodes != 1 and env.get("LOCAL_RANK", "0") == "0" else None
    if place is not None and dist.get_world_size() > 1:
        global _pid
        _pid = os.getpid()
        arguments = (place, directory, job, nodes or 0, note)
        threading.Thread(target=_exchange, args=arguments, name="commwatch-peers", daemon=True).start()


def rendezvous() -> dict[str, str]:
    """Return where the ranks of the default group meet, as a field of an identity; empty if that is neither a TCPStore nor a file."""
    return meeting_place(_store())


def meeting_place(store: Any) -> dict[str, str]:
    """Return where ranks with this store meet, as ``rendezvous`` does."""
    store = _underlying(store)
    if isinstance(store, FileStore):
        path: str = store.path  # type: ignore[attr-defined]
        return {"rendezvous": f"file:{path[-MOST_PATH:]}"}
    return {"rendezvous": f"{store.host[:MOST_PATH]}:{store.port}"} if isinstance(store, TCPStore) else {}


def before_exit() -> None:
    """At the end of the process, wait until the thread does not use the store, and let it use that no more."""
    if _pid == os.getpid():
        _using.acquire(timeout=_STORE_S)


def _nodes(env: Mapping[str, str]) -> int | None:
    """Return the number of the job's nodes by the launcher's variables; ``None`` if it is not known."""
    world, local = env.get("WORLD_SIZE", ""), env.get("LOCAL_WORLD_SIZE", "")
    return -(-int(world) // int(local)) if world.isdecimal() and local.isdecimal() and int(local) else None


def _store_of_job() -> tuple[str, int] | None:
    """Return host and port of the TCPStore behind the default group; ``None``: there is none."""
    store = _store()
    return (store.host, store.port) if isinstance(store, TCPStore) else None


def _store() -> Any:
    """Return the store behind the default group; ``None``: there is no group."""
    return _underlying(dist.distributed_c10d._get_default_store()) if dist.is_initialized() else None


def _underlying(store: Any) -> Any:
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return store


def _exchange(
    place: tuple[str, int], directory: Path, job: str, nodes: int, note: Callable[[dict[str, Any]], object]
) -> None:
    """Report the run's id, add this node's address, and report those of all nodes until they are complete."""
    end_s, run, ours, known = time.monotonic() + _PATIENCE_S, "", "", list[str]()
    store: Any = None
    while (not run or len(known) < nodes) and time.monotonic() < end_s:
        try:
            before, ours = ours, ours or (_reachable(_address(directory), place) if nodes else "")
            with _using:
                is_new = store is None
                if is_new and (ours or not run):
                    timeout = timedelta(seconds=_STORE_S)
                    store = TCPStore(*place, is_master=False, wait_for_workers=False, timeout=timeout)
                if not run:  # the first rank that asks sets it
                    shared = store.compare_set(f"{_RUN_KEY}{job}", "", secrets.token_hex(_ID_BYTES)).decode()
                    note({"run": shared})
                    run = shared
                if ours and (is_new or not before):
                    store.append(f"{_KEY}{job}", f"{ours}\n")
                found = list(dict.fromkeys(store.get(f"{_KEY}{job}").decode().split())) if ours else []
                store = store if ours else None
            if len(found) > len(known):
                known = found
                note({"peers": known})
        except (RuntimeError, OSError, ValueError):  # the store has ended, or the agent restarts
            store = None
        if not run or len(known) < nodes:
            time.sleep(_EVERY_S)


def _reachable(url: str, place: tuple[str, int]) -> str:
    """Return an agent's URL with an address of this machine instead of one that means all of them.

    The address is that of the way to the store, which all nodes use. The store may be on this machine, under an address that only this machine
    has (``127.0.1.1``); then it is the machine's name.

    >>> _reachable("http://10.0.0.7:9477", ("node1", 29500))
    'http://10.0.0.7:9477'
    """
    family = _ALL.get(urlsplit(url).hostname or "")
    if family is None:
        return url
    (where, *_) = [each[4] for each in socket.getaddrinfo(*place, family, socket.SOCK_DGRAM)]
    with socket.socket(family, socket.SOCK_DGRAM) as way:
        way.connect(where)  # sends nothing
        address = str(way.getsockname()[0])
    name = socket.gethostname() if address.startswith(("127.", "::1")) else address
    return f"http://{f'[{name}]' if ':' in name else name}:{urlsplit(url).port}"


def _address(directory: Path) -> str:
    """Return the address that the agent announces; empty if there is none yet, or other machines cannot reach it."""
    agent = answering(directory, ANYBODY)  # an address is only data: no token is sent to it
    return "" if agent is None else agent.peer_url
