"""``commwatch top``: the live view in the terminal, or one frame of it for logs."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from commwatch.wire.errors import CommwatchError, UsageError
from commwatch_agent.config import Config
from commwatch_agent.text.terminal_text import output_cells, terminal

if TYPE_CHECKING:
    from rich.text import Text

    from commwatch_agent.commands.top_answers import Answers, Asker

_LEAST_S, _MOST_S = 0.2, 3600.0


def add_parser(commands: Any, common: argparse.ArgumentParser) -> None:
    """Add the command."""
    top = commands.add_parser(
        "top",
        parents=[common],
        help="show a running job in the terminal",
        description="Show a running job of this node: shares, ranks, operations, and what is wrong. Press q to quit. "
        "With --once or --json, exit code 1 if the agent does not answer, 2 if there is no agent or no such job.",
    )
    top.add_argument("--address", metavar="URL", help="agent (host, host:port, URL; default: that of --dir)")
    top.add_argument("--job", help="job id (default: the latest running job)")
    top.add_argument("--interval", type=float, default=1.0, metavar="S", help="seconds between updates (default: 1)")
    top.add_argument("--once", action="store_true", help="print one frame without terminal control codes, and exit")
    top.add_argument("--json", action="store_true", help="print one frame as JSON, and exit")
    top.set_defaults(command=_top)


def _top(config: Config, arguments: argparse.Namespace) -> int:
    from commwatch.api.client import keys_of
    from commwatch_agent.commands.top_answers import Asker, NoSuchJob, as_json

    if not _LEAST_S <= arguments.interval <= _MOST_S:
        raise UsageError(f"--interval {arguments.interval:g}: needs {_LEAST_S:g} to {_MOST_S:g} seconds")
    live = not (arguments.once or arguments.json)
    if live and (not sys.stdout.isatty() or os.environ.get("TERM", "dumb") == "dumb"):
        raise UsageError("standard output is not a terminal, or TERM is dumb; use --once or --json for one frame")
    no_agent = f"no agent watches {config.dir}; start a job with commwatch run, or name an agent with --address"
    urls = _urls(config, arguments.address)
    ask = Asker(urls, no_agent, arguments.job, keys=keys_of(config))
    if live:
        return _live(ask, arguments.interval)
    if not urls():
        raise UsageError(no_agent)
    answers = ask()
    if isinstance(answers, NoSuchJob):
        raise UsageError(answers)
    if isinstance(answers, str):
        raise CommwatchError(answers)
    if arguments.json:
        print(as_json(answers))
    else:
        print(_once(answers), file=terminal(sys.stdout))
    return 0


def _urls(config: Config, address: str | None) -> Callable[[], list[str]]:
    from commwatch.api import client
    from commwatch_agent.runtime import agents

    if address is None:
        return lambda: client.local_agents(config.dir)
    named = agents.addresses([address], config.expects_tls)
    return lambda: named


def _once(answers: Answers) -> str:
    from commwatch_agent.commands.top import Seen, frame

    cells = output_cells()
    return "\n".join(_texts(frame(Seen(answers, 0.0, None), cells), sys.stdout.isatty()))


def _live(ask: Asker, interval_s: float) -> int:
    from commwatch_agent.commands.terminal import watch
    from commwatch_agent.commands.top import Seen, frame

    def draw(answers: Answers | None, age_s: float, trouble: str | None, size: os.terminal_size) -> list[str]:
        # Some terminals report a size of 0.
        return _texts(frame(Seen(answers, age_s, trouble), size.columns or 80, size.lines or 24), True)

    keys = sys.stdin.fileno() if sys.stdin is not None and sys.stdin.isatty() else None
    watch(ask, draw, interval_s, keys=keys, out=sys.stdout.fileno(), encoding=sys.stdout.encoding)
    return 0


def _texts(lines: list[Text], terminal: bool) -> list[str]:
    """Return lines as text: in colour if wanted (https://no-color.org), in ASCII if the output has no UTF encoding."""
    from commwatch_agent.text.text_table import ascii_signs, coloured

    styled = terminal and not os.environ.get("NO_COLOR")
    texts = coloured(lines) if styled else [line.plain.rstrip() for line in lines]
    return texts if sys.stdout.encoding.lower().startswith("utf") else [ascii_signs(text) for text in texts]
