"""Starts processes of tests as forks of one that has imported what they need: 3 s of a core less for a rank, 1 s less for an agent.

A process gets arguments, environment, folder, standard streams, network and clock from its client. ``command`` is a command line that takes the
place of ``torchrun`` or of Python: a client that ends as the job does. The variables of the ranks and their store are those of torchrun.
``Commwatch`` takes the place of ``subprocess.Popen``.
"""

from __future__ import annotations

import atexit
import os
import select
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
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
    with tempfile.TemporaryDirectory(prefix="commwatch-prefork-") as folder:
        path = Path(folder, "socket")
        process = _started(path, kind, env)
        _further[kind, _key(env)] = path
        try:
            yield
        finally:
            del _further[kind, _key(env)]
            assert process.stdin is not None
            process.stdin.close()
            process.wait()


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
    """Socket of one that starts with the first client and ends with the tests."""
    from tests.helpers import clean_env  # not at the top: clients and server run this file without the tests' packages

    folder = tempfile.TemporaryDirectory(prefix="commwatch-prefork-")
    path = Path(folder.name, "socket")
    process = _started(path, kind, clean_env())
    assert process.stdin is not None
    atexit.register(folder.cleanup)
    atexit.register(process.wait)
    atexit.register(process.stdin.close)
    return path


def _started(path: Path, kind: str, env: Mapping[str, str]) -> subprocess.Popen[bytes]:
    process = subprocess.Popen(
        [sys.executable, _PROCESS, "serve", str(path), kind],
        env={**env, "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert process.stdout is not None
    assert process.stdout.read(1), "the server has not started"
    return process
