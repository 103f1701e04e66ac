"""The NCCL logs of the known jobs: followed, joined with their process groups, counted."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import stat
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Set
from dataclasses import replace
from pathlib import Path
from typing import Any

from commwatch.wire import crossing
from commwatch_agent.analysis.live_ranks import run_key
from commwatch_agent.ingest.jobs import JobTable
from commwatch_agent.model.cells import GroupInfo
from commwatch_agent.model.nccl_views import NcclMessage, Topology
from commwatch_agent.model.shares import Portions, admitted
from commwatch_agent.sources.job_logs import JobLogs
from commwatch_agent.sources.log_requests import LogRequest, requests
from commwatch_agent.sources.named_logs import named_by_ranks
from commwatch_agent.sources.nccl_groups import groups_of, matching, past, ranks_of
from commwatch_collectors.nccl.account import Account
from commwatch_collectors.nccl.classes import CLASSES, OTHER
from commwatch_collectors.nccl.communicators import Communicator, communicators
from commwatch_collectors.nccl.follow import TICK_BYTES
from commwatch_collectors.nccl.labels import labels
from commwatch_collectors.nccl.lives import Warned
from commwatch_collectors.nccl.matching import LogPattern
from commwatch_collectors.nccl.topology import choices, hosts, view
from commwatch_collectors.nccl.views import Finding
from commwatch_collectors.registry import Reading

log = logging.getLogger("commwatch")
COLLECTOR = "nccl_log"
#: Jobs whose logs are followed at a time.
MOST_JOBS = 32
#: Distinct facts kept per job, the least that a job has room for, and what all jobs share beyond that. Messages kept of all jobs.
_MOST_FACTS, _LEAST_FACTS, _ALL_FACTS = 50_000, 2_000, 100_000
_MOST_MESSAGES = 2_000
#: Ticks of which the times are kept.
_MOST_TICKS = 64
#: Files that are open at a time.
_ALL_FILES = 1024
#: Most of the time that may go into looking for requests, of which any number may lie in the folder, if one look takes so many seconds.
_OF_TIME, _QUICK_S = 0.02, 0.01
#: Files last written so many seconds before a job began are of earlier jobs; file server clocks differ by less.
_SLACK_S = 60.0
#: Seconds between two writes of a job's topology to disk.
_KEEP_S = 30.0
#: Seconds without a check of the logs after which the collector is down.
_STUCK_S = 30.0


class NcclLogs:
    """All NCCL logs that the agent follows. One thread calls ``tick``; any thread may call the other methods.

    Args:
        run_dir: run directory, where requests are written.
        lock: guards the aggregate.
        clock: Unix time.
        keep: stores the topology of a run with the run's key, for when it has ended; may raise ``OSError``.
    """

    def __init__(
        self,
        run_dir: Path,
        aggregate: JobTable,
        lock: threading.RLock,
        clock: Callable[[], float] = time.time,
        keep: Callable[[Topology, str], None] = lambda topology, run: None,
    ) -> None:
        self._run_dir, self._aggregate, self._jobs_lock, self._clock, self._keep = (
            run_dir,
            aggregate,
            lock,
            clock,
            keep,
        )
        self._lock = threading.RLock()
        self._jobs: dict[str, JobLogs] = {}
        self._messages: deque[NcclMessage] = deque(maxlen=_MOST_MESSAGES)
        self._looked_at = clock()
        #: Of the latest ticks that left nothing to be read: their begins and ends, in monotonic seconds.
        self._read: deque[tuple[float, float]] = deque(maxlen=_MOST_TICKS)
        self._warned: set[str] = set()
        self._facts = Portions(_ALL_FACTS, _MOST_FACTS, _LEAST_FACTS)
        #: The requests found last, and the monotonic time (s) before which there is no other look.
        self._requests: list[tuple[LogRequest, int]] = []
        self._next_look_s = 0.0

    def tick(self) -> int:
        """Find new logs and read what was added; return the bytes read."""
        began_s, is_complete = time.monotonic(), True
        wanted = self._wanted()
        with self._jobs_lock:
            runs = {job.id: run_key(job) for job in self._aggregate.jobs.values()}
        self._part(runs)
        self._begin(wanted)
        for job, known in self._jobs.items():
            known.run = runs.get(job, known.run)
        read = 0
        for job, (patterns, _) in wanted.items():
            logs = self._jobs.get(job)
            if logs is None:
                continue
            logs.follower.share(len(self._jobs), _ALL_FILES)
            if patterns:
                logs.follower.patterns = dict.fromkeys(patterns)
            added = logs.follower.tick()  # without the lock: a file server may hang, answers must not
            read, is_complete = read + added, is_complete and added < TICK_BYTES
            logs.look(self._clock(), self._past(job))
            for path, why in logs.follower.troubles.items():
                self._warn(path, why)
        now = self._clock()
        self._keep_fresh(lambda job, logs: job not in wanted or now - logs.kept_at > _KEEP_S)
        self._drop([job for job in self._jobs if job not in wanted])
        self._looked_at = self._clock()
        if is_complete:
            self._read.append((began_s, time.monotonic()))
        return read

    def read_since(self, since_s: float) -> float:
        """Return when all was read that the logs had at some time, and the errors in the logs of jobs that have ended were looked for.

        Both times are in monotonic seconds; infinite: it has not been read, or not looked for.
        """
        read_s = next((ended_s for began_s, ended_s in list(self._read) if began_s >= since_s), math.inf)
        if read_s == math.inf:
            return read_s
        with self._jobs_lock:
            live = {job.id for job in self._aggregate.jobs.values() if any(r.alive for r in job.rank_totals.values())}
        return max([read_s, *(logs.errors_since() for job, logs in dict(self._jobs).items() if job not in live)])

    def _part(self, runs: Mapping[str, str]) -> None:
        """Part with the logs of runs that have ended and whose name another one has; ``runs``: keys of the latest ones by name."""
        gone = {job for job, logs in self._jobs.items() if logs.run and runs.get(job) not in (None, "", logs.run)}
        self._keep_fresh(lambda job, logs: job in gone)
        self._drop(gone)

    def _drop(self, jobs: Iterable[str]) -> None:
        """Follow the logs of these jobs no longer."""
        with self._lock:
            for job in jobs:
                logs = self._jobs.pop(job)
                logs.follower.close()
                self._facts.give(logs.facts)

    def _begin(self, wanted: dict[str, tuple[list[LogPattern], float]]) -> None:
        """Begin to follow the logs of new jobs, those of different users in turn, as long as there is room."""
        new = dict[int, list[str]]()
        for job, (patterns, _) in wanted.items():
            if job not in self._jobs and patterns:
                new.setdefault(patterns[0].uid, []).append(job)
        begun = admitted(MOST_JOBS, (logs.owner for logs in self._jobs.values()), new)
        if len(begun) < sum(map(len, new.values())):
            self._warn("of further jobs", f"those of {MOST_JOBS} jobs are followed at a time")
        for owner, job in begun:
            since, facts = wanted[job][1] - _SLACK_S, self._facts.take()
            with self._lock:
                self._jobs[job] = JobLogs(job, owner, since, self._hear, lock=self._lock, facts=facts)

    def _warn(self, path: str, why: str) -> None:
        if path not in self._warned:
            self._warned.add(path)
            log.warning("cannot read the log %s: %s", path, why)

    def close(self) -> None:
        """Store what is new, and close all files."""
        self._keep_fresh(lambda job, logs: True)
        with self._lock:
            for logs in self._jobs.values():
                logs.follower.close()

    def _keep_fresh(self, due: Callable[[str, JobLogs], bool]) -> None:
        """Store the topology of the jobs that have new lines and are due."""
        with self._lock:
            new = [
                (logs, self._topology(job, logs))
                for job, logs in self._jobs.items()
                if logs.fresh and logs.is_heard and due(job, logs)
            ]
            for logs, _ in new:
                logs.fresh, logs.kept_at = False, self._clock()
        for logs, topology in new:
            try:
                self._keep(topology, logs.run)
            except OSError as error:
                logs.fresh = True  # to try again
                if str(error) not in self._warned:
                    self._warned.add(str(error))
                    log.warning("cannot store the findings of NCCL's logs: %s", error)

    def _wanted(self) -> dict[str, tuple[list[LogPattern], float]]:
        """Return file patterns by job, with the Unix time before which files are of earlier jobs."""
        found: dict[str, tuple[list[LogPattern], float]] = {}
        if time.monotonic() >= self._next_look_s:
            began_s = time.thread_time()
            self._requests = requests(self._run_dir)
            took_s = time.thread_time() - began_s
            self._next_look_s = time.monotonic() + took_s / _OF_TIME if took_s > _QUICK_S else 0.0
        with self._jobs_lock:
            owners = {job.id: job.owners for job in self._aggregate.jobs.values()}
            named = named_by_ranks(self._aggregate.jobs.values())
            watched = {run: job.id for job in self._aggregate.jobs.values() for run in job.watched}
        for request, uid in self._requests:
            if request.run and request.run not in watched and request.job in owners:
                continue  # another run has the name; the ranks of this one have not begun
            name = watched.get(request.run, request.job)
            # Root and the job's own users; before the job has rings, anybody: then nothing is added to what is known of it.
            if uid in {0, *(owners.get(name) or (uid,))}:
                patterns, since = found.get(name, ([], request.since))
                more = [LogPattern(pattern, uid) for pattern in request.patterns]
                found[name] = (patterns + more, min(since, request.since))
        for name, paths in named.items():
            if paths or name in self._jobs:
                patterns, since = found.get(name, ([], 0.0))
                found[name] = (patterns + paths, since)
        return found

    def used(self) -> Set[tuple[int, int]]:
        """Return device and inode of the files that are followed, and of the folders in which files are expected."""
        with self._lock:
            found = {inode for logs in self._jobs.values() for inode in logs.follower.inodes}
            patterns = [pattern for logs in self._jobs.values() for pattern in logs.follower.patterns]
        for where in {pattern.folder for pattern in patterns} - {None}:
            with contextlib.suppress(OSError):
                about = crossing.look(Path(where or ""), crossing.ANYBODY, kind=stat.S_IFDIR)
                found.add((about.st_dev, about.st_ino))
        return found

    def _hear(self, job: str, warned: Warned) -> None:
        process = warned.process
        self._messages.append(
            NcclMessage(
                job_id=job,
                at=self._clock(),
                message_class=warned.kind,
                text=warned.text,
                host=None if process is None else process.host,
                pid=None if process is None else process.pid,
                rank=None if process is None else self._ranks(job).get((process.host, process.pid)),
                file=warned.seen.source,
                line=warned.seen.number,
            )
        )

    def _ranks(self, job: str) -> dict[tuple[str, int], int]:
        with self._jobs_lock:
            known = self._aggregate.jobs.get(job)
            return {} if known is None else ranks_of(known)

    def _past(self, job: str) -> Set[tuple[str, int]]:
        with self._jobs_lock:
            known = self._aggregate.jobs.get(job)
            return frozenset() if known is None else past(known)

    # -- answers ------------------------------------------------------------------------------

    def readings(self) -> list[tuple[str, list[Reading] | None]]:
        """Return readings for ``/metrics``: messages by class, findings, channels by process group and transport."""
        if self._clock() - self._looked_at > _STUCK_S:
            return [(COLLECTOR, None)]
        found = []
        with self._lock:
            for job, logs in self._jobs.items():
                if not (logs.follower.paths and logs.is_heard):
                    continue
                found += [Reading("nccl_messages_total", (job, kind), logs.counts[kind]) for kind in (*CLASSES, OTHER)]
                kinds = sorted({(finding.name, finding.severity) for finding in logs.of_communication()})
                found += [Reading("nccl_finding", (job, *kind), 1) for kind in kinds]
                channels: Counter[tuple[str, str]] = Counter()
                past = self._past(job)
                for comm, groups in self._joined(job, logs.account):
                    if len(groups) == 1 and not comm.processes <= past:
                        for transport, count in comm.transports().items():
                            channels[groups[0].label, transport] += count
                found += [Reading("nccl_channels", (job, *key), count) for key, count in channels.items()]
        return [(COLLECTOR, found)]

    def topology(self, job: str | None) -> list[Topology]:
        """Return the content of the logs, one ``Topology`` per job."""
        with self._lock:
            return [
                self._topology(each, logs) for each, logs in self._jobs.items() if job in (None, each) and logs.is_heard
            ]

    def errors(self) -> dict[str, list[Finding]]:
        """Return the findings about communication that are errors, by job."""
        now_s = time.monotonic()
        with self._lock:
            return {job: found for job, logs in self._jobs.items() if (found := logs.errors(now_s))}

    def _topology(self, job: str, logs: JobLogs) -> Topology:
        account = logs.account
        label_values: dict[str, Any] = labels(account)
        return Topology(
            job_id=job,
            library=label_values["library"],
            versions=label_values.get("nccl_version", []),
            env=label_values.get("env", {}),
            hosts=hosts(account),
            communicators=[
                replace(view(comm), group_ids=[group.group_id for group in groups])
                for comm, groups in self._joined(job, account)
            ],
            choices=choices(account),
            findings=logs.findings(),
            files=[os.fsencode(path).decode("utf-8", "replace") for path in logs.follower.paths],
            messages=sum(account.levels.values()),
            unknown_messages=account.unknown,
            skipped_bytes=logs.follower.skipped_bytes,
        )

    def messages(
        self, job: str | None, kind: str | None, from_s: float, until_s: float, limit: int
    ) -> list[NcclMessage]:
        """Return warnings, newest first."""
        with self._lock:
            wanted = (
                message
                for message in reversed(self._messages)
                if job in (None, message.job_id)
                and kind in (None, message.message_class)
                and from_s <= message.at <= until_s
            )
            return [message for message, _ in zip(wanted, range(limit), strict=False)]

    def knows(self, job: str) -> bool:
        """Return True if there are logs of the job."""
        with self._lock:
            return job in self._jobs and self._jobs[job].is_heard

    def _joined(self, job: str, account: Account) -> list[tuple[Communicator, list[GroupInfo]]]:
        with self._jobs_lock:
            known = self._aggregate.jobs.get(job)
            ranks = {} if known is None else ranks_of(known)
            groups = {} if known is None else groups_of(known)
        return [(comm, matching(comm, ranks, groups.values())) for comm in communicators(account)]


def logs_of(state: Path) -> Path:
    """Return the folder of the NCCL logs that commwatch makes, beside the history; it has one folder per job."""
    return state / "nccl"


def remove_old(logs: Path, before_s: float, used: Set[tuple[int, int]] = frozenset()) -> None:
    """Remove logs last written before Unix time ``before_s`` and empty folders, but none whose device and inode are in ``used``.

    NCCL writes nothing for weeks while all is well, and then only to the file that it has open.
    """

    def is_old(about: os.stat_result) -> bool:
        return about.st_mtime < before_s and (about.st_dev, about.st_ino) not in used

    with contextlib.suppress(OSError), crossing.folder(logs, crossing.own()) as jobs:
        for job in jobs.names("*")[1]:
            with contextlib.suppress(OSError), crossing.folder(logs / job, crossing.own()) as files:
                for name in files.names("*")[1]:
                    if is_old(files.look(name)):
                        files.remove(name)
            with contextlib.suppress(OSError):
                if is_old(jobs.look(job)):
                    (logs / job).rmdir()
