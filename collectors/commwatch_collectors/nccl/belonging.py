"""Which facts belong to a communicator rather than to its process, which to faults, and which need a message's head. Pure."""

from __future__ import annotations

from commwatch_collectors.nccl import facts as f

#: Facts of one communicator rather than of its process.
OF_COMMUNICATOR: frozenset[type] = frozenset(
    (
        f.Via,
        f.CollNetVia,
        f.Ring,
        f.Neighbours,
        f.Tree,
        f.Trees,
        f.Channels,
        f.Connected,
        f.Layout,
        f.Pattern,
        f.NvlsUsed,
        f.Mnnvl,
    )
)

#: Facts of faults. ``Speaks`` shows which ranks are silent after a time-out.
OF_FAULTS: frozenset[type] = frozenset(
    (
        f.Trail,
        f.Retry,
        f.CudaFailure,
        f.RasDead,
        f.Watchdog,
        f.Progress,
        f.Relayed,
        f.GaveUp,
        f.Stuck,
        f.CommTimeout,
        f.TorchError,
        f.Speaks,
        f.Raised,
        f.Uncaught,
        f.Desync,
        f.Barrier,
        f.Gloo,
        f.Store,
        f.Died,
        f.ElasticReport,
        f.Xid,
        f.Ucx,
    )
)

#: Facts that text other than NCCL's messages can match by chance.
_HEADED = (f.Trail, f.Call, f.CudaFailure, f.Retry, f.Rccl)


def fits(fact: f.Fact, init: f.Init) -> bool:
    """Return whether ``fact`` can be of the rank and communicator of ``init``."""
    if isinstance(fact, f.Via):
        printing = fact.dst if fact.direction == "receive" else fact.src
        return printing == init.rank and init.nranks is not None and fact.src < init.nranks > fact.dst
    if isinstance(fact, (f.CollNetVia, f.Neighbours, f.Tree)):
        return fact.rank == init.rank
    return not isinstance(fact, f.Layout) or fact.nranks == init.nranks


def needs_head(fact: f.Fact) -> bool:
    """Return whether text without a message's head can match this fact by chance."""
    return isinstance(fact, _HEADED) or (isinstance(fact, f.Env) and not fact.name.startswith(("NCCL_", "RCCL_")))
