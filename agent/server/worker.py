"""Questions to the history, answered in a process of their own: see ``worker_process.py``, which is the other end."""

from __future__ import annotations

import contextlib
import logging
import pickle
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http import HTTPStatus
from multiprocessing.connection import Connection, Pipe
from typing import Any

from commwatch.analysis.queries import QueryService
from commwatch.history.chunks import Damaged
from commwatch.reference.references import References
from commwatch.server.questions import Problem, Text
from commwatch.server.worker_process import Begin, Cells, Found, Question, Ranks, Wrong

log = logging.getLogger("commwatch")
#: An answer that takes longer is given up; the process that works on it is killed.
MOST_S = 30.0
#: The intake waits while the process begins to read the history at a moment that fits the books: for so long at most.
_FREEZE_S = 1.0
#: Unasked for so long the process is ended.
_IDLE_S = 60.0
#: It may take so long to end by itself.
_END_S = 1.0


class Worker:
    """Asks the process, one question at a time, from any thread. It is started with the first question, and again after it was killed or ended.

    Args:
        agent: has the books.
        references: what operations should take.
        damaged: gets the chunks of the history that cannot be read any more.
    """

    def __init__(self, agent: QueryService, references: References, damaged: Damaged) -> None:
        self._agent, self._references, self._damaged, self._most_s = agent, references, damaged, MOST_S
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None
        self._asked_s, self._closed = 0.0, False

    def text(self, name: str, **arguments: Any) -> Text:
        """The answer to a question of ``QUESTIONS`` as it is sent.

        Raises:
            Problem: there is none, and why.
        """
        text: Text = self._ask(name, arguments, as_text=True)
        return text

    def find(self, name: str, **arguments: Any) -> Any:
        """The answer as an object.

        Raises:
            Problem: there is none, and why.
        """
        return self._ask(name, arguments, as_text=False)

    def tick(self) -> None:
        """End the process if nothing has been asked for a while: its memory is better used by others."""
        if self._lock.acquire(blocking=False):
            try:
                if self._process is not None and time.monotonic() - self._asked_s > _IDLE_S:
                    self._end()
            finally:
                self._lock.release()

    def close(self) -> None:
        """End the process, also in the middle of an answer; from now on there are none."""
        self._closed, process = True, self._process
        if process is not None:
            process.kill()
        with self._lock:
            self._end()

    def _ask(self, name: str, arguments: dict[str, Any], as_text: bool) -> Any:
        question = Question(name, arguments, dict(self._references.links), as_text)
        with self._lock:
            connection, process = self._started()
            try:
                with _killed_after(self._most_s, process) as over:
                    connection.send(question)
                    reply = self._replied(connection, process)
            except (EOFError, OSError, pickle.UnpicklingError):
                self._end()
                if over.is_set():
                    why = f"the answer took longer than {self._most_s:g} s; ask for less (since, until, job, limit)"
                else:
                    why = "the process that works on answers has ended; ask again"
                raise Problem(HTTPStatus.SERVICE_UNAVAILABLE, why) from None
            finally:
                self._asked_s = time.monotonic()
        if isinstance(reply, Wrong):
            raise Problem(reply.status, reply.detail)
        for piece, says in reply.damaged:
            self._damaged.note(piece, says)
        return reply.answer

    def _replied(self, connection: Connection, process: subprocess.Popen[bytes]) -> Found | Wrong:
        """What the process says in the end; on the way it may ask for what is in the books."""
        while True:
            said = connection.recv()
            if isinstance(said, Cells):

                def freeze() -> None:
                    with _killed_after(_FREEZE_S, process):
                        connection.send(True)
                        connection.recv()

                connection.send(self._agent.live_cells(said.from_ns, said.until_ns, said.job, freeze))
            elif isinstance(said, Ranks):
                connection.send(self._agent.live_ranks())
            else:
                assert isinstance(said, (Found, Wrong))
                return said

    def _started(self) -> tuple[Connection, subprocess.Popen[bytes]]:
        """The process, ready for a question."""
        ended = None if self._process is None else self._process.poll()
        # Looked at after the process: `close` sets it before it kills.
        if self._closed:
            self._end()
            raise Problem(HTTPStatus.SERVICE_UNAVAILABLE, "the agent is about to end")
        if ended is not None:
            log.warning("the process that works on answers has ended (%s); another is started", ended)
            self._end()
        if self._process is None or self._connection is None:
            ours, theirs = Pipe()
            with theirs:
                code = f"from commwatch.server.worker_process import main; main({theirs.fileno()})"
                self._process = subprocess.Popen(
                    [sys.executable, "-c", code],
                    stdin=subprocess.DEVNULL,
                    pass_fds=[theirs.fileno()],
                    cwd="/",
                )
            self._connection = ours
            with contextlib.suppress(OSError):
                ours.send(Begin(self._agent.path.absolute(), self._references.where.absolute()))
        return self._connection, self._process

    def _end(self) -> None:
        process, connection, self._process, self._connection = self._process, self._connection, None, None
        if connection is not None:
            connection.close()
        if process is not None:
            try:
                process.wait(_END_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


@contextlib.contextmanager
def _killed_after(seconds: float, process: subprocess.Popen[bytes]) -> Iterator[threading.Event]:
    """A process has so long; the event is set if it was killed then."""
    over = threading.Event()

    def kill() -> None:
        over.set()
        process.kill()

    timer = threading.Timer(seconds, kill)
    timer.daemon = True
    timer.start()
    try:
        yield over
    finally:
        timer.cancel()
