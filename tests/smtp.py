"""A mail server of our own."""

from __future__ import annotations

import base64
import contextlib
import socketserver
import ssl
from typing import Any

from tests.receivers import Listening


class Smtp(Listening):
    """A mail server: accepts mails, requires a login if it has one, and sends bad responses on request.

    Args:
        replies: by verb, a response that replaces the normal one.
        login: ``user\\0password`` that it accepts; ``None``: no login.
        tls: offers STARTTLS; with ``at_once`` it is encrypted from the beginning.
    """

    def __init__(
        self, login: str | None = None, tls: ssl.SSLContext | None = None, at_once: bool = False, **replies: str
    ) -> None:
        self.mails: list[tuple[str, list[str], bytes]] = []
        self._login, self._tls, self._at_once, self._replies = login, tls, at_once, replies
        outer = self

        class Served(socketserver.BaseRequestHandler):
            def handle(self) -> None:
                with contextlib.suppress(OSError):
                    outer._serve(self.request)

        super().__init__(Served)

    def _serve(self, connection: Any) -> None:
        if self._tls is not None and self._at_once:
            connection = self._tls.wrap_socket(connection, server_side=True)
        file, sender, to = connection.makefile("rwb"), "", list[str]()

        def say(text: str) -> None:
            file.write(text.encode() + b"\r\n")
            file.flush()

        while self._replies.get("greeting") == "drip" and not self.over.wait(0.02):
            say("220-slow")
        say(self._replies.get("greeting", "220 ready"))
        while line := file.readline().decode().strip():
            verb, _, rest = line.partition(" ")
            verb = verb.upper()
            if verb in self._replies:
                say(self._replies[verb])
            elif verb == "EHLO":
                say(self._offers())
            elif verb == "STARTTLS" and self._tls is not None:
                say("220 go on")
                connection = self._tls.wrap_socket(connection, server_side=True)
                file = connection.makefile("rwb")
            elif verb == "AUTH":
                given = base64.b64decode(rest.partition(" ")[2]).decode().lstrip("\0")
                say("235 in" if given == self._login else f"535 5.7.8 not with {given}")
            elif verb == "DATA":
                say("354 go on")
                body = b""
                while (piece := file.readline()) != b".\r\n":
                    body += piece
                self.mails.append((sender, to, body))
                say("250 taken")
            else:
                sender, to = (rest, to) if verb == "MAIL" else (sender, [*to, rest]) if verb == "RCPT" else (sender, to)
                say("221 bye" if verb == "QUIT" else "250 fine")

    def _offers(self) -> str:
        login, tls = self._login is not None, self._tls is not None and not self._at_once
        lines = ["ours", *["AUTH PLAIN"] * login, *["STARTTLS"] * tls]
        return "\r\n".join([*(f"250-{line}" for line in lines[:-1]), f"250 {lines[-1]}"])
