"""Grafana's own types, of a version newer than the SDK's, have nothing against the dashboards. Needs npm; used nowhere else."""

from __future__ import annotations

import copy
import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.dashboards.grafana import NAMES, load
from tests.npm import packages

SCHEMA = Path(__file__).parent / "schema"
TSC = [
    "--noEmit",
    "--strict",
    "--skipLibCheck",
    "--module",
    "node16",
    "--moduleResolution",
    "node16",
    "--target",
    "es2022",
]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the compiler, Grafana's types and ours."""
    place = tmp_path_factory.mktemp("schema")
    (place / "node_modules").symlink_to(packages(SCHEMA / "package.json"))
    shutil.copy(SCHEMA / "dashboards.ts", place)
    return place


def compiled(place: Path, dashboards: dict[str, Any]) -> dict[str, list[str]]:
    """What the compiler says of dashboards, by name."""
    for name, made in dashboards.items():
        text = json.dumps(made, indent=1)
        head = "import type { Ours } from './dashboards.js';\nexport const dashboard ="
        (place / f"{name}.ts").write_text(f"{head} {text} satisfies Ours;\n")
    command = ["node_modules/.bin/tsc", *TSC, *(f"{name}.ts" for name in dashboards)]
    said = subprocess.run(command, cwd=place, capture_output=True, text=True, timeout=250, check=False).stdout
    return {name: [line for line in said.splitlines() if line.startswith(f"{name}.ts")] for name in dashboards}


def test_types(place: Path) -> None:
    """Panels, options, fields, variables, links and annotations are such as Grafana knows."""
    assert compiled(place, {name: load(name) for name in NAMES}) == {name: [] for name in NAMES}


def _panel(made: Any, kind: str) -> Any:
    return next(panel for panel in made["panels"] if panel["type"] == kind)


BROKEN: dict[str, Callable[[Any], object]] = {
    "type": lambda made: _panel(made, "stat").update(type="stats"),
    "option": lambda made: _panel(made, "table")["options"].update(showHeaders=True),
    "value": lambda made: _panel(made, "heatmap")["options"]["tooltip"].update(mode="all"),
    "custom": lambda made: _panel(made, "timeseries")["fieldConfig"]["defaults"]["custom"].update(fillOpaque=1),
    "place": lambda made: made["panels"][0]["gridPos"].update(h="8"),
    "variable": lambda made: made["templating"]["list"][0].update(type="data source"),
    "threshold": lambda made: _panel(made, "stat")["fieldConfig"]["defaults"]["thresholds"].update(mode="relative"),
    "annotation": lambda made: made["annotations"]["list"][0].update(icon="red"),
}


def test_mistakes_are_found(place: Path) -> None:
    """The check is none in name only: a misspelt type, option or value is refused."""
    broken = {}
    for mistake, make in BROKEN.items():
        broken[mistake] = copy.deepcopy(load("job"))
        make(broken[mistake])
    assert [mistake for mistake, said in compiled(place, broken).items() if not said] == []
