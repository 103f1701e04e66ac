"""TLS of an agent with certificates made here: who is let in, renewal, and that nothing is open by mistake."""

from __future__ import annotations

import json
import shutil
import socket
import ssl
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import NamedTuple
from urllib.request import urlopen

import pytest

from commwatch.api.client import Keys, get
from commwatch_agent.config_checks import ConfigError
from commwatch_agent.config_sources import load
from commwatch_agent.notify.delivery_setup import address_of, url_of
from commwatch_agent.web import http_protocol
from commwatch_agent.web.listener import listen
from commwatch_agent.web.tls import listening
from tests.helpers import PATIENCE_S, agent, clean_env, commwatch, fetch, needs, wait_for
from tests.serving import Served, serving


class Authority(NamedTuple):
    """Somebody who signs certificates."""

    directory: Path
    name: str

    @property
    def cert(self) -> Path:
        return self.directory / f"{self.name}.pem"

    def signed(self, name: str, *where: str) -> tuple[Path, Path]:
        """Certificate and key for these addresses."""
        key, request, cert = (self.directory / f"{name}.{kind}" for kind in ("key", "csr", "crt"))
        subject = ("-subj", f"/CN={name}", "-addext", f"subjectAltName={','.join(where) or 'DNS:nobody.invalid'}")
        _openssl("req", "-newkey", "rsa:2048", "-nodes", "-keyout", key, "-out", request, *subject)
        by = ("-CA", self.cert, "-CAkey", self.directory / f"{self.name}.key", "-CAcreateserial")
        _openssl("x509", "-req", "-in", request, *by, "-days", "2", "-copy_extensions", "copy", "-out", cert)
        return cert, key


def _openssl(*words: str | Path) -> None:
    subprocess.run(["openssl", *map(str, words)], check=True, capture_output=True)


def authority(directory: Path, name: str) -> Authority:
    """A new one."""
    needs(shutil.which("openssl"), "openssl")
    made = Authority(directory, name)
    key = ("-newkey", "rsa:2048", "-nodes", "-keyout", directory / f"{name}.key")
    _openssl("req", "-x509", *key, "-out", made.cert, "-days", "2", "-subj", f"/CN={name}")
    return made


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    """Whom agents and clients here believe."""
    return authority(tmp_path_factory.mktemp("ours"), "ours")


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    """Somebody else."""
    return authority(tmp_path_factory.mktemp("theirs"), "theirs")


@pytest.fixture(scope="module")
def node(ours: Authority) -> tuple[Path, Path]:
    """Certificate and key of this machine."""
    return ours.signed("node", "DNS:localhost", "IP:127.0.0.1", f"DNS:{socket.gethostname()}")


def settings_of(node: tuple[Path, Path], *more: str) -> str:
    """Lines of a settings file."""
    return "\n".join((f"tls_cert = {str(node[0])!r}", f"tls_key = {str(node[1])!r}", *more))


def believing(by: Authority, client: tuple[Path, Path] | None = None) -> ssl.SSLContext:
    """The context of a client."""
    context = ssl.create_default_context(cafile=by.cert)
    if client is not None:
        context.load_cert_chain(*client)
    return context


def fetching(context: ssl.SSLContext) -> Callable[[str], tuple[bytes, str]]:
    """Return what asks an agent over TLS."""

    def ask(url: str) -> tuple[bytes, str]:
        with urlopen(url, timeout=30, context=context) as response:
            return response.read(), response.headers["Content-Type"]

    return ask


# -- who is let in --------------------------------------------------------------------------------


def test_tls(tmp_path: Path, ours: Authority, theirs: Authority, node: tuple[Path, Path]) -> None:
    """An agent with a certificate answers over TLS alone, 1.2 or later; a login's cookie is for TLS alone, too."""
    with serving(tmp_path / "run", settings=settings_of(node, "require_token = true")) as served:
        done = served.ask("/login", "POST", f"token={served.token}".encode(), context=believing(ours))
        name, *attributes = done.headers["set-cookie"].replace("; ", ";").split(";")
        assert (name.startswith("__Host-"), "Secure" in attributes) == (True, True)
        assert served.ask("/", context=believing(ours), cookie=name).status == 200
        with pytest.raises(ssl.SSLCertVerificationError):
            served.ask(context=believing(theirs))
        assert served.ask().status == 400
    assert listening(*node, None).minimum_version == ssl.TLSVersion.TLSv1_2


def test_doctor_without_the_authority(tmp_path: Path, ours: Authority, node: tuple[Path, Path]) -> None:
    """`doctor` that does not know who signed an agent's certificate asks for the authority, and does not blame the agent."""
    file = tmp_path / "settings.toml"
    file.write_text(settings_of(node))
    with agent(tmp_path / "run", "--config", str(file), fetch=fetching(believing(ours))):
        done = commwatch("doctor", "--dir", tmp_path / "run", env=clean_env())
    (line,) = [line for line in done.stdout.splitlines() if line.split()[:2] == ["fail", "agent"]]
    assert "CERTIFICATE_VERIFY_FAILED" in line
    assert "urlopen" not in line
    assert "-> name the certificate of the authority that signed the agent's: --ca-file FILE" in done.stdout.replace(
        "\n", " "
    )


def test_client_certificates(tmp_path: Path, ours: Authority, theirs: Authority, node: tuple[Path, Path]) -> None:
    """If client certificates are required, the handshake fails without one from the right authority."""
    with serving(tmp_path / "run", settings=settings_of(node, f"tls_client_ca = {str(ours.cert)!r}")) as served:
        assert served.ask(context=believing(ours, ours.signed("client"))).status == 200
        for context in (believing(ours), believing(ours, theirs.signed("stranger"))):
            with pytest.raises(OSError, match=r"(?i)alert|reset|broken|closed"):
                served.ask(context=context)


def _subject(served: Served, by: Authority) -> str:
    with served.connect() as plain, believing(by).wrap_socket(plain, server_hostname="localhost") as connection:
        found = connection.getpeercert()
    assert found is not None
    return str(found["subject"])


def test_renewal(
    tmp_path: Path, ours: Authority, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A renewed certificate is taken up while the agent runs; one that does not fit its key, or is none, leaves it with the old."""
    monkeypatch.setattr("commwatch_agent.web.listener._RENEWAL_S", 0)
    pair = (tmp_path / "tls.crt", tmp_path / "tls.key")

    def put(new: tuple[Path, Path]) -> None:
        for source, target in zip(new, pair, strict=True):
            shutil.copy(source, target)

    put(ours.signed("first", "DNS:localhost"))
    second = ours.signed("second", "DNS:localhost")
    with serving(tmp_path / "run", settings=settings_of(pair)) as served:
        assert "first" in _subject(served, ours)
        shutil.copy(second[0], pair[0])  # a certificate whose key has not come yet
        wait_for(lambda: "certificate not changed" in caplog.text, "the agent to have looked")
        assert served.ask(context=believing(ours)).status == 200
        assert "first" in _subject(served, ours)
        shutil.copy(second[1], pair[1])
        wait_for(lambda: "second" in _subject(served, ours), "the renewed certificate")
        pair[0].write_text("nothing")
        assert "second" in _subject(served, ours)


# -- before the handshake -------------------------------------------------------------------------


def test_silent_before_the_handshake(
    tmp_path: Path, ours: Authority, node: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Connections that have not shown that they speak TLS are counted among the others: the oldest gives way, and nobody is kept out."""
    monkeypatch.setattr(http_protocol, "MOST_CONNECTIONS", 5)
    monkeypatch.setattr(http_protocol, "REQUEST_S", 3600)
    with serving(tmp_path / "run", settings=settings_of(node)) as served, ExitStack() as stack:
        silent = []
        for n in range(12):
            silent.append(stack.enter_context(served.connect()))
            silent[-1].sendall(b"\x16\x03\x01"[: n % 4])  # as a handshake begins
            assert served.ask("/healthz", context=believing(ours)).status == 200
        for one in silent[:7]:
            one.settimeout(PATIENCE_S)
            with suppress(ConnectionResetError):
                assert one.recv(1) == b""


@pytest.mark.parametrize("begun", [b"", b"\x16\x03\x01\x02\x00"])
def test_slow_handshake(
    tmp_path: Path, ours: Authority, node: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, begun: bytes
) -> None:
    """Who does not come to the end of a handshake is let go as who does not come to the end of a request is."""
    monkeypatch.setattr(http_protocol, "REQUEST_S", 0.2)
    with serving(tmp_path / "run", settings=settings_of(node)) as served, served.connect() as slow:
        slow.sendall(begun)
        slow.settimeout(PATIENCE_S)
        with suppress(ConnectionResetError):
            assert slow.recv(1) == b""
        monkeypatch.setattr(http_protocol, "REQUEST_S", 10)
        assert served.ask("/healthz", context=believing(ours)).status == 200


def test_request_right_behind_the_handshake(tmp_path: Path, ours: Authority, node: tuple[Path, Path]) -> None:
    """A request in one piece with the end of the handshake is answered; one that came before it, in the clear, never is."""
    request = b"GET / HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
    with serving(tmp_path / "run", settings=settings_of(node)) as served:
        for _ in range(20):
            incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
            client = believing(ours).wrap_bio(incoming, outgoing, server_hostname="localhost")
            with served.connect() as plain:
                while True:
                    try:
                        client.do_handshake()
                        break
                    except ssl.SSLWantReadError:
                        plain.sendall(outgoing.read())
                        incoming.write(plain.recv(65536))
                client.write(request)
                plain.sendall(outgoing.read())  # the client's end of the handshake, and the request
                said = b""
                while not said:
                    incoming.write(plain.recv(65536))
                    with suppress(ssl.SSLWantReadError):
                        said = client.read(65536)
            assert said.startswith(b"HTTP/1.1 200")
        with served.connect() as plain, suppress(ConnectionError):
            plain.sendall(request + b"\x16\x03\x01")
            assert b"HTTP/1.1 200" not in plain.recv(65536)


# -- commands -------------------------------------------------------------------------------------


@pytest.fixture
def client_pem(tmp_path: Path, ours: Authority) -> Path:
    """A client's certificate and key in one file."""
    cert, key = ours.signed("command")
    both = tmp_path / "client.pem"
    both.write_text(cert.read_text() + key.read_text())
    return both


def test_commands_over_tls(tmp_path: Path, ours: Authority, node: tuple[Path, Path], client_pem: Path) -> None:
    """Commands ask an agent over TLS, with its authority and their certificate from flag or environment, and its token by themselves."""
    file = tmp_path / "agent.toml"
    file.write_text(settings_of(node, "require_token = true", f"tls_client_ca = {str(ours.cert)!r}"))
    ask = fetching(believing(ours, (client_pem, client_pem)))
    with agent(tmp_path / "run", "--config", str(file), fetch=ask) as running:
        assert running.url.startswith("https://127.0.0.1:")
        where = ("diagnose", "--dir", running.directory)
        flags = ("--ca-file", ours.cert, "--client-cert", client_pem)
        assert commwatch(*where, *flags).stdout == "no running job\n"
        env = clean_env(COMMWATCH_CA_FILE=str(ours.cert), COMMWATCH_CLIENT_CERT=str(client_pem))
        assert commwatch(*where, env=env).stdout == "no running job\n"
        assert "self-signed" in commwatch(*where, "--client-cert", client_pem).stderr
        refused = commwatch(*where, "--ca-file", tmp_path / "none.pem")
        assert (refused.returncode, str(tmp_path / "none.pem") in refused.stderr) == (2, True), refused.stderr
        assert "Traceback" not in refused.stderr


def test_renewal_for_requests(
    tmp_path: Path,
    ours: Authority,
    theirs: Authority,
    node: tuple[Path, Path],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The files of requests to other agents are read again once they have changed, as certificates are renewed while an agent runs."""
    ca_file, both = tmp_path / "ca.pem", tmp_path / "both.pem"
    keys = Keys(ca_file=ca_file, client_cert=both)

    def renew(trusted: Authority, by: Authority) -> None:
        shutil.copy(trusted.cert, ca_file)
        cert, key = by.signed("renewed")
        both.write_text(cert.read_text() + key.read_text())

    with serving(tmp_path / "run", settings=settings_of(node, f"tls_client_ca = {str(ours.cert)!r}")) as served:
        url = f"https://127.0.0.1:{served.port}"
        renew(theirs, by=ours)
        with pytest.raises(OSError, match="self-signed certificate"):
            get(url, "jobs", keys)
        renew(ours, by=theirs)
        with pytest.raises(OSError, match=r"(?i)alert|reset|broken|closed"):
            get(url, "jobs", keys)
        cert, key = ours.signed("client")
        both.write_text(cert.read_text() + key.read_text())
        assert get(url, "jobs", keys) == 0
        # Files that are not usable leave the ones before them in use.
        both.write_text("no certificate")
        assert get(url, "jobs", keys) == 0
        assert [record.message.partition(":")[0] for record in caplog.records] == ["certificate not changed"]


def test_plain_http(tmp_path: Path, ours: Authority, node: tuple[Path, Path]) -> None:
    """A request in plain HTTP, also a large one or one that comes in pieces, gets a 400 with one plain line; TLS goes on."""
    with serving(tmp_path / "run", settings=settings_of(node)) as served:
        for parts in (
            (b"GET /metrics HTTP/1.1\r\nHost: a\r\n\r\n",),
            (b"P", b"OST / HTTP/1.1\r\n\r\n" + b"x" * 500_000),
        ):
            with served.connect() as client:
                for part in parts:
                    client.sendall(part)
                answer = b"".join(iter(lambda: client.recv(4096), b""))
            head, _, body = answer.partition(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 400 ")
            assert body == b"this agent listens with TLS: ask with https:// instead of http://\n"
        for silent in (b"", b"\x00", b"\x16\x03"):
            with served.connect() as client:
                client.sendall(silent)
        assert served.ask(context=believing(ours)).status == 200


# -- nothing is open by mistake -------------------------------------------------------------------


def test_beyond_loopback(tmp_path: Path, node: tuple[Path, Path]) -> None:
    """An address that other machines reach needs TLS or a word; loopback needs neither. The refusal is one line with the remedy."""
    run = str(tmp_path / "run")
    for host in ("0.0.0.0", "::"):
        with suppress(OSError), socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
            probe.bind((host, 0))
        with pytest.raises(ConfigError, match="tls_cert and tls_key, or --insecure"):
            listen(load({}, None, dir=run, host=host, port=0))
    done = commwatch("agent", "--dir", tmp_path / "run", "--host", "0.0.0.0", "--port", "0")
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert "--insecure" in done.stderr
    listen(load({}, None, dir=run, host="0.0.0.0", port=0, insecure=True)).close()
    for host in ("127.0.0.1", "127.0.0.2", "localhost", "::1"):
        listen(load({}, None, dir=run, host=host, port=0)).close()
    file = tmp_path / "some.toml"
    file.write_text(settings_of(node))
    listen(load({}, file, dir=run, host="0.0.0.0", port=0)).close()


def test_encrypted_key(tmp_path: Path, ours: Authority) -> None:
    """The key of a client certificate must not be encrypted: it is refused without a question on the terminal."""
    cert, key = ours.signed("locked")
    both, locked = tmp_path / "both.pem", tmp_path / "locked.key"
    _openssl("rsa", "-aes256", "-passout", "pass:secret", "-in", key, "-out", locked)
    both.write_text(cert.read_text() + locked.read_text())
    load = f"from commwatch.api.client_tls import tls_context; tls_context({str(ours.cert)!r}, {str(both)!r})"
    in_terminal = f"import pty, sys; pty.spawn([sys.executable, '-c', {load!r}])"
    done = subprocess.run(
        [sys.executable, "-c", in_terminal],
        check=False,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert f"OSError: client_cert {both}" in done.stdout
    assert "phrase" not in done.stdout


@pytest.mark.parametrize("setting", ["ca_file", "client_cert"])
def test_files_of_requests(tmp_path: Path, setting: str) -> None:
    """An agent does not start with a file for its requests to other agents that is not there; the refusal is one line that names it."""
    file = tmp_path / "some.toml"
    file.write_text(f"{setting} = '/none/some.pem'")
    done = commwatch("agent", "--config", file, "--dir", tmp_path / "run", "--port", "0")
    refusal = f"commwatch: {setting} /none/some.pem: No such file or directory\n"
    assert (done.returncode, done.stdout, done.stderr) == (2, "", refusal)


def test_insecure_agent_by_its_addresses(tmp_path: Path) -> None:
    """An agent on all addresses with --insecure answers at any of them, and to its machine's name."""
    with agent(tmp_path / "run", "--host", "0.0.0.0", "--insecure") as running:
        port = running.url.rpartition(":")[2]
        assert fetch(f"http://127.0.0.1:{port}/healthz")[0] == b"ok\n"
        assert json.loads(fetch(f"http://127.0.0.2:{port}/api/v1/jobs")[0]) == []
        assert commwatch("diagnose", "--dir", running.directory).stdout == "no running job\n"


@pytest.mark.parametrize("lines", ["tls_cert = 'a'", "tls_key = 'a'", "tls_client_ca = 'a'"])
def test_half_of_tls(tmp_path: Path, lines: str) -> None:
    """Half of what TLS needs is a wrong setting, not an agent without TLS."""
    file = tmp_path / "some.toml"
    file.write_text(lines)
    with pytest.raises(ConfigError, match="TLS needs tls_cert and tls_key"):
        load({"HOME": "/home/someone"}, file)


def test_bad_certificates(tmp_path: Path, ours: Authority, node: tuple[Path, Path]) -> None:
    """A certificate that is missing, is none, or is of another key ends the start in one line that names it."""
    other, file = ours.signed("other")[1], tmp_path / "some.toml"
    (tmp_path / "none").write_text("none")
    for lines, named in (
        (settings_of((tmp_path / "missing", node[1])), "No such file"),
        (settings_of((tmp_path / "none", node[1])), str(tmp_path / "none")),
        (settings_of((node[0], other)), "KEY_VALUES_MISMATCH"),
        (settings_of(node, f"tls_client_ca = {str(tmp_path / 'none')!r}"), "tls_client_ca"),
    ):
        file.write_text(lines)
        done = commwatch("agent", "--dir", tmp_path / "run", "--port", "0", "--config", file)
        assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1), done.stderr
        assert named in done.stderr


def test_addresses(tmp_path: Path, node: tuple[Path, Path]) -> None:
    """Under TLS an agent on all addresses is queried by the name of its machine, which its certificate is for."""
    file = tmp_path / "some.toml"
    file.write_text(settings_of(node))
    home, name = {"HOME": "/home/someone"}, socket.gethostname()
    open_ = load(home, file, host="0.0.0.0")
    assert (url_of(open_, 1), address_of(open_, 1)) == (f"https://{name}:1", f"https://{name}:1")
    assert url_of(load(home, file), 1) == "https://127.0.0.1:1"
    assert url_of(load(home, host="0.0.0.0"), 1) == "http://0.0.0.0:1"
