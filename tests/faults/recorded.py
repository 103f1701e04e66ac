"""Keeps a job of the fault matrix in a small file, and plays it to the rules, as fast as they can take it in.

A file is JSON, compressed. Of a job with a straggler, or with none: of each rank its identity, its groups and its records, times in units
of 10 µs from the first one on. Of a job that hangs, which is judged by what is in flight and by its processes: what the API showed of its
ranks and groups, again and again. A job with long waits has both, or, if it hangs, only the second one, in the folder ``views``.
"""

from __future__ import annotations

import gzip
import json
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import TypeAdapter

from commwatch.wire import events as ev
from commwatch.wire.ring_reader import RingReader
from commwatch_agent.analysis.ended_operations import stragglers
from commwatch_agent.analysis.verdict import Verdict
from commwatch_agent.analysis.verdicts import verdicts
from commwatch_agent.analysis.waits.step_waits import step_waits
from commwatch_agent.analysis.waits.uneven_work import StepWaits
from commwatch_agent.ingest.batches import Batch, ingest
from commwatch_agent.ingest.jobs import JobTable
from commwatch_agent.model.cells import StepRecord
from commwatch_agent.model.views import GroupView, RankView
from tests.faults.scenarios import Scenario
from tests.helpers import Watch, identity, write_ring

#: The files that tests play.
FOLDER = Path(__file__).parent / "records"
#: Where in a record's fields, as ``RingWriter.write`` takes them, its times are.
_LAUNCH, _START, _END = 6, 9, 10
UNIT_NS = 10_000
#: An agent looks so often.
TICK_NS = 500_000_000
#: What identifies a rank, of all that its ring says.
_KEPT = ("rank", "world_size", "restart")
#: Seconds since the fault, and the answers of ``/api/v1/ranks`` and ``/api/v1/groups``.
Views = tuple[float, Any, Any]
_GROUP = ("group", "name", "desc", "label", "group_id", "ranks", "size", "aligned", "backend")
_RANKS, _GROUPS = TypeAdapter(list[RankView]), TypeAdapter(list[GroupView])


def file_name(scenario: str) -> str:
    """Of the file with the records of a scenario, by its name."""
    return f"{scenario.replace(' ', '_')}.json.gz"


def views_name(scenario: Scenario) -> str:
    """Of the file with what was in flight in a scenario."""
    return f"views/{file_name(scenario.name)}" if scenario.rhythm else file_name(scenario.name)


def keep(rings: Iterable[Path], path: Path, from_s: float, until_s: float) -> None:
    """Write what the rings hold of operations that ended between two moments of Unix time to a file."""
    readers = [RingReader(ring) for ring in rings]
    first_ns = int(from_s * 1e9) - int(readers[0].identity["wall_offset_ns"])
    ranks = []
    for reader in readers:
        drained = reader.drain()
        records = [fields[1:-1] for fields in ev.RECORD.iter_unpack(drained.records)]
        assert not drained.lost or records[0][_END] < first_ns, f"{reader.path}: the ring is too small"
        within = [each for each in records if 0 <= each[_END] - first_ns < (until_s - from_s) * 1e9]
        names = [{key: entry[key] for key in _GROUP if key in entry} for entry in reader.names() if "group" in entry]
        about = {key: reader.identity[key] for key in _KEPT}
        ranks.append({"identity": about, "names": names, "records": list(_packed(within, first_ns))})
        reader.close()
    path.write_bytes(gzip.compress(json.dumps(ranks, separators=(",", ":")).encode(), 9, mtime=0))


def _packed(records: Iterable[tuple[int, ...]], first_ns: int) -> Iterator[list[int]]:
    """Each with its end since the one before, and its launch and start before its end."""
    before = first_ns
    for each in records:
        fields = list(each)
        fields[_LAUNCH], fields[_START] = ((each[_END] - each[at]) // UNIT_NS for at in (_LAUNCH, _START))
        fields[_END] = (each[_END] - before) // UNIT_NS
        before += fields[_END] * UNIT_NS
        yield fields


def _unpacked(records: Iterable[list[int]]) -> Iterator[tuple[int, ...]]:
    end_ns = 0
    for fields in records:
        end_ns += fields[_END] * UNIT_NS
        fields[_LAUNCH], fields[_START] = (max(0, end_ns - fields[at] * UNIT_NS) for at in (_LAUNCH, _START))
        fields[_END] = end_ns
        yield tuple(fields)


class Look(NamedTuple):
    """What an agent finds in a job."""

    #: Seconds since the begin of the recording.
    at_s: float
    #: The stragglers.
    late: set[int]
    #: How ranks waited for each other in the last minute; ``None``: not known.
    waits: StepWaits | None


def looks(path: Path, directory: Path, frameworks: Sequence[str] | None = None) -> Iterator[Look]:
    """Play a file: what is found twice a second; ``frameworks``: those that its ranks report."""
    watch, ranks = Watch(directory), json.loads(gzip.decompress(path.read_bytes()))
    pending = []
    for rank in ranks:
        about: dict[str, Any] = identity(**rank["identity"])
        used = [] if frameworks is None else [{"frameworks": list(frameworks)}]
        ring = write_ring(watch.rings, [], [*rank["names"], *used], slots=4096, **about)
        pending.append((ring, _unpacked(rank["records"])))
    waiting = [next(records, None) for _, records in pending]
    now_ns = 0
    while any(waiting):
        now_ns += TICK_NS
        for n, (ring, records) in enumerate(pending):
            while (record := waiting[n]) is not None and record[_END] <= now_ns:
                ring.write(*record)
                waiting[n] = next(records, None)
        watch.tick(now_ns)
        jobs = watch.aggregate.jobs.values()
        late, waits = {late.rank for _, _, late in stragglers(jobs, now_ns)}, [step_waits(job, now_ns) for job in jobs]
        yield Look(now_ns / 1e9, late, waits[0] if waits else None)
    for ring, _ in pending:
        ring.release()


def steps_of(path: Path, *, marked: bool) -> list[list[StepRecord]]:
    """The steps of each rank in a file, or what they are if the ranks had marked none."""
    aggregate, ranks, now_ns = JobTable(), [], 0
    for number, rank in enumerate(json.loads(gzip.decompress(path.read_bytes()))):
        totals = aggregate.open(str(number), identity(**rank["identity"]))
        totals.learn(rank["names"])
        records = [fields for fields in _unpacked(rank["records"]) if marked or fields[0] != ev.STEP_MARK]
        ranks.append((totals, deque(enumerate(records, 1))))
    while any(waiting for _, waiting in ranks):
        now_ns += TICK_NS
        batches = []
        for totals, waiting in ranks:
            read = b""
            while waiting and waiting[0][1][_END] <= now_ns:
                number, fields = waiting.popleft()
                read += ev.RECORD.pack(number, *fields, number)
            batches.append(Batch(totals, read, None))
        ingest([batch for batch in batches if batch.records])
    for totals, _ in ranks:
        totals.steps.finish()
    return [totals.steps.take() for totals, _ in ranks]


def keep_views(views: list[Views], path: Path) -> None:
    """Write what the API showed of a job's ranks and groups to a file."""
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(gzip.compress(json.dumps(views, separators=(",", ":")).encode(), 9, mtime=0))


def concluded(path: Path) -> Iterator[tuple[float, list[Verdict]]]:
    """Seconds since the fault, and the verdicts on what the API showed then, but for waits that are no fault."""
    for at_s, ranks, groups in json.loads(gzip.decompress(path.read_bytes())):
        found = verdicts(_RANKS.validate_python(ranks), _GROUPS.validate_python(groups))
        yield at_s, [each for each in found if each.kind != "waiting"]
