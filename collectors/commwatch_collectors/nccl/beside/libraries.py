"""Checks for failures that other libraries report: Gloo's connections, monitored barriers, TCPStore, UCX."""

from __future__ import annotations

from collections.abc import Iterator

from commwatch_collectors.nccl import facts as f
from commwatch_collectors.nccl.evidence import Hit, Log, some
from commwatch_collectors.nccl.lives import Seen
from commwatch_collectors.spans import ranks as named


def barriers(log: Log) -> Iterator[Hit]:
    """Ranks that did not come to a monitored barrier; without their names only where no line has them."""
    found = [(fact, seen) for _, fact, seen in log.account.of(f.Barrier)]
    missing = [(fact, seen) for fact, seen in found if fact.ranks]
    if missing:
        timeout_ms = missing[0][0].timeout_ms or 0
        ranks = {rank for fact, _ in missing for rank in fact.ranks}
        yield Hit(
            f"{named(ranks)} did not reach a monitored barrier within {timeout_ms / 1000:g} s",
            [seen for _, seen in missing],
        )
    elif found:
        yield Hit(
            "rank 0 waited for other ranks in a monitored barrier: its log names those that did not come",
            [seen for _, seen in found],
        )


#: Kind of ``Gloo`` -> what it means and what to do.
_GLOO = {
    "closed": (
        "This is a consequence: the process at the other end failed or ended first.",
        "Find the rank at that address that failed first; its log has the reason.",
    ),
    "refused": (
        "The process at the other end is not running, or the address cannot be reached.",
        "Check whether that process started, then GLOO_SOCKET_IFNAME, the nodes' host names (127.0.1.1 in /etc/hosts) and firewalls.",
    ),
    "timed out": (
        "The other ranks did not come to that operation of Gloo in time.",
        "Find out what the other ranks did at that time: an exception, a long computation, or a collective of another group.",
    ),
    "interface": (
        "The network interface that Gloo was given does not exist, or has no address.",
        "Set GLOO_SOCKET_IFNAME to an interface that ip addr lists on each node.",
    ),
}


def gloo(log: Log) -> Iterator[Hit]:
    """Operations of Gloo that failed, once for each kind, with all peers."""
    alike: dict[tuple[str, str], dict[str, Seen]] = {}
    for _, fact, seen in log.account.of(f.Gloo):
        alike.setdefault((fact.kind, fact.text), {}).setdefault(fact.peer, seen)
    for (kind, text), peers in alike.items():
        whom = some(peer for peer in peers if peer)
        link = " " if text.endswith("peer") else ": peer "
        yield Hit(f"{text}{link + whom if whom else ''}", list(peers.values()), *_GLOO[kind])


#: Kind of ``Store`` -> what it means and what to do.
_STORE = {
    "connect": (
        "The process that holds the store (rank 0, or torchrun's agent on the first node) did not answer at that address.",
        "Check that it runs, that MASTER_ADDR and MASTER_PORT (--rdzv-endpoint) are the same and right on all nodes, and firewalls.",
    ),
    "port": (
        "Another process uses the port of the job's store: another job on that node, or one that did not end.",
        "Choose another MASTER_PORT (torchrun --standalone or --rdzv-endpoint=host:0 chooses a free one), or end that process.",
    ),
    "join": (
        "Not all ranks of the job joined in time.",
        "Find the ranks that did not start or stopped early, and check the number of nodes and processes of each launcher.",
    ),
    "id": (
        "A communicator's first rank gives out its id through the store, and did not, so this rank could not begin the init.",
        "Look at that rank first: it failed or is late, or calls another collective.",
    ),
    "key": (
        "Another rank did not write what this rank waited for: it failed, is late, or takes another path.",
        "Find out what the other ranks did at that time. The key names the group and the purpose.",
    ),
    "lost": (
        "This is a consequence: the process that holds the store (rank 0, or torchrun's agent) ended first.",
        "Look into the log of rank 0 or of the agent for the first failure.",
    ),
}


def store(log: Log) -> Iterator[Hit]:
    """Failures of PyTorch's TCPStore. What ``id`` quotes is not reported again."""
    found: dict[str, dict[str, Seen]] = {}
    for _, fact, seen in log.account.of(f.Store):
        found.setdefault(fact.kind, {}).setdefault(fact.text.strip(), seen)
    quoted = {(seen.source, seen.number) for seen in found.get("id", {}).values()}
    for kind, texts in found.items():
        own = {text: seen for text, seen in texts.items() if kind == "id" or (seen.source, seen.number) not in quoted}
        if own:
            yield Hit(some(own, 3), list(own.values()), *_STORE[kind])


def ucx(log: Log) -> Iterator[Hit]:
    """Errors that UCX has logged."""
    found = {fact.text: seen for _, fact, seen in log.account.of(f.Ucx)}
    if found:
        yield Hit(some(found, 2), list(found.values()))
