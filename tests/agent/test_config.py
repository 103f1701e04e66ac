"""Settings: which of several wins, and the error for a wrong one. The wrong ones are in ``tests/fixtures/config``."""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import fields
from pathlib import Path
from socket import gethostname
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from commwatch.wire.addresses import hosts_and_ports
from commwatch_agent.config import SETTINGS, Config
from commwatch_agent.config_checks import FILE, ConfigError
from commwatch_agent.config_sources import load
from commwatch_agent.runtime.run_lock import place_of_alerts
from commwatch_alerts.model import KindSettings
from commwatch_alerts.receivers.sending import Secret
from commwatch_alerts.receivers.settings import ReceiverConfig
from tests.helpers import clean_env, commwatch, commwatch_as_nobody, examples

WRONG = Path(__file__).parents[1] / "fixtures" / "config"
#: File name to what the message must name beside the file: the key, or the kind of mistake.
MISTAKES = {
    "unknown_key": "'colour'",
    "setting_in_a_table": "'agent'",
    "port_as_text": "port",
    "port_as_boolean": "port",
    "port_out_of_range": "65536",
    "port_with_a_fraction": "94.77",
    "interval_of_zero": "interval",
    "interval_not_a_number": "nan",
    "raw_bytes_too_few": "raw_bytes",
    "raw_bytes_with_a_unit": "'256MB'",
    "keep_days_negative": "keep_days",
    "keep_ended_infinite": "keep_ended",
    "dir_empty": "dir",
    "dir_of_unknown_user": "~nobody-of-that-name",
    "dir_with_a_nul": "dir",
    "state_as_number": "state",
    "host_as_list": "host",
    "gpus_unknown": "auto, required, off",
    "peers_with_no_port": "node1:abc: needs a host, or HOST:PORT with a port from 1 to 65535",
    "peers_out_of_range": "agents:65536: needs a host",
    "log_format_unknown": "text, json",
    "log_level_unknown": "debug, info, warning, error",
    "job_info_unknown": "user, script, node",
    "links_not_a_table": "links",
    "links_unknown": "'ib-ndx'; did you mean ib-ndr?",
    "links_not_a_key": "400",
    "inspector_dir_empty": "inspector_dir",
    "thresholds_not_a_table": "a table of names and numbers",
    "threshold_as_text": "comm_share",
    "kinds_not_tables": "[kinds.NAME]",
    "kind_as_switch": "hang: needs a table",
    "kind_with_unknown_key": "hang: unknown key 'after'; known are enabled, severity, for",
    "kind_of_other_severity": "hang: severity: needs one of info, warning, critical, not 'page'",
    "kind_for_a_number": "hang: for: needs a duration such as 90s or 5m, not 300",
    "rules_of_ones_own": "rules: commwatch no longer reads lists of alerts; put rules of your own into Prometheus (rule_files)",
    "ras_without_a_port": "addresses such as localhost:28028",
    "receivers_not_tables": "[[receivers]]",
    "receivers_with_a_secret": 'token_file = "PATH"',
    "require_token_as_text": "require_token: needs true or false",
    "insecure_as_number": "insecure: needs true or false",
    "allowed_hosts_as_text": "a list of names",
    "allowed_hosts_with_a_port": "node1:9477",
    "allowed_hosts_all": "a name such as node1.example.org",
    "tls_without_a_key": "tls_key is not",
    "client_ca_without_tls": "tls_cert is not",
    "token_file_empty": "token_file: needs a file",
    "key_twice": "TOML",
    "no_equals_sign": "TOML",
    "not_utf8": "TOML",
}


def one_line(done: subprocess.CompletedProcess[str], code: int = 2) -> str:
    """The output of a refused command: one line, on standard error, without a traceback."""
    assert (done.returncode, done.stdout) == (code, ""), done.stderr
    assert done.stderr.startswith("commwatch: ")
    assert done.stderr.count("\n") == 1, done.stderr
    return done.stderr


# -- which wins ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "default", "in_file", "variable", "flag"),
    [
        ("port", None, 9001, "9002", 9003),
        ("host", "127.0.0.1", "::1", "127.0.0.2", "127.0.0.3"),
        ("dir", None, "/run/file", "/run/environment", "/run/flag"),
        ("state", None, "/state/file", "/state/environment", "/state/flag"),
    ],
)
def test_precedence(tmp_path: Path, key: str, default: Any, in_file: Any, variable: str, flag: Any) -> None:
    """A flag wins over the environment, that over the file, that over the default."""
    file = tmp_path / "some.toml"
    file.write_text(f"{key} = {in_file!r}\n")
    name = f"COMMWATCH_{key.upper()}"

    def got(env: dict[str, str], file: Path | None, **flags: Any) -> str:
        return str(getattr(load({"HOME": "/home/someone", **env}, file, **flags), key))

    assert got({name: variable}, file, **{key: flag}) == str(flag)
    assert got({name: variable}, file, **{key: None}) == variable
    assert got({}, file) == str(in_file)
    assert got({name: ""}, file) == str(in_file)  # an empty variable is none
    if key in ("port", "host"):
        assert got({}, None) == str(default)


#: A text in the environment for each setting, and what it means.
VARIABLES: dict[str, tuple[str, Any]] = {
    "dir": ("/run/x", Path("/run/x")), "state": ("/state", Path("/state")), "node": ("n1", "n1"), "host": ("::1", "::1"), "port": ("9001", 9001),
    "allowed_hosts": ("a, .b", ("a", ".b")), "peers": ("n1,n2:1", ("n1", "n2:1")), "interval": ("1", 1), "raw_bytes": ("2000000", 2_000_000),
    "summary_bytes": ("2000000", 2_000_000), "profile_every": ("5", 5), "keep_days": ("0.5", 0.5), "keep_ended": ("0", 0), "gpus": ("off", "off"),
    "log_format": ("json", "json"), "log_level": ("debug", "debug"), "job_info": ("node, user", ("node", "user")),
    "ras": ("localhost:1", "localhost:1"), "inspector_dir": ("/dumps", Path("/dumps")), "links": ('{"*": "nvlink4"}', {"*": "nvlink4"}),
    "receivers": ('[{"kind": "slack", "url_env": "S"}]', (ReceiverConfig("slack", "slack", url=Secret("url_env", variable="S")),)),
    "thresholds": ('{"comm_share": 0.4}', {"comm_share": 0.4}), "kinds": ('{"hang": {"for": "1m"}}', {"hang": KindSettings(for_s=60)}),
    "labels": ('{"team": "ml"}', {"team": "ml"}), "otlp_endpoint": ("http://c:4318/", "http://c:4318"), "otlp_interval": ("5.5", 5.5),
    **dict.fromkeys((name for name, each in SETTINGS.items() if each.kind is FILE), ("/f", Path("/f"))),
    **dict.fromkeys((name for name, each in SETTINGS.items() if each.default is False), ("1", True)),
    **dict.fromkeys((name for name, each in SETTINGS.items() if each.default is True), ("false", False)),
}  # fmt: skip


def test_every_setting_has_a_variable(tmp_path: Path) -> None:
    """Every setting can be set in the environment, and overrides the file there; the file itself can be named there, too."""
    assert set(VARIABLES) == set(SETTINGS)
    env = {SETTINGS[name].variable: text for name, (text, _) in VARIABLES.items()}
    file = tmp_path / "some.toml"
    file.write_text("keep_days = 9\nkeep_ended = 9\n[labels]\ncluster = 'east'\n")
    config = load({**env, "COMMWATCH_CONFIG": str(file)})
    assert {name: getattr(config, name) for name in SETTINGS} == {name: meant for name, (_, meant) in VARIABLES.items()}
    config = load({"HOME": "/home/someone", "COMMWATCH_CONFIG": str(file), "COMMWATCH_KEEP_DAYS": "1"})
    assert (config.keep_days, config.keep_ended) == (1, 9)


def test_entries_of_tables(tmp_path: Path) -> None:
    """The variable of an entry overrides that of its table, which replaces the table of the file."""
    file = tmp_path / "some.toml"
    file.write_text("[labels]\ncluster = 'east'\nteam = 'a'\n")
    env = {"HOME": "/home/someone", "COMMWATCH_LABEL_TEAM": "b"}
    assert load(env, file).labels == {"cluster": "east", "team": "b"}
    assert load({**env, "COMMWATCH_LABELS": '{"team": "c", "user": "ann"}'}, file).labels == {
        "team": "b",
        "user": "ann",
    }


def test_files_of_a_node(tmp_path: Path) -> None:
    """The agent's files are named for the host, or for the node if it has a name, so that a pod that is replaced has those of the one before."""
    env = {"HOME": str(tmp_path), "COMMWATCH_STATE": str(tmp_path)}
    files = ("history", "sent_alerts", "evidence")
    for names, node in ((env, gethostname()), ({**env, "COMMWATCH_NODE": "gpu-7.rack1"}, "gpu-7.rack1")):
        config = load(names)
        assert [getattr(config, file).name.partition("-")[2].partition(".sqlite")[0] for file in files] == [
            node, f"{node}.json", node
        ]  # fmt: skip
        placed, lock = place_of_alerts(config)
        os.close(lock)
        assert (placed.state, (tmp_path / f"alerts-{node}.lock").exists()) == (tmp_path, True)
    for wrong in ("a/b", "..", "-", "a b", "x" * 300):
        with pytest.raises(ConfigError, match="COMMWATCH_NODE: needs a name of letters"):
            load({**env, "COMMWATCH_NODE": wrong})


def test_settings_without_flag(tmp_path: Path) -> None:
    """Every setting can be in the file, and a missing one keeps its default."""
    file = tmp_path / "some.toml"
    file.write_text("interval = 1\nraw_bytes = 1048576\nkeep_days = 0.5\nkeep_ended = 0\n")
    config = load({"HOME": "/home/someone"}, file)
    assert (config.interval, config.raw_bytes, config.keep_days, config.keep_ended) == (1, 1 << 20, 0.5, 0)
    assert (config.host, config.port) == (Config.host, Config.port)
    assert config.links == {}
    file.write_text('[links]\ndata = "8 x ib-ndr"\n"*" = "nvlink4"\n')
    assert load({"HOME": "/home/someone"}, file).links == {"data": "8 x ib-ndr", "*": "nvlink4"}


def test_file_of_the_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a flag ./commwatch.toml counts, if there is one."""
    monkeypatch.chdir(tmp_path)
    assert load({"HOME": "/home/someone"}).port is None
    (tmp_path / "commwatch.toml").write_text("port = 9001\n")
    assert load({"HOME": "/home/someone"}).port == 9001
    (tmp_path / "other.toml").write_text("port = 9002\n")
    assert load({"HOME": "/home/someone"}, Path("other.toml")).port == 9002


def test_history_never_in_memory() -> None:
    """History lies under $XDG_STATE_HOME; a run directory given alone holds it too; --state always wins."""
    home = {"HOME": str(Path.home())}
    assert load(home).state == Path.home() / ".local" / "state" / "commwatch"
    assert load({**home, "XDG_STATE_HOME": "/var/state"}).state == Path("/var/state/commwatch")
    assert load(home, dir="/run/x").state == Path("/run/x")
    assert load({**home, "COMMWATCH_DIR": "/run/x"}).state == Path("/run/x")
    assert load(home, dir="/run/x", state="/state").state == Path("/state")
    assert load({**home, "COMMWATCH_STATE": "/state"}, dir="/run/x").state == Path("/state")
    assert load(home).dir.name == f"commwatch-{os.getuid()}"


def test_directories_are_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A relative directory is meant from where the command was given: the job may go elsewhere."""
    monkeypatch.chdir(tmp_path)
    config = load({"HOME": "/home/someone"}, dir="run", state="kept")
    assert (config.dir, config.state) == (tmp_path / "run", tmp_path / "kept")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert load({"HOME": str(tmp_path)}, dir="~/run").dir == tmp_path / "run"


def test_witnesses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other sources are off by default; several RAS addresses are separated by commas, and a relative folder becomes absolute."""
    config = load({"HOME": "/home/someone"})
    assert (config.inspector_dir, config.ras) == (None, None)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "commwatch.toml").write_text('ras = "localhost:28028, [::1]:28029"\ninspector_dir = "dumps"\n')
    config = load({"HOME": "/home/someone"})
    assert config.inspector_dir == tmp_path / "dumps"
    assert hosts_and_ports(config.ras or "") == [("localhost", 28028), ("::1", 28029)]


@pytest.mark.parametrize("text", ["true", "True", "TRUE", "1", " true "])
def test_switch_in_the_environment(text: str) -> None:
    """A switch is ``true`` or 1 however a shell or a chart writes it."""
    assert load({"HOME": "/h", "COMMWATCH_REQUIRE_TOKEN": text}).require_token is True


def test_list_in_the_environment() -> None:
    """A list is separated by commas or JSON, by which it can be empty, too; an IPv6 address in brackets is no JSON."""
    for text, meant in (("user, node", ("user", "node")), ('["user"]', ("user",)), ("[]", ())):
        assert load({"HOME": "/h", "COMMWATCH_JOB_INFO": text}).job_info == meant
    assert load({"HOME": "/h", "COMMWATCH_PEERS": "[::1]:9477,node1"}).peers == ("[::1]:9477", "node1")


# -- wrong ones ---------------------------------------------------------------------------------

_NOT_JSON = "not valid JSON ("
#: What people may write into a variable, and what the line must say after the variable's name.
WRONG_VARIABLES = [
    *(("KINDS", text, _NOT_JSON) for text in ("{hang}", '{"hang"}', '{"hang": {for: 1m}}', "{'hang': {'for': '1m'}}", '{"hang": {"for": "1m"}', "hang")),
    *(("KINDS", text, """in JSON, such as '{"hang": {"for": "1m"}}'""") for text in ("[]", '"hang"', "5", "null", "{hang}", "hang.for=1m")),
    *(("KINDS", text, "hang: needs a table with keys of enabled, severity, for, not ") for text in ('{"hang": "1m"}', '{"hang": null}')),
    ("KINDS", '{"hang": {"enabled": null}}', "hang: enabled: needs true or false, not null"),
    ("KINDS", '{"hnag": {"for": "1m"}}', "kinds: unknown 'hnag'; did you mean hang?"),
    *(("LINKS", text, """in JSON, such as '{"*": "nvlink4"}'""") for text in ("nvlink4", "*=nvlink4", '["nvlink4"]', "{*: nvlink4}")),
    ("LINKS", '{"*": "nvlink9"}', "*: no link 'nvlink9'; did you mean nvlink5?"),
    ("LINKS", '{"*": 4}', "*: needs a link such as nvlink4 or 8 x ib-ndr, not 4"),
    *(("THRESHOLDS", text, """in JSON, such as '{"comm_share": 0.4}'""") for text in ("comm_share=0.4", "0.4", "{comm_share: 0.4}", "[0.4]")),
    ("THRESHOLDS", '{"comm_share": 40}', "thresholds: comm_share: needs a number from 0 to 1, not 40"),
    ("THRESHOLDS", '{"comm_shar": 0.4}', "thresholds: unknown 'comm_shar'; did you mean comm_share?"),
    ("THRESHOLDS", '{"comm_share": true}', "comm_share: needs a number without a unit, such as 0.4 or 30, not true"),
    *(("THRESHOLD_COMM_SHARE", text, f"comm_share: needs a number without a unit, such as 0.4 or 30, not '{text}'") for text in ("40%", "0,4", "a", "true")),
    *(("THRESHOLD_COMM_SHARE", text, "thresholds: comm_share: needs a number from 0 to 1, not ") for text in ("1.5", "-1", "inf", "1e999")),
    ("THRESHOLD_HANG_SECONDS", "30s", "hang_seconds: needs a number without a unit, such as 0.4 or 30, not '30s'"),
    ("THRESHOLD_NOPE", "1", "thresholds: unknown 'nope'; known are comm_share,"),
    *(("LABELS", text, """in JSON, such as '{"cluster": "east"}'""") for text in ("cluster=east", "[]", "{cluster: east}")),
    ("LABEL_CLUSTER", "x" * 1000, "cluster: needs one line of text, at most 200 characters, not 'xxxxx"),
    *(("RECEIVERS", text, """in JSON, such as '[{"kind": "slack", "url_env": "SLACK_URL"}]'""") for text in ("slack", '{"kind": "slack"}', "[{kind: slack}]")),
    ("RECEIVERS", '["slack"]', "receiver 1: needs a table with a kind: alertmanager, webhook, slack, command"),
    ("PEERS", "node1 node2", "entry 1: node1 node2: needs a host"),
    *(("PEERS", text, f"entry 2: {text}: needs a host") for text in ("http://", "dns+", "dns+:9477", "node1:99999")),
    ("PEERS", "node1,/etc/agents.yaml", "entry 2: /etc/agents.yaml: needs a host"), ("PEERS", "file:agents", "entry 1: file:agents: needs a host"),
    ("JOB_INFO", "users", "entry 1: needs one of user, script, node, not 'users'"),
    *(("REQUIRE_TOKEN", text, f"needs true or false, not {text!r}") for text in ("yes", "on", "2", "t", "null")),
    *(("INTERVAL", text, f"needs a number of seconds from 0.01 to 60, not {text!r}") for text in ("1s", "0,25", "250ms", "never")),
    *(("KEEP_DAYS", text, f"needs a number of days from 0.01 to 3650, not {text!r}") for text in ("7d", "1w", "30 days")),
    *(("PORT", text, f"needs a whole number from 0 to 65535, not {text!r}") for text in ("http", "9477.0", "9477/tcp", "1e3")),
    *(("RAW_BYTES", text, f"needs a whole number of bytes from 1048576 to 1125899906842624, not {text!r}") for text in ("256M", "1GiB", "1e9")),
    *(("RAS", text, "needs addresses such as localhost:28028, not ") for text in ("localhost", "http://localhost:28028", "localhost:28028,", "a b:1")),
    *(("HOST", text, "needs an IP address or a host name without") for text in ("http://h", "0.0.0.0:9477", "999.1.1.1", "a b", "::1::", "[::1]")),
    *(("NODE", text, "needs a name of letters, digits, '.', '_' and '-' (first a letter or digit, at most 253), not ") for text in (".x", "-", "x" * 300)),
    ("CONFIG", "nope.toml", "nope.toml: No such file or directory"), ("CONFIG", "/etc", "/etc: "),
]  # fmt: skip


@pytest.mark.parametrize(("key", "text", "says"), WRONG_VARIABLES)
def test_wrong_variable(key: str, text: str, says: str) -> None:
    """A wrong variable is refused in one line that names it, what is wrong, and what would be right."""
    text = f"node1,{text}" if says.startswith("entry 2") and "," not in text else text
    with pytest.raises(ConfigError) as caught:
        load({"HOME": "/h", f"COMMWATCH_{key}": text})
    assert str(caught.value).startswith(f"COMMWATCH_{key}: ")
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 600


@pytest.mark.parametrize(
    ("text", "variables", "origin", "says"),
    [
        ("[thresholds]\ncomm_share = 0.6", {}, "", "thresholds: comm_share (0.6) must not be above comm_share_critical (0.5, the default)"),
        ("[thresholds]\ncomm_share = 0.6", {"THRESHOLD_COMM_SHARE_CRITICAL": "0.55"}, "", "(0.6) must not be above comm_share_critical (0.55)"),
        ("[thresholds]\ncomm_share_critical = 0.6", {"THRESHOLD_COMM_SHARE": "0.7"}, "THRESHOLD_COMM_SHARE", "(0.7) must not be above comm_share_critical"),
        ("[thresholds]\ncomm_share_critical = 0.2", {}, "", "thresholds: comm_share (0.3, the default) must not be above comm_share_critical (0.2)"),
        ("", {"THRESHOLDS": '{"stalled_page_seconds": 30}'}, "THRESHOLDS", "stalled_seconds (60, the default) must not be above stalled_page_seconds (30)"),
        ("[thresholds]\nlink_floor = 0.95", {}, "", "link_floor (0.95) must not be above link_used (0.9, the default)"),
        ("[kinds.comm_bound]\nseverity = 'warning'\n[thresholds]\ncomm_share = 0.6", {}, "", "comm_share (0.6) must not be above"),
        ("tls_key = '/k'", {}, "", "tls_key is set and tls_cert is not; TLS needs tls_cert and tls_key"),
        ("otlp_ca_file = '/ca'", {}, "", "otlp_ca_file is set and otlp_endpoint is not; nothing would be pushed"),
        ("", {"OTLP_HEADERS_FILE": "/h"}, "OTLP_HEADERS_FILE", "otlp_headers_file is set and otlp_endpoint is not; nothing would be pushed"),
    ],
)  # fmt: skip
def test_settings_that_contradict(tmp_path: Path, text: str, variables: dict[str, str], origin: str, says: str) -> None:
    """Two settings that contradict each other are refused in one line that names both, with the origin of one that is set; equal ones are fine."""
    file = tmp_path / "some.toml"
    file.write_text(text)
    env = {"HOME": "/h", **{f"COMMWATCH_{name}": value for name, value in variables.items()}}
    with pytest.raises(ConfigError) as caught:
        load(env, file)
    assert str(caught.value).startswith(f"COMMWATCH_{origin}: " if origin else str(file))
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)
    assert load({"HOME": "/h", "COMMWATCH_THRESHOLD_COMM_SHARE": "0.5"}).thresholds == {"comm_share": 0.5}


@pytest.mark.parametrize("host", ["0", "0.0.0.0", "::", "fe80::1%eth0", "node-7.rack_1", "localhost"])
def test_hosts(host: str) -> None:
    """Addresses, also with a zone, and names are hosts."""
    assert load({"HOME": "/h", "COMMWATCH_HOST": host}).host == host


def test_a_secret_in_a_wrong_variable() -> None:
    """What is no JSON may have a secret in it: the line does not repeat it."""
    for text in ("S3CRET", '["S3CRET"]', '{"kind": "S3CRET"', '[{"kind": "S3CRET"}]'):
        with pytest.raises(ConfigError) as caught:
            load({"HOME": "/h", "COMMWATCH_RECEIVERS": text})
        assert "S3CRET" not in str(caught.value)


def test_origin_of_a_wrong_threshold(tmp_path: Path) -> None:
    """A threshold or kind that is wrong by the list of alerts is refused by every command, with the file or the variable that sets it."""
    file = tmp_path / "some.toml"
    file.write_text("[thresholds]\ncomm_share = 0.4\nhang_seconds = 5\n")
    home = {"HOME": "/h"}
    with pytest.raises(
        ConfigError, match=rf"^{file}: thresholds: hang_seconds: needs a number from 10 to 3600, not 5$"
    ):
        load(home, file)
    with pytest.raises(ConfigError, match=r"^COMMWATCH_THRESHOLD_COMM_SHARE: thresholds: comm_share: needs"):
        load({**home, "COMMWATCH_THRESHOLD_COMM_SHARE": "7", "COMMWATCH_THRESHOLD_HANG_SECONDS": "20"}, file)


def test_every_wrong_file_is_named() -> None:
    """Each file of wrong settings is in the table above, and the other way round."""
    assert {path.stem for path in WRONG.glob("*.toml")} == set(MISTAKES)


@pytest.mark.parametrize(("mistake", "named"), MISTAKES.items())
def test_wrong_setting_in_a_file(mistake: str, named: str) -> None:
    """A wrong setting is refused in one line that names file and key."""
    file = WRONG / f"{mistake}.toml"
    with pytest.raises(ConfigError) as caught:
        load({"HOME": "/home/someone"}, file)
    assert str(file) in str(caught.value)
    assert named in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("mistake", ["unknown_key", "port_out_of_range", "no_equals_sign"])
def test_wrong_setting_ends_the_command(mistake: str) -> None:
    """Every command refuses to start with a wrong setting: one line, exit code 2, no traceback."""
    for command in (["agent"], ["report"], ["run", "--", "true"]):
        file = WRONG / f"{mistake}.toml"
        said = one_line(commwatch(command[0], "--config", file, *command[1:]))
        assert str(file) in said
        assert MISTAKES[mistake] in said


ANYTHING = st.recursive(
    st.booleans()
    | st.integers(-(1 << 70), 1 << 70)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3),
    max_leaves=4,
)


@examples(100)
@given(
    st.dictionaries(st.sampled_from([field.name for field in fields(Config)]), ANYTHING, max_size=4)
    | st.binary(max_size=60)
)
def test_any_settings(written: dict[str, Any] | bytes) -> None:
    """Any content of the file gives settings, or an error in one line that names the file."""
    with TemporaryDirectory() as directory:
        file = Path(directory) / "some.toml"
        if isinstance(written, bytes):
            file.write_bytes(written)
        else:
            file.write_text("".join(f"{key} = {json.dumps(value)}\n" for key, value in written.items()))
        said = ""
        try:
            load({"HOME": "/home/someone"}, file)
        except ConfigError as error:
            said = str(error)
        assert not said or str(file) in said
        assert "\n" not in said


def test_file_that_cannot_be_read(tmp_path: Path) -> None:
    """A requested settings file that is missing or is a directory is named; without a request none is required."""
    for file in (tmp_path / "missing.toml", tmp_path):
        assert str(file) in one_line(commwatch("report", "--config", file))
    assert "no history" in one_line(commwatch("report", "--dir", tmp_path, cwd=tmp_path))


@pytest.mark.parametrize("text", ["nine", "-1", "65536", "94.77", " "])
def test_wrong_port_in_the_environment(text: str) -> None:
    """A wrong variable is named, with its value."""
    said = one_line(commwatch("report", env=clean_env(COMMWATCH_PORT=text)))
    assert "COMMWATCH_PORT" in said
    assert text in said


@pytest.mark.parametrize(
    "flags", [("--port", "65536"), ("--port", "-1"), ("--host", ""), ("--dir", ""), ("--state", "")]
)
def test_wrong_flag(flags: tuple[str, str], tmp_path: Path) -> None:
    """A wrong flag is named; an empty one (an unset variable in a script) is wrong, too."""
    assert flags[0] in one_line(commwatch("report", f"{flags[0]}={flags[1]}", cwd=tmp_path))


def test_flag_that_is_no_number() -> None:
    """What the parser of flags refuses is named in its last line, after the usage."""
    done = commwatch("report", "--port", "nine")
    assert (done.returncode, done.stdout) == (2, "")
    assert "--port" in done.stderr.splitlines()[-1]
    assert "'nine'" in done.stderr.splitlines()[-1]


def test_user_without_a_home() -> None:
    """A user without a home (in a container) needs none if the directories are given; otherwise the error names the flag."""
    env = {name: value for name, value in clean_env().items() if name != "HOME"}
    assert "no history" in one_line(commwatch_as_nobody("report", "--dir", "/nowhere", env=env))
    assert "--state" in one_line(commwatch_as_nobody("report", env=env))
