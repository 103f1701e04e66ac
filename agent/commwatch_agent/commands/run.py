"""``commwatch run -- COMMAND``: start an agent, run the job, print a report. The job runs even if the agent fails."""

from __future__ import annotations

import contextlib
import glob
import os
import secrets
import shlex
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from commwatch.wire import crossing
from commwatch.wire.announcement import Announcement, answering, operators
from commwatch.wire.concurrency import wait_until
from commwatch.wire.crossing import Trust
from commwatch.wire.errors import UsageError
from commwatch.wire.identity import JOB_VARIABLES, RUN_VARIABLE, job_id, make_private_dir, probe_mark, ring_prefix
from commwatch.wire.ring_reader import BadRing, RingReader
from commwatch_agent.analysis.advice_input import LAST_S
from commwatch_agent.analysis.queries import QueryService
from commwatch_agent.commands import explain, log_files, native_hook, nccl_debug
from commwatch_agent.commands.output_filter import Passing
from commwatch_agent.commands.progress import Progress, is_terminal, say
from commwatch_agent.commands.script_names import script_name
from commwatch_agent.config import Config
from commwatch_agent.deploy import probe_folder
from commwatch_agent.history import job_exit
from commwatch_agent.history.opening import StoreError
from commwatch_agent.model.endings import STOPS
from commwatch_agent.reference.references import References, directory
from commwatch_agent.report import report_text
from commwatch_agent.sources.log_requests import LogRequest
from commwatch_agent.sources.nccl import logs_of
from commwatch_agent.text.terminal_text import output_cells
from commwatch_agent.text.units import moment
from commwatch_collectors.nccl.account import Account
from commwatch_collectors.nccl.checks.findings import findings

#: What starts our own agent. The tests replace it by what starts one faster.
AGENT: tuple[str, ...] = (sys.executable, "-m", "commwatch_agent", "agent")
#: Most seconds that the job waits for the agent, which is ready much earlier unless the machine is busy: then it reads later what the job has recorded.
_START_S = 10.0
#: Seconds after which the address of an agent is of no use any more.
_LATEST_S = 600.0
_DRAIN_S = 15.0
#: Most bytes of NCCL logs that are read again for the end of the report, and most findings shown there.
_MOST_LOG_BYTES = 32 << 20
_MOST_FINDINGS = 5
#: Seconds between two reads of NCCL's files, and between two drawings of the progress line.
_POLL_S, _PROGRESS_S = 0.2, 1.0
_FORWARDED = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT, signal.SIGQUIT)
_FROM_KEYBOARD = (signal.SIGINT, signal.SIGQUIT)


class Stopped(Exception):
    """A signal arrived before the job was started; the argument is its number."""


def run(
    config: Config,
    file: Path | None,
    command: list[str],
    env: Mapping[str, str],
    *,
    report_command: str,
    nccl_level: str,
) -> int:
    """Run ``command`` as a watched job.

    Args:
        file: the settings file, for an agent that is started here; ``None``: there is none.
        nccl_level: level of NCCL's debug output if the user has set none (``nccl_debug.LEVELS``).
        report_command: command that prints the report again, without the job's name.

    Returns:
        The job's exit code; 128 + n if signal n ended it.

    Raises:
        UsageError: the command does not exist or cannot be run.
    """
    if shutil.which(command[0], path=env.get("PATH")) is None:
        script = "; a script needs its interpreter: commwatch run -- python" if Path(command[0]).is_file() else ""
        raise UsageError(
            f"no such command: {command[0]}"
            + (
                f"{script} {command[0]}"
                if script
                else "; check its name, and whether the environment of your job is active"
            )
        )
    named = any(env.get(variable, "").lower() not in ("", "none") for variable in JOB_VARIABLES)
    job = _Job(job_id(env) if named else _new_job_id(command), secrets.token_hex(8), time.time())
    agent, nccl = None, nccl_debug.Plan()
    with Signals() as signals:
        try:
            agent = _find_agent(config) or _start_agent(config, file)
            probe = {} if agent is None else _probe(agent, command, env)  # while our own agent starts
            if agent is not None and not _is_there(agent):
                agent, probe = None, {}
            history = None if agent is None else agent.history
            if agent is not None:
                _await_probe(agent, job.name)
                nccl = _follow_nccl(agent, job, env, nccl_level, config.state)
                signals.stopped = partial(_leave_exit, agent, job, None)
            env_of_job = {**env, "COMMWATCH_JOB": job.name, RUN_VARIABLE: job.run, **nccl.env, **probe}
            code = _run_job(command, env_of_job, nccl, job, history=history, signals=signals)
            loaded = agent is None or _has_come(agent.mark)
            if agent is not None:
                agent.ending = True
                _leave_exit(agent, job, code, signals.stop)
                _take_all(agent, job)
        except Stopped as stopped:
            return 128 + int(stopped.args[0])
        finally:
            if agent is not None:
                agent.end()
            nccl.remove_if_empty()
    if history is not None:
        try:
            names = _report(config, history, job, report_command, loaded)
            _explain(nccl, job.began)
            if nccl.remark and _used_nccl(history, names):
                say(f"commwatch: {nccl.remark}")
        except Exception as error:  # a fault in the report must not change the job's exit code
            say(f"commwatch: no report: {type(error).__name__}: {error}")
    return code


class _Job(NamedTuple):
    """The job, a random name for this run of it, which its processes inherit, and its begin in Unix time."""

    name: str
    run: str
    began: float


def _take_all(agent: _JobAgent, job: _Job) -> None:
    """Wait until the history has all of the job. If our own agent has ended, start it once more for that."""
    wait_until(partial(agent.has_all_of, job), _DRAIN_S)
    if not agent.ended:
        return
    say(f"commwatch: the agent {agent.ended}; it is started again to read the remaining records")
    with contextlib.suppress(OSError):
        agent.start()
        wait_until(agent.is_ready, _START_S)
    wait_until(partial(agent.has_all_of, job), _DRAIN_S)
    if agent.ended:
        say(f"commwatch: the agent {agent.ended}; the report covers what it had read by then")


def _await_probe(agent: _JobAgent, job: str) -> None:
    """Create ``agent.mark``, the empty file that the probe writes to when it is loaded; ``None`` if that fails."""
    path = probe_mark(agent.directory, job)
    try:
        mode = make_private_dir(path.parent, os.environ)
        os.close(crossing.create(path, mode))
    except OSError:
        return
    agent.mark = path


def _has_come(mark: Path | None) -> bool:
    """Return whether the probe was loaded in a process of the job, True if that is not known."""
    try:
        return mark is None or mark.stat().st_size > 0
    except OSError:
        return True


def _leave_exit(agent: _JobAgent, job: _Job, code: int | None, stop: job_exit.Stop | None) -> None:
    """Leave the job's exit code, or a signal that asks it to end, in the run directory, from where the agent reads it."""
    try:
        agent.exit = job_exit.leave(agent.directory, job.name, code, job.run, stop)
    except OSError as error:
        say(f"commwatch: cannot store the exit code: {error.strerror or error} ({error.filename})")


def _follow_nccl(agent: _JobAgent, job: _Job, env: Mapping[str, str], level: str, state: Path) -> nccl_debug.Plan:
    """Plan where NCCL writes its debug output, and request that the agent read it.

    Args:
        state: this user's state directory.
    """
    # Beside the history of an agent of this user; another user's agent does not decide where this user's job writes.
    state = agent.history.parent if agent.uid == os.geteuid() else state
    directory = logs_of(state) / f"{ring_prefix(job.name).removesuffix('.r')}-{os.getpid()}"
    planned = nccl_debug.plan(env, level, directory)
    try:
        if planned.directory is not None:
            planned.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        if planned.patterns:
            request = LogRequest(job.name, planned.patterns, time.time(), os.getpid(), job.run)
            agent.request = request.write(agent.directory)
    except OSError as error:
        return nccl_debug.Plan(remark=f"no NCCL logs: {error.strerror or error} ({error.filename})")
    return planned


def _probe(agent: _JobAgent, command: list[str], env: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables that switch the probe on in the job, with this version of it first on its path."""
    path = _probe_path(agent, env)
    hook = native_hook.prepare(command, {**env, **path})
    return {"COMMWATCH": "1", "COMMWATCH_DIR": str(agent.directory), **path, **hook}


def _probe_path(agent: _JobAgent, env: Mapping[str, str]) -> dict[str, str]:
    """Return the variable that makes Python find this version of the probe: in the user's cache, else in a folder for this job."""
    try:
        return probe_folder.in_front(probe_folder.of_user(env), env)
    except probe_folder.CannotInstall as error:
        why = error
    try:
        agent.temporary = Path(tempfile.mkdtemp(prefix="commwatch-probe-"))
        return probe_folder.in_front(probe_folder.in_folder(agent.temporary), env)
    except OSError:
        say(f"commwatch: the job uses the probe of its own environment, if it has one: {why}")
        return {}


def _new_job_id(command: list[str]) -> str:
    """Return a unique job id made of the script's name and the local time."""
    return f"{script_name(command)}-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"


@dataclass
class _JobAgent:
    """The agent that watches the job. If it is our own, ``command`` starts it, and ``process`` is set."""

    directory: Path
    history: Path
    #: The agent's user.
    uid: int
    command: list[str] = field(default_factory=list)
    process: subprocess.Popen[bytes] | None = None
    #: How and when our own agent ended, as text; empty while it runs. And whether the job has ended, which it outlives only to read the rest.
    ended: str = ""
    ending: bool = False
    #: File that the probe writes to when it is loaded, file that requests that the agent follow the job's NCCL logs, and file with
    #: the job's exit code.
    mark: Path | None = None
    request: Path | None = None
    exit: Path | None = None
    #: Folder of the probe, if the user has no cache for it; it is removed at the end.
    temporary: Path | None = None

    def start(self) -> None:
        """Start our own agent, without waiting until it is ready; raises ``OSError``."""
        # New session: Ctrl-C is for the job, the report still needs the agent. The pipe to its standard input closes
        # however this process ends. From / because the job's folder may hold modules named like ours.
        self.process = subprocess.Popen(self.command, stdin=subprocess.PIPE, start_new_session=True, cwd="/")
        self.ended = ""
        threading.Thread(target=self._note_end, args=(self.process,), daemon=True).start()

    def announced(self) -> Announcement | None:
        """Return the announcement of the agent; ``None``: it is not ready."""
        return answering(self.directory, Trust(frozenset({self.uid})))

    def is_ready(self) -> bool:
        """Return whether it is ready, or has ended."""
        return bool(self.ended) or self.announced() is not None

    def _note_end(self, process: subprocess.Popen[bytes]) -> None:
        code = process.wait()
        name = next((each.name for each in signal.Signals if each == -code), f"signal {-code}")
        how = f"was ended by {name}" if code < 0 else f"ended with exit code {code}"
        self.ended = f"{how} at {moment(time.time())}"

    def has_all_of(self, job: _Job) -> bool:
        """Return whether the job's rings and its exit code are in the history, or the agent that would store them has ended."""
        taken = self.exit is None or not self.exit.exists()
        return bool(self.ended) or (taken and not _has_rings(self.directory, job))

    def end(self) -> None:
        """Have our own agent drain the rings and end; remove ``mark`` and ``request`` from the run directory of another agent."""
        if self.temporary is not None:
            shutil.rmtree(self.temporary, ignore_errors=True)
        if self.process is None:
            for path in filter(None, (self.mark, self.request)):
                with contextlib.suppress(OSError):  # the job's exit code matters more
                    path.unlink(missing_ok=True)
            return
        self.process.terminate()
        try:
            self.process.wait(_DRAIN_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        shutil.rmtree(self.directory, ignore_errors=True)


def _find_agent(config: Config) -> _JobAgent | None:
    """Return the agent that already watches the run directory; ``None`` if there is none."""
    found = answering(config.dir, operators(config.dir))
    return None if found is None else _JobAgent(config.dir, Path(found.history), found.uid)


def _has_rings(directory: Path, job: _Job) -> bool:
    """Return whether there are rings of a run in a run directory."""
    try:
        with crossing.folder(directory / "rings") as rings:
            names = rings.names(f"{glob.escape(ring_prefix(job.name))}*.ring")[1]
    except OSError:
        return False
    return any(_is_of(directory / "rings" / name, job) for name in names)


def _is_of(ring: Path, job: _Job) -> bool:
    """Return whether a ring is of this run, or cannot be read; others of that name may be in the directory."""
    try:
        with contextlib.closing(RingReader(ring)) as reader:
            return bool(reader.identity.get("run", job.run) == job.run)
    except FileNotFoundError:  # the agent has just removed it
        return False
    except (OSError, BadRing):
        return True


def _start_agent(config: Config, file: Path | None) -> _JobAgent | None:
    """Start our own agent, in a folder of its own so that concurrent runs do not collide; ``None`` if that fails."""
    directory = config.dir / f"run-{os.getpid()}-{secrets.token_hex(2)}"
    command = [*AGENT, "--quiet", "--until-stdin-closes", *_flags(directory, config, file)]
    agent = _JobAgent(directory, config.history, os.geteuid(), command)
    try:
        make_private_dir(config.dir, os.environ)
        agent.start()
    except OSError as error:
        why = f"{error.strerror or error} ({error.filename or config.dir})"
        say(f"commwatch: the job runs without an agent: {why}")
        return None
    except Stopped:
        agent.end()
        raise
    return agent


def _is_there(agent: _JobAgent) -> bool:
    """Wait until our own agent is ready, at most ``_START_S`` seconds, and print its address; return False if it has ended."""
    if agent.process is None:
        return True
    wait_until(agent.is_ready, _START_S)
    found = agent.announced()
    if agent.ended:
        say(f"commwatch: the job runs without an agent, because the agent {agent.ended}")
        agent.end()
        return False
    if found is None:
        say(
            f"commwatch: the agent is not ready after {_START_S:.0f} s: the job begins, and the agent reads its records later"
        )
        threading.Thread(target=_say_when_ready, args=(agent,), daemon=True).start()
    else:
        say(_watching(found))
    return True


def _watching(found: Announcement) -> str:
    return f"commwatch: watching at {found.url}"


def _say_when_ready(agent: _JobAgent) -> None:
    """Wait for an agent beside the running job, and print its address, or how it ended."""
    wait_until(lambda: agent.ending or agent.is_ready(), _LATEST_S)
    found = agent.announced()
    if agent.ending:
        return
    if found is not None:
        say(_watching(found))
    elif agent.ended:
        say(f"commwatch: the job goes on without an agent, because the agent {agent.ended}")


def _flags(directory: Path, config: Config, file: Path | None) -> list[str]:
    """Return the flags of our own agent: those that were given to this command."""
    flags = ["--dir", str(directory), "--state", str(config.state), "--host", config.host]
    flags += ["--insecure"] if config.insecure else []
    flags += ["--require-token"] if config.require_token else []
    files = {"--token-file": config.token_file, "--ca-file": config.ca_file, "--client-cert": config.client_cert}
    flags += [str(word) for flag, path in files.items() if path is not None for word in (flag, path)]
    flags += [] if config.port is None else ["--port", str(config.port)]
    flags += [] if file is None else ["--config", str(file.absolute())]
    return flags


def _run_job(
    command: list[str],
    env: Mapping[str, str],
    nccl: nccl_debug.Plan,
    job: _Job,
    *,
    history: Path | None,
    signals: Signals,
) -> int:
    passing = None if nccl.directory is None else Passing(nccl.directory, sys.stdout.fileno(), nccl.shown)
    try:
        child = signals.start(command, env)
    except OSError as error:
        raise UsageError(f"cannot run {command[0]}: {error.strerror}") from None
    progress = Progress(history, job.run) if history is not None and is_terminal() else None
    shown_at = time.monotonic()
    while True:
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(_POLL_S if passing or progress else None)
        if passing is not None:
            passing.tick(final=child.returncode is not None)
        if child.returncode is not None:
            break
        if progress is not None and time.monotonic() - shown_at > _PROGRESS_S:
            progress.show()
            shown_at = time.monotonic()
    if progress is not None:
        progress.clear()
    return child.returncode if child.returncode >= 0 else 128 - child.returncode


class Signals:
    """Forwards signals to the job; before it starts, they raise Stopped. Signals that the caller ignores stay ignored."""

    def __init__(self) -> None:
        self.child: subprocess.Popen[bytes] | None = None
        self._stopped = False
        #: Those that came while the job was being started.
        self._held: list[int] | None = None
        self._before: dict[signal.Signals, Any] = {}
        #: The first signal that asked the running job to end, and what is called with it.
        self.stop: job_exit.Stop | None = None
        self.stopped: Callable[[job_exit.Stop], object] = lambda stop: None

    def __enter__(self) -> Signals:
        for number in _FORWARDED:
            if signal.getsignal(number) is not signal.SIG_IGN:
                self._before[number] = signal.signal(number, self._forward)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def start(self, command: list[str], env: Mapping[str, str], **how: Any) -> subprocess.Popen[bytes]:
        """Start the job and return it; signals that come meanwhile are sent to it, because it may run already. Raises ``OSError``.

        Args:
            how: further arguments of ``Popen``.
        """
        self._held = []
        try:
            # The job inherits the caller's descriptors (such as ``<(...)`` of a shell); ours are close-on-exec.
            self.child = subprocess.Popen(command, env=dict(env), close_fds=False, **how)
        finally:
            held, self._held = self._held, None
            for number in held:
                self._forward(number, None)
        return self.child

    def _forward(self, number: int, _: object) -> None:
        if number in STOPS and self.stop is None and (self._held is not None or self.child is not None):
            self.stop = job_exit.Stop(number, time.time())
            self.stopped(self.stop)
        if self._held is not None:
            self._held.append(number)
        elif self.child is None:
            if not self._stopped:  # only once: a second signal must not interrupt the cleanup
                self._stopped = True
                raise Stopped(number)
        # In the foreground, the terminal sends Ctrl-C and Ctrl-\ to the job as well.
        elif number not in _FROM_KEYBOARD or not _in_foreground():
            self.child.send_signal(number)


def _in_foreground() -> bool:
    """Return whether this process is in the terminal's foreground group, even if standard input is a file."""
    try:
        terminal = os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        return os.tcgetpgrp(terminal) == os.getpgrp()
    except OSError:
        return False
    finally:
        os.close(terminal)


def _explain(nccl: nccl_debug.Plan, since: float) -> None:
    """Print the most important warnings and errors in the job's NCCL logs."""
    sizes = {
        path: about.st_size for path, about in explain.matching(nccl.patterns).items() if about.st_mtime >= since - 1
    }
    if sum(sizes.values()) > _MOST_LOG_BYTES:
        say(f"commwatch: the NCCL logs are long; read them with commwatch explain {shlex.join(nccl.patterns)}")
        return
    account = Account()
    try:
        log_files.read(sizes, account, frozenset(sizes))
    except log_files.UnreadableLog as error:
        say(f"commwatch: {error}")
    serious = [finding for finding in findings(account) if finding.severity != "info"]
    for finding in serious[:_MOST_FINDINGS]:
        say(f"commwatch: NCCL {finding.severity}: {finding.title}: {finding.says}")
    if serious:
        say(f"commwatch: more: commwatch explain {shlex.join(nccl.patterns)}")


def _used_nccl(history: Path, names: list[str]) -> bool:
    """Return whether a group of these jobs had NCCL, or may have had it; False if there are none."""
    agent = QueryService(history)
    backends = [group.backend for name in names for group in agent.groups(name)]
    return any(backend is None or "nccl" in backend for backend in backends)


def _report(config: Config, history: Path, job: _Job, report_command: str, probe_loaded: bool) -> list[str]:
    """Print the report of each run of the job that was watched, or why there is none; return their names."""
    from commwatch_agent.questions import reports

    elsewhere = history != config.history
    opens = shlex.join(["commwatch", "report", "--state", str(history.parent)]) if elsewhere else report_command
    agent = QueryService(history, references=References(directory(history.parent), config.links))
    try:
        names = agent.watched(job.run)
        by_name = None if names else agent.job(job.name)
        if by_name is not None and by_name.last_seen_at >= job.began:  # a launcher has passed on the name only
            names = [job.name]
        for name in names:
            own, command = reports.of_history(agent, name), f"{opens} {shlex.quote(name)}"
            say(
                report_text.text(
                    reports.report(agent, name, own=own, last_s=LAST_S, command=command), output_cells(sys.stderr)
                )
            )
    except (StoreError, sqlite3.Error) as error:
        say(f"commwatch: no report: {error}")
        return []
    if names:
        return names
    if probe_loaded:
        say("commwatch: the probe was loaded in the job but saw no collective of torch.distributed")
    else:
        say(
            "commwatch: the probe was not loaded in any process of the job: none came to the end of its `import torch`, or they do not find the probe on "
            "PYTHONPATH (python -I or -E, a launcher that clears the environment, a container or node without that folder)"
        )
    return []
