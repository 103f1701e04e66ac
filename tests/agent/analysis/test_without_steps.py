"""Ranks that have run out of inputs and meet the others in their steps."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import pytest

from commwatch_agent.analysis.ended_operations import stragglers
from commwatch_agent.analysis.waits.without_steps import Span, without_steps
from commwatch_agent.ingest.batches import ingest_records
from commwatch_agent.ingest.jobs import JobTable
from commwatch_agent.ingest.stragglers import BIN_NS
from commwatch_agent.job.rank_parts import late_across, parts
from tests.agent.analysis.test_ended_operations import add
from tests.helpers import MS, mark, operation, packed

EVERY, WORK_MS, LATE_MS = 100 * MS, 60, 30


def epochs(table: JobTable, inputs: Mapping[int, int], steps: Iterable[int], late: int | None, size: int) -> JobTable:
    """Some ranks of a job, with so many inputs in epochs of 80 steps. In each step all ranks meet."""
    steps = list(steps)
    for rank, own in inputs.items():
        made, marks = [], 0
        for seq in steps:
            end, trains = (seq + 1) * EVERY, seq % 80 < own
            computes_ms = (WORK_MS + LATE_MS * (rank == late)) * trains
            left = end - EVERY + 5 * MS
            made.append(operation(start_ns=left + computes_ms * MS, end_ns=end, seq=seq))
            if trains:
                made.append(mark(marks, end + MS))
                marks += 1
        ingest_records(add(table, rank, size), packed(*made))
    return table


def named(inputs: Mapping[int, int], until: int, late: int | None = None) -> list[int]:
    table = epochs(JobTable(), inputs, range(until), late, len(inputs))
    return [each.rank for _, _, each in stragglers(table.jobs.values(), until * EVERY)]


#: In the first epoch, at its end and in the next one.
WHEN = range(60, 240, 20)


@pytest.mark.parametrize(
    "inputs", [{0: 80, 1: 20}, {0: 80, 1: 20, 2: 20}, {0: 80, 1: 80, 2: 20}, {0: 80, 1: 50, 2: 20}]
)
@pytest.mark.parametrize("until", WHEN)
def test_no_rank_is_late(inputs: dict[int, int], until: int) -> None:
    """No rank is late while others have run out of inputs, however many these are, nor in the epoch after."""
    assert named(inputs, until) == []


@pytest.mark.parametrize("until", WHEN)
def test_late_beside_them(until: int) -> None:
    """Of several ranks that have inputs, the late one is named while another one has none."""
    assert named({0: 80, 1: 80, 2: 20}, until, late=1) == [1]


@pytest.mark.parametrize("until", WHEN)
def test_on_two_nodes(until: int) -> None:
    """So it is if the ranks are on two nodes: none is late, and one that really is late is named."""
    for late, expected in ((None, []), (1, [1])):
        columns = []
        for here in ({0: 80, 1: 80}, {2: 20}):
            table = epochs(JobTable(), here, range(until), late, 3)
            columns += parts(table.jobs.values(), until * EVERY)[1]
        assert [each.rank for _, _, each in late_across(columns)] == expected


@pytest.mark.parametrize("inputs", [{0: 80, 1: 20}, {0: 80, 1: 80, 2: 20}])
@pytest.mark.parametrize("until", range(80, 160, 5))
def test_seen_from_its_middle(inputs: dict[int, int], until: int) -> None:
    """No rank is late if the agent began to look while another rank had no inputs, before its first mark and after it."""
    table = epochs(JobTable(), inputs, range(30, until), None, len(inputs))
    assert stragglers(table.jobs.values(), until * EVERY) == []


def test_a_pause_is_none() -> None:
    """A rank that pauses alone, while others take steps without it, has not run out of inputs; nor has one whose steps are longer than those of others."""
    ends = [n * EVERY for n in range(1, 100)]
    pauses = [end for end in ends if not 40 * EVERY < end < 60 * EVERY]
    met = [end // BIN_NS for end in pauses]
    assert without_steps({0: ends, 1: pauses}, met, 100 * EVERY) == []
    assert without_steps({0: ends, 1: ends[::4]}, [end // BIN_NS for end in ends], 100 * EVERY) == []
    every = [end // BIN_NS for end in ends]
    assert without_steps({0: ends, 1: pauses}, every, 100 * EVERY) == [Span(1, 40 * EVERY, 60 * EVERY)]
