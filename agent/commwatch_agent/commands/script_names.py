"""The script or module name of a command line, whatever launcher runs it. Pure."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

_SCRIPTS = (".py", ".sh", ".bash")
_SHELLS = ("sh", "bash", "dash", "zsh", "ksh")
#: Modules that run another script or module.
_LAUNCHERS = re.compile(
    r"torch\.distributed\.(run|launch|elastic)|accelerate|deepspeed|horovod|lightning|runpy|pdb|cProfile|coverage|debugpy|viztracer"
)
_MOST = 60


def script_name(command: list[str]) -> str:
    """Return the first script or module of a command line, else its program; without folder and suffix.

    >>> script_name(["torchrun", "--nproc-per-node", "8", "runs/train.py", "--lr", "1"])
    'train'
    >>> script_name(["python", "-m", "torch.distributed.run", "-m", "pkg.pretrain"])
    'pkg.pretrain'
    """
    found = next(_named(command), "") or Path(command[0]).stem
    return found[:_MOST] or "job"


def _named(command: list[str]) -> Iterator[str]:
    shell = False
    for before, word in pairwise(["", *command]):
        if shell and before.startswith("-") and before.endswith("c") and not before.startswith("--"):
            yield from _named(_words(word))
        elif before == "-m" and not _LAUNCHERS.match(word):
            yield word
        elif (word.endswith(_SCRIPTS) and not word.startswith("-")) or (
            shell and before.endswith(_SHELLS) and not word.startswith("-")
        ):
            yield Path(word).stem
        shell = shell or Path(word).name in _SHELLS


def _words(text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError:  # an unclosed quotation
        return text.split()
