"""``[[receivers]]``: what each kind takes, what is said about a wrong table, and that no value which may be secret is repeated."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from commwatch_agent.config_sources import load
from commwatch_alerts.outbox import Policy
from commwatch_alerts.receivers.command import Command
from commwatch_alerts.receivers.hooks import Alertmanager, Login, Slack, Webhook
from commwatch_alerts.receivers.opening import receivers
from commwatch_alerts.receivers.sending import Secret
from commwatch_alerts.receivers.settings import KEYS, RECEIVERS, ReceiverConfig
from commwatch_alerts.values import BadValue
from tests.helpers import examples

AGENT = "http://agent:9477"
FILE = """
[[receivers]]
kind = "alertmanager"
urls = ["http://am-0:9093", "https://am-1:9093/prefix"]
username = "commwatch"
password_file = "/run/secrets/am"

[[receivers]]
kind = "webhook"
name = "chat"
url = "http://chat:8080/hook?room=1"
token_env = "CHAT_TOKEN"
send_resolved = false
repeat = "30m"

[[receivers]]
kind = "slack"
severity = "critical"
url_file = "/run/secrets/slack"

[[receivers]]
kind = "command"
command = ["/usr/local/bin/page", "--loud"]
"""


def test_all_kinds(tmp_path: Path) -> None:
    """Each kind of receiver has the settings of its table; each address of Alertmanager is a separate receiver."""
    (tmp_path / "some.toml").write_text(FILE)
    made = receivers(load({"HOME": "/home/someone"}, tmp_path / "some.toml").receivers, AGENT)
    usual, hours_4 = "warning", 4 * 3600.0
    often = Policy(60.0, 900.0, grouped=False, severity=usual)
    login = Login(username="commwatch", password=Secret("password_file", file=Path("/run/secrets/am")))
    policy = Policy(hours_4, severity=usual)
    quiet = Policy(1800.0, send_resolved=False, severity=usual)
    url = Secret("url_file", file=Path("/run/secrets/slack"))
    assert made == [
        Alertmanager("alertmanager/1", often, "http://am-0:9093", AGENT, login),
        Alertmanager("alertmanager/2", often, "https://am-1:9093/prefix", AGENT, login),
        Webhook(
            "chat", quiet, "http://chat:8080/hook?room=1", AGENT, Login(Secret("token_env", variable="CHAT_TOKEN"))
        ),
        Slack("slack", Policy(hours_4, severity="critical"), url, AGENT),
        Command("command", policy, ("/usr/local/bin/page", "--loud"), AGENT, frozenset({"CHAT_TOKEN"})),
    ]
    assert load({"HOME": "/home/someone"}).receivers == ()


def checked(tables: list[dict[str, Any]]) -> tuple[ReceiverConfig, ...]:
    return RECEIVERS.checked(tables, "receivers")


HUSH = "hush-5e7a1c9b"
SLACK = {"kind": "slack", "url_env": "URL"}
HOOK = {"kind": "webhook", "url": "http://hook"}


@pytest.mark.parametrize(
    ("table", "says"),
    [
        ({}, "kind: needs one of alertmanager, webhook, slack, command"),
        ({"kind": HUSH}, "kind: needs one of"),
        ({**HOOK, "passwort": HUSH}, "unknown key 'passwort'; webhook has kind, name, severity"),
        ({**HOOK, "token": HUSH}, 'token: a secret must not be in the settings; write it to a file and set token_file = "PATH"'),
        ({**HOOK, "password": HUSH}, 'or put it in the environment and set password_env = "NAME"'),
        ({"kind": "slack", "url": f"https://hooks/{HUSH}"}, 'url: a secret must not be in the settings; write it to a file and set url_file = "PATH"'),
        ({"kind": "slack", "url_env": f"https://hooks/{HUSH}"}, "url_env: needs the name of a variable of the environment, not the secret itself"),
        ({**HOOK, "url_file": HUSH}, "url: given here and in a file"),
        ({"kind": "webhook", "url_file": ["x", HUSH]}, "url_file: needs a text"),
        ({"kind": "webhook", "url": f"https://me:{HUSH}@hook/"}, "url: needs http:// or https:// and a host; a user and password go into username"),
        ({"kind": "webhook", "url": f"ftp://hook/{HUSH}"}, "url: needs http:// or https:// and a host"),
        ({"kind": "alertmanager", "urls": ["http://am", f"http://am:{HUSH}"]}, "urls: entry 2: needs http:// or https:// and a host"),
        ({"kind": "alertmanager", "urls": f"http://{HUSH}"}, "urls: needs a list"),
        ({"kind": "alertmanager"}, "needs url or urls"),
        ({"kind": "alertmanager", "url": "http://am", "repeat": "4h"}, "unknown key 'repeat'"),
        ({"kind": "webhook"}, "needs url or url_file or url_env"),
        ({"kind": "slack"}, "needs url_file or url_env"),
        ({"kind": "command"}, "needs command"),
        ({"kind": "command", "command": f"page {HUSH}"}, "command: needs a list"),
        ({"kind": "command", "command": []}, "command: needs a list of a program and its arguments"),
        ({"kind": "command", "command": ["", HUSH]}, "command: needs a list of a program and its arguments"),
        ({"kind": "command", "command": ["page", f"{HUSH}\0"]}, "command: entry 2: needs a text without NUL"),
        ({**SLACK, "url_file": "/f"}, "url_file and url_env: give one of them"),
        ({**HOOK, "username": HUSH}, "username: needs password_file or password_env"),
        ({**HOOK, "password_env": "P"}, "username: needs password_file or password_env"),
        ({**HOOK, "username": "a", "password_env": "P", "token_env": "T"}, "token and username: give one of them"),
        ({**HOOK, "username": "a:b", "password_env": "P"}, "a colon"),
        ({**HOOK, "severity": "loud"}, "severity: needs one of info, warning, critical"),
        ({**HOOK, "send_resolved": "yes"}, "send_resolved: needs true or false"),
        ({**HOOK, "repeat": 4}, "repeat: needs a time of at least a minute, such as 4h"),
        ({**HOOK, "repeat": "5s"}, "repeat: needs a time of at least a minute"),
        ({**HOOK, "name": "two words"}, "name: needs letters"),
        ({"kind": "email"}, "kind: needs one of"),
        ({**HOOK, "send_resolved": 1}, "send_resolved: needs true or false"),
        ({**HOOK, "a\nb": HUSH}, "unknown key 'a\\nb'"),
    ],
)  # fmt: skip
def test_wrong_table(table: dict[str, Any], says: str) -> None:
    """A wrong table is refused in one line that names the key and what would be right, and repeats no value."""
    with pytest.raises(BadValue) as caught:
        checked([HOOK, table])
    assert says in str(caught.value)
    assert str(caught.value).startswith("receivers: receiver 2")
    assert "\n" not in str(caught.value)
    assert HUSH not in str(caught.value)


VALUES = st.recursive(
    st.sampled_from([HUSH, f"http://{HUSH}", f"a@{HUSH}", "1h", "", 0, 1.5, True, -1]) | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=4,
)


@examples(300)
@given(st.data(), st.sampled_from([HOOK, SLACK, {"kind": "command"}, {"kind": "alertmanager"}]))
def test_any_table_is_read_or_refused(data: st.DataObject, table: dict[str, Any]) -> None:
    """Whatever a table has, it is read or refused in one line that repeats no value."""
    keys = sorted({key for known in KEYS.values() for key in known} - {"name"} | {"token", "a\nb"})
    found = {**table, **data.draw(st.dictionaries(st.sampled_from(keys), VALUES, max_size=4))}
    says = ""
    try:
        receivers(checked([found]), AGENT)
    except BadValue as error:
        says = str(error)
    assert says.isprintable()
    assert HUSH not in says


def test_names_are_different() -> None:
    """Two receivers of one name could not be told apart."""
    with pytest.raises(BadValue, match=r"receiver 2 \(webhook\): another receiver has this name"):
        checked([HOOK, {**HOOK, "url": "http://other"}])
    assert [each.name for each in checked([HOOK, {**HOOK, "name": "other"}])] == ["webhook", "other"]


def test_every_key_is_documented() -> None:
    """docs/alerts.md has a row for each key of each kind, with the kinds that take it, and no other."""
    text = (
        (Path(__file__).parents[2] / "docs" / "alerts.md").read_text(encoding="utf-8").partition("\n## Receivers\n")[2]
    )
    documented = {
        key: set(kinds.replace("`", "").split(", ")) if kinds.strip() != "all" else set(KEYS)
        for keys, kinds in re.findall(r"^\| (`[^|]*`) \| ([^|]*) \|", text, re.MULTILINE)
        for key in re.findall(r"`(\w+)`", keys)
    }
    known = {key for keys in KEYS.values() for key in keys}
    assert documented == {key: {kind for kind, keys in KEYS.items() if key in keys} for key in known}
