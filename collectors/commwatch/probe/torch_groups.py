"""Process groups, with an identity that is unique across re-inits and groups of one name."""

from __future__ import annotations

import hashlib
import json
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator
from itertools import chain, count, repeat
from typing import Any

import torch.distributed.distributed_c10d as c10d

from commwatch.wire import events as ev
from commwatch.wire.handlers import raised_by_handler
from commwatch.wire.numbers import NUMBERS


def group_id(job: str, name: str, ranks: tuple[int, ...] | None, generation: int) -> str:
    """Return a short hash that is equal on all members of one group, and different for any other group of the process.

    The restart count is no part of it, because nodes of one run may count differently: torchrun counts the failures of its own workers.

    Args:
        generation: how many groups of this name and these ranks this rank had made before.
    """
    return hashlib.sha256(json.dumps([job, name, ranks, generation]).encode()).hexdigest()[:12]


def label(name: str, description: str) -> str:
    """Return the group's name for people: its description, else its name, else ``unnamed``."""
    return description if description not in ("", "undefined") else name or "unnamed"


def numbers_from(first: int = 0) -> Iterator[int]:
    """Return the sequence numbers from one on, which go on at 0. As fast as ``count``, and no Python code runs in it."""
    return chain.from_iterable(chain((range(first, NUMBERS),), repeat(range(NUMBERS))))


class Replacements:
    """Functions of modules and classes that were replaced, and can be put back."""

    def __init__(self) -> None:
        #: Where they are, their name, the original and the replacement.
        self._replaced: list[tuple[Any, str, Any, Any]] = []

    def wrap(self, owner: Any, name: str, wrapper: Callable[[Any], Any]) -> None:
        """Replace a function, if there is one, by what ``wrapper`` makes of it."""
        original = getattr(owner, name, None)
        if original is not None:
            replacement = wrapper(original)
            # What a class has is not always what it returns: pybind11's methods are functions that bind nothing.
            self._replaced.append((owner, name, vars(owner).get(name, original), replacement))
            setattr(owner, name, replacement)

    def undo(self) -> None:
        """Put the originals back, except where other code has replaced the replacement since."""
        for owner, name, original, replacement in self._replaced:
            if getattr(owner, name) is replacement:
                setattr(owner, name, original)
        self._replaced.clear()


class PeerRoom:
    """How many peers of messages the groups of a process have, by operation."""

    def __init__(self) -> None:
        self.used = 0


class Group:
    """One process group of this rank, and its counters."""

    __slots__ = (
        "_on_device",
        "_room",
        "_tags",
        "aligned",
        "id",
        "last_end",
        "peers",
        "ranks",
        "ref",
        "seqs",
        "size",
        "skipped",
        "small_id",
    )

    def __init__(
        self,
        ref: Callable[[], Any],
        size: int,
        ranks: tuple[int, ...] | None,
        group_id: str,
        aligned: bool,
        *,
        room: PeerRoom | None = None,
    ) -> None:
        self.ref = ref
        self.size = size
        self.ranks = ranks
        self.id = group_id
        self.aligned = aligned
        #: Number in the ring's records: groups in the order of their first operation.
        self.small_id = 0
        #: Next numbers of operations: of the collectives (``None``), and by operation, peer and tag modulo ``TAGS``. They are taken
        #: by a loop that breaks, not by a call: when a call returns, a signal handler may raise, and the number would be lost.
        self.seqs: defaultdict[tuple[str, int, int] | None, Iterator[int]] = defaultdict(numbers_from)
        self._room = PeerRoom() if room is None else room
        #: Operation and peer of the messages that are numbered by peer.
        self.peers: set[tuple[str, int]] = set()
        #: The tags that are numbered.
        self._tags: dict[tuple[str, int, int], int] = {}
        #: End of the latest operation of each queue: the group's collectives, and each (op, peer).
        self.last_end: dict[Any, int] = {}
        #: Queues whose latest operation was only counted: the begin of the next one is not known.
        self.skipped: set[Any] = set()
        #: Queues, each with a device on which it has had an operation.
        self._on_device: set[Any] = set()

    def begins_on_device(self, queue: Any, device: Any) -> bool:
        """Return whether a queue has had no operation on this device before this one.

        Args:
            queue: with whether a batch is open: messages in a batch have another communicator than those outside of one.
        """
        begins = (queue, device) not in self._on_device
        self._on_device.add((queue, device))
        return begins

    def take_skipped(self, queue: Any) -> bool:
        """Return whether the latest operation of a queue was only counted, and forget that."""
        skipped = queue in self.skipped
        self.skipped.discard(queue)
        return skipped

    def peer_of(self, op: str, peer: int) -> int:
        """Return the peer of a message; -1 if it is not known, or there is no room for another."""
        if peer >= 0 and (op, peer) not in self.peers:
            if self._room.used >= ev.MOST_PEERS:
                return -1
            self._room.used += 1
            self.peers.add((op, peer))
        return peer

    def key_of_tag(self, op: str, peer: int, tag: int) -> tuple[str, int, int]:
        """Return the key in ``seqs`` of a send or recv. A tag begins at 0 if it replaces another."""
        key = (op, peer, tag % ev.TAGS)
        if self._tags.get(key, tag) != tag:
            self.seqs.pop(key, None)
        self._tags[key] = tag
        return key

    def global_rank(self, group_rank: int) -> int:
        """Return the global rank of a member of this group; -1 if it is not known."""
        return self.ranks[group_rank] if self.ranks is not None and 0 <= group_rank < len(self.ranks) else -1


class Groups:
    """The groups of this process; counts creations from ``watch`` on."""

    def __init__(self, job: str) -> None:
        self.job = job
        #: By ``id`` of the ProcessGroup; ids of dead objects are used again, so compare ``ref()`` too.
        self.known: dict[int, Group] = {}
        self._made: dict[int, tuple[Callable[[], Any], int]] = {}
        self._generations: defaultdict[tuple[str, tuple[int, ...]], Callable[[], int]] = defaultdict(
            lambda: count().__next__
        )
        self._next_small_id = count().__next__
        self._strangers: dict[tuple[str, int], Group] = {}
        self._room = PeerRoom()
        #: Called with the name of each group that is made while watching.
        self.on_made: Callable[[str], object] | None = None
        #: Called before a group is made, with this process's rank and the world's size if it is the default group. Returns
        #: the groups that count it: other ones if a new probe takes over.
        self.on_making: Callable[[tuple[int, int] | None], Groups] | None = None
        #: Called with True when a default group was created, with False when it was destroyed.
        self.on_default: Callable[[bool], object] | None = None
        #: Called with a group before its backends are shut down.
        self.on_shutdown: Callable[[Any], object] | None = None
        #: Called with a known group that is about to be destroyed.
        self.on_destroyed: Callable[[Group], object] | None = None
        self._replaced = Replacements()

    def add(self, pg: Any) -> tuple[Group, dict[str, Any] | None]:
        """Return a group at its first operation, and its entry for the names file (``None`` if already written).

        The caller adds the group to ``known`` once its entry is written.
        """
        if pg not in c10d._world.pg_names:
            stranger, entry = self.add_foreign(_text(pg, "group_name"), _text(pg, "group_desc"), pg.size())
            group = Group(weakref.ref(pg), stranger.size, None, stranger.id, aligned=False)
            group.small_id = stranger.small_id
            return group, entry
        name, description = pg.group_name, pg.group_desc
        ranks = _ranks(pg)
        generation = self._generation(pg)
        aligned = generation is not None or _is_unused(pg)
        if generation is None:
            generation = self._generations[name, ranks or ()]()
        identity = group_id(self.job, name, ranks, generation)
        self._forget_destroyed()
        group = Group(weakref.ref(pg), pg.size(), ranks, identity, aligned and ranks is not None, room=self._room)
        return group, self._entry(group, name, description)

    def _forget_destroyed(self) -> None:
        """Forget the groups that no longer exist, which frees the room of their peers."""
        known = list(self.known.items())  # at once: a signal handler may communicate in the middle of what follows
        for key, group in known:
            if group.ref() is None:
                self.known.pop(key, None)
        self._room.used = sum(len(group.peers) for _, group in known if group.ref() is not None)

    def _generation(self, pg: Any) -> int | None:
        """Return how many groups of this name and these ranks were made before this one; ``None``: its creation was not seen."""
        made = self._made.get(id(pg))
        return made[1] if made is not None and made[0]() is pg else None

    def add_foreign(self, name: str, description: str, size: int) -> tuple[Group, dict[str, Any] | None]:
        """Add a group that is not in ``torch.distributed``; those of one name and size count as one.

        Returns the group and its entry for the names file (``None`` if already written).
        """
        known = self._strangers.get((name, size))
        if known is not None:
            return known, None
        identity = group_id(self.job, name, None, self._generations[name, ()]())
        group = self._strangers[name, size] = Group(lambda: None, size, None, identity, aligned=False)
        return group, self._entry(group, name, description)

    def _entry(self, group: Group, name: str, description: str) -> dict[str, Any]:
        group.small_id = self._next_small_id()
        entry = {"name": name, "desc": description, "label": label(name, description), "group_id": group.id}
        about = {"ranks": group.ranks, "size": group.size, "aligned": group.aligned, "backend": _backend(group.ref())}
        return {**entry, **about}

    def named(self, name: str, size: int) -> Any:
        """Return the group in ``torch.distributed`` that has this name and size now; ``None`` if there is none."""
        groups = (pg for pg, known_as in list(c10d._world.pg_names.items()) if known_as == name)
        return next((pg for pg in groups if pg.size() == size), None)

    def watch(self) -> None:
        """Count creations from now on, so that the n-th group of a name is the n-th on every rank."""
        wrap = self._replaced.wrap
        wrap(c10d, "_new_process_group_helper", self._making)
        wrap(c10d, "_register_pg_in_world", self._registering)
        wrap(c10d, "_update_default_pg", self._updating)
        wrap(c10d, "_shutdown_backend", self._shutting_down)  # before torch 2.7
        wrap(c10d.ProcessGroup, "shutdown", self._shutting_down)
        wrap(c10d.ProcessGroup, "abort", self._shutting_down)

    def _making(self, original: Any) -> Any:
        def watching(*args: Any, **kwargs: Any) -> Any:
            groups, members = self, args[2] if len(args) > 2 else kwargs.get("global_ranks_in_group", ())
            if self.on_making is not None:
                default = None if members or len(args) < 2 else (args[1], args[0])
                groups = self.on_making(default)
            result = original(*args, **kwargs)
            groups._note(result[0] if isinstance(result, tuple) else result, members)
            return result

        return watching

    def _registering(self, original: Any) -> Any:
        def watching(pg: Any, *args: Any, **kwargs: Any) -> Any:
            result = original(pg, *args, **kwargs)
            # Given by `split_group`, which makes its groups without `_new_process_group_helper`.
            members = kwargs.get("rank_mapping")
            if members is not None and self._generation(pg) is None:
                self._note(pg, members)
            return result

        return watching

    def _note(self, pg: Any, members: Any) -> None:
        """Count a group that has been made."""
        try:
            ranks = tuple(members) or tuple(range(pg.size()))
            self._made[id(pg)] = weakref.ref(pg), self._generations[pg.group_name, ranks]()
            if self.on_made is not None:
                self.on_made(pg.group_name)
        except (AttributeError, TypeError, RuntimeError) as error:
            if raised_by_handler(error):
                raise
            # Not a member, or a torch that makes groups another way: added at its first use.

    def _updating(self, original: Any) -> Any:
        def watching(pg: Any) -> Any:
            result = original(pg)
            if self.on_default is not None:
                self.on_default(pg is not None)
            return result

        return watching

    def _shutting_down(self, original: Any) -> Any:
        def watching(pg: Any, *args: Any, **kwargs: Any) -> Any:
            if self.on_shutdown is not None:
                self.on_shutdown(pg)
            group = self.known.get(id(pg))
            if self.on_destroyed is not None and group is not None and group.ref() is pg:
                self.on_destroyed(group)
            return original(pg, *args, **kwargs)

        return watching

    def count_on(self, before: Groups) -> None:
        """Continue the counts of creations of ``before``."""
        self._made, self._generations = before._made, before._generations

    def unwatch(self) -> None:
        """Undo ``watch``, except for functions that other code has wrapped since."""
        self._replaced.undo()
        self.on_making = self.on_default = self.on_shutdown = self.on_destroyed = None


def _text(pg: Any, attribute: str) -> str:
    """Return name or description of a group; empty if it has none."""
    try:
        return str(getattr(pg, attribute))
    except (AttributeError, RuntimeError) as error:
        if raised_by_handler(error):
            raise
        return ""


def _ranks(pg: Any) -> tuple[int, ...] | None:
    members = c10d._world.pg_group_ranks.get(pg)
    if members is None:
        return tuple(range(pg.size())) if pg.group_name == "0" else None
    return tuple(sorted(members, key=members.__getitem__))


def _backend(pg: Any) -> str | None:
    """Return torch's name of a group's backend; ``None`` if it has several, or is not known."""
    name = c10d._world.pg_map.get(pg, (None,))[0]
    return None if name in (None, "undefined") else str(name)


def _is_unused(pg: Any) -> bool:
    try:
        return bool(pg._get_sequence_number_for_group() == 0)
    except RuntimeError as error:
        if raised_by_handler(error):
            raise
        return False
