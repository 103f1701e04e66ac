"""The timeline of real Gloo jobs: a slice for each record of the rings, arrows for each collective and message."""

from __future__ import annotations

import io
from collections import Counter
from pathlib import Path

import pytest

from commwatch.collectors.wire import events as ev
from commwatch.report.timeline_export import Window, export
from tests.chrome_trace import parsed
from tests.e2e.torchjob import digest, read_rings, run_job

pytestmark = pytest.mark.usefixtures("hook")


@pytest.mark.parametrize(("script", "arguments", "ranks"), [("pipeline.py", ("4", "12"), 3), ("train.py", ("ddp",), 2)])
def test_every_record_of_a_job(tmp_path: Path, script: str, arguments: tuple[str, ...], ranks: int) -> None:
    """The strictly read trace has the operations that the rings have, and each send and recv, and each rank of a collective, has its arrow."""
    run_job(tmp_path, script, *arguments, nproc=ranks)
    rings, out = read_rings(tmp_path), io.StringIO()
    agent, _ = digest(tmp_path)
    found = export(agent.path, agent.jobs()[0].job_id, Window(None), (), out)
    trace = parsed(out.getvalue().encode())
    records = [(rank, record) for rank in rings for record in rank.operations]
    expected = Counter(
        (rank.rank + 1, rank.op(record)) for rank, record in records if not record.flags & (ev.UNTIMED | ev.FAILED)
    )
    assert Counter((each.pid, each.name) for each in trace.of("operation")) == expected
    assert found.operations == len(records)
    counts: Counter[str] = Counter()
    for (pid, name), count in expected.items():
        counts["message" if name == "send" else name] += 0 if name == "recv" or (pid == 1 and name != "send") else count
    assert Counter(name for _, _, name in trace.arrows) == +counts
    steps = sum(len(rank.marks) for rank in rings)
    assert len(trace.of("step")) <= steps
