"""The page of ``/metrics``: rendered in a thread of its own, once at a time for all clients."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from functools import partial

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder

from commwatch_agent.prometheus.exposition import rendered
from commwatch_agent.runtime.offload import SharedCall

#: A page is cached for so many times the CPU time it took, and for at most so many seconds. A costly page thus takes at
#: most 1/11 of a core (above 30 ms: its CPU time every 0.3 s), and a cheap one is always fresh.
_HOLDS, MOST_S = 10, 0.3
#: Seconds that a client waits for the page.
_PATIENCE_S = 10.0
#: The two formats, as ``Accept`` headers.
_OPENMETRICS, _PLAIN = "application/openmetrics-text;version=1.0.0", ""
#: The end of a format that a client refuses.
_REFUSED = re.compile(r";\s*q=0(\.0*)?\s*(;|$)")


class _Form:
    """The page in one format."""

    def __init__(self, registry: CollectorRegistry, accept: str, clock: Callable[[], float]) -> None:
        self.content_type = choose_encoder(accept)[1]
        self._openmetrics = accept == _OPENMETRICS
        self._registry, self._clock = registry, clock
        self._aside = SharedCall("metrics", self._render)
        self._text, self._until_s = b"", clock()

    async def text(self) -> bytes:
        """Return the page, at most ``MOST_S`` old.

        Raises:
            TimeoutError: rendering takes longer than ``_PATIENCE_S``.
        """
        if self._clock() >= self._until_s:
            await self._aside.ask(_PATIENCE_S)
        return self._text

    def _render(self) -> None:
        began_s = time.thread_time()
        self._text = rendered(self._registry.collect(), self._openmetrics)
        self._until_s = self._clock() + min(MOST_S, _HOLDS * (time.thread_time() - began_s))


class Scrape:
    """Serves the page to clients, on one event loop.

    Args:
        clock: monotonic seconds.
    """

    def __init__(self, registry: CollectorRegistry, clock: Callable[[], float] = time.monotonic) -> None:
        form = partial(_Form, registry, clock=clock)
        self._openmetrics, self._plain = form(_OPENMETRICS), form(_PLAIN)

    async def page(self, accept: str) -> tuple[bytes, str]:
        """Return the page in the format that the header ``Accept`` requests, and its content type.

        Raises:
            TimeoutError: rendering takes longer than ``_PATIENCE_S``.
        """
        form = self._openmetrics if _takes_openmetrics(accept) else self._plain
        return await form.text(), form.content_type


def _takes_openmetrics(accept: str) -> bool:
    """Return whether the header ``Accept`` requests OpenMetrics; a header with a version that is no version does not."""
    try:
        wanted = choose_encoder(",".join(each for each in accept.split(",") if not _REFUSED.search(each)))[1]
    except (TypeError, ValueError):
        return False
    return wanted.startswith("application/openmetrics-text")
