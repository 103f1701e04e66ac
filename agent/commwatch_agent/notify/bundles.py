"""Evidence bundles: the state of a job when an alert began to fire, kept for the people who get the alert.

Alerts of one name and job that begin to fire in one round share a bundle: a JSON file in the state directory. A separate
thread writes the bundles, because the Python stacks of a stuck trainer take seconds. Alerts do not wait for them.
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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, is_dataclass, replace
from functools import cache
from pathlib import Path
from socket import gethostname
from typing import BinaryIO

from commwatch.wire import crossing
from commwatch_agent.analysis.queries import QueryService
from commwatch_agent.analysis.verdict import Verdict
from commwatch_agent.history.opening import StoreError
from commwatch_agent.incidents.incident import STANDSTILLS, Incident
from commwatch_agent.incidents.verdict_views import verdicts_of
from commwatch_agent.model.views import RankView
from commwatch_agent.sources import stack_capture
from commwatch_agent.sources.gpus import Gpus
from commwatch_agent.sources.host import HostWatch
from commwatch_agent.sources.nccl import NcclLogs
from commwatch_alerts.model import FIRING, Alert

log = logging.getLogger("commwatch")

#: Largest bundle in bytes, and most bundles on disk.
MOST_BYTES, MOST_KEPT = 1 << 20, 50
#: Most alerts in the queue. Further ones are sent without a link, and tried again at each evaluation while they are fresh.
_MOST_WAITING = 8
#: An alert that has fired for more seconds is not new: the agent delivers it again after a restart.
_FRESH_S = 60.0
#: Most operations per rank, steps, and NCCL messages in a bundle.
_OPERATIONS, _STEPS, _MESSAGES = 32, 100, 50
_WINDOW_S = 3600.0
Sections = Mapping[str, Callable[[], object]]


@dataclass(frozen=True)
class Sources:
    """Sources of the sections of a bundle."""

    agent: QueryService
    #: Returns those in memory.
    incidents: Callable[[], Iterable[Incident]]
    logs: NcclLogs
    gpus: Gpus
    host: HostWatch

    def sections(self, job: str | None) -> Sections:
        """Return the sections about a job (``None``: about the node), the most useful first."""
        agent, taken_at = self.agent, time.time()

        @cache
        def window() -> tuple[int, int]:
            until = agent.now_s(job, taken_at)
            return int((until - _WINDOW_S) * 1e9), int((until + 1) * 1e9)

        ranks, verdicts = cache(lambda: agent.ranks(job)), verdicts_of(self.incidents(), taken_at, job)
        return {
            "ranks": ranks,
            "verdicts": lambda: verdicts,
            "operations": lambda: agent.operations(
                *window(), None, lambda op: True, _OPERATIONS * max(len(ranks()), 1), job=job
            ),
            "steps": lambda: agent.steps(*window(), job, None, _STEPS),
            "nccl_messages": lambda: self.logs.messages(job, None, 0.0, taken_at, _MESSAGES),
            "stacks": lambda: _stacks(verdicts, ranks()) if job is not None else [],
            "gpus": lambda: self._gpus(job),
            "host": lambda: self.host.view(job),
            "topology": lambda: self.logs.topology(job),
        }

    def _gpus(self, job: str | None) -> object:
        with self.agent.live(job) as (jobs, now_ns):
            return self.gpus.view(jobs, now_ns)


def _stacks(verdicts: list[Verdict], ranks: list[RankView]) -> list[stack_capture.Evidence]:
    """Return the stacks of ranks that make no progress anyway."""
    return stack_capture.evidence(
        [verdict for verdict in verdicts if verdict.kind in STANDSTILLS], ranks, gethostname()
    )


def bundle(alert: Alert, sections: Sections, taken_at: float, most_bytes: int = MOST_BYTES) -> str:
    """Return a bundle as JSON; ``left_out`` names each section that failed or did not fit, and why."""
    # null, as in `/api/v1/alerts`, because JSON has neither NaN nor infinity.
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
            left_out[name] = f"too large: {len(text)} bytes"
        else:
            parts[name], room = text, room - len(text)
    parts["left_out"] = _text(left_out)
    return "{" + ",".join(f"{json.dumps(name)}:{text}" for name, text in parts.items()) + "}"


def _text(value: object) -> str:
    return json.dumps(value, default=_plain, allow_nan=False)


def _plain(other: object) -> object:
    return asdict(other) if is_dataclass(other) and not isinstance(other, type) else str(other)


class Bundles:
    """The bundles on disk, and a queue of alerts that wait for their bundle.

    Args:
        directory: holds the bundles; created with the first one.
        url: base URL of the agent, for links.
        sections: returns the sections about a job, see ``Sources.sections``.
        clock: Unix time in s.
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
        with contextlib.suppress(OSError), crossing.folder(directory) as where:
            for name in where.names(".*")[1]:  # left by an agent that was killed
                where.remove(name)

    def want(self, alerts: Sequence[Alert]) -> None:
        """Queue a bundle for each alert that has just begun to fire."""
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
                    return  # there is no room for the others either
                self._known.append(_key(alert))
                self._waiting.append(alert)

    def linked(self, alerts: Sequence[Alert]) -> list[Alert]:
        """Return the alerts, with the URL of their bundle if it is on disk or in the queue."""
        with self._lock:
            return [self._with_address(alert) if _key(alert) in self._known else alert for alert in alerts]

    def _with_address(self, alert: Alert) -> Alert:
        address = f"{self._url}/api/v1/alerts/{alert.id}/evidence"
        return replace(alert, annotations={**alert.annotations, "evidence_url": address})

    def tick(self) -> None:
        """Write the bundles of all alerts in the queue."""
        while self._waiting:
            with self._lock:
                alert = self._waiting.popleft()
            written = False
            try:
                self._keep(_key(alert), bundle(alert, self._sections(alert.labels.get("job_id")), self._clock()))
                written = True
                self._say(None)
            except OSError as error:
                self._say(error)
            finally:  # also after an error that ends this tick: the alert then has no link, and the next tick goes on
                if not written:
                    with self._lock:
                        self._known.remove(_key(alert))
                    with contextlib.suppress(OSError):
                        (self._directory / f".{_key(alert)}").unlink(missing_ok=True)

    def read(self, alert: Alert) -> str | None:
        """Return the bundle of an alert as JSON; ``None`` if there is none, or not yet.

        Raises:
            OSError: the file cannot be read.
        """
        with contextlib.suppress(FileNotFoundError):
            return crossing.read(self._directory / f"{_key(alert)}.json", MOST_BYTES, crossing.own()).decode()
        return None

    def _make_room(self, key: str) -> None:
        """Reserve disk space for a bundle, so that no alert links to a bundle that cannot be written."""
        self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        with self._hidden(key, new=True) as file:
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
    def _hidden(self, key: str, *, new: bool = False) -> Iterator[BinaryIO]:
        """Open the temporary file of an unfinished bundle; delete it on an ``OSError``."""
        path = self._directory / f".{key}"
        try:
            fd = crossing.create(path, 0o600) if new else crossing.open_file(path, crossing.own(), flags=os.O_WRONLY)
            with os.fdopen(fd, "wb") as file:
                yield file
        except OSError:
            path.unlink(missing_ok=True)
            raise

    def _say(self, error: OSError | None) -> None:
        """Log an error once, when it begins; ``None`` ends it."""
        trouble = None if error is None else f"cannot store evidence in {self._directory}: {error.strerror}"
        if trouble and trouble != self._trouble:
            log.warning("alerts: %s", trouble)
        self._trouble = trouble

    def _kept(self) -> list[Path]:
        """Return the paths of the bundles, oldest first."""
        return sorted(self._directory.glob("*.json"), key=lambda path: (os.stat(path).st_mtime_ns, path.name))  # noqa: PTH116


def _key(alert: Alert) -> str:
    """Return the key of the bundle that alerts of one name, job and begin of firing share."""
    about = (alert.name, alert.labels.get("job_id", ""), f"{alert.fired_at or 0:.3f}")
    return hashlib.sha256("\0".join(about).encode()).hexdigest()[:16]
