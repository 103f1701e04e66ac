"""Checks for processes that ended with an error, and for faults of GPUs that the driver has logged."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from commwatch_collectors.nccl import facts as f
from commwatch_collectors.nccl.beside.exceptions import FOLLOWS, uncaught
from commwatch_collectors.nccl.beside.hardware import fails_by_fault
from commwatch_collectors.nccl.beside.system import ended
from commwatch_collectors.nccl.checks.evidence import Hit, Log, some
from commwatch_collectors.nccl.checks.reasons import severity
from commwatch_collectors.nccl.lives import Seen
from commwatch_collectors.spans import ranks as named


class _Advice(NamedTuple):
    means: str
    do: str


_KILLED = _Advice(
    "The process was killed from outside: by the system for lack of memory, by the scheduler, or by hand.",
    "Look for 'Out of memory' in dmesg and in the scheduler's log of that node.",
)
#: Kind of ``Died`` -> what it means and what to do.
_ADVICE = {
    "gpu memory": _Advice(
        "An allocation on the GPU failed, and that rank stopped. Other ranks then wait for it.",
        "Use less memory on the GPU: smaller batches or sequences, more sharding, activation checkpointing. If much memory is "
        "reserved but not allocated, set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True. Check for other processes on the GPU.",
    ),
    "host memory": _Advice(
        "The node, the container or the Slurm step ran out of main memory, and the system killed a process.",
        "Give the job more memory, or use less: fewer data loader workers, smaller prefetch and caches, less pinned memory.",
    ),
    "killed": _KILLED,
    "shm": _Advice(
        "Shared memory was full or not accessible. Data loaders and NCCL keep their buffers in /dev/shm.",
        "Make /dev/shm larger (docker run --shm-size or --ipc=host, an emptyDir of medium Memory in Kubernetes), or use fewer workers.",
    ),
    "disk": _Advice(
        "A file could not be written, and the process stopped.",
        "Free space or raise the quota where the job writes: checkpoints, logs, caches, /tmp.",
    ),
    "segfault": _Advice(
        "The process crashed in native code.",
        "Look at its core file or run with PYTHONFAULTHANDLER=1. Check for libraries that do not fit each other.",
    ),
    "cuda": _Advice(
        "A kernel of the program failed on that GPU. The watchdog, or the next call, is only the first to notice.",
        "Run that rank with CUDA_LAUNCH_BLOCKING=1 or compute-sanitizer, and look for Xid events in dmesg.",
    ),
    "cuda call": _Advice(
        "A call of CUDA failed on that node, before or beside any communication.",
        "Check the driver and the GPUs there (nvidia-smi), CUDA_VISIBLE_DEVICES, and that PyTorch is built for these GPUs.",
    ),
    "no kernel": _Advice(
        "The program has no kernels that were compiled for this GPU.",
        "Install a build of PyTorch, and of its extensions, for this generation of GPUs (torch.cuda.get_arch_list()). For AMD, compare it with "
        "the architecture in rocminfo (gfx…), and check HSA_OVERRIDE_GFX_VERSION.",
    ),
    "no device": _Advice(
        "The process uses a GPU that it does not have.",
        "Compare CUDA_VISIBLE_DEVICES (AMD: HIP_VISIBLE_DEVICES, ROCR_VISIBLE_DEVICES), LOCAL_RANK and the number of processes per node with "
        "the GPUs that the process sees (nvidia-smi, rocm-smi).",
    ),
    "cache": _Advice(
        "The model and its activations leave no memory of the GPU for the KV cache.",
        "Raise gpu_memory_utilization, lower max_model_len or max_num_seqs, use more GPUs for each model, and check for other processes on the GPU.",
    ),
    "hangup": _Advice(
        "The terminal or the connection (SSH) in which the job was started was closed.",
        "Start the job in tmux or screen, with nohup or setsid, or as a batch job.",
    ),
    "ray": _Advice(
        "The process crashed or was killed. Ray only noticed that its connection ended.",
        "Look in dmesg of that node for 'Out of memory' and segmentation faults, and into the logs of that worker and of the raylet in "
        "/tmp/ray/session_latest/logs.",
    ),
    "heartbeat": _Advice(
        "These processes crashed or hang, or their nodes cannot be reached. JAX then ends the others.",
        "Look into the logs of these tasks first.",
    ),
    "ecc": _Advice(
        "The memory of that GPU is damaged.",
        "Take the GPU out of use, reset it, and replace it if the error comes back (nvidia-smi -q -d ECC,ROW_REMAPPER).",
    ),
    "ddp": _Advice(
        "Some parameters got no gradient in the last iteration, so DistributedDataParallel still waits for them.",
        "Pass find_unused_parameters=True, or make each parameter take part in the loss on each rank.",
    ),
    "limit": _Advice("The scheduler ended the job.", "Ask for more time, or save checkpoints early enough to resume."),
    "node": _Advice("The scheduler lost the node and ended the job.", "Exclude that node, and check its power, network and kernel log."),
    "abort": _Advice(
        "The process aborted itself, as a failed assertion or PyTorch's watchdog does.",
        "Look for its last lines before the abort; they have the reason.",
    ),
    "signal": _Advice("A signal ended the process.", "Look for its last lines, and in dmesg at that time."),
    "exit": _Advice(
        "The process stopped; this log does not show why.",
        "Look into that process's own output, for example with torchrun --log-dir and --redirects 3.",
    ),
    "exception": _Advice(
        "The program stopped with an exception, and the other ranks are ended or wait for that one.",
        "Read the traceback above that line.",
    ),
}  # fmt: skip
#: Words of an exception that have an advice of their own.
_BY_WORDS = {
    "ECC error": "ecc",
    "no kernel image": "no kernel",
    "invalid device function": "no kernel",
    "invalid device ordinal": "no device",
    "no CUDA-capable device": "no device",
    "No HIP GPUs": "no device",
}
#: What follows from something else, if anything else is in the log.
_WEAK = ("abort", "exit", "signal", "ray", "heartbeat")
_MEMORY = ("killed", "host memory")
_RANK = re.compile(r"rank (\d+)\Z", re.ASCII)
#: Lines of a report of torchrun on one worker.
_REPORT = 8


def failed(log: Log) -> Iterator[Hit]:
    """Processes that ended with an error of their own: what follows from another failure is not reported."""
    for hit in _failed(log):
        yield hit._replace(follows=fails_by_fault(log, hit.says, hit.evidence))


def _failed(log: Log) -> Iterator[Hit]:
    found = [(died, seen) for _, died, seen in log.account.of(f.Died)]
    own = [(died, seen) for died, seen in found if not died.by_launcher]
    first = _first_reported(log, [(died, seen) for died, seen in found if died.by_launcher])
    if first is not None and {died.kind for died, _ in own} <= {"host memory"} and not _follows(log, first[1][0]):
        died, seen = first
        if own and died.kind in _MEMORY:
            yield _hit("host memory", f"{died.who} {died.did}", [*seen, *(place for _, place in own)])
            return
        raised_alone = died.kind in _WEAK and bool(uncaught(log, seen[0]))
        if not own and not raised_alone and (died.kind not in _WEAK or _is_alone(log, (f.Raised,))):
            yield _hit(died.kind, f"{died.who} {died.did}", seen)
            return
    joined = _joined(own, first)
    if joined is not None:
        yield joined
        return
    yield from _alike((died.kind, died.who, died.did, seen) for died, seen in own)
    if not own and (_is_alone(log, ()) or _has_only_lost_peers(log)):
        lost = {(seen.source, seen.number) for kind in (f.Gloo, f.Store) for _, _, seen in log.account.of(kind)}
        raised = [
            (fact, seen)
            for _, fact, seen in log.account.of(f.Raised)
            if not FOLLOWS.search(fact.error) and (seen.source, seen.number) not in lost
        ]
        ranks = dict[int, tuple[str, str, str, Seen]]()
        for fact, place in sorted(raised, key=lambda each: each[1].number):
            ranks.setdefault(fact.rank, ("exception", f"rank {fact.rank}", f"raised {fact.error}", place))
        yield from _alike(ranks.values())
        if not ranks:
            yield from _raised(uncaught(log, first[1][0] if first else None), first)


#: A process ends with them after an exception, of Python or of C++.
_BY_EXCEPTION = ("exit", "abort")
_LOADER = "a data loader's worker"


def _joined(own: list[tuple[f.Died, Seen]], first: tuple[f.Died, list[Seen]] | None) -> Hit | None:
    """Return what processes did whose lines do not name them, with the name of the one that a launcher saw ending first."""
    ends = {(died.kind, died.did) for died, _ in own}
    if first is None or len(ends) != 1 or first[0].kind not in _BY_EXCEPTION:
        return None
    if {died.who for died, _ in own} - {"", _LOADER}:
        return None
    died, whom = own[0][0], first[0].who
    says = f"{died.who} of {whom} {died.did}" if died.who else f"{whom} {died.did}"
    return _hit(died.kind, says, [*(seen for _, seen in own), *first[1]])


def _raised(found: list[tuple[f.Uncaught, Seen]], first: tuple[f.Died, list[Seen]] | None) -> Iterator[Hit]:
    """Yield exceptions in lines without a rank, with the process that a launcher saw ending first, if that is the only one."""
    is_first = len({fact.error for fact, _ in found}) == 1 and not any(fact.who for fact, _ in found)
    if is_first and first is not None and first[0].kind in _BY_EXCEPTION:
        says = f"{first[0].who} raised {found[0][0].error}"
        yield _hit("exception", says, [*(seen for _, seen in found), *first[1]])
        return
    yield from _alike(("exception", fact.who, f"raised {fact.error}", seen) for fact, seen in found)


def _hit(kind: str, says: str, evidence: list[Seen]) -> Hit:
    advice = _ADVICE[next((own for words, own in _BY_WORDS.items() if words in says), kind)]
    return Hit(says, evidence, advice.means, advice.do)


def _alike(ends: Iterable[tuple[str, str, str, Seen]]) -> Iterator[Hit]:
    """Yield what several processes did once."""
    alike: dict[tuple[str, str], dict[str, Seen]] = {}
    for kind, who, did, seen in ends:
        alike.setdefault((kind, did), {})[who] = seen
    for (kind, did), by in alike.items():
        ranks = {int(found[1]) for who in by if (found := _RANK.match(who))}
        others = [who for who in by if who and not _RANK.match(who)]
        whom = ([named(ranks)] if ranks else []) + ([some(others)] if others else [])
        yield _hit(kind, f"{' and '.join(whom) or 'a process'} {did}", list(by.values()))


def _first_reported(log: Log, reported: list[tuple[f.Died, Seen]]) -> tuple[f.Died, list[Seen]] | None:
    """Return the process that a launcher saw ending first: after that it ends the others."""
    root = next((seen for _, fact, seen in log.account.of(f.ElasticReport) if fact.field == "root"), None)
    if root is not None:
        lines = {
            fact.field: (fact.value, seen)
            for _, fact, seen in log.account.of(f.ElasticReport)
            if seen.source == root.source and root.number < seen.number <= root.number + _REPORT
        }
        if "rank" in lines and "exitcode" in lines:
            code, _, pid = lines["exitcode"][0].partition(" ")
            host = f" on {lines['host'][0]}" if "host" in lines else ""
            died = ended(int(code), f"rank {lines['rank'][0]}{host} {pid}".replace("(pid: ", "(pid "))
            return None if died is None else (died, [root, *(seen for _, seen in lines.values())])
    if not reported:
        return None
    died, seen = min(reported, key=lambda each: (each[1].source, each[1].number))
    return died, [seen]


def _follows(log: Log, seen: Seen) -> bool:
    """Return whether a collective had timed out before that line: then the launcher ends all processes."""
    late = [place for kind in (f.Watchdog, f.CommTimeout, f.Stuck) for _, _, place in log.account.of(kind)]
    return any(place.source == seen.source and place.number < seen.number for place in late)


def _is_alone(log: Log, also: tuple[type[f.Fact], ...]) -> bool:
    """Return whether the log has no other line of a failure."""
    kinds = (
        f.Watchdog, f.Progress, f.Relayed, f.GaveUp, f.CommTimeout, f.Stuck, f.TorchError, f.Desync, f.Barrier, f.Gloo, f.Store,
        f.Ucx, f.Xid, f.CudaFailure, f.Trail, *also,
    )  # fmt: skip
    return not log.account.warnings and not any(True for kind in kinds for _ in log.account.of(kind))


_LOST_PEER = re.compile(r"Connection closed by remote peer|Call to (?:recv|send)\b|[Cc]onnection closed by")


def _has_only_lost_peers(log: Log) -> bool:
    """Return whether all other failures in the log are those of processes whose peer had ended."""
    account = log.account
    kinds = (
        f.Watchdog, f.Progress, f.Relayed, f.GaveUp, f.CommTimeout, f.Stuck, f.Desync, f.Barrier, f.Ucx, f.Xid, f.CudaFailure,
    )  # fmt: skip
    return (
        not any(True for kind in kinds for _ in account.of(kind))
        and all("remote process" in error.reason for _, error, _ in account.of(f.TorchError))
        and all(fact.kind == "closed" for _, fact, _ in account.of(f.Gloo))
        and all(fact.kind == "lost" for _, fact, _ in account.of(f.Store))
        and all(_LOST_PEER.search(warned.text) or severity(log, warned) != "error" for warned in log.warnings)
    )


_PROGRAM = _Advice(
    "A program on that GPU made an invalid access, or the GPU stopped it.",
    "Find the kernel with compute-sanitizer. If the same happens on that GPU alone, test the GPU.",
)
_MEMORY_FAULT = _Advice(
    "The memory of that GPU has an error that cannot be corrected, and the work on it is lost.",
    "Drain the node and reset the GPU, so that the rows are remapped. Replace it if the error comes back.",
)
_LINK = _Advice(
    "An NVLink connection of that GPU failed.",
    "Drain the node. Check nvidia-smi nvlink -e, the fabric manager's log and the switch, and reset the GPUs.",
)
_LOST = _Advice(
    "The system cannot reach that GPU any more. All programs on it fail.",
    "Drain the node and restart it. Check power, temperature and the seat of the card; replace it if that happens again.",
)
_GSP = _Advice(
    "The GPU's system processor (GSP) does not answer the driver.",
    "Reset the GPU or restart the node. Update the driver; if that happens again, replace the GPU.",
)
#: Xid -> its meaning, and what to do.
XIDS = {
    13: ("an exception in the graphics engine", _PROGRAM),
    31: ("a page fault in the GPU's memory", _PROGRAM),
    43: ("the GPU stopped a program", _PROGRAM),
    48: ("a double-bit ECC error", _MEMORY_FAULT),
    62: ("the GPU's microcontroller halted", _GSP),
    64: ("rows of memory could not be remapped", _MEMORY_FAULT),
    74: ("an NVLink error", _LINK),
    79: ("the GPU has fallen off the bus", _LOST),
    94: ("a contained ECC error", _MEMORY_FAULT),
    95: ("an uncontained ECC error", _MEMORY_FAULT),
    119: ("a time-out of the GSP", _GSP),
    120: ("an error of the GSP", _GSP),
    140: ("an ECC error that cannot be corrected", _MEMORY_FAULT),
}
#: Events that are no failure by themselves, and those that follow from other Xids.
_EVENTS = {
    45: "a program was stopped, as after another Xid, or by its user",
    63: "rows of memory are to be remapped at the next reset",
    92: "many single-bit ECC errors were corrected",
}
_CONSEQUENCES = (43, 45)


def gpu_faults(log: Log) -> Iterator[Hit]:
    """GPUs that the driver reports as faulty, once for each kind of fault."""
    by_number = _xids(log)
    for number, events in by_number.items():
        if number in XIDS and (number not in _CONSEQUENCES or not by_number.keys() - {*_CONSEQUENCES, *_EVENTS}):
            meaning, advice = XIDS[number]
            yield Hit(_of_gpus(number, events, meaning), list(events.values()), advice.means, advice.do)


def gpu_events(log: Log) -> Iterator[Hit]:
    """Events of GPUs that are no failure by themselves, or of a number that is not in the table."""
    by_number = _xids(log)
    for number, events in by_number.items():
        if number in XIDS or (number in _CONSEQUENCES and by_number.keys() & XIDS.keys()):
            continue
        meaning = _EVENTS.get(number, "an event that commwatch does not know")
        yield Hit(_of_gpus(number, events, meaning), list(events.values()))


def _xids(log: Log) -> dict[int, dict[str, Seen]]:
    found: dict[int, dict[str, Seen]] = {}
    for _, xid, seen in log.account.of(f.Xid):
        where = f"{xid.device} on {xid.host}" if xid.host else xid.device
        found.setdefault(xid.number, {}).setdefault(where, seen)
    return found


def _of_gpus(number: int, events: dict[str, Seen], meaning: str) -> str:
    return f"Xid {number} of GPU {some(events)}: {meaning}"
