"""The agent's log on standard error: the one place that formats its lines, as text or as JSON.

The level of a line is about the agent itself: ``WARNING`` and ``ERROR`` are its own trouble. Jobs, incidents and deliveries are ``INFO``,
whatever the severity of an incident.
"""

from __future__ import annotations

import json
import logging
import sys
import threading
import time
import traceback
from pathlib import Path
from types import TracebackType
from typing import Any

from commwatch import __version__
from commwatch_agent.config import Config
from commwatch_agent.config_checks import LOG_JSON
from commwatch_agent.text.terminal_text import OneLine

log = logging.getLogger("commwatch")
#: Lines among those of a command, such as ``commwatch run``.
PLAIN = "commwatch: %(message)s"
#: Places of a traceback in one line.
_PLACES = 4


class _Text(OneLine):
    """Time (UTC), level and message in one line."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(message)s")

    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:  # noqa: N802 - logging's name
        """Return when the line was logged."""
        return _time_of(record)


class _Json(logging.Formatter):
    """One JSON object in each line, with the fields that ``about`` has given; a traceback is one of its fields."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the object; all its characters are ASCII."""
        entry = {
            "time": _time_of(record),
            "level": record.levelname,
            "msg": record.getMessage(),
            "version": __version__,
        }
        entry |= getattr(record, "about", {})
        if record.exc_info:
            entry["traceback"] = self.formatException(record.exc_info)
        return json.dumps(entry)


def _time_of(record: logging.LogRecord) -> str:
    return f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(record.created))}.{int(record.msecs):03d}Z"


def about(event: str, **fields: object) -> dict[str, Any]:
    """Return keyword arguments for a call of a logger: the kind of event and its fields, which only JSON shows; empty ones are left out."""
    given = {name: value for name, value in fields.items() if value not in ("", None)}
    return {"extra": {"about": {"event": event, **given}}}


def fault_of(error: BaseException) -> str:
    """Return an unexpected error in one line, with the innermost places of its traceback, such as ``KeyError: 'x' at b (b.py:5), called at a (a.py:3)``."""
    frames = traceback.extract_tb(error.__traceback__)[: -_PLACES - 1 : -1]
    places = ", called at ".join(f"{each.name} ({Path(each.filename).name}:{each.lineno})" for each in frames)
    return f"{type(error).__name__}: {error}{f' at {places}' if places else ''}"


def set_up(config: Config, *, plain: bool = False) -> None:
    """Log as the settings say, from now on; also warnings of Python, and exceptions that nothing catches.

    Args:
        plain: the lines are among those of a command, in its form.
    """
    of_agent: logging.Formatter = _Json() if config.log_format == LOG_JSON else _Text()
    use(OneLine(PLAIN) if plain else of_agent, config.log_level.upper())


def use(formatter: logging.Formatter, level: str) -> None:
    """Log with a formatter, from a level on."""
    handler = logging.StreamHandler()
    handler.setFormatter(formatter)
    logging.basicConfig(handlers=[handler], level=level, force=True)
    logging.captureWarnings(capture=True)
    sys.excepthook = _log_uncaught
    threading.excepthook = _log_uncaught_in_thread


def in_use() -> tuple[logging.Formatter, str]:
    """Return the formatter and level in use, for another process of the agent."""
    root = logging.getLogger()
    formatters = [each.formatter for each in root.handlers if isinstance(each.formatter, (OneLine, _Json))]
    return (formatters or [OneLine(PLAIN)])[0], logging.getLevelName(root.level)


def _log_uncaught(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    log.critical("unexpected error", exc_info=(kind, error, trace))


def _log_uncaught_in_thread(args: threading.ExceptHookArgs) -> None:
    if args.exc_value is not None and not isinstance(args.exc_value, SystemExit):
        name = args.thread.name if args.thread else "?"
        log.critical("%s: unexpected error", name, exc_info=(args.exc_type, args.exc_value, args.exc_traceback))
