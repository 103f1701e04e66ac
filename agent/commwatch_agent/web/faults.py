"""Unexpected errors of routes, which are faults of commwatch: few lines in the log for each kind, and an answer for the client."""

from __future__ import annotations

import logging
from collections import Counter

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from commwatch_agent.runtime.agent_log import fault_of
from commwatch_agent.web.problems import fault

log = logging.getLogger("commwatch")
#: Most kinds of faults that are counted, each by itself.
_MOST = 100


class Contained:
    """An ASGI application whose unexpected errors end here. It answers them itself; of one kind, the 1st, 2nd, 4th, 8th and so on is logged."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._times: Counter[str] = Counter()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        begun = False

        async def sent(message: Message) -> None:
            nonlocal begun
            begun = True
            await send(message)

        try:
            await self._app(scope, receive, sent)
        except Exception as error:
            self._note(f"{scope['method']} {scope['path']}", fault_of(error))
            if not begun:
                await fault()(scope, receive, send)

    def _note(self, request: str, fault: str) -> None:
        kind = fault if fault in self._times or len(self._times) < _MOST else ""
        self._times[kind] += 1
        times = self._times[kind]
        if times.bit_count() == 1:
            so_far = f" ({times} times so far)" if times > 1 else ""
            log.error("a fault of commwatch: %s: %s%s; please report it", request, fault, so_far)
