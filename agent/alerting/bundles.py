"""What was to be seen when an alert began to fire, kept for whoever is told of it.

Alerts of one name and job that begin to fire in the same round share a bundle: one JSON file in the state directory.
Taken in a thread of its own, for the Python stacks of a stuck trainer take seconds; an alert waits for none of it.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import math
import os
import sqlite3
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, is_dataclass, replace
from functools import cache
from pathlib import Path
from socket import gethostname
from typing import BinaryIO

from commwatch.alerts.model import FIRING, Alert
from commwatch.analysis.live_ranks import conclude
from commwatch.analysis.queries import QueryService
from commwatch.analysis.verdicts import Verdict
from commwatch.core.views import RankView
from commwatch.history.opening import StoreError
from commwatch.watchers import stack_capture
from commwatch.watchers.gpus import Gpus
from commwatch.watchers.host import HostWatch
from commwatch.watchers.nccl import NcclLogs

log = logging.getLogger("commwatch")

#: Of one bundle, and of bundles.
MOST_BYTES, MOST_KEPT = 1 << 20, 50
#: Bundles that may wait to be taken; of more alerts at once there is none.
_MOST_WAITING = 8
#: An alert that has fired for longer is not new: it is told again after a restart of the agent.
_FRESH_S = 60.0
#: Operations for each rank, steps, and messages of NCCL's.
_OPERATIONS, _STEPS, _MESSAGES = 32, 100, 50
_WINDOW_S = 3600.0
#: Verdicts on ranks that stand still anyway: nobody else is asked for stacks.
_STUCK = frozenset({"hang", "stalled", "desync"})
Sections = Mapping[str, Callable[[], object]]


@dataclass(frozen=True)
class Sources:
    """What a bundle is made of."""

    agent: QueryService
    logs: NcclLogs
    gpus: Gpus
    host: HostWatch

    def sections(self, job: str | None) -> Sections:
        """What is told of a job (``None``: of the node), the most telling first."""
        agent = self.agent
        until = time.time()
        since_ns, until_ns = int((until - _WINDOW_S) * 1e9), int((until + 1) * 1e9)
        ranks, verdicts = cache(lambda: agent.ranks(job)), cache(lambda: self._verdicts(job))
        return {
            "ranks": ranks,
            "verdicts": verdicts,
            "operations": lambda: agent.operations(
                since_ns, until_ns, None, lambda op: True, _OPERATIONS * max(len(ranks()), 1), job
            ),
            "steps": lambda: agent.steps(since_ns, until_ns, job, None, _STEPS),
            "nccl_messages": lambda: self.logs.messages(job, None, 0.0, until, _MESSAGES),
            "stacks": lambda: _stacks(verdicts(), ranks()) if job is not None else [],
            "gpus": lambda: self._gpus(job),
            "host": lambda: self.host.view(job),
            "topology": lambda: self.logs.topology(job),
        }

    def _verdicts(self, job: str | None) -> list[Verdict]:
        with self.agent.live(job) as (jobs, now_ns):
            return conclude(jobs, now_ns)

    def _gpus(self, job: str | None) -> object:
        with self.agent.live(job) as (jobs, now_ns):
            return self.gpus.view(jobs, now_ns)


def _stacks(verdicts: list[Verdict], ranks: list[RankView]) -> list[stack_capture.Evidence]:
    return stack_capture.evidence([verdict for verdict in verdicts if verdict.kind in _STUCK], ranks, gethostname())


def bundle(alert: Alert, sections: Sections, taken_at: float, most_bytes: int = MOST_BYTES) -> str:
    """The JSON text of a bundle; what cannot be had, or has no room, is named in ``left_out`` with the reason."""
    # JSON has neither NaN nor infinity: as `/api/v1/alerts` has it.
    about = {**asdict(alert), "value": alert.value if math.isfinite(alert.value) else None}
    parts = {"alert": _text(about), "id": _text(alert.id), "taken_at": _text(taken_at)}
    left_out: dict[str, str] = {}
    room = most_bytes - sum(map(len, parts.values()))
    for name, section in sections.items():
        try:
            text = _text(section())
        except (OSError, ValueError, RuntimeError, StoreError, sqlite3.Error) as error:  # RuntimeError: no more threads
            left_out[name] = str(error)
            continue
        if len(text) > room:
            left_out[name] = f"no room: {len(text)} bytes"
        else:
            parts[name], room = text, room - len(text)
    parts["left_out"] = _text(left_out)
    return "{" + ",".join(f"{json.dumps(name)}:{text}" for name, text in parts.items()) + "}"


def _text(value: object) -> str:
    return json.dumps(value, default=_plain, allow_nan=False)


def _plain(other: object) -> object:
    return asdict(other) if is_dataclass(other) and not isinstance(other, type) else str(other)


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
        self._trouble: str | None = None
        with contextlib.suppress(OSError):
            for path in directory.glob(".*"):  # of an agent that was killed
                path.unlink()

    def want(self, alerts: Sequence[Alert]) -> None:
        """Have a bundle taken of those that have just begun to fire."""
        now = self._clock()
        with self._lock:
            for alert in alerts:
                fresh = alert.state == FIRING and alert.fired_at is not None and now - alert.fired_at < _FRESH_S
                if not fresh or _key(alert) in self._known or len(self._waiting) >= _MOST_WAITING:
                    continue
                try:
                    self._make_room(_key(alert))
                except OSError as error:
                    self._say(error)
                    return  # nor is there room for the others
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
            except OSError as error:
                self._say(error)
                with self._lock:
                    self._known.remove(_key(alert))
            else:
                self._say(None)
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

    def _make_room(self, key: str) -> None:
        """Reserve the place of a bundle, so that nobody is given a link to one that cannot be kept."""
        self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        with self._hidden(key, os.O_CREAT) as file:
            os.posix_fallocate(file.fileno(), 0, MOST_BYTES)

    def _keep(self, key: str, text: str) -> None:
        with self._hidden(key) as file:
            file.write(text.encode())
            file.truncate()
        (self._directory / f".{key}").rename(self._directory / f"{key}.json")
        kept = self._kept()
        for path in kept[: max(0, len(kept) - MOST_KEPT)]:
            path.unlink(missing_ok=True)
            with self._lock, contextlib.suppress(ValueError):
                self._known.remove(path.stem)

    @contextlib.contextmanager
    def _hidden(self, key: str, flags: int = 0) -> Iterator[BinaryIO]:
        """The file that a bundle is until it is whole; gone if something goes wrong."""
        path = self._directory / f".{key}"
        try:
            with os.fdopen(os.open(path, os.O_WRONLY | os.O_CLOEXEC | flags, 0o600), "wb") as file:
                yield file
        except OSError:
            path.unlink(missing_ok=True)
            raise

    def _say(self, error: OSError | None) -> None:
        """What goes wrong is said when it begins to."""
        trouble = None if error is None else f"no evidence is kept in {self._directory}: {error.strerror}"
        if trouble and trouble != self._trouble:
            log.warning("alerts: %s", trouble)
        self._trouble = trouble

    def _kept(self) -> list[Path]:
        """Oldest first."""
        return sorted(self._directory.glob("*.json"), key=lambda path: (os.stat(path).st_mtime_ns, path.name))  # noqa: PTH116


def _key(alert: Alert) -> str:
    """Names the bundle that an alert shares with all of its name and job that began to fire with it."""
    about = (alert.name, alert.labels.get("job_id", ""), f"{alert.fired_at or 0:.3f}")
    return hashlib.sha256("\0".join(about).encode()).hexdigest()[:16]
