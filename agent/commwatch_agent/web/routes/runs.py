"""Questions about one run: the parameter ``run`` beside ``job``, with which agents ask each other, because two runs may have one name.

The id in ``run`` finds the run, whatever this node calls it; the answer has the name under which it was asked for.
"""

from __future__ import annotations

import json
import sqlite3
from typing import TYPE_CHECKING
from urllib.parse import parse_qsl, urlencode

from starlette.concurrency import run_in_threadpool

from commwatch.wire.errors import CommwatchError
from commwatch_agent.analysis.queries import QueryService
from commwatch_agent.history.opening import StoreError
from commwatch_agent.web.problems import answer

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

#: The parameter; with an empty value the run of a node that does not know the id.
PARAMETER = "run"


class RunQuestions:
    """Application around ``app`` that takes ``run`` out of a question, and puts this node's name of that run in the place of ``job``."""

    def __init__(self, app: ASGIApp, queries: QueryService) -> None:
        self._app, self._queries = app, queries

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        if scope["type"] != "http" or f"{PARAMETER}=".encode() not in scope["query_string"]:
            return await self._app(scope, receive, send)
        pairs = parse_qsl(scope["query_string"].decode("latin-1"), keep_blank_values=True)
        asked = dict(pairs)
        if PARAMETER not in asked or "job" not in asked:
            return await self._app(scope, receive, send)
        job, run = asked["job"], asked[PARAMETER]
        try:
            name = await run_in_threadpool(self._name_of, job, run)
        except CommwatchError as error:
            return await answer(error.status, str(error))(scope, receive, send)
        except sqlite3.Error as error:
            return await answer(StoreError.status, f"the history cannot be read: {error}")(scope, receive, send)
        if name is None:
            return await answer(404, f"run={run}: job '{job}' has no such run on this node")(scope, receive, send)
        kept = [(key, name if key == "job" else value) for key, value in pairs if key != PARAMETER]
        scope = {**scope, "query_string": urlencode(kept).encode()}
        return await self._app(scope, receive, send if name == job else _Renaming(send, name, job))

    def _name_of(self, job: str, run: str) -> str | None:
        if run:
            return self._queries.address(run)
        known = self._queries.run(job)
        return None if known is not None and known.common else job


class _Renaming:
    """Sends an answer with another name of its job."""

    def __init__(self, send: Send, name: str, other: str) -> None:
        self._send = send
        self._change = [
            tuple(f'"job_id":{json.dumps(each, ensure_ascii=ascii_only)}'.encode() for each in (name, other))
            for ascii_only in (False, True)
        ]
        self._start: Message | None = None
        self._body = b""

    async def __call__(self, message: Message) -> None:
        """Hold the parts of the answer until it is complete, and send it."""
        if message["type"] == "http.response.start":
            self._start = message
            return
        self._body += message.get("body", b"")
        if message.get("more_body") or self._start is None:
            return
        for before, after in self._change:
            self._body = self._body.replace(before, after)
        length = (b"content-length", str(len(self._body)).encode())
        headers = [(key, value) for key, value in self._start["headers"] if key.lower() != length[0]]
        await self._send({**self._start, "headers": [*headers, length]})
        await self._send({"type": "http.response.body", "body": self._body})
