"""Trainer and sidecar as Kubernetes runs them: each with its own process numbers and user, one folder in common, no commwatch in the
trainer's Python but the probe that was brought in, no torch in sight of the agent."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from commwatch_agent.deploy.probe_folder import install
from tests.bare import bare_python, opened
from tests.e2e.torchjob import JOBS
from tests.helpers import NOBODY, RunningAgent, clean_env, fetch, free_port, needs, wait_for

TRAINER, GROUP = NOBODY + 1, NOBODY + 2
#: A container: mounts and processes of its own, which end with the first of them.
CONTAINER = ("unshare", "--mount", "--pid", "--fork", "--mount-proc")


@pytest.fixture(scope="module")
def pod() -> Iterator[Path]:
    """What the kubelet makes, and the first init container: ``run`` and ``state`` of the group, ``probe``; and the trainer's image."""
    needs(os.geteuid() == 0 and shutil.which("unshare") and shutil.which("setpriv"), "root, unshare and setpriv")
    place = Path(tempfile.mkdtemp(prefix="commwatch-pod-"))
    place.chmod(0o755)
    try:
        for name, mode in (("run", 0o2777), ("state", 0o2777), ("says", 0o755), ("hold", 0o755)):
            (place / name).mkdir()
            os.chown(place / name, 0, GROUP)
            (place / name).chmod(mode)
        install(place / "probe")
        bare_python(place / "image")
        shutil.copy(JOBS / "paired.py", place)
        yield place
    finally:
        shutil.rmtree(place)


def container(pod: Path, uid: int, command: list[str], **env: str) -> subprocess.Popen[bytes]:
    """A command in a container of the pod, as a separate user in the common group."""
    become = f"setpriv --reuid {uid} --regid {uid} --groups {GROUP} --bounding-set=-all --no-new-privs"
    script = f"{opened(pod / 'hold')} && exec {become} {shlex.join(command)}"
    ours = {"COMMWATCH_DIR": str(pod / "run"), "COMMWATCH_GROUP": str(GROUP), "HOME": "/nonexistent"}
    return subprocess.Popen([*CONTAINER, "sh", "-c", script], cwd="/", env=clean_env(**ours, **env))


def end(process: subprocess.Popen[bytes], how: signal.Signals) -> None:
    """End a container by a signal to its first process; with it all others end."""
    if process.poll() is None:
        for first in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split():
            os.kill(int(first), how)
    process.wait(60)


@pytest.fixture(scope="module")
def agent(pod: Path) -> Iterator[RunningAgent]:
    """The sidecar."""
    command = [sys.executable, "-m", "commwatch", "agent", "--port", "0"]
    process = container(pod, NOBODY, command, COMMWATCH_STATE=str(pod / "state"))
    running = RunningAgent(process, pod / "run", fetch)
    try:

        def announced() -> bool:
            assert process.poll() is None, "the agent ended at its start"
            return (pod / "run" / "agent.json").exists()

        wait_for(announced, "the agent")
        about = json.loads((pod / "run" / "agent.json").read_text())
        assert about["pid"] == 1  # as it sees itself
        running.url = about["url"]
        yield running
    finally:
        end(process, signal.SIGTERM)  # as the kubelet does
        assert process.returncode == 0


@contextmanager
def training(pod: Path, job: str) -> Iterator[subprocess.Popen[bytes]]:
    """The trainer's container: torchrun with two ranks."""
    launch = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", str(free_port())]
    command = [str(pod / "image" / "bin" / "python"), *launch, str(pod / "paired.py"), str(pod / "says" / job)]
    # The native hook that is built here is root's.
    watched = {"COMMWATCH": "1", "COMMWATCH_JOB": job, "COMMWATCH_HOOK": "python"}
    process = container(pod, TRAINER, command, PYTHONPATH=str(pod / "probe"), **watched)
    try:
        yield process
    finally:
        end(process, signal.SIGKILL)


def states(agent: RunningAgent, job: str) -> dict[int, str]:
    """How each rank of a job is."""
    return {each["rank"]: each["state"] for each in agent.get("/api/v1/ranks") if each["job_id"] == job}


def tell(pod: Path, job: str, how: str) -> None:
    """Write how a job is to end; its ranks find the file whole, or not at all."""
    hidden = pod / "says" / f".{job}"
    hidden.write_text(how)
    hidden.rename(pod / "says" / job)


def test_job_is_seen_whole(pod: Path, agent: RunningAgent) -> None:
    """Both ranks run, with operations that the agent joins; when they leave properly, both have ended, and nothing was lost."""
    with training(pod, "whole") as trainer:
        wait_for(lambda: states(agent, "whole") == {0: "running", 1: "running"}, "two running ranks")
        rings = list((pod / "run" / "rings").glob("whole.*.ring"))
        assert {(ring.stat().st_uid, ring.stat().st_gid, ring.stat().st_mode & 0o777) for ring in rings} == {
            (TRAINER, GROUP, 0o440)
        }
        tell(pod, "whole", "leave")
        wait_for(lambda: states(agent, "whole") == {0: "ended", 1: "ended"}, "both to have ended")
        assert trainer.wait(90) == 0
    rows = agent.get("/api/v1/summary?job=whole&by=rank,op&op=all_reduce")["rows"]
    counts = {each["by"]["rank"]: each["count"] for each in rows}
    assert counts[0] == counts[1] > 1
    (job,) = [each for each in agent.get("/api/v1/jobs") if each["job_id"] == "whole"]
    assert (job["state"], job["lost"]) == ("ended", 0)


def test_killed_rank_is_gone(pod: Path, agent: RunningAgent) -> None:
    """A rank that SIGKILL ended is gone, though the agent has never seen its process, and its number means nothing to it."""
    with training(pod, "killed"):
        wait_for(lambda: states(agent, "killed") == {0: "running", 1: "running"}, "two running ranks")
        tell(pod, "killed", "die")
        wait_for(lambda: states(agent, "killed").get(1) == "gone", "rank 1 to be gone")
