"""Facts of lines that other programs print. Ranks are ranks in the process group unless they are ``Where.job_rank``."""

from __future__ import annotations

from typing import NamedTuple


class Where(NamedTuple):
    """Whose line of PyTorch it is, as far as the line shows. Only GUIDs are the same in all processes: they number groups apart."""

    job_rank: int | None = None
    pg: str = ""
    guid: str = ""
    #: The description of the group; the name of torchcomms' communicator.
    name: str = ""


class Watchdog(NamedTuple):
    """PyTorch's watchdog has found a collective past its time-out; ``rank`` is the rank in the process group."""

    rank: int
    seq: int | None
    op: str
    numel_in: int | None
    numel_out: int | None
    timeout_ms: int | None
    ran_ms: int
    where: Where = Where()


class Progress(NamedTuple):
    """Progress of a rank in a process group, as PyTorch prints it after a time-out; -1: none yet."""

    rank: int
    enqueued: int
    completed: int
    where: Where = Where()
    #: Why it was printed: ``time-out``; ``failure`` (a time-out or an error); ``dump``: a signal, from ``source`` if not from this rank.
    why: str = ""
    #: The collective that failed.
    work: int | None = None
    source: int | None = None


class Relayed(NamedTuple):
    """A rank has seen another rank's signal of a time-out."""

    rank: int
    where: Where = Where()


class GaveUp(NamedTuple):
    """PyTorch gave up because an operation failed or timed out, which other lines name."""

    rank: int | None
    where: Where = Where()


class Stuck(NamedTuple):
    """PyTorch's watchdog thread itself made no progress; ``gil``: it could not get Python's GIL either."""

    rank: int
    seconds: int | None
    gil: bool
    where: Where = Where()


class CommTimeout(NamedTuple):
    """An operation of a communicator of torchcomms timed out; ``ran_ms`` is ``None`` where the process only ends because of it."""

    rank: int
    ran_ms: int | None
    where: Where = Where()


class Speaks(NamedTuple):
    """A rank of the job has printed a line (PyTorch marks each line with the rank)."""

    rank: int


class Raised(NamedTuple):
    """A rank ended with a Python exception."""

    rank: int
    error: str


class Uncaught(NamedTuple):
    """A traceback of Python has ended in an exception, in a line that PyTorch has not marked with the rank."""

    who: str
    error: str
    #: It came while the one before it, of the same process, was handled.
    supersedes: bool = False


class TorchError(NamedTuple):
    """An exception of PyTorch, or of another framework, for an NCCL call that failed."""

    reason: str
    #: The process, if it is not PyTorch that reports it.
    who: str = ""


class Desync(NamedTuple):
    """A line of PyTorch's report on ranks whose collectives differ."""

    text: str


class Barrier(NamedTuple):
    """A monitored barrier failed: ``ranks`` did not come (empty: the line does not name them)."""

    ranks: tuple[int, ...]
    timeout_ms: int | None


class Gloo(NamedTuple):
    """A failed operation of Gloo: ``kind`` is ``closed``, ``refused``, ``timed out`` or ``interface``."""

    kind: str
    text: str
    peer: str = ""
    #: Which process reports it, as far as the line shows.
    who: str = ""


class Store(NamedTuple):
    """PyTorch's TCPStore failed: ``kind`` is ``connect``, ``port``, ``join``, ``id``, ``key`` or ``lost``."""

    kind: str
    text: str
    who: str = ""


class Died(NamedTuple):
    """A process ended: ``who`` did it (empty: the line does not name it), ``did`` is a verb phrase."""

    kind: str
    who: str
    did: str
    #: The line is a launcher's report; the launcher then also ends the other processes.
    by_launcher: bool = False


class ElasticReport(NamedTuple):
    """A line of torchrun's report on failed workers: ``field`` is ``root``, ``host``, ``rank`` or ``exitcode``."""

    field: str
    value: str


class Xid(NamedTuple):
    """The driver has logged an event of a GPU."""

    number: int
    device: str
    host: str = ""


class Ucx(NamedTuple):
    """UCX has logged an error."""

    text: str
