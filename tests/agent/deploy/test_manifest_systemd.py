"""``commwatch manifest systemd``: a unit that systemd takes, and whose command line runs as it stands there."""

from __future__ import annotations

import os
import shlex
import shutil
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from commwatch_agent.deploy.systemd import unit
from tests.helpers import clean_env, commwatch, free_port, needs, wait_for

NAME = f"commwatch-test-{os.getpid()}"


def written(*flags: str | Path) -> str:
    """The unit that the command prints."""
    done = commwatch("manifest", "systemd", *flags)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def values(text: str, key: str) -> list[str]:
    """What a unit says under a key."""
    return [line.partition("=")[2] for line in text.splitlines() if line.startswith(f"{key}=")]


def test_systemd_takes_it(tmp_path: Path) -> None:
    """`systemd-analyze verify` has nothing to say to it, and something to one with a slip in it."""
    needs(shutil.which("systemd-analyze"), "systemd-analyze")
    file = tmp_path / "commwatch.service"
    file.write_text(written())
    done = subprocess.run(["systemd-analyze", "verify", file], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")
    file.write_text(file.read_text().replace("WatchdogSec=", "WatchdogSeconds="))
    done = subprocess.run(["systemd-analyze", "verify", file], capture_output=True, text=True, check=False)
    assert "WatchdogSeconds" in done.stderr


@pytest.fixture
def folders() -> Iterator[None]:
    """The folders that systemd would make."""
    needs(os.geteuid() == 0, "root, to make the folders that systemd would")
    made = [Path("/run") / NAME, Path("/var/lib") / NAME]
    for folder in made:
        folder.mkdir()
    yield
    for folder in made:
        shutil.rmtree(folder)


def test_runs_as_written(folders: None, tmp_path: Path) -> None:
    """Command line and environment of the unit, with systemd's socket, make an agent that says it is ready, lives, reloads, and ends."""
    port = free_port()
    text = written("--name", NAME, "--group", "root", "--port", str(port))
    (command,) = values(text, "ExecStart")
    environment = dict(word.split("=", 1) for line in values(text, "Environment") for word in shlex.split(line))
    assert values(text, "Type") == ["notify"]
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as supervisor:
        supervisor.bind(str(tmp_path / "notify"))
        supervisor.settimeout(90)
        env = clean_env(**environment, NOTIFY_SOCKET=str(tmp_path / "notify"))
        process = subprocess.Popen(shlex.split(command), cwd="/", env=env)
        try:
            seen = {supervisor.recv(100) for _ in range(3)}
            while b"READY=1" not in seen:
                seen.add(supervisor.recv(100))
            assert b"WATCHDOG=1" in seen
            url = f"http://127.0.0.1:{port}/healthz"
            with urllib.request.urlopen(url, timeout=30) as answer:
                assert answer.status == 200
            assert list((Path("/var/lib") / NAME).glob("history-*.sqlite"))
            assert (Path("/run") / NAME / "rings").stat().st_mode & 0o7777 == 0o2770
            (reload,) = values(text, "ExecReload")
            subprocess.run(shlex.split(reload.replace("$MAINPID", str(process.pid))), check=True)
            wait_for(lambda: supervisor.recv(100).startswith(b"RELOADING=1\n"), "it to read its settings")
            wait_for(lambda: supervisor.recv(100) == b"READY=1", "it to have read them")
            process.terminate()
            wait_for(lambda: supervisor.recv(100) == b"STOPPING=1", "the farewell")
        finally:
            process.terminate()
            assert process.wait(60) == 0


def test_settings_go_along(tmp_path: Path) -> None:
    """The command line has the flags that were given, and the settings file by its absolute path; the file decides the rest.

    The port is an exception: if neither names one, the unit does, or the agent would take a free port where no client looks for it.
    """
    file = tmp_path / "my settings.toml"
    file.write_text("port = 9001\n")
    (command,) = values(written("--config", file, "--host", "0.0.0.0"), "ExecStart")
    start = str(Path(sys.executable).with_name("commwatch"))
    assert command == f'{start} agent --config "{file}" --host 0.0.0.0'
    assert values(written(), "ExecStart") == [f"{start} agent --port 9477"]
    assert values(written("--port", "0"), "ExecStart") == [f"{start} agent --port 0"]
    file.write_text("keep_days = 3\n")
    assert values(written("--config", file), "ExecStart") == [f'{start} agent --config "{file}" --port 9477']


def test_words_of_a_command() -> None:
    """Spaces, quotes, and what systemd would replace, stay what they are."""
    text = unit(["/a b/c", "%h", "$HOME", 'say "x"'], name="n", user="u", group="g", memory="1G", cpu="10%")
    assert values(text, "ExecStart") == ['"/a b/c" %%h $$HOME "say \\"x\\""']


def test_bounds() -> None:
    """Names and bounds are those that were asked for."""
    text = written("--name", "watch", "--user", "u", "--group", "g", "--memory", "1G", "--cpu", "150%")
    asked = {
        "User": "u",
        "Group": "g",
        "RuntimeDirectory": "watch",
        "StateDirectory": "watch",
        "MemoryMax": "1G",
        "CPUQuota": "150%",
    }
    assert {key: values(text, key) for key in asked} == {key: [value] for key, value in asked.items()}
    assert "COMMWATCH_DIR=/run/watch" in values(text, "Environment")[0]


def test_files_for_requests() -> None:
    """The agent has the token and the certificates that were named, by absolute paths."""
    (start,) = values(
        written("--token-file", "/etc/cw/token", "--ca-file", "ca.pem", "--client-cert", "/c.pem"), "ExecStart"
    )
    assert f"--token-file /etc/cw/token --ca-file {Path.cwd()}/ca.pem --client-cert /c.pem" in start


@pytest.mark.parametrize(
    "flags",
    [
        ("--name", "a/b"), ("--user", "a b"), ("--group", ""), ("--memory", "lots"), ("--memory", "10"), ("--memory", "0M"), ("--cpu", "0%"),
        ("--cpu", "2"), ("--dir", "/x"), ("--state", "/x"),
        ("--host", "0.0.0.0"),
    ],
)  # fmt: skip
def test_refused(flags: tuple[str, str]) -> None:
    """What systemd would misunderstand, and what the unit cannot follow, is refused in one line that names the flag."""
    done = commwatch("manifest", "systemd", *flags)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert flags[0] in done.stderr
