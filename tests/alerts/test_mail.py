"""E-mail: what is sent to a mail server, and what happens if the server does not accept it."""

from __future__ import annotations

from dataclasses import replace
from email import message_from_bytes
from email.policy import default
from pathlib import Path
from typing import Any

import pytest

from commwatch_alerts.outbox import Batch
from commwatch_alerts.receivers.mail import Mail
from commwatch_alerts.receivers.sending import Secret
from tests.alerts.test_receivers import AGENT, PASSWORD, POLICY, batch, refusal
from tests.helpers import free_port
from tests.receivers import NOON, alert, certificate
from tests.smtp import Smtp


def mail(server: Smtp | int, **more: Any) -> Mail:
    """A mailbox at a server."""
    port = server if isinstance(server, int) else server.port
    about = {"tls": "none", "limit_s": 5.0, **more}
    return Mail(
        "mail",
        POLICY,
        "127.0.0.1",
        port,
        "commwatch <watch@example.com>",
        to=("a@example.com", "b@example.com"),
        agent_url=AGENT,
        **about,
    )


def test_mail() -> None:
    """A mail has correct headers and a subject, describes the alerts in plain text, and goes to all recipients."""
    odd = replace(
        alert(job_id="tr\u00e4in\r\nBcc: x@example.com"),
        annotations={"summary": ".\r\nQUIT", "description": "42% \N{SNOWMAN}"},
    )
    with Smtp() as server:
        mail(server).send(
            Batch((odd, alert()), (("alertname", "CommShareHigh"), ("job_id", "tr\u00e4in\r\nBcc: x@example.com"))),
            NOON,
        )
        ((sender, to, body),) = server.mails
    assert sender.startswith("FROM:<watch@example.com>")
    assert to == ["TO:<a@example.com>", "TO:<b@example.com>"]
    said = message_from_bytes(body, policy=default)
    assert said["Subject"] == "[FIRING:2] CommShareHigh tr\u00e4in Bcc: x@example.com"
    assert (said["From"], said["To"], said["Bcc"]) == (
        "commwatch <watch@example.com>",
        "a@example.com, b@example.com",
        None,
    )
    assert said["Date"] == "Sat, 21 Nov 2026 00:00:00 -0000"
    assert said["Message-ID"].endswith("@example.com>")
    assert said.get_content_type() == "text/plain"
    text = said.get_content()
    for part in (
        "42% \N{SNOWMAN}",
        "FIRING CommShareHigh of a job",
        "runbook: https://runbook/#CommShareHigh",
        f"{AGENT}/api/v1/alerts",
    ):
        assert part in text


@pytest.mark.parametrize(
    "job", ["=?utf-8?q?a=0D=0ABcc:_x@example.com=0D=0A=0D=0Abody?=", "=?utf-8?q?=E9?=\u00e9", "=?utf-8?b?4pi6?="]
)
def test_mail_of_a_job_with_an_encoded_name(job: str) -> None:
    """A job's name that looks like an encoded word stays a name in the subject; it adds no header, and the mail can be sent."""
    with Smtp() as server:
        mail(server).send(Batch((alert(job_id=job),), (("alertname", "CommShareHigh"), ("job_id", job))), NOON)
        ((_, _, body),) = server.mails
    said = message_from_bytes(body, policy=default)
    assert said["Subject"].replace("= ?", "=?") == f"[FIRING:1] CommShareHigh {job}"
    assert (said["Bcc"], said["To"]) == (None, "a@example.com, b@example.com")
    assert said.get_content().startswith("FIRING CommShareHigh")


@pytest.mark.parametrize("tls", ["starttls", "ssl"])
def test_mail_with_tls_and_login(tls: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With STARTTLS or TLS from the beginning a login goes over the encrypted connection only, to a server that is trusted."""
    monkeypatch.setenv("MAIL_PASSWORD", PASSWORD)
    login: dict[str, Any] = {"username": "me", "password": Secret("password_env", variable="MAIL_PASSWORD"), "tls": tls}
    with certificate(tmp_path) as (context, file):
        with Smtp(f"me\0{PASSWORD}", context, tls == "ssl") as server:
            assert "TLS" in str(refusal(lambda: mail(server, **login).send(batch(), NOON)))
            monkeypatch.setenv("SSL_CERT_FILE", str(file))
            mail(server, **login).send(batch(), NOON)
            assert len(server.mails) == 1
        with Smtp("me\0other", context, tls == "ssl") as server:
            found = refusal(lambda: mail(server, **login).send(batch(), NOON))
            assert (found.again, "535" in str(found), PASSWORD in str(found)) == (False, True, False)
            assert server.mails == []
    with Smtp() as server:
        found = refusal(lambda: mail(server, **{**login, "tls": "starttls"}).send(batch(), NOON))
        assert "does not support STARTTLS" in str(found)


@pytest.mark.parametrize(
    ("replies", "says", "again"),
    [
        ({"greeting": "421 too busy"}, "answers 421 too busy", True),
        ({"greeting": "drip"}, "no answer within 0.5 s", True),
        ({"greeting": "HTTP/1.1 200 OK"}, "", True),
        ({"MAIL": "451 later"}, "answers 451 later", True),
        ({"MAIL": "550 not you"}, "answers 550 not you", False),
        ({"RCPT": "550 no such user"}, "a@example.com: 550 no such user", False),
    ],
)
def test_mail_that_is_not_taken(replies: dict[str, Any], says: str, again: bool) -> None:
    """The error has the response of the mail server: 4xx is tried again, 5xx is not; a server that sends too slowly is abandoned."""
    with Smtp(**replies) as server:
        found = refusal(lambda: mail(server, limit_s=0.5).send(batch(), NOON))
        assert says in str(found)
        assert found.again is again
        assert server.mails == []
    assert "connection refused" in str(refusal(lambda: mail(free_port()).send(batch(), NOON)))
