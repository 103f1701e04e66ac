"""The timelines of the other nodes of a job, for ``commwatch timeline``: their agents send them in pages."""

from __future__ import annotations

from functools import partial
from http import HTTPStatus
from typing import NamedTuple
from urllib.error import HTTPError
from urllib.parse import urlencode

from pydantic import TypeAdapter

from commwatch.api import client
from commwatch.api.client import Keys
from commwatch.wire.errors import CommwatchError
from commwatch_agent.config import Config
from commwatch_agent.report.timeline_export import NodeTrace
from commwatch_agent.report.timeline_parts import TimelinePart, trace_of
from commwatch_agent.runtime.peers import ANSWERS, SILENT

#: Seconds for one page, and most bytes of it.
_WITHIN_S, _MOST_BYTES = 30.0, 16 << 20
#: Most operations of a page, of all nodes together; and least, because a small page takes as long to find as a large one.
_TOGETHER, _LEAST = 20_000, 2_000


class _Asker(NamedTuple):
    """Requests the pages of one job."""

    job: str
    last_s: float | None
    keys: Keys
    #: Most operations of a page.
    most: int

    def first(self, url: str) -> list[TimelinePart] | str:
        """Return an agent's first page, none if it does not have the job, or the reason why it does not answer."""
        try:
            return [self._page(url, {"last": "all" if self.last_s is None else f"{self.last_s:g}s"})]
        except (OSError, ValueError) as error:
            if isinstance(error, HTTPError) and error.code == HTTPStatus.NOT_FOUND:
                error.close()
                return []
            return client.reason(error)

    def following(self, url: str, page: TimelinePart) -> TimelinePart:
        """Return the page after a page; raise ``CommwatchError`` if the agent no longer answers."""
        try:
            return self._page(url, {"from_ns": page.from_ns, "cursor": page.cursor})
        except (OSError, ValueError) as error:
            why = f"{url} no longer answers: {client.reason(error)}; try again, or use --node for this node only"
            raise CommwatchError(why) from None

    def _page(self, url: str, parameters: dict[str, object]) -> TimelinePart:
        path = f"timeline_part?{urlencode({'job': self.job, 'limit': self.most, **parameters})}"
        text = client.fetch(url, path, self.keys, timeout_s=_WITHIN_S, most_bytes=_MOST_BYTES)
        return TypeAdapter(TimelinePart).validate_json(text)


def traces_of_others(config: Config, job: str, last_s: float | None) -> tuple[list[NodeTrace], dict[str, str]]:
    """Return the timelines of the job on the other nodes that this node's agent knows, and which agents do not answer.

    Only their first pages are requested; the others while the operations are read.

    Args:
        last_s: as in ``timeline_export.Window``.
    """
    url, keys = client.agent_of(config.dir, config.history), client.keys_of(config)
    if url is None:
        return [], {}
    try:
        peers = client.get(url, "peers", keys)
    except (OSError, ValueError) as error:
        return [], {url: client.reason(error)}
    silent = {str(peer["url"]): str(peer["reason"]) for peer in peers if peer["state"] == SILENT}
    urls = [str(peer["url"]) for peer in peers if peer["state"] == ANSWERS]
    asker, traces = _Asker(job, last_s, keys, max(_LEAST, _TOGETHER // max(1, len(urls)))), []
    for peer, found in zip(urls, client.together(asker.first, urls), strict=True):
        if found is None:
            silent[peer] = f"no answer within {client.TOGETHER_S:.0f} s"
        elif isinstance(found, str):
            silent[peer] = found
        else:
            traces += [trace_of(page, partial(asker.following, peer)) for page in found]
    return traces, silent
