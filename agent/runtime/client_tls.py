"""TLS of requests to agents and receivers: the context, renewed with its files."""

from __future__ import annotations

import logging
import ssl
import threading
from pathlib import Path

log = logging.getLogger("commwatch")


def tls_context(ca_file: Path | None, client_cert: Path | None, prefix: str = "") -> ssl.SSLContext:
    """Return a client's TLS context.

    Args:
        ca_file: ``None``: the CAs that the system trusts.
        client_cert: with its key; ``None``: none.
        prefix: of the two settings, for the error.

    Raises:
        OSError: a file cannot be read, or is not a certificate; the text names the setting and the file.
    """
    try:
        context = ssl.create_default_context(cafile=ca_file)
    except (OSError, ValueError) as error:
        raise OSError(f"{prefix}ca_file {ca_file}: {getattr(error, 'strerror', None) or error}") from None
    if client_cert is not None:
        try:
            context.load_cert_chain(client_cert, password=no_password)
        except (OSError, ValueError) as error:
            raise OSError(f"{prefix}client_cert {client_cert}: {getattr(error, 'strerror', None) or error}") from None
    return context


def no_password() -> str:
    """Return an empty password: without this callback OpenSSL would ask on the terminal."""
    return ""


class TlsFiles:
    """The files of a client's TLS context, which may be renewed while the process runs.

    Args:
        ca_file, client_cert, prefix: as for ``tls_context``.
    """

    def __init__(self, ca_file: Path | None, client_cert: Path | None, prefix: str = "") -> None:
        self._ca_file, self._client_cert, self._prefix = ca_file, client_cert, prefix
        self._lock = threading.Lock()
        self._context: ssl.SSLContext | None = None
        #: State of the files when they were loaded, to detect changes.
        self._loaded: object = None

    def context(self) -> ssl.SSLContext:
        """Return the context with the files as they are; if they have changed and are not usable, with the files as they were, and log why.

        Raises:
            OSError: they have not been usable yet; the text names the setting and the file.
        """
        with self._lock:
            state = [None if path is None else state_of(path) for path in (self._ca_file, self._client_cert)]
            if self._context is None or state != self._loaded:
                try:
                    self._context = tls_context(self._ca_file, self._client_cert, self._prefix)
                except OSError as error:
                    if self._context is None:
                        raise
                    log.warning("certificate not changed: %s", error)
                self._loaded = state
            return self._context


def state_of(path: Path) -> tuple[int, int, int] | None:
    """Return what differs once a file has changed; ``None``: it cannot be found, as while it is being replaced."""
    try:
        about = path.stat()
    except OSError:
        return None
    return about.st_mtime_ns, about.st_ino, about.st_size
