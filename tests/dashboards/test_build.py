"""The committed dashboards are what the builders make, on any machine; the agent does not depend on the builders."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from commwatch_dashboards.build import BUILDERS
from commwatch_dashboards.common import text
from commwatch_dashboards.export import NAMES
from tests.dashboards.grafana import FOLDER
from tests.helpers import clean_env


def test_json_is_what_the_builders_make(tmp_path: Path) -> None:
    """Built again, in another process with other hashes, every file is the same byte for byte: `make dashboards` leaves no diff."""
    command = [sys.executable, "-m", "commwatch_dashboards.build", str(tmp_path)]
    for seed in ("1", "2"):
        subprocess.run(command, env=clean_env(PYTHONHASHSEED=seed), check=True)
        for name in BUILDERS:
            assert (tmp_path / f"{name}.json").read_bytes() == (FOLDER / f"{name}.json").read_bytes()


def test_all_are_shipped() -> None:
    """What is exported is what is built, and no other JSON lies in the folder."""
    assert list(NAMES) == list(BUILDERS)
    assert sorted(file.stem for file in FOLDER.glob("*.json")) == sorted(NAMES)
    assert text(BUILDERS["job"]()).endswith("}\n")


def test_agent_needs_no_builder() -> None:
    """Exporting imports neither a builder nor the SDK."""
    code = (
        "import sys; from commwatch_agent import daemon; from commwatch_dashboards import export; export.plain('x');"
        "print([m for m in sys.modules if m.startswith('grafana') or m in "
        "{f'commwatch_dashboards.{n}' for n in ('build', 'common', 'cluster', 'job', 'node')}])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
