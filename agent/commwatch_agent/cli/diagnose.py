"""``commwatch diagnose``: show what is wrong now, or was with an ended job, from agents, the history, or dumps of PyTorch's Flight Recorder."""

from __future__ import annotations

import argparse
import socket
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from commwatch.wire.errors import INCOMPLETE, CommwatchError, UsageError
from commwatch_agent.config import Config
from commwatch_agent.text.terminal_text import output_cells

if TYPE_CHECKING:
    from commwatch.api.client import Keys
    from commwatch_agent.commands.diagnosis import Diagnosis
    from commwatch_agent.sources.stack_capture import Evidence


def add_parser(commands: Any, common: argparse.ArgumentParser) -> None:
    """Add the command."""
    diagnose = commands.add_parser(
        "diagnose",
        parents=[common],
        help="show what is wrong now, or was with an ended job",
        description="Show what is wrong now with the jobs of this node and its agent's peers, or of all nodes whose agents are named. "
        "Of an ended job show what happened, from an agent or from the history. "
        "Exit code 0: healthy, 1: something is wrong, 3: nothing is known to be wrong, but some agents did not answer.",
    )
    diagnose.add_argument(
        "agents",
        nargs="*",
        metavar="JOB or ADDRESS",
        help="the name of a job that is known on this node: as --job; otherwise agents (host, host:port, URL), or a "
        "Prometheus file_sd target file (.json); default: the agents of --dir and their peers",
    )
    diagnose.add_argument("--job", help="only this job; if it has ended: what happened to it")
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
    from commwatch_agent.cli.report import again
    from commwatch_agent.commands import diagnose, diagnosis
    from commwatch_agent.runtime import agents

    if arguments.flight_recorder:
        return _flight_recorder(config, arguments)
    keys, command = client.keys_of(config), again(arguments, "diagnose")
    job, named = _job_and_agents(config, arguments, keys)
    urls = (
        agents.addresses(named, config.expects_tls)
        if named
        else diagnose.with_peers(client.local_agents(config.dir), keys)
    )
    try:
        seen = diagnose.ask(urls, job, keys)
    except diagnose.CannotDiagnose as error:
        if named:
            raise diagnose.CannotDiagnose(f"{error}{_no_jobs(named)}") from None
        seen = _stored(config, job, command, error if urls or job is None else None)
    now = time.time()
    found, taken = diagnosis.doubts(seen, now), _taken(seen)
    if arguments.json:
        print(diagnosis.as_json(seen, taken))
    else:
        print(diagnosis.text(seen, found, taken, command, output_cells()))
    return diagnosis.exit_code(seen, found)


def _job_and_agents(config: Config, arguments: argparse.Namespace, keys: Keys) -> tuple[str | None, list[str]]:
    """Return the job that is meant, if there is one, and the agents that are named."""
    from commwatch.api import client
    from commwatch_agent.cli.stored import LATEST, only, reading
    from commwatch_agent.commands.diagnose import jobs_of

    if not arguments.agents and not arguments.job:
        return None, []
    names = [*arguments.agents, *filter(None, [arguments.job])]
    every: dict[str, None] = {}
    try:
        with reading(config) as agent:
            every |= dict.fromkeys(job.job_id for job in agent.jobs())  # the latest first
            every |= dict.fromkeys(name for name in names if agent.has_job(name))
    except CommwatchError:  # without a history
        pass
    every |= jobs_of(client.local_agents(config.dir), keys)
    known = {LATEST: LATEST} | {name: job for name in names if (job := only(name, [*every])) is not None}
    jobs = {known.get(name, name) for name in names if name in known or name == arguments.job}
    if len(jobs) > 1:
        raise UsageError(f"one job at a time; these are jobs: {', '.join(sorted(jobs))}")
    return next(iter(jobs), None), [name for name in arguments.agents if name not in known]


def _no_jobs(named: list[str]) -> str:
    """Return that names which may be those of jobs are none, for people who mistyped one."""
    words = [f"'{name}'" for name in named if not set(name) & set(".:/")]
    return f"; no job {' or '.join(words)} is known here: `commwatch jobs` lists them" if words else ""


def _stored(config: Config, job: str | None, command: str, error: UsageError | None) -> Diagnosis:
    """Return what the history has of a job; raise ``error`` if it does not have it, or no job is meant."""
    from commwatch_agent.cli.stored import job_in, reading
    from commwatch_agent.commands.diagnosis import Diagnosis, last_job
    from commwatch_agent.incidents.stored import details_of_run

    try:
        with reading(config) as agent:
            view = job_in(agent, job)
            incidents = details_of_run(config.history, agent.stored(view.job_id))
    except CommwatchError as unknown:
        raise error or unknown from None
    if job is None:
        raise UsageError(f"{error}; {last_job(view, incidents, command)}")
    return Diagnosis(incidents=incidents, ended=view)


def _taken(seen: Diagnosis) -> list[Evidence]:
    """Return what incidents lack: stacks of culprits that no agent could take, and dumps of the Flight Recorder."""
    from commwatch_agent.commands.diagnosis import without_look
    from commwatch_agent.sources.stack_capture import evidence

    return evidence(seen.open, seen.ranks, socket.gethostname(), without_look(seen.open))


def _flight_recorder(config: Config, arguments: argparse.Namespace) -> int:
    from commwatch_agent.analysis import flight_recorder_analysis
    from commwatch_agent.commands import diagnosis
    from commwatch_agent.incidents.answers import details_of
    from commwatch_agent.incidents.conclude import of_dumps
    from commwatch_agent.incidents.verdict_views import verdicts_of
    from commwatch_agent.notify.alert_rules import plan_of

    if arguments.agents or arguments.job:
        raise UsageError("--flight-recorder reads only the dumps; leave out ADDRESS and --job")
    dumps, damaged = flight_recorder_analysis.take_all(arguments.flight_recorder)
    if not dumps:
        raise UsageError("; ".join(f"{file}: {why}" for file, why in damaged.items()))
    incidents = of_dumps(dumps, plan_of(config, "", "", lambda alerts: None).table)
    found = [details_of(each) for each in incidents if each.state == "open"]
    if arguments.json:
        verdicts = verdicts_of(incidents, max(each.last_at for each in incidents)) if incidents else []
        wrong = {"verdicts": list(map(asdict, verdicts)), "incidents": list(map(asdict, found))}
        print(flight_recorder_analysis.as_json(wrong, dumps, damaged))
    else:
        lines = [line for block in diagnosis.blocks(found) for line in block]
        print(flight_recorder_analysis.text(lines, dumps, damaged, output_cells()))
    return 1 if found else INCOMPLETE if damaged else 0
