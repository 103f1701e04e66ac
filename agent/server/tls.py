"""TLS of an agent: the context that it listens with, and renewed certificates without a restart."""

from __future__ import annotations

import logging
import ssl
from pathlib import Path

log = logging.getLogger("commwatch")


class BadCertificate(Exception):
    """A file does not hold what it should; the message names it."""


def listening(cert: Path, key: Path, client_ca: Path | None) -> ssl.SSLContext:
    """The context of an agent: TLS 1.2 or later.

    Args:
        client_ca: only clients with a certificate of one of these are let in.

    Raises:
        BadCertificate: a file cannot be read, or does not hold what it should.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        context.load_cert_chain(cert, key, _no_password)
    except (OSError, ValueError) as error:
        raise BadCertificate(f"tls_cert {cert}, tls_key {key}: {_why(error)}") from None
    if client_ca is not None:
        try:
            context.load_verify_locations(client_ca)
        except (OSError, ValueError) as error:
            raise BadCertificate(f"tls_client_ca {client_ca}: {_why(error)}") from None
        context.verify_mode = ssl.CERT_REQUIRED
    return context


class Certificates:
    """What an agent listens with, out of its files: certificate, key, and who signs its clients'.

    Raises:
        BadCertificate: as ``listening``.
    """

    def __init__(self, cert: Path, key: Path, client_ca: Path | None) -> None:
        self._cert, self._key, self._client_ca = cert, key, client_ca
        #: Tells what is in use from what was there before.
        self.known = self._state()
        #: For the next connection.
        self.context = listening(cert, key, client_ca)

    def renew(self) -> None:
        """Look at the files, and load them if they have changed and fit each other; what goes wrong is said."""
        state = self._state()
        if state == self.known or state is None:
            return
        self.known = state
        try:
            self.context = listening(self._cert, self._key, self._client_ca)
        except BadCertificate as error:
            log.warning("the certificate stays as it is: %s", error)
        else:
            log.info("took up the certificate in %s", self._cert)

    def _state(self) -> object:
        try:
            found = [path.stat() for path in (self._cert, self._key, self._client_ca) if path is not None]
        except OSError:  # being replaced
            return None
        return [(about.st_mtime_ns, about.st_ino, about.st_size) for about in found]


def _no_password() -> str:
    """Nobody is there to be asked for one."""
    return ""


def _why(error: Exception) -> str:
    if isinstance(error, ssl.SSLError):
        return f"not a certificate with its key, in PEM, without a password ({error.reason or 'nothing in it'})"
    return str(getattr(error, "strerror", None) or error)
