"""Settings read again at SIGHUP: what is taken up, what waits for a restart, and what is wrong and changes nothing."""

from __future__ import annotations

import os
import pty
import re
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from http import HTTPStatus
from pathlib import Path
from typing import IO, Any

import pytest

from commwatch_agent.config import Config
from commwatch_agent.runtime.reload import change
from commwatch_agent.runtime.sd_notify import READY, RELOADING
from commwatch_alerts.model import KindSettings
from tests.agent.runtime.test_sd_notify import received, supervisor
from tests.agent.web.test_tls import authority, believing, settings_of
from tests.helpers import PATIENCE_S, SOON_LOOKED, RunningAgent, agent, clean_env, fetch, lost_rank, wait_for
from tests.live import HandMade
from tests.receivers import Server
from tests.terminal import IN_A_SESSION

NOW = Config(dir=Path("/run/here"), state=Path("/var/here"))
#: Alerts on lost ranks: none, or at once.
NONE, AT_ONCE = "[kinds.rank_lost]\nenabled = false\n", "[kinds.rank_lost]\nfor = '0s'\n"


# -- what becomes of settings -------------------------------------------------------------------


def test_change() -> None:
    """What may change while the agent runs is taken from the settings that were read, all else stays; both are named."""
    asked = replace(NOW, port=1, keep_days=3.0, labels={"a": "b"}, ca_file=Path("/ca"))
    found = change(NOW, asked)
    assert found.config == replace(NOW, keep_days=3.0, labels={"a": "b"}, ca_file=Path("/ca"))
    assert (found.taken, found.left) == (("ca_file", "keep_days", "labels"), ("port",))
    assert found.says == "applied ca_file, keep_days, labels; a restart is needed for port"
    assert change(NOW, NOW).says == "nothing has changed"
    assert change(found.config, asked).taken == ()


def test_change_of_alerts() -> None:
    """Other thresholds and kinds are taken."""
    assert change(NOW, replace(NOW, thresholds={"comm_share": 0.4})).taken == ("thresholds",)
    assert change(NOW, replace(NOW, kinds={"hang": KindSettings(enabled=False)})).taken == ("kinds",)


def test_change_of_a_certificate() -> None:
    """Another certificate in the same file is a change, which a change of the file is anyway."""
    assert change(NOW, NOW, certificate_differs=True).taken == ("tls_cert",)
    assert change(NOW, replace(NOW, tls_key=Path("/a")), certificate_differs=True).taken == ("tls_key",)


def test_change_of_tls() -> None:
    """Other certificates are taken up; TLS on, or off, needs a restart."""
    secure = replace(NOW, tls_cert=Path("/a"), tls_key=Path("/b"))
    assert change(secure, replace(secure, tls_cert=Path("/c"))).config.tls_cert == Path("/c")
    for before, after in ((NOW, secure), (secure, NOW)):
        found = change(before, after)
        assert (found.config, found.left) == (before, ("tls_cert", "tls_key"))


# -- a real agent -------------------------------------------------------------------------------


class Scene:
    """An agent with its settings file, and what it says."""

    def __init__(self, running: RunningAgent, file: Path, log: Path) -> None:
        self.running, self._file, self._log = running, file, log

    def asked(self, text: str) -> str:
        """Write the settings, and ask the agent to read them; what it says."""
        self._file.write_text(text)
        before = len(self._log.read_text())
        self.running.process.send_signal(signal.SIGHUP)

        def said() -> str | None:
            found = re.search(
                r"Z (?:INFO|WARNING|ERROR) (settings not changed|settings read again): (.*)\n",
                self._log.read_text()[before:],
            )
            return found and found[2]

        return str(wait_for(said, "the agent to say what came of it"))


#: For an agent that also calls a wait a stall after 10 s, not after a minute, where it has seen few.
SOON: dict[str, float | str] = {**SOON_LOOKED, "commwatch_agent.analysis.waits.patience.NEW_S": 10.0}


@contextmanager
def scene(directory: Path, text: str, *flags: str, fetch: Any = fetch, **env: str) -> Iterator[Scene]:
    """An agent with these settings."""
    file, log = directory / "commwatch.toml", directory / "log"
    file.write_text(text)
    flags = ("--config", str(file), *flags)
    with agent(directory / "run", *flags, env=clean_env(**env), said=log, fetch=fetch, constants=SOON) as running:
        yield Scene(running, file, log)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    """An agent whose settings each test changes back before it begins."""
    with scene(tmp_path_factory.mktemp("shared"), "") as here:
        yield here


def status(url: str, **headers: str) -> int:
    """Of an answer."""
    try:
        with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=PATIENCE_S) as response:
            return int(response.status)
    except urllib.error.HTTPError as error:
        with error:
            return error.code


def test_taken_up(tmp_path: Path) -> None:
    """Thresholds, kinds, receivers, labels, access and the token's file of a running agent change at SIGHUP, and it says what and what not."""
    given = tmp_path / "given"
    given.write_text("given-given-given-given")
    given.chmod(0o600)
    with Server() as hook, scene(tmp_path, NONE) as here, lost_rank(tmp_path / "run" / "rings"):
        running = here.running
        wait_for(lambda: any(name.startswith("commwatch_job_info") for name in running.samples()), "the job")
        assert running.get("/api/v1/alerts")["active"] == []
        said = here.asked(
            f"port = 1\nkeep_days = 2\nrequire_token = true\nallowed_hosts = ['agent.example']\ntoken_file = '{given}'\n"
            f"[[receivers]]\nkind = 'webhook'\nname = 'hook'\nurl = '{hook.url}'\n"
            f"[thresholds]\ncomm_share = 0.4\n{AT_ONCE}[labels]\ncluster = 'east'\n"
        )
        taken = "token_file, require_token, allowed_hosts, keep_days, receivers, thresholds, kinds, labels"
        # Of the port the flag says more than the file.
        assert said == f"applied {taken}"
        assert status(running.url + "/api/v1/alerts") == HTTPStatus.UNAUTHORIZED
        shown = {"Authorization": "Bearer given-given-given-given"}
        assert status(running.url + "/api/v1/alerts", Host="agent.example", **shown) == HTTPStatus.OK
        wait_for(lambda: hook.asked, "the alert")
        (alert,) = hook.asked[0].json["alerts"]
        assert (alert["labels"]["alertname"], alert["status"]) == ("RankLost", "firing")
        assert any('cluster="east"' in name for name in running.samples())
        assert here.asked(f"interval = 1\n{NONE}").endswith("receivers, thresholds, kinds, labels")
        assert status(running.url + "/api/v1/alerts") == HTTPStatus.OK


def test_needs_a_restart(tmp_path: Path) -> None:
    """Settings that a running agent cannot change are named each time; equal settings are no change."""
    with scene(tmp_path, "") as here:
        assert here.asked("") == "nothing has changed"
        for _ in range(2):
            assert here.asked("gpus = 'off'\nkeep_ended = 1\n") == "a restart is needed for keep_ended, gpus"


def test_other_kinds(tmp_path: Path) -> None:
    """Alerts of kinds that are disabled are over, and those of other kinds go on as they were."""
    rings = tmp_path / "run" / "rings"
    with scene(tmp_path, AT_ONCE) as here, HandMade(tmp_path / "run") as job, lost_rank(rings):

        def shown(part: str) -> dict[str, str]:
            return {one["name"]: one["id"] for one in here.running.get("/api/v1/alerts")[part]}

        job.run(30)
        job.hang(0)
        before = wait_for(lambda: shown("active"), "the alert")
        assert set(before) == {"RankLost"}
        soon = "[thresholds]\nstalled_seconds = 10\n"
        assert here.asked(AT_ONCE + soon) == "applied thresholds"
        both = wait_for(lambda: len(now := shown("active")) == 2 and now, "the other alert")
        assert before.items() <= both.items()
        assert here.asked(NONE + soon) == "applied kinds"
        wait_for(lambda: set(shown("active")) == {"CollectiveStalled"}, "the end of the first")
        assert shown("active").items() <= both.items()
        assert set(shown("past")) == {"RankLost"}


@pytest.mark.parametrize(
    ("bad", "named"),
    [
        ("keep_days = 'long'", "keep_days: needs a number"),
        ("keep_days = 3\nkeep_dayz = 3", "did you mean keep_days?"),
        ("keep_days = 3\n[thresholds]\ncomm_share = 11", "comm_share"),
        (
            "keep_days = 3\n[thresholds]\ncomm_share = 0.6",
            "comm_share (0.6) must not be above comm_share_critical (0.5, the default)",
        ),
        ("keep_days = 3\n[kinds.hang]\nfor = 5", "hang: for: needs a duration"),
        ("keep_days = 3\n[kinds.hangs]\nenabled = false", "unknown 'hangs'"),
        ("keep_days = 3\nrules = 'list.yaml'", "put rules of your own into Prometheus (rule_files)"),
        ("keep_days = 3\ntoken_file = '/none/token'", "token file /none/token: No such file"),
        ("keep_days = 3\nca_file = '/none/ca.pem'", "ca_file /none/ca.pem: No such file"),
        ("keep_days = 3\nclient_cert = '/none/client.pem'", "client_cert /none/client.pem: No such file"),
        ("keep_days = 3\n[[receivers]]\nkind = 'webhook'", "receiver 1"),
        ("keep_days = [", "not valid TOML"),
    ],
)
def test_wrong_settings(shared: Scene, bad: str, named: str) -> None:
    """Settings with something wrong in them change nothing at all, and one line says what is wrong and where."""
    shared.asked("")
    assert named in shared.asked(f"{bad}\n")
    assert shared.asked("keep_days = 3\n") == "applied keep_days"
    assert shared.running.get("/healthz") == "ok\n"


def test_certificates(tmp_path: Path) -> None:
    """Other certificates, and other clients' authorities, count from the next connection on; ones that do not fit change nothing."""
    ours, theirs = authority(tmp_path, "ours"), authority(tmp_path, "theirs")
    first, second = (ours.signed(name, "DNS:localhost", "IP:127.0.0.1") for name in ("first", "second"))
    client, stranger = ours.signed("client"), theirs.signed("stranger")
    clients = shutil.copy(ours.cert, tmp_path / "clients.pem")

    def ask(url: str) -> tuple[bytes, str]:
        with urllib.request.urlopen(url, timeout=PATIENCE_S, context=believing(ours, client)) as response:
            return response.read(), response.headers["Content-Type"]

    with scene(tmp_path, settings_of(first), fetch=ask) as here:
        port = int(here.running.url.rpartition(":")[2])

        def met(who: tuple[Path, Path]) -> str:
            return let_in(port, believing(ours, who))

        assert "first" in met(stranger)
        assert "KEY_VALUES_MISMATCH" in here.asked(settings_of((second[0], first[1])))
        assert "first" in met(stranger)
        wanted = settings_of(second, f"tls_client_ca = {str(clients)!r}")
        assert here.asked(wanted) == "applied tls_cert, tls_key, tls_client_ca"
        assert "second" in met(client)
        assert met(stranger) == ""
        # Other contents of the same files are taken up as well.
        for source, target in ((first[0], second[0]), (first[1], second[1]), (theirs.cert, clients)):
            shutil.copy(source, target)
        assert here.asked(wanted) in (
            "applied tls_cert",
            "nothing has changed",
        )  # the look every few seconds may have come first
        assert "first" in met(stranger)
        assert met(client) == ""
        assert here.asked("") == "a restart is needed for tls_cert, tls_key, tls_client_ca"


def let_in(port: int, context: ssl.SSLContext) -> str:
    """Who the certificate is of that an agent shows a client; empty for one that it does not let in."""
    try:
        with (
            socket.create_connection(("127.0.0.1", port), PATIENCE_S) as plain,
            context.wrap_socket(plain, server_hostname="localhost") as connection,
        ):
            connection.sendall(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
            answered = connection.recv(100).startswith(b"HTTP/1.1 200")
            return str(connection.getpeercert()) if answered else ""
    except (ssl.SSLError, ConnectionError):
        return ""


def test_supervisor_hears_of_it(tmp_path: Path) -> None:
    """The supervisor is notified that the agent reads its settings, with the time that systemd requires, and that it is ready again."""
    address = str(tmp_path / "notify")
    with supervisor(address) as listening, scene(tmp_path, "", NOTIFY_SOCKET=address) as here:
        heard: list[str] = []

        def is_ready() -> bool:
            heard.extend(received(listening))
            return READY in heard

        wait_for(is_ready, "the agent")
        heard.clear()
        here.asked("keep_days = 'long'")
        wait_for(is_ready, "the end of it")
        (begun,) = [each for each in heard if each.startswith(RELOADING)]
        assert re.fullmatch(r"RELOADING=1\nMONOTONIC_USEC=\d+", begun)
        assert heard.index(begun) < heard.index(READY)


# -- what else the signal means -----------------------------------------------------------------


def started(directory: Path, *flags: str, before: tuple[str, ...] = (sys.executable,), **streams: Any) -> Any:
    """An agent that has announced its address, and whose standard error is read line by line."""
    command = [*before, "-m", "commwatch", "agent", "--dir", str(directory / "run"), "--port", "0", *flags]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=clean_env(), **streams)
    assert process.stderr is not None
    wait_for(lambda: (directory / "run" / "agent.json").exists() or process.poll() is not None, "the agent")
    assert until(process.stderr, "watching"), "the agent ended at its start"
    return process


def until(stream: IO[str], named: str) -> str:
    """The next line with that in it; empty: there is none."""
    return next((line for line in stream if named in line), "")


def ended(process: Any) -> int:
    """How it ended, by itself."""
    try:
        return int(process.wait(PATIENCE_S))
    finally:
        process.kill()
        process.communicate()


def test_terminal_is_gone(tmp_path: Path) -> None:
    """An agent that was started from a terminal ends with it, in order; as long as the terminal is there, the signal means its settings."""
    master, slave = pty.openpty()
    process = started(tmp_path, before=(sys.executable, "-c", IN_A_SESSION), stdin=slave)
    os.close(slave)
    process.send_signal(signal.SIGHUP)
    assert "nothing has changed" in until(process.stderr, "settings")
    os.close(master)
    assert ended(process) == 0
    assert not (tmp_path / "run" / "agent.json").exists()


@pytest.mark.parametrize("flags", [(), ("--until-stdin-closes",)])
def test_during_the_start(tmp_path: Path, flags: tuple[str, ...]) -> None:
    """A request that comes while the agent starts is met after the start; the agent of `commwatch run` is ended by it, as later."""
    command = [sys.executable, "-m", "commwatch", "agent", "--dir", str(tmp_path / "run"), "--port", "0", *flags]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=clean_env())
    assert process.stderr is not None
    status = Path(f"/proc/{process.pid}/status")

    def is_taken_care_of() -> bool:
        masks = re.findall(r"^Sig(?:Blk|Cgt):\s*(\w+)$", status.read_text(), re.MULTILINE)
        return any(int(mask, 16) & 1 << signal.SIGHUP - 1 for mask in masks)

    try:
        wait_for(is_taken_care_of, "the first lines of the agent")
        assert not (tmp_path / "run").exists()
        process.send_signal(signal.SIGHUP)
        if not flags:
            assert "nothing has changed" in until(process.stderr, "settings read again")
            process.terminate()
    finally:
        code = ended(process)
    assert code == (-signal.SIGHUP if flags else 0)


def test_ignored(tmp_path: Path) -> None:
    """Under nohup the signal stays ignored."""
    process = started(tmp_path, before=("nohup", sys.executable), stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    ignored = int(
        re.findall(r"^SigIgn:\s*(\w+)$", Path(f"/proc/{process.pid}/status").read_text(), re.MULTILINE)[0], 16
    )
    assert ignored & 1 << signal.SIGHUP - 1
    process.terminate()
    assert ended(process) == 0


def test_agent_of_a_run(tmp_path: Path) -> None:
    """The agent of `commwatch run` reads nothing again: the signal ends it as it ends others."""
    process = started(tmp_path, "--until-stdin-closes", stdin=subprocess.PIPE)
    process.send_signal(signal.SIGHUP)
    assert ended(process) == -signal.SIGHUP
