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


WORDS = """
import os, sys, types
from commwatch.torch_entry import autoload
asked = types.ModuleType("commwatch.probe.torch_collectives")
asked.install = lambda: print(word)
sys.modules[asked.__name__] = sys.modules["commwatch.probe"] = asked
asked.torch_collectives = asked
for word in sys.argv[1:]:
    os.environ["COMMWATCH"] = word
    autoload()
assert "torch" not in sys.modules
"""


@pytest.mark.parametrize(("rank", "lines"), [("0", 1), ("1", 0)])
def test_words(rank: str, lines: int) -> None:
    """`1`, `true`, `yes` and `on` in any case switch the probe on; words for no do not; any other value is named by rank 0 alone."""
    yes, no = ("1", "true", "YES", "On"), ("", "0", "false", "No", "off")
    done = subprocess.run(
        [sys.executable, "-c", WORDS, *yes, *no, "ma\nybe"], env=clean_env(RANK=rank), capture_output=True, text=True, timeout=60, check=False
    )  # fmt: skip
    assert (done.returncode, done.stdout.split()) == (0, list(yes)), done.stderr
    named = (
        "commwatch: COMMWATCH: needs one of 1, true, yes, on, 0, false, no, off, not 'ma\\nybe'; nothing is recorded\n"
    )
    assert done.stderr == named * lines


def test_costs_nothing_unless_asked() -> None:
    """Without the variable, and with `0`, nothing of commwatch is imported beside the entry itself."""
    script = "import sys; from commwatch.torch_entry import autoload; autoload(); print([n for n in sys.modules if n.startswith('commwatch.')])"
    for env in (clean_env(), clean_env(COMMWATCH="0"), clean_env(COMMWATCH="")):
        done = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True, check=True)
        assert done.stdout == "['commwatch.torch_entry']\n"
