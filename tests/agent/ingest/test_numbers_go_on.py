"""Collectives whose numbers go on at 0 are counted, joined and compared as all others."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from commwatch.wire import events as ev
from commwatch.wire.numbers import NUMBERS
from commwatch_agent.ingest.batches import ingest_records
from commwatch_agent.ingest.jobs import JobTable
from tests.agent.ingest.generated_rings import Ring, job
from tests.agent.ingest.test_same_results import Result, by_product
from tests.helpers import examples, group_entry, identity, operation, packed


def later(records: bytes, by: int) -> bytes:
    """Records with other numbers of operations."""
    found = [ev.Record._make(fields) for fields in ev.RECORD.iter_unpack(records)]
    return b"".join(
        ev.RECORD.pack(*(each if each.op == ev.STEP_MARK else each._replace(seq=(each.seq + by) % NUMBERS)))
        for each in found
    )


def renumbered(result: Result, by: int) -> Result:
    """A result with other numbers of operations."""

    def moved(seq: int) -> int:
        return (seq + by) % NUMBERS

    ranks: list[dict[str, Any]] = [
        {
            **rank,
            "failures": [each._replace(seq=moved(each.seq)) for each in rank["failures"]],
            "numbers": [
                {group: moved(seq) for group, seq in rank["numbers"][0].items()},
                rank["numbers"][1],
                {group: moved(seq) for group, seq in rank["numbers"][2].items()},
            ],
        }
        for rank in result.ranks
    ]
    joins = {
        group_id: {**join, **{what: [(moved(seq), parts) for seq, parts in join[what]] for what in ("odd", "waiting")}}
        for group_id, join in result.joins.items()
    }
    return Result(ranks, joins)


@given(st.integers(0, 1 << 30), st.integers(1, 80) | st.integers(0, NUMBERS - 1), st.booleans())
@examples(15)
def test_any_begin(seed: int, before_zero: int, together: bool) -> None:
    """Wherever the numbers of a job begin, all that is made of its records is the same."""
    rings = job(seed)
    moved = [Ring(ring.identity, ring.names, [later(each, -before_zero) for each in ring.batches]) for ring in rings]
    assert by_product(moved, together) == renumbered(by_product(rings, together), -before_zero)


@pytest.mark.parametrize("begin", [5, NUMBERS - 3])
def test_only_counted(begin: int) -> None:
    """The latest number follows operations that are only counted, in whatever order the kinds of one second come, and records after them."""
    totals = JobTable().open("ring", identity(rank=0))
    totals.learn([group_entry(0, (0, 1))])

    def counted(after: int, op: str) -> bytes:
        about = {"start_ns": 10 + after, "end_ns": 900 + after, "waited_us": 2, "timing": ev.COUNTED}
        return packed(operation(op, seq=(begin + after) % NUMBERS, **about))

    for records, after in (
        (counted(1, "all_reduce"), 1),
        (counted(0, "all_gather"), 1),
        (counted(4, "all_gather"), 4),
        (counted(3, "all_reduce"), 4),
        (packed(operation(start_ns=2000, end_ns=2001, seq=(begin + 6) % NUMBERS)), 6),
        (counted(5, "all_reduce"), 6),
    ):
        ingest_records(totals, records)
        assert totals.last_seq == {0: (begin + after) % NUMBERS}
