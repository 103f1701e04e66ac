"""What PyTorch calls at the end of its import."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers import clean_env


@pytest.mark.parametrize("missing", ["wire.identity", "wire.handlers", "probe.torch_collectives"])
def test_incomplete_installation(missing: str, tmp_path: Path) -> None:
    """Where a module of ours is missing, torch is imported all the same, and one line says that the probe is not there."""
    script = f"import sys; sys.modules['commwatch.{missing}'] = None; import torch; print('imported')"
    env = clean_env(COMMWATCH="1", COMMWATCH_DIR=str(tmp_path))
    done = subprocess.run(
        [sys.executable, "-c", script], env=env, capture_output=True, text=True, timeout=280, check=False
    )
    assert (done.returncode, done.stdout) == (0, "imported\n"), done.stderr
    assert done.stderr.startswith("commwatch: probe not loaded: ModuleNotFoundError: ")
    assert done.stderr.count("\n") == 1
