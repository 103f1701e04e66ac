"""Read access to the history: the queries of the API, the report and the command line."""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Collection, Iterator
from functools import partial
from math import inf
from pathlib import Path
from typing import NamedTuple

from commwatch.wire.events import OP_CODE, OPS, SYMMETRIC
from commwatch.wire.numbers import NUMBERS
from commwatch_agent.history import arrival
from commwatch_agent.history.chunks import Damaged
from commwatch_agent.history.extents import ANY, Filter
from commwatch_agent.history.opening import connect
from commwatch_agent.history.rows import (
    COARSE_NS,
    IN_STEPS,
    IncidentRow,
    RingRow,
    Rollup,
    as_run,
    first_step_ns,
    newest_runs,
    raw_since,
    rings,
    rollups,
)
from commwatch_agent.history.soundness import SOUND
from commwatch_agent.model.cells import NO_WAITS, SLOT_NS, GroupInfo, StepSums, WaitSums, added
from commwatch_agent.model.node_counters import CounterSample, NodeCounter
from commwatch_agent.model.runs import Run, Stored

#: The fields of ``StepSums``, of grouped rows; TOTAL, because SUM fails on integer overflow.
_STEP_SUMS = """COUNT(*), COUNT(comm_ns), TOTAL(CASE WHEN comm_ns NOT NULL THEN end_ns - start_ns END), TOTAL(comm_ns),
    COUNT(CASE WHEN comm_ns NOT NULL THEN exposed_ns END), TOTAL(CASE WHEN comm_ns NOT NULL AND exposed_ns NOT NULL THEN end_ns - start_ns END),
    TOTAL(CASE WHEN comm_ns NOT NULL THEN exposed_ns END)"""
#: ``SOUND`` in a join with another table that has such columns.
_SOUND_CHUNK = SOUND["chunk"].replace(", ", ", chunk.").replace("chunk.'", "'")


#: States of an incident, and most incidents of an answer.
STATES, MOST_INCIDENTS = ("pending", "open", "ended"), 1000
#: Rows that are read at a time where many are wanted.
_TOGETHER = 4096


class StoredStep(NamedTuple):
    """One step of one ring; ``start_ns`` and ``end_ns`` are wall time."""

    ring: int
    seq: int
    start_ns: int
    end_ns: int
    comm_ns: int | None
    exposed_ns: int | None
    #: Communication time by group label.
    groups: dict[str, int]
    p2p_wait_ns: int | None
    #: It took far longer than its neighbours.
    long: bool


class Chunk(NamedTuple):
    """A run of raw records of one ring; the stamps in the records give their numbers."""

    id: int
    ring: int
    until_ns: int
    records: bytes


class GroupSpan(NamedTuple):
    """The operations of one group in a chunk: the group's number in the ring, and the range of sequence numbers (as in ``numbers.hull``)."""

    chunk: int
    ring: int
    small_id: int
    seq_from: int
    seq_until: int


class History:
    """Read access for queries; each call sees the latest commit. Use it in one thread.

    Args:
        damaged: counts and logs damaged rows and chunks.
    """

    def __init__(self, path: Path, damaged: Damaged | None = None) -> None:
        damaged = Damaged() if damaged is None else damaged
        self._db = connect(path, False, damaged)
        self._unpacked = partial(damaged.unpacked, path)
        #: Chunks that were removed before ``chunks_in_pieces`` came to them.
        self.removed = 0

    def __enter__(self) -> History:
        return self

    def __exit__(self, *_: object) -> None:
        self._db.close()

    def freeze(self) -> None:
        """Make all further calls read one snapshot, which the next call takes."""
        self._db.execute("BEGIN")

    def thaw(self) -> None:
        """End ``freeze``: further calls see the latest commit again, and the agent can empty the write-ahead log."""
        self._db.execute("COMMIT")

    def rings(self, job: str | None = None) -> list[RingRow]:
        """Return the rings of a run, or of the latest run of each name, oldest first.

        Args:
            job: name of a run, for the latest of that name; or ``NAME@ID`` with the id of an earlier one.
        """
        if job is None:
            return newest_runs(rings(self._db, "1", ()))
        _, found = self._found(job)
        return [ring._replace(job=job) for ring in found]

    def _found(self, job: str) -> tuple[str, list[RingRow]]:
        """Return the name of a run without an id, and its rings, oldest first, by a name as for ``rings``."""
        found = newest_runs(rings(self._db, "job = ?", (job,)))
        name, _, common = job.rpartition("@")
        if found or not name:
            return job, found
        return name, [ring for ring in self._rings_with(common) if ring.job == name]

    def _rings_with(self, common: str) -> list[RingRow]:
        """Return the rings of the run whose ranks alone have ``common``, oldest first."""
        shared = "SELECT run FROM ring WHERE run = ?1 OR id IN (SELECT ring FROM name WHERE kind = 'run' AND name = ?1)"
        return rings(self._db, f"run != '' AND run IN ({shared})", (common,)) if common else []

    def address(self, common: str) -> str | None:
        """Return what ``rings`` takes for the run whose ranks alone have ``common``; ``None``: it is not here."""
        found = self._rings_with(common)
        return self._address(found[-1], common) if found else None

    def _address(self, ring: RingRow, common: str) -> str:
        """Return what ``rings`` takes for the run of a ring: its name, with the id if another run of that name came later."""
        return ring.job if self.rings(ring.job)[-1].run == ring.run else f"{ring.job}@{common}"

    def run(self, job: str) -> Run | None:
        """Return a run, by a name as for ``rings``; ``None``: there is none."""
        found = self.rings(job)
        return as_run(found, self.names("run", [ring.id for ring in found])) if found else None

    def stored(self, job: str) -> Stored:
        """Return by what the things are found that a run left beside the history, by a name as for ``rings``."""
        name, found = self._found(job)
        if not found:
            return Stored("", job, 0.0, inf)
        key, begun_ns = found[0].run, found[0].started_ns
        others = (ring.started_ns for ring in rings(self._db, "job = ?", (name,)) if ring.run != key)
        until_s = min((other_ns / 1e9 for other_ns in others if other_ns > begun_ns), default=inf)
        return Stored(key, name, begun_ns / 1e9, until_s)

    def earlier(self) -> dict[str, list[str]]:
        """Return by name its runs before the latest one, as ``rings`` takes them, the latest first; names with one run are left out."""
        found: dict[str, list[str]] = {}
        for name, run in self._db.execute("SELECT job, run FROM ring GROUP BY job, run ORDER BY MAX(id) DESC"):
            found.setdefault(name, []).append(f"{name}@{run}")
        return {name: runs[1:] for name, runs in found.items() if len(runs) > 1}

    def ahead_ns(self, job: str) -> int:
        """Return by how much the times of a job are ahead of the agent's wall clock now, as that was set since the latest ring began.

        0 for a job of an earlier boot: what the clock was set meanwhile is not known.
        """
        wanted = f"SELECT identity, seen_ns - arrived_ns FROM ring WHERE job = ? AND {SOUND['ring']} ORDER BY arrived_ns DESC LIMIT 1"
        now, found = arrival.stored(self._db), self._db.execute(wanted, (job,)).fetchone()
        if now is None or found is None or json.loads(found[0]).get("boot_id") != now.boot_id:
            return 0
        return int(found[1]) - (now.wall_ns - now.arrived_ns)

    def exits(self) -> dict[tuple[str, str], tuple[int, int]]:
        """Return the launcher's exit code and the wall time in ns of its end, where known, by job and by what ``commwatch run`` named."""
        return {
            (job, run): (code, at)
            for job, run, code, at in self._db.execute(
                f"SELECT job, run, code, at_ns FROM run_exit WHERE {SOUND['run_exit']}"
            )
        }

    def watched(self, run: str) -> list[str]:
        """Return the runs of what ``commwatch run`` has named, as ``rings`` takes them, the first begun first."""
        of_runs = {ring.run: ring for ring in rings(self._db, "instr(identity, ?)", (run,))}
        return [self._address(ring, key) for key, ring in of_runs.items()]

    def groups(self, rings: list[int] | None = None) -> dict[tuple[int, int], GroupInfo]:
        """Return the groups of the rings, or of all rings, by (ring, number in the ring)."""
        rows = self._db.execute(
            "SELECT ring, small_id, group_id, label, name, description, ranks, size, aligned, backend FROM grp"
            f" WHERE (?1 IS NULL OR ring IN (SELECT value FROM json_each(?1))) AND {SOUND['grp']}",
            (_listed(rings),),
        )
        return {
            (r[0], r[1]): GroupInfo(
                r[2], r[3], r[4], r[5], tuple(json.loads(r[6])) if r[6] else None, r[7], bool(r[8]), r[9]
            )
            for r in rows
        }

    def names(self, kind: str, rings: list[int] | None = None) -> dict[tuple[int, int], str]:
        """Return the names of ``kind`` in the rings, or in all rings, by (ring, code).

        Args:
            kind: ``dtype``, ``op``, ``parts`` for tables of the parts of a model (``model_parts.tables``), ``exposed`` for how exposed time was
                measured, ``steps`` for where its steps come from, ``cores`` for its cores and threads
                (``node.cores.Cores``) as JSON, ``core_wait`` for the share of its last half minute (0 to 1) in which its main
                thread waited for a core, or ``run`` for the id of its run in the job's store.
        """
        rows = self._db.execute(
            "SELECT ring, code, name FROM name WHERE kind = ?2 AND (?1 IS NULL OR ring IN (SELECT value FROM json_each(?1)))"
            f" AND {SOUND['name']}",
            (_listed(rings), kind),
        )
        return {(ring, code): name for ring, code, name in rows}

    def rollups(self, from_ns: int, until_ns: int, rings: list[int]) -> Iterator[Rollup]:
        """Yield the rollups of the rings whose slot begins in ``[from_ns, until_ns)``."""
        return rollups(
            self._db,
            "slot_ns >= ? AND slot_ns < ? AND ring IN (SELECT value FROM json_each(?))",
            (from_ns, until_ns, json.dumps(rings)),
        )

    def incidents(
        self,
        *,
        incident_id: str | None = None,
        agent: str | None = None,
        runs: Collection[str] | None = None,
        states: Collection[str] = STATES,
        most: int = MOST_INCIDENTS,
    ) -> list[IncidentRow]:
        """Return incidents, the latest first.

        Args:
            incident_id: only this one.
            agent: run directory of an agent; ``None``: of all.
            runs: keys of runs; ``None``: of all, and of the node.
            states: only in these states.
            most: only so many.
        """
        where, values = [SOUND["incident"], "state IN (SELECT value FROM json_each(?))"], [json.dumps(list(states))]
        if incident_id is not None:
            where, values = [*where, "id = ?"], [*values, incident_id]
        if agent is not None:
            # The plus: else SQLite puts this value in place of the column of every row, also where it judges whether the row is damaged.
            where, values = [*where, "+agent = ?"], [*values, agent]
        if runs is not None:
            where, values = [*where, "run IN (SELECT value FROM json_each(?))"], [*values, json.dumps(list(runs))]
        columns = "id, agent, job, run, state, began_ns, last_ns, data"
        found = self._db.execute(
            f"SELECT {columns} FROM incident WHERE {' AND '.join(where)} ORDER BY last_ns DESC LIMIT ?", (*values, most)
        )
        return [IncidentRow(*row) for row in found]

    def node_samples(self, from_ns: int, until_ns: int) -> Iterator[CounterSample]:
        """Yield the measurements of the node in ``[from_ns, until_ns)``, oldest first."""
        where = f"at_ns >= ? AND at_ns < ? AND {SOUND['node_sample']}"
        wanted = f"SELECT at_ns, counters FROM node_sample WHERE {where} ORDER BY at_ns LIMIT {_TOGETHER}"
        while rows := self._db.execute(wanted, (from_ns, until_ns)).fetchall():
            for at_ns, counters in rows:
                yield CounterSample(at_ns, [NodeCounter(*each) for each in json.loads(counters)])
            from_ns = rows[-1][0] + 1

    def raw_since(self, ring: RingRow) -> Iterator[tuple[bytes, int]]:
        """Yield runs of stored records that are in no rollup yet, oldest first, each with the number after its last."""
        return raw_since(self._db, ring, self._unpacked)

    def steps(self, from_ns: int, until_ns: int, rings: list[int], limit: int = -1) -> list[StoredStep]:
        """Return the steps of the rings that ended in ``[from_ns, until_ns)``, newest first."""
        return list(self.each_step(from_ns, until_ns, rings, limit))

    def each_step(self, from_ns: int, until_ns: int, rings: list[int], limit: int = -1) -> Iterator[StoredStep]:
        """Yield the steps of ``steps``; no cursor stays open while one of them is used."""
        wanted = (
            "SELECT ring, seq, start_ns, end_ns, comm_ns, exposed_ns, groups, p2p_wait_ns, long FROM step"
            " WHERE end_ns >= ?1 AND end_ns <= ?2 AND (end_ns, ring, seq) < (?2, ?3, ?4) AND ring IN (SELECT value FROM json_each(?5))"
            f" AND {SOUND['step']} ORDER BY end_ns DESC, ring DESC, seq DESC LIMIT ?6"
        )
        last, left, listed = (until_ns, -1, -1), limit, json.dumps(rings)
        while left:
            together = _TOGETHER if left < 0 else min(left, _TOGETHER)
            rows = self._db.execute(wanted, (from_ns, *last, listed, together)).fetchall()
            for *known, groups, waited, long in rows:
                yield StoredStep._make((*known, dict(json.loads(groups)), waited, bool(long)))
            if len(rows) < together:
                return
            ring, seq, _, end_ns, *_ = rows[-1]
            last, left = (end_ns, ring, seq), left - together if left > 0 else left

    def first_steps(self, rings: list[int]) -> dict[int, int]:
        """Return by ring when its first stored step began, in Unix time (ns); rings without steps are left out."""
        begins = {ring: first_step_ns(self._db, ring) for ring in rings}
        return {ring: begin for ring, begin in begins.items() if begin is not None}

    def extent_of_steps(self, ring: int, after_seq: int, until_seq: int) -> tuple[int, int] | None:
        """Return begin and end of a ring's steps after number ``after_seq``, up to ``until_seq``, in Unix time (ns); ``None``: there are none."""
        both = "AND" if after_seq <= until_seq else "OR"  # numbers that go on at 0
        wanted = f"SELECT MIN(start_ns), MAX(end_ns) FROM step WHERE ring = ? AND (seq > ? {both} seq <= ?) AND {SOUND['step']}"
        ((begin, end),) = self._db.execute(wanted, (ring, after_seq, until_seq))
        return None if begin is None else (int(begin), int(end))

    def last_end_ns(self, rings: list[int]) -> int:
        """Return the Unix time in ns of the rings' latest record or step; 0: there is none."""
        ends = "SELECT MAX({0}) FROM {1} WHERE ring IN (SELECT value FROM json_each(?1))"
        ((end,),) = self._db.execute(
            f"SELECT MAX(IFNULL(({ends.format('until_ns', 'extent')}), 0), IFNULL(({ends.format('end_ns', 'step')}), 0))",
            (json.dumps(rings),),
        )
        return int(end)

    def step_sums_by_slot(
        self, from_ns: int, until_ns: int, rings: list[int], length_ns: int = SLOT_NS
    ) -> dict[int, StepSums]:
        """Return the sums over the rings' steps by slot in ns, without long steps."""
        rows = self._db.execute(
            f"SELECT end_ns / ?1 * ?1, {_STEP_SUMS} FROM step"
            # No checksums here: a plot of a week reads millions of steps. `Examination` finds and reports damaged ones.
            " WHERE end_ns >= ?2 AND end_ns < ?3 AND NOT long AND ring IN (SELECT value FROM json_each(?4)) GROUP BY 1",
            (length_ns, from_ns, until_ns, json.dumps(rings)),
        )
        return {slot: StepSums(*sums) for slot, *sums in rows}

    def step_sums(self, rings: list[int]) -> dict[tuple[int, bool], StepSums]:
        """Return the sums over the steps of each ring, by (ring, whether the steps were long)."""
        # No checksums, as in ``step_sums_by_slot``.
        rows = self._db.execute(
            f"SELECT ring, long, {_STEP_SUMS} FROM step WHERE ring IN (SELECT value FROM json_each(?)) GROUP BY 1, 2",
            (json.dumps(rings),),
        )
        return {(ring, bool(long)): StepSums(*sums) for ring, long, *sums in rows}

    def step_totals(self, rings: list[int]) -> dict[int, tuple[int, int, float]]:
        """Return by ring the number of its steps, of those with known exposed communication, and the sum of that in ns."""
        # No checksums, as in ``step_sums_by_slot``.
        rows = self._db.execute(
            "SELECT ring, COUNT(*), COUNT(exposed_ns), TOTAL(exposed_ns) FROM step"
            " WHERE ring IN (SELECT value FROM json_each(?)) GROUP BY 1",
            (json.dumps(rings),),
        )
        return {ring: (steps, known, exposed_ns) for ring, steps, known, exposed_ns in rows}

    def median_step_ns(self, rings: list[int]) -> float | None:
        """Return the median duration in ns of the rings' steps together, without long ones; ``None``: there are none."""
        of_rings = "FROM step WHERE NOT long AND ring IN (SELECT value FROM json_each(?1))"
        ((median,),) = self._db.execute(
            f"WITH n(n) AS (SELECT COUNT(*) {of_rings}) SELECT AVG(d) FROM (SELECT end_ns - start_ns AS d {of_rings} ORDER BY 1"
            " LIMIT 2 - (SELECT n FROM n) % 2 OFFSET ((SELECT n FROM n) - 1) / 2)",
            (json.dumps(rings),),
        )
        return None if median is None else float(median)

    def step_durations(self, rings: list[int], most: int) -> tuple[int, list[int]]:
        """Return how many steps the rings have together, without long ones, and their durations in ns, sorted.

        Of more than ``most``, only so many are returned, at equal distances in that order.
        """
        rows = self._db.execute(
            "WITH each AS (SELECT end_ns - start_ns AS d, ROW_NUMBER() OVER (ORDER BY end_ns - start_ns) AS at, COUNT(*) OVER () AS n"
            " FROM step WHERE NOT long AND ring IN (SELECT value FROM json_each(?1)))"
            " SELECT n, d FROM each WHERE n <= ?2 OR (at * ?2 + n / 2) / n > ((at - 1) * ?2 + n / 2) / n ORDER BY at",
            (json.dumps(rings), most),
        ).fetchall()
        return rows[0][0] if rows else 0, [duration for _, duration in rows]

    def bus_sums(
        self, from_ns: int, until_ns: int, rings: list[int], length_ns: int = SLOT_NS
    ) -> dict[int, dict[str, tuple[float, float]]]:
        """Return bus bytes and their busy time in ns, of the rings' operations, by slot in ns and op, without longer rollups.

        Operations before the first step of a ring that has steps are left out: they show nothing of training.
        """
        rows = self._db.execute(
            "SELECT slot_ns / ?1 * ?1, op, TOTAL(bus_bytes), TOTAL(busy_ns) FROM rollup WHERE slot_ns >= ?2 AND slot_ns < ?3 AND coarse <= ?4"
            f" AND bus_bytes > 0 AND op BETWEEN 1 AND ?5 AND ring IN (SELECT value FROM json_each(?6)) AND {IN_STEPS} AND {SOUND['rollup']} GROUP BY 1, 2",
            (length_ns, from_ns, until_ns, length_ns >= COARSE_NS, len(OPS), json.dumps(rings)),
        )
        found: dict[int, dict[str, tuple[float, float]]] = {}
        for slot, op, bus_bytes, busy_ns in rows:
            found.setdefault(slot, {})[OPS[op - 1]] = bus_bytes, busy_ns
        return found

    def wait_sums(self, from_ns: int, until_ns: int, rings: list[RingRow], length_ns: int) -> dict[int, WaitSums]:
        """Return the sums of the rings' waits by slot in ns, without longer rollups."""
        symmetric = f"bus_bytes > 0 AND op IN ({', '.join(str(OP_CODE[op]) for op in sorted(SYMMETRIC))})"
        known = {ring.id: ring for ring in rings}
        rows = self._db.execute(
            "SELECT slot_ns / ?1 * ?1, ring, TOTAL(wait_ns + p2p_wait_ns),"
            f" TOTAL(CASE WHEN {symmetric} THEN count END), TOTAL(CASE WHEN {symmetric} THEN joined END)"
            " FROM rollup WHERE slot_ns >= ?2 AND slot_ns < ?3 AND coarse <= ?4"
            f" AND ring IN (SELECT value FROM json_each(?5)) AND {SOUND['rollup']} GROUP BY 1, 2",
            (length_ns, from_ns, until_ns, length_ns >= COARSE_NS, json.dumps(list(known))),
        )
        found: dict[int, list[WaitSums]] = {}
        for slot, ring, waited, count, joined in rows:
            whole = known[ring].started_ns <= slot and known[ring].seen_ns >= slot + length_ns
            found.setdefault(slot, []).append(WaitSums(length_ns, waited, count, joined, not whole))
        slots = sorted(found)
        for start, end in self._long_steps(from_ns, until_ns, list(known)):
            # Only the slots that there are: times in a ring may be years apart.
            for slot in slots[bisect_right(slots, start - length_ns) : bisect_right(slots, end)]:
                found[slot][-1] = found[slot][-1]._replace(broken=1)
        return {slot: added(sums, NO_WAITS) for slot, sums in found.items()}

    def _long_steps(self, from_ns: int, until_ns: int, rings: list[int]) -> Iterator[tuple[int, int]]:
        """Yield begin and end of the long steps that overlap ``[from_ns, until_ns)``, as far as they do."""
        rows = self._db.execute(
            f"SELECT start_ns, end_ns FROM step WHERE long AND end_ns >= ? AND start_ns < ? AND ring IN (SELECT value FROM json_each(?)) AND {SOUND['step']}",
            (from_ns, until_ns, json.dumps(rings)),
        )
        yield from ((max(start, from_ns), min(end, until_ns)) for start, end in rows)

    def chunks(
        self, from_ns: int, until_ns: int, rings: list[int] | None = None, wanted: Filter = ANY
    ) -> Iterator[Chunk]:
        """Yield the chunks of the rings, or of all rings, with ends of operations in ``[from_ns, until_ns]``, latest end first.

        Chunks that cannot have operations that match ``wanted`` are left out, and not decompressed.
        """
        self._db.create_function("may_match", 3, wanted.may_match)
        rows = self._db.execute(
            # The order of the join is fixed, because the data of a chunk are long.
            "SELECT chunk.id, chunk.ring, chunk.until_ns, data FROM extent CROSS JOIN chunk ON chunk.id = extent.chunk"
            " WHERE extent.until_ns >= ?2 AND extent.from_ns <= ?3"
            " AND (?1 IS NULL OR extent.ring IN (SELECT value FROM json_each(?1)))"
            " AND (?4 = 0 OR longest_ns IS NULL OR longest_ns >= ?4)"
            f" AND (?5 IS NULL OR seq_from IS NULL OR {_in_range('?5')})"
            f" AND may_match(extent.ring, ops, groups) AND {SOUND['extent']} AND {_SOUND_CHUNK}"
            " ORDER BY extent.until_ns DESC",
            (_listed(rings), from_ns, until_ns, wanted.least_ns, wanted.seq),
        )
        for chunk, ring, until, data in rows:
            records = self._unpacked(chunk, data)
            if records is not None:
                yield Chunk(chunk, ring, until, records)

    def chunks_in_pieces(self, from_ns: int, until_ns: int, rings: list[int]) -> Iterator[Chunk]:
        """Yield ``chunks``, as they are listed now, each read when its turn comes: no cursor stays open while one of them is used.

        A chunk may have later records by then, which end after its ``until_ns``. ``removed`` counts those that are no longer there.
        """
        listed = self._db.execute(
            "SELECT chunk, until_ns FROM extent WHERE until_ns >= ?1 AND from_ns <= ?2 AND ring IN (SELECT value FROM json_each(?3))"
            f" AND {SOUND['extent']} ORDER BY until_ns DESC",
            (from_ns, until_ns, json.dumps(rings)),
        ).fetchall()
        wanted = set(rings)
        for number, until in listed:
            chunk = self.chunk(number)
            if chunk is not None and chunk.ring in wanted:
                yield chunk._replace(until_ns=until)
            elif chunk is not None or not self._db.execute("SELECT 1 FROM chunk WHERE id = ?", (number,)).fetchall():
                self.removed += 1

    def chunks_with(self, group_id: str, seq: int) -> Iterator[tuple[Chunk, int]]:
        """Yield the chunks that may have collective ``seq`` of a group, with the group's number in that ring."""
        found = self._db.execute(
            f"SELECT s.chunk, g.small_id FROM (SELECT ring, small_id FROM grp WHERE group_id = ?1 AND {SOUND['grp']}) g"
            " JOIN chunk c ON c.ring = g.ring JOIN span s ON s.chunk = c.id AND s.small_id = g.small_id"
            f" WHERE {_in_range('?2')}",
            (group_id, seq),
        )
        for chunk, small_id in found:
            read = self.chunk(chunk)
            if read is not None:
                yield read, small_id

    def spans(self, from_ns: int, rings: list[int]) -> Iterator[GroupSpan]:
        """Yield the ranges of sequence numbers in the rings' chunks with ends of operations from ``from_ns`` on."""
        rows = self._db.execute(
            "SELECT span.chunk, extent.ring, small_id, span.seq_from, span.seq_until FROM extent CROSS JOIN span ON span.chunk = extent.chunk"
            " WHERE extent.until_ns >= ? AND extent.ring IN (SELECT value FROM json_each(?))",
            (from_ns, json.dumps(rings)),
        )
        yield from map(GroupSpan._make, rows)

    def chunk(self, chunk: int) -> Chunk | None:
        """Return a chunk; ``None``: it is damaged, or no longer there."""
        # Only this row is checked: SQLite reads all the data of a row for its checksum.
        one = f"SELECT ring, until_ns, data FROM chunk WHERE id = ? AND {SOUND['chunk']}"
        for ring, until, data in self._db.execute(one, (chunk,)).fetchall():
            records = self._unpacked(chunk, data)
            return None if records is None else Chunk(chunk, ring, until, records)
        return None

    def stretch(self, ring: int, from_n: int, until_n: int) -> bytes:
        """Return the chunks of a ring that have records with numbers from ``from_n`` to before ``until_n``, one after the other."""
        some = f"SELECT id, data FROM chunk WHERE ring = ? AND until_n > ? AND first_n < ? AND {SOUND['chunk']} ORDER BY first_n"
        rows = self._db.execute(some, (ring, from_n, until_n)).fetchall()
        return b"".join(self._unpacked(chunk, data) or b"" for chunk, data in rows)


def _in_range(seq: str) -> str:
    """Return the SQL condition that a number is in the range of a chunk or a span, whose last number may be the smaller one."""
    return f"(({seq} - seq_from) & {NUMBERS - 1}) <= ((seq_until - seq_from) & {NUMBERS - 1})"


def _listed(rings: list[int] | None) -> str | None:
    return None if rings is None else json.dumps(rings)
