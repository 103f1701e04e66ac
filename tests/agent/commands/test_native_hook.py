"""``commwatch native``, and which Python a job's hook is built for."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from commwatch_agent.commands.native_hook import prepare, trainer_python
from tests.helpers import clean_env, commwatch


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        ("#!{python}\nimport sys\n", "{python}"),
        ("#!/usr/bin/env python3\n", "{bin}/python3"),
        ("#!/usr/bin/env -S python3 -I\n", "{bin}/python3"),
        ("#!/bin/sh\n'''exec' \"{python}\" \"$0\" \"$@\"\n' '''\n", "{python}"),
        ("#!/bin/sh\nexec torchrun train.py\n", sys.executable),
        ("\x7fELF", sys.executable),
    ],
)
def test_trainer_python(script: str, expected: str, tmp_path: Path) -> None:
    """The Python of a job is the one that its launcher's first lines call; if they name none, it is ours."""
    (tmp_path / "bin").mkdir()
    where = {"bin": str(tmp_path / "bin"), "python": str(tmp_path / "venv" / "python3.12")}
    (tmp_path / "venv").mkdir()
    for program in (tmp_path / "bin" / "python3", Path(where["python"]), tmp_path / "bin" / "launch"):
        program.write_text(script.format(**where))
        program.chmod(0o755)
    env = {"PATH": where["bin"]}
    assert trainer_python(["launch", "train.py"], env) == expected.format(**where)
    assert trainer_python([where["python"], "train.py"], env) == where["python"]
    assert trainer_python(["nothing"], env) is None


def test_relative_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A job's Python that is named from the current folder is found from every other."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "python").symlink_to(sys.executable)
    assert trainer_python(["./python", "train.py"], os.environ) == str(tmp_path / "python")


def test_relative_python(native: Path, tmp_path: Path) -> None:
    """`commwatch native --python` and `doctor --gpu-proof --python` take a path that is relative to the current folder."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    (tmp_path / "bin" / "python").chmod(0o755)
    found = commwatch("native", "status", "--json", "--python", "bin/python", cwd=tmp_path)
    assert json.loads(found.stdout)["library"] == str(native)
    said = commwatch("doctor", "--gpu-proof", "--python", "bin/python", cwd=tmp_path).stderr
    assert "cannot import torch" not in said
    assert "CUDA" in said


@pytest.mark.parametrize("env", [{"COMMWATCH_HOOK": "python"}, {"COMMWATCH_HOOK": "auto", "COMMWATCH_DISABLE": "1"}])
def test_not_asked_for(env: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    """A job that will have no native hook anyway is not kept waiting for one."""
    assert prepare([sys.executable], clean_env(CXX="/no/such/compiler", XDG_CACHE_HOME="/proc", **env)) == {}
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("asked", "expected", "instead"),
    [("auto", {"COMMWATCH_HOOK": "python"}, ", using the Python one"), ("native", {}, "")],
)
def test_cannot_be_built(asked: str, expected: dict[str, str], instead: str, capfd: pytest.CaptureFixture[str]) -> None:
    """What prevents the native hook is printed in one line; the job uses the Python hook, unless it requires the native one."""
    env = clean_env(CXX="/no/such/compiler", XDG_CACHE_HOME="/proc/1", COMMWATCH_HOOK=asked)
    assert prepare([sys.executable], env) == expected
    said = capfd.readouterr().err
    assert said == f"commwatch: no native hook{instead}: CXX=/no/such/compiler: not found\n"


def test_python_without_commwatch(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A trainer's Python that does not know us is left alone; the report says later that nothing was seen."""
    stranger = tmp_path / "python"
    stranger.write_text("#!/bin/sh\necho \"No module named 'commwatch'\" >&2\nexit 1\n")
    stranger.chmod(0o755)
    assert prepare([str(stranger)], clean_env(COMMWATCH_HOOK="auto")) == {}
    assert capfd.readouterr().err == ""


def test_command_line(native: Path) -> None:
    """`commwatch native` answers for the given Python, and refuses one that does not exist."""
    found = json.loads(commwatch("native", "status", "--json", "--python", sys.executable).stdout)
    assert found["library"] == str(native)
    missing = commwatch("native", "status", "--python", "/no/such/python")
    assert (missing.returncode, missing.stderr) == (
        2,
        "commwatch: native: cannot run /no/such/python: No such file or directory\n",
    )
