"""The timeline of real Gloo jobs: a slice for each record of the rings, arrows for each collective and message."""

from __future__ import annotations

import io
from collections import Counter, defaultdict
from pathlib import Path

import pytest

from commwatch.wire import events as ev
from commwatch_agent.report.timeline_export import Window, export
from tests.chrome_trace import parsed
from tests.e2e.torchjob import RankRecords, digest, read_rings, run_job


def _expected(records: list[tuple[RankRecords, ev.Record]]) -> Counter[str]:
    """Arrows by operation: from the rank that all waited for, which is the one with the shortest part, or from the root, to each other one.

    Gloo's ends are seen late at times, and a rank's next operation begins only then. A rank that had ended by then has no arrow.
    """
    parts: dict[tuple[str, int], list[tuple[RankRecords, ev.Record]]] = defaultdict(list)
    for rank, record in records:
        if rank.op(record) not in ev.P2P:
            parts[rank.groups[record.group]["group_id"], record.seq].append((rank, record))
    found: Counter[str] = Counter()
    for collective in parts.values():
        rank, first = min(collective, key=lambda part: part[1].end_ns - part[1].start_ns)
        if rank.op(first) in ev.FROM_ROOT:
            rank, first = next(part for part in collective if part[0].rank == first.peer)
        found[rank.op(first)] += sum(part is not first and part.end_ns >= first.start_ns for _, part in collective)
    return +found


@pytest.mark.parametrize(("script", "arguments", "ranks"), [("pipeline.py", ("4", "12"), 3), ("train.py", ("ddp",), 2)])
def test_every_record_of_a_job(tmp_path: Path, script: str, arguments: tuple[str, ...], ranks: int) -> None:
    """The strictly read trace has the operations that the rings have, and an arrow for each message, and to each rank of a collective."""
    run_job(tmp_path, script, *arguments, nproc=ranks)
    rings, out = read_rings(tmp_path), io.StringIO()
    agent, _ = digest(tmp_path)
    found = export(agent.path, agent.jobs()[0].job_id, Window(None), (), out)
    trace = parsed(out.getvalue().encode())
    records = [(rank, record) for rank in rings for record in rank.operations]
    expected = Counter(
        (rank.rank, rank.op(record)) for rank, record in records if not record.flags & (ev.UNTIMED | ev.FAILED)
    )
    assert Counter((each.rank, each.name) for each in trace.of("operation")) == expected
    assert found.operations == len(records)
    sends = sum(count for (_, name), count in expected.items() if name == "send")
    arrows = Counter(name for _, _, name in trace.arrows)
    assert arrows.pop("message", 0) == sends
    assert arrows == _expected(records)
    steps = sum(len(rank.marks) for rank in rings)
    assert len(trace.of("step")) <= steps
