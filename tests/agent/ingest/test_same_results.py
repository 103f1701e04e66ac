"""The intake against a slow reference implementation, and against results that were frozen."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from commwatch_agent.ingest.batches import Batch, ingest
from commwatch_agent.ingest.collective_join import GroupJoin
from commwatch_agent.ingest.jobs import JobTable
from commwatch_agent.ingest.rank_totals import RankTotals
from commwatch_agent.model.cells import CELL_SUMS, SLOT_NS, Cell
from tests.agent.ingest.generated_rings import Ring, job, rounds
from tests.agent.ingest.reference import ReferenceJoin, ReferenceRank
from tests.helpers import examples

GOLDEN = Path(__file__).parents[2] / "golden" / "ingest.json"
FROZEN_SEEDS = range(60)


@dataclass
class Result:
    """All that a job's records gave, as plain values."""

    ranks: list[dict[str, Any]] = field(default_factory=list)
    joins: dict[str, dict[str, Any]] = field(default_factory=dict)


def sums(cell: Cell) -> tuple[Any, ...]:
    """The sums of a cell; those in bytes are floats, rounded as their order is not fixed."""
    plain = [float(f"{value:.12g}") if isinstance(value := getattr(cell, name), float) else value for name in CELL_SUMS]
    return (*plain, cell.durations, sorted(cell.bins.items()))


def merged(cells: Iterable[tuple[Any, Cell]]) -> dict[str, tuple[Any, ...]]:
    """The sums by key; empty cells do not count."""
    found: dict[str, Cell] = {}
    for key, cell in cells:
        found.setdefault(repr(tuple(key)), Cell()).add(cell)
    return {key: sums(cell) for key, cell in sorted(found.items())}


def late(bins: dict[int, dict[int, int]]) -> dict[int, dict[int, int]]:
    """Own lateness by bin and rank."""
    return {at: dict(sorted(each.items())) for at, each in sorted(bins.items())}


# -- the product --------------------------------------------------------------------------------


def by_product(rings: list[Ring], together: bool = True) -> Result:
    """What the product makes of the records, of all rings of a turn together, or ring by ring."""
    aggregate, opened, slots = JobTable(), {}, [list[Any]() for _ in rings]
    finished: list[list[Any]] = [[] for _ in rings]
    for turn in rounds(rings):
        for at, _, _ in turn:
            if at not in opened:
                opened[at] = aggregate.open(str(at), rings[at].identity)
                opened[at].learn(rings[at].names)
        batches = [Batch(opened[at], records, until_n) for at, records, until_n in turn]
        for read in [batches] if together else [[batch] for batch in batches]:
            ingest(read)
        for at, _, _ in turn:
            totals = opened[at]
            totals.tick(latest(rings, turn) + totals.offset_ns)
            slots[at] += totals.take_closed()
            finished[at] += totals.steps.take()
    ranks = [of_totals(totals, slots[at], finished[at]) for at, totals in sorted(opened.items())]
    joins = aggregate.jobs["job"].joins if aggregate.jobs else {}
    return Result(ranks, used({group_id: of_join(join) for group_id, join in joins.items()}))


def of_totals(totals: RankTotals, closed: list[Any], steps: list[Any]) -> dict[str, Any]:
    """What a ring's totals hold."""
    slots = [((slot, *key), cell) for slot, key, cell in [*closed, *totals.live_cells()]]
    return {
        "slots": merged(slots),
        "totals": merged((key, cell) for key, cell in totals.cells()),
        "live_from": totals.live_from,
        "nonsense": totals.nonsense,
        "failures": list(totals.failures),
        "numbers": [totals.last_seq, totals.launched_ns, totals.unseen],
        "lateness": totals.lateness_ns,
        "compared": {group: (each.count, each.duration_ns) for group, each in totals.compared.items() if each.count},
        **counted_apart(totals),
        "waits": totals.binned_waits_ns,
        "on_device": totals.on_device,
        "steps": [step._replace(groups=tuple(sorted(step.groups))) for step in steps],
        "periods": periods(totals.steps),
    }


def counted_apart(rank: RankTotals | ReferenceRank) -> dict[str, Any]:
    """What is counted by peer, and by NCCL's choice."""
    return {
        "messages": {str(key): (each.count, each.bytes, each.waited_us) for key, each in rank.messages.items()},
        "ran": {
            str((tuple(key), choice)): (ran.count, ran.bytes, round(ran.bus_bytes), ran.duration_ns)
            for (key, choice), ran in rank.ran.items()
        },
    }


def periods(steps: Any) -> tuple[Any, ...]:
    """The sums over periods and steps."""
    made, totals = steps.periods, steps.totals
    squares = float(f"{made.comm_squares:.12g}")
    return made.count, made.duration_ns, made.comm_ns, squares, totals.count, totals.comm_ns, totals.exposed_ns


def used(joins: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The joins that hold something."""
    return {group_id: join for group_id, join in sorted(joins.items()) if any(join.values())}


def of_join(join: GroupJoin) -> dict[str, Any]:
    """What the join of a group holds."""
    window = vars(join.window)
    ranks, numbers, late_ns = list(window["_columns"]), window["_numbers"], window["_late_ns"].tolist()
    width = len(ranks)
    bins = {
        number: {rank: each for rank, each in zip(ranks, late_ns[at * width :][:width], strict=True) if each}
        for at, number in enumerate(numbers)
    }
    return {
        "unjoined": join.unjoined,
        "odd": [(seq, [part_of(part) for part in parts]) for seq, parts in join.odd],
        "waiting": [(seq, [part_of(part) for part in parts]) for seq, parts in join.waiting()],
        "late": late(bins),
        "total": {rank: total for rank, total in sorted(zip(ranks, window["_total_ns"], strict=True)) if total},
    }


def part_of(part: Any) -> tuple[Any, ...]:
    """A part without the totals behind it."""
    return (
        part.rank,
        part.op,
        part.size,
        part.dtype,
        part.launch_ns,
        part.end_ns,
        part.duration_ns,
        part.own_ns,
        part.run,
    )


def latest(rings: list[Ring], turn: list[tuple[int, bytes, int]]) -> int:
    """A time for the tick after a turn: the end of the last record that is no nonsense, at most some slots away."""
    ends = [int.from_bytes(records[-24:-16], "little") for _, records, _ in turn]
    return max((end for end in ends if end < 100 * SLOT_NS), default=0)


# -- the reference ------------------------------------------------------------------------------


def by_reference(rings: list[Ring]) -> Result:
    """What the reference makes of the records."""
    joins: dict[str, ReferenceJoin] = {}
    opened: dict[int, ReferenceRank] = {}
    for turn in rounds(rings):
        for at, _, _ in turn:
            if at not in opened:
                if any(rings[at].identity["rank"] == other.rank for other in opened.values()):
                    for join in joins.values():
                        join.restart()
                opened[at] = ReferenceRank(rings[at].identity, rings[at].names, joins)
        for at, records, until_n in turn:
            opened[at].ingest(records, until_n)
        for at, _, _ in turn:
            opened[at].tick(latest(rings, turn))
    found = used({group_id: of_reference_join(join) for group_id, join in joins.items()})
    return Result([of_reference(rank) for _, rank in sorted(opened.items())], found)


def of_reference(rank: ReferenceRank) -> dict[str, Any]:
    """What a ring of the reference holds."""
    return {
        "slots": merged(((slot, *key), cell) for (slot, key), cell in rank.cells.items()),
        "totals": merged((key, cell) for (_, key), cell in rank.cells.items()),
        "live_from": None if rank.first_n < 0 else rank.first_n,
        "nonsense": rank.nonsense,
        "failures": rank.failures,
        "numbers": [rank.last_seq, rank.launched_ns, rank.unseen],
        "lateness": rank.lateness_ns,
        "compared": rank.compared,
        **counted_apart(rank),
        "waits": rank.waits_ns,
        "on_device": rank.on_device,
        "steps": [step._replace(groups=tuple(sorted(step.groups))) for step in rank.finished],
        "periods": periods(rank.steps),
    }


def of_reference_join(join: ReferenceJoin) -> dict[str, Any]:
    """What a join of the reference holds."""
    total: dict[int, int] = {}
    for each in join.late.values():
        for rank, own_ns in each.items():
            total[rank] = total.get(rank, 0) + own_ns
    waiting = [(seq, list(parts.values())) for seq, parts in reversed(join.pending.items())]
    return {
        "unjoined": join.unjoined,
        "odd": [(seq, [reference_part(part) for part in parts]) for seq, parts in join.odd],
        "waiting": [
            (seq, [reference_part(part) for part in parts])
            for seq, parts in waiting
            if len({part.op for part in parts}) == 1
        ],
        "late": late(join.late),
        "total": dict(sorted(total.items())),
    }


def reference_part(part: Any) -> tuple[Any, ...]:
    """A part of the reference, as ``part_of`` one of the product."""
    return (
        part.owner.rank, part.op, part.size, part.dtype, part.launch_ns, part.end_ns, part.duration_ns, part.own_ns, part.run,
    )  # fmt: skip


# -- both ---------------------------------------------------------------------------------------


def digest(result: Result) -> str:
    """A short form of a result."""
    text = json.dumps([result.ranks, result.joins], sort_keys=True, default=list)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def digests(implementation: Callable[[list[Ring]], Result]) -> dict[str, str]:
    """The results on the frozen seeds."""
    return {str(seed): digest(implementation(job(seed))) for seed in FROZEN_SEEDS}


@given(st.integers(0, 1 << 32), st.booleans())
@examples(30)
def test_same_as_the_reference(seed: int, together: bool) -> None:
    """Whatever the rings hold, the totals of every rank and the joins of every group are those of the reference."""
    rings = job(seed)
    expected, found = by_reference(rings), by_product(rings, together)
    for mine, theirs in zip(found.ranks, expected.ranks, strict=True):
        assert mine == theirs
    assert found.joins == expected.joins


@pytest.mark.parametrize("implementation", [by_product, by_reference])
def test_same_as_frozen(implementation: Callable[[list[Ring]], Result]) -> None:
    """The results on generated rings are those that were frozen when each record was counted by itself."""
    asked = "if a rule has changed: python -m tests.agent.ingest.test_same_results --write"
    assert digests(implementation) == json.loads(GOLDEN.read_text()), asked


if __name__ == "__main__":
    assert sys.argv[1:] == ["--write"], __doc__
    GOLDEN.write_text(json.dumps(digests(by_reference), indent=1) + "\n")
