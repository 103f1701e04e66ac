"""``commwatch.watch``: the probe and an agent for the duration of a block."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from commwatch.wire import descriptor, standard_error
from commwatch.wire.announcement import answering, operators
from commwatch.wire.concurrency import wait_until
from commwatch.wire.identity import make_private_dir, run_dir

#: Most seconds to wait for an agent that was started.
_START_S = 30.0
#: Agents that this process has started: they end with it, when the pipe to their standard input closes.
_started: list[subprocess.Popen[bytes]] = []


@contextlib.contextmanager
def watch() -> Iterator[None]:
    """Watch the communication of this process in a ``with`` block, without a launcher.

    Installs the probe, and starts an agent for the run directory (``COMMWATCH_DIR``) if there is none. Of several ranks on a node, the one with
    ``LOCAL_RANK=0`` starts it. The agent goes on after the block, and ends with this process. Enter the block on all ranks, before the first
    process group is created. If the agent cannot be started, the reason is printed and the block runs without.

    Raises:
        ImportError: torch is not installed.
    """
    from commwatch.probe import torch_collectives

    if os.environ.get("LOCAL_RANK", "0") == "0":
        _have_agent()
    torch_collectives.install()
    try:
        yield
    finally:
        torch_collectives.uninstall()


def _have_agent() -> None:
    directory = run_dir(os.environ)
    trust = operators(directory)
    if answering(directory, trust) is not None:
        return
    program = _program()
    if program is None:
        standard_error.say(
            "commwatch: no agent: it is not installed here, and PATH has no command `commwatch` of another environment (`uv tool install`, `pipx install`)"
        )
        return
    # Its folders are those that its environment names, as for `commwatch agent`.
    command = [*program, "agent", "--quiet", "--until-stdin-closes"]
    settings = Path("commwatch.toml")
    command += ["--config", str(settings.absolute())] if settings.is_file() else []
    try:
        make_private_dir(directory, os.environ)
        # A session of its own, because Ctrl-C is for the training; from /, because its folder may hold modules named like ours.
        # The number of a closed standard error may be that of a file of the program.
        log = None if descriptor.is_standard_error() else subprocess.DEVNULL
        agent = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=log, start_new_session=True, cwd="/"
        )
    except OSError as error:
        standard_error.say(f"commwatch: no agent: {error.strerror} ({error.filename})")
        return
    _started.append(agent)
    if not wait_until(lambda: answering(directory, trust) is not None or agent.poll() is not None, _START_S):
        standard_error.say(f"commwatch: the agent is not ready after {_START_S:.0f} s; continuing without it")


def _program() -> list[str] | None:
    """Return the words that begin a command of the agent: of this environment, or of another one that is on the path."""
    # What the agent needs is not there where only the probe was installed.
    if find_spec("commwatch_agent") is not None and find_spec("uvicorn") is not None:
        return [sys.executable, "-m", "commwatch"]
    own = str(Path(sys.executable).parent)
    others = [folder for folder in os.get_exec_path() if os.path.isabs(folder) and folder != own]  # noqa: PTH117
    other = shutil.which("commwatch", path=os.pathsep.join(others))
    return None if other is None else [other]
