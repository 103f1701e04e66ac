"""Profiles on demand: runs torch.profiler in the trainer for a few steps when the agent requests it.

No error of this module reaches the training: it is in the result, or is printed once if that cannot be written.
Only one profiler can run in a process. Ours does not start while the training's own runs or warms up, and stops when
that one starts, because torch would mix the two up, or crash.
"""

from __future__ import annotations

import errno
import gc
import gzip
import os
import resource
import shutil
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.autograd import profiler as backend
from torch.profiler import ProfilerActivity, profile

from commwatch.probe.torch_steps import EXPLICIT
from commwatch.wire import crossing
from commwatch.wire import profile_files as files
from commwatch.wire.announcement import requesters
from commwatch.wire.handlers import raised_by_handler
from commwatch.wire.identity import make_private_dir

#: Functions that a profiler calls when it begins to warm up, and to record.
_DOORS = ("_prepare_profiler", "_enable_profiler")
#: Bytes left free in the run directory, which is often small and in memory, for rings and NCCL.
_RESERVE_BYTES = 16 << 20


class CannotProfile(Exception):
    """No trace can be made; the message gives the reason."""


@dataclass
class _Session:
    """A running profiler."""

    request: files.Request
    profiler: Any
    thread: int
    #: Unix time minus the clock of the marks, in ns.
    wall_offset_ns: int
    #: The optimizer whose marks count as steps: the first one seen (docs/numbers.md has the agent's full rule).
    optimizer: int
    steps: int = 0
    #: Number and Unix time in ns of the first and of the latest mark that counted.
    first: tuple[int, int] | None = None
    last: tuple[int, int] = (0, 0)


class Profiling:
    """Looks for requests at step marks, and profiles the steps.

    Args:
        request: path of a request to this job.
        say: called with a line for the user if a result cannot be written.
    """

    def __init__(self, request: Path, job: str, rank: int, env: Mapping[str, str], say: Callable[[str], None]) -> None:
        self._path, self._job, self._rank, self._env, self._say = request, job, rank, env, say
        self._session: _Session | None = None
        #: By name, the function of torch, and the one in its place.
        self._doors: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {}
        #: The request file that was read last, and its id.
        self._read: tuple[int, int] | None = None
        self._id = ""

    def mark(self, optimizer: int, number: int, ended_ns: int) -> None:
        """At a step mark: look for a request, or count a step of the running profile."""
        if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
            return  # starting and stopping a profiler waits for the device, which would break the capture
        if self._session is None:
            self._poll(optimizer)
        elif self._session.thread == threading.get_ident():
            self._count(self._session, optimizer, number, ended_ns)

    def end(self) -> None:
        """Stop a running profile, because the probe is removed."""
        session = self._session
        if session is None:
            return
        if session.thread == threading.get_ident():
            self._finish(session, None if session.steps else "the training ended before a step ended")
        else:  # a profiler can only be stopped where it was started
            self._session = None
            self._open_doors()
            self._write_result(session.request, session, "another thread removed the probe")

    def forget(self) -> None:
        """In a forked child: drop the profile, which is the parent's."""
        self._session = None
        self._open_doors()

    # -- begin --------------------------------------------------------------------------------

    def _poll(self, optimizer: int) -> None:
        try:
            about = os.stat(self._path)  # noqa: PTH116 - half the time of Path's, once a step
        except OSError as error:
            if raised_by_handler(error):
                raise
            return
        if (about.st_ino, about.st_mtime_ns) == self._read:
            return
        self._read = (about.st_ino, about.st_mtime_ns)
        try:
            request = files.read_request(self._path, requesters(self._path.parents[1]))
        except FileNotFoundError:
            return
        except (OSError, ValueError) as error:
            if raised_by_handler(error):
                raise
            self._say(f"no profile of rank {self._rank}: cannot read the request: {error}")
            return
        here = files.place_of(socket.gethostname(), os.getpid())
        mine = request.job == self._job and self._rank in request.ranks and here in request.processes
        if mine and request.id != self._id and time.time() < request.until:
            self._id = request.id
            self._begin(request, optimizer)

    def _begin(self, request: files.Request, optimizer: int) -> None:
        try:
            if not self._claim(request):
                return
        except OSError as error:
            if raised_by_handler(error):
                raise
            self._say(f"no profile of rank {self._rank}: {error.strerror or error} ({self._path.parent})")
            return
        session = _Session(request, None, threading.get_ident(), _wall_offset_ns(), optimizer)
        try:
            _refuse_limit()
            _refuse_second()
            activities = [ProfilerActivity.CPU]
            if torch.cuda.is_initialized():  # a job that does not use its GPU gets no CUDA context from us
                activities.append(ProfilerActivity.CUDA)
            session.profiler = profile(activities=activities)
            session.profiler.start()
            self._close_doors()
            self._session = session
        except BaseException as error:
            self._finish(session, _message(error))
            if raised_by_handler(error):
                raise

    def _claim(self, request: files.Request) -> bool:
        """Claim the request; return False if an earlier process of this rank has done so."""
        mode = make_private_dir(self._path.parent, self._env)
        path = files.of_rank(self._path.parent, request.id, self._rank, files.CLAIM)
        try:
            claim = crossing.make(path, mode)
        except FileExistsError:
            return False
        try:
            os.write(claim, b'{"pid": %d}' % os.getpid())
        finally:
            os.close(claim)
        return True

    # -- other profilers ----------------------------------------------------------------------

    def _close_doors(self) -> None:
        """Patch torch so that our profiler stops when another one starts."""

        def giving_way(door: Callable[..., Any]) -> Callable[..., Any]:
            def call(*args: Any, **kwargs: Any) -> Any:
                session = self._session
                if session is not None and session.thread == threading.get_ident():
                    self._finish(session, "it stopped because the training started a profiler")
                return door(*args, **kwargs)

            return call

        for name in _DOORS:
            door = getattr(backend, name)
            self._doors[name] = door, giving_way(door)
            setattr(backend, name, self._doors[name][1])

    def _open_doors(self) -> None:
        for name, (door, ours) in self._doors.items():
            if getattr(backend, name) is ours:  # else another library has wrapped it, and it stays: it only forwards
                setattr(backend, name, door)
        self._doors = {}

    # -- steps --------------------------------------------------------------------------------

    def _count(self, session: _Session, optimizer: int, number: int, ended_ns: int) -> None:
        if optimizer == EXPLICIT and session.optimizer != EXPLICIT:  # the user's own marks win, and begin now
            session.optimizer, session.steps, session.first = EXPLICIT, 0, None
        if optimizer == session.optimizer:
            mark = (number, ended_ns + session.wall_offset_ns)
            if session.first is None:  # the step in which the profiler started: not counted
                session.first = mark
            else:
                session.steps += 1
            session.last = mark
        if session.steps >= session.request.steps:
            self._finish(session, None)
        elif time.time() > session.request.until:
            self._finish(session, None if session.steps else "no step ended in time")

    # -- end ----------------------------------------------------------------------------------

    def _finish(self, session: _Session, error: str | None) -> None:
        """Stop the profiler in any case; write trace and result."""
        self._session = None
        self._open_doors()
        try:
            if session.profiler is not None:
                session.profiler.stop()
            if error is None:
                self._export(session)
        except BaseException as failure:
            error = error or _message(failure)
            if raised_by_handler(failure):
                _stop_for_certain()
                self._write_result(session.request, session, error)
                raise
        session.profiler = None  # and all the events that it holds
        self._write_result(session.request, session, error)

    def _export(self, session: _Session) -> None:
        """Write the compressed trace. It is built in the directory for temporary files, because the run directory is in memory."""
        trace = files.of_rank(self._path.parent, session.request.id, self._rank, files.TRACE)
        mode = make_private_dir(trace.parent, self._env)
        with tempfile.TemporaryDirectory(prefix="commwatch-") as place:
            plain, packed = Path(place, "trace.json"), Path(place, "trace.json.gz")
            session.profiler.export_chrome_trace(str(plain))
            _refuse_broken(plain)
            with open(plain, "rb") as source, gzip.open(packed, "wb", compresslevel=3) as target:
                shutil.copyfileobj(source, target, 1 << 20)
            if shutil.disk_usage(trace.parent).free < packed.stat().st_size + _RESERVE_BYTES:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(trace.parent))
            with crossing.folder(trace.parent) as where:
                try:
                    with open(packed, "rb") as source, open(where.create(f".{trace.name}", mode), "wb") as target:
                        shutil.copyfileobj(source, target, 1 << 20)
                    where.rename(f".{trace.name}", trace.name)
                finally:
                    where.remove(f".{trace.name}")

    def _write_result(self, request: files.Request, session: _Session, error: str | None) -> None:
        first, last = session.first or (0, 0), session.last
        result = files.Result(request.id, self._rank, session.steps, first[0], last[0], first[1], last[1], error)
        path = files.of_rank(self._path.parent, request.id, self._rank, files.RESULT)
        try:
            files.write(path, result, self._env)
        except OSError as failure:
            if raised_by_handler(failure):
                raise
            self._say(f"no profile of rank {self._rank}: {error or failure.strerror or failure} ({path.parent})")


def _wall_offset_ns() -> int:
    """Return Unix time minus monotonic time, in ns; best of 10 tries, as the thread may be preempted meanwhile."""
    looks = [(time.monotonic_ns(), time.time_ns(), time.monotonic_ns()) for _ in range(10)]
    before, wall, after = min(looks, key=lambda reading: reading[2] - reading[0])
    return wall - (before + after) // 2


def _refuse_limit() -> None:
    """Raise ``CannotProfile`` if file size is limited: past the limit the kernel sends SIGXFSZ, and a trace's size is unknown."""
    most, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    if most != resource.RLIM_INFINITY:
        raise CannotProfile(f"the trainer cannot write files of more than {most} bytes (ulimit -f); lift that limit")


def _refuse_second() -> None:
    """Raise ``CannotProfile`` while another profiler runs or warms up, which shows only in its own object."""
    missing = [name for name in _DOORS if not hasattr(backend, name)]
    if missing:
        raise CannotProfile(f"torch {torch.__version__} lacks {' and '.join(missing)} to detect other profilers")
    busy = torch._C._autograd._profiler_enabled() or any(
        issubclass(type(thing), backend.profile) and thing.entered and thing.kineto_results is None
        for thing in gc.get_objects()
    )
    if busy:
        raise CannotProfile("the training itself runs a profiler")


def _stop_for_certain() -> None:
    """Stop a profiler that a signal handler's exception has left running."""
    if torch._C._autograd._profiler_enabled():
        torch._C._autograd._disable_profiler()


def _refuse_broken(plain: Path) -> None:
    """Raise ``CannotProfile`` if the trace could not be written: torch only logs that."""
    try:
        with open(plain, "rb") as file:
            file.seek(-min(64, plain.stat().st_size), os.SEEK_END)
            if file.read().rstrip().endswith(b"}"):
                return
    except FileNotFoundError:
        pass
    raise CannotProfile(
        f"torch could not write the trace to {plain.parent.parent} ({shutil.disk_usage(plain.parent).free >> 20} MB free)"
    )


def _message(error: BaseException) -> str:
    if isinstance(error, CannotProfile):
        return str(error)
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror} ({error.filename})"
    return f"{type(error).__name__}: {error}"
