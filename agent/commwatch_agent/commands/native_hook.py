"""Build and inspect the native hook from outside the trainer, in the trainer's Python, because that has torch."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

_MODULE = "commwatch.probe.native.build"
_PYTHON = re.compile(r"pypy|python[0-9.]*$")


def call(python: str, arguments: list[str], env: Mapping[str, str]) -> int:
    """Run a verb of ``commwatch native`` with the interpreter ``python``; return the exit code.

    Raises:
        OSError: there is no such interpreter.
    """
    return subprocess.run(_command(python, arguments), env=_quiet(env), cwd="/", check=False).returncode


def program(python: str) -> str:
    """Return the absolute path of an interpreter that the user names, for a process in another folder; the name itself if there is none."""
    return _found(python, None) or python


def _found(command: str, path: str | None) -> str | None:
    """Return the absolute path of a command that is looked for in ``path``, by default that of this process; ``None``: there is none."""
    found = shutil.which(command, path=path)
    return None if found is None else str(Path(found).absolute())


def prepare(job: list[str], env: Mapping[str, str], waits: bool = False) -> dict[str, str]:
    """Look for the hook of a job about to start; print to standard error what is done about a missing one.

    Args:
        waits: the job waits until it is built, as one with ``COMMWATCH_HOOK=native`` does. For others it is built beside them, for later jobs.

    Returns:
        Environment variables for the job. Without a native hook they select the Python one, so that all ranks have the same, and not
        every rank looks for the native one and prints that it is missing.
    """
    hook = env.get("COMMWATCH_HOOK", "auto")
    if hook == "python" or env.get("COMMWATCH_DISABLE") == "1":
        return {}
    python = trainer_python(job, env)
    if python is None:
        return {}
    try:
        with subprocess.Popen(
            _command(python, ["ensure" if waits or hook == "native" else "later"]),
            env=_quiet(env),
            cwd="/",
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
        ) as builder:
            assert builder.stderr is not None
            printed = False
            for line in builder.stderr:
                if line.startswith("commwatch: "):
                    printed = True
                    print(line, end="", file=sys.stderr, flush=True)
    except OSError:
        return {}
    return {"COMMWATCH_HOOK": "python"} if printed and builder.returncode != 0 and hook != "native" else {}


def trainer_python(job: list[str], env: Mapping[str, str]) -> str | None:
    """Return the interpreter that will run ``job``: its command, or the one in the first two lines of that script.

    If neither names one (``srun``, a shell script): this interpreter if it has torch, else ``None``.
    """
    found = _found(job[0], env.get("PATH"))
    if found is None:
        return None
    if _PYTHON.match(Path(found).name):
        return found
    try:
        with open(found, "rb") as file:
            first, second = (file.readline(1000).decode(errors="replace").strip() for _ in range(2))
    except OSError:
        first = second = ""
    # pip writes `#!/bin/sh` and `'''exec' /path/python "$0" "$@"` if the path is long.
    words = first.removeprefix("#!").split() if first.startswith("#!") else []
    words += second.removeprefix("'''exec'").replace('"', " ").split()[:1] if second.startswith("'''exec'") else []
    for word in words:
        if _PYTHON.match(Path(word).name):
            return shutil.which(word, path=env.get("PATH"))
    return sys.executable if find_spec("torch") else None


def _command(python: str, arguments: list[str]) -> list[str]:
    return [python, "-m", _MODULE, *arguments]


def _quiet(env: Mapping[str, str]) -> dict[str, str]:
    """Return ``env`` without the probe, because the builder imports torch but does not train."""
    return {**env, "COMMWATCH": "0"}
