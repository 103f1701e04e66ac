"""NCCL Inspector's files of the known jobs: followed, joined with ranks and process groups, added up.

Its timings on the GPU have names of their own, and are never mixed with what the probe recorded.
"""

from __future__ import annotations

import glob
import logging
import os
import stat
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Set
from dataclasses import dataclass
from pathlib import Path

from commwatch.wire import crossing
from commwatch_agent.core.cells import OTHER, GroupInfo
from commwatch_agent.core.shares import Portions, admitted
from commwatch_agent.core.witness_views import InspectorMean, InspectorRow, InspectorView, means
from commwatch_agent.ingest.jobs import Aggregate, Job
from commwatch_agent.prometheus.exporter import MOST_GROUPS
from commwatch_agent.watchers.inspector_sums import MOST_CELLS, Cell, Drops, JobFiles, Source
from commwatch_agent.watchers.nccl_groups import groups_of, past, ranks_of
from commwatch_collectors.nccl.inspector import VERSIONS, parse_prom
from commwatch_collectors.nccl.matching import LogPattern
from commwatch_collectors.registry import Reading

log = logging.getLogger("commwatch")
COLLECTOR = "inspector"
#: Files last written so many seconds before a rank began are of earlier ranks; file server clocks differ by less.
_SLACK_S = 60.0
#: Seconds without a check of the files after which the collector is down.
_STUCK_S = 30.0
#: Text files read of one folder, and bytes of each.
_MOST_PROM, _MOST_PROM_BYTES = 64, 1 << 20
#: Jobs whose files are followed at a time, and files that are open at a time.
MOST_JOBS, _ALL_FILES = 32, 1024
#: Sums for which all jobs together have room beyond those of each.
_ALL_CELLS, _LEAST_CELLS = 16_384, 256
_UNREAD = f"this version of commwatch reads {VERSIONS[0]} to {VERSIONS[-1]}"
#: Seconds between two checks of the text files, which change twice a minute at most.
_PROM_S = 5.0


@dataclass
class _Dumped:
    """What dumps into a folder: jobs, and the users of their ranks; files last written before Unix time ``since`` are of earlier jobs."""

    jobs: set[str]
    uids: set[int]
    since: float


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
        aggregate: Aggregate,
        lock: threading.RLock,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._directory, self._aggregate, self._jobs_lock, self._clock = directory, aggregate, lock, clock
        self._lock = threading.RLock()
        self._jobs: dict[str, JobFiles] = {}
        #: By job, its user; and the room for sums that jobs share.
        self._owners: dict[str, int] = {}
        self._cells = Portions(_ALL_CELLS, MOST_CELLS, _LEAST_CELLS)
        self._folders: dict[str, _Dumped] = {}
        self._means: dict[str, tuple[int, list[InspectorMean]]] = {}
        self._looked_at = clock()
        self._means_at = 0.0
        self._warned: set[str] = set()

    def tick(self) -> int:
        """Find new files and read what was added; return the bytes read."""
        folders: dict[str, _Dumped] = {}
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
            files.fold(gone)
            self._say(files.follower.troubles)
            self._say({f"format {version}": _UNREAD for version in files.unread_versions})
        with self._lock:
            for job in [job for job in self._jobs if job not in wanted]:
                files = self._jobs.pop(job)
                files.follower.close()
                self._cells.give(files.most)
                del self._owners[job]
            self._folders = folders
        if self._clock() - self._means_at >= _PROM_S:
            self._means_at = self._clock()
            self._read_means()
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
        self, job: Job, folders: dict[str, _Dumped]
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
                known = folders.setdefault(str(folder), _Dumped(set(), set(), began))
                known.jobs.add(job.id)
                known.uids.add(totals.owner_uid)
                known.since = min(known.since, began)
        return patterns, since, ranks_of(job), past(job)

    def _read_means(self) -> None:
        """Read the text files that have changed."""
        found: dict[str, tuple[int, list[InspectorMean]]] = {}
        for folder, dumped in self._folders.items():
            trust = crossing.Trust(frozenset(dumped.uids))
            try:
                with crossing.folder(Path(folder)) as where:
                    for name in where.names("*.prom")[1][:_MOST_PROM]:
                        self._read_mean(where, name, trust, found)
            except FileNotFoundError:
                continue
            except OSError as error:
                self._say({folder: error.strerror or str(error)})
        with self._lock:
            self._means = found

    def _read_mean(
        self,
        where: crossing.Folder,
        name: str,
        trust: crossing.Trust,
        found: dict[str, tuple[int, list[InspectorMean]]],
    ) -> None:
        path, dumped = str(where.path / name), self._folders[str(where.path)]
        try:
            about = where.look(name)
            changed = about.st_mtime_ns
            known = self._means.get(path)
            if known is not None and known[0] == changed:
                found[path] = known
            elif changed / 1e9 >= dumped.since and stat.S_ISREG(about.st_mode):
                with open(where.open_file(name, trust), encoding="utf-8", errors="replace") as file:
                    parsed = list(parse_prom(file.read(_MOST_PROM_BYTES)))
                found[path] = (changed, means(parsed, dumped.jobs, changed / 1e9))
        except OSError as error:
            self._say({path: error.strerror or str(error)})

    # -- answers ------------------------------------------------------------------------------

    def readings(self) -> list[tuple[str, list[Reading] | None]]:
        """Return readings for ``/metrics``: counts, seconds and bus bytes by rank, group, op and timing; drops; none if off."""
        if not self._folders:
            return []
        if self._clock() - self._looked_at > _STUCK_S:
            return [(COLLECTOR, None)]
        sums: dict[tuple[str, ...], Cell] = {}
        labels: dict[str, set[str]] = {}

        def label(job: str, group: str) -> str:
            known = labels.setdefault(job, set())
            found = group if group in known or len(known) < MOST_GROUPS else OTHER
            known.add(found)
            return found

        for row in self.rows(None):
            cell = sums.setdefault(
                (row.job_id, str(row.rank), label(row.job_id, row.group), row.op, row.timing), Cell()
            )
            cell.count += row.count
            cell.seconds += row.seconds
            cell.bus_bytes += (row.busbw or 0.0) * row.seconds
        found = []
        for key, cell in sums.items():
            found.append(Reading("inspector_collectives_total", key, cell.count))
            found.append(Reading("inspector_collective_seconds_total", key, cell.seconds))
            if cell.bus_bytes:
                found.append(Reading("inspector_collective_bus_bytes_total", key, cell.bus_bytes))
        drops: Counter[tuple[str, ...]] = Counter()
        for job, source, group, each in self._drops():
            for kind, count in (("collective", each.collectives), ("message", each.messages)):
                drops[job, str(source.rank), label(job, group), kind] += count.sum
        found += [Reading("inspector_dropped_total", key, count) for key, count in drops.items()]
        return [(COLLECTOR, found)]

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

    def _drops(self) -> Iterator[tuple[str, Source, str, Drops]]:
        """Yield job, source, label of the process group, and what Inspector dropped."""
        groups = self._groups()
        with self._lock:
            for name, files in self._jobs.items():
                for sums in (files.now, files.earlier):
                    where = {at: files.group(comm, groups.get(name, []))[0] for at, comm in sums.comms.items()}
                    for source, drops in sums.drops.items():
                        yield name, source, where[source.comm], drops

    def view(self, job: str | None) -> InspectorView:
        """Return the state of Inspector and all that was read from its files."""
        rows = self.rows(job)
        with self._lock:
            files = [each for name, each in self._jobs.items() if job in (None, name)]
            folders = [folder for folder, dumped in self._folders.items() if job is None or job in dumped.jobs]
            averages = [
                mean for _, each in self._means.values() for mean in each if job is None or mean.job_id in (None, job)
            ]
            paths = [os.fsencode(path).decode("utf-8", "replace") for each in files for path in each.follower.paths]
            troubles = [f"{path}: {why}" for each in files for path, why in list(each.follower.troubles.items())]
            records = sum(each.records for each in files)
            known = [each.dropped for each in files if each.dropped is not None]
            dropped = sum(known) if known else None
            unread = sorted({version for each in files for version in each.unread_versions})
            if unread:
                troubles.insert(0, f"format {', '.join(unread[:3])}: {_UNREAD}")
            nothing = bool(unread) and not records and not averages
            state, says = self._state(folders, bool(paths or averages) and not nothing, troubles)
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
                means=averages,
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
