"""A real Slurm with our scripts: prolog, epilog and task prolog, which never take a node out of service, and the way without them."""

from __future__ import annotations

import json
import os
import pwd
import re
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest

from commwatch.wire.ring_reader import RingReader
from commwatch_agent.deploy.probe_folder import install
from tests.bare import bare_python
from tests.e2e.torchjob import JOBS
from tests.helpers import PATIENCE_S, RunningAgent, clean_env, commwatch, fetch, free_port, wait_for
from tests.sites import paging, titles
from tests.slurm import ADDRESSES, NODES, Slurm, slurm

USER = "nobody"
UID = pwd.getpwnam(USER).pw_uid
FIRST, SECOND = NODES
HOSTILE = "$(touch gone) `touch gone`; touch 'gone\" \n&"


@pytest.fixture(scope="module")
def site() -> Iterator[Slurm]:
    """A Slurm with what ``manifest slurm`` writes; ``run`` and ``state`` are the agents' folders, ``image`` the trainers' Python."""
    place = Path(tempfile.mkdtemp(prefix="commwatch-slurm-"))
    place.chmod(0o755)
    try:
        install(place / "probe")
        bare_python(place / "image")
        shutil.copy(JOBS / "slurm.py", place)
        folders = ("--run-dir", place / "run", "--state-dir", place / "state", "--probe", place / "probe")
        (place / "secret").write_text(secrets.token_hex(16))
        (place / "secret").chmod(0o600)
        settings = listening(place, "agents.toml")
        done = commwatch(
            "manifest", "slurm", "--dir", place / "made", *folders, "--secret", place / "secret", "--config", settings
        )
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
        made = {
            name: place / "made" / f"commwatch-{file}.sh"
            for name, file in (("Prolog", "prolog"), ("Epilog", "epilog"), ("TaskProlog", "task-prolog"))
        }
        with slurm(place, **made) as running:
            yield running
    finally:
        shutil.rmtree(place)


def listening(place: Path, name: str) -> Path:
    """Settings of agents that listen on one port, on each node on its own address: the nodes have one network."""
    settings, port = place / "state" / name, free_port()
    for state, host in ((place, "0.0.0.0"), *((place / node, address) for node, address in ADDRESSES.items())):
        (state / "state").mkdir(parents=True, exist_ok=True)
        (state / "state" / name).write_text(f'host = "{host}"\nport = {port}\ninsecure = true\n')
    return settings


def training(site: Slurm, ending: Path, *flags: str) -> list[str | Path]:
    """What starts two ranks."""
    return [
        "srun",
        "-n2",
        *flags,
        site.place / "image" / "bin" / "python",
        site.place / "slurm.py",
        ending,
        str(free_port()),
    ]


def watched(site: Slurm) -> Path:
    """The folder of the one job that has an agent."""
    return Path(wait_for(lambda: next((site.place / FIRST / "run").glob("*/agent.json"), None), "an agent")).parent


def runs(pid: int) -> bool:
    """Whether there is such a process, and not only what is left of it for its parent to collect."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes() != b""
    except OSError:
        return False


def reported(site: Slurm, node: str, state: Path, job: str) -> dict[str, Any]:
    """The report of a job, read on a node."""
    command = site.at(node, sys.executable, "-m", "commwatch", "report", "--state", state, "--json", job)
    done = subprocess.run(command, env=clean_env(), capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout))


def _asked(token: Path, url: str) -> tuple[bytes, str]:
    """An answer to who shows the token."""
    request = Request(url, headers={"Authorization": f"Bearer {token.read_text().strip()}"})
    with urlopen(request, timeout=PATIENCE_S) as response:
        return response.read(), response.headers["Content-Type"]


def test_job_is_watched(site: Slurm) -> None:
    """A job has an agent of its user's under Slurm's number, sees its ranks, and leaves its report behind and nothing else."""
    ending = site.place / "home" / "first"
    job = site.user(USER, *training(site, ending), SLURM_JOB_NAME=HOSTILE)
    folder = watched(site)
    about = json.loads((folder / "agent.json").read_text())
    assert Path(f"/proc/{about['pid']}").stat().st_uid == UID
    assert (folder.stat().st_uid, folder.stat().st_mode & 0o777) == (UID, 0o700)
    with pytest.raises(HTTPError, match="401"):  # other users have accounts here
        fetch(f"{about['url']}/api/v1/ranks")
    agent = RunningAgent(None, folder, partial(_asked, folder / "agent.token"))  # type: ignore[arg-type]  # somebody else's child
    agent.url = about["url"]

    def states() -> dict[tuple[str, int], str]:
        return {(each["job_id"], each["rank"]): each["state"] for each in agent.get("/api/v1/ranks")}

    number = folder.name
    wait_for(lambda: states() == {(number, 0): "running", (number, 1): "running"}, "two running ranks")
    (info,) = [name for name in agent.samples() if name.startswith("commwatch_job_info")]
    assert 'user="nobody"' in info
    assert 'cluster="test"' in info
    ending.touch()
    said, _ = job.communicate(timeout=PATIENCE_S)
    assert (job.returncode, said) == (0, f"job done {site.place}/run/{number}\n" * 2)
    wait_for(site.idle, "the epilog")
    assert [list((site.place / node / "run").iterdir()) for node in NODES] == [[], []]
    wait_for(lambda: not runs(about["pid"]), "the end of the agent")
    report = reported(site, FIRST, site.place / FIRST / "state" / str(UID), number)
    assert (report["job"]["job_id"], report["job"]["ranks"]) == (number, [0, 1])
    assert not (site.place / "home" / "gone").exists()


def whole(site: Slurm, node: str, job: str) -> dict[int, str] | None:
    """The states of the ranks that the job's user sees on one of its nodes; ``None``: not yet those of both nodes."""
    query = [sys.executable, "-m", "commwatch", "query", "--json", f"ranks?job={job}&scope=job"]
    step = ["srun", "--overlap", f"--jobid={job}", "-N1", "-n1", f"--nodelist={node}", *query]
    asking = site.user(USER, *step)
    said, _ = asking.communicate(timeout=PATIENCE_S)
    if asking.returncode:  # the agent does not know the job yet, or is busy
        return None
    (answer,) = json.loads(said)["answers"].values()
    return {each["rank"]: each["state"] for each in answer["data"]} if answer["nodes"]["answered"] == 2 else None


@pytest.mark.long
def test_whole_job(site: Slurm) -> None:
    """The agents of a job on two nodes have one token, which no other job has, and each answers its user for both nodes."""
    ending, tokens = site.place / "home" / "both", []
    for _ in range(2):
        job = site.user(USER, *training(site, ending, "-N2"))
        folder = watched(site)
        number = folder.name
        token = folder / "agent.token"
        assert (token.stat().st_uid, token.stat().st_mode & 0o777) == (UID, 0o600)
        wait_for((there := site.place / SECOND / "run" / number / "agent.json").exists, "the agent of the other node")
        assert token.read_text() == there.with_name("agent.token").read_text()
        tokens.append(token.read_text())
        for node in NODES:
            seen = wait_for(partial(whole, site, node, number), "the agents of both nodes")
            assert seen == {0: "running", 1: "running"}
        ending.touch()
        said, _ = job.communicate(timeout=PATIENCE_S)
        assert job.returncode == 0, said
        ending.unlink()
        wait_for(site.idle, "the epilog")
    assert len({*tokens, (site.place / "secret").read_text()}) == 3


@pytest.mark.long
def test_lost_rank_reaches_a_phone(site: Slurm, tmp_path: Path) -> None:
    """Prometheus, with the printed files, finds the agent of a job in a target file, and the death of a rank arrives in a chat."""
    ending = site.place / "home" / "lost"
    job = site.user(USER, *training(site, ending), "apart")
    folder = watched(site)
    address = json.loads((folder / "agent.json").read_text())["url"].removeprefix("http://")
    targets = tmp_path / "agents.json"
    targets.write_text(json.dumps([{"targets": [address]}]))
    with paging(tmp_path, targets) as (prometheus, chat):
        wait_for(lambda: prometheus.value("sum(up)") == 1, "the target")
        wait_for(lambda: prometheus.value("sum(commwatch_rank_up)") == 2, "both ranks")
        readers = [RingReader(path) for path in (folder / "rings").glob("*.ring")]
        (pid,) = (reader.owner() for reader in readers if reader.identity["rank"] == 1)
        assert pid
        os.kill(pid, signal.SIGKILL)
        lost = wait_for(lambda: next(iter(titles(chat)), ""), "a message", 3 * PATIENCE_S)
    assert lost == f"[WARNING] Rank 1 of job {folder.name} failed: read the end of that rank's log"
    site.ask("scancel", folder.name)
    job.communicate(timeout=PATIENCE_S)
    for reader in readers:
        reader.close()
    wait_for(site.idle, "the epilog")


@pytest.mark.long
def test_failure_does_not_take_the_node(site: Slurm) -> None:
    """Where the prolog may make no folder, the job runs unwatched and the node stays in service; a prolog that fails does take it."""
    run, ending = site.place / FIRST / "run", site.place / "home" / "second"
    ending.touch()
    run.chmod(0o777)  # anybody might put something there, so nothing is made in it
    try:
        job = site.user(USER, *training(site, ending))
        said, _ = job.communicate(timeout=PATIENCE_S)
        assert (job.returncode, said) == (0, "job done None\n" * 2)
        wait_for(site.idle, "the node")
    finally:
        run.chmod(0o755)
    prolog = site.place / "made" / "commwatch-prolog.sh"
    ours = prolog.read_text()
    prolog.write_text("#!/bin/sh\nexit 1\n")
    try:
        site.user(USER, "srun", "true").communicate(timeout=PATIENCE_S)
        wait_for(lambda: site.states()[FIRST].startswith("drain"), "Slurm to take the node out of service")
    finally:
        prolog.write_text(ours)
        site.ask("scancel", "--partition=all")
        site.ask("scontrol", "update", f"NodeName={FIRST}", "State=RESUME")
    wait_for(site.idle, "the node to be back")


@pytest.mark.long
def test_without_an_administrator(site: Slurm) -> None:
    """A batch script watches its own job in steps beside it, with a probe of its own; it ends as the training did, after a report."""
    home, ending = site.place / "home", site.place / "home" / "third"
    ending.touch()
    words = " ".join(map(str, training(site, ending)))
    peers = (
        f"until {sys.executable} -m commwatch query --json peers > peers && grep -q state.*answers peers; do :; done"
    )
    script = home / "batch.sh"
    own = home / "commwatch-job.sh"
    own.write_text(commwatch("manifest", "slurm", "job", "--config", listening(site.place, "job.toml")).stdout)
    after = "code=$?\nsrun -N2 sh -c 'echo left: $(ls /dev/shm)'\nexit $code\n"
    script.write_text(f"#!/bin/sh\nunset COMMWATCH_STATE\nsh {own} sh -c '{words}; {peers}; exit 3'\n{after}")
    asked: list[str | Path] = [
        "sbatch",
        "--parsable",
        "-N2",
        "-n2",
        "--mem-per-cpu=900",
        f"--job-name={HOSTILE}",
        "--output=said",
        script,
    ]
    number = site.user(USER, *asked).communicate(timeout=PATIENCE_S)[0].strip()
    wait_for(lambda: "JobState=FAILED" in site.job(number), "the end of the script")
    said = (home / "said").read_text()
    assert "ExitCode=3:0" in site.job(number), said
    (known,) = json.loads((home / "peers").read_text())["answers"].values()
    assert {each["state"] for each in known} == {"this agent", "answers"}
    where = f"/dev/shm/commwatch-{UID}-{number}"
    assert said.count(f"job done {where}\n") == 2, said
    assert re.search(rf"job +{number} \(ended\)", said), said
    for rank, node in enumerate(NODES):
        report = reported(site, node, home / ".local" / "state" / "commwatch", number)
        assert (report["job"]["job_id"], report["job"]["ranks"], report["hosts"]) == (number, [rank], [node])
    assert said.count("left: hold\n") == 2, said
    assert "the first of 2 nodes" in said
    assert "CANCELLED" not in said, said  # agents end by themselves, and are not killed with what they hold
    assert not (home / "gone").exists()
    wait_for(site.idle, "the epilog")
    assert [list((site.place / node / "run").iterdir()) for node in NODES] == [[], []]
