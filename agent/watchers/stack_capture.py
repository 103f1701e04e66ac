"""Captures Python stacks and PyTorch's Flight Recorder of stuck trainers on this machine, from outside."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from commwatch.analysis.flight_recorder_analysis import positions, take
from commwatch.analysis.verdicts import Verdict
from commwatch.collectors.node.flight_recorder import BadDump
from commwatch.core.views import RankView
from commwatch.runtime.concurrency import at_once, wait_until

_STACK_S = 20.0
#: Trainers captured at a time.
_AT_ONCE = 16
#: Seconds to wait for a dump: PyTorch checks the pipe about once a second, and writes some megabytes.
_DUMP_S = 15.0


@dataclass(frozen=True)
class Evidence:
    """What was captured of one rank."""

    job_id: str
    rank: int
    #: ``python_stack``, or ``flight_recorder``: the first line of ``text`` is the file's path, as the trainer sees it.
    kind: str
    text: str


def evidence(found: list[Verdict], ranks: list[RankView], hostname: str) -> list[Evidence]:
    """Return evidence of the ranks on this host that verdicts are about.

    A stack needs ``py-spy`` and its permission to trace; a dump of the Flight Recorder needs ``TORCH_NCCL_DEBUG_INFO_PIPE_FILE``
    in the job.
    """
    about = {(verdict.job_id, rank) for verdict in found for rank in (*verdict.ranks, *verdict.waiting)}
    here = [
        (view, view.visible_pid)
        for view in ranks
        if (view.job_id, view.rank) in about and view.host == hostname and view.state == "running" and view.visible_pid
    ]
    dumps = [future.result() for future in at_once(lambda at: _recorded(at[0].rank, at[1]), here, _AT_ONCE)]
    stacks = [future.result() for future in at_once(lambda at: stack(at[1]), here, _AT_ONCE)]
    taken = []
    for (view, _), python, dump in zip(here, stacks, dumps, strict=True):
        if python is not None:
            taken.append(Evidence(view.job_id, view.rank, "python_stack", python))
        if dump is not None:
            taken.append(Evidence(view.job_id, view.rank, "flight_recorder", dump))
    return taken


def stack(pid: int) -> str | None:
    """Return the Python stacks of a process by ``py-spy``; ``None`` where that is missing or fails."""
    program = shutil.which("py-spy") or shutil.which("py-spy", path=str(Path(sys.executable).parent))
    if program is None:
        return None
    command = [program, "dump", "--nonblocking", "--pid", str(pid)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=_STACK_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.rstrip() if done.returncode == 0 else None


def flight_recorder(rank: int, pid: int, timeout_s: float = _DUMP_S) -> Path | None:
    """Make PyTorch dump its Flight Recorder; return the file's path, as the trainer sees it; ``None``: no dump.

    Any byte in the pipe ``<TORCH_NCCL_DEBUG_INFO_PIPE_FILE><rank>.pipe`` makes ProcessGroupNCCL write its latest operations to
    ``<TORCH_FR_DUMP_TEMP_FILE><rank>``, or a file whose default depends on the version, without disturbing the training.
    """
    env = _environment(pid)
    stem = env.get("TORCH_NCCL_DEBUG_INFO_PIPE_FILE")
    if not stem:
        return None
    dumps = [Path(f"{where}{rank}") for where in _dump_stems(env)]
    before = {dump: _changed(_inside(pid, dump)) for dump in dumps}
    if not _poke(_inside(pid, Path(f"{stem}{rank}.pipe"))):
        return None
    written: list[Path] = []

    def is_there() -> bool:
        written[:] = [dump for dump in dumps if _written(_inside(pid, dump), before[dump])]
        return bool(written)

    return written[0] if wait_until(is_there, timeout_s) else None


def _recorded(rank: int, pid: int) -> str | None:
    """Return the path of a new Flight Recorder dump and a summary of the rank's groups; ``None``: there is no dump."""
    dump = flight_recorder(rank, pid)
    if dump is None:
        return None
    try:
        lines = positions(take(_inside(pid, dump), rank))
    except (BadDump, OSError) as error:
        lines = [f"it cannot be read: {getattr(error, 'strerror', None) or error}"]
    return "\n".join([os.fsencode(dump).decode(errors="replace"), *lines])  # lone surrogates could not be sent


def recorder(rank: int, pid: int) -> str:
    """Return whether a rank's Flight Recorder can be dumped: ``off``, ``works``, or ``down`` (its pipe is missing)."""
    stem = _environment(pid).get("TORCH_NCCL_DEBUG_INFO_PIPE_FILE")
    if not stem:
        return "off"
    return "works" if _inside(pid, Path(f"{stem}{rank}.pipe")).is_fifo() else "down"


def _environment(pid: int) -> Mapping[str, str]:
    """Return the environment that a process began with; empty if it cannot be read."""
    import psutil  # not at the top: commands import this module, and most need no process

    try:
        return psutil.Process(pid).environ()
    except (OSError, psutil.Error):
        return {}


def _dump_stems(env: Mapping[str, str]) -> list[str]:
    """Return where dumps go, without the rank: as the variables say, else the defaults of the versions of PyTorch from 2.5 on."""
    variables = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
    if given := [env[variable] for variable in variables if env.get(variable)]:
        return given
    home = f"{env.get('HOME') or '/tmp'}/.cache"
    newest = f"{env.get('XDG_CACHE_HOME') or home}/torch/comm_lib_trace_rank_"
    return [newest, f"{home}/torch/comm_lib_trace_rank_", f"{home}/torch/nccl_trace_rank_", "/tmp/nccl_trace_rank_"]


def _inside(pid: int, path: Path) -> Path:
    """Return the trainer's path as the agent sees it: the trainer may run in a container, the path may be relative."""
    return Path(f"/proc/{pid}", "root" if path.is_absolute() else "cwd", str(path).lstrip("/"))


def _poke(pipe: Path) -> bool:
    try:
        fd = os.open(pipe, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # fails where there is no reader
        try:
            return stat.S_ISFIFO(os.fstat(fd).st_mode) and os.write(fd, b"1\n") > 0
        finally:
            os.close(fd)
    except OSError:
        return False


def _changed(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0


def _written(path: Path, before: int) -> bool:
    """Return True if the file has changed since ``before`` (ns), and not within the last 0.3 s."""
    changed = _changed(path)
    return changed > before and time.time_ns() - changed > 300_000_000
