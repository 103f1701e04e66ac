"""NCCL Inspector's JSON files of the running jobs: followed, joined with ranks and process groups, added up.

Its timings on the GPU are evidence beside what the probe recorded, and never mixed with it.
"""

from __future__ import annotations

import glob
import logging
import os
import threading
import time
from collections.abc import Callable, Set
from pathlib import Path

from commwatch_agent.ingest.jobs import Job, JobTable
from commwatch_agent.model.cells import GroupInfo
from commwatch_agent.model.shares import Portions, admitted
from commwatch_agent.model.witness_views import InspectorRow, InspectorView
from commwatch_agent.sources.inspector_sums import MOST_CELLS, JobFiles
from commwatch_agent.sources.nccl_groups import groups_of, past, ranks_of
from commwatch_collectors.nccl.inspector import VERSIONS
from commwatch_collectors.nccl.matching import LogPattern

log = logging.getLogger("commwatch")
#: Files last written so many seconds before a rank began are of earlier ranks; file server clocks differ by less.
_SLACK_S = 60.0
#: Seconds without a check of the files after which its state is ``down``.
_STUCK_S = 30.0
#: Jobs whose files are followed at a time, and files that are open at a time.
MOST_JOBS, _ALL_FILES = 32, 1024
#: Sums for which all jobs together have room beyond those of each.
_ALL_CELLS, _LEAST_CELLS = 16_384, 256
_UNREAD = f"this version of commwatch reads {VERSIONS[0]} to {VERSIONS[-1]}"


class Inspector:
    """All files of NCCL Inspector that the agent follows. One thread calls ``tick``; any thread may call the other methods.

    Args:
        directory: a folder with Inspector's files, in addition to those that probes report.
        lock: guards the aggregate.
        clock: Unix time.
    """

    def __init__(
        self,
        directory: Path | None,
        aggregate: JobTable,
        lock: threading.RLock,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._directory, self._aggregate, self._jobs_lock, self._clock = directory, aggregate, lock, clock
        self._lock = threading.RLock()
        self._jobs: dict[str, JobFiles] = {}
        #: By job, its user; and the room for sums that jobs share.
        self._owners: dict[str, int] = {}
        self._cells = Portions(_ALL_CELLS, MOST_CELLS, _LEAST_CELLS)
        #: The jobs that dump into a folder.
        self._folders: dict[str, set[str]] = {}
        self._looked_at = clock()
        self._warned: set[str] = set()

    def tick(self) -> int:
        """Find new files and read what was added; return the bytes read."""
        folders: dict[str, set[str]] = {}
        with self._jobs_lock:
            wanted = {job.id: self._wanted(job, folders) for job in self._aggregate.jobs.values()}
        self._begin({job: (about[0][0].uid, about[1]) for job, about in wanted.items() if about[0]})
        read = 0
        for job, (patterns, _, ranks, gone) in wanted.items():
            with self._lock:
                files = self._jobs.get(job)
                if files is None:
                    continue
                files.ranks = ranks
                files.follower.share(len(self._jobs), _ALL_FILES)
            files.follower.patterns = dict.fromkeys(patterns)
            read += files.follower.tick()  # without the lock: a file server may hang, answers must not
            files.forget(gone)
            self._say(files.follower.troubles)
            self._say({f"format {version}": _UNREAD for version in files.unread_versions})
        with self._lock:
            for job in [job for job in self._jobs if job not in wanted]:
                files = self._jobs.pop(job)
                files.follower.close()
                self._cells.give(files.most)
                del self._owners[job]
            self._folders = folders
        self._looked_at = self._clock()
        return read

    def _begin(self, wanted: dict[str, tuple[int, float]]) -> None:
        """Begin to follow the files of new jobs, those of different users in turn, as long as there is room.

        Args:
            wanted: by job: its user, and the Unix time before which files are of earlier jobs.
        """
        new = dict[int, list[str]]()
        for job, (owner, _) in wanted.items():
            if job not in self._jobs:
                new.setdefault(owner, []).append(job)
        begun = admitted(MOST_JOBS, self._owners.values(), new)
        if len(begun) < sum(map(len, new.values())):
            self._say({"of further jobs": f"those of {MOST_JOBS} jobs are followed at a time"})
        for owner, job in begun:
            with self._lock:
                self._jobs[job] = JobFiles(wanted[job][1], self._lock, self._cells.take())
                self._owners[job] = owner

    def close(self) -> None:
        """Close all files."""
        with self._lock:
            for files in self._jobs.values():
                files.follower.close()

    def _say(self, troubles: dict[str, str]) -> None:
        for path, why in troubles.items():
            if path not in self._warned:
                self._warned.add(path)
                log.warning("cannot read NCCL Inspector's %s: %s", path, why)

    def _wanted(
        self, job: Job, folders: dict[str, set[str]]
    ) -> tuple[list[LogPattern], float, dict[tuple[str, int], int], Set[tuple[str, int]]]:
        """Return a job's file patterns, the Unix time before which files are of earlier jobs, ranks by host and pid, those of earlier runs.

        Adds the job's folders to ``folders``. A file must belong to the user of its rank.
        """
        patterns, since = [], float("inf")
        for totals in job.rank_totals.values():
            identity = totals.identity
            began = (int(identity.get("started_ns", 0)) + totals.offset_ns) / 1e9 - _SLACK_S
            since = min(since, began)
            if totals.owner_uid is None:
                continue
            name = f"{identity.get('host', '')}-pid{identity.get('pid', 0)}.log"
            for folder in {totals.inspector, None if self._directory is None else str(self._directory)} - {None}:
                if "/" in name or not str(folder).startswith("/"):
                    continue
                path = os.path.join(str(folder), name)  # noqa: PTH118 - a pattern
                patterns.append(LogPattern(glob.escape(path), totals.owner_uid))
                folders.setdefault(str(folder), set()).add(job.id)
        return patterns, since, ranks_of(job), past(job)

    # -- answers ------------------------------------------------------------------------------

    def rows(self, job: str | None) -> list[InspectorRow]:
        """Return what was timed, the most time first."""
        groups, found = self._groups(), list[InspectorRow]()
        with self._lock:
            for name, files in self._jobs.items():
                if job not in (None, name):
                    continue
                found += files.rows(name, groups.get(name, []))
        return sorted(found, key=lambda row: -row.seconds)

    def _groups(self) -> dict[str, list[GroupInfo]]:
        """Return the process groups by job."""
        with self._jobs_lock:
            return {each.id: list(groups_of(each).values()) for each in self._aggregate.jobs.values()}

    def view(self, job: str | None) -> InspectorView:
        """Return the state of Inspector and all that was read from its files."""
        rows = self.rows(job)
        with self._lock:
            files = [each for name, each in self._jobs.items() if job in (None, name)]
            folders = [folder for folder, jobs in self._folders.items() if job is None or job in jobs]
            paths = [os.fsencode(path).decode("utf-8", "replace") for each in files for path in each.follower.paths]
            troubles = [f"{path}: {why}" for each in files for path, why in list(each.follower.troubles.items())]
            records = sum(each.records for each in files)
            known = [each.dropped for each in files if each.dropped is not None]
            dropped = sum(known) if known else None
            unread = sorted({version for each in files for version in each.unread_versions})
            if unread:
                troubles.insert(0, f"format {', '.join(unread[:3])}: {_UNREAD}")
            nothing = bool(unread) and not records
            state, says = self._state(folders, bool(paths) and not nothing, troubles)
            if state == "works":
                says += f"; {troubles[0]}" if unread else ""
                says += f"; Inspector dropped {dropped} of {records + dropped} operations" if dropped else ""
            return InspectorView(
                state,
                says,
                paths,
                records=records,
                unknown_lines=sum(each.unknown_lines for each in files),
                unknown_fields=sum(each.unknown_fields for each in files),
                skipped_bytes=sum(each.follower.skipped_bytes for each in files),
                left_out=sum(each.left_out for each in files),
                dropped=dropped,
                unread_versions=unread,
                rows=rows,
            )

    def _state(self, folders: list[str], found: bool, troubles: list[str]) -> tuple[str, str]:
        if self._clock() - self._looked_at > _STUCK_S:
            return "down", "its files cannot be read: the file system does not answer"
        if found:
            return "works", f"reads {', '.join(sorted(folders)[:3])}"
        if troubles:
            return "down", "; ".join(troubles[:3])
        if folders:
            return "found", f"nothing yet in {', '.join(sorted(folders)[:3])}"
        return "off", "no rank runs with NCCL_INSPECTOR_ENABLE=1, and inspector_dir is not set"
