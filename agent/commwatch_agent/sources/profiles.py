"""Profiles on demand: request them from the node's trainers, keep the traces, compare them with the recorded steps.

A trace can be hundreds of megabytes: a separate process reads it, so that the agent stays small.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import shutil
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from http import HTTPStatus
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from commwatch.wire import crossing
from commwatch.wire import profile_files as files
from commwatch.wire.errors import CommwatchError
from commwatch.wire.identity import make_private_dir, ring_prefix
from commwatch.wire.numbers import ahead
from commwatch_agent.analysis.queries import QueryService
from commwatch_agent.ingest.step_accounting import comm_share, exposed_share, total
from commwatch_agent.model.views import RankView, StepView
from commwatch_agent.report.profile_trace import ProfileTrace
from commwatch_agent.sources import trace_files
from commwatch_agent.sources.trace_overlap import GroupShare

log = logging.getLogger("commwatch")
#: Seconds that a rank may take to write its trace after the request has expired, and that the records of its last step
#: may take to reach the history.
_WRITING_S, _RECORDS_S = 60.0, 5.0
#: Seconds for reading a trace, and for all traces together when the agent ends.
_READING_S, _LAST_S = 300.0, 5.0
_MARGIN_NS = 10_000_000_000
#: Bytes of a stored profile.
_MOST_BYTES = 16 << 20


class ProfileError(CommwatchError):
    """A profile is not possible; the message gives the reason."""

    status = HTTPStatus.CONFLICT


class UnknownTarget(ProfileError):
    """There is no such job or rank."""

    status = HTTPStatus.NOT_FOUND


@dataclass(frozen=True)
class Figures:
    """Communication within the profiled steps, in seconds, and its share of their time, 0 to 1; ``None``: not known."""

    #: For a trace ``kernels`` or ``cpu_ops``; for the probe's records how exposed time was measured, ``thread_cpu`` or ``stream_waits``, or
    #: empty if it is not known.
    source: str
    comm_s: float | None
    comm_share: float | None
    exposed_s: float | None
    exposed_share: float | None


@dataclass(frozen=True)
class RankProfile:
    """Progress and result of one rank. Times are Unix seconds."""

    rank: int
    #: ``waiting``, ``running``, ``done`` or ``failed``.
    state: str = "waiting"
    error: str | None = None
    steps: int = 0
    #: Numbers of the step marks between which the steps lie.
    from_seq: int | None = None
    until_seq: int | None = None
    begin_at: float | None = None
    end_at: float | None = None
    #: Mean duration.
    step_s: float | None = None
    profile: Figures | None = None
    #: What the probe recorded of these steps.
    continuous: Figures | None = None
    #: By process group, where the trace names groups.
    groups: list[GroupShare] = field(default_factory=list)
    #: Path of the trace.
    trace: str | None = None


@dataclass(frozen=True)
class Profile:
    """A profile of some ranks of a job."""

    id: str
    job_id: str
    #: ``waiting`` until a rank begins, ``running``, ``done``, or ``failed`` where no rank has a result.
    state: str
    steps: int
    until: float
    ranks: list[RankProfile]


_STORED = TypeAdapter(Profile)


@dataclass
class _Active:
    """A request in progress."""

    request: files.Request
    request_path: Path
    ranks: dict[int, RankProfile]
    #: By rank: monotonic time (s) when its result arrived.
    came: dict[int, float] = field(default_factory=dict)

    def view(self) -> Profile:
        """Return the profile as the API shows it."""
        ranks = [self.ranks[rank] for rank in sorted(self.ranks)]
        states = {rank.state for rank in ranks}
        ended = states <= {"done", "failed"}
        state = (
            ("done" if "done" in states else "failed") if ended else "waiting" if states == {"waiting"} else "running"
        )
        return Profile(self.request.id, self.request.job, state, self.request.steps, self.request.until, ranks)


class Profiles:
    """The profiles of an agent. One thread calls ``tick`` and ``close``; any thread may call ``ask`` and ``get``.

    Args:
        run_dir: run directory, shared with the trainers.
        kept: directory for traces and results.
        agent: supplies jobs, ranks and steps.
        clock: Unix time.
    """

    def __init__(self, run_dir: Path, kept: Path, agent: QueryService, clock: Callable[[], float] = time.time) -> None:
        self._run_dir, self._kept, self._agent, self._clock = run_dir, kept, agent, clock
        self._lock = threading.Lock()
        self._active: dict[str, _Active] = {}
        #: The latest that ended, including any that could not be stored on disk.
        self._ended: deque[Profile] = deque(maxlen=20)
        with contextlib.suppress(OSError), crossing.folder(files.directory(run_dir)) as where:
            for name in where.names("*.request.json")[1]:  # of a previous agent
                path = where.path / name
                try:
                    self._add(files.read_request(path, crossing.own()), path)
                except (OSError, ValueError):
                    with contextlib.suppress(OSError):
                        where.remove(name)

    # -- from outside -------------------------------------------------------------------------

    def ask(self, job: str, steps: int, ranks: list[int] | None, timeout_s: float) -> Profile:
        """Request a profile from the ranks of a job (default: all on this node).

        Raises:
            UnknownTarget: there is no such job, or no such rank of it runs on this node.
            ProfileError: the job does not run, or is being profiled already.
            OSError: the request cannot be written.
        """
        if not self._agent.has_job(job):
            raise UnknownTarget(f"no job '{job}' in the history; /api/v1/jobs lists the jobs")
        views = [view for view in self._agent.ranks(job) if view.state == "running"]
        running = [view.rank for view in views]
        if not running:
            raise ProfileError(f"job '{job}' is not running")
        missing = sorted(set(ranks or ()) - set(running))
        if missing:
            raise UnknownTarget(f"rank {missing[0]} of job '{job}' is not running on this node")
        base = self._agent.base_name(job)
        path = files.request_path(self._run_dir, base)
        with self._lock:
            for other in self._active.values():
                if other.request_path == path:
                    raise ProfileError(f"profile {other.request.id} of job '{other.request.run}' is still in progress")
            wanted = sorted(set(running if ranks is None else ranks))
            places = [files.place_of(view.host, view.pid) for view in views if view.rank in wanted]
            request = files.Request(
                secrets.token_hex(8), base, steps, wanted, self._clock() + timeout_s, run=job, processes=places
            )
            files.write(path, request, os.environ)
            return self._add(request, path).view()

    def get(self, profile_id: str) -> Profile | None:
        """Return a profile that is in progress or kept; ``None``: there is none."""
        with self._lock:
            active = self._active.get(profile_id)
            if active is not None:
                return active.view()
            for profile in self._ended:
                if profile.id == profile_id:
                    return profile
        for path in self._kept.glob(f"*-{profile_id}/profile.json") if profile_id.isalnum() else ():
            try:
                return _STORED.validate_json(crossing.read(path, _MOST_BYTES, crossing.own()))
            except (OSError, ValidationError):
                return None
        return None

    def drop(self, profile_id: str) -> None:
        """Remove a profile that has ended, with its traces."""
        with self._lock:
            kept = [profile for profile in self._ended if profile.id != profile_id]
            self._ended.clear()
            self._ended.extend(kept)
        for folder in self._kept.glob(f"*-{profile_id}"):
            shutil.rmtree(folder, ignore_errors=True)

    def _add(self, request: files.Request, path: Path) -> _Active:
        active = _Active(request, path, {rank: RankProfile(rank) for rank in request.ranks})
        self._active[request.id] = active
        return active

    # -- the thread ---------------------------------------------------------------------------

    def tick(self) -> None:
        """Process the files that ranks have written."""
        for active in list(self._active.values()):
            views = {view.rank: view for view in self._agent.ranks(active.request.run)}
            for rank in active.request.ranks:
                self._update(active, rank, views.get(rank), _READING_S, _RECORDS_S)
            self._end_if_over(active)

    def close(self) -> None:
        """End all requests, once all records are drained: process what is present, within ``_LAST_S`` in all."""
        until = time.monotonic() + _LAST_S
        for active in list(self._active.values()):
            _remove(active.request_path)
            for rank in active.request.ranks:
                self._update(active, rank, None, max(0.1, until - time.monotonic()), 0)
                if active.ranks[rank].state in ("waiting", "running"):
                    self._set(active, replace(active.ranks[rank], state="failed", error="the agent ended"))
            self._end_if_over(active)

    def tidy(self, oldest: float) -> None:
        """Remove profiles that ended before Unix time ``oldest``, and files of ranks that no request waits for."""
        for folder in self._kept.glob("*-*"):
            if folder.lstat().st_mtime < oldest:
                shutil.rmtree(folder, ignore_errors=True)
        standing = {active.request_path for active in list(self._active.values())}
        with contextlib.suppress(OSError), crossing.folder(files.directory(self._run_dir)) as where:
            for name in where.names("*")[1]:
                with contextlib.suppress(OSError):
                    old = where.look(name).st_mtime < self._clock() - files.MOST_SECONDS - _WRITING_S
                    if old and where.path / name not in standing:
                        where.remove(name)

    def _update(self, active: _Active, rank: int, view: RankView | None, reading_s: float, records_s: float) -> None:
        """Update one rank, unless it has ended."""
        known = active.ranks[rank]
        if known.state in ("done", "failed"):
            return
        place = files.directory(self._run_dir)
        claim = trace_files.read(files.of_rank(place, active.request.id, rank, files.CLAIM))
        gone = _gone(claim, view)
        # Read after the check of the process, which writes the result before it ends.
        result = trace_files.read(files.of_rank(place, active.request.id, rank, files.RESULT))
        if result is not None:
            self._take(active, rank, result, reading_s, records_s)
        elif gone:
            self._set(active, replace(known, state="failed", error="its process ended before the profile did"))
        elif claim is None and self._clock() > active.request.until:
            self._set(active, replace(known, state="failed", error="it reached no step mark in time"))
        elif self._clock() > active.request.until + _WRITING_S:
            self._set(active, replace(known, state="failed", error="it reached no step mark in time to stop"))
        elif claim is not None and known.state == "waiting":
            self._set(active, replace(known, state="running"))

    def _set(self, active: _Active, known: RankProfile) -> None:
        with self._lock:
            active.ranks[known.rank] = known

    def _take(self, active: _Active, rank: int, text: str, reading_s: float, records_s: float) -> None:
        """Process the result of a rank."""
        try:
            result = files.result_from(text)
        except ValueError as error:
            self._set(active, replace(active.ranks[rank], state="failed", error=f"its result cannot be read: {error}"))
            return
        duration = (result.until_ns - result.from_ns) / 1e9
        if result.error is not None or result.steps < 1 or duration <= 0:
            why = result.error or "no step ended"
            self._set(active, replace(active.ranks[rank], state="failed", error=why))
            return
        came = active.came.setdefault(rank, time.monotonic())
        steps = self._steps(active.request.run, result)
        # The records of the last step come with the next drain of the ring.
        if (not steps or ahead(steps[0].seq, result.until_seq) < 0) and time.monotonic() - came < records_s:
            return
        known = RankProfile(
            rank=rank,
            steps=result.steps,
            from_seq=result.from_seq,
            until_seq=result.until_seq,
            begin_at=result.from_ns / 1e9,
            end_at=result.until_ns / 1e9,
            step_s=duration / result.steps,
            continuous=_recorded(steps, self._exposed_source(active.request.run, rank)),
        )
        self._set(active, self._analysed(active, known, result, reading_s))

    def _analysed(self, active: _Active, known: RankProfile, result: files.Result, reading_s: float) -> RankProfile:
        """Keep the trace, read it, and return the rank with its figures."""
        left = files.of_rank(files.directory(self._run_dir), result.id, known.rank, files.TRACE)
        try:
            trace = self._folder(active.request) / _trace_name(known.rank)
            trace_files.take(left, trace)
        except OSError as error:
            return replace(
                known, state="failed", error=f"the trace cannot be kept: {error.strerror} ({error.filename})"
            )
        known = replace(known, trace=str(trace))
        answer = trace_files.overlap(trace, result.from_ns, result.until_ns, reading_s)
        if "error" in answer:
            return replace(known, state="failed", error=answer["error"])
        trace_files.keep_intervals(trace.with_name(_exposed_name(known.rank)), result.from_ns, answer["exposed"])
        length = answer["length_s"]
        comm, exposed = answer["comm_s"], answer["exposed_s"]
        shares = [None if seconds is None else seconds / length for seconds in (comm, exposed)]
        figures = Figures(answer["source"], comm, shares[0], exposed, shares[1])
        groups = [GroupShare(**group) for group in answer["groups"]]
        return replace(known, state="done", profile=figures, groups=groups)

    def _steps(self, job: str, result: files.Result) -> list[StepView]:
        """Return the profiled steps as the probe recorded them, newest first."""
        window = result.from_ns - _MARGIN_NS, result.until_ns + _MARGIN_NS
        views = self._agent.steps(*window, job, result.rank, 10_000)
        return [view for view in views if ahead(view.seq, result.from_seq) > 0 >= ahead(view.seq, result.until_seq)]

    def _exposed_source(self, job: str, rank: int) -> str | None:
        return next((view.exposed_source for view in self._agent.ranks(job) if view.rank == rank), None)

    def _folder(self, request: files.Request) -> Path:
        """Return the folder for traces and result of a profile; create it if missing."""
        folder = self._kept / f"{ring_prefix(request.run).removesuffix('.r')}-{request.id}"
        make_private_dir(self._kept, {})
        make_private_dir(folder, {})
        return folder

    def _end_if_over(self, active: _Active) -> None:
        profile = active.view()
        if profile.state not in ("done", "failed"):
            return
        # The claims stay until ``tidy``: a process that has read the request must not start it again.
        _remove(active.request_path)
        try:
            folder = self._folder(active.request)
            hidden = folder / ".profile.json"
            hidden.write_bytes(_STORED.dump_json(profile, indent=2))
            hidden.replace(folder / "profile.json")
        except OSError as error:
            log.warning("cannot keep profile %s: %s", profile.id, error)
        with self._lock:
            self._ended.append(profile)
            del self._active[profile.id]
        for rank in active.request.ranks:
            for what in (files.RESULT, files.TRACE):
                _remove(files.of_rank(files.directory(self._run_dir), profile.id, rank, what))


def kept_in(state: Path) -> Path:
    """Return the directory of profiles in a state directory."""
    return state / "profiles"


def traces_of(kept: Path, job_id: str) -> Iterator[ProfileTrace]:
    """Yield the traces in a directory of profiles that were measured, of ranks of a job; results that cannot be read are left out."""
    for path in sorted(kept.glob("*-*/profile.json")):
        try:
            profile = _STORED.validate_json(crossing.read(path, _MOST_BYTES, crossing.ANYBODY))
        except (OSError, ValidationError):
            continue
        for rank in profile.ranks if profile.job_id == job_id else ():
            if rank.state != "done" or rank.from_seq is None or rank.until_seq is None:
                continue
            if rank.begin_at is not None and rank.end_at is not None:
                marks, times = (rank.from_seq, rank.until_seq), (int(rank.begin_at * 1e9), int(rank.end_at * 1e9))
                trace, exposed = (path.with_name(name(rank.rank)) for name in (_trace_name, _exposed_name))
                yield ProfileTrace(profile.id, rank.rank, trace, exposed, marks, *times)


def _exposed_name(rank: int) -> str:
    return f"rank{rank}.exposed.json"


def _trace_name(rank: int) -> str:
    return f"rank{rank}.{files.TRACE}"


def _remove(path: Path) -> None:
    """Remove a file of the run directory; ignore errors, because another user may have replaced it with a directory."""
    with contextlib.suppress(OSError), crossing.folder(path.parent) as where:
        where.remove(path.name)


def _gone(claim: str | None, view: RankView | None) -> bool:
    """Return True if the process that would write the result has ended."""
    if view is None:
        return False
    if view.state != "running":
        return True
    try:
        return claim is not None and files.claim_from(claim).pid != view.pid
    except ValueError:  # being written
        return False


def _recorded(steps: list[StepView], exposed_source: str | None) -> Figures | None:
    if not sum(step.duration_s for step in steps):
        return None
    comm_s, exposed_s = total([step.comm_s for step in steps]), total([step.exposed_s for step in steps])
    source = exposed_source if exposed_s is not None and exposed_source is not None else ""
    return Figures(source, comm_s, comm_share(steps), exposed_s, exposed_share(steps))
