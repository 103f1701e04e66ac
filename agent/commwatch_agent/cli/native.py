"""``commwatch native``: build the native hook, show its status, or remove it."""

from __future__ import annotations

import argparse
import os
import sys
from typing import Any

from commwatch.wire.errors import UsageError
from commwatch_agent.config import Config


def add_parser(commands: Any) -> None:
    """Add the command."""
    native = commands.add_parser(
        "native",
        help="build the native hook, show its status, or remove it",
        description="Build the native hook, show its status, or remove it. The native hook costs the training almost nothing. Build it "
        "once for each version of torch, for example when you build an image; otherwise the first `run` builds it. Without it, commwatch uses the Python hook.",
    )
    native.add_argument("verb", choices=("build", "status", "clean"))
    native.add_argument(
        "--python",
        default=sys.executable,
        help="the Python of your training jobs, which has torch (default: that of commwatch)",
    )
    native.add_argument("--force", action="store_true", help="build: build again, even if a build exists")
    native.add_argument("--json", action="store_true", help="status: print JSON")
    native.set_defaults(command=_native, dir=None, state=None, config=None, host=None, port=None)


def _native(config: Config, arguments: argparse.Namespace) -> int:
    from commwatch_agent.commands.native_hook import call, program
    from commwatch_agent.deploy.probe_folder import on_path

    flags = [f"--{name}" for name in ("force", "json") if getattr(arguments, name)]
    try:
        return call(program(arguments.python), [arguments.verb, *flags], on_path(os.environ))
    except OSError as error:
        raise UsageError(f"cannot run {arguments.python}: {error.strerror}") from None
