"""Checks for failures that other libraries report: Gloo's connections, monitored barriers, TCPStore, UCX, other frameworks."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Set

from commwatch_collectors.nccl import facts as f
from commwatch_collectors.nccl.checks.evidence import Hit, Log, many, some
from commwatch_collectors.nccl.checks.failures import is_known
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


#: Lines from a failed barrier to the reason that Gloo gives.
_REASON = 4
_CLOSED = "closed"
#: Kind of ``Gloo`` -> what it means and what to do.
_GLOO = {
    _CLOSED: (
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
    "device": (
        "Gloo made no device: the host's name has no address of this machine, or PyTorch was built without Gloo's transport for this system.",
        "Set GLOO_SOCKET_IFNAME, and check that the host's name resolves (hostname -i). On Windows, use another version of PyTorch, or WSL2.",
    ),
}


def gloo(log: Log) -> Iterator[Hit]:
    """Operations of Gloo that failed, once for each kind; not the time-out that a monitored barrier gives as its reason."""
    yield from _gloo(log, set(_GLOO) - {_CLOSED})


def gloo_peers(log: Log) -> Iterator[Hit]:
    """Processes that Gloo was connected to and that ended."""
    yield from _gloo(log, {_CLOSED})


def _gloo(log: Log, kinds: Set[str]) -> Iterator[Hit]:
    reasons = {
        (seen.source, number)
        for _, _, seen in log.account.of(f.Barrier)
        for number in range(seen.number, seen.number + _REASON)
    }
    alike: dict[tuple[str, str], list[tuple[f.Gloo, Seen]]] = {}
    for _, fact, seen in log.account.of(f.Gloo):
        if fact.kind in kinds and (fact.kind != "timed out" or (seen.source, seen.number) not in reasons):
            alike.setdefault((fact.kind, fact.text), []).append((fact, seen))
    for (kind, text), found in alike.items():
        peers = some(dict.fromkeys(fact.peer for fact, _ in found if fact.peer))
        link = " " if text.endswith("peer") else ": peer "
        says = f"{text}{link + peers if peers else ''}{_reporting(fact.who for fact, _ in found)}"
        yield Hit(says, [seen for _, seen in found], *_GLOO[kind])


def _reporting(who: Iterable[str]) -> str:
    """Return which processes report a failure: ranks, if any line has one."""
    known = set(who) - {""}
    ranks = {int(name.partition(" ")[2]) for name in known if name.startswith("rank ")}
    names = named(ranks) if ranks else some(sorted(known))
    return f" (reported by {names})" if names else ""


#: Different texts of one kind that are shown.
_MOST_TEXTS = 3
#: Kind of ``Store`` -> what it means and what to do.
_STORE = {
    "connect": (
        "The process that holds the store (rank 0, or torchrun's agent on the first node) did not answer at that address.",
        "Check that this process runs, that MASTER_ADDR and MASTER_PORT (--rdzv-endpoint) are the same and right on all nodes, and firewalls.",
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
    "closed": (
        "Another node had closed the rendezvous: the job's processes there had failed or finished, or its id is of an earlier run.",
        "Look into the logs of the other nodes for the first failure. Give each run an --rdzv-id of its own.",
    ),
    "lost": (
        "This is a consequence: the process that holds the store (rank 0, or torchrun's agent) ended first.",
        "Look into the log of rank 0 or of the agent for the first failure.",
    ),
}


def store(log: Log) -> Iterator[Hit]:
    """Failures of PyTorch's TCPStore. What ``id`` quotes is not reported again."""
    found: dict[str, list[tuple[f.Store, Seen]]] = {}
    for _, fact, seen in log.account.of(f.Store):
        found.setdefault(fact.kind, []).append((fact, seen))
    quoted = {(seen.source, seen.number) for _, seen in found.get("id", [])}
    for kind, lines in found.items():
        own = [(fact, seen) for fact, seen in lines if kind == "id" or (seen.source, seen.number) not in quoted]
        if own:
            texts = "; ".join(list(dict.fromkeys(fact.text for fact, _ in own))[:_MOST_TEXTS])
            reporting = "" if kind == "id" else _reporting(fact.who for fact, _ in own)
            yield Hit(f"{texts}{reporting}", [seen for _, seen in own], *_STORE[kind])


#: Errors of connections and transfers: others, as for a device that cannot be opened, leave UCX other ways.
_OF_TRANSFERS = re.compile(
    r"(?i)retry count exceeded|connection (?:refused|reset|timed out)|unreachable|no route|timed? ?out|no active messages transport"
    r"|completion with error|remote (?:access|operation|invalid)|local (?:protection|QP|length)"
)


def ucx(log: Log) -> Iterator[Hit]:
    """Connections and transfers that failed, as UCX has logged."""
    found = {fact.text: seen for _, fact, seen in log.account.of(f.Ucx) if _OF_TRANSFERS.search(fact.text)}
    if found:
        yield Hit(some(found, 2), list(found.values()))


#: Begin of a reason -> what it means and what to do.
_FRAMEWORKS = {
    "Unable to load": (
        "The program was built to load libnccl at run time, and the loader did not find it.",
        "Install the NCCL library that fits the CUDA version (the package nvidia-nccl-cu12, or libnccl2), and add its folder to LD_LIBRARY_PATH.",
    ),
    "remote process": (
        "A peer ended or could not be reached. Its own failure is the cause.",
        "Find the process that failed first. If all ran, check the network between them, and run again with NCCL_DEBUG=WARN.",
    ),
    "unhandled cuda": (
        "A call of CUDA failed within NCCL: often no memory left on the GPU, a driver that is too old, or an earlier fault of a kernel.",
        "Run again with NCCL_DEBUG=WARN: the line with 'Cuda failure' has the reason. Check the free memory of the GPUs with nvidia-smi.",
    ),
    "unhandled system": (
        "A call to the system or a library failed within NCCL: a socket, shared memory, or a card.",
        "Run again with NCCL_DEBUG=WARN for the reason. Check the size of /dev/shm, and NCCL_SOCKET_IFNAME.",
    ),
    "invalid usage": (
        "The program calls NCCL in a wrong way: often two ranks on one GPU, or a communicator after its end.",
        "Check that each rank has a GPU of its own, and run again with NCCL_DEBUG=WARN for the reason.",
    ),
}  # fmt: skip


def framework_errors(log: Log) -> Iterator[Hit]:
    """Errors of NCCL that other frameworks report; not where the log has NCCL's own account of a failure."""
    if is_known(log):
        return
    found: dict[str, dict[str, Seen]] = {}
    times: Counter[str] = Counter()
    for _, error, seen in log.account.of(f.TorchError):
        if error.who:
            found.setdefault(error.reason, {})[error.who] = seen
            times[error.reason] += seen.lines
    for reason, by in found.items():
        advice = next((advice for begin, advice in _FRAMEWORKS.items() if reason.startswith(begin)), ("", ""))
        named = [name for name in by if name != "a process"]
        of = f", in {some(named)}" if named else ""
        yield Hit(f"{reason} ({many(times[reason], 'time')}{of})", list(by.values()), *advice)
