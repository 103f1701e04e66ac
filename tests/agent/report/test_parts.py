"""Parts of a report that fail leave the others."""

from __future__ import annotations

import sqlite3
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from commwatch_agent.history.opening import StoreError
from commwatch_agent.model.views import StepView
from commwatch_agent.report import charts, report, report_page, report_text
from commwatch_agent.report.parts import ReportParts
from commwatch_agent.whatif.answers import Study
from commwatch_agent.whatif.model import Model
from tests.agent.report.test_report_page import job_of


@pytest.mark.parametrize("error", [StoreError("x"), sqlite3.DatabaseError("x"), KeyError(3), ZeroDivisionError("x")])
def test_reason(error: Exception) -> None:
    """A part that fails is replaced, and its name and the reason are kept."""
    parts = ReportParts()

    def fails() -> int:
        raise error

    assert (parts.part("sum", lambda: 1, 0), parts.part("figures", fails, 0)) == (1, 0)
    (why,) = parts.missing.values()
    assert why.startswith("not available: ")
    assert str(error) in why


def test_replay_that_fails(tmp_path: Path) -> None:
    """If the replay fails, the report has its advice with the bounds of the gains, all other parts, and one line with the reason."""
    agent = job_of(tmp_path, 4, 30, range(15, 30))

    def recorded() -> Model | None:
        raise KeyError(17)

    def built(**more: Any) -> report.Report:
        found = report.build(agent, "job", agent.path, "again", **more)
        assert found is not None
        return found

    usual, failed = built(), built(recorded=recorded)
    assert failed.missing == {"what-if": "not available: KeyError: 17"}
    assert {each.rule for each in failed.advice} >= {each.rule for each in usual.advice} != set()
    assert replace(failed, missing={}, advice=usual.advice) == usual
    (line,) = (line for line in report_text.text(failed).splitlines() if "what-if" in line)
    assert line.split(maxsplit=1) == ["what-if", "not available: KeyError: 17"]


def test_page_of_which_sections_fail(tmp_path: Path) -> None:
    """A page whose plots and answers cannot be made has the reasons in their places, and its tables."""
    agent = job_of(tmp_path, 4, 12, range(0))
    built = report.build(agent, "job", agent.path, "again")
    assert built is not None
    step: Any = None
    material = replace(charts.gather(agent, "job"), steps=list[StepView]([step]))
    study = Study("job", 3, 4, 1.0, 1.0, [step], {}, None, [])
    page = report_page.html(built, material, None, study)
    assert page.count("charts: not available: AttributeError") == page.count("what-if: not available: ") == 1
    assert "<h2>Operations</h2>" in page
    assert "<h2>Ranks</h2>" in page
