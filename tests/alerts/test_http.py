"""HTTP as receivers are spoken to: certificates, proxies, and pauses that they ask for."""

from __future__ import annotations

import socket
import threading
import time
from email.utils import formatdate
from pathlib import Path

import pytest

from commwatch_alerts.receivers.hooks import Webhook
from commwatch_alerts.receivers.http import post
from tests.alerts.test_receivers import AGENT, PASSWORD, POLICY, batch, refusal
from tests.receivers import NOON, Handler, Server, certificate, status


def test_https(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A certificate that nobody vouches for is refused; one that the system trusts is taken."""
    with certificate(tmp_path) as (context, file), Server(tls=context) as server:
        to_it = Webhook("hook", POLICY, server.url, AGENT)
        assert "TLS: self-signed certificate" in str(refusal(lambda: to_it.send(batch(), NOON)))
        assert server.asked == []
        monkeypatch.setenv("SSL_CERT_FILE", str(file))
        to_it.send(batch(), NOON)
        assert len(server.asked) == 1


def test_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    """The proxies of the environment are heeded, and so is ``no_proxy``."""
    with Server() as proxy, Server() as server:
        monkeypatch.setenv("http_proxy", f"http://me:{PASSWORD}@127.0.0.1:{proxy.port}")
        monkeypatch.setenv("no_proxy", "127.0.0.1")
        Webhook("hook", POLICY, server.url, AGENT).send(batch(), NOON)
        assert len(server.asked) == 1
        Webhook("hook", POLICY, "http://elsewhere.invalid/hook?x=1", AGENT).send(batch(), NOON)
        assert proxy.asked[0].path == "http://elsewhere.invalid/hook?x=1"
        assert proxy.asked[0].headers["Proxy-Authorization"] == "Basic bWU6cGFzcy13MHJkLTc3"


def test_proxy_that_needs_tls(monkeypatch: pytest.MonkeyPatch) -> None:
    """A proxy that must itself be reached over TLS is refused by name, without its password, and nothing is sent to it in the clear."""
    with Server() as proxy:
        monkeypatch.setenv("http_proxy", f"https://me:{PASSWORD}@127.0.0.1:{proxy.port}")
        error = refusal(lambda: Webhook("hook", POLICY, "http://elsewhere.invalid/hook", AGENT).send(batch(), NOON))
        assert str(error) == "the proxy https://127.0.0.1 is not supported; give one that starts with http://"
        assert not error.again
        assert proxy.asked == []


def tunnel(handler: Handler) -> None:
    """What a proxy does when it is asked for a tunnel."""
    host, _, port = handler.asked.path.partition(":")
    with socket.create_connection((host, int(port))) as there:
        handler.wfile.write(b"HTTP/1.1 200 go on\r\n\r\n")

        def back() -> None:
            while piece := there.recv(65536):
                handler.connection.sendall(piece)
            handler.connection.shutdown(socket.SHUT_WR)

        thread = threading.Thread(target=back)
        thread.start()
        while piece := handler.connection.recv(65536):
            there.sendall(piece)
        there.shutdown(socket.SHUT_WR)
        thread.join()


def test_https_through_a_proxy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Through a proxy the certificate is still the receiver's, and the proxy sees neither path nor message."""
    with certificate(tmp_path) as (context, file), Server(tls=context) as server, Server(tunnel) as proxy:
        monkeypatch.setenv("https_proxy", f"http://me:{PASSWORD}@127.0.0.1:{proxy.port}")
        monkeypatch.setenv("no_proxy", "")
        monkeypatch.setenv("SSL_CERT_FILE", str(file))
        Webhook("hook", POLICY, server.url, AGENT).send(batch(), NOON)
        assert [asked.path for asked in server.asked] == ["/hook"]
        assert [asked.path for asked in proxy.asked] == [f"127.0.0.1:{server.port}"]
        assert "Authorization" not in server.asked[0].headers
        assert "Proxy-Authorization" not in server.asked[0].headers


@pytest.mark.parametrize(
    ("header", "low", "high"),
    [("7", 7, 7), (600, 1, 600), ("999999999", 900, 900), (formatdate(0), 0, 0)],
)
def test_pause(header: str | int, low: float, high: float) -> None:
    """A pause may be asked for in seconds or as a date; none is longer than a quarter of an hour."""
    # A date so many seconds from now: tests are collected long before they run.
    text = header if isinstance(header, str) else formatdate(time.time() + header, usegmt=True)
    with Server(status(503, "", Retry_After=text)) as server:
        after_s = refusal(lambda: post(server.url, b"{}", {})).after_s
        assert after_s is not None
        assert low <= after_s <= high


def test_pause_that_makes_no_sense() -> None:
    """A pause that cannot be read is none."""
    with Server(status(503, "", Retry_After="soon"), status(400, "", Retry_After="7")) as server:
        assert refusal(lambda: post(server.url, b"{}", {})).after_s is None
        assert refusal(lambda: post(server.url, b"{}", {})).after_s is None
