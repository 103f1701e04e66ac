"""Shared parts of the receivers: their protocol, errors, secrets, time formats, URLs without secrets."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Protocol
from urllib.parse import urlsplit

from commwatch.wire import crossing
from commwatch_alerts.model import Alert
from commwatch_alerts.outbox import Batch, Policy

#: Time limit for one message, in seconds.
LIMIT_S = 10.0
#: Most bytes of an answer that are read, and most characters of it that are repeated in an error.
MOST_ANSWER, _MOST_SAID = 4096, 200
_MOST_SECRET = 1 << 16


class CannotSend(Exception):
    """A message was not delivered; the text gives the reason and what to do, and has no secrets.

    Args:
        again: whether to try again.
        after_s: seconds to wait before the next try, as the receiver requested; ``None``: not given.
    """

    def __init__(self, says: str, *, again: bool = True, after_s: float | None = None) -> None:
        super().__init__(says)
        self.again, self.after_s = again, after_s


class Receiver(Protocol):
    """A destination of alerts."""

    @property
    def name(self) -> str:
        """The name in metrics and logs."""

    @property
    def policy(self) -> Policy:
        """Which alerts to send, and how often."""

    def send(self, batch: Batch, now_s: float) -> None:
        """Send a message at the Unix time ``now_s``; raise CannotSend."""


@dataclass(frozen=True)
class Secret:
    """A file or environment variable with a secret. It is read at each use, so it may change, and is not stored."""

    #: The setting that names the place.
    key: str
    file: Path | None = None
    variable: str | None = None

    def read(self, env: Mapping[str, str] = os.environ) -> str:
        """Return the secret, stripped of white space; raise CannotSend if it is missing or not one line."""
        if self.variable is not None:
            where, text = f"{self.key} = {self.variable}", env.get(self.variable, "")
        else:
            assert self.file is not None
            where = f"{self.key} = {self.file}"
            try:
                text = crossing.read(self.file, _MOST_SECRET, crossing.operator()).decode()
            except OSError as error:
                raise CannotSend(f"{where}: {error.strerror}") from None
            except UnicodeDecodeError:
                raise CannotSend(f"{where}: is not text") from None
        text = text.strip()
        if not text or not text.isprintable():  # a line break would end a header
            raise CannotSend(
                f"{where}: {'is more than one line' if text else 'is empty'}; it must contain only the secret"
            )
        return text


def shown(url: str) -> str:
    """Return a URL without the parts that may be secret: scheme, host and port.

    >>> shown("https://hooks.example.com:8443/services/T0/B0/x?key=y")
    'https://hooks.example.com:8443'
    """
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}"


def said(text: str | bytes, *secrets: str) -> str:
    """Return the first line of a text from outside, fit for a log: short, printable, without ``secrets``."""
    line = text.decode("utf-8", "replace") if isinstance(text, bytes) else text
    for secret in secrets:
        line = line.replace(secret, "***")
    lines = [part.strip() for part in line.splitlines() if part.strip()]
    return "".join(c if c.isprintable() else "?" for c in lines[0])[:_MOST_SAID] if lines else ""


def labels_of(alert: Alert) -> dict[str, str]:
    """Return the alert's labels without empty ones, sorted by name, as Alertmanager stores them."""
    return {name: value for name, value in sorted(alert.labels.items()) if value}


def began(alert: Alert) -> float:
    """Return when the alert fired, or became active if it has not fired, in Unix seconds."""
    return alert.active_at if alert.fired_at is None else alert.fired_at


def rfc3339(at_s: float) -> str:
    """Return a Unix time in the form of Alertmanager and Go.

    >>> rfc3339(1700000000.25)
    '2023-11-14T22:13:20.250Z'
    """
    return datetime.fromtimestamp(at_s, timezone.utc).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def fingerprint(labels: Mapping[str, str]) -> str:
    """Return Alertmanager's fingerprint of a set of labels.

    Source: prometheus/common, model/signature.go, ``labelSetToFingerprint``: FNV-1a over names and values, each followed by 0xff.

    >>> fingerprint({})
    'cbf29ce484222325'
    """
    total = 0xCBF29CE484222325
    for name, value in sorted(labels.items()):
        for byte in b"%s\xff%s\xff" % (name.encode("utf-8", "replace"), value.encode("utf-8", "replace")):
            total = (total ^ byte) * 0x100000001B3 & 0xFFFFFFFFFFFFFFFF
    return f"{total:016x}"
