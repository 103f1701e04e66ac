"""A receiver that runs a command with Alertmanager's webhook payload on its standard input."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import select
import signal
import subprocess
import tempfile
import time
from dataclasses import KW_ONLY, dataclass
from typing import IO

from commwatch_alerts.outbox import Batch, Policy
from commwatch_alerts.receivers import payload
from commwatch_alerts.receivers.sending import MOST_ANSWER, CannotSend, said

LIMIT_S = 30.0
#: Why a program cannot be started, now or later.
_FOR_GOOD = {
    errno.ENOENT,
    errno.EACCES,
    errno.EPERM,
    errno.ENOEXEC,
    errno.ENOTDIR,
    errno.EISDIR,
    errno.E2BIG,
    errno.ELOOP,
    errno.ENAMETOOLONG,
}
_LOOK_MS = 100


@dataclass(frozen=True)
class Command:
    """A program and its arguments, run without a shell."""

    name: str
    policy: Policy
    argv: tuple[str, ...]
    agent_url: str
    #: Environment variables that the program does not get, because they hold secrets of other receivers.
    hidden: frozenset[str] = frozenset()
    _: KW_ONLY
    limit_s: float = LIMIT_S

    def send(self, batch: Batch, now_s: float) -> None:
        """Run the program to its end; raise CannotSend if it cannot start, fails, or exceeds ``limit_s`` seconds."""
        body = json.dumps(payload.webhook(batch, self.name, self.agent_url)).encode()
        # Without our own variables: they would load the probe in the program, and name the token of the agent.
        env = {
            name: value
            for name, value in os.environ.items()
            if name not in self.hidden and name != "COMMWATCH" and not name.startswith("COMMWATCH_")
        }
        with self._input(body) as standard_input:
            try:
                code, output = _run(self.argv, standard_input, env, self.limit_s)
            except OSError as error:
                # Other reasons pass, such as a lack of memory or of file descriptors.
                passes = error.errno not in _FOR_GOOD
                raise CannotSend(f"{self.argv[0]}: cannot be started: {error.strerror}", again=passes) from None
        if code is None:
            raise CannotSend(f"{self.argv[0]}: was killed after {self.limit_s:g} s")
        if code != 0:
            secrets = (os.environ.get(name, "") for name in self.hidden)
            line = said(output, *(secret for secret in secrets if secret))
            how = f"ended by signal {-code}" if code < 0 else f"exit code {code}"
            raise CannotSend(f"{self.argv[0]}: {how}{f': {line}' if line else ''}")

    def _input(self, body: bytes) -> IO[bytes]:
        """Return a temporary file with ``body``, to be read from its start; raise CannotSend, to be tried again."""
        try:
            made = tempfile.TemporaryFile()  # noqa: SIM115 - the caller closes it
            made.write(body)
            made.seek(0)
        except OSError as error:
            raise CannotSend(f"{self.argv[0]}: no temporary file for its input: {error.strerror}") from None
        return made


def _run(
    argv: tuple[str, ...], standard_input: IO[bytes], env: dict[str, str], limit_s: float
) -> tuple[int | None, bytes]:
    """Return the exit code (``None``: killed with its children at the time limit) and the beginning of the output."""
    end, output = time.monotonic() + limit_s, b""
    process = subprocess.Popen(
        argv,
        stdin=standard_input,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=env,
        start_new_session=True,
    )
    assert process.stdout is not None
    pipe, poll = process.stdout.fileno(), select.poll()
    poll.register(pipe, select.POLLIN)
    try:
        # Wait for the process, not for the end of the pipe, which a background child may keep open, or fill.
        while process.poll() is None and time.monotonic() < end:
            if not poll.poll(_LOOK_MS):
                continue
            piece = os.read(pipe, 1 << 16)
            output = (output + piece)[:MOST_ANSWER]
            if not piece:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(max(0.0, end - time.monotonic()))
        if process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            return None, output
        if len(output) < MOST_ANSWER and poll.poll(0):
            output += os.read(pipe, MOST_ANSWER)
        return process.returncode, output
    finally:
        process.stdout.close()
