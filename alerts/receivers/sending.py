"""What all receivers share: what can go wrong, secrets, times, addresses that may be shown."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Protocol
from urllib.parse import urlsplit

from commwatch.alerts.model import Alert
from commwatch.alerts.outbox import Batch, Policy

#: Seconds that one message may take, whatever the receiver does.
LIMIT_S = 10.0
#: Bytes of an answer that are read, and characters of it that are repeated.
MOST_ANSWER, _MOST_SAID = 4096, 200
_MOST_SECRET = 1 << 16


class CannotSend(Exception):
    """A message has not arrived; the text names what is wrong and what to do, and holds no secret.

    Args:
        again: whether to try it again.
        after_s: the receiver asks not to be tried before so many seconds.
    """

    def __init__(self, says: str, *, again: bool = True, after_s: float | None = None) -> None:
        super().__init__(says)
        self.again, self.after_s = again, after_s


class Receiver(Protocol):
    """Somewhere alerts go."""

    @property
    def name(self) -> str:
        """What it is called in metrics and logs."""

    @property
    def policy(self) -> Policy:
        """What it wants to be told, and how often."""

    def send(self, batch: Batch, now_s: float) -> None:
        """Hand a message over; ``now_s`` is Unix time. Raises ``CannotSend``."""


@dataclass(frozen=True)
class Secret:
    """Where a secret stands. It is read each time it is used, so it may change meanwhile, and it is kept nowhere."""

    #: The setting that says so.
    key: str
    file: Path | None = None
    variable: str | None = None

    def read(self, env: Mapping[str, str] = os.environ) -> str:
        """The secret, without white space around it; raises ``CannotSend``."""
        if self.variable is not None:
            where, text = f"{self.key} = {self.variable}", env.get(self.variable, "")
        else:
            assert self.file is not None
            where = f"{self.key} = {self.file}"
            try:
                with open(self.file, "rb") as file:
                    text = file.read(_MOST_SECRET).decode()
            except OSError as error:
                raise CannotSend(f"{where}: {error.strerror}") from None
            except UnicodeDecodeError:
                raise CannotSend(f"{where}: is not text") from None
        text = text.strip()
        if not text or not text.isprintable():  # a line break would end a header
            raise CannotSend(
                f"{where}: {'is more than one line' if text else 'is empty'}; it has to be the secret, alone"
            )
        return text


def shown(url: str) -> str:
    """An address without what may be secret in it: scheme, host and port.

    >>> shown("https://hooks.example.com:8443/services/T0/B0/x?key=y")
    'https://hooks.example.com:8443'
    """
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}"


def said(text: str | bytes, *secrets: str) -> str:
    """The first line of what somebody said, fit for a log: short, printable, without ``secrets``."""
    line = text.decode("utf-8", "replace") if isinstance(text, bytes) else text
    for secret in secrets:
        line = line.replace(secret, "***")
    lines = [part.strip() for part in line.splitlines() if part.strip()]
    return "".join(c if c.isprintable() else "?" for c in lines[0])[:_MOST_SAID] if lines else ""


def labels_of(alert: Alert) -> dict[str, str]:
    """Its labels as Alertmanager keeps them: an empty one is none."""
    return {name: value for name, value in sorted(alert.labels.items()) if value}


def began(alert: Alert) -> float:
    """When it fired, in Unix seconds."""
    return alert.active_at if alert.fired_at is None else alert.fired_at


def rfc3339(at_s: float) -> str:
    """A Unix time in the form that Alertmanager and Go write.

    >>> rfc3339(1700000000.25)
    '2023-11-14T22:13:20.250Z'
    """
    return datetime.fromtimestamp(at_s, timezone.utc).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def fingerprint(labels: Mapping[str, str]) -> str:
    """What tells a set of labels apart, as Alertmanager has it.

    Source: prometheus/common, model/signature.go, ``labelSetToFingerprint``: FNV-1a over names and values, each followed by 0xff.

    >>> fingerprint({})
    'cbf29ce484222325'
    """
    total = 0xCBF29CE484222325
    for name, value in sorted(labels.items()):
        for byte in b"%s\xff%s\xff" % (name.encode("utf-8", "replace"), value.encode("utf-8", "replace")):
            total = (total ^ byte) * 0x100000001B3 & 0xFFFFFFFFFFFFFFFF
    return f"{total:016x}"
