"""``commwatch config``: where each setting is from, what is wrong, and that no secret is shown."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import threading
from dataclasses import fields
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from commwatch_agent.config import Config
from commwatch_agent.config_checks import ConfigError
from commwatch_agent.config_sources import load
from commwatch_agent.prometheus.exporter import Exporter
from commwatch_agent.runtime.run_lock import check_folders
from tests.agent.web.test_tls import authority
from tests.helpers import (
    NOBODY,
    Watch,
    agent,
    clean_env,
    commwatch,
    commwatch_as_nobody,
    in_the_open,
    needs,
    write_ring,
)

#: Of the drivers of GPUs.
NVIDIA, AMD = Path("/proc/driver/nvidia"), Path("/dev/kfd")
EVERYTHING = """
interval = 1
dir = "/run/file"
host = "10.0.0.1"

[thresholds]
comm_share = 0.4
efficiency = 0.5

[kinds.straggler]
enabled = false

[kinds.hang]
severity = "warning"
for = "1m30s"

[labels]
cluster = "east"

[[receivers]]
kind = "webhook"
name = "hook"
url = "https://hooks.example.com/services/T000/S3CRET?key=S3CRET"

[[receivers]]
kind = "slack"
name = "slack"
url_file = "/etc/slack"

[[receivers]]
kind = "command"
name = "run"
command = ["/bin/notify", "--token", "S3CRET"]
"""


def shown(*flags: str | Path, env: dict[str, str] | None = None) -> dict[str, tuple[Any, str]]:
    """Value and origin of each setting."""
    done = commwatch("config", "show", "--json", *flags, env=env or clean_env())
    assert (done.returncode, done.stderr) == (0, "")
    return {key: (each["value"], each["origin"]) for key, each in json.loads(done.stdout).items()}


def test_where_from(tmp_path: Path) -> None:
    """Every setting, and every entry of a table, is shown with the flag, variable or file that it is from, or as default."""
    file = tmp_path / "some.toml"
    file.write_text(EVERYTHING)
    env = clean_env(
        COMMWATCH_HOST="10.0.0.2",
        COMMWATCH_THRESHOLD_EFFICIENCY="0.6",
        COMMWATCH_LABEL_USER="ann",
        MAIL_PASSWORD="S3CRET",
    )
    found = shown("--config", file, "--port", "9001", env=env)
    assert {key.partition(".")[0] for key in found} == {field.name for field in fields(Config)}
    assert {key: found[key] for key in ("port", "host", "interval", "keep_days", "ras", "dir", "state")} == {
        "port": (9001, "--port"),
        "host": ("10.0.0.2", "COMMWATCH_HOST"),
        "interval": (1, str(file)),
        "keep_days": (7.0, "default"),
        "ras": (None, "default"),
        "dir": ("/run/file", str(file)),
        "state": ("/run/file", str(file)),
    }
    assert found["thresholds.comm_share"] == (0.4, str(file))
    assert found["thresholds.efficiency"] == (0.6, "COMMWATCH_THRESHOLD_EFFICIENCY")
    assert (found["labels.cluster"], found["labels.user"]) == (("east", str(file)), ("ann", "COMMWATCH_LABEL_USER"))
    assert found["kinds.straggler"] == ("disabled", str(file))
    assert found["kinds.hang"] == ("at most warning, for 1m30s", str(file))
    assert found["receivers.hook"] == ("webhook: https://hooks.example.com", str(file))
    assert found["receivers.slack"] == ("slack: url_file /etc/slack", str(file))
    assert found["receivers.run"] == ("command: /bin/notify", str(file))


def test_no_secret(tmp_path: Path) -> None:
    """What could be a secret is in no form of the output, and the table has the same settings as the JSON."""
    file = tmp_path / "some.toml"
    file.write_text(EVERYTHING)
    env = clean_env(MAIL_PASSWORD="S3CRET")
    table, machine = (
        commwatch("config", "show", "--config", file, *flags, env=env).stdout for flags in ((), ("--json",))
    )
    assert "S3CRET" not in table + machine
    assert [line.split()[0] for line in table.splitlines()] == list(json.loads(machine))


@pytest.mark.parametrize(
    ("text", "variables", "says"),
    [
        ("prot = 1", {}, "unknown key 'prot'; did you mean port?"),
        ("KEEP_DAYS = 3", {}, "unknown key 'KEEP_DAYS'; did you mean keep_days?"),
        ("port = 70000", {}, "port: needs a whole number"),
        ("[thresholds]\ncomm_shar = 0.1", {}, "comm_shar"),
        ("[kinds.hangs]\nenabled = false", {}, "kinds: unknown 'hangs'; did you mean hang?"),
        ("[thresholds]\ncomm_share = 0.6", {}, "some.toml: thresholds: comm_share (0.6) must not be above comm_share_critical (0.5, the default)"),
        ("", {"COMMWATCH_PROT": "1"}, "COMMWATCH_PROT: no such variable; did you mean COMMWATCH_PORT?"),
        ("", {"COMMWATCH_SCALE": "1"}, "COMMWATCH_SCALE: no such variable; known are COMMWATCH_"),
        ("", {"COMMWATCH_THRESHOLD_COMM_SHARE": "much"}, "SHARE: comm_share: needs a number without a unit, such as 0.4 or 30, not 'much'"),
        ("", {"COMMWATCH_INSECURE": "maybe"}, "COMMWATCH_INSECURE: needs true or false, not 'maybe'"),
        ("", {"COMMWATCH_KEEP_DAYS": "week"}, "COMMWATCH_KEEP_DAYS: needs a number of days from 0.01 to 3650, not 'week'"),
        ("", {"COMMWATCH_RAW_BYTES": "1.5e9"}, "COMMWATCH_RAW_BYTES: needs a whole number of bytes from"),
        ("", {"COMMWATCH_ALLOWED_HOSTS": "a,b c"}, "COMMWATCH_ALLOWED_HOSTS: entry 2: needs a name such as"),
        ("", {"COMMWATCH_LINKS": "nvlink4"}, "COMMWATCH_LINKS: not valid JSON (Expecting value: line 1 column 1 (char 0)); write it in JSON, such as"),
        ("", {"COMMWATCH_KINDS": '{"hang": {"for": 1}}'}, "COMMWATCH_KINDS: hang: for: needs a duration such as 90s or 5m, not 1"),
        ("", {"COMMWATCH_RECEIVERS": '[{"kind": "slack", "url": "S3CRET"}]'}, "COMMWATCH_RECEIVERS: receiver 1: url: a secret must not be"),
        ("", {"COMMWATCH_TLS_KEY": "/k"}, "COMMWATCH_TLS_KEY: tls_key is set and tls_cert is not"),
        ("", {"COMMWATCH_CONFIG": "/no/file"}, "/no/file: No such file"),
        ("dir = '/proc/x'", {}, "dir /proc/x: nothing can be stored in /proc"), ("state = '/sys/a/b'", {}, "state /sys/a/b: nothing can be stored in /sys"),
        ("", {"COMMWATCH_GROUP": "nosuchgroup"}, "COMMWATCH_GROUP=nosuchgroup: no such group on this machine"),
        ("", {"COMMWATCH": "maybe"}, "COMMWATCH: needs one of 1, true, yes, on, 0, false, no, off, not 'maybe'"),
        ("", {"COMMWATCH_BUDGET": "nonsense"}, "COMMWATCH_BUDGET: needs a number from 0 to 1, not 'nonsense'"),
        ("", {"COMMWATCH_BUDGET": "5"}, "COMMWATCH_BUDGET: needs a number from 0 to 1, not '5'"),
        ("", {"COMMWATCH_HOOK": "nope"}, "COMMWATCH_HOOK: needs one of auto, native, python, not 'nope'"),
        ("", {"COMMWATCH_SLOTS": "5"}, "COMMWATCH_SLOTS: needs a whole number from 128 to 999999999, not '5'"),
        ("", {"COMMWATCH_TIMING": "x"}, "COMMWATCH_TIMING: needs one of auto, off, poll, events, not 'x'"),
        ("", {"COMMWATCH_HOOK": "a\nb", "COMMWATCH_DISABLE": "yes"}, "COMMWATCH_DISABLE: needs 1 or 0, not 'yes'; COMMWATCH_HOOK: needs"),
        ("[labels]\njob_id = 'x'", {}, "labels: job_id: is a label of commwatch"),
        ("[labels]\n1st = 'x'", {}, "labels: 1st: needs letters"),
        ("[labels]\nuser = 1", {}, "labels: user: needs one line of text"),
        ("labels = 'x'", {}, "labels: needs a table"),
        ("", {"COMMWATCH_LABEL_INSTANCE": "x"}, "COMMWATCH_LABEL_INSTANCE: instance: is a label of commwatch"),
        ("host = '0.0.0.0'", {}, "host 0.0.0.0 can be reached from other machines"),
        ("tls_cert = '/no/cert'\ntls_key = '/no/key'", {}, "tls_cert /no/cert, tls_key /no/key: No such file"),
        ("[thresholds]\ncomm_share = 0.4\ntoken_file = '/t'", {}, "token_file: is below [thresholds]; write it above the first table"),
        ("[[receivers]]\nkind = 'command'\ncommand = ['true']\nport = 1", {}, "port: is below [receivers]; write it above"),
        ("[[receivers]]\nkind = 'command'\ncommand = ['true']\ntoken_file = '/t'", {}, "unknown key 'token_file'; command has kind"),
        ("[labels]\ncluster = 'east'\nhost = '0.0.0.0'", {}, "host: is below [labels]; write it above the first table"),
        ("[labels]\ntoken_file = '/t'", {}, "token_file: is below [labels]; write it above"),
        ("[labels]\nnode = 'n7'\npeers = ['node1']", {}, "peers: is below [labels]; write it above"),
        ("[kinds.hang]\nenabled = true\nport = 1", {}, "port: is below [kinds]; write it above"),
        ("[[receivers]]\nkind = 'command'\ncommand = ['/no/pager']", {}, "receiver command: command: /no/pager: no such program"),
        ("[[receivers]]\nkind = 'slack'\nurl_file = '/no/url'", {}, "receiver slack: url_file = /no/url: No such file"),
        ("token_file = '/no/token'", {}, "/no/token"), ("ca_file = '/no/ca'", {}, "ca_file /no/ca: No such file"),
        ("peers = ['node1', '/no/agents.json']", {}, "peers: /no/agents.json: No such file or directory"),
        ("", {"COMMWATCH_CLIENT_CERT": "/no/cert"}, "client_cert /no/cert: No such file"),
    ],
)  # fmt: skip
def test_wrong(tmp_path: Path, text: str, variables: dict[str, str], says: str) -> None:
    """`config check` names what is wrong in file or environment, and what is nearest to it, in one line, with exit code 2."""
    file = tmp_path / "some.toml"
    file.write_text(text)
    flags = () if "COMMWATCH_CONFIG" in variables else ("--config", file)
    done = commwatch("config", "check", *flags, env=clean_env(**variables))
    assert "S3CRET" not in done.stderr
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1), done.stderr
    assert says in done.stderr


@pytest.mark.parametrize(
    "text",
    [
        "host = '0.0.0.0'",
        "host = '0'",
        "tls_cert = '/no/cert'\ntls_key = '/no/key'",
        "tls_cert = '{open}'\ntls_key = '{open}'",
        "token_file = '/no/token'",
        "token_file = '{open}'",
        "peers = ['https://node1']\nca_file = '/no/ca'",
        "otlp_endpoint = 'https://127.0.0.1:4318'\notlp_headers_file = '/no/headers'",
        "dir = '/proc/x'",
        "state = '/proc/x'",
        "[thresholds]\ncomm_share = 0.6",
    ],
)
def test_start_with_a_wrong_setting(tmp_path: Path, text: str) -> None:
    """The agent refuses at its start what ``config check`` refuses, with the same line and exit code."""
    file, open_file = tmp_path / "some.toml", tmp_path / "open"
    open_file.write_text("0123456789abcdef")
    open_file.chmod(0o644)
    place = "" if "dir =" in text else f"dir = '{tmp_path}/run'\n"
    file.write_text(f"port = 0\n{place}{text.format(open=open_file)}")
    checked, started = (commwatch(*words, "--config", file) for words in (("config", "check"), ("agent",)))
    assert (started.returncode, started.stdout, started.stderr.count("\n")) == (2, "", 1), started.stderr
    if "'0'" not in text:  # an address of which only the start knows whether other machines reach it
        assert (checked.returncode, checked.stderr) == (2, started.stderr)


def test_start_without_its_place(tmp_path: Path) -> None:
    """What is no fault of a setting ends a start with exit code 1: a port that is taken, another agent in the directory."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        done = commwatch("agent", "--dir", tmp_path / "a", "--port", str(taken.getsockname()[1]))
    assert (done.returncode, done.stderr.count("\n")) == (1, 1), done.stderr
    with agent(tmp_path / "b"):
        done = commwatch("agent", "--dir", tmp_path / "b", "--port", "0")
    assert (done.returncode, done.stderr.count("\n")) == (1, 1), done.stderr


def test_peers_without_an_address(tmp_path: Path) -> None:
    """A host of ``peers``, also of a target file, that has no address is a line of warning: it may get one later; one with an address is none."""
    targets = tmp_path / "agents.json"
    targets.write_text('[{"targets": ["no-such-host.invalid:9477"]}]')
    peers = f"127.0.0.1,localhost:9478,other-host.invalid,dns+some.invalid:9477,{targets}"
    done = commwatch("config", "check", cwd=tmp_path, env=clean_env(COMMWATCH_PEERS=peers))
    assert (done.returncode, done.stdout.startswith("the settings are valid")) == (0, True), done
    begins = "commwatch: config check: warning: peers: "
    hosts = [line.removeprefix(begins).rpartition(": ")[0] for line in done.stderr.splitlines()]
    assert hosts == ["other-host.invalid", "dns+some.invalid:9477", "no-such-host.invalid:9477"], done.stderr


def test_what_is_not_there_yet(tmp_path: Path) -> None:
    """GPUs that are required and a folder of NCCL Inspector that are not there, or cannot be read, are lines of warning: they may come later."""
    needs(not NVIDIA.exists() and not AMD.exists(), "a machine without GPUs")
    file, dumps = tmp_path / "some.toml", tmp_path / "dumps"
    file.write_text(f"gpus = 'required'\ninspector_dir = '{dumps}'\n")
    done = commwatch("config", "check", "--config", file)
    first, second = done.stderr.splitlines()
    assert done.returncode == 0
    assert first == f"commwatch: config check: warning: inspector_dir {dumps}: No such file or directory"
    assert second.startswith('commwatch: config check: warning: gpus = "required": no NVIDIA driver')
    dumps.mkdir()
    file.write_text(f"inspector_dir = '{dumps}'\n")
    assert commwatch("config", "check", "--config", file).stderr == ""


def test_secret_in_a_variable(tmp_path: Path) -> None:
    """A secret's variable that is not set here is a line of warning: the agent may have it; one that is set is none."""
    file = tmp_path / "some.toml"
    file.write_text("[[receivers]]\nkind = 'slack'\nurl_env = 'NOPE_URL'\n")
    done = commwatch("config", "check", "--config", file, env=clean_env())
    said = "commwatch: config check: warning: receiver slack: url_env = NOPE_URL: not set here: checked when the agent starts\n"
    assert (done.returncode, done.stderr) == (0, said)
    done = commwatch("config", "check", "--config", file, env=clean_env(NOPE_URL="https://hooks.example.com/S3CRET"))
    assert (done.returncode, done.stderr) == (0, "")


def test_agent_without_its_group(tmp_path: Path) -> None:
    """An agent whose group does not exist does not start, and does not ask for another directory."""
    done = commwatch("agent", "--dir", tmp_path / "run", env=clean_env(COMMWATCH_GROUP="nosuchgroup"))
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "COMMWATCH_GROUP=nosuchgroup: no such group" in done.stderr
    assert "--dir" not in done.stderr
    assert not (tmp_path / "run").exists()


def test_flags_are_shown() -> None:
    """`config show` has every flag that it takes, with the flag as the origin."""
    flags = {
        "port": 1234,
        "require_token": True,
        "insecure": True,
        "token_file": "/t",
        "ca_file": "/ca",
        "client_cert": "/cc",
    }
    words = [
        word
        for key, value in flags.items()
        for word in (f"--{key.replace('_', '-')}", *([] if value is True else [str(value)]))
    ]
    found = json.loads(commwatch("config", "show", "--json", *words).stdout)
    for key, value in flags.items():
        assert found[key] == {"value": value, "origin": f"--{key.replace('_', '-')}"}
    rows = [row.split() for row in commwatch("config", "show", *words).stdout.splitlines()]
    assert ["insecure", "true", "--insecure"] in rows
    assert ["interval", "0.25", "default"] in rows


def test_right(tmp_path: Path) -> None:
    """What is right passes: the probe's variables, those that Kubernetes makes of a Service, and an empty environment."""
    file = tmp_path / "some.toml"
    secret = tmp_path / "slack"
    secret.write_text("https://chat.example.com/x")
    file.write_text(
        f"insecure = true\n{EVERYTHING}".replace("/etc/slack", str(secret)).replace("/bin/notify", "/bin/true")
    )
    probe = {
        "COMMWATCH": "1",
        "COMMWATCH_JOB": "j",
        "COMMWATCH_GROUP": "1",
        "COMMWATCH_SLOTS": "128",
        "COMMWATCH_TIMING": "off",
        "COMMWATCH_BUDGET": "0.02",
        "COMMWATCH_HOOK": "",
        "COMMWATCH_DISABLE": "0",
    }
    service = {"COMMWATCH_SERVICE_HOST": "10.0.0.1", "COMMWATCH_PORT_9477_TCP": "tcp://10.0.0.1:9477"}
    for env in (clean_env(), clean_env(**probe, **service)):
        done = commwatch("config", "check", "--config", file, env=env)
        assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("setting", ["dir", "state"])
def test_folder_that_cannot_be_made(tmp_path: Path, setting: str) -> None:
    """A folder below a file is found by its name; one that can be made is fine, and not made by the check."""
    (tmp_path / "file").touch()

    def config(folder: Path) -> Config:
        return Config(folder, tmp_path) if setting == "dir" else Config(tmp_path, folder)

    with pytest.raises(ConfigError, match=f"^{setting} {tmp_path}/file/a: {tmp_path}/file is not a directory$"):
        check_folders(config(tmp_path / "file" / "a"))
    check_folders(config(tmp_path / "a" / "b"))
    assert [*tmp_path.iterdir()] == [tmp_path / "file"]


def test_folder_of_another_user() -> None:
    """``config check`` finds a folder to which its user cannot write, in one line."""
    with TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        done = commwatch_as_nobody("config", "check", "--dir", f"{folder}/run", "--state", "/tmp")
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert f"dir {folder}/run: this user (uid {NOBODY}) cannot write to {folder}: permission denied" in done.stderr


def as_the_units_user(*flags: str | Path, program: str = sys.executable) -> subprocess.CompletedProcess[str]:
    """What root learns from ``config check --user nobody``; ``program``: the Python that the agent would be started with."""
    words = ["config", "check", "--user", "nobody", *map(str, flags)]
    code = f"import sys; sys.executable = {program!r}; from commwatch_agent.cli import main; sys.exit(main({words!r}))"
    return in_the_open(sys.executable, "-c", code)


@pytest.mark.parametrize("what", ["settings", "token", "key", "run", "pager", "python"])
def test_as_the_units_user(what: str) -> None:
    """With ``--user``, root sees in one line what the user of a unit cannot read or write, and nothing else."""
    needs(os.getuid() == 0, "root, to act as another user")
    with TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o755)
        certificate, key = authority(folder, "ours").cert, folder / "ours.key"
        for path in (certificate, key):
            shutil.chown(path, "nobody", "nogroup")
        for secret in ("token", "pager"):
            (folder / secret).write_text("0123456789abcdef")
            shutil.chown(folder / secret, "nobody", "nogroup")
            (folder / secret).chmod(0o600)
        (folder / "run").mkdir()
        shutil.chown(folder / "run", "nobody", "nogroup")
        settings = folder / "settings"
        settings.write_text(
            f'dir = "{folder}/run"\ntoken_file = "{folder}/token"\ntls_cert = "{certificate}"\ntls_key = "{key}"\n'
            f'[[receivers]]\nkind = "slack"\nurl_file = "{folder}/pager"\n'
        )
        (folder / "pager").write_text("https://chat.example.com/x")
        right = as_the_units_user("--config", settings)
        assert (right.returncode, right.stderr) == (0, "")
        closed = {"key": key}.get(what, folder / what)
        closed.touch()
        shutil.chown(closed, "root", "root")
        closed.chmod(0o700)
        done = as_the_units_user("--config", settings, program=str(closed) if what == "python" else sys.executable)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert str(closed) in done.stderr


def test_user_that_is_none() -> None:
    """``--user`` refuses a user that the machine does not have, and an ordinary user gets the reason."""
    done = commwatch("config", "check", "--user", "no-such-user")
    assert (done.returncode, done.stderr) == (
        2,
        "commwatch: config check: --user no-such-user: no such user on this machine\n",
    )
    done = commwatch_as_nobody("config", "check", "--user", "root")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "only root" in done.stderr


def test_labels_of_jobs(tmp_path: Path) -> None:
    """User, script and node, and the labels of the settings, which win, are on ``commwatch_job_info``, so that PromQL can join them, and on no other metric."""
    config = load({"HOME": "/home/someone", "COMMWATCH_LABEL_CLUSTER": "east", "COMMWATCH_LABEL_USER": "ann"})
    watch = Watch(tmp_path)
    write_ring(watch.rings, [])
    watch.tick()
    registry = CollectorRegistry()
    registry.register(
        Exporter(
            watch.aggregate,
            threading.RLock(),
            lambda: 0,
            list,
            labels=config.labels,
            owner_of=lambda job: ("bob", "train.py"),
            node="node1",
        )
    )
    lines = [line for line in generate_latest(registry).decode().splitlines() if "east" in line]
    assert lines == [
        'commwatch_job_info{cluster="east",job_id="job",node="node1",restart="0",script="train.py",user="ann",world_size="2"} 1.0'
    ]


def test_empty_label_variable_is_none() -> None:
    """An empty variable sets no label; a text of two lines is refused."""
    assert load({"HOME": "/h", "COMMWATCH_LABEL_USER": ""}).labels == {}
    with pytest.raises(ConfigError, match="COMMWATCH_LABEL_USER: user: needs one line of text"):
        load({"HOME": "/h", "COMMWATCH_LABEL_USER": "a\nb"})
