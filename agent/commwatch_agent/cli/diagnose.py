"""``commwatch diagnose``: show what is wrong now, from agents or from dumps of PyTorch's Flight Recorder."""

from __future__ import annotations

import argparse
import socket
from pathlib import Path
from typing import Any

from commwatch.wire.errors import INCOMPLETE, UsageError
from commwatch_agent.config import Config


def add_parser(commands: Any, common: argparse.ArgumentParser) -> None:
    """Add the command."""
    diagnose = commands.add_parser(
        "diagnose",
        parents=[common],
        help="show what is wrong now: hangs, stalls, stragglers",
        description="Show what is wrong now with the jobs of this node and its agent's peers, or of all nodes whose agents are named. "
        "Exit code 0: healthy, 1: at least one verdict, 3: no verdict, but some agents did not answer.",
    )
    diagnose.add_argument(
        "agents",
        nargs="*",
        metavar="ADDRESS",
        help="agents (host, host:port, URL), or a Prometheus file_sd target file (.json); default: those of --dir and their peers",
    )
    diagnose.add_argument("--job", help="only this job")
    diagnose.add_argument(
        "--flight-recorder",
        nargs="+",
        type=Path,
        metavar="FILE",
        help="instead of agents, read these dumps of PyTorch's Flight Recorder: one for each rank, pickled or JSON",
    )
    diagnose.add_argument("--json", action="store_true", help="print JSON")
    diagnose.set_defaults(command=_diagnose)


def _diagnose(config: Config, arguments: argparse.Namespace) -> int:
    from commwatch.api import client
    from commwatch_agent.commands import diagnose
    from commwatch_agent.incidents.judging import judged
    from commwatch_agent.runtime import agents
    from commwatch_agent.watchers.stack_capture import evidence

    if arguments.flight_recorder:
        return _flight_recorder(arguments)
    keys = client.keys_of(config)
    urls = (
        agents.addresses(arguments.agents, config.expects_tls)
        if arguments.agents
        else diagnose.with_peers(client.local_agents(config.dir), keys)
    )
    seen = diagnose.ask(urls, arguments.job, keys)
    found = judged(seen)
    taken = evidence(found, seen.ranks, socket.gethostname())
    say = diagnose.as_json if arguments.json else diagnose.text
    print(say(found, seen, taken))
    return 1 if found else INCOMPLETE if seen.silent else 0


def _flight_recorder(arguments: argparse.Namespace) -> int:
    from commwatch_agent.analysis import flight_recorder_analysis
    from commwatch_agent.incidents.judging import judged_dumps

    if arguments.agents or arguments.job:
        raise UsageError("--flight-recorder reads only the dumps; leave out ADDRESS and --job")
    dumps, damaged = flight_recorder_analysis.take_all(arguments.flight_recorder)
    if not dumps:
        raise UsageError("; ".join(f"{file}: {why}" for file, why in damaged.items()))
    found = judged_dumps(dumps)
    print(
        (flight_recorder_analysis.as_json if arguments.json else flight_recorder_analysis.text)(found, dumps, damaged)
    )
    return 1 if found else INCOMPLETE if damaged else 0
