"""A few jobs of the fault matrix: each conclusion is right, in time, and lasts (``make faults`` runs them all)."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.faults.results import line
from tests.faults.run import watch
from tests.faults.scenarios import CHECKED, SCENARIOS

#: As ``make faults`` runs them; ``test_incidents.py`` and ``test_corruption.py`` have such jobs.
NAMES = ("pipex4 slow 1", "fsdpx4 uneven 0,1,2,3", "ddp4x4 flip 2 checks replicas", "ddp4x4 late 2", "plainx4 stop 1")
#: Fewer steps before the fault, and fewer a second.
SOON, SPARING = ("--after", "3"), ("--after", "3", "--work", "0.15")
#: Seconds; a straggler takes 7 to 10.
WATCHED_S = 20.0


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("pipex2 slow 1", SOON),
        pytest.param("fsdpx4 uneven 0,1,2,3", SPARING, marks=pytest.mark.long),
        *(pytest.param(name, (), marks=pytest.mark.long) for name in NAMES),
    ],
)
def test_conclusion(name: str, options: tuple[str, ...]) -> None:
    """The culprit is named and no other rank, first in the advice, too; an uneven job names none."""
    (scenario,) = [each for each in (*SCENARIOS, *CHECKED) if each.name == name]
    outcome = watch(replace(scenario, watched_s=WATCHED_S, options=(*scenario.options, *options)))
    assert outcome.right, line([outcome])
