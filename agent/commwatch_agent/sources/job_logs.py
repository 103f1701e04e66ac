"""The logs of one job: followed, counted, and explained."""

from __future__ import annotations

import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Set

from commwatch_collectors.nccl.account import Account
from commwatch_collectors.nccl.checks.evidence import FINISHED, Live
from commwatch_collectors.nccl.checks.failures import open_inits
from commwatch_collectors.nccl.checks.findings import findings
from commwatch_collectors.nccl.follow import Follower
from commwatch_collectors.nccl.lives import Warned
from commwatch_collectors.nccl.views import Finding

#: Seconds without a change of its facts after which an init counts as stuck.
_INIT_S = 60.0
#: Findings that are no faults of communication: how ranks end and errors of GPUs are incidents of other kinds.
_OF_OTHERS = frozenset({"process_failed", "gpu_fault"})
#: Part of the time that may go into looking for findings once a second.
_OF_TIME = 0.02


class JobLogs:
    """The logs of one job."""

    def __init__(
        self,
        job: str,
        owner: int,
        since: float,
        heard: Callable[[str, Warned], None],
        *,
        lock: threading.RLock,
        facts: int,
    ) -> None:
        self._lock, self.owner = lock, owner
        #: Key of the run; empty until one of its ranks is known.
        self.run = ""
        #: The facts for which the account has room.
        self.facts, self.account = facts, Account(facts)
        self.counts: Counter[str] = Counter()
        self._job, self._heard = job, heard
        self.follower = Follower(self._take, since)
        #: There are lines since the topology was last stored; and the Unix time of that.
        self.fresh, self.kept_at = False, 0.0
        self._found: list[Finding] | None = None
        #: The errors among the findings that were looked for last, which findings these were, and when, in monotonic seconds.
        self._errors: list[Finding] = []
        self._errors_of: list[Finding] | None = None
        self._errors_s = 0.0
        #: The monotonic time (s) before which errors are not looked for again while lines come; and whether none came with the last reading.
        self._next_look_s = 0.0
        self._lines, self._is_quiet = 0, False
        self.live = FINISHED
        #: Inits that are not finished, and the Unix time of their last change; ``None`` after new lines.
        self._inits: tuple[int, int, int] | None = None
        self._known_inits, self._inits_at = (0, 0, 0), 0.0

    def look(self, now: float, past: Set[tuple[str, int]]) -> None:
        """Note whether inits go on; ``past``: host and pid of the processes of earlier runs."""
        with self._lock:
            self._lines, self._is_quiet = self.account.n_lines, self._lines == self.account.n_lines
            if self._inits is None:
                self._inits = open_inits(self.account)
            if self._inits != self._known_inits:
                self._known_inits, self._inits_at = self._inits, now
            _, *unfinished = self._inits
            live = Live(any(unfinished) and now - self._inits_at < _INIT_S, past)
            if live != self.live:
                self.live, self._found, self.fresh = live, None, True

    @property
    def is_heard(self) -> bool:
        """Whether there are logs of NCCL, or the output of the job has something of NCCL or PyTorch."""
        account = self.account
        has_logs = any(pattern.output is None for pattern in self.follower.patterns)
        return has_logs or bool(account.lives or account.warnings or account.loose)

    def findings(self) -> list[Finding]:
        """Return the findings; cached until there are new lines, because it takes long."""
        with self._lock:
            if self._found is None:
                self._found = findings(self.account, live=self.live)
            return self._found

    def of_communication(self) -> list[Finding]:
        """Return the findings about communication."""
        return [finding for finding in self.findings() if finding.name not in _OF_OTHERS]

    def errors(self, now_s: float) -> list[Finding]:
        """Return the errors among the findings about communication, as of now; where it takes long to look for them and lines come, as of a while ago.

        Args:
            now_s: monotonic seconds.
        """
        with self._lock:
            if self._found is None and now_s < self._next_look_s and not self._is_quiet:
                return self._errors
            began_s, found = time.thread_time(), self.findings()
            if found is not self._errors_of:
                self._errors = [finding for finding in self.of_communication() if finding.severity == "error"]
                self._next_look_s = now_s + (time.thread_time() - began_s) / _OF_TIME
                self._errors_s, self._errors_of = now_s, found
            return self._errors

    def errors_since(self) -> float:
        """Return when the errors of all lines so far were looked for, in monotonic seconds; infinite: they have not been."""
        found = self._found  # without the lock, which a thread may hold that waits for the jobs
        return self._errors_s if found is not None and found is self._errors_of else math.inf

    def _take(self, texts: Iterable[tuple[int, str]], path: str) -> None:
        with self._lock:
            before = self.account.n_lines
            self.account.add_lines(texts, path, self._count)
            if self.account.n_lines != before:
                self._found, self._inits, self.fresh = None, None, True

    def _count(self, warned: Warned) -> None:
        self.counts[warned.kind] += 1
        self._heard(self._job, warned)
