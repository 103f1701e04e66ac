"""Clocks of nodes are compared by the ends of shared collectives, with jitter, drift, late outliers and nodes that share none."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from commwatch_agent.model.clocks import FIRST, LEAST, compare
from tests.helpers import examples

S = 1_000_000_000


def ends(
    seqs: range, offset_s: float, ppm: float = 0.0, jitter_us: float = 0.0, seed: int = 0, every_ms: int = 100
) -> dict[int, int]:
    """Ends of collectives, one each 100 ms, by a clock that is off and drifts."""
    noise = random.Random(seed)
    found = {}
    for seq in seqs:
        true_ns = seq * every_ms * 1_000_000 + noise.uniform(0, jitter_us * 1000)
        found[seq] = round(true_ns * (1 + ppm / 1e6) + offset_s * S)
    return found


@pytest.mark.parametrize("offset_s", [-5.0, 0.0, 5.0])
@pytest.mark.parametrize("ppm", [-100.0, 0.0, 100.0])
def test_offset_and_drift(offset_s: float, ppm: float) -> None:
    """Five seconds and 100 ppm over half a minute are found to within the jitter, at every moment."""
    first, other = ends(range(300), 0.0, 0.0, 50, 1), ends(range(300), offset_s, ppm, 50, 2)
    ours, theirs = compare([first, other])
    assert ours == FIRST
    assert theirs is not None
    for seq in first:
        assert abs(theirs.of_first(other[seq]) - first[seq]) < 120_000
    assert theirs.drift == pytest.approx(ppm / 1e6, abs=3e-6)
    assert 10_000 < theirs.uncertainty_ns < 60_000


def test_outliers() -> None:
    """A tenth of the collectives that end late on one node changes nothing but the uncertainty."""
    first, other = ends(range(200), 0.0), ends(range(200), 2.0)
    for seq in range(0, 200, 10):
        other[seq] += 30_000_000
    _, theirs = compare([first, other])
    assert theirs is not None
    assert abs(theirs.offset_ns - 2 * S) < 1000


def test_nodes_in_a_chain() -> None:
    """A node that shares collectives only with another than the first is compared through that."""
    parts = [ends(range(50), 0.0), ends(range(40, 120), 1.0), ends(range(110, 200), -3.0)]
    clocks = compare(parts)
    for part, clock in zip(parts, clocks, strict=True):
        assert clock is not None
        assert {seq: clock.of_first(end) for seq, end in part.items()} == {
            seq: pytest.approx(seq * S / 10, abs=1000) for seq in part
        }


def test_nothing_in_common() -> None:
    """A node with too few shared collectives has no clock, and the others keep theirs."""
    clocks = compare([ends(range(50), 0.0), ends(range(50 - LEAST + 1, 90), 1.0), ends(range(50), 2.0)])
    assert clocks[1] is None
    assert clocks[2] is not None
    assert compare([]) == []
    assert compare([{}, {}]) == [FIRST, None]


@examples(50)
@given(st.lists(st.tuples(st.floats(-1e4, 1e4), st.floats(-100, 100)), min_size=1, max_size=5), st.integers(20, 100))
def test_any_clocks(nodes: list[tuple[float, float]], number: int) -> None:
    """Whatever the clocks are, without jitter the ends coincide to a microsecond after the comparison."""
    parts = [ends(range(number), offset_s, ppm) for offset_s, ppm in nodes]
    for part, clock in zip(parts, compare(parts), strict=True):
        assert clock is not None
        for seq, end_ns in part.items():
            # Drift is against the first node's clock, which drifts itself.
            assert abs(clock.of_first(end_ns) - parts[0][seq]) < 1000 + 1e-6 * number * S / 10
