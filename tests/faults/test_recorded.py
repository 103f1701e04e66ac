"""The records of jobs of the fault matrix, played again: a change of a rule is judged in seconds, on the same data."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults.recorded import FOLDER, file_name, named
from tests.faults.run import KEPT_S
from tests.faults.scenarios import LATE, SCENARIOS, Scenario

RECORDED = [each for each in SCENARIOS if each.kinds == LATE or not each.kinds]


@pytest.mark.parametrize("scenario", RECORDED, ids=lambda each: each.name)
def test_named(scenario: Scenario, tmp_path: Path) -> None:
    """In recorded jobs, the ranks at fault are named in time and no other rank ever; an even job names no rank."""
    looks = [(at_s - KEPT_S[0], found) for at_s, found in named(FOLDER / file_name(scenario.name), tmp_path)]
    expected = set(scenario.ranks) if scenario.kinds else set()
    assert all(found <= expected for _, found in looks), looks
    after = [at_s for at_s, found in looks if found == expected and expected]
    assert not expected or (after and after[0] <= scenario.within_s), looks
    held = [found for at_s, found in looks if after and at_s >= after[0]]
    assert held.count(expected) >= 0.9 * len(held)


def test_all_are_there() -> None:
    """Each such scenario has its file, and no file is left over."""
    assert sorted(path.name for path in FOLDER.iterdir()) == sorted(file_name(each.name) for each in RECORDED)
