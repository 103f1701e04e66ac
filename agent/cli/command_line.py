"""The command line. Exit codes: 0 success, 1 failure, 2 wrong usage; ``run`` returns the job's exit code."""

from __future__ import annotations

import argparse
import gc
import io
import logging
import os
import shlex
import socket
import sqlite3
import sys
import threading
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from commwatch import __version__
from commwatch.cli import alerts, bench, dashboards, deploy, profile, query, settings, top
from commwatch.commands.nccl_debug import LEVELS
from commwatch.config import Config, load, settings_file
from commwatch.core.durations import LAST, parse_age, parse_last
from commwatch.core.errors import CommwatchError, UsageError
from commwatch.core.terminal_text import OneLine, complain, guard_output, line

if TYPE_CHECKING:
    from commwatch.daemon import Daemon

#: Positional arguments that take any number of values.
_MANY = ("agents", "logs", "parts")
#: Flags that control access to the agent, and credentials for requests to agents.
_ACCESS = ("token_file", "require_token", "insecure", "ca_file", "client_cert")


def main(argv: list[str] | None = None) -> int:
    """Run ``commwatch`` with ``argv``; return the exit code."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # the parent process closed it
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115 - for the life of the process
        stream = getattr(sys, name)
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a locale without Unicode gets question marks, not a traceback
    guard_output()
    arguments = _parser().parse_args(argv)
    log = logging.StreamHandler()
    log.setFormatter(OneLine("commwatch: %(message)s"))
    logging.basicConfig(handlers=[log], level=logging.WARNING if getattr(arguments, "quiet", False) else logging.INFO)
    try:
        code: int = arguments.command(_settings(arguments), arguments)
        sys.stdout.flush()
    except CommwatchError as error:
        complain(f"{_name(arguments)}: {error}" if error.names_command else str(error))
        return error.exit_code
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return code


def _name(arguments: argparse.Namespace) -> str:
    """Return the name of the command, with its verb if it has any."""
    return " ".join(filter(None, (arguments.command_name, getattr(arguments, "command_verb", None))))


def _last(text: str) -> float | None:
    """Return the seconds in a ``--last`` argument; ``None``: the whole job."""
    try:
        return parse_last(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _settings(arguments: argparse.Namespace) -> Config:
    return load(
        os.environ,
        arguments.config,
        dir=arguments.dir,
        state=arguments.state,
        host=arguments.host,
        port=arguments.port,
        **{flag: getattr(arguments, flag, None) for flag in _ACCESS},
    )


class _Parser(argparse.ArgumentParser):
    """Reports an error in one line, even if the quoted argument has line breaks."""

    def error(self, message: str) -> NoReturn:
        """Print the usage and ``message``, and exit with code 2."""
        super().error(line(message))


class _Command(_Parser):
    """Parser of one command: reports unknown arguments itself, accepts flags between repeated positional arguments."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """Parse as argparse does; also accept repeated positional arguments that flags separate."""
        found, rest = super().parse_known_args(args, namespace)
        many = next((name for name in _MANY if name in found), None)
        if many is not None and not any(part.startswith("-") for part in rest):
            setattr(found, many, [*getattr(found, many), *rest])
        elif rest:
            self.error(f"unrecognized arguments: {' '.join(rest)}")
        return found, []


def _parser() -> argparse.ArgumentParser:
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument(
        "--dir",
        help="run directory shared by trainers and agent; also holds the history unless --state is given",
    )
    common.add_argument("--state", help="directory of the history (default: $XDG_STATE_HOME/commwatch)")
    common.add_argument("--config", type=Path, help="settings file (default: ./commwatch.toml if it exists)")
    common.add_argument("--host", help="address the agent listens on (default: 127.0.0.1)")
    common.add_argument(
        "--port", type=int, help="port of the agent (default: 9477, or any free port if it is taken; 0: any free port)"
    )
    _add_access(common)

    parser = _Parser(prog="commwatch", description="Watch the communication of distributed training.")
    parser.add_argument("--version", action="version", version=f"commwatch {__version__}")
    commands: Any = parser.add_subparsers(dest="command_name", metavar="COMMAND", required=True, parser_class=_Command)

    run = commands.add_parser(
        "run",
        parents=[common],
        help="run a job and watch it: commwatch run -- torchrun ...",
        description="Run a job, watch it, and print a report at the end.",
    )
    run.add_argument(
        "--nccl-debug",
        choices=LEVELS,
        default="warn",
        help="NCCL_DEBUG of the job if it is not set (default: warn); info also shows topology and NCCL's choices",
    )
    run.add_argument("job", nargs=argparse.REMAINDER, metavar="-- COMMAND ...", help="the job")
    run.set_defaults(command=_run)

    agent = commands.add_parser(
        "agent",
        parents=[common],
        help="watch the jobs of this node (the sidecar)",
        description="Watch the jobs of this node until SIGTERM.",
    )
    agent.add_argument("--quiet", action="store_true", help="log only warnings and errors")
    agent.add_argument(
        "--until-stdin-closes", action="store_true", help="exit when standard input closes (with the parent)"
    )
    agent.set_defaults(command=_agent)

    report = commands.add_parser(
        "report",
        parents=[common],
        help="report on a finished or running job",
        description="Print the report on a job from the history.",
    )
    report.add_argument("job", nargs="?", help="job id (default: the latest)")
    report.add_argument(
        "--last",
        type=_last,
        default=LAST,
        metavar="AGE",
        help="how much of the job's end the advice covers, such as 90s or 2h; all: the whole job (default: %(default)s)",
    )
    form = report.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print JSON")
    form.add_argument("--html", type=Path, metavar="FILE", help="write one self-contained page")
    report.set_defaults(command=_report)

    explain = commands.add_parser(
        "explain",
        help="explain NCCL_DEBUG output",
        description="Explain the debug output of NCCL and RCCL: topology, choices, and problems. "
        "Exit code 1 if it has errors.",
    )
    explain.add_argument("logs", nargs="+", metavar="LOG", help="log files (also gzip), globs, or - for standard input")
    explain.add_argument("--json", action="store_true", help="print everything as JSON")
    explain.set_defaults(command=_explain, dir=None, state=None, config=None, host=None, port=None)

    doctor = commands.add_parser(
        "doctor",
        parents=[common],
        help="check that everything works; each fault comes with its remedy",
        description="Check this node: agent, port, probes, records, hooks, NCCL's logs, Prometheus. Exit code 1 if a check fails.",
    )
    doctor.add_argument("--json", action="store_true", help="print JSON")
    doctor.set_defaults(command=_doctor)

    diagnose = commands.add_parser(
        "diagnose",
        parents=[common],
        help="show what is wrong now: hangs, stalls, stragglers",
        description="Show what is wrong now with the jobs of this node, or of all nodes whose agents are named. "
        "Exit code 0: healthy, 1: at least one verdict, 2: no verdict, but some agents did not answer.",
    )
    diagnose.add_argument(
        "agents",
        nargs="*",
        metavar="ADDRESS",
        help="agents (host, host:port, URL), or a Prometheus file_sd target file (.json)",
    )
    diagnose.add_argument("--job", help="only this job")
    diagnose.add_argument(
        "--flight-recorder",
        nargs="+",
        type=Path,
        metavar="FILE",
        help="ask no agent: read these dumps of PyTorch's Flight Recorder, one for each rank, pickled or JSON",
    )
    diagnose.add_argument("--json", action="store_true", help="print JSON")
    diagnose.set_defaults(command=_diagnose)

    for part in (bench, query, profile, alerts, top, settings, deploy):
        part.add_parser(commands, common)
    dashboards.add_parser(commands)

    native = commands.add_parser(
        "native",
        help="build the native hook, show its status, or remove it",
        description="The hook in C++ costs the training almost nothing. It is built once for each version of torch, "
        "in an image with `build`, otherwise by the first `run`. Without it, the Python hook is used.",
    )
    native.add_argument("verb", choices=("build", "status", "clean"))
    native.add_argument("--python", default=sys.executable, help="the trainer's Python, if not this one")
    native.add_argument("--force", action="store_true", help="build: even if it is built already")
    native.add_argument("--json", action="store_true", help="status: print JSON")
    native.set_defaults(command=_native, dir=None, state=None, config=None, host=None, port=None)
    return parser


def _add_access(common: argparse.ArgumentParser) -> None:
    common.add_argument(
        "--token-file", metavar="FILE", help="file with the agent's token (default: agent.token in its run directory)"
    )
    common.add_argument(
        "--require-token", action="store_true", default=None, help="the agent requires its token for reading, too"
    )
    common.add_argument(
        "--insecure", action="store_true", default=None, help="let the agent listen beyond this machine without TLS"
    )
    common.add_argument(
        "--ca-file", metavar="FILE", help="CA certificates that agents are verified with (default: the system's)"
    )
    common.add_argument("--client-cert", metavar="FILE", help="certificate with its key, for agents that require one")


def _run(config: Config, arguments: argparse.Namespace) -> int:
    from commwatch.commands.run import run

    command = arguments.job[1:] if arguments.job[:1] == ["--"] else arguments.job
    if not command:
        raise UsageError("no job given; use commwatch run -- torchrun ...")
    file = settings_file(arguments.config)
    return run(config, file, command, os.environ, report_command=_again(arguments), nccl_level=arguments.nccl_debug)


def _native(config: Config, arguments: argparse.Namespace) -> int:
    from commwatch.commands.native_hook import call

    flags = [f"--{name}" for name in ("force", "json") if getattr(arguments, name)]
    try:
        return call(arguments.python, [arguments.verb, *flags], os.environ)
    except OSError as error:
        raise UsageError(f"cannot run {arguments.python}: {error.strerror}") from None


def _explain(config: Config, arguments: argparse.Namespace) -> int:
    from commwatch.commands.explain import explain

    gc.disable()  # this command creates no reference cycles, and collection costs a tenth of the time
    return explain(arguments.logs, arguments.json)


def _doctor(config: Config, arguments: argparse.Namespace) -> int:
    from commwatch.commands import doctor

    checks = doctor.examine(config)
    print((doctor.as_json if arguments.json else doctor.text)(checks))
    return int(any(check.result == "fail" for check in checks))


def _diagnose(config: Config, arguments: argparse.Namespace) -> int:
    from commwatch.commands import client, diagnose
    from commwatch.watchers.stack_capture import evidence

    if arguments.flight_recorder:
        return _flight_recorder(arguments)
    urls = (
        diagnose.addresses(arguments.agents, config.expects_tls)
        if arguments.agents
        else client.local_agents(config.dir)
    )
    seen = diagnose.ask(urls, arguments.job, client.keys_of(config))
    found = diagnose.conclude(seen)
    taken = evidence(found, seen.ranks, socket.gethostname())
    say = diagnose.as_json if arguments.json else diagnose.text
    print(say(found, seen, taken))
    return 1 if found else 2 if seen.silent else 0


def _flight_recorder(arguments: argparse.Namespace) -> int:
    from commwatch.analysis import flight_recorder_analysis

    if arguments.agents or arguments.job:
        raise UsageError("--flight-recorder asks no agent; leave out ADDRESS and --job")
    dumps, damaged = flight_recorder_analysis.take_all(arguments.flight_recorder)
    if not dumps:
        raise UsageError("; ".join(f"{file}: {why}" for file, why in damaged.items()))
    found = flight_recorder_analysis.conclude(dumps)
    print(
        (flight_recorder_analysis.as_json if arguments.json else flight_recorder_analysis.text)(found, dumps, damaged)
    )
    return 1 if found else 2 if damaged else 0


def _again(arguments: argparse.Namespace) -> str:
    """Return the command that prints the report of a run again."""
    flags = [
        (f"--{name}", getattr(arguments, name))
        for name in ("config", "dir", "state")
        if getattr(arguments, name) is not None
    ]
    return shlex.join(["commwatch", "report", *(str(part) for flag in flags for part in flag)])


def _other_last(last_s: float | None) -> str:
    """Return the ``--last`` flag with a space before it; empty for the default."""
    return "" if last_s == parse_age(LAST) else " --last all" if last_s is None else f" --last {last_s:g}s"


def _agent(config: Config, arguments: argparse.Namespace) -> int:
    from commwatch.daemon import Daemon

    # An agent that ends with its parent does not read the settings again at SIGHUP.
    reread = None if arguments.until_stdin_closes else partial(_settings, arguments)
    daemon = Daemon(config, reread=reread)
    if arguments.until_stdin_closes:
        threading.Thread(target=_stop_with_parent, args=(daemon,), name="parent", daemon=True).start()
    return 0 if daemon.run() else 1


def _stop_with_parent(daemon: Daemon) -> None:
    sys.stdin.read()
    daemon.stop()


def _report(config: Config, arguments: argparse.Namespace) -> int:
    from commwatch.analysis.queries import QueryService
    from commwatch.reference.references import References, directory
    from commwatch.report import charts, report, report_page
    from commwatch.watchers.nccl_archive import kept

    agent = QueryService(config.history, references=References(directory(config.state), config.links))
    try:
        jobs = [job.job_id for job in agent.jobs()]
        if not jobs:
            raise UsageError(f"no job in {config.history} yet")
        job = arguments.job or jobs[0]
        topology = kept(config.state, job)
        findings = [] if topology is None else topology.findings
        again = f"{_again(arguments)}{_other_last(arguments.last)} {job}"
        built = report.build(agent, job, config.history, again, findings, last_s=arguments.last)
        if built is None:
            known = f"{', '.join(jobs[:5])}{' ...' if len(jobs) > 5 else ''}"
            raise UsageError(f"no job '{job}' in {config.history}; it has {known}")
        page = None if arguments.html is None else report_page.html(built, charts.gather(agent, job), topology)
    except sqlite3.Error as error:
        raise UsageError(f"{config.history}: {error}") from None
    if page is None:
        print(report.as_json(built) if arguments.json else report.text(built))
        return 0
    try:
        arguments.html.write_text(page, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"cannot write {arguments.html}: {error.strerror}") from None
    return 0
