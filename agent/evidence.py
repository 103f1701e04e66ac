"""What was to be seen when an alert began to fire, kept for whoever is told of it.

Alerts of one name and job that begin to fire in the same round share a bundle: one JSON file in the state directory.
Taken in a thread of its own, for the Python stacks of a stuck trainer take seconds; an alert waits for none of it.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import sqlite3
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, is_dataclass, replace
from pathlib import Path
from socket import gethostname
from typing import Any

from commwatch import trainers
from commwatch.alerts.model import FIRING, Alert
from commwatch.answers import Agent
from commwatch.gpus import Gpus
from commwatch.host import HostWatch
from commwatch.nccl import NcclLogs
from commwatch.sight import conclude
from commwatch.store import StoreError

log = logging.getLogger("commwatch")

#: Of one bundle, and of bundles.
MOST_BYTES, MOST_KEPT = 1 << 20, 50
#: Bundles that may wait to be taken; of more alerts at once there is none.
_MOST_WAITING = 8
#: An alert that has fired for longer is not new: it is told again after a restart of the agent.
_FRESH_S = 60.0
#: Operations for each rank, steps, and messages of NCCL's.
_OPERATIONS, _STEPS, _MESSAGES = 32, 100, 50
_WINDOW_S = 900.0
Sections = Mapping[str, Callable[[], object]]


@dataclass(frozen=True)
class Sources:
    """What a bundle is made of."""

    agent: Agent
    logs: NcclLogs
    gpus: Gpus
    host: HostWatch

    def sections(self, job: str | None) -> Sections:
        """What is told of a job (``None``: of the node), the most telling first."""
        agent = self.agent
        until = time.time()
        since_ns, until_ns = int((until - _WINDOW_S) * 1e9), int((until + 1) * 1e9)
        ranks = agent.ranks(job)
        return {
            "ranks": lambda: ranks,
            "verdicts": lambda: self._verdicts(job),
            "operations": lambda: agent.operations(
                since_ns, until_ns, None, lambda op: job in (None, op.job_id), _OPERATIONS * max(len(ranks), 1)
            ),
            "steps": lambda: agent.steps(since_ns, until_ns, job, None, _STEPS),
            "nccl_messages": lambda: self.logs.messages(job, None, 0.0, until, _MESSAGES),
            "stacks": lambda: trainers.evidence(self._verdicts(job), ranks, gethostname()),
            "gpus": lambda: self._gpus(job),
            "host": lambda: self.host.view(job),
            "topology": lambda: self.logs.topology(job),
        }

    def _verdicts(self, job: str | None) -> list[Any]:
        with self.agent.live(job) as (jobs, now_ns):
            return conclude(jobs, now_ns)

    def _gpus(self, job: str | None) -> object:
        with self.agent.live(job) as (jobs, now_ns):
            return self.gpus.view(jobs, now_ns)


def bundle(alert: Alert, sections: Sections, taken_at: float, most_bytes: int = MOST_BYTES) -> str:
    """The JSON text of a bundle; what cannot be had, or has no room, is named in ``left_out`` with the reason."""
    parts = {"alert": _text(alert), "id": _text(alert.id), "taken_at": _text(taken_at)}
    left_out: dict[str, str] = {}
    room = most_bytes - sum(map(len, parts.values()))
    for name, section in sections.items():
        try:
            text = _text(section())
        except (OSError, ValueError, StoreError, sqlite3.Error) as error:
            left_out[name] = str(error)
            continue
        if len(text) > room:
            left_out[name] = f"no room: {len(text)} bytes"
        else:
            parts[name], room = text, room - len(text)
    parts["left_out"] = _text(left_out)
    return "{" + ",".join(f"{json.dumps(name)}:{text}" for name, text in parts.items()) + "}"


def _text(value: object) -> str:
    return json.dumps(value, default=lambda other: asdict(other) if is_dataclass(other) else str(other))  # type: ignore[arg-type]


class Evidence:
    """Bundles on disk, and alerts that wait for theirs.

    Args:
        directory: where bundles lie; made when the first is kept.
        url: of the agent, as people reach it.
        sections: of a job, as ``Sources.sections``.
        clock: Unix time.
    """

    def __init__(
        self,
        directory: Path,
        url: str,
        sections: Callable[[str | None], Sections],
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._directory, self._url, self._sections, self._clock = directory, url, sections, clock
        self._waiting: deque[Alert] = deque()
        self._known: deque[str] = deque((path.stem for path in self._kept()), maxlen=2 * MOST_KEPT)
        self._lock = threading.Lock()

    def want(self, alerts: Sequence[Alert]) -> None:
        """Have a bundle taken of those that have just begun to fire."""
        now = self._clock()
        with self._lock:
            for alert in alerts:
                fresh = alert.state == FIRING and alert.fired_at is not None and now - alert.fired_at < _FRESH_S
                if fresh and _key(alert) not in self._known and len(self._waiting) < _MOST_WAITING:
                    self._known.append(_key(alert))
                    self._waiting.append(alert)

    def linked(self, alerts: Sequence[Alert]) -> list[Alert]:
        """The alerts, with the address of their bundle where there is one, or will be in a moment."""
        with self._lock:
            return [self._with_address(alert) if _key(alert) in self._known else alert for alert in alerts]

    def _with_address(self, alert: Alert) -> Alert:
        address = f"{self._url}/api/v1/alerts/{alert.id}/evidence"
        return replace(alert, annotations={**alert.annotations, "evidence_url": address})

    def tick(self) -> None:
        """Take the bundles that are waited for."""
        while self._waiting:
            alert = self._waiting[0]
            try:
                self._keep(_key(alert), bundle(alert, self._sections(alert.labels.get("job_id")), self._clock()))
            except (OSError, StoreError, sqlite3.Error) as error:
                log.warning("no evidence of %s is kept: %s", alert.name, error)
                with self._lock:
                    self._known.remove(_key(alert))
            with self._lock:
                self._waiting.popleft()

    def read(self, alert: Alert) -> str | None:
        """The bundle of an alert; ``None``: there is none, or not yet.

        Raises:
            OSError: it cannot be read.
        """
        with contextlib.suppress(FileNotFoundError):
            return (self._directory / f"{_key(alert)}.json").read_text(encoding="utf-8")
        return None

    def _keep(self, key: str, text: str) -> None:
        self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        hidden = self._directory / f".{key}"
        hidden.touch(mode=0o600)
        hidden.write_text(text, encoding="utf-8")
        hidden.rename(self._directory / f"{key}.json")
        kept = self._kept()
        for path in kept[: max(0, len(kept) - MOST_KEPT)]:
            path.unlink(missing_ok=True)
            with self._lock, contextlib.suppress(ValueError):
                self._known.remove(path.stem)

    def _kept(self) -> list[Path]:
        """Oldest first."""
        return sorted(self._directory.glob("*.json"), key=lambda path: (os.stat(path).st_mtime_ns, path.name))  # noqa: PTH116


def _key(alert: Alert) -> str:
    """Names the bundle that an alert shares with all of its name and job that began to fire with it."""
    about = (alert.name, alert.labels.get("job_id", ""), f"{alert.fired_at or 0:.3f}")
    return hashlib.sha256("\0".join(about).encode()).hexdigest()[:16]
