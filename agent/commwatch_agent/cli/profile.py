"""``commwatch profile``: run torch.profiler in a running job, and compare it with the continuous measurements."""

from __future__ import annotations

import argparse
from typing import Any

from commwatch.wire.errors import UsageError
from commwatch.wire.profile_files import MOST_SECONDS, MOST_STEPS
from commwatch_agent.config import Config
from commwatch_agent.text.terminal_text import output_cells


def add_parser(commands: Any, common: argparse.ArgumentParser) -> None:
    """Add the command."""
    profile = commands.add_parser(
        "profile",
        parents=[common],
        help="run torch.profiler in a running job for a few steps, and compare it with the continuous measurements",
        description="Run torch.profiler for a few steps in the trainers of a job on this node, compute the overlap from "
        "the traces, and compare it with the probe's records of the same steps. Exit code 1 if a rank has no result, 2 if there is no agent.",
    )
    profile.add_argument("job", nargs="?", help="job id (default: the running job)")
    profile.add_argument("--steps", type=int, default=3, help=f"steps to profile, 1 to {MOST_STEPS} (default: 3)")
    profile.add_argument("--ranks", help="comma-separated ranks, such as 0,1 (default: all ranks of this node)")
    profile.add_argument(
        "--timeout",
        type=float,
        default=120.0,
        metavar="S",
        help="seconds within which the steps must finish (default: 120)",
    )
    profile.add_argument("--json", action="store_true", help="print JSON")
    profile.set_defaults(command=_profile)


def _profile(config: Config, arguments: argparse.Namespace) -> int:
    from commwatch.api import client
    from commwatch_agent.commands import profile

    if not 1 <= arguments.steps <= MOST_STEPS:
        raise UsageError(f"--steps {arguments.steps}: needs 1 to {MOST_STEPS}")
    if not 0 < arguments.timeout <= MOST_SECONDS:
        raise UsageError(f"--timeout {arguments.timeout:g}: needs more than 0 and at most {MOST_SECONDS} seconds")
    parts = None if arguments.ranks is None else arguments.ranks.split(",")
    if parts is not None and not all(part.strip().isdecimal() for part in parts):
        raise UsageError(f"--ranks {arguments.ranks}: needs comma-separated numbers, such as 0,1")
    ranks = None if parts is None else [int(part) for part in parts]
    urls, keys = client.local_agents(config.dir), client.keys_of(config)
    if not urls:
        raise UsageError(
            f"no agent watches {config.dir}; start a job with commwatch run, or give its run directory with --dir"
        )
    where = profile.places(urls, arguments.job, ranks, keys)
    taken = profile.take(where, arguments.steps, arguments.timeout, keys)
    print(profile.as_json(taken) if arguments.json else profile.text(taken, output_cells()))
    return int(profile.failed(taken))
