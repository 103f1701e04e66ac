"""The process that answers questions about an agent's history; ``worker.py`` starts it and sends the questions.

It has its own interpreter, so that slow answers delay nothing else in the agent, and its own limit of memory. It requests
from the agent what is not yet in the history. It imports no web server.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import resource
import signal
import sqlite3
from collections.abc import Callable
from http import HTTPStatus
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

from commwatch_agent.analysis.queries import QueryService
from commwatch_agent.history.chunks import Damaged, Piece
from commwatch_agent.history.opening import StoreError
from commwatch_agent.model.cells import Counted
from commwatch_agent.model.views import RankView
from commwatch_agent.questions.answer import ApiError, text_of
from commwatch_agent.reference.references import References
from commwatch_agent.runtime import agent_log
from commwatch_agent.whatif.model import CannotAnswer

#: Address space, bytes. The costliest answers are advice on 100,000 steps, which takes 180 MB, 34 of them the interpreter, and a report
#: on all nodes of a job, which takes 235 MB: numpy reserves 80 of them, and uses hardly any. Its replay takes up to 50 MB more.
MOST_BYTES = 5 << 26
#: Trainers and intake have priority.
NICE = 10


class Begin(NamedTuple):
    """Sent to the process before the first question."""

    history: Path
    references: Path
    #: How it logs, and from which level on: as the agent does.
    formatter: logging.Formatter
    log_level: str


class Question(NamedTuple):
    """One question."""

    #: Of a module, so that the process finds it; called with the queries and the arguments.
    function: Callable[..., object]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    #: The setting ``links``.
    links: dict[str, str]
    #: The answer is to be a ``Text``, serialised as it is sent, instead of an object.
    as_text: bool


class Cells(NamedTuple):
    """A request to the agent for ``live_cells``.

    The agent sends ``True`` when the process must open its snapshot of the history, waits for ``True``, and sends the cells.
    """

    from_ns: int
    until_ns: int
    job: str | None


class Ranks(NamedTuple):
    """A request to the agent for ``live_ranks``."""


class Found(NamedTuple):
    """The answer to a question."""

    answer: Any
    #: Damaged pieces of the history, and the message to log for each.
    damaged: list[tuple[Piece, str]]


class Wrong(NamedTuple):
    """Why there is no answer."""

    status: HTTPStatus
    detail: str


class Fault(NamedTuple):
    """An unexpected error, in one line."""

    says: str


class _Damaged(Damaged):
    """Collects damaged pieces, for the agent to count and log."""

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[Piece, str] = {}

    def note(self, piece: Piece, says: str) -> None:
        self.found[piece] = says


class _Agent(QueryService):
    """A ``QueryService`` that gets the totals in memory from the agent, over the connection."""

    def __init__(self, begin: Begin, links: dict[str, str], damaged: Damaged, agent: Connection) -> None:
        super().__init__(begin.history, references=References(begin.references, links), damaged=damaged)
        self._agent = agent

    def live_cells(
        self, from_ns: int, until_ns: int, job: str | None, freeze: Callable[[], object]
    ) -> list[tuple[int, Counted]] | None:
        self._agent.send(Cells(from_ns, until_ns, job))
        self._agent.recv()
        freeze()
        self._agent.send(True)
        cells: list[tuple[int, Counted]] = self._agent.recv()
        return cells

    def live_ranks(self) -> dict[str, RankView]:
        self._agent.send(Ranks())
        ranks: dict[str, RankView] = self._agent.recv()
        return ranks


def answered(question: Question, begin: Begin, connection: Connection) -> Found | Wrong:
    """Return the answer to one question, or why there is none."""
    damaged = _Damaged()
    agent = _Agent(begin, question.links, damaged, connection)
    try:
        answer = question.function(agent, *question.args, **question.kwargs)
        found = text_of(answer) if question.as_text else answer
    except (ApiError, CannotAnswer) as error:
        return Wrong(error.status, str(error))
    except (StoreError, sqlite3.Error) as error:
        return Wrong(StoreError.status, f"the history cannot be read: {error}")
    return Found(found, list(damaged.found.items()))


def serve(connection: Connection) -> None:
    """Answer questions until the agent closes the connection."""
    with contextlib.suppress(EOFError, OSError):
        begin: Begin = connection.recv()
        agent_log.use(begin.formatter, begin.log_level)
        while True:
            question: Question = connection.recv()
            try:
                reply: Found | Wrong | Fault = answered(question, begin, connection)
            except MemoryError:
                detail = f"the answer takes more than {MOST_BYTES >> 20} MiB of memory; request less (since, until, job, limit)"
                reply = Wrong(HTTPStatus.SERVICE_UNAVAILABLE, detail)
            except (EOFError, OSError):  # of the connection
                raise
            except Exception as error:  # the agent raises it for the client that asked
                reply = Fault(agent_log.fault_of(error))
            connection.send(reply)
            del question, reply
            gc.collect()


def main() -> None:
    """Serve the connection that is the standard input; entry point of the process."""
    for number in (signal.SIGINT, signal.SIGHUP):  # from a terminal they are for the agent, which ends this process
        signal.signal(number, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_AS, (MOST_BYTES, MOST_BYTES))
    os.nice(NICE)
    with contextlib.suppress(OSError):  # out of memory: kill this process rather than the agent
        Path("/proc/self/oom_score_adj").write_text("1000")
    serve(Connection(0))
