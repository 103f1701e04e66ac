"""Sends API queries that read much of the history to a separate process (``worker_process.py``), so that they delay no records."""

from __future__ import annotations

import contextlib
import logging
import pickle
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from http import HTTPStatus
from multiprocessing.connection import Connection, Pipe
from typing import Any, Concatenate, ParamSpec, TypeVar

from commwatch_agent.analysis.queries import QueryService
from commwatch_agent.history.chunks import Damaged
from commwatch_agent.questions.answer import ApiError, Text
from commwatch_agent.questions.worker_process import Begin, Cells, Fault, Found, Question, Ranks, Wrong
from commwatch_agent.reference.references import References
from commwatch_agent.runtime import agent_log

log = logging.getLogger("commwatch")
_P = ParamSpec("_P")
_T = TypeVar("_T")
#: Starts the process; its standard input is the connection.
COMMAND: tuple[str, ...] = (
    sys.executable,
    "-c",
    "from commwatch_agent.questions.worker_process import main; main()",
)
#: Seconds that an answer may take; after that the process is killed.
MOST_S = 30.0
#: Seconds that the process may take to open its snapshot of the history. The intake cannot store cells meanwhile.
_FREEZE_S = 1.0
#: Seconds without a question after which the process is ended.
_IDLE_S = 60.0
#: Seconds that the process may take to end by itself.
_END_S = 1.0


class WorkerFault(Exception):
    """An unexpected error in the process that answers; the message names it and its place."""


class Worker:
    """Sends questions to the worker process, one at a time, from any thread.

    The process is started with the first question, and again after it was killed or ended.

    Args:
        agent: supplies the totals in memory.
        references: expected durations of operations.
        damaged: counts and logs the damaged chunks of the history.
    """

    def __init__(self, agent: QueryService, references: References, damaged: Damaged) -> None:
        self._agent, self._references, self._damaged, self._most_s = agent, references, damaged, MOST_S
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None
        self._last_request_s, self._closed = 0.0, False

    def ask(self, function: Callable[Concatenate[QueryService, _P], _T], *args: _P.args, **kwargs: _P.kwargs) -> _T:
        """Return what a function of a module returns in the process, of the agent's queries and these arguments.

        Raises:
            ApiError: there is no answer; its detail gives the reason.
        """
        answer: _T = self._reply(Question(function, args, kwargs, dict(self._references.links), as_text=False))
        return answer

    def text(
        self, function: Callable[Concatenate[QueryService, _P], object], *args: _P.args, **kwargs: _P.kwargs
    ) -> Text:
        """Return what ``ask`` does, serialised as it is sent.

        Raises:
            ApiError: there is no answer; its detail gives the reason.
        """
        text: Text = self._reply(Question(function, args, kwargs, dict(self._references.links), as_text=True))
        return text

    def tick(self) -> None:
        """End the process if there was no question for a while, to free its memory."""
        if self._lock.acquire(blocking=False):
            try:
                if self._process is not None and time.monotonic() - self._last_request_s > _IDLE_S:
                    self._end()
            finally:
                self._lock.release()

    def close(self) -> None:
        """End the process, even in the middle of an answer; later questions raise ``ApiError``."""
        self._closed = True
        process = self._process  # read after that, as `_started` sets it before it looks at `_closed` again
        if process is not None:
            process.kill()
        with self._lock:
            self._end()

    def _reply(self, question: Question) -> Any:
        with self._lock:
            connection, process = self._started()
            try:
                with _killed_after(self._most_s, process) as over:
                    connection.send(question)
                    reply = self._replied(connection, process)
            except (EOFError, OSError, pickle.UnpicklingError):
                self._end()
                if over.is_set():
                    why = f"the answer took longer than {self._most_s:g} s; request less (since, until, job, limit)"
                else:
                    why = "the process that computes answers has ended; try again"
                raise ApiError(HTTPStatus.SERVICE_UNAVAILABLE, why) from None
            finally:
                self._last_request_s = time.monotonic()
        if isinstance(reply, Fault):
            raise WorkerFault(reply.says)
        if isinstance(reply, Wrong):
            raise ApiError(reply.status, reply.detail)
        for piece, says in reply.damaged:
            self._damaged.note(piece, says)
        return reply.answer

    def _replied(self, connection: Connection, process: subprocess.Popen[bytes]) -> Found | Wrong | Fault:
        """Return the reply of the process; until then serve its requests for totals in memory."""
        while True:
            message = connection.recv()
            if isinstance(message, Cells):

                def freeze() -> None:
                    with _killed_after(_FREEZE_S, process):
                        connection.send(True)
                        connection.recv()

                connection.send(self._agent.live_cells(message.from_ns, message.until_ns, message.job, freeze))
            elif isinstance(message, Ranks):
                connection.send(self._agent.live_ranks())
            else:
                assert isinstance(message, (Found, Wrong, Fault))
                return message

    def _started(self) -> tuple[Connection, subprocess.Popen[bytes]]:
        """Return the process and its connection, ready for a question; start it if there is none."""
        ended = None if self._process is None else self._process.poll()
        self._check_open()  # after the poll: `close` sets `_closed` before it kills the process
        if ended is not None:
            log.warning("the history worker process ended (%s); another is started", ended)
            self._end()
        if self._process is None or self._connection is None:
            ours, theirs = Pipe()
            with theirs:
                self._process = subprocess.Popen(COMMAND, stdin=theirs.fileno(), cwd="/")
            self._connection = ours
            self._check_open()
            with contextlib.suppress(OSError):
                ours.send(Begin(self._agent.path.absolute(), self._references.where.absolute(), *agent_log.in_use()))
        return self._connection, self._process

    def _check_open(self) -> None:
        """End the process and raise ``ApiError`` if ``close`` was called."""
        if self._closed:
            if self._process is not None:
                self._process.kill()
            self._end()
            raise ApiError(
                HTTPStatus.SERVICE_UNAVAILABLE,
                "the agent is shutting down, perhaps with its job: `commwatch report` shows that",
            )

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
    """Kill the process if the block takes longer than ``seconds``; the event is set if that happened."""
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
