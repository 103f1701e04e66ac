"""The page of ``/metrics``: rendered once at a time in a thread of its own, whoever asks and however often."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder

from commwatch.runtime.offload import Aside

#: A page holds for so many times as long as a processor worked on it, and for no more than so many seconds: a page that costs much takes
#: at most an eleventh of a core (where it takes more than 50 ms: at most so many ms of each half second), and one that costs little is always fresh.
_HOLDS, MOST_S = 10, 0.5
#: Seconds that who asks waits for the page.
_PATIENCE_S = 10.0
#: The forms that there are: what a client says that wants it.
_OPENMETRICS, _PLAIN = "application/openmetrics-text;version=1.0.0", ""


class _Form:
    """The page in one form."""

    def __init__(self, registry: CollectorRegistry, accept: str, clock: Callable[[], float]) -> None:
        self._encode, self.content_type = choose_encoder(accept)
        self._registry, self._clock = registry, clock
        self._aside = Aside("metrics", self._render)
        self._text, self._until_s = b"", clock()

    async def text(self) -> bytes:
        """The page, at most half a second old.

        Raises:
            TimeoutError: it takes too long.
        """
        if self._clock() >= self._until_s:
            await self._aside.ask(_PATIENCE_S)
        return self._text

    def _render(self) -> None:
        began_s = time.thread_time()
        self._text = self._encode(self._registry)
        self._until_s = self._clock() + min(MOST_S, _HOLDS * (time.thread_time() - began_s))


class Scrape:
    """Answers who scrapes, from one event loop.

    Args:
        clock: one that never goes back.
    """

    def __init__(self, registry: CollectorRegistry, clock: Callable[[], float] = time.monotonic) -> None:
        form = partial(_Form, registry, clock=clock)
        self._openmetrics, self._plain = form(_OPENMETRICS), form(_PLAIN)

    async def page(self, accept: str) -> tuple[bytes, str]:
        """The page in the form that a client asks for by its header, and its content type.

        Raises:
            TimeoutError: it takes too long.
        """
        wanted = choose_encoder(accept)[1]
        form = self._openmetrics if wanted.startswith("application/openmetrics-text") else self._plain
        return await form.text(), form.content_type
