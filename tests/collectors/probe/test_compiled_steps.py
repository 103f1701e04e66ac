"""The marks of optimizers whose step is compiled."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests import prefork
from tests.collectors.probe import compiled


@pytest.fixture(scope="module")
def done() -> subprocess.CompletedProcess[str]:
    """The program, which has ended."""
    command = prefork.command(Path(compiled.__file__))
    return subprocess.run(command, capture_output=True, text=True, timeout=200, check=True)


@pytest.fixture(scope="module")
def report(done: subprocess.CompletedProcess[str]) -> Any:
    """What the program saw, by case."""
    return json.loads(done.stdout)


@pytest.mark.parametrize("case", ["one graph", "no graph break", "uninstalled"])
def test_step_that_must_be_one_graph(report: Any, case: str) -> None:
    """A step in which a graph break is an error compiles as it does without us, and leaves no mark."""
    assert report[case] == {"marks": 0, "error": "", "compiled": True, "ours": []}


@pytest.mark.parametrize("case", ["own", "torch's"])
def test_step_that_may_be_split(report: Any, case: str) -> None:
    """Every other compiled step leaves its mark, and Dynamo is called for no code of ours."""
    assert report[case] == {"marks": compiled.STEPS, "error": "", "compiled": True, "ours": []}


def test_no_warning(done: subprocess.CompletedProcess[str]) -> None:
    """Dynamo does not warn of our code."""
    assert "UserWarning" not in done.stderr
