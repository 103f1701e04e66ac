"""Line forms of processes that end: PyTorch's exceptions, launchers, Slurm, MPI, UCX, the kernel. Rules for patterns: ``forms.py``."""

from __future__ import annotations

import re

from commwatch_collectors.nccl import facts as f
from commwatch_collectors.nccl.beside.form import Form, integer, made, who
from commwatch_collectors.nccl.input.prefixes import prefix

#: What ends before the last line of a traceback begins, beside the prefixes of a line.
_MARKS_END = ("]", "]:", ")", "|", ">", "`")
#: Characters before it that prefixes may take.
_MOST_PREFIX = 600
#: Signal -> kind.
_SIGNALS = {4: "signal", 6: "abort", 7: "shm", 8: "signal", 9: "killed", 11: "segfault"}
_NUMBERS = {"SIGILL": 4, "SIGABRT": 6, "SIGBUS": 7, "SIGFPE": 8, "SIGKILL": 9, "SIGSEGV": 11}
_NAMED = {
    "Killed": ("killed", "was killed"),
    "Out Of Memory": ("host memory", "ran out of the node's memory"),
    "Bus error": ("shm", "ended with a bus error"),
    "Segmentation fault": ("segfault", "ended with a segmentation fault"),
    "Aborted": ("abort", "aborted"),
}


def _raised(kind: str, needle: str, pattern: str) -> Form:
    """Return a form of an exception at the begin of a line: a text may quote one that was handled.

    The first group of the pattern is the text of the exception.
    """

    def make(match: re.Match[str]) -> f.Fact | None:
        before = match.string[: match.start()].rstrip()
        if before and not before.endswith(_MARKS_END) and prefix(match.string[:_MOST_PREFIX])[0] < match.start():
            return None
        return f.Died(kind, who(match.string), f"raised {match[1].strip().rstrip('.')}")

    return made(needle, rf"(?<![\w.]){pattern}", make)


def _died(kind: str, needle: str, pattern: str, did: str) -> Form:
    """Return a form of a line about this process."""
    return made(needle, pattern, lambda m: f.Died(kind, who(m.string), did))


def ended(code: int, whom: str) -> f.Died | None:
    """Return what an exit code says; ``None`` for an ordinary end, and for SIGTERM and SIGINT, which come from the launcher."""
    signal = -code if code < 0 else code - 128 if code > 128 else 0
    if code == 0 or signal in (2, 15):
        return None
    did = f"was ended by signal {signal}" if signal else f"ended with exit code {code}"
    return f.Died(_SIGNALS.get(signal, "signal") if signal else "exit", whom, did, by_launcher=True)


def _worker(match: re.Match[str]) -> f.Fact | None:
    return ended(integer(match[1]), f"local rank {match[2]} (pid {match[3]})")


def _mpi(match: re.Match[str]) -> f.Fact | None:
    return ended(-integer(match[3]), f"rank {match[1]} on {match[2]}")


def _slurm(match: re.Match[str]) -> f.Fact | None:
    tasks = f"{match[2]} {match[3]} on {match[1]}"
    if match[5]:
        return ended(integer(match[5]), tasks)
    kind, did = _NAMED[match[4]]
    return f.Died(kind, tasks, did, by_launcher=True)


_LOCAL_RANK = re.compile(r"'--local[_-]rank=(\d{1,9})'", re.ASCII)


def _deepspeed(match: re.Match[str]) -> f.Fact | None:
    rank = _LOCAL_RANK.search(match.string, 0, match.start())
    return ended(integer(match[1]), f"local rank {rank[1]}" if rank else "a process")


_RAY_WORKER = re.compile(r"Worker IP address: (\S{1,80}) .{0,80}?Worker PID: (\d{1,10})", re.ASCII)


def _ray(match: re.Match[str]) -> f.Fact:
    worker = _RAY_WORKER.search(match.string, max(0, match.start() - 400), match.start())
    whom = f"Ray's worker {worker[2]} on {worker[1]}" if worker else "a worker of Ray"
    return f.Died("ray", whom, "ended unexpectedly", by_launcher=True)


_LSF = {"MEMLIMIT": "limit of memory", "RUNLIMIT": "limit of time"}


def _shell(words: str) -> Form:
    """Return a form of a shell's line about a process that a signal ended."""
    kind, did = _NAMED[words]
    return made(
        words,
        rf"line \d{{1,9}}: {{1,3}}(\d{{1,10}}) {words} ",
        lambda m: f.Died(kind, f"pid {m[1]}", did, by_launcher=True),
    )


def _crash(needle: str, pattern: str) -> Form:
    """Return a form of a process's own line about the signal that its first group names."""

    def make(match: re.Match[str]) -> f.Fact:
        kind, did = _NAMED[match[1]]
        return f.Died(kind, who(match.string) or "a process", did, by_launcher=True)

    return made(needle, pattern, make)


def _spawned(match: re.Match[str]) -> f.Fact | None:
    code = -_NUMBERS.get(match[2], 0) if match[2] else integer(match[3])
    return ended(code, f"process {match[1]}")


def _loader(match: re.Match[str]) -> f.Fact:
    kind, did = _NAMED.get(match[1], ("killed", "ended by a signal"))
    mark = who(match.string)
    return f.Died(kind if kind != "killed" else "host memory", f"a data loader's worker{mark and ' of '}{mark}", did)


#: CUDA's errors of kernels that ran.
_OF_KERNELS = (
    r"(?:an illegal (?:memory access|instruction) was encountered|unspecified launch failure|device-side assert triggered"
    r"|misaligned address|invalid program counter|hardware stack error|the launch timed out|uncorrectable [\w ]{1,20}error)"
)
_KERNEL = re.compile(r"(\S{1,200}) kernel: {0,4}(?:\[[\d. ]{1,40}\] ?)?\Z", re.ASCII)


def _xid(match: re.Match[str]) -> f.Fact:
    host = _KERNEL.search(match.string[max(0, match.start() - 300) : match.start()])
    return f.Xid(integer(match[2]), match[1], host[1] if host else "")


FORMS: tuple[Form, ...] = (
    # exceptions
    _raised(
        "gpu memory",
        "CUDA out of memory",
        r"((?:torch\.(?:cuda\.)?)?(?:OutOfMemoryError|RuntimeError)): CUDA out of memory",
    ),
    _raised(
        "gpu memory", "CUDA error: out of memory", r"((?:\w{1,40}\.){0,4}\w{1,40}Error: CUDA error: out of memory)"
    ),
    _raised("gpu memory", "HIP error: out of memory", r"((?:\w{1,40}\.){0,4}\w{1,40}Error: HIP error: out of memory)"),
    _raised(
        "gpu memory",
        "HIP out of memory",
        r"((?:torch\.(?:cuda\.)?)?(?:OutOfMemoryError|RuntimeError)): HIP out of memory",
    ),
    *(
        form
        for api in ("CUDA", "HIP")
        for form in (
            _raised("cuda", f"{api} error: ", rf"((?:\w{{1,40}}\.){{0,4}}\w{{1,40}}Error: {api} error: {_OF_KERNELS})"),
            _raised(
                "cuda call",
                f"{api} error: ",
                rf"((?:\w{{1,40}}\.){{0,4}}\w{{1,40}}Error: {api} error: (?!{_OF_KERNELS}|out of memory)\w[\w ,'-]{{0,120}})",
            ),
        )
    ),
    made(
        "terminated with exception: CUDA error",
        r"watchdog thread terminated with exception: (CUDA error: \w[\w ,'-]{0,120})",
        lambda m: f.Died("cuda", who(m.string), f"failed with {m[1].strip()}"),
    ),
    _raised(
        "shm",
        "torch_",
        r"(\w{1,40}Error: unable to (?:write to|mmap|open|resize|allocate) [^\n]{0,80}?/torch_\w{1,80}>?[^\n]{0,120})",
    ),
    _raised(
        "disk",
        "No space left on device",
        r"((?:\w{1,40}\.){0,4}\w{1,40}Error: (?!unable to)[^\n]{0,120}?No space left on device)",
    ),
    _raised(
        "ddp",
        "finished reduction",
        r"(RuntimeError: Expected to have finished reduction in the prior iteration)",
    ),
    made(
        "is killed by signal",
        r"DataLoader worker \(pid \d{1,10}\) is killed by signal: ([A-Z][\w ]{1,40})",
        _loader,
    ),
    _raised("cache", "for the cache blocks", r"(ValueError: No available memory for the cache blocks)"),
    # launchers
    made("failed (exitcode", r"failed \(exitcode: (-?\d{1,9})\) local_rank: (\d{1,9}) \(pid: (\d{1,10})\)", _worker),
    made("Root Cause", r"Root Cause \(first observed failure\)", lambda m: f.ElasticReport("root", "")),
    made("host  ", r"\bhost {2,8}: (\S{1,200})", lambda m: f.ElasticReport("host", m[1])),
    made("(local_rank", r"\brank {2,8}: (\d{1,9}) \(local_rank", lambda m: f.ElasticReport("rank", m[1])),
    made("exitcode  ", r"\bexitcode {1,8}: (-?\d{1,9} \(pid: \d{1,10}\))", lambda m: f.ElasticReport("exitcode", m[1])),
    made(
        "noticed that process rank",
        r"(?<=noticed that )process rank (\d{1,9}) with PID \d{1,10} on node (\S{1,200}) exited on signal (\d{1,3})",
        _mpi,
    ),
    made(
        "MPI_ABORT was invoked",
        r"MPI_ABORT was invoked on rank (\d{1,9})",
        lambda m: f.Died("abort", f"rank {m[1]}", "called MPI_Abort", by_launcher=True),
    ),
    made("KILLED BY SIGNAL", r"KILLED BY SIGNAL: (\d{1,3})", lambda m: ended(-integer(m[1]), "a process")),
    made(
        "srun: error: ",
        r"srun: error: (\S{1,200}): (tasks?) ([\d,-]{1,200}): "
        r"(Killed|Out Of Memory|Bus error|Segmentation fault|Aborted|Exited with exit code (\d{1,3}))",
        _slurm,
    ),
    made(
        "Process name: [[",
        r"Process name: \[\[\d{1,10},\d{1,10}\],(\d{1,9})\]",
        lambda m: f.Died("exit", f"rank {m[1]}", "ended with an error", by_launcher=True),
    ),
    made("exits with return code", r"exits with return code = (-?\d{1,6})", _deepspeed),
    made(
        "terminated with code",
        r"\[rank: (\d{1,9})\] Child process with PID (\d{1,10}) terminated with code (-?\d{1,6})",
        lambda m: ended(integer(m[3]), f"rank {m[1]}"),
    ),
    made("Worker exit type", r"Worker exit type: SYSTEM_ERROR\b", _ray),
    _died(
        "node",
        "because its node has died",
        r"[Tt]he actor (?:died|is dead) because its node has died",
        "was lost with its node",
    ),
    made(
        "got signal: 1",
        r"SignalException: Process (\d{1,10}) got signal: 1\b(?!\d)",
        lambda m: f.Died("hangup", f"the launcher (pid {m[1]})", "was ended by SIGHUP", by_launcher=True),
    ),
    made(
        "stopped sending heartbeats",
        r"tasks are unhealthy \(stopped sending heartbeats\):\s{0,4}((?:/job:[\w/:]{1,80}[, ]{0,4}){1,20})",
        lambda m: f.Died(
            "heartbeat",
            f"JAX's task {', '.join(re.findall('task:([0-9]{1,9})', m[1]))}",
            "stopped sending heartbeats",
            by_launcher=True,
        ),
    ),
    made(
        "Node failure on",
        r"error: Node failure on (\S{1,200})",
        lambda m: f.Died("node", f"the job's part on {m[1]}", "was lost with its node"),
    ),
    made(
        "TERM_",
        r"\bTERM_(MEMLIMIT|RUNLIMIT): job killed after reaching LSF",
        lambda m: f.Died("host memory" if m[1] == "MEMLIMIT" else "limit", "the job", f"reached LSF's {_LSF[m[1]]}"),
    ),
    made(
        "PBS: job killed",
        r"PBS: job killed: (walltime|mem|vmem) \d{1,15}(?:\w\w)? exceeded limit",
        lambda m: f.Died(
            "limit" if m[1] == "walltime" else "host memory", "the job", f"exceeded its limit of {m[1]} in PBS"
        ),
    ),
    made(
        "died with <Signals",
        r"died with <Signals\.SIG\w{1,10}: (\d{1,3})>",
        lambda m: ended(-integer(m[1]), "a process"),
    ),
    made(
        "terminated with ",
        r"\bprocess (\d{1,9}) terminated with (?:signal (SIG[A-Z]{1,8})|exit code (\d{1,3}))",
        _spawned,
    ),
    _crash("Fatal Python error", r"Fatal Python error: (Segmentation fault|Bus error)"),
    _crash("Signal: ", r"\bSignal: (Segmentation fault|Bus error) \(\d{1,2}\)"),
    made(
        "Caught signal", r"\bCaught signal (\d{1,2}) \(", lambda m: ended(-integer(m[1]), who(m.string) or "a process")
    ),
    _shell("Killed"),
    _shell("Segmentation fault"),
    _shell("Bus error"),
    _died(
        "host memory",
        "low on memory",
        r"killed due to the node running low on memory",
        "was killed because its node ran low on memory",
    ),
    _died(
        "host memory", "oom", r"Detected \d{1,9} oom[-_]kill event", "was killed for lack of memory in its Slurm step"
    ),
    _died(
        "host memory",
        "Out of memory: Killed process",
        r"Out of memory: Killed process",
        "was killed by the kernel for lack of memory",
    ),
    _died(
        "host memory",
        "Memory cgroup out of memory",
        r"Memory cgroup out of memory: Kill",
        "was killed by the kernel for lack of memory in its cgroup",
    ),
    _died("host memory", "OOMKilled", r"\bOOMKilled\b", "was killed for lack of memory in its container"),
    _died(
        "limit",
        "DUE TO TIME LIMIT",
        r"CANCELLED AT \S{1,40} DUE TO TIME LIMIT",
        "reached the time limit of its Slurm job",
    ),
    _died("node", "DUE TO NODE FAILURE", r"CANCELLED AT \S{1,40} DUE TO NODE FAILURE", "was lost with its node"),
    _died("limit", "DUE TO PREEMPTION", r"CANCELLED AT \S{1,40} DUE TO PREEMPTION", "was preempted by Slurm"),
    # the kernel, UCX
    made(
        "NVRM: Xid",
        r"NVRM: Xid \((?:PCI:)?([0-9a-fA-F:.]{4,16})\): (\d{1,4})\b",
        _xid,
    ),
    made(
        "fallen off the bus",
        r"NVRM: GPU (?:at PCI:)?([0-9a-fA-F:]{4,14})(?:\.\d)?: .{0,60}?fallen off the bus",
        lambda m: f.Xid(79, m[1], ""),
    ),
    made("UCX  ERROR", r"UCX  ERROR ([^\n]{1,300})", lambda m: f.Ucx(m[1].strip())),
    made(
        "Transport retry count exceeded",
        r"(?<!ERROR )Transport retry count exceeded on \S{1,80}",
        lambda m: f.Ucx(m[0]),
    ),
)
