"""Contents of a trainer's names file: groups, operations, dtypes, NCCL log files, GPU. Pure."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from commwatch.collectors.node.gpu import GpuPlace, place_of
from commwatch.collectors.wire import events as ev
from commwatch.core.cells import (
    LATEST_KNOWN,
    MOST_APART,
    OTHER_GROUP,
    OTHER_ID,
    UNKNOWN_GROUP,
    GroupInfo,
    count_of,
)
from commwatch.core.group_labels import label

#: What a rank may report as the address of an agent, and how many.
_URL = re.compile(r"https?://(?:[A-Za-z0-9._-]{1,253}|\[[0-9A-Fa-f:.]{2,45}\]):[0-9]{1,5}")
_MOST_PEERS = 1024
#: Characters of the name of an exception's type.
_MOST_TYPE = 80
#: Most sets of replicated parameters, most checksums of a set, and characters of a parameter's name.
_MOST_SETS, _MOST_SUMS, _MOST_NAME = 1024, 1024, 200


class Announced(NamedTuple):
    """A set of parameters that a rank has announced: they must be equal on all ranks of a group."""

    #: The group's number in the ring; equal for the same parameters on all ranks.
    group: int
    key: str
    #: Of each checksum: a parameter, or neighbours that share it.
    names: tuple[str, ...]


def _address(text: object) -> str:
    """Return the address of an agent; raise ``ValueError`` if it is more than scheme, host and port."""
    if isinstance(text, str) and _URL.fullmatch(text):
        return text
    raise ValueError(f"{text!r}: not an agent's address")


def _group(entry: dict[str, Any]) -> GroupInfo:
    """Return a group of the names file; raise ``KeyError``, ``OverflowError``, ``TypeError`` or ``ValueError`` if damaged."""
    ranks = tuple(count_of(r) for r in entry["ranks"]) if entry["ranks"] is not None else None
    name, description, size = str(entry["name"]), str(entry["desc"]), count_of(entry["size"])
    return GroupInfo(
        str(entry["group_id"]),
        label(name, description, ranks, size),
        name,
        description,
        ranks,
        size,
        bool(entry["aligned"]),
        str(entry["backend"]) if entry.get("backend") else None,
    )


class Names:
    """The names of one ring."""

    def __init__(self) -> None:
        self.groups: dict[int, GroupInfo] = {}
        #: The groups in it beyond ``MOST_APART``, oldest first; and the number of groups ever announced.
        self._rest: deque[int] = deque()
        self.groups_announced = 0
        self.ops: dict[int, str] = dict(enumerate(ev.OPS, start=1))
        self.dtypes: dict[int, str] = {}
        #: Where this rank's NCCL writes its debug output, if into a file.
        self.nccl_log: str | None = None
        self.gpu: GpuPlace | None = None  # the GPU that the trainer reported
        #: The folder that NCCL Inspector dumps into.
        self.inspector: str | None = None
        #: The addresses of the agents of the job's nodes, as its ranks have found them.
        self.peers: tuple[str, ...] = ()
        #: Sets of replicated parameters, by number.
        self.replicas: dict[int, Announced] = {}
        #: Type of the exception that ended the process; empty: none, or not known.
        self.raised = ""

    def learn(self, entries: Iterable[dict[str, Any]]) -> list[tuple[int, GroupInfo]]:
        """Read entries of the names file and skip damaged ones. Returns the groups that are new or changed."""
        fresh: list[tuple[int, GroupInfo]] = []
        for entry in entries:
            try:
                if "group" in entry:
                    small_id, info = count_of(entry["group"]), _group(entry)
                    if self.groups.get(small_id) != info:
                        fresh += self._remember(small_id, info)
                elif "dtype" in entry:
                    self.dtypes[count_of(entry["dtype"])] = str(entry["name"])
                elif "op" in entry:
                    self.ops[count_of(entry["op"])] = str(entry["name"])
                else:
                    self._learn_state(entry)
            except (AttributeError, KeyError, OverflowError, TypeError, ValueError):
                continue
        return fresh

    def _learn_state(self, entry: dict[str, Any]) -> None:
        """Read an entry about the process itself."""
        if "nccl_log" in entry:
            self.nccl_log = str(entry["nccl_log"])
        elif "gpu" in entry:
            self.gpu = place_of(entry["gpu"])
        elif "inspector" in entry:
            self.inspector = str(entry["inspector"])
        elif "peers" in entry:
            self.peers = tuple(_address(each) for each in entry["peers"][:_MOST_PEERS])
        elif "replicas" in entry:
            self._announce(count_of(entry["replicas"]), entry)
        elif "raised" in entry:
            self.raised = str(entry["raised"])[:_MOST_TYPE]

    def _announce(self, number: int, entry: dict[str, Any]) -> None:
        names = tuple(str(name)[:_MOST_NAME] for name in entry["tensors"][:_MOST_SUMS])
        if len(self.replicas) < _MOST_SETS:
            self.replicas[number] = Announced(count_of(entry["in"]), str(entry["key"])[:_MOST_NAME], names)

    def _remember(self, small_id: int, info: GroupInfo) -> Iterator[tuple[int, GroupInfo]]:
        """Store a group, and drop the oldest of the rest if there are too many; yield the groups that are new."""
        yield small_id, info
        is_new = small_id not in self.groups
        self.groups_announced += is_new
        self.groups[small_id] = info
        if small_id < MOST_APART or not is_new:
            return
        if OTHER_ID not in self.groups:
            self.groups[OTHER_ID] = OTHER_GROUP
            yield OTHER_ID, OTHER_GROUP
        self._rest.append(small_id)
        if len(self._rest) > LATEST_KNOWN:
            self.groups.pop(self._rest.popleft(), None)

    def group(self, small_id: int) -> GroupInfo:
        """Return the group of a record; a placeholder where its name is not known."""
        return self.groups.get(small_id) or (OTHER_GROUP if MOST_APART <= small_id < ev.NO_GROUP else UNKNOWN_GROUP)

    def op_name(self, code: int) -> str:
        """Return an op's canonical name, else the name from the names file, else ``unknown``."""
        return self.ops.get(code, "unknown")
