"""The receiver that the settings name: its address, headers and TLS. Files are read again at each use or change."""

from __future__ import annotations

import re
import ssl
from collections.abc import Mapping

from commwatch.api.client_tls import TlsFiles
from commwatch.wire import crossing
from commwatch_agent.config import Config
from commwatch_agent.config_checks import ConfigError

_MOST_BYTES = 1 << 16
_HEADER = re.compile(r"([!#$%&'*+.^_`|~0-9A-Za-z-]+)\s*:\s*([\x21-\x7e](?:[\x20-\x7e]*[\x21-\x7e])?)")
#: Headers that are the agent's own.
_OURS = ("content-type", "content-encoding", "content-length", "transfer-encoding", "connection", "host")


class Endpoint:
    """An OTLP/HTTP receiver.

    Raises:
        ConfigError: the file of headers, the CA or the client certificate cannot be used.
    """

    def __init__(self, config: Config) -> None:
        assert config.otlp_endpoint is not None
        self.url = config.otlp_endpoint
        self._headers_file = config.otlp_headers_file
        self._files = TlsFiles(config.otlp_ca_file, config.otlp_client_cert, "otlp_")
        try:
            self.headers()
            self.context()
        except (OSError, ValueError) as error:
            raise ConfigError(str(error)) from None

    def headers(self) -> Mapping[str, str]:
        """Return the headers in the file.

        Raises:
            OSError, ValueError: the file cannot be read, or a line is wrong; the text has the file and the line's number, not the line.
        """
        path = self._headers_file
        if path is None:
            return {}
        try:
            lines = crossing.read(path, _MOST_BYTES, crossing.operator()).decode("latin-1").splitlines()
        except OSError as error:
            raise OSError(f"otlp_headers_file {path}: {error.strerror}") from None
        found = {}
        for number, line in enumerate(lines, 1):
            text = line.strip()
            if not text or text.startswith("#"):
                continue
            header = _HEADER.fullmatch(text)
            if header is None or header[1].lower() in _OURS:
                raise ValueError(
                    f"otlp_headers_file {path}: line {number}: needs a header, such as Authorization: Bearer TOKEN"
                )
            found[header[1]] = header[2]
        return found

    def context(self) -> ssl.SSLContext | None:
        """Return ``TlsFiles.context``, which may raise OSError; ``None``: the endpoint is ``http``."""
        return self._files.context() if self.url.startswith("https:") else None
