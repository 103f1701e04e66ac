"""Several runs of one training: together they show latency and bandwidth, and the forecast has what was measured."""

from __future__ import annotations

from functools import partial
from statistics import median

import pytest

from commwatch_agent.whatif.answers import Study, study
from commwatch_agent.whatif.changes import with_bandwidth, with_ranks
from commwatch_agent.whatif.model import CannotAnswer, Model
from commwatch_agent.whatif.pages import text
from commwatch_agent.whatif.replay import replay
from tests.agent.whatif.scenes import model

MIB = 1 << 20


def _run(ranks: int, **more: object) -> Model:
    """A run of a training whose buckets are all alike, on a link of 1 ms and 10 ms/MiB."""
    return model(ranks, **{"sizes": (2 * MIB, 2 * MIB), "compute_ms": 10, **more})


def _forecast(found: Study) -> dict[int, tuple[float, float | None]]:
    """The predicted and the measured step by number of ranks."""
    assert found.forecast is not None
    return {point.ranks: (point.step_s, point.measured_s) for point in found.forecast.points}


def test_law_of_the_link() -> None:
    """Runs of 2 and 8 ranks with equal buckets show α and β, which one of them does not, so the steps of 16 to 64 ranks are those of the law."""
    alone = study("two", _run(2), {})
    both = study("two", _run(2), {}, {"eight": _run(8)})
    assert any("too much alike" in each for each in alone.assumed)
    assert not any("too much alike" in each for each in both.assumed)
    for ranks in (4, 16, 32, 64):
        true_s = median(step.duration_s for step in replay(_run(ranks)))
        assert _forecast(both)[ranks][0] == pytest.approx(true_s, rel=0.01)
    assert _forecast(alone)[16][0] < 0.9 * _forecast(both)[16][0]


def test_how_far_a_forecast_goes() -> None:
    """The forecast ends at eight times the ranks of the largest run, or at the ranks that were asked for; far beyond, nothing shows the network."""
    assert max(_forecast(study("two", _run(2), {}))) == 16
    assert max(_forecast(study("two", _run(2), {}, {"eight": _run(8)}))) == 64
    assert max(_forecast(study("two", _run(2), {"128 ranks": partial(with_ranks, ranks=128)}))) == 128
    fast = study("two", model(2, sizes=(1 << 10,), compute_ms=100), {})
    assert "communication, including waiting for late ranks, stays at or below 30% of a step up to 16 ranks" in text(
        fast, 250
    )


def test_measured_points() -> None:
    """The forecast has a point for each run with its recorded step, also of other numbers of ranks than doubled ones."""
    runs = {"three": _run(3), "eight": _run(8), "again": _run(8)}
    found = _forecast(study("two", _run(2), {}, runs))
    assert {ranks: measured for ranks, (_, measured) in found.items() if measured is not None} == {
        ranks: pytest.approx(median(_run(ranks).measured_s)) for ranks in (2, 3, 8)
    }
    assert 5 not in found
    assert list(found) == sorted(found)
    for ranks in (2, 3, 8):
        assert found[ranks][0] == pytest.approx(found[ranks][1], rel=0.01)


def test_changes_are_not_measured() -> None:
    """With changes, no point was measured, and the link is still that of all runs."""
    changes = {"twice the bandwidth": with_bandwidth(2.0)}
    found = _forecast(study("two", _run(2), changes, {"eight": _run(8)}))
    assert {measured for _, measured in found.values()} == {None}
    true_s = median(step.duration_s for step in replay(_run(16, ms_per_mib=5.0)))
    assert found[16][0] == pytest.approx(true_s, rel=0.01)


def test_another_training() -> None:
    """A run that exchanges other bytes raises an error; one with other compute is used, and mentioned."""
    with pytest.raises(CannotAnswer, match="job other: its ranks do not exchange the same bytes in the same groups"):
        study("two", _run(2), {}, {"other": _run(8, sizes=(MIB,))})
    found = study("two", _run(2), {}, {"slower": _run(8, compute_ms=20, tail_ms=10)})
    assert "ranks of job slower compute 100% more in a step; the forecast has the compute of this job" in found.assumed
