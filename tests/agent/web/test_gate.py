"""The gate of a real server: the token and the login, other users, other origins, limits, what every answer says to browsers."""

from __future__ import annotations

import asyncio
import json
import os
import re
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from html import unescape
from http import HTTPStatus
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlencode

import pytest
from starlette.types import Message, Receive, Scope, Send

from commwatch.api.client import Keys, get
from commwatch.wire import tokens
from commwatch.wire.crossing import Trust
from commwatch_agent.web import gate
from commwatch_agent.web.access import Rules, session
from commwatch_agent.web.http_protocol import MOST_HEADER_BYTES
from tests.helpers import NOBODY, PATIENCE_S, RunningAgent, agent, clean_env, commwatch, needs
from tests.serving import Served, serving

CLOSED = "require_token = true"


@pytest.fixture(scope="module")
def closed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server that asks for its token."""
    with serving(tmp_path_factory.mktemp("closed") / "run", settings=CLOSED) as served:
        yield served


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningAgent]:
    """An agent as it is by default."""
    with agent(tmp_path_factory.mktemp("gate") / "run") as made:
        yield made


# -- the token ------------------------------------------------------------------------------------


def test_token(closed: Served) -> None:
    """Without the token there is a 401 that says what is required and where to find it; with it, the answer."""
    refused = closed.ask("/api/v1/jobs")
    assert (refused.status, refused.headers["www-authenticate"]) == (HTTPStatus.UNAUTHORIZED, "Bearer")
    assert "token file" in refused.detail
    assert closed.ask("/api/v1/jobs", authorization=f"Bearer {closed.token}").status == HTTPStatus.OK
    assert closed.ask("/metrics").status == HTTPStatus.OK


def test_rotation(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A new token in the file takes effect at once; without a token no request is accepted, which is logged once."""
    with serving(tmp_path / "run", settings=CLOSED) as served:
        path, first = served.directory / tokens.NAME, served.token
        cookie = f"commwatch={session(first)}"

        def let_in(**headers: Any) -> bool:
            return served.ask(**headers).status == HTTPStatus.OK

        assert let_in(cookie=cookie)
        path.write_text("another-token-another\n")
        assert not let_in(authorization=f"Bearer {first}")
        assert not let_in(cookie=cookie)
        assert let_in(authorization="Bearer another-token-another")
        path.unlink()
        for _ in range(2):
            assert "cannot read its token" in served.ask(authorization="Bearer another-token-another").detail
        assert len([record for record in caplog.records if str(path) in record.getMessage()]) == 1
        tokens.make(path)
        assert let_in(authorization=f"Bearer {served.token}")


def test_given_token(tmp_path: Path) -> None:
    """A token file in the settings is used by agent and commands alike; the agent creates none of its own."""
    given = tmp_path / "given"
    given.write_text("given-given-given-given")
    given.chmod(0o600)
    (tmp_path / "commwatch.toml").write_text(f"{CLOSED}\ntoken_file = {str(given)!r}\n")
    with agent(tmp_path / "run", "--config", str(tmp_path / "commwatch.toml")) as running:
        assert not (running.directory / tokens.NAME).exists()
        asked = ("doctor", "--json", "--dir", running.directory)
        for flags, env in (
            (("--token-file", given), {}),
            ((), {"COMMWATCH_TOKEN_FILE": str(given)}),
            (("--config", tmp_path / "commwatch.toml"), {}),
        ):
            checks = json.loads(commwatch(*asked, *flags, env=clean_env(**env)).stdout)
            assert [c["result"] for c in checks if c["what"] == "history"] == ["pass"], (flags, env)
        said = commwatch(*asked).stdout
        assert "--token-file FILE" in said


def test_unusable_token(tmp_path: Path) -> None:
    """An agent does not start with a token that is missing, or that others can read: one line names the file and the remedy."""
    given = tmp_path / "given"
    asked = ("agent", "--dir", tmp_path / "run", "--port", "0", "--token-file", given)

    def missing() -> None:
        assert not given.exists()

    def open_to_all() -> None:
        given.write_text("given-given-given-given")
        given.chmod(0o644)

    for prepare, named in (
        (missing, "No such file"),
        (open_to_all, "chmod 600"),
    ):
        prepare()
        done = commwatch(*asked)
        assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1), done.stderr
        assert str(given) in done.stderr
        assert named in done.stderr


def test_commands_find_the_token(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Commands read the token of an agent on this machine by themselves; no log and no announcement contains it."""
    settings = tmp_path / "commwatch.toml"
    settings.write_text(CLOSED)
    with agent(tmp_path / "run", "--config", str(settings)) as running:
        where = ("--dir", running.directory)
        assert commwatch("diagnose", *where).stdout == "no running job\n"
        assert commwatch("top", "--once", *where).returncode == 0
        assert "no job is running here" in commwatch("profile", *where).stderr
        assert json.loads(commwatch("top", "--json", *where).stdout)["url"] == running.url
        # An agent that is named is shown no token of this machine's.
        assert "its token" in commwatch("diagnose", running.url, "--dir", tmp_path).stderr
        token = running.token
        assert token not in (running.directory / "agent.json").read_text()
    assert token not in "".join(capfd.readouterr())


def test_announcement_of_somebody_else(tmp_path: Path) -> None:
    """Who may write to the run directory, as a group may, gets no token sent by saying that the agent is elsewhere."""
    needs(os.getuid() == 0, "root, to give a file away")
    with agent(tmp_path / "run", "--config", str(_written(tmp_path, CLOSED))) as running:
        announced = running.directory / "agent.json"
        assert get(running.url, "jobs", Keys(running.directory)) == []
        os.chown(announced, NOBODY, NOBODY)
        with pytest.raises(urllib.error.HTTPError) as caught:
            get(running.url, "jobs", Keys(running.directory))
        with caught.value as error:
            assert error.code == HTTPStatus.UNAUTHORIZED


def _written(directory: Path, settings: str) -> Path:
    file = directory / "commwatch.toml"
    file.write_text(settings)
    return file


@pytest.fixture
def stuck(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Served, threading.Event]]:
    """A server whose token lies where reading takes until the event, and who can be read without one."""
    go = threading.Event()
    with serving(tmp_path / "run") as served:
        read = tokens._read

        def slow(path: Path, trust: Trust) -> str:
            go.wait(PATIENCE_S)
            return read(path, trust)

        token = served.token
        monkeypatch.setattr(tokens, "_read", slow)
        monkeypatch.setattr(Served, "token", token)
        try:
            yield served, go
        finally:
            go.set()


def test_slow_token(stuck: tuple[Served, threading.Event]) -> None:
    """While the token's file does not respond, pages and metrics do; a request with a token waits for it, and is then accepted."""
    served, go = stuck
    with ThreadPoolExecutor() as others:
        asked = [
            others.submit(served.ask, "/x", "POST", b"", authorization=f"Bearer {shown}")
            for shown in (served.token, "wrong-wrong-wrong-wrong")
        ]
        for path in ("/", "/metrics", "/healthz"):
            assert served.ask(path).status == HTTPStatus.OK
        assert not any(one.done() for one in asked)
        go.set()
        assert [one.result(PATIENCE_S).status for one in asked] == [HTTPStatus.OK, HTTPStatus.UNAUTHORIZED]


def test_stuck_token(
    stuck: tuple[Served, threading.Event], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """If the token's file does not respond in time, no token is accepted, which is logged once; when it responds again, tokens are."""
    served, go = stuck
    monkeypatch.setattr(gate, "_TOKEN_S", 0.05)
    shown: dict[str, Any] = {"authorization": f"Bearer {served.token}"}
    for _ in range(3):
        assert "cannot read its token" in served.ask("/x", "POST", b"", **shown).detail
    assert [record.getMessage() for record in caplog.records] == [
        "no token is accepted: its file could not be read within 0.05 s"
    ]
    assert len([thread for thread in threading.enumerate() if thread.name == "token"]) == 1
    monkeypatch.setattr(gate, "_TOKEN_S", PATIENCE_S)
    go.set()
    assert served.ask("/x", "POST", b"", **shown).status == HTTPStatus.OK


# -- the login ------------------------------------------------------------------------------------


def test_login(closed: Served) -> None:
    """A browser gets a form where it may not read; the token in it gives a cookie that no script sees and that opens the page."""
    for path in ("/", "/api/v1/alerts/1/evidence"):  # links of notifications lead to the second
        page = closed.ask(path, accept="text/html,*/*")
        assert (page.status, page.headers["content-type"]) == (HTTPStatus.UNAUTHORIZED, "text/html; charset=utf-8")
    assert b'<form method="post" action="/login">' in page.body
    form: dict[str, Any] = {
        "content_type": "application/x-www-form-urlencoded",
        "origin": f"http://localhost:{closed.port}",
    }
    for wrong in (b"", b"token=", b"token=wrong", b"\xff&&&=", b"token=x&token=" + closed.token.encode()):
        refused = closed.ask("/login", "POST", wrong, **form)
        assert (refused.status, "set-cookie" in refused.headers) == (HTTPStatus.UNAUTHORIZED, False)
    done = closed.ask("/login", "POST", b"token=" + closed.token.encode(), **form)
    assert (done.status, done.headers["location"]) == (HTTPStatus.SEE_OTHER, "/")
    assert b'name="next" type="hidden" value="/api/v1/alerts/1/evidence"' in page.body
    cookie, *attributes = (part.strip() for part in done.headers["set-cookie"].split(";"))
    assert {each.lower() for each in attributes} == {"httponly", "path=/", "samesite=lax"}
    assert closed.token not in cookie
    assert closed.ask("/api/v1/stream", cookie=cookie).status == HTTPStatus.OK
    assert closed.ask("/api/v1/profiles", "POST", b"{}", cookie=cookie).status == HTTPStatus.UNAUTHORIZED


@pytest.mark.parametrize(
    ("path", "on"),
    [
        ("/", "/"),
        ("/runbook?a=b&c=%2F%2Fd", "/runbook?a=b&c=%2F%2Fd"),
        ("/api/v1/alerts/1/evidence", "/api/v1/alerts/1/evidence"),
        ("/login", "/"),
        ("/login?next=/x", "/"),
        ("//evil.example/", "/"),
        ("/%22%3E%3Cscript%3E", "/%22%3E%3Cscript%3E"),
        ("/x?a=\"><script>'&", "/x?a=\"><script>'&"),
    ],
)
def test_login_leads_on(closed: Served, path: str, on: str) -> None:
    """After the login a browser is where the link led that it followed, on this agent."""
    page = closed.ask(path, accept="text/html").body.decode()
    (shown,) = re.findall(r'<input name="next" type="hidden" value="([^"<>]*)">', page)
    assert unescape(shown) == on
    wrong = closed.ask("/login", "POST", urlencode({"token": "wrong", "next": on}).encode())
    assert shown in wrong.body.decode()
    body = urlencode({"token": closed.token, "next": unescape(shown)}).encode()
    done = closed.ask("/login", "POST", body)
    assert (done.status, unquote(done.headers["location"])) == (HTTPStatus.SEE_OTHER, unquote(on))


@pytest.mark.parametrize(
    "hostile",
    [
        "//evil.example", "///evil.example", "/\\evil.example", "\\/evil.example", "\\\\evil.example", "/\t/evil.example", "/\n/evil.example",
        "\t//evil.example", " //evil.example", "http://evil.example", "http:evil.example", "javascript:alert(1)", "evil.example", "",
        "/a\r\nSet-Cookie: a=b", "/a\\..\\..//evil.example", "/\0", "/é", "data:text/html,x", "/login", "/login?next=//evil.example",
    ],
)  # fmt: skip
def test_login_leads_nowhere_else(closed: Served, hostile: str) -> None:
    """Whatever the form contains, the login leads to no other host, and puts nothing else into the answer."""
    done = closed.ask("/login", "POST", urlencode({"token": closed.token, "next": hostile}).encode())
    assert (done.status, done.headers["location"]) == (HTTPStatus.SEE_OTHER, "/")
    assert done.headers["set-cookie"].startswith("commwatch=")


def test_login_from_elsewhere(closed: Served) -> None:
    """A page of another origin cannot log a user in."""
    body = b"token=" + closed.token.encode()
    assert closed.ask("/login", "POST", body, origin="http://evil.example").status == HTTPStatus.FORBIDDEN


# -- pages of other origins, names that lead here -------------------------------------------------


def test_rebinding(running: RunningAgent) -> None:
    """A name that leads to the agent but is not its own gets a 421 that says how to allow it, for metrics, too."""
    for path in ("/", "/api/v1/jobs", "/metrics"):
        request = urllib.request.Request(running.url + path, headers={"Host": "evil.example:9477"})
        with pytest.raises(urllib.error.HTTPError) as caught:
            urllib.request.urlopen(request, timeout=30)
        with caught.value as error:
            assert error.code == HTTPStatus.MISDIRECTED_REQUEST
            assert "allowed_hosts" in json.load(error)["detail"]


@pytest.mark.parametrize(
    "sent",
    [
        {"Origin": "http://evil.example"},
        {"Origin": "http://localhost:8000", "Sec-Fetch-Site": "same-site", "Sec-Fetch-Mode": "cors"},
        {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "no-cors", "Sec-Fetch-Dest": "script"},
    ],
)
def test_page_of_another_origin(running: RunningAgent, sent: dict[str, str]) -> None:
    """A browser's requests for a page of another origin are refused, and no answer allows the page to read it."""
    for path, method in (("/api/v1/jobs", "GET"), ("/api/v1/profiles", "POST"), ("/api/v1/profiles", "OPTIONS")):
        headers = {**sent, "Authorization": f"Bearer {running.token}"}
        request = urllib.request.Request(running.url + path, headers=headers, method=method)
        with pytest.raises(urllib.error.HTTPError) as caught:
            urllib.request.urlopen(request, timeout=30)
        with caught.value as error:
            assert error.code == HTTPStatus.FORBIDDEN
            assert not [name for name in error.headers if name.lower().startswith("access-control")]


def test_what_answers_say_to_browsers(running: RunningAgent) -> None:
    """Every response forbids browsers to guess its type and to store it; a page also forbids all content from other origins."""
    for path in ("/", "/docs", "/runbook", "/metrics", "/api/v1/jobs", "/openapi.json"):
        with urllib.request.urlopen(running.url + path, timeout=30) as response:
            said, html = response.headers, response.read().decode()
        assert (said["X-Content-Type-Options"], said["Referrer-Policy"]) == ("nosniff", "no-referrer")
        assert (said["Cache-Control"], said["Cross-Origin-Resource-Policy"]) == ("no-store", "same-origin")
        is_page = said["Content-Type"].startswith("text/html")
        assert is_page == (path in ("/", "/docs", "/runbook"))
        if is_page:
            policy = dict(part.strip().partition(" ")[::2] for part in said["Content-Security-Policy"].split(";"))
            assert (policy["default-src"], policy["script-src"]) == ("'none'", "'self'")
            assert (policy["frame-ancestors"], policy["form-action"], policy["base-uri"]) == (
                "'none'",
                "'self'",
                "'none'",
            )
            assert ("<script>" in html, " style=" in html, " onclick=" in html) == (False, False, False)


# -- limits ---------------------------------------------------------------------------------------


def test_large_body(closed: Served) -> None:
    """A body past the limit is a 413, whether it says how long it is or comes in pieces."""
    allowed: dict[str, Any] = {"authorization": f"Bearer {closed.token}"}
    fits = b"x" * gate.MOST_BODY_BYTES
    assert closed.ask("/x", "POST", fits, **allowed).body == str(len(fits)).encode()
    assert "at most 65536 bytes" in closed.ask("/x", "POST", fits + b"x", **allowed).detail
    assert closed.ask("/login", "POST", fits + b"x").status == HTTPStatus.REQUEST_ENTITY_TOO_LARGE


def test_large_body_in_pieces(running: RunningAgent) -> None:
    """A body that does not say how long it is comes no further than the limit."""
    pieces = iter([b"x" * 10_000] * 10)
    headers = {"Authorization": f"Bearer {running.token}", "Content-Type": "application/json"}
    request = urllib.request.Request(f"{running.url}/api/v1/profiles", pieces, headers)
    with pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.urlopen(request, timeout=30)
    with caught.value as error:
        assert error.code == HTTPStatus.REQUEST_ENTITY_TOO_LARGE


@pytest.mark.parametrize("path", ["/", "/metrics"])
def test_large_headers(closed: Served, path: str) -> None:
    """Headers, or an address, past the limit are a 431, though they come in one piece."""
    for asked in (closed.ask(path, x="a" * MOST_HEADER_BYTES), closed.ask(f"{path}?{'a' * MOST_HEADER_BYTES}")):
        assert asked.status == HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE
        assert str(MOST_HEADER_BYTES) in asked.detail


#: A client of another machine, and one that is not of the crowd.
CROWD, ANOTHER = "192.0.2.1", "198.51.100.1"


def crowd(path: str, clients: list[str], others: list[tuple[str, str]]) -> list[int]:
    """The statuses of requests for a path that do not end, one for each of ``clients``, and of others (path and client) beside them."""

    async def ask() -> list[int]:
        end, waiting = asyncio.Event(), asyncio.Event()

        async def app(scope: Scope, _: Receive, send: Send) -> None:
            if scope["path"] == path:
                waiting.set()
                await end.wait()
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body"})

        door = gate.Gate(app, Rules(), lambda: "token", False)
        statuses: list[int] = []

        async def one(at: str, client: str) -> None:
            async def send(message: Message) -> None:
                if message["type"] == "http.response.start":
                    statuses.append(message["status"])
                    if message["status"] != HTTPStatus.OK:
                        assert (b"retry-after", b"1") in message["headers"]

            await door(request(at, client), nothing, send)

        tasks = [asyncio.create_task(one(path, client)) for client in clients]
        await waiting.wait()
        await asyncio.sleep(0)
        for each in others:
            await one(*each)
        end.set()
        await asyncio.gather(*tasks)
        await one(path, clients[0])
        return statuses

    return asyncio.run(ask())


def request(path: str, client: str) -> Scope:
    """A request as the server hands it on."""
    path, _, query = path.partition("?")
    about = {"type": "http", "method": "GET", "path": path, "raw_path": path.encode(), "query_string": query.encode()}
    return {**about, "headers": [(b"host", b"localhost")], "client": (client, 1), "server": ("192.0.2.9", 9477)}


async def nothing() -> Message:
    """Its body."""
    return {"type": "http.request"}


def test_too_many_requests() -> None:
    """Above a number of requests at once the next one of their clients gets a 503, but a client without requests is accepted, and metrics,
    health and streams continue; later there is room again."""
    clients = [f"192.0.2.{n % 4}" for n in range(gate.MOST_REQUESTS)]
    others = [
        ("/", clients[0]),
        *((path, ANOTHER) for path in ("/api/v1/summary", "/metrics", "/healthz", gate.STREAM)),
    ]
    assert crowd("/api/v1/jobs", clients, others) == [503, 200, 200, 200, 200] + [200] * gate.MOST_REQUESTS + [200]


def test_too_many_clients() -> None:
    """Above twice that number a client without requests gets a 503, too."""
    clients = [f"192.0.2.{n}" for n in range(2 * gate.MOST_REQUESTS)]
    assert crowd("/api/v1/jobs", clients, [("/", ANOTHER)]) == [503] + [200] * 2 * gate.MOST_REQUESTS + [200]


@pytest.mark.parametrize(
    ("path", "other"), [("/api/v1/jobs", "/api/v1/collectives/group/1"), ("/api/v1/summary", "/api/v1/ranks")]
)
def test_too_many_of_one(path: str, other: str) -> None:
    """A client above its number of requests is asked to retry, but gets the files of the page; another client is accepted, and requests that read
    the history do not block those that do not, nor the other way round."""
    others = [(path, CROWD), ("/metrics", CROWD), ("/static/live.js", CROWD), (other, ANOTHER)]
    assert crowd(path, [CROWD] * gate.MOST_OF_ONE, others) == [429, 200, 200, 200] + [200] * gate.MOST_OF_ONE + [200]


def test_too_many_streams() -> None:
    """There is a number of streams, too, which keep no request from being answered."""
    clients = [f"192.0.2.{n % 4}" for n in range(gate.MOST_STREAMS)]
    others = [(gate.STREAM, clients[0]), ("/api/v1/jobs", clients[0])]
    assert crowd(gate.STREAM, clients, others) == [503, 200] + [200] * gate.MOST_STREAMS + [200]


def test_too_many_streams_of_one() -> None:
    """A client above its number of streams gets a 429; another client gets a stream."""
    most = gate.MOST_STREAMS_OF_ONE
    others = [(gate.STREAM, CROWD), ("/metrics", CROWD)]
    assert crowd(gate.STREAM, [CROWD] * most, others) == [429, 200] + [200] * most + [200]


def test_streams_are_shared() -> None:
    """If two clients have all streams, a third one gets some: the newest of the client with the most end, and with a whole response."""
    assert asyncio.run(_three_clients()) == {"192.0.2.0": 11, "192.0.2.1": 11, ANOTHER: 10}


async def _three_clients() -> dict[str, int]:
    """The streams of each client that are open, after a third client has opened as many as it gets."""
    ended: list[str] = []
    refused: list[int] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"retry: 1000", "more_body": True})
        while (await receive())["type"] != "http.disconnect":
            pass

    door = gate.Gate(app, Rules(), lambda: "token", False)

    async def one(client: str) -> None:
        async def receive() -> Message:
            await asyncio.Event().wait()
            raise AssertionError

        async def send(message: Message) -> None:
            if message["type"] == "http.response.start" and message["status"] != HTTPStatus.OK:
                refused.append(message["status"])
            elif message["type"] == "http.response.body" and not message.get("more_body"):
                ended.append(client)

        await door(request(gate.STREAM, client), receive, send)

    clients = [f"192.0.2.{n % 2}" for n in range(gate.MOST_STREAMS)] + [ANOTHER] * 12
    tasks = []
    for client in clients:
        tasks.append(asyncio.create_task(one(client)))
        for _ in range(20):
            await asyncio.sleep(0)
    assert refused == [HTTPStatus.SERVICE_UNAVAILABLE] * 2
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return {each: clients.count(each) - ended.count(each) for each in dict.fromkeys(clients)}


def test_slow_to_take() -> None:
    """A client that does not read its answer delays no other request."""

    async def ask() -> None:
        async def app(_: Scope, __: Receive, send: Send) -> None:
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body"})

        door, taken, started = gate.Gate(app, Rules(), lambda: "token", False), asyncio.Event(), asyncio.Event()

        async def slow(message: Message) -> None:
            started.set()
            await taken.wait()

        async def quick(message: Message) -> None:
            pass

        first = asyncio.create_task(door(request("/api/v1/summary", CROWD), nothing, slow))
        await started.wait()
        for client in (CROWD, ANOTHER):
            await asyncio.wait_for(door(request("/api/v1/summary", client), nothing, quick), PATIENCE_S)
        assert not first.done()
        taken.set()
        await first

    asyncio.run(ask())


def test_failing_answer() -> None:
    """An answer that fails before it begins leaves its turn to the next, and is a 500."""
    found = []

    async def ask() -> None:
        async def app(_: Scope, __: Receive, ___: Send) -> None:
            raise RuntimeError("no answer")

        async def send(message: Message) -> None:
            found.append(message.get("status"))

        door = gate.Gate(app, Rules(), lambda: "token", False)
        for _ in range(3):
            await asyncio.wait_for(door(request("/api/v1/summary", CROWD), nothing, send), PATIENCE_S)

    asyncio.run(ask())
    assert found == [HTTPStatus.INTERNAL_SERVER_ERROR, None] * 3


@pytest.mark.parametrize(
    ("path", "most"),
    [
        ("/api/v1/ops", 1),
        ("/api/v1/collectives/group/1", 1),
        ("/", 2),
        ("/api/v1/past", 4),
        ("/api/v1/ops?scope=job", 4),
        ("/api/v1/jobs?limit=1&figures=true", 1),
        ("/api/v1/bars?job=a", 2),
        ("/api/v1/bars?job=a&until=9", 1),
        ("/api/v1/ops?scope=%6aob", 4),
        ("/api/v1/bars?job=a&%75ntil=9", 1),
    ],
)
def test_worked_on_at_once(path: str, most: int) -> None:
    """One request that reads the history is worked on at a time, four that cover all nodes, two others: the rest wait, and all are answered."""

    async def ask() -> tuple[int, int]:
        inside, highest, answered = 0, 0, 0

        async def app(_: Scope, __: Receive, send: Send) -> None:
            nonlocal inside, highest
            inside += 1
            highest = max(highest, inside)
            await asyncio.sleep(0)
            inside -= 1
            await send({"type": "http.response.start", "status": 200, "headers": []})

        async def send(message: Message) -> None:
            nonlocal answered
            answered += message["status"] == HTTPStatus.OK

        door = gate.Gate(app, Rules(), lambda: "token", False)
        await asyncio.gather(*(door(request(path, f"192.0.2.{n % 3}"), nothing, send) for n in range(30)))
        return highest, answered

    assert asyncio.run(ask()) == (most, 30)
