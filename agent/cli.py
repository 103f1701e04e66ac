"""The command line. Exit codes: 0 fine, 1 cannot do it here, 2 asked wrongly; ``run`` returns the job's."""

from __future__ import annotations

import argparse
import gc
import io
import json
import logging
import os
import shlex
import socket
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

from commwatch import __version__, alerts_cli, dashboards_cli, deploy_cli, settings_cli, top_cli
from commwatch.collectors.profile_files import MOST_SECONDS, MOST_STEPS
from commwatch.config import Config, ConfigError, load, settings_file
from commwatch.debugging import LEVELS

if TYPE_CHECKING:
    from commwatch.daemon import Daemon

#: Flags of who may ask, and of what is shown to agents.
_ACCESS = ("token_file", "require_token", "insecure", "ca_file", "client_cert")


class UsageError(Exception):
    """The caller asked for something that does not exist; the message names it."""


def main(argv: list[str] | None = None) -> int:
    """Run ``commwatch`` with ``argv``; returns the exit code."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by who started us
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115 - for the life of the process
    arguments = _parser().parse_args(argv)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a locale without Unicode gets question marks, not a traceback
    logging.basicConfig(
        format="commwatch: %(message)s", level=logging.WARNING if getattr(arguments, "quiet", False) else logging.INFO
    )
    try:
        config = load(
            os.environ,
            arguments.config,
            dir=arguments.dir,
            state=arguments.state,
            host=arguments.host,
            port=arguments.port,
            **{flag: getattr(arguments, flag, None) for flag in _ACCESS},
        )
        code: int = arguments.command(config, arguments)
        sys.stdout.flush()
    except (ConfigError, UsageError) as error:
        print(f"commwatch: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return code


def _parser() -> argparse.ArgumentParser:
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument(
        "--dir",
        help="run directory, where trainers and agent meet; holds the history too unless --state is given",
    )
    common.add_argument("--state", help="directory of the history (default: $XDG_STATE_HOME/commwatch)")
    common.add_argument("--config", type=Path, help="settings file (default: ./commwatch.toml if there is one)")
    common.add_argument("--host", help="address the agent listens on (default: 127.0.0.1)")
    common.add_argument(
        "--port", type=int, help="port of the agent (default: 9477, or a free one if it is taken; 0: any free one)"
    )
    _add_access(common)

    parser = argparse.ArgumentParser(prog="commwatch", description="See the communication of distributed training.")
    parser.add_argument("--version", action="version", version=f"commwatch {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)

    run = commands.add_parser(
        "run",
        parents=[common],
        help="run a job and watch it: commwatch run -- torchrun ...",
        description="Run a job, watch it, report at the end.",
    )
    run.add_argument(
        "--nccl-debug",
        choices=LEVELS,
        default="warn",
        help="NCCL_DEBUG of the job where it is not set (default: warn); info tells topology and choices, too",
    )
    run.add_argument("job", nargs=argparse.REMAINDER, metavar="-- COMMAND ...", help="the job")
    run.set_defaults(command=_run)

    agent = commands.add_parser(
        "agent",
        parents=[common],
        help="watch the jobs of this node (the sidecar)",
        description="Watch the jobs of this node until SIGTERM.",
    )
    agent.add_argument("--quiet", action="store_true", help="say nothing but warnings")
    agent.add_argument(
        "--until-stdin-closes", action="store_true", help="end when standard input does (with its parent)"
    )
    agent.set_defaults(command=_agent)

    report = commands.add_parser(
        "report",
        parents=[common],
        help="report on a finished or running job",
        description="Report on a job out of the history.",
    )
    report.add_argument("job", nargs="?", help="job id (default: the latest)")
    form = report.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="for programs")
    form.add_argument("--html", type=Path, metavar="FILE", help="one self-contained page")
    report.set_defaults(command=_report)

    explain = commands.add_parser(
        "explain",
        help="say what NCCL_DEBUG output means",
        description="Say what NCCL's and RCCL's debug output means: topology, choices, and what is wrong. "
        "Exit code 1 if there are errors in it.",
    )
    explain.add_argument("logs", nargs="+", metavar="LOG", help="files, globs, - for standard input; gzip as well")
    explain.add_argument("--json", action="store_true", help="for programs: all of it")
    explain.set_defaults(command=_explain, dir=None, state=None, config=None, host=None, port=None)

    doctor = commands.add_parser(
        "doctor",
        parents=[common],
        help="does everything work that has to, and what to do where it does not",
        description="Look at this node: agent, port, probes, records, hooks, NCCL's logs, Prometheus. Exit code 1 if something fails.",
    )
    doctor.add_argument("--json", action="store_true", help="for programs")
    doctor.set_defaults(command=_doctor)

    diagnose = commands.add_parser(
        "diagnose",
        parents=[common],
        help="what is wrong right now: hangs, stalls, stragglers",
        description="Say what is wrong right now with the jobs of this node, or of all nodes whose agents are named. "
        "Exit code 0: healthy, 1: a verdict, 2: none, but some agents did not answer.",
    )
    diagnose.add_argument(
        "agents",
        nargs="*",
        metavar="ADDRESS",
        help="agents (host, host:port, URL), or a file of targets (file_sd, .json)",
    )
    diagnose.add_argument("--job", help="only this job")
    diagnose.add_argument(
        "--flight-recorder",
        nargs="+",
        type=Path,
        metavar="FILE",
        help="ask nobody: read these dumps of PyTorch's Flight Recorder, one of each rank, pickled or JSON",
    )
    diagnose.add_argument("--json", action="store_true", help="for programs")
    diagnose.set_defaults(command=_diagnose)

    _add_bench(commands, common)
    _add_profile(commands, common)
    alerts_cli.add_parser(commands, common)
    dashboards_cli.add_parser(commands)
    top_cli.add_parser(commands, common)
    settings_cli.add_parser(commands, common)
    deploy_cli.add_parser(commands, common)

    native = commands.add_parser(
        "native",
        help="the native hook: build it, see what there is, remove it",
        description="The hook in C++, which costs the training next to nothing. It is built once for a version of torch, "
        "in an image with `build`, else by the first `run`. Without it the hook is Python's.",
    )
    native.add_argument("verb", choices=("build", "status", "clean"))
    native.add_argument("--python", default=sys.executable, help="the trainer's Python, if not this one")
    native.add_argument("--force", action="store_true", help="build: also where it has been built")
    native.add_argument("--json", action="store_true", help="status: for programs")
    native.set_defaults(command=_native, dir=None, state=None, config=None, host=None, port=None)
    return parser


def _add_access(common: argparse.ArgumentParser) -> None:
    common.add_argument(
        "--token-file", metavar="FILE", help="the agent's token (default: agent.token in its run directory)"
    )
    common.add_argument(
        "--require-token", action="store_true", default=None, help="the agent asks for it of reading, too"
    )
    common.add_argument(
        "--insecure", action="store_true", default=None, help="the agent listens beyond this machine without TLS"
    )
    common.add_argument(
        "--ca-file", metavar="FILE", help="who signs the agents' certificates (default: whom the system trusts)"
    )
    common.add_argument("--client-cert", metavar="FILE", help="a certificate with its key, for agents that want one")


def _add_profile(commands: Any, common: argparse.ArgumentParser) -> None:
    profile = commands.add_parser(
        "profile",
        parents=[common],
        help="torch.profiler in a running job for a few steps, beside the continuous figures",
        description="Have the trainers of a job on this node run torch.profiler for a few steps, compute overlap from "
        "the traces, and show it beside what the probe recorded of the same steps. Exit code 1 if a rank has no result.",
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


def _add_bench(commands: Any, common: argparse.ArgumentParser) -> None:
    bench = commands.add_parser(
        "bench",
        parents=[common],
        help="measure what the links give: commwatch bench -- torchrun ...",
        description="Sweep collectives over sizes with your launch command, print what nccl-tests would, and keep it as a reference "
        "that jobs are held against.",
    )
    bench.add_argument("--backends", help="with commas between them: compared (default: the one torch would take)")
    bench.add_argument(
        "--ops",
        help="with commas between them (default: all_reduce, all_gather, reduce_scatter, broadcast, all_to_all)",
    )
    bench.add_argument("--min-bytes", default="1K", help="smallest size (default: 1K)")
    bench.add_argument("--max-bytes", default="64M", help="largest size (default: 64M)")
    bench.add_argument("--factor", type=float, default=4.0, help="from one size to the next (default: 4)")
    bench.add_argument("--seconds", type=float, default=20.0, help="how long it takes in all, about (default: 20)")
    bench.add_argument(
        "--import", type=Path, dest="file", metavar="FILE", help="take in what nccl-tests printed, or its -J file"
    )
    bench.add_argument("--list", action="store_true", help="say which references there are")
    bench.add_argument("--json", action="store_true", help="for programs")
    bench.add_argument("job", nargs=argparse.REMAINDER, metavar="-- COMMAND ...", help="what starts the ranks")
    bench.set_defaults(command=_bench)


def _run(config: Config, arguments: argparse.Namespace) -> int:
    from commwatch.run import CommandNotFound, run

    command = arguments.job[1:] if arguments.job[:1] == ["--"] else arguments.job
    if not command:
        raise UsageError("run: which job? commwatch run -- torchrun ...")
    try:
        return run(
            config, settings_file(arguments.config), command, os.environ, _again(arguments), arguments.nccl_debug
        )
    except CommandNotFound as error:
        raise UsageError(str(error)) from None


def _bench(config: Config, arguments: argparse.Namespace) -> int:
    from commwatch import bench, bench_tables, references

    command = arguments.job[1:] if arguments.job[:1] == ["--"] else arguments.job
    if bool(command) + (arguments.file is not None) + arguments.list != 1:
        raise UsageError("bench: one of: a launch command (commwatch bench -- torchrun ...), --import FILE, --list")
    if arguments.list:
        return _list_references(config, arguments.json)
    try:
        if arguments.file is not None:
            ops = bench.operations(arguments.ops)
            if len(ops) > 1:
                raise UsageError("bench: --import takes one of --ops, for output that does not name its operation")
            kept, left_out = bench.take_in(arguments.file, config.state, ops[0] if ops else None)
        else:
            sizes = (arguments.min_bytes, arguments.max_bytes, arguments.factor, arguments.seconds)
            swept = bench.run(
                command, bench.wanted(arguments.backends, arguments.ops, *sizes), config.state, os.environ
            )
            left_out = swept.left_out
            kept = [bench.keep(outcome, config.state, command) for outcome in swept.outcomes]
    except bench.CannotBench as error:
        print(f"commwatch: bench: {error}", file=sys.stderr)
        return error.code
    except references.BadReference as error:
        print(f"commwatch: bench: {error}", file=sys.stderr)
        return 1
    if arguments.json:
        print(json.dumps(bench.as_json(kept, left_out), indent=2))
        return 0 if kept else 1
    for _, reference in kept:
        print(bench_tables.table(reference))
    if len(kept) > 1 and arguments.file is None:
        print(bench_tables.compared([reference for _, reference in kept]))
    for line in left_out:
        print(f"# {line}")
    for path, _ in kept:
        print(f"# kept as {path}")
    return 0 if kept else 1


def _list_references(config: Config, as_json: bool) -> int:
    from commwatch import bench, bench_tables, references

    there = references.References(references.directory(config.state), config.links)
    if as_json:
        print(json.dumps(bench.as_json(list(there.measured.items()), list(there.damaged.values())), indent=2))
    else:
        print(bench_tables.listing(there))
    return 0


def _native(config: Config, arguments: argparse.Namespace) -> int:
    from commwatch.native import call

    flags = [f"--{name}" for name in ("force", "json") if getattr(arguments, name)]
    try:
        return call(arguments.python, [arguments.verb, *flags], os.environ)
    except OSError as error:
        raise UsageError(f"native: cannot run {arguments.python}: {error.strerror}") from None


def _explain(config: Config, arguments: argparse.Namespace) -> int:
    from commwatch.explain import CannotRead, explain

    gc.disable()  # nothing here makes cycles, and looking for them costs a tenth of the time
    try:
        return explain(arguments.logs, arguments.json)
    except CannotRead as error:
        raise UsageError(f"explain: {error}") from None


def _doctor(config: Config, arguments: argparse.Namespace) -> int:
    from commwatch import doctor

    checks = doctor.examine(config)
    print((doctor.as_json if arguments.json else doctor.text)(checks))
    return int(any(check.result == "fail" for check in checks))


def _diagnose(config: Config, arguments: argparse.Namespace) -> int:
    from commwatch import asking, diagnose
    from commwatch.trainers import evidence

    if arguments.flight_recorder:
        return _flight_recorder(arguments)
    try:
        urls = diagnose.addresses(arguments.agents) if arguments.agents else asking.local_agents(config.dir)
        seen = diagnose.ask(urls, arguments.job, asking.keys_of(config))
    except diagnose.CannotDiagnose as error:
        raise UsageError(f"diagnose: {error}") from None
    found = diagnose.conclude(seen)
    taken = evidence(found, seen.ranks, socket.gethostname())
    say = diagnose.as_json if arguments.json else diagnose.text
    print(say(found, seen, taken))
    return 1 if found else 2 if seen.silent else 0


def _flight_recorder(arguments: argparse.Namespace) -> int:
    from commwatch import flight

    if arguments.agents or arguments.job:
        raise UsageError("diagnose: --flight-recorder asks no agent: without ADDRESS and --job")
    dumps, damaged = flight.take_all(arguments.flight_recorder)
    if not dumps:
        raise UsageError(f"diagnose: {'; '.join(f'{file}: {why}' for file, why in damaged.items())}")
    found = flight.conclude(dumps)
    print((flight.as_json if arguments.json else flight.text)(found, dumps, damaged))
    return 1 if found else 2 if damaged else 0


def _profile(config: Config, arguments: argparse.Namespace) -> int:
    from commwatch import asking, profile

    if not 1 <= arguments.steps <= MOST_STEPS:
        raise UsageError(f"profile: --steps {arguments.steps}: 1 to {MOST_STEPS}")
    if not 0 < arguments.timeout <= MOST_SECONDS:
        raise UsageError(f"profile: --timeout {arguments.timeout:g}: more than 0, at most {MOST_SECONDS} seconds")
    parts = None if arguments.ranks is None else arguments.ranks.split(",")
    if parts is not None and not all(part.strip().isdecimal() for part in parts):
        raise UsageError(f"profile: --ranks {arguments.ranks}: numbers with commas between, such as 0,1")
    ranks = None if parts is None else [int(part) for part in parts]
    try:
        keys = asking.keys_of(config)
        where = profile.places(asking.local_agents(config.dir), arguments.job, ranks, keys)
        taken = profile.take(where, arguments.steps, arguments.timeout, keys)
    except profile.AskedWrongly as error:
        raise UsageError(f"profile: {error}") from None
    except profile.CannotProfile as error:
        print(f"commwatch: profile: {error}", file=sys.stderr)
        return 1
    print((profile.as_json if arguments.json else profile.text)(taken))
    return int(profile.failed(taken))


def _again(arguments: argparse.Namespace) -> str:
    """The command that opens the report of a run again."""
    flags = [
        (f"--{name}", getattr(arguments, name))
        for name in ("config", "dir", "state")
        if getattr(arguments, name) is not None
    ]
    return shlex.join(["commwatch", "report", *(str(part) for flag in flags for part in flag)])


def _agent(config: Config, arguments: argparse.Namespace) -> int:
    from commwatch.daemon import Daemon
    from commwatch.serving import CannotStart

    try:
        daemon = Daemon(config)
        if arguments.until_stdin_closes:
            threading.Thread(target=_stop_with_parent, args=(daemon,), name="parent", daemon=True).start()
        return 0 if daemon.run() else 1
    except CannotStart as error:
        print(f"commwatch: {error}", file=sys.stderr)
        return 1


def _stop_with_parent(daemon: Daemon) -> None:
    sys.stdin.read()
    daemon.stop()


def _report(config: Config, arguments: argparse.Namespace) -> int:
    from commwatch import pictures, report, report_html
    from commwatch.answers import Agent
    from commwatch.kept_logs import kept
    from commwatch.references import References, directory
    from commwatch.store import StoreError

    agent = Agent(config.history, references=References(directory(config.state), config.links))
    try:
        jobs = [job.job_id for job in agent.jobs()]
        if not jobs:
            raise UsageError(f"report: no job in {config.history} yet")
        job = arguments.job or jobs[0]
        said = kept(config.state, job)
        findings = [] if said is None else said.findings
        built = report.build(agent, job, config.history, f"{_again(arguments)} {job}", findings)
    except StoreError as error:
        raise UsageError(f"report: {error}") from None
    if built is None:
        raise UsageError(
            f"report: no job '{job}' in {config.history}; it knows {', '.join(jobs[:5])}{' ...' if len(jobs) > 5 else ''}"
        )
    if arguments.html is not None:
        try:
            page = report_html.html(built, pictures.gather(agent, job), said)
            arguments.html.write_text(page, encoding="utf-8")
        except StoreError as error:
            raise UsageError(f"report: {error}") from None
        except OSError as error:
            raise UsageError(f"report: cannot write {arguments.html}: {error.strerror}") from None
    else:
        print(report.as_json(built) if arguments.json else report.text(built))
    return 0
