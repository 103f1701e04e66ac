"""What `commwatch completion` prints, in the shells themselves."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.helpers import clean_env, commwatch, needs

#: A replacement for commwatch in a shell, which only lists the names of jobs.
_JOBS = '#!/bin/sh\n[ "$*" = "jobs --names" ] && printf "latest\\ntrain_ddp-1\\ntrain_fsdp-2\\n"\n'
#: A line as it is typed, and what Tab makes of its last word.
_TYPED = [
    ("commwatch rep", "report"),
    ("commwatch report train_f", "train_fsdp-2"),
    ("commwatch compare latest train_d", "train_ddp-1"),
    ("commwatch native st", "status"),
]
#: Types a line into a zsh of its own, whose editor completes it.
_ZSH = r"""
zmodload zsh/zpty
zpty typed zsh -f -i
zpty -w typed 'fpath=($PWD $fpath); autoload -Uz compinit; compinit -u -D'
zpty -w -n typed "$LINE"$'\t'
zpty -r typed shown "*$EXPECTED*" && print -r -- $EXPECTED
"""


@pytest.fixture
def env(tmp_path: Path) -> dict[str, str]:
    """An environment with that stand-in."""
    program = tmp_path / "bin" / "commwatch"
    program.parent.mkdir()
    program.write_text(_JOBS)
    program.chmod(0o755)
    path = clean_env()["PATH"]
    return clean_env(PATH=f"{program.parent}:{path}", HOME=str(tmp_path), TERM="xterm", LC_ALL="C.UTF-8")


@pytest.mark.parametrize(("line", "expected"), _TYPED)
def test_fish(line: str, expected: str, env: dict[str, str], tmp_path: Path) -> None:
    """In fish, commands, verbs and the names of jobs are completed."""
    needs(shutil.which("fish"), "fish")
    (tmp_path / "completion").write_text(commwatch("completion", "fish").stdout)
    words = ["fish", "--no-config", "-c", f"source completion; complete -C '{line}'"]
    done = subprocess.run(words, cwd=tmp_path, env=env, capture_output=True, text=True, check=True)
    assert [found.partition("\t")[0] for found in done.stdout.splitlines()] == [expected]


@pytest.mark.parametrize(("line", "expected"), _TYPED)
def test_zsh(line: str, expected: str, env: dict[str, str], tmp_path: Path) -> None:
    """In zsh, commands, verbs and the names of jobs are completed."""
    needs(shutil.which("zsh"), "zsh")
    (tmp_path / "_commwatch").write_text(commwatch("completion", "zsh").stdout)
    words = ["zsh", "-f", "-c", _ZSH]
    env = {**env, "LINE": line, "EXPECTED": expected}
    done = subprocess.run(words, cwd=tmp_path, env=env, capture_output=True, text=True, check=True)
    assert done.stdout.split() == [expected]
