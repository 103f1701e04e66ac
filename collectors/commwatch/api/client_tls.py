"""TLS of requests to agents and receivers: the context, renewed with its files."""

from __future__ import annotations

import logging
import os
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from commwatch.wire import crossing

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
        with readable(ca_file) as ca:
            context = ssl.create_default_context(cafile=ca)
    except (OSError, ValueError) as error:
        raise OSError(f"{prefix}ca_file {ca_file}: {getattr(error, 'strerror', None) or error}") from None
    if client_cert is not None:
        try:
            with readable(client_cert) as cert:
                context.load_cert_chain(cert or client_cert, password=no_password)
        except (OSError, ValueError) as error:
            raise OSError(f"{prefix}client_cert {client_cert}: {getattr(error, 'strerror', None) or error}") from None
    return context


@contextmanager
def readable(path: Path | None) -> Iterator[str | None]:
    """Yield a name of a file that only this user and root can have written, for OpenSSL, which opens it itself; ``None`` for ``None``.

    Raises:
        OSError: it cannot be opened, or others can have written it.
    """
    if path is None:
        yield None
        return
    fd = crossing.open_file(Path(path), crossing.operator())
    try:
        yield f"/proc/self/fd/{fd}"
    finally:
        os.close(fd)


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
