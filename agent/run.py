"""``commwatch run -- COMMAND``: an agent, the job, a report at the end. The job comes first, whatever happens to us."""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from commwatch import report
from commwatch.collectors.identity import JOB_VARIABLES, job_id, make_private_dir
from commwatch.config import Config
from commwatch.daemon import answering, wait_until
from commwatch.store import StoreError
from commwatch.views import Agent

#: The agent is ready well within this, also on a busy machine; the job does not wait longer.
_START_S = 30.0
_DRAIN_S = 15.0
_FORWARDED = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT)


class CommandNotFound(Exception):
    """The job's command does not exist; the message names it."""


def run(config: Config, command: list[str], env: Mapping[str, str], report_command: str) -> int:
    """Run ``command`` as a watched job.

    Returns:
        The job's exit code; 128 + n if signal n ended it.

    Raises:
        CommandNotFound: before anything was started.
    """
    if shutil.which(command[0], path=env.get("PATH")) is None:
        raise CommandNotFound(f"run: no such command: {command[0]}")
    job = (
        job_id(env) if any(env.get(v, "").lower() not in ("", "none") for v in JOB_VARIABLES) else _new_job_id(command)
    )
    with _agent(config) as directory:
        job_env = {**env, "COMMWATCH_JOB": job}
        if directory is not None:
            job_env.update({"COMMWATCH": "1", "COMMWATCH_DIR": str(directory)})
        code = _run_job(command, job_env, job, config)
    if directory is not None:
        _report(config, job, f"{report_command} {job}")
    return code


def _new_job_id(command: list[str]) -> str:
    """A name that says what ran and when, and that no other run has."""
    script = next((Path(part).stem for part in command if part.endswith(".py")), Path(command[0]).name)
    return f"{script}-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"


@contextmanager
def _agent(config: Config) -> Iterator[Path | None]:
    """An agent for the job: the one that watches the run directory already, else one of our own in a corner of it.

    Yields the run directory for the job, or ``None`` if there is no agent to be had.
    """
    if answering(config.dir) is not None:
        yield config.dir
        wait_until(lambda: not any((config.rings).glob(f"*.{os.getpid()}-*.ring")), 0)
        return
    private = config.dir / f"run-{os.getpid()}-{secrets.token_hex(2)}"
    agent = None
    try:
        make_private_dir(config.dir, os.environ)
        flags = ["--dir", str(private), "--state", str(config.state), "--host", config.host]
        flags += ["--port", str(config.port)] if config.port is not None else []
        # A session of its own: Ctrl-C is for the job, the agent is still needed for the report.
        agent = subprocess.Popen(
            [sys.executable, "-m", "commwatch", "agent", "--quiet", *flags],
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        ready = wait_until(
            lambda: answering(private) is not None or (agent is not None and agent.poll() is not None), _START_S
        )
        if not ready or agent.poll() is not None:
            print("commwatch: the job runs without an agent", file=sys.stderr)
            yield None
            return
        print(f"commwatch: watching at {answering(private)}", file=sys.stderr)
        yield private
    except OSError as error:
        print(
            f"commwatch: the job runs without an agent: {error.strerror or error} ({error.filename or config.dir})",
            file=sys.stderr,
        )
        yield None
    finally:
        if agent is not None:
            agent.terminate()
            try:
                agent.wait(_DRAIN_S)
            except subprocess.TimeoutExpired:
                agent.kill()
        shutil.rmtree(private, ignore_errors=True)


def _run_job(command: list[str], env: Mapping[str, str], job: str, config: Config) -> int:
    child = subprocess.Popen(command, env=dict(env))

    def forward(number: int, _: object) -> None:
        # A terminal sends Ctrl-C to the job itself, too.
        if number != signal.SIGINT or not _in_foreground():
            child.send_signal(number)

    before = {number: signal.signal(number, forward) for number in _FORWARDED}
    progress = _Progress(config, job) if sys.stderr.isatty() else None
    try:
        while True:
            try:
                child.wait(1.0 if progress else None)
                break
            except subprocess.TimeoutExpired:
                if progress is not None:
                    progress.show()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        if progress is not None:
            progress.clear()
    return child.returncode if child.returncode >= 0 else 128 - child.returncode


def _in_foreground() -> bool:
    try:
        return os.tcgetpgrp(0) == os.getpgrp()
    except OSError:
        return False


class _Progress:
    """One line on the terminal, drawn over itself."""

    def __init__(self, config: Config, job: str) -> None:
        self._path, self._job = config.history, job

    def show(self) -> None:
        """Draw it with what the history says now."""
        try:
            steps = Agent(self._path).steps(time.time_ns() - 10_000_000_000, time.time_ns(), self._job, None, 200)
        except StoreError:
            return
        if steps:
            duration = sum(step.duration_s for step in steps)
            comm = sum(step.comm_s for step in steps) / duration
            text = f"step {max(step.seq for step in steps)}, {report.seconds(duration / len(steps))} each, communication {report.percent(comm)}"
            print(f"\r\x1b[Kcommwatch: {text}", end="", file=sys.stderr, flush=True)

    def clear(self) -> None:
        """Take it away."""
        print("\r\x1b[K", end="", file=sys.stderr, flush=True)


def _report(config: Config, job: str, command: str) -> None:
    agent = Agent(config.history)
    try:
        wait_until(lambda: all(view.state != "running" for view in agent.jobs() if view.job_id == job), _DRAIN_S)
        built = report.build(agent, job, config.history, command)
    except StoreError as error:
        print(f"commwatch: no report: {error}", file=sys.stderr)
        return
    if built is None:
        print(
            "commwatch: the job made no collective that the probe saw (is commwatch installed in the job's Python?)",
            file=sys.stderr,
        )
    else:
        print(report.text(built), file=sys.stderr)
