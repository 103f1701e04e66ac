"""Files that decide what commwatch does are refused, with one line, if another user can have written them."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from commwatch.wire.addresses import BadAddress
from commwatch_agent.runtime.agents import addresses
from commwatch_alerts.outbox import Batch, Policy
from commwatch_alerts.receivers.command import Command
from commwatch_alerts.receivers.sending import CannotSend, Secret
from tests.helpers import clean_env, commwatch
from tests.hostile.attacker import MALLORY
from tests.receivers import alert

pytestmark = pytest.mark.long

#: A command runs as soon as an alert fires.
HOSTILE = """
[[receivers]]
kind = "command"
name = "mine"
command = ["touch", "{place}/it-ran"]
"""


def _of_another(place: Path) -> Path:
    os.chown(place / "commwatch.toml", MALLORY, MALLORY)
    return place / "commwatch.toml"


def _folder_of_another(place: Path) -> Path:
    os.chown(place, MALLORY, MALLORY)
    return place


def _folder_for_all(place: Path) -> Path:
    place.chmod(0o777)
    return place


def _folder_for_a_group(place: Path) -> Path:
    os.chown(place, 0, MALLORY)
    place.chmod(0o775)
    return place


def _for_all(place: Path) -> Path:
    (place / "commwatch.toml").chmod(0o666)
    return place / "commwatch.toml"


def _link_of_another(place: Path) -> Path:
    (place / "commwatch.toml").rename(place / "real.toml")
    (place / "commwatch.toml").symlink_to("real.toml")
    os.chown(place / "commwatch.toml", MALLORY, MALLORY, follow_symlinks=False)
    return place / "commwatch.toml"


WAYS = [_of_another, _folder_of_another, _folder_for_all, _folder_for_a_group, _for_all, _link_of_another]
COMMANDS = (
    ("run", "--dir", "DIR", "--", "true"),
    ("config", "check"),
    ("agent", "--dir", "DIR"),
    ("report",),
    ("top", "--once"),
)


@pytest.fixture
def place(public: Path) -> Path:
    """A folder with settings that run a command."""
    folder = public / "place"
    folder.mkdir(mode=0o755)
    (folder / "commwatch.toml").write_text(HOSTILE.format(place=folder))
    for path in folder.iterdir():
        path.chmod(0o644)
    return folder


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("command", COMMANDS, ids=lambda words: words[0])
def test_settings_of_another(
    way: Callable[[Path], Path], command: tuple[str, ...], place: Path, tmp_path: Path
) -> None:
    """No command uses settings that another user can have written, whether found in the folder or named: one line names what is wrong."""
    culprit = way(place)
    words = [str(tmp_path / "run") if word == "DIR" else word for word in command]
    at = words.index("--") if "--" in words else len(words)
    for chosen in ([], ["--config", str(place / "commwatch.toml")]):
        done = commwatch(*words[:at], *chosen, *words[at:], cwd=place, env=clean_env())
        assert done.returncode == 2, done.stderr
        assert done.stderr.count("\n") == 1, done.stderr
        assert culprit.name in done.stderr
        assert str(MALLORY) in done.stderr or "others may write" in done.stderr or "symbolic links" in done.stderr
    assert not (place / "it-ran").exists()


#: A setting that names a file, and the content of that file.
NAMED = {
    "token_file": "0123456789abcdef0123\n",
    "otlp_headers_file": "Authorization: Bearer x\n",
    "tls_client_ca": "-",
    "ca_file": "-",
}


@pytest.mark.parametrize("setting", NAMED)
def test_files_that_settings_name(setting: str, public: Path) -> None:
    """A file that the settings name is refused, too: a token, headers, certificates."""
    place = public / "place"
    place.mkdir(mode=0o755)
    named = place / "named"
    named.write_text(NAMED[setting])
    named.chmod(0o600 if setting == "token_file" else 0o644)
    more = "otlp_endpoint = 'https://collector.example.com:4318'\n" if setting.startswith("otlp") else ""
    if setting == "tls_client_ca":
        more = f"tls_cert = '{named}'\ntls_key = '{named}'\n"
    (place / "commwatch.toml").write_text(f"{setting} = '{named}'\n{more}")
    (place / "commwatch.toml").chmod(0o644)
    os.chown(named, MALLORY, MALLORY)
    done = commwatch(
        "agent", "--dir", place / "run", "--port", "0", "--config", place / "commwatch.toml", env=clean_env()
    )
    assert done.returncode != 0
    assert done.stderr.count("\n") == 1, done.stderr
    assert f"{named}" in done.stderr
    assert f"belongs to uid {MALLORY}" in done.stderr


def test_secret_of_another(public: Path) -> None:
    """A receiver's secret is read from no file of another user: the address in it is where alerts go."""
    file = public / "url"
    file.write_text("https://hooks.example.com/x")
    file.chmod(0o644)
    secret = Secret("url_file", file)
    assert secret.read() == "https://hooks.example.com/x"
    os.chown(file, MALLORY, MALLORY)
    with pytest.raises(CannotSend, match=f"belongs to uid {MALLORY}"):
        secret.read()


def test_targets_of_another(public: Path) -> None:
    """A list of agents is read from no file of another user: tokens are sent to these agents."""
    file = public / "agents.json"
    file.write_text('[{"targets": ["node1:9477"]}]')
    file.chmod(0o644)
    assert addresses([str(file)]) == ["http://node1:9477"]
    os.chown(file, MALLORY, MALLORY)
    with pytest.raises(BadAddress, match=f"belongs to uid {MALLORY}"):
        addresses([str(file)])


def test_program_without_our_settings(tmp_path: Path) -> None:
    """The program of a `command` receiver gets neither our variables, which would load the probe in it, nor secrets of other receivers."""
    out = tmp_path / "env"
    variables = {"COMMWATCH": "1", "COMMWATCH_DIR": "/x", "COMMWATCH_TOKEN_FILE": "/y", "SECRET": "s", "KEPT": "k"}
    before = dict(os.environ)
    os.environ.update(variables)
    try:
        Command("x", Policy(60.0), ("sh", "-c", f"env > {out}"), "http://x", frozenset({"SECRET"})).send(
            Batch((alert(),)), 0.0
        )
    finally:
        os.environ.clear()
        os.environ.update(before)
    found = {line.partition("=")[0] for line in out.read_text().splitlines()}
    assert "KEPT" in found
    assert not found & {"COMMWATCH", "COMMWATCH_DIR", "COMMWATCH_TOKEN_FILE", "SECRET"}
