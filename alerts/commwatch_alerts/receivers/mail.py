"""A receiver that sends plain-text e-mail by SMTP."""

from __future__ import annotations

import contextlib
import logging
import smtplib
import ssl
from dataclasses import KW_ONLY, dataclass
from email.message import EmailMessage
from email.utils import formatdate, make_msgid

from commwatch_alerts.outbox import Batch, Policy
from commwatch_alerts.receivers import payload
from commwatch_alerts.receivers.http import in_time
from commwatch_alerts.receivers.sending import LIMIT_S, CannotSend, Secret, said

log = logging.getLogger("commwatch")

STARTTLS, SSL, PLAIN = TLS = ("starttls", "ssl", "none")
PORTS = {STARTTLS: 587, SSL: 465, PLAIN: 25}
_MOST_SUBJECT = 200


@dataclass(frozen=True)
class Mail:
    """One or more mailboxes, reached through one SMTP server."""

    name: str
    policy: Policy
    host: str
    port: int
    sender: str
    _: KW_ONLY
    to: tuple[str, ...]
    agent_url: str
    tls: str = STARTTLS
    username: str | None = None
    password: Secret | None = None
    limit_s: float = LIMIT_S

    def send(self, batch: Batch, now_s: float) -> None:
        """Send a message at the Unix time ``now_s``; raise CannotSend."""
        password = "" if self.password is None else self.password.read()
        where = f"{self.host}:{self.port}"
        message = self.message(batch, now_s)
        server = self._server()
        with in_time(self.limit_s, lambda: getattr(server, "sock", None)) as is_late:
            try:
                self._converse(server, message, password)
            except smtplib.SMTPResponseException as error:
                text = said(error.smtp_error, *([password] if password else []))
                raise CannotSend(f"{where}: answers {error.smtp_code} {text}", again=error.smtp_code < 500) from None
            except smtplib.SMTPRecipientsRefused as error:
                raise _refused(where, error.recipients) from None
            except smtplib.SMTPNotSupportedError:
                needs = "does not support STARTTLS or login; set tls to ssl or none, or leave out the username"
                raise CannotSend(f"{where}: {needs}", again=False) from None
            except ssl.SSLError as error:
                raise CannotSend(
                    f'{where}: TLS: {error.reason or "no handshake"}; is tls = "{self.tls}" right?'
                ) from None
            except (OSError, smtplib.SMTPException, ValueError) as error:
                late = is_late() or isinstance(error, TimeoutError)
                why = f"no answer within {self.limit_s:g} s" if late else _why(error)
                raise CannotSend(f"{where}: {why}") from None
            finally:
                server.close()

    def _server(self) -> smtplib.SMTP:
        if self.tls == SSL:
            return smtplib.SMTP_SSL(timeout=self.limit_s, context=ssl.create_default_context())
        return smtplib.SMTP(timeout=self.limit_s)

    def _converse(self, server: smtplib.SMTP, message: EmailMessage, password: str) -> None:
        server._host = self.host  # type: ignore[attr-defined]  # the name that TLS checks the certificate for
        code, text = server.connect(self.host, self.port)
        if code != 220:
            raise smtplib.SMTPResponseException(code, text)
        if self.tls == STARTTLS:
            server.starttls(context=ssl.create_default_context())
        if self.username is not None:
            server.login(self.username, password)
        refused = server.send_message(message)
        if refused:  # no error: the other recipients must not get the message again
            log.warning("receiver %s: %s", self.name, _refused(self.host, refused))
        with contextlib.suppress(OSError, smtplib.SMTPException):  # the message was accepted
            server.quit()

    def message(self, batch: Batch, now_s: float) -> EmailMessage:
        """Return the e-mail for ``batch``, dated ``now_s`` (Unix time)."""
        mail = EmailMessage()
        # A header is decoded when it is set: an encoded word in a label could add headers.
        title = said(payload.title(batch)).replace("=?", "= ?")
        mail["Subject"] = title[:_MOST_SUBJECT] or "alert"
        mail["From"], mail["To"] = self.sender, ", ".join(self.to)
        mail["Date"] = formatdate(now_s)
        mail["Message-ID"] = make_msgid(domain=self.sender.rpartition("@")[2].rstrip(">"))
        mail["Auto-Submitted"] = "auto-generated"
        mail.set_content(payload.text(batch, self.agent_url).encode("utf-8", "replace").decode())
        mail.as_bytes()  # raises ValueError now, rather than while it is sent
        return mail


def _refused(where: str, recipients: dict[str, tuple[int, bytes]]) -> CannotSend:
    again = all(code < 500 for code, _ in recipients.values())
    refusals = "; ".join(f"{address}: {code} {said(text)}" for address, (code, text) in recipients.items())
    return CannotSend(f"{where}: refused {said(refusals)}", again=again)


def _why(error: Exception) -> str:
    if isinstance(error, ConnectionRefusedError):
        return "connection refused"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return f"does not answer as SMTP ({type(error).__name__})"
