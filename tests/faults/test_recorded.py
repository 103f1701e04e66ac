"""The records of jobs of the fault matrix, played again: a change of a rule is judged in seconds, on the same data."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults.recorded import FOLDER, concluded, file_name, named
from tests.faults.run import KEPT_S, judge
from tests.faults.scenarios import SCENARIOS, Scenario

HANGS = [each for each in SCENARIOS if each.hangs]


@pytest.mark.parametrize("scenario", [each for each in SCENARIOS if not each.hangs], ids=lambda each: each.name)
def test_named(scenario: Scenario, tmp_path: Path) -> None:
    """In recorded jobs, the ranks at fault are named in time and no other rank ever; an even job names no rank."""
    looks = [(at_s - KEPT_S[0], found) for at_s, found in named(FOLDER / file_name(scenario.name), tmp_path)]
    expected = set(scenario.ranks) if scenario.kinds else set()
    assert all(found <= expected for _, found in looks), looks
    after = [at_s for at_s, found in looks if found == expected and expected]
    assert not expected or (after and after[0] <= scenario.within_s), looks
    held = [found for at_s, found in looks if after and at_s >= after[0]]
    assert held.count(expected) >= 0.9 * len(held)


@pytest.mark.parametrize("scenario", HANGS, ids=lambda each: each.name)
def test_hang(scenario: Scenario) -> None:
    """In recorded jobs that hang or disagree, the operations in flight name the ranks at fault in time, and no other rank ever."""
    shown = concluded(FOLDER / file_name(scenario.name))
    polls = [(at_s, [(each.kind, each.cause, tuple(each.ranks)) for each in found]) for at_s, found in shown]
    outcome = judge(scenario, polls)
    assert len(polls) >= 20
    assert outcome.right, outcome


def test_all_are_there() -> None:
    """Each scenario has its file, and no file is left over."""
    assert sorted(path.name for path in FOLDER.iterdir()) == sorted(file_name(each.name) for each in SCENARIOS)
