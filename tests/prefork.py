"""Starts processes of tests as forks of one that has imported what they need: 3 s of a core less for a rank, 1 s less for an agent.

A process gets arguments, environment, folder, standard streams, network and clock from its client. ``command`` is a command line that takes the
place of ``torchrun`` or of Python: a client that ends as the job does. The variables of the ranks and their store are those of torchrun.
``Commwatch`` takes the place of ``subprocess.Popen``.
"""

from __future__ import annotations

import atexit
import fcntl
import os
import select
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from tests import prefork_process

#: What the servers and their clients run.
_PROCESS = str(Path(prefork_process.__file__))


def command(script: Path, *arguments: str, ranks: int = 0, env: Mapping[str, str] | None = None) -> list[str]:
    """The command line that runs a script.

    Args:
        ranks: how many processes, as torchrun starts them; 0: one process whose environment says who it is.
        env: has variables of a server of ``started_with``.
    """
    return [*launcher(ranks, env), str(script), *arguments]


def launcher(ranks: int, env: Mapping[str, str] | None = None) -> list[str]:
    """The start of such a command line: what runs the script that follows."""
    return _client_of(_server("job", env), str(ranks))


def commwatch_command() -> list[str]:
    """The command line that takes the place of ``commwatch``, where a program is needed."""
    return small_command(Path(_program()))


def small_command(script: Path, *arguments: str) -> list[str]:
    """As ``command`` does without ranks, for a script that needs what agents import, and no torch."""
    return _client_of(_server("agent"), "0", str(script), *arguments)


def _client_of(server: Path, *words: str) -> list[str]:
    return [sys.executable, "-S", "-E", _PROCESS, str(server), *words]


def _program() -> str:
    found = find_spec("commwatch.__main__")
    assert found is not None
    assert found.origin is not None
    return found.origin


class Commwatch:
    """A process that runs ``python -m commwatch``; of the interface of ``subprocess.Popen``, what tests of agents use.

    Args:
        arguments: of the command line.
        env: its whole environment.
        cwd: its folder; by default that of this process.
        streams: files of its standard input, output and error.
        beside: a process whose namespaces it gets; by default this one.
        constants: other values of constants of modules, by their full names, such as a pause that a test should not wait for.
        in_session: the process leads a session, whose terminal is its standard error: the terminal's keys and sizes reach it.
    """

    def __init__(
        self,
        *arguments: str,
        env: Mapping[str, str],
        cwd: Path | None = None,
        streams: Sequence[int] = (0, 1, 2),
        beside: int | None = None,
        constants: Mapping[str, float | str] | None = None,
        in_session: bool = False,
    ) -> None:
        server, argv, where = str(_server("agent", env)), [_program(), *arguments], cwd or Path.cwd()
        self._connection = prefork_process.connected(
            server, 0, argv, env, where, streams, beside, constants, in_session
        )
        self._replies = self._connection.makefile()
        self.pid = int(self._replies.readline())
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Return the exit code, negative for a signal; ``None`` while the process runs."""
        with suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit code; raise ``TimeoutExpired`` if the process runs after ``timeout`` seconds."""
        if self.returncode is None:
            ended = select.poll()  # not `select`, which is for the first 1024 files only
            ended.register(self._connection, select.POLLIN)
            if not ended.poll(None if timeout is None else 1000 * timeout):
                raise subprocess.TimeoutExpired("commwatch", timeout or 0)
            self.returncode = int(self._replies.readline())
            self._replies.close()
            self._connection.close()
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send a signal, if the process runs."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        """Send SIGTERM."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Send SIGKILL."""
        self.send_signal(signal.SIGKILL)


def commwatch(
    *arguments: str, env: Mapping[str, str], cwd: Path | None, timeout: float, beside: int | None = None
) -> subprocess.CompletedProcess[str]:
    """Run ``python -m commwatch`` to its end, without input; raise ``TimeoutExpired`` after ``timeout`` seconds."""
    with Path(os.devnull).open() as nothing, tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        streams = (nothing.fileno(), out.fileno(), err.fileno())
        process = Commwatch(*arguments, env=env, cwd=cwd, streams=streams, beside=beside)
        try:
            code = process.wait(timeout)
        finally:
            process.kill()
        out.seek(0)
        err.seek(0)
        return subprocess.CompletedProcess(arguments, code, out.read(), err.read())


def at_start(env: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that Python or the loader reads when a process starts: a fork is too late for them."""
    return {name: value for name, value in env.items() if name.startswith(("LD_", "PYTHON", "LC_", "LANG", "TZ"))}


def forks(env: Mapping[str, str]) -> bool:
    """Whether there is, or will be, a server for agents with this environment."""
    from tests.helpers import clean_env

    return at_start(env) == at_start(clean_env()) or ("agent", _key(env)) in _further


@contextmanager
def started_with(kind: str, **variables: str) -> Iterator[None]:
    """A further server, with variables of ``at_start``, from which processes with the same ones are forked."""
    from tests.helpers import clean_env

    env = clean_env(**variables)
    folder = Path(tempfile.mkdtemp(prefix="commwatch-prefork-"))
    with _kept(folder, kind, env):
        _further[kind, _key(env)] = folder / "socket"
        try:
            yield
        finally:
            del _further[kind, _key(env)]


#: Sockets of the servers of ``started_with``.
_further: dict[tuple[str, frozenset[tuple[str, str]]], Path] = {}


def _key(env: Mapping[str, str]) -> frozenset[tuple[str, str]]:
    return frozenset(at_start(env).items())


def _server(kind: str, env: Mapping[str, str] | None = None) -> Path:
    """Socket of a server of ``PRELOADED`` for processes with this environment."""
    if env is not None and (kind, _key(env)) in _further:
        return _further[kind, _key(env)]
    assert env is None or forks(env), "no server has these variables"
    with _starting:
        return _first_server(kind)


#: Held while a server starts: threads that start their first jobs at one time share one.
_starting = threading.Lock()


@cache
def _first_server(kind: str) -> Path:
    """Socket of one that starts with the first client of all workers of pytest, and ends with the last worker that has one."""
    from tests.helpers import clean_env  # not at the top: clients and server run this file without the tests' packages

    run = os.environ.get("PYTEST_XDIST_TESTRUNUID", str(os.getpid()))
    folder = Path(tempfile.gettempdir(), f"commwatch-prefork-{run}-{kind}")
    stack = ExitStack()
    stack.enter_context(_kept(folder, kind, clean_env()))
    atexit.register(stack.close)
    return folder / "socket"


@contextmanager
def _kept(folder: Path, kind: str, env: Mapping[str, str]) -> Iterator[None]:
    """The server of a folder, started if there is none. It ends, and removes the folder, once no process has its pipe open any longer."""
    folder.mkdir(mode=0o700, exist_ok=True)
    with _locked(folder):
        try:
            writer = os.open(folder / "pipe", os.O_WRONLY | os.O_NONBLOCK)
        except FileNotFoundError:
            writer = _start(folder, kind, env)
    try:
        yield
    finally:
        os.close(writer)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _start(folder: Path, kind: str, env: Mapping[str, str]) -> int:
    """Start a server, and wait until it takes requests; returns the end of its pipe that keeps it."""
    os.mkfifo(folder / "pipe")
    reader = os.open(folder / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    writer = os.open(folder / "pipe", os.O_WRONLY)
    begins, says = os.pipe()
    command = [sys.executable, _PROCESS, "serve", str(folder), kind]
    env = {**env, "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    streams = [(os.POSIX_SPAWN_DUP2, reader, 0), (os.POSIX_SPAWN_DUP2, says, 1)]
    # Not `subprocess`, whose process would have to end with the worker that starts it.
    os.posix_spawn(sys.executable, command, env, file_actions=streams)
    os.close(reader)
    os.close(says)
    with open(begins, "rb") as ready:
        assert ready.read(1), "the server has not started"
    return writer
