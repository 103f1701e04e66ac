"""The messages to each kind of receiver, compared with those of Alertmanager itself, and each kind of failure."""

from __future__ import annotations

import json
import os
import re
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from commwatch_alerts.delivery import Delivery, Retry
from commwatch_alerts.model import FIRING, RESOLVED, Alert
from commwatch_alerts.outbox import Batch, Policy
from commwatch_alerts.receivers import payload
from commwatch_alerts.receivers.command import Command
from commwatch_alerts.receivers.hooks import Alertmanager, Login, Slack, Webhook, slack
from commwatch_alerts.receivers.sending import CannotSend, Receiver, Secret, fingerprint, labels_of
from tests.helpers import PATIENCE_S, free_port, wait_for
from tests.receivers import NOON, Handler, Server, alert, alertmanager, status

AGENT = "http://agent:9477"
POLICY = Policy(4 * 3600.0)
OFTEN = Policy(60.0, 900.0, grouped=False)
GROUP = (("alertname", "CommShareHigh"), ("job_id", "train"))


def batch(*alerts: Alert) -> Batch:
    """A message."""
    return Batch(alerts or (alert(),), GROUP)


def refusal(send: Callable[[], object]) -> CannotSend:
    """What was raised."""
    with pytest.raises(CannotSend) as caught:
        send()
    return caught.value


# -- Alertmanager -------------------------------------------------------------------------------


def forms(value: Any) -> Any:
    """A payload with its forms in place of what differs from server to server: times, addresses, names."""
    if isinstance(value, dict):
        return {
            key: forms(each) if key not in ("receiver", "externalURL", "generatorURL") else "…"
            for key, each in value.items()
        }
    if isinstance(value, list):
        return [forms(each) for each in value]
    if isinstance(value, str) and value != payload.NO_TIME:
        return re.sub(r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?(Z|[+-]\d\d:\d\d)$", "a time", value)
    return value


def test_real_alertmanager(tmp_path: Path) -> None:
    """A real Alertmanager accepts firing alerts and their ends under our fingerprint, and sends the same to a webhook as our webhook receiver."""
    now = time.time()
    one = alert(rank="3", device="", text='a "quoted" \\ \N{SNOWMAN}\nname', at=now - 60)
    with Server() as theirs, Server() as ours, alertmanager(tmp_path, theirs.url) as running:
        to_it = Alertmanager("am", OFTEN, running.url, AGENT)
        to_hook = Webhook("ours", POLICY, ours.url, AGENT)
        for state in (FIRING, RESOLVED):
            said = replace(one, state=state, resolved_at=now if state == RESOLVED else None)
            to_it.send(batch(said), now)
            to_hook.send(batch(said), now)
            if state == FIRING:
                (held,) = running.alerts()
                assert held["fingerprint"] == fingerprint(labels_of(one))
                assert held["generatorURL"] == f"{AGENT}/api/v1/alerts"
                assert held["labels"] == labels_of(one)
            number = 1 if state == FIRING else 2
            wait_for(lambda number=number: len(theirs.asked) == number, "Alertmanager to tell")  # type: ignore[misc]
            assert theirs.asked[-1].json["status"] == state
            mine, its = ours.asked[-1].json, theirs.asked[-1].json
            assert list(mine) == list(its)
            assert forms(mine) == forms(its)
        assert running.alerts() == []
        assert theirs.asked[-1].headers["Content-Type"] == ours.asked[-1].headers["Content-Type"]


def test_two_alertmanagers_and_one_is_dead(tmp_path: Path) -> None:
    """Each of several Alertmanagers gets all alerts, even if another one is down."""
    with (
        Server() as hook,
        alertmanager(tmp_path / "one", hook.url) as one,
        alertmanager(tmp_path / "two", hook.url) as two,
    ):
        dead = f"http://127.0.0.1:{free_port()}"
        receivers = [Alertmanager(f"am/{n}", OFTEN, url, AGENT) for n, url in enumerate((dead, one.url, two.url), 1)]
        delivery = Delivery(receivers, retry=Retry(0.01, 0.05))
        try:
            many = [alert(job_id=f"job-{n % 10}", rank=str(n), at=time.time() - 60) for n in range(1000)]
            delivery.send(many)
            for running in (one, two):
                wait_for(lambda running=running: len(running.alerts()) == 1000, "all alerts")  # type: ignore[misc]
            delivery.send([replace(each, state=RESOLVED, resolved_at=time.time()) for each in many])
            for running in (one, two):
                wait_for(lambda running=running: running.alerts() == [], "all ends")  # type: ignore[misc]
            first = delivery.delivered()[0]
            assert (first.sent, first.dropped) == (0, 0)
            assert first.failed > 0
        finally:
            delivery.close(1.0)


def test_times_for_alertmanager() -> None:
    """A firing alert has no end, so that Alertmanager's own clock decides when it is over; nothing begins or ends later than now."""
    with Server() as server:
        to_it = Alertmanager("am", OFTEN, server.url, AGENT)
        ended = alert(state=RESOLVED)

        def times(one: Alert, now_s: float) -> tuple[str, str | None]:
            to_it.send(batch(one), now_s)
            (said,) = server.asked[-1].json
            return said["startsAt"][11:19], said["endsAt"][11:19] if "endsAt" in said else None

        assert times(alert(), NOON + 3600) == ("00:01:00", None)
        assert times(alert(), NOON) == ("00:00:00", None)
        assert times(ended, NOON + 3600) == ("00:01:00", "00:10:00")
        assert times(ended, NOON + 30) == ("00:00:30", "00:00:30")
        assert server.asked[-1].path == "/hook/api/v2/alerts"


# -- webhook and Slack --------------------------------------------------------------------------


def test_payload_of_a_group() -> None:
    """A message has what its alerts have in common, says how many were left out, and fires while one of them does."""
    fires, ended, left_out = alert(rank="1"), alert(rank="2", state=RESOLVED), alert(rank="3")
    said = payload.webhook(Batch((ended, fires), GROUP, (left_out,)), "hook", AGENT)
    assert said["status"] == FIRING
    assert said["truncatedAlerts"] == 1
    assert said["commonLabels"] == {"alertname": "CommShareHigh", "job_id": "train", "severity": "warning"}
    assert [(each["labels"]["rank"], each["status"], each["endsAt"]) for each in said["alerts"]] == [
        ("2", RESOLVED, "2026-11-21T00:10:00.000Z"),
        ("1", FIRING, payload.NO_TIME),
    ]


def test_links_to_the_incident() -> None:
    """Messages lead to the page of an alert's incident; a message on several incidents has a link to each, and to the list of all."""
    one, other = (
        replace(each, annotations={**each.annotations, "incident": number * 16})
        for each, number in ((alert(rank="1"), "1"), (alert(rank="2"), "2"))
    )
    pages = [f"{AGENT}/incidents/{number * 16}" for number in "12"]
    assert [each["generatorURL"] for each in payload.webhook(batch(one, other), "r", AGENT)["alerts"]] == pages
    assert Alertmanager("am", OFTEN, "http://am", AGENT)._alert(one, NOON)["generatorURL"] == pages[0]
    (said,) = slack(batch(one), AGENT)["attachments"]
    assert (said["title_link"], f"<{pages[0]}|incident>" in said["text"]) == (pages[0], True)
    (said,) = slack(batch(one, other), AGENT)["attachments"]
    assert said["title_link"] == f"{AGENT}/api/v1/alerts"
    assert all(f"<{each}|incident>" in said["text"] for each in pages)


def test_slack_message() -> None:
    """Slack gets title, numbers and links in one message; no text in it can mention people or hide a link."""
    bad = alert("Odd<!channel>", job_id="<@U1> & co")
    bad = replace(
        bad,
        annotations={"summary": "<!here> *x*", "description": "42% & more", "runbook_url": "https://r/?a=1&b=<x>|y"},
    )
    (said,) = slack(batch(bad, *(alert(rank=str(n)) for n in range(14))), AGENT)["attachments"]
    assert said["title"] == "[WARNING:15] CommShareHigh train"
    assert "&lt;!here&gt; *x*" in said["text"]
    assert "42% &amp; more" in said["text"]
    assert "<https://r/?a=1&amp;b=%3Cx%3E%7Cy|runbook>" in said["text"]
    assert re.findall(r"<[^h][^>]*>", said["text"]) == []
    assert said["text"].endswith("and 5 more")
    assert said["color"] == "warning"
    (critical,) = slack(batch(alert(severity="critical")), AGENT)["attachments"]
    (ended,) = slack(batch(alert(state=RESOLVED)), AGENT)["attachments"]
    assert (critical["color"], ended["color"], ended["title"]) == (
        "danger",
        "good",
        "[RESOLVED] CommShareHigh of a job",
    )
    left_out = replace(batch(alert()), truncated=(alert(severity="critical"),))
    assert slack(left_out, AGENT)["attachments"][0]["color"] == "danger"
    long = replace(alert(), annotations={"summary": "s", "description": "<" * 5000})
    assert len(slack(batch(*[long] * 10), AGENT)["attachments"][0]["text"]) <= 3100


# -- secrets ------------------------------------------------------------------------------------

TOKEN, PASSWORD, PATH = "tok-5e7a1c9b", "pass-w0rd-77", "services/T0/B0/hush-4411"


def test_logins_and_rotation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A token or password is read each time from its file or variable, so a new one counts at once."""
    file = tmp_path / "token"
    with Server() as server:
        by_token = Webhook("hook", POLICY, server.url, AGENT, Login(token=Secret("token_file", file=file)))
        for token in ("first", "second"):
            file.write_text(f"{token}\n")
            by_token.send(batch(), NOON)
            assert server.asked[-1].headers["Authorization"] == f"Bearer {token}"
        monkeypatch.setenv("OUR_PASSWORD", PASSWORD)
        login = Login(username="me", password=Secret("password_env", variable="OUR_PASSWORD"))
        Alertmanager("am", OFTEN, server.url, AGENT, login).send(batch(), NOON)
        assert server.asked[-1].headers["Authorization"] == "Basic bWU6cGFzcy13MHJkLTc3"
        monkeypatch.setenv("OUR_URL", server.url)
        Slack("slack", POLICY, Secret("url_env", variable="OUR_URL"), AGENT).send(batch(), NOON)
        assert server.asked[-1].path == "/hook"


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (None, "No such file"),
        (b"", "is empty"),
        (b"one\r\nInjected: header", "is more than one line"),
        (b"\xff\xfe", "is not text"),
        ("t\u00f6ken".encode(), "ASCII"),
    ],
)
def test_secret_that_cannot_be_used(tmp_path: Path, content: bytes | None, says: str) -> None:
    """A secret that is not there, or cannot stand in a header, is named by its setting, not by what it holds."""
    file = tmp_path / "secret"
    if content is not None:
        file.write_bytes(content)
    with Server() as server:
        found = refusal(lambda: Login(token=Secret("token_file", file=file)).headers() and None)
        assert says in str(found)
        assert "token_file" in str(found)
        assert "Injected" not in str(found)
        assert server.asked == []
    assert "url_env = NOT_SET: is empty" in str(
        refusal(lambda: Slack("s", POLICY, Secret("url_env", variable="NOT_SET"), AGENT).send(batch(), NOON))
    )


@pytest.mark.parametrize("answer", ["echo", "refused", "garbage", "dead", "bad address"])
def test_secrets_are_never_shown(
    answer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever a receiver answers, and wherever it leads, no log line, error, name or ``repr`` holds a secret or the path of a secret address."""

    def echo(handler: Handler) -> None:
        body = json.dumps([*handler.asked.headers.values(), handler.asked.path, handler.asked.path.split("/")])
        handler.wfile.write(f"HTTP/1.1 403 x\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode())

    def garbage(handler: Handler) -> None:
        handler.wfile.write(f"{handler.asked.headers}{handler.asked.path}\r\n\r\n".encode())

    ways = {"echo": echo, "refused": status(401, "who are you?"), "garbage": garbage}
    with Server(ways.get(answer, status(500))) as server:
        base = f"http://127.0.0.1:{free_port() if answer == 'dead' else server.port}"
        secret_url = "no address: " + PATH if answer == "bad address" else f"{base}/{PATH}"
        for name, value in (("TOKEN_V", TOKEN), ("PASSWORD_V", PASSWORD), ("URL_V", secret_url)):
            monkeypatch.setenv(name, value)
        token = Login(token=Secret("token_env", variable="TOKEN_V"))
        password = Login(username="me", password=Secret("password_env", variable="PASSWORD_V"))
        url = Secret("url_env", variable="URL_V")
        receivers: list[Receiver] = [
            Alertmanager("am", OFTEN, base, AGENT, password),
            Webhook("hook", POLICY, url, AGENT, token),
            Slack("slack", POLICY, url, AGENT),
        ]
        delivery = Delivery(receivers, retry=Retry(0.01, 0.05))
        delivery.send([alert()])
        wait_for(lambda: all(each.failed for each in delivery.delivered()), "the failures")
        delivery.close(PATIENCE_S)
        troubles = [refusal(lambda each=each: each.send(batch(), NOON)) for each in receivers]  # type: ignore[misc]
    shown = caplog.text + repr(receivers) + repr(delivery.delivered()) + "".join(map(repr, troubles))
    shown += "".join(repr((each.__cause__, each.__suppress_context__)) for each in troubles)
    assert len(caplog.records) >= 3
    for secret in (TOKEN, PASSWORD, PATH, "hush-4411", "bWU6cGFzcy13MHJkLTc3"):
        assert secret not in shown, secret


# -- commands -----------------------------------------------------------------------------------


def sh(script: str, *arguments: str, limit_s: float = PATIENCE_S, hidden: frozenset[str] = frozenset()) -> Command:
    """A command of the shell's."""
    return Command("command", POLICY, ("sh", "-c", script, "sh", *arguments), AGENT, hidden, limit_s=limit_s)


def test_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A command gets the webhook's payload on standard input, however long, the environment but for our secrets, and no shell of ours."""
    monkeypatch.setenv("OUR_TOKEN", TOKEN)
    monkeypatch.setenv("OTHER", "kept")
    many = batch(*(alert(rank=str(n)) for n in range(100)))
    script = 'cat > "$1"; env > "$2"; yes | head -c 1000000'
    command = sh(script, str(tmp_path / "said;$(touch bad)"), str(tmp_path / "env"), hidden=frozenset({"OUR_TOKEN"}))
    command.send(many, NOON)
    said = json.loads((tmp_path / "said;$(touch bad)").read_text())
    assert said == payload.webhook(many, "command", AGENT)
    assert TOKEN not in (tmp_path / "env").read_text()
    assert "OTHER=kept" in (tmp_path / "env").read_text()


@pytest.mark.parametrize(
    ("script", "says", "again"),
    [
        ("cat >/dev/null; echo no route; echo more; exit 3", "sh: exit code 3: no route", True),
        ("exit 1", "sh: exit code 1", True),
        ("kill -9 $$", "sh: ended by signal 9", True),
        ("echo $OUR_TOKEN; exit 1", "sh: exit code 1", True),
    ],
)
def test_command_that_fails(script: str, says: str, again: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error has the first line of a command's output and its exit code; the command is tried again."""
    monkeypatch.setenv("OUR_TOKEN", TOKEN)
    found = refusal(lambda: sh(script, hidden=frozenset({"OUR_TOKEN"})).send(batch(), NOON))
    assert (str(found), found.again) == (says, again)


def test_command_that_is_not_there() -> None:
    """A command that cannot be started is not tried again."""
    found = refusal(lambda: Command("c", POLICY, ("/no/such/program",), AGENT).send(batch(), NOON))
    assert (str(found), found.again) == ("/no/such/program: cannot be started: No such file or directory", False)


def test_command_without_room_for_its_input(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Where a command cannot be started for a reason that passes, it is tried again."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "nowhere"))
    assert refusal(lambda: sh("exit 0").send(batch(), NOON)).again


@contextmanager
def fifo(path: Path) -> Iterator[threading.Event]:
    """Return whether all processes with the writing end of a pipe have ended."""
    os.mkfifo(path)
    gone = threading.Event()

    def read() -> None:
        with open(path, "rb") as file:
            file.read()
        gone.set()

    threading.Thread(target=read, daemon=True).start()
    yield gone


def test_command_that_takes_too_long(tmp_path: Path) -> None:
    """A command that does not end is killed with its children."""
    with fifo(tmp_path / "alive") as gone:
        command = sh('exec 9>"$1"; sleep 1000 & sleep 1000', str(tmp_path / "alive"), limit_s=0.5)
        assert str(refusal(lambda: command.send(batch(), NOON))) == "sh: was killed after 0.5 s"
        assert gone.wait(PATIENCE_S)


def test_command_that_floods() -> None:
    """A command that prints without end is killed in time, and what it prints is not kept."""
    assert "was killed" in str(refusal(lambda: sh("exec yes", limit_s=0.5).send(batch(), NOON)))


def test_command_with_a_child_in_the_background(tmp_path: Path) -> None:
    """A command has ended even if a child continues and keeps its output open."""
    sh('sleep 1000 & echo $! > "$1"', str(tmp_path / "pid")).send(batch(), NOON)
    os.kill(int((tmp_path / "pid").read_text()), signal.SIGKILL)
