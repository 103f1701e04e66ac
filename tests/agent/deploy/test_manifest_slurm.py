"""``commwatch manifest slurm``: what its scripts do where no Slurm is needed to see it; ``tests/e2e/test_slurm.py`` has one."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from commwatch_agent.deploy.slurm import FILES
from tests.helpers import clean_env, commwatch, free_port, needs, wait_for

#: A user that may be given a folder, and that is not us.
JOB = {"SLURM_JOB_ID": "7", "SLURM_JOB_UID": str(os.getuid()), "SLURM_JOB_GID": str(os.getgid()), "SLURM_JOB_USER": "u"}


def written(place: Path, *flags: str | Path, env: dict[str, str] | None = None) -> Path:
    """The scripts, for folders in ``place``."""
    folders = ("--run-dir", place / "run", "--state-dir", place / "state")
    done = commwatch("manifest", "slurm", "--dir", place / "made", "--force", *folders, *flags, env=env)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    return place / "made"


def play(script: Path, **env: str) -> subprocess.CompletedProcess[str]:
    """A script as slurmd runs it."""
    return subprocess.run(
        [script], env={"COMMWATCH_HOOK": "python", **env}, capture_output=True, text=True, timeout=60, check=False
    )


def task(script: Path, **env: str) -> dict[str, str]:
    """What the task prolog has Slurm set; what it takes away is empty."""
    done = play(script, **env)
    assert (done.returncode, done.stderr) == (0, "")
    lines = [line.split(" ", 1) for line in done.stdout.splitlines()]
    assert {verb for verb, _ in lines} <= {"export", "unset"}
    return {name: value for _, rest in lines for name, _, value in [rest.partition("=")]}


def test_shellcheck_takes_them(tmp_path: Path) -> None:
    """shellcheck has nothing to say to the scripts, whatever folders are called, and something to one with a slip in it."""
    needs(shutil.which("shellcheck"), "shellcheck")
    place = tmp_path / 'it\'s $(a) `b` "c"'
    place.mkdir()
    (place / "c.toml").write_text("")
    made = written(place, "--probe", place / "probe", "--config", place / "c.toml")
    files = map(str, sorted(made.iterdir()))
    check = ["shellcheck", "--shell=sh", "--severity=warning", *files]
    done = subprocess.run(check, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")
    (made / FILES["epilog"]).write_text((made / FILES["epilog"]).read_text() + "rm -rf $dir/$nothing\n")
    assert subprocess.run(check, capture_output=True, check=False).returncode == 1


def test_written_and_printed(tmp_path: Path) -> None:
    """What is written can be run by Slurm; what is printed is the same, all of it or the parts that were asked for."""
    made = written(tmp_path)
    assert {path.name for path in made.iterdir()} == set(FILES.values())
    assert {path.stat().st_mode & 0o777 for path in made.iterdir()} == {0o755}
    folders = ("--run-dir", tmp_path / "run", "--state-dir", tmp_path / "state")
    whole = commwatch("manifest", "slurm", *folders).stdout
    for part, name in FILES.items():
        text = (made / name).read_text()
        assert commwatch("manifest", "slurm", part, *folders).stdout == text
        assert text in whole


def test_settings_go_along(tmp_path: Path) -> None:
    """The agent's command line has the flags that were given, and the settings file by its absolute path; it has no others."""
    start = Path(sys.executable).with_name("commwatch")
    (tmp_path / "my.toml").write_text("port = 9001\n")
    made = written(tmp_path, "--config", tmp_path / "my.toml", "--host", "0.0.0.0", "--port", "9002")
    for part in ("prolog", "job"):
        text = (made / FILES[part]).read_text()
        assert f"{start} agent --config {tmp_path}/my.toml --host 0.0.0.0 --port 9002 --require-token " in text
    made = written(tmp_path, "--host", "0.0.0.0", "--insecure")
    assert f"{start} agent --host 0.0.0.0 --insecure --require-token " in (made / FILES["prolog"]).read_text()
    assert f"{start} agent --require-token --quiet --dir" in (written(tmp_path) / FILES["prolog"]).read_text()


@pytest.mark.parametrize(
    "words",
    [
        ("prologue",),
        ("--run-dir", "run"),
        ("--state-dir", "/a\nb"),
        ("--probe", "here"),
        ("--probe", "/a:/b"),
        ("--host", "0.0.0.0"),
        ("--secret", "mine"),
        ("--secret", "/etc/secret"),
        ("--secret", "/etc/secret", "--host", "0.0.0.0", "--insecure", "--port", "0"),
    ],
)
def test_refused(words: tuple[str, ...]) -> None:
    """What cannot be meant is refused in one line that names it."""
    done = commwatch("manifest", "slurm", *words)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert words[0] in done.stderr


def test_cannot_write(tmp_path: Path) -> None:
    """A folder that cannot be made is named in one line."""
    (tmp_path / "file").write_text("")
    done = commwatch("manifest", "slurm", "--dir", tmp_path / "file" / "sub")
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    assert str(tmp_path / "file") in done.stderr


@pytest.mark.parametrize("part", ["prolog", "epilog"])
@pytest.mark.parametrize("number", ["", "../7", "7;id", "7 8"])
def test_no_job(tmp_path: Path, part: str, number: str) -> None:
    """What is no number of a job touches nothing: it becomes the name of a folder, and root's `rm` follows."""
    done = play(written(tmp_path) / FILES[part], **{**JOB, "SLURM_JOB_ID": number})
    assert (done.returncode, done.stderr.count("\n")) == (0, 1)
    assert [path.name for path in tmp_path.iterdir()] == ["made"]


def test_folder_of_others(tmp_path: Path) -> None:
    """Where others may put something in place of the job's folder, none is made, and one line names the place."""
    made = written(tmp_path)
    (tmp_path / "run").mkdir()
    (tmp_path / "run").chmod(0o777)
    done = play(made / FILES["prolog"], **JOB)
    assert (done.returncode, done.stderr.count("\n")) == (0, 1)
    assert f"{tmp_path}/run must be" in done.stderr
    assert list((tmp_path / "run").iterdir()) == []


@pytest.mark.parametrize(
    ("secret", "names", "why"),
    [
        (None, "one\ntwo", "secret must be a file of root with mode 600"),
        ("short", "one\ntwo", "secret has fewer than 32 characters"),
        ("x" * 32, None, "no such node"),
        ("x" * 32, "one\ntwo", None),
    ],
    ids=["none", "short", "unknown-nodes", "right"],
)
def test_secret(tmp_path: Path, secret: str | None, names: str | None, why: str | None) -> None:
    """Where a job's agents can get no common token, they run without one, and one line has the reason; a right secret is not printed.

    With a token, others look for the agent at one port, so it is named.
    """
    needs(os.geteuid() == 0 and shutil.which("setpriv"), "root and setpriv")
    found = "echo no such node; exit 1" if names is None else f"printf '{names}\n'"
    (tmp_path / "scontrol").write_text(f"#!/bin/sh\n{found}\n")
    (tmp_path / "scontrol").chmod(0o755)
    file, settings = tmp_path / "secret", tmp_path / "my.toml"
    if secret is not None:
        file.write_text(secret)
        file.chmod(0o600)
    settings.write_text(f'host = "127.0.0.1"\nport = {free_port()}\n')
    flags = ("--secret", file, "--config", settings, "--host", "0.0.0.0")
    made = written(tmp_path, *flags, env=clean_env(PATH=f"{tmp_path}:{os.environ['PATH']}"))
    (made / FILES["prolog"]).write_text((made / FILES["prolog"]).read_text().replace("--host 0.0.0.0", ""))
    try:
        done = play(made / FILES["prolog"], **JOB, SLURM_JOB_NUM_NODES="2", SLURM_NODELIST="n[1-2]")
        assert (done.returncode, done.stderr.count("\n")) == (0, 0 if why is None else 1)
        assert (why or "") in done.stderr
        token = tmp_path / "run" / "7" / "agent.token"
        about = tmp_path / "run" / "7" / "agent.json"
        wait_for(about.exists, "the agent")
        derived = hashlib.sha256(f"{secret}:7:{os.getuid()}".encode()).hexdigest()
        assert (token.read_text().strip() == derived) == (why is None)
        pid = json.loads(about.read_text())["pid"]
        variables = Path(f"/proc/{pid}/environ").read_text()
        port = settings.read_text().split()[-1]
        words = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
        assert ("--port" in words and words[words.index("--port") + 1] == port) == (why is None)
        assert (f"COMMWATCH_PEERS=one:{port},two:{port}\0" in variables) == (why is None)
    finally:
        assert play(made / FILES["epilog"], **JOB).returncode == 0
    assert list((tmp_path / "run").iterdir()) == []


def test_agent_that_cannot_start(tmp_path: Path) -> None:
    """If the agent cannot start, the epilog prints the reason in one line, and the node is unchanged."""
    needs(os.geteuid() == 0 and shutil.which("setpriv"), "root and setpriv")
    (tmp_path / "my.toml").write_text("")
    made = written(tmp_path, "--config", tmp_path / "my.toml")
    (tmp_path / "my.toml").write_text("colour = 1\n")
    assert play(made / FILES["prolog"], **JOB).returncode == 0
    log = tmp_path / "run" / "7" / "agent.log"
    wait_for(lambda: log.exists() and log.read_text().endswith("\n"), "the agent to say what is wrong")
    done = play(made / FILES["epilog"], **JOB)
    assert (done.returncode, done.stderr.count("\n")) == (0, 1)
    assert "job 7: last line of the agent's log: commwatch: " in done.stderr
    assert "colour" in done.stderr
    assert list((tmp_path / "run").iterdir()) == []


def test_number_of_another_process(tmp_path: Path) -> None:
    """A process that has the agent's number by now is left alone."""
    needs(os.geteuid() == 0 and shutil.which("setpriv"), "root and setpriv")
    made = written(tmp_path)
    (tmp_path / "run" / "7").mkdir(parents=True)
    with subprocess.Popen(["sleep", "600"]) as other:
        (tmp_path / "run" / "7.pid").write_text(f"{other.pid}\n")
        done = play(made / FILES["epilog"], **JOB)
        left = other.poll()
        other.kill()
    assert (done.returncode, done.stderr, left) == (0, "", None)
    assert list((tmp_path / "run").iterdir()) == []


def test_over_in_time(tmp_path: Path) -> None:
    """Whatever an epilog waits for, it is stopped, reports this in one line, and exits with 0."""
    needs(os.geteuid() == 0 and shutil.which("setpriv"), "root and setpriv")
    made, lock = written(tmp_path), tmp_path / "run" / "7" / "agent.lock"
    lock.parent.mkdir(parents=True)
    os.mkfifo(lock)  # the job's user may do so: to open it takes for ever
    epilog = made / FILES["epilog"]
    epilog.write_text(epilog.read_text().replace("|| bounded 30", "|| bounded 1"))
    with subprocess.Popen(["sh", "-c", "trap '' TERM; while :; do sleep 0.1; done", str(lock.parent)]) as agent:
        (tmp_path / "run" / "7.pid").write_text(f"{agent.pid}\n")
        done = play(epilog, **JOB)
        agent.kill()
    assert (done.returncode, done.stderr) == (
        0,
        f"commwatch: job 7: {epilog} took longer than 1 s and was stopped\n",
    )


def test_task_prolog(tmp_path: Path) -> None:
    """A task has what switches the probe on where its job has an agent here, and nothing otherwise; what its user has set wins."""
    run, probe = tmp_path / "run", "/a b/probe"
    script = written(tmp_path, "--probe", probe) / FILES["task-prolog"]
    assert task(script, SLURM_JOB_ID="7") == {}
    assert task(script, SLURM_JOB_ID="7", COMMWATCH_DIR=f"{run}/7") == {"COMMWATCH": ""}
    (run / "7").mkdir(parents=True)
    ours = {
        "COMMWATCH_DIR": f"{run}/7",
        "COMMWATCH_STATE": f"{tmp_path}/state/{os.getuid()}",
        "COMMWATCH_JOB": "7",
        "COMMWATCH_RUN": "7.0",
    }
    told = {"COMMWATCH": "1", **ours, "PYTHONPATH": probe}
    assert task(script, SLURM_JOB_ID="7") == told
    assert task(script, SLURM_JOB_ID="7", PYTHONPATH="/mine") == {**told, "PYTHONPATH": f"{probe}:/mine"}
    again = {name: value for name, value in told.items() if name != "PYTHONPATH"}
    assert task(script, SLURM_JOB_ID="7", **told) == again  # a step of a batch script
    named = task(script, SLURM_JOB_ID="7", COMMWATCH="0", COMMWATCH_JOB="mine")
    assert (named["COMMWATCH"], named["COMMWATCH_JOB"]) == ("0", "mine")
    inherited = {"COMMWATCH_DIR": f"{run}/6", "COMMWATCH_JOB": "6", "COMMWATCH": "1"}
    assert task(script, SLURM_JOB_ID="7", **inherited) == told
    assert task(script, SLURM_JOB_ID="7", COMMWATCH_DIR="/elsewhere") == {}


def test_job_needs_an_allocation(tmp_path: Path) -> None:
    """The script for batch scripts says in one line what it needs, and starts nothing."""
    script = str(written(tmp_path) / FILES["job"])
    calls: list[tuple[list[str], dict[str, str]]]
    calls = [([script, "touch", str(tmp_path / "x")], {}), ([script], {"SLURM_JOB_ID": "7"})]
    for command, env in calls:
        done = subprocess.run(command, env=clean_env(**env), capture_output=True, text=True, check=False)
        assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize(("cache", "given"), [("cache", False), ("file", False), ("cache", True)])
def test_job_brings_the_probe(tmp_path: Path, cache: str, given: bool) -> None:
    """The command finds the probe first on its path: that of `--probe`, or one in the user's cache; if there is none, it runs without."""
    (tmp_path / "file").write_text("")
    flags = ("--probe", "/a b/probe") if given else ()
    script = str(written(tmp_path, *flags) / FILES["job"])
    own = tmp_path / cache / "commwatch" / "probe-slurm"
    env = clean_env(SLURM_JOB_ID="7", XDG_CACHE_HOME=str(tmp_path / cache), PATH="/usr/bin:/bin", PYTHONPATH="/mine")
    env["XDG_STATE_HOME"] = str(tmp_path)
    (tmp_path / "srun").write_text("#!/bin/sh\nexit 1\n")
    (tmp_path / "srun").chmod(0o755)
    env["PATH"] = f"{tmp_path}:{env['PATH']}"
    done = subprocess.run(
        [script, "sh", "-c", 'echo "$PYTHONPATH"'], env=env, capture_output=True, text=True, check=False
    )
    first = "/a b/probe:" if given else f"{own}:" if cache == "cache" else ""
    assert (done.returncode, done.stdout) == (0, f"{first}/mine\n"), done.stderr
    assert (own / "commwatch" / "__init__.py").is_file() == (cache == "cache" and not given)
    assert ("the job uses the probe of its own environment" in done.stderr) == (cache == "file")


def test_job_without_an_agent(tmp_path: Path) -> None:
    """Where no step can be started, the command runs all the same, hears signals, and its exit code is the script's."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "srun").write_text("#!/bin/sh\necho srun: no >&2\nexit 1\n")
    (tmp_path / "bin" / "srun").chmod(0o755)
    env = clean_env(SLURM_JOB_ID="7", HOME=str(tmp_path), PATH=f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    command = "trap 'exit 5' TERM; echo running; while :; do sleep 0.1; done"
    script = [str(written(tmp_path) / FILES["job"]), "sh", "-c", command]
    with subprocess.Popen(script, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as job:
        assert job.stdout is not None
        assert job.stdout.readline() == "running\n"
        job.terminate()
        _, said = job.communicate(timeout=60)
    assert job.returncode == 5
    assert "agents on 0 of 1 nodes: srun: no" in said


def test_edited_scripts(tmp_path: Path) -> None:
    """Scripts that the user has edited, or made with other flags, are replaced only on request."""
    assert commwatch("manifest", "slurm", "--dir", tmp_path, "--run-dir", "/run/other").returncode == 0
    assert commwatch("manifest", "slurm", "--dir", tmp_path, "--run-dir", "/run/other").returncode == 0
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    done = commwatch("manifest", "slurm", "--dir", tmp_path)
    assert (done.returncode, done.stderr.count("\n"), "--force" in done.stderr) == (2, 1, True)
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before
    assert commwatch("manifest", "slurm", "--dir", tmp_path, "--force").returncode == 0
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} != before
    assert all(os.access(path, os.X_OK) for path in before)
