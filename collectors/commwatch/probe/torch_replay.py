"""Records the operations of CUDA graphs for the Python hook; ``native/graphs.h`` does so for the native hook."""

from __future__ import annotations

import threading
from typing import NamedTuple

import torch

from commwatch.probe.governor import Counts, is_recorded
from commwatch.probe.torch_groups import Group
from commwatch.wire import events as ev
from commwatch.wire.ring import RingWriter

#: Flags by which counted operations are kept apart.
COUNTED_FLAGS = ev.NO_SIZE | ev.UNALIGNED


def is_captured(device: torch.device) -> bool:
    """Return whether the current stream of this device is being captured into a graph."""
    module = torch.get_device_module(device)
    return bool(module.current_device() == device.index and module.is_current_stream_capturing())


class Operation(NamedTuple):
    """An operation of a graph, without a number and times."""

    group: Group
    name: str
    code: int
    dtype: int
    peer: int
    tag: int
    size_bytes: int
    flags: int

    def write(self, writer: RingWriter, counts: Counts, mode: int, now_ns: int) -> bool:
        """Record one run of the operation, whose times are unknown; return False if it was only counted.

        Args:
            mode: the governor's mode.
            now_ns: the time of the replay.
        """
        group, peer, queue, numbered = self.group, self.peer, None, None
        if self.name in ev.P2P:
            peer = group.peer_of(self.name, peer)
            queue, numbered = (self.name, peer), group.key_of_tag(self.name, peer, self.tag)
        for seq in group.seqs[numbered]:  # noqa: B007 - Group.seqs says why
            break
        if not is_recorded(mode, seq):
            kind = (self.code, group.small_id, self.flags & COUNTED_FLAGS)
            counts.add((*kind, self.size_bytes, 0 if numbered else seq, now_ns))
            group.skipped.add(queue)
            return False
        head = (
            self.code,
            self.dtype,
            group.small_id,
            peer,
            self.tag,
            self.size_bytes,
            now_ns,
            seq,
        )
        writer.write(*head, 0, now_ns, now_ns, self.flags | ev.UNTIMED, ev.BY_NONE, 0)
        return True


class Captured:
    """The operations of each graph, by the graph's number from ``torch_graphs``."""

    def __init__(self) -> None:
        self._operations: dict[int, list[Operation]] = {}
        #: Graphs whose capture is running, by the thread in which it began.
        self._running: dict[int, int] = {}

    def __bool__(self) -> bool:
        """Whether a capture is running, in any thread."""
        return bool(self._running)

    def begin(self, graph: int) -> None:
        """Begin the capture of a graph in this thread; an earlier capture here that has not ended was aborted."""
        self._operations[graph] = []
        self._running = {**self._running, threading.get_ident(): graph}

    def end(self, graph: int) -> None:
        """End the capture of a graph."""
        self._running = {thread: other for thread, other in self._running.items() if other != graph}

    def add(self, operation: Operation) -> bool:
        """Add an operation to the graph that is being captured; may be called in any thread.

        Returns False if the graph is not known: several captures are running, and none of them began in this thread.
        """
        running = self._running
        graph = running.get(threading.get_ident())
        if graph is None and len(running) == 1:
            (graph,) = running.values()
        if graph is None:
            return False
        self._operations[graph].append(operation)
        return True

    def of(self, graph: int) -> list[Operation]:
        """Return the operations of a graph in the order of their capture, only those of groups that still exist."""
        return [operation for operation in self._operations.get(graph, ()) if operation.group.ref() is not None]

    def forget(self, graph: int) -> None:
        """Drop the operations of a graph."""
        self._operations.pop(graph, None)
