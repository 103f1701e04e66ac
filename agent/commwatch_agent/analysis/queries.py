"""Queries of the API, the report and the command line: they combine the history with the totals in memory."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain, islice
from pathlib import Path
from time import time_ns
from types import MappingProxyType

from commwatch.wire import events as ev
from commwatch_agent.analysis import framework_settings, live_ranks
from commwatch_agent.analysis.calls import ended as ended_calls
from commwatch_agent.analysis.summary import identify, merged, summarise
from commwatch_agent.analysis.time_buckets import FINE, Lengths, SlotSums
from commwatch_agent.analysis.totals import Totals, Waits, totals_of
from commwatch_agent.history.chunks import Damaged
from commwatch_agent.history.history import History, StoredStep
from commwatch_agent.history.operations import Cursor, Operation, Reader
from commwatch_agent.history.rows import RingRow, as_run, has_begun, latest_of_ranks, latest_run
from commwatch_agent.ingest import collective_join
from commwatch_agent.ingest.jobs import Job, JobTable
from commwatch_agent.model.alpha_beta import Curve
from commwatch_agent.model.api_views import Row
from commwatch_agent.model.cells import NO_STEPS, NO_WAITS, SLOT_NS, Counted, GroupInfo
from commwatch_agent.model.endings import failed, says
from commwatch_agent.model.model_parts.repeats import Repeat
from commwatch_agent.model.runs import Run, Stored
from commwatch_agent.model.views import (
    ITERATIONS,
    GroupView,
    JobView,
    RankView,
    StepTotals,
    StepView,
    WaitView,
    common_source,
)
from commwatch_agent.reference.efficiency import Efficiency, Line, Yardstick, finder
from commwatch_agent.reference.references import References
from commwatch_collectors.node.cores import Cores
from commwatch_collectors.node.gpu import Gpu, GpuPlace

#: Most earlier runs of a name that are listed, and most live runs that are reported to other agents.
_MOST_EARLIER, _MOST_RUNS = 10, 256


def step_view(ring: RingRow, step: StoredStep) -> StepView:
    """Return a step of a rank, of which ``ring`` is the ring."""
    duration = (step.end_ns - step.start_ns) / 1e9
    exposed = None if step.exposed_ns is None else step.exposed_ns / 1e9
    comm = None if step.comm_ns is None else step.comm_ns / 1e9
    share, exposed_share = (None if part is None else part / duration for part in (comm, exposed))
    return StepView(
        ring.job,
        ring.rank,
        step.seq,
        step.start_ns / 1e9,
        step.end_ns / 1e9,
        duration,
        comm,
        share,
        exposed,
        exposed_share,
        {label: comm_ns / 1e9 / duration for label, comm_ns in step.groups.items()},
        None if step.p2p_wait_ns is None else step.p2p_wait_ns / 1e9,
        step.long,
    )


class QueryService:
    """Answers from the history at ``path`` and, inside an agent, from its totals in memory too.

    Args:
        aggregate: the totals in memory; ``None``: there is only the history.
        lock: guards the aggregate; held only briefly.
        handover: held while cells move from the aggregate into the history; by default ``lock``.
        now_ns: the monotonic clock in ns.
        references: expected durations of operations; without them only the job's own best is known.
        gpu_at: returns the GPU that a rank computes on.
        damaged: collects damaged pieces of the history.
    """

    def __init__(
        self,
        path: Path,
        aggregate: JobTable | None = None,
        lock: threading.RLock | None = None,
        now_ns: Callable[[], int] = lambda: 0,
        *,
        references: References | None = None,
        gpu_at: Callable[[GpuPlace | None], Gpu | None] = lambda where: None,
        handover: threading.RLock | None = None,
        damaged: Damaged | None = None,
    ) -> None:
        self.path, self.references, self._gpu_at = path, references, gpu_at
        self._aggregate, self._lock, self._now_ns = aggregate, lock or threading.RLock(), now_ns
        self._handover = handover or self._lock
        self._damaged = Damaged() if damaged is None else damaged

    def run(self, job: str) -> Run | None:
        """Return a run, by a name as for ``History.rings``; ``None``: there is none."""
        with self.live(job) as (jobs, _):
            if jobs:
                return live_ranks.run(jobs[0])
        with History(self.path, self._damaged) as history:
            return history.run(job)

    def live_runs(self) -> dict[str, str]:
        """Return the names of the runs in memory whose ranks live, by what only their ranks have."""
        with self.live(None) as (jobs, _):
            live = [job for job in jobs if any(totals.alive for totals in job.rank_totals.values())]
            return {run.common: run.name for run in map(live_ranks.run, live[:_MOST_RUNS]) if run.common}

    def address(self, common: str) -> str | None:
        """Return the name under which this node knows the run whose ranks alone have ``common``, as ``History.rings`` takes it; ``None``: it does not."""
        with self.live(None) as (jobs, _):
            for each in jobs:
                if live_ranks.run(each).common == common:
                    return each.id
        with History(self.path, self._damaged) as history:
            return history.address(common)

    def watched(self, run: str) -> list[str]:
        """Return the runs of what ``commwatch run`` has named, as ``History.watched``."""
        with History(self.path, self._damaged) as history:
            return history.watched(run)

    def stored(self, job: str) -> Stored:
        """Return by what the things are found that a run left beside the history, as ``History.stored``."""
        with History(self.path, self._damaged) as history:
            return history.stored(job)

    def base_name(self, job: str) -> str:
        """Return the job's name as its ranks have it: that of a run may have a number."""
        with History(self.path, self._damaged) as history:
            found = history.rings(job)
        return str(found[-1].identity["job"]) if found else job

    def has_job(self, job: str) -> bool:
        """Return whether the job is in the history."""
        with History(self.path, self._damaged) as history:
            return bool(history.rings(job))

    def now_s(self, job: str | None, wall_s: float) -> float:
        """Return the time now as the times of a job count it: the wall clock, and what it was set since the job began."""
        if job is None:
            return wall_s
        with History(self.path, self._damaged) as history:
            return wall_s + history.ahead_ns(job) / 1e9

    def jobs(self) -> list[JobView]:
        """Return the latest run of each name, the latest started first."""
        return self._jobs(None)

    def job(self, job: str) -> JobView | None:
        """Return one run, by a name as for ``History.rings``; ``None``: there is none."""
        return next(iter(self._jobs(job)), None)

    def _jobs(self, job: str | None) -> list[JobView]:
        with History(self.path, self._damaged) as history:
            by_job: dict[str, list[RingRow]] = {}
            for ring in history.rings(job):
                by_job.setdefault(ring.job, []).append(ring)
            exits, earlier = history.exits(), history.earlier()
            ids = [ring.id for rings in by_job.values() for ring in rings]
            shared, sources = history.names("run", ids), history.names("steps", ids)
        found = (_job(rings, _exit_code(rings, exits), as_run(rings, shared), sources) for rings in by_job.values())
        jobs = [replace(job, earlier=earlier.get(job.job_id, [])[:_MOST_EARLIER]) for job in found]
        return sorted(jobs, key=lambda job: -job.started_at)

    def summary(
        self, from_ns: int, until_ns: int, by: list[str], same: dict[str, str | int | None]
    ) -> tuple[tuple[float | None, float | None], list[Row]]:
        """Return the time covered by rollups (begin and end in Unix s), and the rows."""
        covered, (rows,) = self.summaries(from_ns, until_ns, [by], same)
        return covered, rows

    def summaries(
        self, from_ns: int, until_ns: int, dimensions: list[list[str]], same: dict[str, str | int | None]
    ) -> tuple[tuple[float | None, float | None], list[list[Row]]]:
        """Return ``summary`` for each list of dimensions, from one pass over the rollups."""
        job = same.get("job_id")
        covered, cells = self.cells(from_ns, until_ns, None if job is None else str(job))
        wanted = [(name, value) for name, value in same.items() if value is not None]
        matching = [cell for cell in cells if all(getattr(cell, name) == value for name, value in wanted)]
        overall = Yardstick(cells, finder(self.references)).overall
        return covered, [summarise(matching, by, overall) for by in dimensions]

    def totals(self, job: str, dimensions: list[list[str]]) -> Totals:
        """Return what a report shows of a job's rollups, from one pass over them."""
        waits = Waits()
        _, cells = self.cells(0, 1 << 62, job, waits.note)
        views = self.waits_over_time(waits.views(), cells)
        return totals_of(cells, dimensions, Yardstick(cells, finder(self.references)), views)

    def waits_over_time(self, own: list[WaitView], cells: list[Counted]) -> list[WaitView]:
        """Return the waits by slot that ``totals`` has; ``own``: of this history; ``cells``: those of the whole job."""
        return own

    def efficiency(self, from_ns: int, until_ns: int, job: str | None) -> tuple[list[Efficiency], list[Line]]:
        """Return the efficiency of operations, and the job's own α-β curves."""
        _, cells = self.cells(from_ns, until_ns, job)
        yardstick = Yardstick(cells, finder(self.references))
        together = merged(one._replace(startup=False) for one in cells)
        return yardstick.efficiencies(together), list(yardstick.lines.values())

    def curves(self, job: str) -> dict[tuple[str, str], Curve]:
        """Return expected durations as in ``Totals``."""
        return self.totals(job, []).curves

    def cells(
        self,
        from_ns: int,
        until_ns: int,
        job: str | None,
        note: Callable[[int, int, Counted], object] = lambda begin, length, one: None,
    ) -> tuple[tuple[float | None, float | None], list[Counted]]:
        """Return the time covered by slots (begin and end in Unix s), and the cells counted in it.

        Args:
            note: called with begin and length in ns of each slot, and each of its cells.
        """
        spans: set[tuple[int, int]] = set()

        def noted() -> Iterator[Counted]:
            for begin, length, one in self._slots(from_ns, until_ns, job):
                spans.add((begin, length))
                note(begin, length, one)
                yield one

        cells = merged(noted())
        if not spans:
            return (None, None), cells
        # The last slot may not be over.
        until_ns = max(min(max(map(sum, spans)), time_ns()), max(spans)[0])
        return (min(spans)[0] / 1e9, until_ns / 1e9), cells

    def _slots(self, from_ns: int, until_ns: int, job: str | None) -> Iterator[tuple[int, int, Counted]]:
        """Yield begin and length of a slot in ns, and a cell; a generator, because there may be a hundred thousand cells."""
        with History(self.path, self._damaged) as history:

            def freeze() -> None:
                history.freeze()
                history.rings(job)

            live = self.live_cells(from_ns, until_ns, job, freeze)
            rings = {ring.id: ring for ring in history.rings(job)}
            if live is None:
                live = _live(_recount(history, rings.values()), from_ns, until_ns, job)
            groups, ops = history.groups(list(rings)), history.names("op", list(rings))
            for stored in history.rollups(from_ns, until_ns, list(rings)):
                for one in identify([(stored.ring, stored.key, stored.cell)], rings, groups, ops):
                    yield stored.slot_ns, stored.length_ns, one
        for slot_ns, one in live:
            yield slot_ns, SLOT_NS, one

    def live_cells(
        self, from_ns: int, until_ns: int, job: str | None, freeze: Callable[[], object]
    ) -> list[tuple[int, Counted]] | None:
        """Return the cells in memory that are not in the history when ``freeze`` runs, as (slot, cell); ``None``: no aggregate."""
        with self._handover:  # while this is held, each cell is either in the history or in memory
            freeze()
            if self._aggregate is None:
                return None
            with self._lock:
                return _live(self._aggregate, from_ns, until_ns, job)

    def operations(
        self,
        from_ns: int,
        until_ns: int,
        before: Cursor | None,
        wanted: Callable[[Operation], bool],
        limit: int,
        *,
        job: str | None = None,
        same: Mapping[str, str | int | None] = MappingProxyType({}),
        least_s: float | None = None,
        go_on: Callable[[], object] = lambda: None,
    ) -> list[Operation]:
        """Return single operations, newest first. An exception from ``go_on`` ends the search.

        Args:
            job: limits what is read, as do ``same`` (values of fields) and ``least_s`` (a duration), which ``wanted`` checks.
        """
        rank = same.get("rank")
        with History(self.path, self._damaged) as history:
            rings = [ring for ring in history.rings(job) if rank is None or ring.rank == rank]
            reader = Reader(history, {ring.id: ring for ring in rings})
            where = reader.filter(same, least_s)
            return list(islice(reader.newest_first(from_ns, until_ns, before, wanted, go_on=go_on, where=where), limit))

    def has_parts(self, job: str) -> bool:
        """Return whether operations of a job may carry known parts of its model."""
        with History(self.path, self._damaged) as history:
            return bool(history.names("parts", [ring.id for ring in history.rings(job)]))

    def repeats(self, job: str) -> dict[tuple[str, str], Repeat]:
        """Return what the latest steps of the first rank here communicate more than once, by group label and op."""
        with History(self.path, self._damaged) as history:
            rings = sorted(latest_of_ranks(history.rings(job)).values(), key=lambda ring: ring.rank)[:1]
            reader = Reader(history, {ring.id: ring for ring in rings})
            return {
                (reader.names.group(ring.id, group).label, reader.names.op(ring.id, op)): each
                for ring in rings
                for (group, op), each in reader.parts.repeats(ring).items()
            }

    def collective(
        self, group_id: str, seq: int, job: str | None = None
    ) -> tuple[list[Operation], collective_join.Waits | None] | None:
        """Return one collective as an operation per rank and, if it is symmetric and complete, its waits; ``None``: not found.

        Args:
            job: the run; by default the one that had it last, as two runs of a name have the same groups.
        """
        with History(self.path, self._damaged) as history:
            found = Reader(history, {ring.id: ring for ring in history.rings(job)}).collective(group_id, seq)
        if not found:
            return None
        joinable = (
            len(found) == found[0].group_size > 1 and len({o.op for o in found}) == 1 and found[0].op in ev.SYMMETRIC
        )
        if not joinable or any(
            o.duration_s is None or not o.aligned or (o.timing == "wait" and o.is_async) for o in found
        ):
            return found, None
        parts = [
            collective_join.Part(o.rank, ev.OP_CODE[o.op], 0, 0, round((o.duration_s or 0) * 1e9), None) for o in found
        ]
        return found, collective_join.split(parts)

    def latest_steps(self, from_ns: int, job: str, most: int) -> tuple[list[StepView], bool]:
        """Return a job's latest steps since ``from_ns``, newest first, at most so many, and whether there may be earlier ones."""
        steps = self.steps(from_ns, ev.MAX_PLAUSIBLE, job, None, most)
        return steps, len(steps) == most

    def step_totals(self, job: str) -> list[StepTotals]:
        """Return all steps of a job by rank; a rank that has restarted may be in it several times."""
        with History(self.path, self._damaged) as history:
            rank_of = {ring.id: ring.rank for ring in history.rings(job)}
            found = history.step_totals(list(rank_of))
        return [StepTotals(rank_of[ring], *of_ring) for ring, of_ring in found.items()]

    def steps(self, from_ns: int, until_ns: int, job: str | None, rank: int | None, limit: int) -> list[StepView]:
        """Return the steps that ended in the window, newest first."""
        with History(self.path, self._damaged) as history:
            rings = {ring.id: ring for ring in history.rings(job) if rank is None or ring.rank == rank}
            steps = history.steps(from_ns, until_ns, list(rings), limit)
        return [step_view(rings[step.ring], step) for step in steps]

    def ranks(self, job: str | None) -> list[RankView]:
        """Return the ranks, sorted by job and number."""
        kept: dict[tuple[object, ...], tuple[int, int]] = {}
        with History(self.path, self._damaged) as history:
            rings = history.rings(job)
            latest = latest_of_ranks(rings)
            ids = [ring.id for ring in latest.values()]
            sources, frameworks = history.names("exposed", ids), history.names("frameworks", ids)
            waited, cores = history.names("core_wait", ids), history.names("cores", ids)
        for ring in rings:
            records, lost = kept.get(ring.process, (0, 0))
            kept[ring.process] = records + ring.next_n - ring.lost, lost + ring.lost + ring.dropped
        live = self.live_ranks()
        views = [
            replace(
                _rank(ring, live.get(ring.uid), *kept[ring.process]),
                exposed_source=sources.get((ring.id, 0)),
                frameworks=framework_settings.listed(frameworks.get((ring.id, 0))),
            )
            for ring in latest.values()
        ]
        views = [
            replace(view, core_wait_share=float(share)) if view.core_wait_share is None and share else view
            for view, share in zip(views, (waited.get((ring.id, 0)) for ring in latest.values()), strict=True)
        ]
        views = [
            replace(view, cores=Cores(**json.loads(found))) if view.cores is None and found else view
            for view, found in zip(views, (cores.get((ring.id, 0)) for ring in latest.values()), strict=True)
        ]
        return sorted(views, key=lambda view: (view.job_id, view.rank))

    def begun_at(self, job: str) -> float:
        """Return the Unix time (s) when the latest rank of a job began; an earlier run of that name has ended by then."""
        with History(self.path, self._damaged) as history:
            return max((ring.started_ns for ring in history.rings(job)), default=0) / 1e9

    def live_ranks(self) -> dict[str, RankView]:
        """Return the ranks in memory, by the uid of their ring."""
        with self._lock:
            jobs, now_ns = self._aggregate.jobs.values() if self._aggregate is not None else (), self._now_ns()
            found = [
                (uid, totals.gpu, live_ranks.rank(job.id, totals, now_ns, sought))
                for job in jobs
                for sought in [ended_calls.sought(job, now_ns)]
                for uid, totals in job.rank_totals.items()
            ]
        gpus = ((uid, self._gpu_at(place), view) for uid, place, view in found)
        return {uid: replace(view, gpu=None if gpu is None else gpu.card.index) for uid, gpu, view in gpus}

    def slots(self, from_ns: int, until_ns: int, job: str, of: Lengths = FINE) -> list[SlotSums]:
        """Return the sums of a job's buckets, oldest first, as far as they are in the history."""
        with History(self.path, self._damaged) as history:
            every = history.rings(job)
            rings = [ring.id for ring in every]
            steps = history.step_sums_by_slot(from_ns, until_ns, rings, of.steps_ns)
            sums = history.bus_sums(from_ns, until_ns, rings, of.busbw_ns)
            waits = history.wait_sums(from_ns, until_ns, every, of.steps_ns)
        known = sorted(steps.keys() | sums.keys())
        return [SlotSums(at, steps.get(at, NO_STEPS), sums.get(at, {}), waits.get(at, NO_WAITS)) for at in known]

    @contextmanager
    def live(self, job: str | None) -> Iterator[tuple[list[Job], int]]:
        """Hold the lock; yield the jobs in memory and the monotonic time in ns."""
        with self._lock:
            jobs = self._aggregate.jobs.values() if self._aggregate is not None else ()
            yield [each for each in jobs if job in (None, each.id)], self._now_ns()

    def groups(self, job: str | None) -> list[GroupView]:
        """Return the groups that the latest processes of the ranks have used, sorted by job."""
        with History(self.path, self._damaged) as history:
            found = history.rings(job)
            processes = {ring.process for ring in latest_of_ranks(found).values()}
            rings = {ring.id: ring for ring in found if ring.process in processes}
            seen: dict[tuple[str, str], list[tuple[int, GroupInfo]]] = {}
            for (ring, _), group in history.groups(list(rings)).items():
                seen.setdefault((rings[ring].job, group.group_id), []).append((rings[ring].rank, group))
        views = [live_ranks.group(job_id, members) for (job_id, _), members in seen.items()]
        return sorted(views, key=lambda view: (view.job_id, -view.size, view.name))


def _recount(history: History, rings: Iterable[RingRow]) -> JobTable:
    """Return totals of records that are stored but not in a rollup yet: an agent's last seconds, for other processes."""
    aggregate, open_ended = JobTable(), [ring for ring in rings if ring.rolled_n < ring.next_n]
    ids = [ring.id for ring in open_ended]
    groups, ops, begun = history.groups(ids), history.names("op", ids), history.first_steps(ids)
    sources = history.names("steps", ids)
    for ring in open_ended:
        # Brings in numpy, which only those need who count records.
        from commwatch_agent.ingest.batches import ingest_records

        totals = aggregate.open(ring.uid, ring.identity, name=ring.job, run=ring.run)
        totals.offset_ns = ring.wall_offset_ns
        unrolled = history.raw_since(ring)
        first = list(islice(unrolled, 1))
        totals.begun = has_begun(begun.get(ring.id), ring, first)
        totals.marked = totals.begun and sources.get((ring.id, 0)) != ITERATIONS
        totals.groups.update({small_id: group for (at, small_id), group in groups.items() if at == ring.id})
        totals.ops.update({code: name for (at, code), name in ops.items() if at == ring.id})
        for records, until_n in chain(first, unrolled):
            ingest_records(totals, records, until_n)
    return aggregate


def _live(aggregate: JobTable, from_ns: int, until_ns: int, job: str | None) -> list[tuple[int, Counted]]:
    return [
        (slot, totals.counted(each.id, key, cell.copy()))
        for each in aggregate.jobs.values()
        if job in (None, each.id)
        for totals in each.rank_totals.values()
        for slot, key, cell in totals.live_cells()
        if from_ns <= slot < until_ns
    ]


def _rank(ring: RingRow, live: RankView | None, records: int, lost: int) -> RankView:
    return _stored(ring, records, lost) if live is None else replace(live, job_id=ring.job, records=records, lost=lost)


def _exit_code(rings: Sequence[RingRow], exits: Mapping[tuple[str, str], tuple[int, int]]) -> int | None:
    """Return the exit code of the launcher of a run; ``None``: not known."""
    job, runs = str(rings[-1].identity["job"]), {str(ring.identity.get("run", "")) for ring in rings}
    left = [end for (name, run), end in exits.items() if name == job and run in runs - {""}]
    if runs == {""}:  # a launcher has passed on the name only
        began_ns = rings[-1].process_began_ns
        left = [end for (name, _), end in exits.items() if name == job and end[1] >= began_ns]
    code, _ = max(left, key=lambda end: end[1], default=(None, 0))
    return code


def _job(rings: list[RingRow], exit_code: int | None, run: Run, sources: Mapping[tuple[int, int], str]) -> JobView:
    """Return the view of a job.

    Args:
        rings: of its latest run, oldest first.
        exit_code: of its launcher, if it has ended.
        sources: where the steps of rings come from, as from ``History.names``.
    """
    of_latest = latest_run(rings).values()
    unavailable = next((ring.steps_unavailable for ring in of_latest if ring.steps_unavailable), None)
    running = any(ring.running for ring in rings)
    latest = rings[-1]
    began, life = latest.process_began_ns, latest.restart
    ended = [] if running else [(ring.rank, ring.ending) for ring in rings if ring.restart == life]
    # A rank that ended before that is of an earlier part of a script, with more ranks.
    endings = {rank: ending for rank, ending in ended if ending is not None and ending.until_ns >= began}
    code = None if running else exit_code
    return JobView(
        job_id=run.name,
        state="running" if running else "ended",
        world_size=latest.world_size,
        ranks=sorted({ring.rank for ring in rings}),
        restarts=life,
        started_at=min(ring.started_ns for ring in rings) / 1e9,
        last_seen_at=max(
            ring.seen_ns if ring.ending is None else max(ring.seen_ns, ring.ending.until_ns) for ring in rings
        )
        / 1e9,
        lost=sum(ring.lost + ring.dropped for ring in rings),
        records=sum(ring.next_n - ring.lost for ring in rings),
        steps_unavailable=unavailable,
        exit_code=code,
        failed=failed(endings, code),
        ending=says(endings, code),
        run=run.common,
        step_source=common_source(sources.get((ring.id, 0)) for ring in of_latest),
    )


def _stored(ring: RingRow, records: int, lost: int) -> RankView:
    """Return the view of a rank that is only in the history: nothing of it is in flight."""
    mode, reason = live_ranks.gpu_timing(ring.identity)
    return RankView(
        job_id=ring.job,
        rank=ring.rank,
        restart=ring.restart,
        state="running" if ring.running else "ended" if ring.state == "ended" else "gone",
        host=str(ring.identity.get("host", "")),
        local_rank=ring.identity.get("local_rank"),
        pid=int(ring.identity.get("pid", 0)),
        hook=str(ring.identity.get("hook", "")),
        process=None,
        heartbeat_age_s=None,
        last_seq={},
        launched_s={},
        in_flight=[],
        failed=[],
        records=records,
        lost=lost,
        gpu_timing=mode,
        gpu_timing_reason=reason,
        ended_at=None if ring.ending is None else ring.ending.until_ns / 1e9,
        started_at=ring.started_ns / 1e9,
        ended_after=None if ring.ending is None else ring.ending.since_ns / 1e9,
        failed_in_operation=ring.ending is not None and ring.ending.in_operation,
        end_is_reported=ring.ending is not None and ring.ending.is_reported,
        raised=(ring.ending and ring.ending.raised) or None,
        raised_at=(ring.ending and ring.ending.at) or None,
        raised_says=(ring.ending and ring.ending.says) or None,
        exit_status=ring.ending and ring.ending.status,
        stopped_by=(ring.ending and ring.ending.stop) or None,
        stopped_at=ring.ending.stop_ns / 1e9 if ring.ending and ring.ending.stop else None,
    )
