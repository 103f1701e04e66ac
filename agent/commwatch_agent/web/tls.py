"""TLS of an agent: the context that it listens with, and renewed certificates without a restart."""

from __future__ import annotations

import logging
import ssl
from pathlib import Path

from commwatch.api.client_tls import no_password, readable, state_of
from commwatch.wire.errors import CommwatchError

log = logging.getLogger("commwatch")


class BadCertificate(CommwatchError):
    """A file is not a usable certificate or key; the message names it."""

    names_command = False


def listening(cert: Path, key: Path, client_ca: Path | None) -> ssl.SSLContext:
    """Return the context that an agent listens with: TLS 1.2 or later.

    Args:
        client_ca: clients need a certificate that one of these has signed; ``None``: they need none.

    Raises:
        BadCertificate: a file cannot be read, or is not a usable certificate or key.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        with readable(cert) as certificate, readable(key) as secret:
            context.load_cert_chain(certificate or cert, secret, no_password)
    except (OSError, ValueError) as error:
        raise BadCertificate(f"tls_cert {cert}, tls_key {key}: {_why(error)}") from None
    if client_ca is not None:
        try:
            with readable(client_ca) as authority:
                context.load_verify_locations(authority)
        except (OSError, ValueError) as error:
            raise BadCertificate(f"tls_client_ca {client_ca}: {_why(error)}") from None
        context.verify_mode = ssl.CERT_REQUIRED
    return context


class Certificates:
    """The context that an agent listens with, from its files: certificate, key, and the CA of client certificates.

    Raises:
        BadCertificate: a file cannot be read, or is not a usable certificate or key.
    """

    def __init__(self, cert: Path, key: Path, client_ca: Path | None) -> None:
        self._cert, self._key, self._client_ca = cert, key, client_ca
        #: State of the files in use, to detect changes.
        self.known = self._state()
        #: The context for the next connection.
        self.context = listening(cert, key, client_ca)

    def renew(self) -> None:
        """Load the files if they have changed; if they are not usable, log why and keep the certificate in use."""
        state = self._state()
        if state == self.known or state is None:
            return
        self.known = state
        try:
            self.context = listening(self._cert, self._key, self._client_ca)
        except BadCertificate as error:
            log.warning("certificate not changed: %s", error)
        else:
            log.info("using the new certificate in %s", self._cert)

    def _state(self) -> object:
        found = [state_of(path) for path in (self._cert, self._key, self._client_ca) if path is not None]
        return None if None in found else found


def _why(error: Exception) -> str:
    if isinstance(error, ssl.SSLError):
        return f"not a certificate with its key, in PEM, without a password ({error.reason or 'nothing in it'})"
    return str(getattr(error, "strerror", None) or error)
