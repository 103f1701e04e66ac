"""Conditions of `commwatch compare --fail-if`: the grammar, and when one is met."""

from __future__ import annotations

from dataclasses import replace

import pytest

from commwatch_agent.compare.comparison import Comparison, Figure, Side
from commwatch_agent.compare.gate import FIGURES, parse
from commwatch_agent.compare.pages import says
from tests.agent.report.test_job_list import JOB

STEP = Figure("step_p50", 0.1, 0.108, True, 0.08, 0.04, 0.12, True)
SHARE = Figure("comm_share", 0.2, 0.16, False, -0.04, -0.06, -0.02, True)


def comparison(*figures: Figure) -> Comparison:
    """A comparison with these figures."""
    side = Side(JOB, 100, 5, 0)
    return Comparison(side, side, list(figures), "", [], {})


@pytest.mark.parametrize(
    ("condition", "met"),
    [
        ("step_p50 > +5%", True),
        ("step_p50>7.9%", True),
        ("step_p50 > +8.1%", False),
        ("step_p50 < -5%", False),
        ("comm_share < -3pp", True),
        ("comm_share < -4.1pp", False),
        ("comm_share > +0pp", False),
    ],
)
def test_when_a_condition_is_met(condition: str, met: bool) -> None:
    """A condition is met if the measured change is beyond the limit, in its direction."""
    assert parse(condition).is_met(comparison(STEP, SHARE)) is met


def test_noise_meets_no_condition() -> None:
    """A change whose interval has zero in it meets no condition, however large; without an interval it is not known."""
    condition = parse("step_p50 > +5%")
    assert condition.is_met(comparison(replace(STEP, change=0.3, low=-0.1, high=0.8, differs=False))) is False
    assert condition.is_met(comparison(replace(STEP, low=None, high=None, differs=None))) is None
    assert condition.is_met(comparison(replace(STEP, a=None, change=None, low=None, high=None, differs=None))) is None


@pytest.mark.parametrize(
    ("condition", "why"),
    [
        ("", "give a condition such as"),
        ("step_p50 > -5%", "give a condition such as"),
        ("step_p50 < 5%", "give a condition such as"),
        ("step_p50 >= 5%", "give a condition such as"),
        ("step_p50 > 5", "give a condition such as"),
        ("step_p51 > 5%", f"no figure step_p51; choose from {', '.join(FIGURES)}"),
        ("step_p50 > 5pp", "in percent of A's value (%)"),
        ("wait_share > 5%", "in percentage points (pp)"),
    ],
)
def test_wrong_conditions(condition: str, why: str) -> None:
    """A wrong condition is refused with its text and a correct one."""
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - its text is compared
        parse(condition)
    assert str(caught.value).startswith(f"{condition}: ")
    assert why in str(caught.value)


@pytest.mark.parametrize(
    ("figure", "words"),
    [
        (STEP, "slower by 4.0 to 12%"),
        (replace(STEP, change=-0.05, low=-0.07, high=-0.04), "faster by 4.0 to 7.0%"),
        (SHARE, "lower by 2.0 to 6.0 points"),
        (replace(STEP, change=0.01, low=-0.01, high=0.03, differs=False), "no difference found (−1.0 to +3.0%)"),
        (replace(STEP, change=0.012, low=0.004, high=0.02, differs=False), "too small to count (+0.4 to +2.0%)"),
        (replace(STEP, low=None, high=None, differs=None), "+8.0%, too few samples for an interval"),
        (replace(STEP, a=None, change=None, low=None, high=None, differs=None), "–"),
    ],
)
def test_in_words(figure: Figure, words: str) -> None:
    """A figure says how it differs, and by how much, in words."""
    assert says(figure) == words
