"""``commwatch profile``: run torch.profiler in a running job, and compare it with the continuous measurements."""

from __future__ import annotations

import argparse
from typing import Any

from commwatch.collectors.wire.profile_files import MOST_SECONDS, MOST_STEPS
from commwatch.config import Config
from commwatch.core.errors import UsageError


def add_parser(commands: Any, common: argparse.ArgumentParser) -> None:
    """Add the command."""
    profile = commands.add_parser(
        "profile",
        parents=[common],
        help="torch.profiler in a running job for a few steps, beside the continuous figures",
        description="Have the trainers of a job on this node run torch.profiler for a few steps, compute overlap from "
        "the traces, and show it beside what the probe recorded of the same steps. Exit code 1 if a rank has no result, 2 if no agent is there.",
    )
    profile.add_argument("job", nargs="?", help="job id (default: the one that runs)")
    profile.add_argument("--steps", type=int, default=3, help=f"steps to profile, 1 to {MOST_STEPS} (default: 3)")
    profile.add_argument("--ranks", help="only these ranks: 0,1 (default: all of this node)")
    profile.add_argument(
        "--timeout",
        type=float,
        default=120.0,
        metavar="S",
        help="seconds within which the steps must be over (default: 120)",
    )
    profile.add_argument("--json", action="store_true", help="for programs")
    profile.set_defaults(command=_profile)


def _profile(config: Config, arguments: argparse.Namespace) -> int:
    from commwatch.commands import client, profile

    if not 1 <= arguments.steps <= MOST_STEPS:
        raise UsageError(f"--steps {arguments.steps}: 1 to {MOST_STEPS}")
    if not 0 < arguments.timeout <= MOST_SECONDS:
        raise UsageError(f"--timeout {arguments.timeout:g}: more than 0, at most {MOST_SECONDS} seconds")
    parts = None if arguments.ranks is None else arguments.ranks.split(",")
    if parts is not None and not all(part.strip().isdecimal() for part in parts):
        raise UsageError(f"--ranks {arguments.ranks}: numbers with commas between, such as 0,1")
    ranks = None if parts is None else [int(part) for part in parts]
    urls, keys = client.local_agents(config.dir), client.keys_of(config)
    if not urls:
        raise UsageError(
            f"no agent watches {config.dir}; start a job with commwatch run, or give its run directory with --dir"
        )
    where = profile.places(urls, arguments.job, ranks, keys)
    taken = profile.take(where, arguments.steps, arguments.timeout, keys)
    print((profile.as_json if arguments.json else profile.text)(taken))
    return int(profile.failed(taken))
