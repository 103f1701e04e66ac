"""What commands share that show all nodes of a job: the answer of this node's agent, which asks the others."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from urllib.parse import urlencode

from commwatch_agent.config import Config
from commwatch_agent.text.terminal_text import complain

#: Seconds that the agent has: it asks the others, and computes; and most bytes of its answer.
_WITHIN_S, _MOST_BYTES = 60.0, 64 << 20


def answer(config: Config, route: str, parameters: Mapping[str, Any]) -> bytes | None:
    """Return the answer for all nodes of the agent that writes this history; ``None``: it knows no others, or does not answer.

    If it does not answer, the reason is printed.
    """
    from commwatch.api import client
    from commwatch_agent.runtime.peers import SELF

    url, keys = client.agent_of(config.dir, config.history), client.keys_of(config)
    if url is None:
        return None
    try:
        if all(peer["state"] == SELF for peer in client.get(url, "peers", keys)):
            return None
        path = f"{route}?{urlencode({**parameters, 'scope': 'job'})}"
        return client.fetch(url, path, keys, timeout_s=_WITHIN_S, most_bytes=_MOST_BYTES)
    except (OSError, ValueError) as error:
        complain(f"{url}: {client.reason(error)}; showing only this node")
        return None
