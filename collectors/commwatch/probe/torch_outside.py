"""What this process waits for outside operations: the calls that make and destroy groups, and waits in a store of the main thread.

The calls are rare. Each is noted in the ring before it begins, because a thread that waits in C++ may hold the GIL, and removed when it
returns. Of calls within each other, the outermost counts.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from functools import cache, partial, wraps
from multiprocessing.process import parent_process
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import parse_qs, urlsplit

import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch._C._distributed_c10d import Store, TCPStore
from torch.distributed import device_mesh

from commwatch.probe.torch_groups import Replacements
from commwatch.probe.torch_peers import MOST_PATH, meeting_place
from commwatch.wire import ring
from commwatch.wire.handlers import raised_by_handler
from commwatch.wire.numbers import ranks_text

#: Backends without a rendezvous.
_ALONE = ("mpi", "fake")
#: A wait that timed out and begins again so soon goes on.
_AGAIN_NS = 1_000_000_000
#: The modules that have a name of their own for a function.
_MODULES = (c10d, dist, device_mesh)


class Start(NamedTuple):
    """A default group that is to be made: rank and size of the world, and the field of an identity where its ranks meet."""

    rank: int
    size: int
    meets: dict[str, str]


class _Kind(NamedTuple):
    """A kind of call: its code, what returns from the arguments what it is about, and whether it only begins the next counted one of its code."""

    code: int
    about: Callable[..., str]
    comes_first: bool = False


class _Noted(NamedTuple):
    """A call that has been noted: what it is about, and its begin in ns."""

    text: str
    since_ns: int


class Outside:
    """Notes in the ring what this process waits for outside operations.

    Args:
        env: of the trainer.
        file: returns the ring; ``None``: there is none.
        starting: called before a default group is made; returns what is to note the call: another one if a new probe takes over.
    """

    def __init__(
        self,
        env: Mapping[str, str],
        file: Callable[[], ring.RingFile | None],
        starting: Callable[[Start], Outside],
    ) -> None:
        self._env, self._file, self._starting = env, file, starting
        self._inits = self._groups = 0
        self._is_inside = False
        #: The latest call if it raised, and when it ended.
        self._raised: tuple[_Noted | None, int] = (None, 0)
        self._replaced = Replacements()

    def watch(self) -> None:
        """Note the calls from now on."""
        wrap = self._replaced.wrap
        of_modules: dict[str, Callable[[Any], Any]] = {
            "init_process_group": self._initialising,
            "split_group": partial(self._noting, _Kind(ring.NEW_GROUP, _members)),
            "destroy_process_group": partial(self._noting, _Kind(ring.DESTROY, _members)),
        }
        for name, wrapper in of_modules.items():
            once = cache(wrapper)  # the modules share a function: it is pickled by its name
            for module in _MODULES:
                wrap(module, name, once)
        wrap(c10d, "_new_group_with_tag", partial(self._noting, _Kind(ring.NEW_GROUP, _new)))
        wrap(c10d, "_store_based_barrier", partial(self._noting, _Kind(ring.STORE_BARRIER, _barrier)))
        wrap(TCPStore, "__init__", self._meeting)
        for name in ("get", "multi_get", "wait", "barrier"):
            wrap(Store, name, partial(self._noting, _Kind(ring.STORE_WAIT, _keys)))

    def unwatch(self) -> None:
        """Undo ``watch``."""
        self._replaced.undo()

    def count_on(self, before: Outside) -> None:
        """Continue the counts of calls of ``before``."""
        self._inits, self._groups = before._inits, before._groups

    def _noting(self, kind: _Kind, original: Any) -> Any:
        @wraps(original)
        def noting(*args: Any, **kwargs: Any) -> Any:
            noted: list[_Noted] = []  # not a result: a signal handler may raise when a call returns
            raised = True
            try:
                self._begin(noted, kind, args, kwargs)
                result = original(*args, **kwargs)
                raised = False
                return result
            finally:
                if noted:
                    self._end(noted[0], raised)

        return noting

    def _initialising(self, original: Any) -> Any:
        @wraps(original)
        def initialising(*args: Any, **kwargs: Any) -> Any:
            noted = self._about_to_start(start_of, args, kwargs) or self
            return noted._noting(_Kind(ring.INIT, _nothing), original)(*args, **kwargs)

        return initialising

    def _meeting(self, original: Any) -> Any:
        """Wrap the constructor of a store: ranks may make that of the default group themselves, and meet there first."""

        @wraps(original)
        def meeting(store: Any, *args: Any, **kwargs: Any) -> None:
            noted = self._about_to_start(_start_at_store, args, kwargs)
            make = original if noted is None else noted._noting(_Kind(ring.INIT, _nothing, True), original)
            make(store, *args, **kwargs)

        return meeting

    def _about_to_start(self, find: Callable[..., Start | None], args: Any, kwargs: Any) -> Outside | None:
        """Return what is to note a call of which ``find`` returns what group it will make; ``None``: none, or not known."""
        try:
            start = None if self._is_inside or dist.is_initialized() else find(self._env, args, kwargs)
            return None if start is None else self._starting(start)
        except Exception as error:  # arguments that torch will refuse, too
            if raised_by_handler(error):
                raise
            return None

    def _begin(self, noted: list[_Noted], kind: _Kind, args: Any, kwargs: Any) -> None:
        """Note that a call begins, also in ``noted``, unless it does not count."""
        writer, code = self._file(), kind.code
        if writer is None or self._is_inside or (code == ring.STORE_WAIT and not _is_main_thread()):
            return
        try:
            text = kind.about(*args, **kwargs)
            if len(text) > ring.MOST_OUTSIDE_TEXT and code != ring.STORE_WAIT:
                text = "?"
            now = time.monotonic_ns()
            last, until = self._raised
            if code == ring.STORE_WAIT and last is not None and last.text == text and now - until < _AGAIN_NS:
                now = last.since_ns
            noted.append(_Noted(text, now))
            self._is_inside = True
            self._inits += code == ring.INIT and not kind.comes_first
            self._groups += code == ring.NEW_GROUP
            writer.outside(now, self._inits + kind.comes_first, self._groups, code, text)
        except Exception as error:  # arguments that the call will refuse, too
            if raised_by_handler(error):
                raise

    def _end(self, noted: _Noted, raised: bool) -> None:
        """Note that a call has ended."""
        self._is_inside = False
        self._raised = (noted if raised else None, time.monotonic_ns())
        try:
            writer = self._file()
            if writer is not None:
                writer.outside(0, self._inits, self._groups, ring.NOTHING, "")
        except Exception as error:  # the call's result is what counts
            if raised_by_handler(error):
                raise


def start_of(env: Mapping[str, str], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Start | None:
    """Return what a call of ``init_process_group`` with these arguments will make; ``None``: not known, or without a rendezvous."""
    given = dict(zip(("backend", "init_method", "timeout", "world_size", "rank", "store"), args, strict=False)) | kwargs
    if str(given.get("backend")).lower() in _ALONE:
        return None
    where = urlsplit(given.get("init_method") or "env://")
    query = {name: texts[0] for name, texts in parse_qs(where.query).items()}
    numbers = []
    for name, variable in (("rank", "RANK"), ("world_size", "WORLD_SIZE")):
        text = str(given.get(name, -1))
        numbers.append(text if text.isdecimal() else query.get(name) or env.get(variable, ""))
    if not all(text.isdecimal() for text in numbers):
        return None
    rank, size = map(int, numbers)
    return Start(rank, size, _meets(given.get("store"), where)) if rank < size else None


def _variables_of_parent() -> bytes:
    """Return the variables that this process's parent began with, as Linux has them; raise ``OSError`` if they may not be read."""
    return Path(f"/proc/{os.getppid()}/environ").read_bytes()


def launched(env: Mapping[str, str], of_parent: Callable[[], bytes] = _variables_of_parent) -> Start | None:
    """Return what a process that a launcher has started will make, by its variables; ``None``: it is none of several ranks.

    Programs that a rank runs inherit its variables: those of their parent have them, too.
    """
    rank, size = env.get("RANK", ""), env.get("WORLD_SIZE", "")
    if not (rank.isdecimal() and size.isdecimal() and int(rank) < int(size) and int(size) > 1):
        return None
    try:
        is_inherited = parent_process() is not None or b"\0RANK=" in b"\0" + of_parent()
    except OSError:  # another user's, or not on Linux
        return None
    return None if is_inherited else Start(int(rank), int(size), {})


def _start_at_store(env: Mapping[str, str], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Start | None:
    """Return the group whose ranks meet at a ``TCPStore`` with these arguments; ``None``: not known, or it waits for none.

    The agent of torchrun makes such stores, too, and may have variables of a rank.
    """
    names = ("host_name", "port", "world_size", "is_master", "timeout", "wait_for_workers")
    given = dict(zip(names, args, strict=False)) | kwargs
    rank, size, port = env.get("RANK", ""), str(given.get("world_size")), given.get("port")
    if not (port and rank.isdecimal() and size.isdecimal() and size == env.get("WORLD_SIZE")):
        return None
    if (
        not given.get("wait_for_workers", True)
        or "torch.distributed.launcher.api" in sys.modules
        or not _is_main_thread()
    ):
        return None
    return Start(int(rank), int(size), {"rendezvous": f"{str(given['host_name'])[:MOST_PATH]}:{port}"})


def _meets(store: Any, where: Any) -> dict[str, str]:
    """Return where ranks meet, as ``torch_peers.rendezvous`` does for the group; empty: by the launcher's variables, or not known."""
    if store is not None:
        return meeting_place(store)
    if where.scheme == "tcp" and where.port:
        return {"rendezvous": f"{(where.hostname or '')[:MOST_PATH]}:{where.port}"}
    return {"rendezvous": f"file:{where.path[-MOST_PATH:]}"} if where.scheme == "file" else {}


def _is_main_thread() -> bool:
    return threading.get_ident() == threading.main_thread().ident


def _nothing(*args: Any, **kwargs: Any) -> str:
    return ""


def _new(ranks: Any = None, *args: Any, **kwargs: Any) -> str:
    # With such a barrier, all ranks of the job wait for each other.
    of_all = getattr(c10d, "_is_barrier_after_init", lambda: 1)() == 1 and not kwargs.get("use_local_synchronization")
    return "" if ranks is None or of_all else ranks_text(ranks)


def _members(group: Any = None, *args: Any, **kwargs: Any) -> str:
    group = kwargs.get("parent_pg", group)
    return "" if group is None else ranks_text(dist.get_process_group_ranks(group))


def _barrier(
    rank: Any = None, store: Any = None, group_name: Any = "", rendezvous_count: int = 0, *args: Any, **kwargs: Any
) -> str:
    # Others, such as those of torch.distributed.rpc, may have another world.
    return "" if dist.is_initialized() and rendezvous_count == dist.get_world_size() else "?"


def _keys(store: Any, keys: Any = "", *args: Any, **kwargs: Any) -> str:
    keys = kwargs.get("key", keys)
    return keys if isinstance(keys, str) else ", ".join(map(str, keys))
