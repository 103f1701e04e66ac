"""The recorded jobs of the fault matrix, replayed without changes: DDP, FSDP, pipelines, experts, meshes; with late ranks and without."""

from __future__ import annotations

from pathlib import Path
from statistics import median

import pytest

from commwatch_agent.analysis.queries import QueryService
from commwatch_agent.report.recorded_steps import model_of
from commwatch_agent.report.timeline_export import Window, own_trace
from commwatch_agent.whatif.replay import replay
from tests.faults.recorded import FOLDER, file_name, named
from tests.faults.scenarios import SCENARIOS, Scenario

#: Jobs that mark steps.
STEPPING = [each for each in SCENARIOS if not each.hangs and not each.name.startswith("unmarked")]


@pytest.mark.parametrize("scenario", STEPPING, ids=lambda each: each.name)
def test_unchanged(scenario: Scenario, tmp_path: Path) -> None:
    """The replay gives the recorded step time within 3 %."""
    for _ in named(FOLDER / file_name(scenario.name), tmp_path):
        pass
    history = tmp_path / "h.sqlite"
    (job,) = QueryService(history).jobs()
    with own_trace(history, job.job_id, Window(None), (), alone=True) as own:
        model = model_of([own], job.world_size)
    steps = replay(model)
    assert len(steps) >= 15
    assert median(step.duration_s for step in steps) == pytest.approx(median(model.measured_s), rel=0.03)
    assert sum(step.duration_s for step in steps) == pytest.approx(sum(model.measured_s), rel=0.03)
