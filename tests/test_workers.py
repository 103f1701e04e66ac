"""Modules of tests that run in several processes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers import clean_env
from tests.lengths import TREE

CONFTEST = "from tests.workers import Workers\n\n\ndef pytest_configure(config):\n    config.pluginmanager.register(Workers(2))\n"
#: Modules by name.
MODULES = {
    "test_one.py": """
import os, signal
import pytest

@pytest.fixture(scope="session", autouse=True)
def made():
    with open("made", "a") as file:
        file.write(f"{os.getpid()}\\n")
    yield
    with open("ended", "a") as file:
        file.write(f"{os.getpid()}\\n")

@pytest.mark.parametrize("number", range(3))
def test_passes(number, tmp_path):
    (tmp_path / "file").write_text(str(number))
    print(f"printed {number}")

def test_fails():
    print("printed before the failure")
    assert "left" == "right"

def test_skipped():
    pytest.skip("not here")

def test_dies():
    os.kill(os.getpid(), signal.SIGKILL)

def test_after_the_dead():
    pass
""",
    "test_two.py": """
import os

def test_elsewhere():
    while not os.path.exists("made"):
        pass
""",
}


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The folder of the two modules after their run, and what pytest printed."""
    folder = tmp_path_factory.mktemp("tests")
    (folder / "conftest.py").write_text(CONFTEST, encoding="utf-8")
    for name, text in MODULES.items():
        (folder / name).write_text(text, encoding="utf-8")
    options = ["-v", "-p", "no:cacheprovider", "--rootdir", folder, "--override-ini=addopts=", folder]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options],
        env=clean_env(PYTHONPATH=str(TREE)), cwd=folder, capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip
    assert done.returncode == 1, done.stdout + done.stderr
    return folder, done.stdout


def test_every_test_is_reported_once(ran: tuple[Path, str]) -> None:
    """Each test has one result, those also that follow one whose process has died; that one has failed."""
    assert "2 failed, 5 passed, 1 skipped" in ran[1]
    assert "the process of this test has ended with -9" in ran[1]


def test_output_of_a_failure(ran: tuple[Path, str]) -> None:
    """A failure has its values and what the test printed; of others nothing is printed."""
    assert "assert 'left' == 'right'" in ran[1]
    assert "printed before the failure" in ran[1]
    assert "printed 1" not in ran[1]


def test_fixtures_of_the_session(ran: tuple[Path, str]) -> None:
    """Each process makes the fixtures of the session once, and ends them, unless it dies."""
    made, ended = ((ran[0] / name).read_text(encoding="utf-8").split() for name in ("made", "ended"))
    assert len(made) == len({*made}) > len(ended) == len({*ended})
    assert {*ended} <= {*made}
