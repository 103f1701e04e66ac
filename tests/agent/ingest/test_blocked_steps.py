"""What the exposed time of a step is at most."""

from __future__ import annotations

import pytest

from commwatch.wire import events as ev
from commwatch_agent.ingest.batches import ingest_records
from commwatch_agent.ingest.jobs import JobTable
from tests.agent.analysis.test_ended_operations import add
from tests.helpers import MS, mark, operation, packed

SEEN = ev.ASYNC | ev.WAIT_SEEN


@pytest.mark.parametrize(
    ("flags", "waited_us", "expected_ms"),
    [(SEEN, 0, 0), (SEEN, 15_000, 15), (SEEN, 90_000, 40), (ev.ASYNC, 0, 40), (SEEN | ev.ON_DEVICE, 0, 40)],
)  # fmt: skip
@pytest.mark.parametrize("together", [True, False])
def test_exposed_time(flags: int, waited_us: int, expected_ms: int, *, together: bool) -> None:
    """A step is not exposed for longer than threads were blocked in its operations, if that was seen: a rank may sleep or wait for a core beside them."""
    totals = add(JobTable(), 0, 2)
    records = [mark(0, MS)]
    for n in range(4):
        end = (n + 1) * 100 * MS
        records += [
            operation(start_ns=end - 50 * MS, end_ns=end - MS, seq=n, flags=flags, waited_us=waited_us),
            mark(n + 1, end, exposed_ns=40 * MS),
        ]
    for each in [records] if together else [[one] for one in records]:
        ingest_records(totals, packed(*each))
    assert {step.exposed_ns for step in totals.steps.take()} == {expected_ms * MS}
