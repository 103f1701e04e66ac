"""The image, built by buildah from the Dockerfile, and run by podman beside a trainer: not root, root file system read-only, no capabilities."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from commwatch_agent.deploy.kubernetes import Site
from tests.e2e.torchjob import JOBS
from tests.helpers import RunningAgent, clean_env, fetch, free_port, wait_for

pytestmark = pytest.mark.image_proof

TREE = Path(__file__).parents[2]
USER, GROUP = Site("", "", 0).uid, Site("", "", 0).gid
DEBIAN = ("trixie", "http://deb.debian.org/debian")
BASE, IMAGE = "localhost/base", "localhost/commwatch"
#: What a restricted pod of Kubernetes has: no capability, no writable place but its volumes.
RESTRICTED = ("--read-only", "--read-only-tmpfs=false", "--cap-drop", "all", "--security-opt", "no-new-privileges")
#: podman's own limits are above what it may set in a virtual machine.
LIMITS = ("--ulimit", "nofile=4096:4096", "--ulimit", "nproc=1024:1024")


class Engine:
    """buildah and podman with images and containers in a folder of their own."""

    def __init__(self, directory: Path) -> None:
        self._place = ("--root", str(directory / "store"), "--runroot", str(directory / "run"))

    def buildah(self, *words: str | Path) -> str:
        """Standard output of buildah."""
        return self._run("buildah", *self._place, *words)

    def podman(self, *words: str | Path) -> str:
        """Standard output of podman; runc also works where version 1 of cgroups is in use."""
        return self._run("podman", *self._place, "--cgroup-manager", "cgroupfs", "--runtime", "runc", *words)

    @staticmethod
    def _run(*words: str | Path) -> str:
        done = subprocess.run(list(map(str, words)), capture_output=True, text=True, timeout=280, check=False)
        assert done.returncode == 0, f"{words}: {done.stdout[-2000:]}\n{done.stderr[-4000:]}"
        return done.stdout

    def size(self, name: str) -> int:
        """Bytes of an image."""
        return int(json.loads(self.podman("image", "inspect", name))[0]["Size"])


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    """What has built the image, on a base of Debian's packages."""
    directory = tmp_path_factory.mktemp("engine")
    base, engine = directory / "base.tar", Engine(directory)
    packages = "--include=python3,python3-venv,ca-certificates"
    subprocess.run(["mmdebstrap", "--quiet", "--variant=minbase", packages, DEBIAN[0], base, DEBIAN[1]], check=True)
    engine.podman("import", base, BASE)
    # Networks may have certificates of their own between pip and its index.
    host = ("--network", "host", "--volume", "/etc/ssl/certs:/etc/ssl/certs:ro")
    engine.buildah(
        "build",
        "--isolation",
        "chroot",
        "--format",
        "docker",
        *host,
        "--build-arg",
        f"BASE={BASE}",
        "--tag",
        IMAGE,
        TREE,
    )
    return engine


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The volumes of a pod: ``run`` and ``state`` of its group, and a folder for the trainer."""
    place = tmp_path_factory.mktemp("pod")
    for name in ("run", "state"):
        (place / name).mkdir()
        os.chown(place / name, 0, GROUP)
        (place / name).chmod(0o2777)
    return place


@pytest.fixture(scope="module")
def agent(engine: Engine, folders: Path) -> Iterator[RunningAgent]:
    """The agent in a container with the image's own user and command."""
    port = free_port()
    settings = {"COMMWATCH_PORT": port, "COMMWATCH_GROUP": GROUP}
    flags = [word for name, value in settings.items() for word in ("--env", f"{name}={value}")]
    volumes = ["-v", f"{folders / 'run'}:/run/commwatch", "-v", f"{folders / 'state'}:/var/lib/commwatch"]
    restricted = ["--network", "host", *RESTRICTED, *LIMITS, "--group-add", str(GROUP)]
    engine.podman("run", "--detach", "--name", "agent", *restricted, *volumes, *flags, IMAGE)
    running = RunningAgent(None, folders / "run", fetch)  # type: ignore[arg-type]  # podman has the process
    running.url = f"http://127.0.0.1:{port}"
    try:
        wait_for((folders / "run" / "agent.json").exists, "the agent")
        yield running
    finally:
        print(engine.podman("logs", "agent"))
        engine.podman("stop", "--time", "20", "agent")
        ended = json.loads(engine.podman("container", "inspect", "agent"))[0]["State"]["ExitCode"]
        engine.podman("rm", "agent")
        assert ended == 0


def test_contents(engine: Engine) -> None:
    """The image has no torch, compiler or pip, and is at most 130 MB larger than its base."""
    root = Path(engine.podman("image", "mount", IMAGE).strip())
    try:
        commands = {path.name for path in root.glob("**/*bin/*")}
        packages = {path.name for path in root.glob("**/*-packages/*")}
    finally:
        engine.podman("image", "unmount", IMAGE)
    assert "commwatch" in commands & packages
    assert not {each.split(".")[0].split("-")[0] for each in packages} & {"torch", "pip", "setuptools"}
    assert not commands & {"gcc", "g++", "cc", "c++", "clang", "ld", "as", "make", "pip", "pip3"}
    own, whole = engine.size(IMAGE) - engine.size(BASE), engine.size(IMAGE)
    print(f"image: {whole / 1e6:.0f} MB, {own / 1e6:.0f} MB of them on top of the base")
    assert own < 130e6


def test_is_restricted(engine: Engine, agent: RunningAgent) -> None:
    """The agent runs as the user of the manifests without capabilities, writes to no place but its volumes, and is healthy by the image's own check."""
    status = dict(line.split(":", 1) for line in engine.podman("exec", "agent", "cat", "/proc/1/status").splitlines())
    assert status["Uid"].split() == [str(USER)] * 4
    assert int(status["CapEff"], 16) == int(status["CapBnd"], 16) == 0
    for path in ("/x", "/tmp/x", "/opt/venv/x"):
        with pytest.raises(AssertionError, match="Read-only file system"):
            engine.podman("exec", "--user", "0", "agent", "touch", path)
    engine.podman("healthcheck", "run", "agent")


def test_watches_a_trainer(engine: Engine, agent: RunningAgent, folders: Path) -> None:
    """Two ranks of Gloo on the host, with the run directory in common: their operations are in /metrics and in a report made in the container."""
    launch = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", str(free_port())]
    env = clean_env(
        COMMWATCH="1", COMMWATCH_DIR=str(folders / "run"), COMMWATCH_GROUP=str(GROUP), COMMWATCH_JOB="built"
    )
    ending = folders / "ending"
    trainer = subprocess.Popen([sys.executable, *launch, str(JOBS / "paired.py"), str(ending)], env=env)
    try:
        counted = 'commwatch_collectives_total{group="default_pg",job_id="built",op="all_reduce",rank="1"}'
        wait_for(lambda: agent.samples().get(counted, 0) > 1, "operations of rank 1 in /metrics")
        ending.write_text("leave")
        assert trainer.wait(90) == 0
    finally:
        trainer.terminate()  # torchrun then ends its ranks
        trainer.wait(60)
    wait_for(
        lambda: [job["state"] for job in agent.get("/api/v1/jobs") if job["job_id"] == "built"] == ["ended"], "the end"
    )
    rows = agent.get("/api/v1/summary?job=built&by=rank,op&op=all_reduce")["rows"]
    (first, second) = (row["count"] for row in rows)
    assert first == second > 1
    report = engine.podman("exec", "agent", "commwatch", "report", "built")
    assert "all_reduce" in report
    assert "2 ranks" in report
