"""Efficiency out of counted operations: the lower envelope, the fit, what is measured, and what limits."""

from __future__ import annotations

import math
import random
from collections import Counter

import pytest

from commwatch_agent.model.alpha_beta import Curve
from commwatch_agent.model.cells import Cell, Counted
from commwatch_agent.model.sketch import bin_of
from commwatch_agent.reference.efficiency import Efficiency, Yardstick, by_kind, conclusive, curve_of, lines
from commwatch_agent.reference.references import Measured, Modelled, Reference

#: 100 us a message, 100 MB/s.
CURVE = Curve(100e-6, 1e-8)
RANKS = 4


def cell(size: int, durations_s: list[float], waits_s: list[float] | None = None) -> Cell:
    """Operations of one rank; with their waits, if they were joined."""
    made = Cell()
    made.count, made.bytes, made.timed_bytes = len(durations_s), size * len(durations_s), float(size * len(durations_s))
    made.duration_ns = made.busy_ns = round(sum(durations_s) * 1e9)
    made.bins = dict(Counter(bin_of(round(duration * 1e9)) for duration in durations_s))
    if waits_s is not None:
        made.joined, made.wait_ns = len(waits_s), round(sum(waits_s) * 1e9)
    return made


def counted(rank: int, size: int, made: Cell, op: str = "all_reduce", group: str = "data") -> Counted:
    return Counted("job", rank, group, f"{group}-0", RANKS, op, 1 << math.ceil(math.log2(size)), made, "gloo")


def ran(
    *sizes: int, times: int = 40, slower: float = 1.0, joined: bool = True, op: str = "all_reduce"
) -> list[Counted]:
    """Collectives of these sizes on four ranks: the last one takes what the curve says, up to a tenth more; the others wait."""
    noise = random.Random(7)
    cells = []
    for size in sizes:
        durations: list[list[float]] = [[] for _ in range(RANKS)]
        waits: list[list[float]] = [[] for _ in range(RANKS)]
        for n in range(times):
            transfer = (CURVE.time_s(op, RANKS, size) or 1e-3) * slower * (1 + noise.random() / 10)
            for rank in range(RANKS):
                wait = 0.0 if rank == n % RANKS else 5e-3 * noise.random()
                durations[rank].append(transfer + wait)
                waits[rank].append(wait)
        cells += [counted(r, size, cell(size, durations[r], waits[r] if joined else None), op) for r in range(RANKS)]
    return cells


def judged(cells: list[Counted], reference: Reference | None = None) -> list[Efficiency]:
    return Yardstick(cells, lambda *_: reference).efficiencies(cells)


SIZES = (1_000, 10_000, 100_000, 1_000_000)


def test_own_curve() -> None:
    """α and β are found again from the fastest of each size, though three of four durations hold waiting."""
    (line,) = lines(ran(*SIZES)).values()
    assert (line.job_id, line.group_id, line.op, line.group_size) == ("job", "data-0", "all_reduce", RANKS)
    assert line.alpha_s == pytest.approx(CURVE.alpha_s, rel=0.1)
    assert line.bandwidth == pytest.approx(1e8, rel=0.1)
    assert (line.sizes, line.smallest_bytes, line.largest_bytes) == (4, 1_000, 1_000_000)
    assert line.error < 0.05


@pytest.mark.parametrize(
    "cells",
    [ran(1_000, 1_000_000), ran(1_000, 2_000, 4_000), ran(*SIZES, times=4), ran(*SIZES, joined=False), ran(*SIZES, op="broadcast")],
    ids=["two sizes", "too alike", "too few", "not joined", "rooted"],
)  # fmt: skip
def test_no_curve(cells: list[Counted]) -> None:
    """There is no curve for too few sizes or operations, or if waiting and transfer cannot be separated."""
    assert lines(cells) == {}
    assert judged(cells) == []


def test_a_poor_fit_is_none() -> None:
    """Times that have nothing to do with size give no curve."""
    cells = [
        one
        for size, slower in ((1_000, 1.0), (10_000, 20.0), (100_000, 1.0), (1_000_000, 0.1), (4_000_000, 3.0))
        for one in ran(size, slower=slower)
    ]
    assert lines(cells) == {}


def test_efficiency_of_the_transfer() -> None:
    """Efficiency is expected over transfer: waiting for late ranks is not in it, and it is that of the named reference."""
    found = judged(ran(*SIZES, slower=2.0), Modelled("catalogue", "eth-1g", CURVE))
    assert len(found) == len(SIZES)
    for each in found:
        assert each.measured == "transfer"
        assert each.count == 40 * RANKS
        assert each.efficiency == pytest.approx(1 / 2.1, rel=0.03)
        assert (each.reference, each.reference_name, each.verdict) == ("catalogue", "eth-1g", "below the link")
        assert each.expected_s == pytest.approx(CURVE.time_s("all_reduce", RANKS, each.size_bytes))


def test_what_limits() -> None:
    """Small operations are latency-bound, large ones bandwidth-bound; never below the link by the job's own best."""
    for slower, reference in ((1.0, Modelled("catalogue", "x", CURVE)), (1.0, None), (3.0, None)):
        by_size = {round(each.size_bytes): each for each in judged(ran(*SIZES, slower=slower), reference)}
        assert by_size[1_000].verdict == "latency-bound"
        assert by_size[1_000_000].verdict == "bandwidth-bound"
        kinds = {each.reference for each in by_size.values()}
        assert kinds == {"own_best" if reference is None else "catalogue"}
        # A link that is always slow looks perfect to itself.
        assert 0.9 < by_size[1_000_000].efficiency < 1.05


def test_ranks_out_of_sight() -> None:
    """Where the group is not all in sight the whole duration counts, and says nothing of the link."""
    found = judged(ran(*SIZES, joined=False), Modelled("bench", "x", CURVE))
    assert {each.measured for each in found} == {"duration"}
    assert all(each.efficiency < 0.95 for each in found)
    assert "below the link" not in {each.verdict for each in found}
    assert by_kind(found) == {}


def test_one_number_for_a_group() -> None:
    """Efficiency by group and op is the sum of expected times over the sum of measured times."""
    found = judged([*ran(1_000), *ran(1_000_000, slower=2.0)], Modelled("bench", "x", CURVE))
    expected = sum(each.expected_s * each.count for each in found)
    measured = sum(each.measured_s * each.count for each in found)
    assert by_kind(found) == {"bench": pytest.approx(expected / measured)}
    cells = ran(1_000)
    assert Yardstick(cells, lambda *_: None).overall(cells) is None
    kinds = {"data": Modelled("bench", "x", CURVE), "tensor": Modelled("catalogue", "x", CURVE)}
    mixed = [*cells, *(one._replace(group="tensor", group_id="t") for one in cells)]
    yardstick = Yardstick(mixed, lambda group, *_: kinds[group])
    assert yardstick.overall(mixed) is None
    overall = yardstick.overall(cells)
    assert overall is not None
    assert overall[0] == pytest.approx(1.0, abs=0.1)
    assert overall[1] == "bench"


def test_which_reference_is_asked_for() -> None:
    """A reference is looked up by label, backend, ranks, hosts, op and ranks on one host: one host where all ranks of the group are here."""
    asked: list[tuple[str, str | None, int, int, str, int]] = []

    def find(*about: str | int | None) -> Reference | None:
        asked.append(about)  # type: ignore[arg-type]
        return None

    cells = ran(1_000)
    assert Yardstick(cells, find).references(cells[0]) == []
    assert Yardstick(cells[:2], find).references(cells[0]) == []
    assert asked == [("data", "gloo", RANKS, 1, "all_reduce", RANKS), ("data", "gloo", RANKS, 2, "all_reduce", 2)]


def test_rated_link_of_known_gpus() -> None:
    """The rated link judges large operations, without a conclusion; small ones, and what limits any of them, are by the job's own best."""
    rated = Modelled("hardware", "x", Curve(0.0, CURVE.beta_s / 2), alpha_known=False)
    cells = [*ran(*SIZES), *ran(100_000_000)]
    by_size = {each.size_bytes: each for each in judged(cells, rated)}
    assert [by_size[size].reference for size in SIZES] == ["own_best"] * 2 + ["hardware"] * 2
    assert by_size[100_000_000].reference == "hardware"
    assert by_size[100_000_000].efficiency == pytest.approx(0.5, rel=0.1)
    assert {each.verdict for each in by_size.values()} == {"latency-bound", "bandwidth-bound"}
    assert [(each.size_bytes, each.verdict) for each in judged(cells)] == [
        (each.size_bytes, each.verdict) for each in judged(cells, rated)
    ]
    overall = Yardstick(cells, lambda *_: rated).overall(cells)
    assert overall is not None
    assert overall[0] == pytest.approx(0.5, rel=0.1)
    assert overall[1] == "hardware"


def test_nothing_is_concluded_from_a_rated_link() -> None:
    """What metrics have, of which alerts conclude, is by the job's own best where only a rated link is known; other references count."""
    rated, measured = (Modelled(kind, "x", CURVE, kind != "hardware") for kind in ("hardware", "bench"))
    cells = ran(*SIZES)
    for reference, kind in ((rated, "own_best"), (measured, "bench")):
        found = Yardstick(cells, conclusive(lambda *_, reference=reference: reference)).efficiencies(cells)
        assert {each.reference for each in found} == {kind}


def test_operations_without_a_size() -> None:
    """Barriers, operations without a duration, and groups of one rank have no efficiency."""
    untimed = cell(1_000, [])
    untimed.count = untimed.untimed = 3
    alone = counted(0, 1_000, cell(1_000, [1e-3]))._replace(group_size=1)
    barrier = counted(0, 1_000, cell(1_000, [1e-3]), "barrier")._replace(size=None)
    assert judged([counted(0, 1_000, untimed), alone, barrier], Modelled("bench", "x", CURVE)) == []


def test_curve_of_a_measured_reference() -> None:
    """A measured reference gives latency and bandwidth by the curve through its points; one without α gives neither."""
    points = {op: {size: CURVE.time_s(op, 4, size) or 0 for size in SIZES} for op in ("all_reduce",)}
    measured = Measured("bench", "x", "gloo", 4, (), 0.0, points, "test")
    for op in ("all_reduce", "all_gather"):
        curve = curve_of(measured, op)
        assert curve is not None
        assert curve.alpha_s == pytest.approx(CURVE.alpha_s)
    assert curve_of(Modelled("catalogue", "x", CURVE, alpha_known=False), "all_reduce") is None
