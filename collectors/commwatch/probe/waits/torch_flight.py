"""One operation of the Python hook, until its end has been seen."""

from __future__ import annotations

from typing import Any

from commwatch.probe.torch_groups import Group


class Flight:
    """One operation between its launch and its record."""

    __slots__ = (
        "after_skipped",
        "beside",
        "blocked_since",
        "cost_of",
        "done",
        "flags",
        "future",
        "group",
        "head",
        "launch",
        "on_cpu",
        "outputs",
        "queue",
        "slot",
        "watch",
        "watched",
        "work",
    )

    def __init__(
        self,
        head: tuple[int, ...],
        launch: int,
        flags: int,
        group: Group,
        queue: tuple[str, int] | None,
        slot: int,
        on_cpu: bool,
    ) -> None:
        #: The first fields of the record to come, ``op`` to ``seq``.
        self.head = head
        self.launch = launch
        self.flags = flags
        self.group = group
        #: Operations of one queue run one after another: ``None`` for collectives, (op, peer) for p2p.
        self.queue = queue
        #: In-flight slot of the ring.
        self.slot = slot
        self.on_cpu = on_cpu
        self.done = False
        #: Number of operations for which this one's cost counts; 0: it is not measured.
        self.cost_of = 0
        #: The operation before it in its queue was only counted.
        self.after_skipped = False
        #: A thread is blocked in it that does not train.
        self.beside = False
        #: Whether ``Exposure`` counts it.
        self.watched = False
        #: When a thread began to wait for it, in ns; 0 = none did.
        self.blocked_since = 0
        #: Work and future, held while pending, and addresses of the memory of the result.
        self.work: Any = None
        self.future: Any = None
        self.outputs: tuple[int, ...] = ()
        #: On a device, until the call returns: its ``Watch``.
        self.watch: Any = None
