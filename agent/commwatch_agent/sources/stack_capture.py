"""Captures Python stacks and PyTorch's Flight Recorder of stuck trainers on this machine, from outside."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Container, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from commwatch.wire import crossing
from commwatch.wire.concurrency import at_once, wait_until
from commwatch_agent.analysis.flight_recorder_analysis import RankDump, positions, take
from commwatch_agent.incidents.stacks import of_trainer
from commwatch_agent.model.views import RankView
from commwatch_collectors.node.flight_recorder import BadDump

_STACK_S = 20.0
#: What a stack needs besides ``py-spy``.
_PERMISSION = (
    "the agent must run as the user of the trainer or as root, in a container with the capability SYS_PTRACE; "
    "where the sysctl kernel.yama.ptrace_scope is not 0, only as root"
)
#: Trainers captured at a time.
_AT_ONCE = 16
#: Bytes read of the environment of a process, and of its stacks.
_MOST_ENVIRONMENT, _MOST_STACK = 8 << 20, 1 << 18
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


class Fault(Protocol):
    """A verdict or an incident."""

    @property
    def job_id(self) -> str: ...
    @property
    def ranks(self) -> list[int]: ...
    @property
    def waiting(self) -> list[int]: ...


def evidence(
    found: Iterable[Fault], ranks: Iterable[RankView], hostname: str, without_stack: Container[tuple[str, int]] = ()
) -> list[Evidence]:
    """Return evidence of the ranks on this host that faults are about.

    A stack needs ``py-spy`` and its permission to trace; a dump of the Flight Recorder needs ``TORCH_NCCL_DEBUG_INFO_PIPE_FILE``
    in the job.

    Args:
        without_stack: ranks, by job and number, whose stacks are not wanted.
    """
    about = {(fault.job_id, rank) for fault in found for rank in (*fault.ranks, *fault.waiting)}
    here = [
        (view, view.visible_pid)
        for view in ranks
        if (view.job_id, view.rank) in about and view.host == hostname and view.state == "running" and view.visible_pid
    ]
    dumps = [future.result() for future in at_once(lambda at: _recorded(at[0].rank, at[1]), here, _AT_ONCE)]
    wanted = [at for at in here if (at[0].job_id, at[0].rank) not in without_stack]
    stacks = [future.result() for future in at_once(lambda at: stack(at[1]), wanted, _AT_ONCE)]
    taken = [("python_stack", view, text) for (view, _), text in zip(wanted, stacks, strict=True)]
    taken += [("flight_recorder", view, text) for (view, _), text in zip(here, dumps, strict=True)]
    return [Evidence(view.job_id, view.rank, kind, text) for kind, view, text in taken if text is not None]


def stack(pid: int) -> str | None:
    """Return the Python stacks of a trainer by ``py-spy``, without the probe's threads; ``None`` where that is missing or fails."""
    text = _by_py_spy("dump", "--nonblocking", "--full-filenames", "--pid", str(pid))
    return None if text is None else of_trainer(text)


def stacks_over_time(pid: int) -> str | None:
    """Return the Python stacks in which a process was in the next second, as ``stacks.counted`` reads them; ``None`` as for ``stack``."""
    what = ("--idle", "--threads", "--nonblocking", "--full-filenames", "--pid", str(pid))
    how = ("--duration", "1", "--rate", "97", "--format", "raw", "--output", "/dev/stderr")
    return _by_py_spy("record", *what, *how, on_stderr=True)


def what_a_stack_needs() -> str:
    """Return what to install or to permit, where there was no stack."""
    if _py_spy() is None:
        return f"install py-spy beside the agent (`pip install py-spy`); {_PERMISSION}"
    return f"py-spy could not read the process: {_PERMISSION}"


def _py_spy() -> str | None:
    return shutil.which("py-spy") or shutil.which("py-spy", path=str(Path(sys.executable).parent))


def _by_py_spy(*arguments: str, on_stderr: bool = False) -> str | None:
    program = _py_spy()
    if program is None:
        return None
    try:
        with tempfile.TemporaryFile() as file:  # the trainer decides how long it is
            out, err = (subprocess.DEVNULL, file) if on_stderr else (file, subprocess.DEVNULL)
            done = subprocess.run([program, *arguments], stdout=out, stderr=err, timeout=_STACK_S, check=False)
            file.seek(0)
            text = file.read(_MOST_STACK).decode(errors="replace")
    except (OSError, subprocess.TimeoutExpired):
        return None
    return text if done.returncode == 0 else None


class Trainer:
    """A trainer on this machine, whose files are opened as it sees them: it may run in a container.

    Args:
        proc: descriptor of its folder in ``/proc``.

    Raises:
        OSError: the process has ended, or its environment cannot be read.
    """

    def __init__(self, proc: int) -> None:
        self._proc = proc
        #: Its files must belong to its user: the environment may name any others.
        self._trust = crossing.user(real_uid(self._text("status")))
        self.env = environment(self._text("environ"))

    def changed_ns(self, path: Path) -> int:
        """Return when a file was last changed, in ns of Unix time; 0: there is none, or it is not the trainer's."""
        try:
            with self._root(path) as start:
                return crossing.look(path, self._trust, start=start).st_mtime_ns
        except OSError:
            return 0

    def dump(self, path: Path, rank: int) -> RankDump:
        """Return a dump of the Flight Recorder; raise ``BadDump`` or ``OSError``."""
        with self._root(path) as start:
            return take(path, rank, trust=self._trust, start=start)

    def poke(self, pipe: Path) -> bool:
        """Write a byte to a pipe of the trainer's; return whether the trainer can read it."""
        try:
            with self._root(pipe) as start:
                fd = crossing.open_file(pipe, self._trust, kind=stat.S_IFIFO, flags=os.O_WRONLY, start=start)
        except OSError:  # also where there is no reader
            return False
        try:
            return os.write(fd, b"1\n") > 0
        except OSError:
            return False
        finally:
            os.close(fd)

    def has_pipe(self, pipe: Path) -> bool:
        """Return whether there is a pipe of the trainer's."""
        try:
            with self._root(pipe) as start:
                crossing.look(pipe, self._trust, kind=stat.S_IFIFO, start=start)
        except OSError:
            return False
        return True

    @contextmanager
    def _root(self, path: Path) -> Iterator[int]:
        """Yield the folder where a path of the trainer begins."""
        name = "root" if path.is_absolute() else "cwd"
        fd = os.open(name, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=self._proc)
        try:
            yield fd
        finally:
            os.close(fd)

    def _text(self, name: str) -> str:
        with open(os.open(name, os.O_RDONLY | os.O_CLOEXEC, dir_fd=self._proc), "rb") as file:
            return os.fsdecode(file.read(_MOST_ENVIRONMENT))


def real_uid(status: str) -> int:
    """Return the user who started a process, from ``/proc/PID/status``: the owner of ``/proc/PID`` is root once the process hides its memory.

    >>> real_uid("Name:\\tpython\\nUid:\\t1000\\t0\\t0\\t0\\n")
    1000
    """
    return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("Uid:"))


def environment(text: str) -> Mapping[str, str]:
    """Return the environment that a process began with, from ``/proc/PID/environ``."""
    return dict(entry.split("=", 1) for entry in text.split("\0") if "=" in entry)


@contextmanager
def trainer_of(pid: int) -> Iterator[Trainer]:
    """Yield a trainer by its pid here; raise ``OSError`` as ``Trainer`` does."""
    proc = os.open(f"/proc/{pid}", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)  # stays the folder of this process
    try:
        yield Trainer(proc)
    finally:
        os.close(proc)


def flight_recorder(trainer: Trainer, rank: int, timeout_s: float = _DUMP_S) -> Path | None:
    """Make PyTorch dump its Flight Recorder; return the file's path, as the trainer sees it; ``None``: no dump.

    Any byte in the pipe ``<TORCH_NCCL_DEBUG_INFO_PIPE_FILE><rank>.pipe`` makes ProcessGroupNCCL write its latest operations to
    ``<TORCH_FR_DUMP_TEMP_FILE><rank>``, or a file whose default depends on the version, without disturbing the training.
    """
    stem = trainer.env.get("TORCH_NCCL_DEBUG_INFO_PIPE_FILE")
    if not stem:
        return None
    dumps = [Path(f"{where}{rank}") for where in _dump_stems(trainer.env)]
    before = {dump: trainer.changed_ns(dump) for dump in dumps}
    if not trainer.poke(Path(f"{stem}{rank}.pipe")):
        return None
    written: list[Path] = []

    def is_there() -> bool:
        written[:] = [dump for dump in dumps if _is_written(trainer.changed_ns(dump), before[dump])]
        return bool(written)

    return written[0] if wait_until(is_there, timeout_s) else None


def _recorded(rank: int, pid: int) -> str | None:
    """Return the path of a new Flight Recorder dump and a summary of the rank's groups; ``None``: there is no dump."""
    try:
        with trainer_of(pid) as trainer:
            dump = flight_recorder(trainer, rank)
            if dump is None:
                return None
            try:
                lines = positions(trainer.dump(dump, rank))
            except (BadDump, OSError) as error:
                lines = [f"it cannot be read: {getattr(error, 'strerror', None) or error}"]
    except OSError:  # it has ended
        return None
    return "\n".join([os.fsencode(dump).decode(errors="replace"), *lines])  # lone surrogates could not be sent


def recorder(rank: int, pid: int) -> str:
    """Return whether a rank's Flight Recorder can be dumped: ``off``, ``works``, or ``down`` (its pipe is missing)."""
    try:
        with trainer_of(pid) as trainer:
            stem = trainer.env.get("TORCH_NCCL_DEBUG_INFO_PIPE_FILE")
            return "off" if not stem else "works" if trainer.has_pipe(Path(f"{stem}{rank}.pipe")) else "down"
    except OSError:
        return "off"


def _dump_stems(env: Mapping[str, str]) -> list[str]:
    """Return where dumps go, without the rank: as the variables say, else the defaults of the versions of PyTorch from 2.5 on."""
    variables = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
    if given := [env[variable] for variable in variables if env.get(variable)]:
        return given
    home = f"{env.get('HOME') or '/tmp'}/.cache"
    newest = f"{env.get('XDG_CACHE_HOME') or home}/torch/comm_lib_trace_rank_"
    return [newest, f"{home}/torch/comm_lib_trace_rank_", f"{home}/torch/nccl_trace_rank_", "/tmp/nccl_trace_rank_"]


def _is_written(changed_ns: int, before_ns: int) -> bool:
    """Return True if a file has changed since ``before_ns``, and not within the last 0.3 s."""
    return changed_ns > before_ns and time.time_ns() - changed_ns > 300_000_000
