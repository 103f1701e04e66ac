"""A file that outlives the agent: read at start, replaced atomically. Errors are logged once and not raised."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from commwatch.wire import crossing

log = logging.getLogger("commwatch")
_MOST_BYTES = 64 << 20
_T = TypeVar("_T")


class KeptFile:
    """A file with one text.

    Args:
        path: the file; a damaged one is renamed to ``NAME.damaged``.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._trouble: str | None = None

    def load(self, read: Callable[[str], _T]) -> _T | None:
        """Return ``read`` of the text; ``None`` if there is no file, or it is damaged (``read`` raises ValueError)."""
        try:
            return read(crossing.read(self._path, _MOST_BYTES, crossing.own()).decode())
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            self._put_aside(str(error))
            return None

    def _put_aside(self, why: str) -> None:
        aside = self._path.with_name(f"{self._path.name}.damaged")
        try:
            self._path.replace(aside)
        except OSError as error:
            log.error("alerts: cannot read %s (%s), and cannot rename it: %s", self._path, why, error.strerror)
        else:
            log.error("alerts: cannot read %s (%s); it was renamed to %s, and a new one starts", self._path, why, aside)

    def save(self, text: str) -> bool:
        """Replace the file's text atomically; return whether that worked."""
        hidden = self._path.with_name(f".{self._path.name}.{os.getpid()}")
        try:
            with os.fdopen(crossing.create(hidden, 0o600), "w", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            hidden.replace(self._path)
        except OSError as error:
            self._say(f"cannot write {self._path}: {error.strerror}; its data is lost when the agent ends")
            with contextlib.suppress(OSError):
                hidden.unlink(missing_ok=True)
            return False
        self._say(None)
        return True

    def _say(self, trouble: str | None) -> None:
        if trouble and not self._trouble:
            log.error("alerts: %s", trouble)
        self._trouble = trouble
