"""``commwatch query``: send a request to the query API of this node's agent, or of many agents at once."""

from __future__ import annotations

import argparse
import json
import sys
import urllib.parse
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

from commwatch.wire.errors import INCOMPLETE, UsageError
from commwatch_agent.config import Config
from commwatch_agent.text.terminal_text import complain, output_cells

if TYPE_CHECKING:
    from commwatch.api.client import Keys

#: Table cells are cut to this many characters.
_MOST_CELLS = 60
#: Answers that are nested at least this deep are refused; agents send none.
_DEEPEST = 64
#: Characters with a meaning in a question: they are not percent-encoded.
_SIGNS = "/?&=%+:,"


class Answer(NamedTuple):
    """An agent's answer (``value``, from JSON), or the reason why there is none (``trouble``)."""

    value: Any
    trouble: str | None


def add_parser(commands: Any, common: argparse.ArgumentParser) -> None:
    """Add the command."""
    query = commands.add_parser(
        "query",
        parents=[common],
        help="send a request to the query API of this node's agent, or of many agents",
        description="Send a request to a route of the query API (docs/api.md) of this node's agents, or of all named agents at "
        "once. The command waits for a limited time. Exit code 0: all answered, 1: none answered, 3: some did not.",
    )
    query.add_argument(
        "question", metavar="QUESTION", help="a route under /api/v1 with its parameters: 'summary?since=15m&by=op'"
    )
    query.add_argument(
        "agents",
        nargs="*",
        metavar="ADDRESS",
        help="agents (host, host:port, URL), or a Prometheus file_sd target file (.json)",
    )
    query.add_argument("--json", action="store_true", help="print JSON for programs")
    query.set_defaults(command=_query)


def _query(config: Config, arguments: argparse.Namespace) -> int:
    from commwatch.api import client
    from commwatch_agent.runtime import agents

    urls = agents.addresses(arguments.agents, config.expects_tls) or client.local_agents(config.dir)
    if not urls:
        raise UsageError(f"no agent watches {config.dir}; name one, or give its run directory with --dir")
    path = urllib.parse.quote(arguments.question.removeprefix("/").removeprefix("api/v1/"), _SIGNS)
    keys = client.keys_of(config)
    late = Answer(None, f"no answer within {client.TOGETHER_S:.0f} s")
    found = client.together(lambda url: ask(url, path, keys), urls)
    answers = {url: answer or late for url, answer in zip(urls, found, strict=True)}
    silent = {url: answer.trouble for url, answer in answers.items() if answer.trouble is not None}
    values = {url: answer.value for url, answer in answers.items() if url not in silent}
    if arguments.json:
        print(json.dumps({"answers": values, "silent": silent}, indent=2))
    else:
        # Programs read a row from each line.
        width = output_cells() + 2 if sys.stdout.isatty() else None
        for line in table(values, name_agents=len(urls) > 1, width=width):
            print(line)
        for url, why in silent.items():
            complain(f"query: {url}: {why}")
    return 0 if not silent else INCOMPLETE if values else 1


def ask(url: str, path: str, keys: Keys) -> Answer:
    """Return the answer of one agent to a GET of ``path``."""
    from commwatch.api import client

    try:
        value = client.get(url, path, keys)
        if not _flat_enough(value):
            raise ValueError("it is nested too deeply")
        return Answer(value, None)
    except (OSError, ValueError) as error:
        return Answer(None, client.reason(error))


def _flat_enough(value: Any) -> bool:
    """Return whether an answer is flat enough to be printed without exceeding the recursion limit."""
    level = [value]
    for _ in range(_DEEPEST):
        level = [inner for each in level for inner in _inside(each)]
    return not level


def _inside(value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list) else ()


def table(answers: dict[str, Any], name_agents: bool, width: int | None = None) -> list[str]:
    """Return the answers as lines of one table: a row for each item of a list, else one for each agent.

    Args:
        width: most cells of a line, beside which the table continues below; ``None``: a row is one line.
    """
    from commwatch_agent.text.plain_table import columns
    from commwatch_agent.text.terminal_text import clean, cut

    rows = [
        ({"agent": url} if name_agents else {}) | _flat(thing)
        for url, answer in answers.items()
        for thing in _things(answer)
    ]
    head = list(dict.fromkeys(name for row in rows for name in row))
    if not head:
        return ["nothing"] if answers else []
    cells = [tuple(cut(clean(_text(row.get(name))), _MOST_CELLS) for name in head) for row in rows]
    return [
        line.removeprefix("  ")
        for line in columns(
            tuple(map(clean, head)), cells, len(head), width or len(head) * (_MOST_CELLS + 2) + 2, keys=1
        )
    ]


def _things(answer: Any) -> list[Any]:
    if isinstance(answer, list):
        return answer
    lists = [value for value in answer.values() if isinstance(value, list)] if isinstance(answer, dict) else []
    things = [value for value in lists if not value or isinstance(value[0], dict)]
    return things[0] if len(things) == 1 else [answer]


def _flat(thing: Any) -> dict[str, Any]:
    """Return the row of one item by column; the labels that a summary is split ``by`` become columns."""
    if not isinstance(thing, dict):
        return {"answer": thing}
    by = thing.get("by")
    return {**(by if isinstance(by, dict) else {}), **{name: value for name, value in thing.items() if value is not by}}


def _text(value: Any) -> str:
    if value is None:
        return "–"
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
