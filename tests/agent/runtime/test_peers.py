"""Requests to the agents of other nodes: which addresses, with which token, and how often."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from commwatch.wire.addresses import BadAddress
from commwatch_agent.config import Config
from commwatch_agent.runtime.agents import addresses
from commwatch_agent.runtime.peers import MOST_REPORTED, Peers
from tests.helpers import wait_for

TOKEN = "a-token-of-the-whole-site"


@contextmanager
def another(its_id: str = "other") -> Iterator[tuple[str, list[tuple[str, str | None]]]]:
    """An agent of another node; its URL, and path and token of each request."""
    asked: list[tuple[str, str | None]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append((self.path.removeprefix("/api/v1/"), self.headers.get("Authorization")))
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps({"id": its_id, "host": "node2", "version": "1"}).encode())

        def log_message(self, *_: object) -> None:
            """Nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}", asked
        finally:
            server.shutdown()
            thread.join()


def settings(directory: Path, *peers: str) -> Config:
    """With a token of the site."""
    token = directory / "token"
    token.write_text(TOKEN)
    token.chmod(0o600)
    return Config(directory, directory, token_file=token, peers=peers)


def test_token_only_for_named_agents(tmp_path: Path) -> None:
    """An agent in the settings gets the site's token; one that a job has reported gets none, as it may be anyone."""
    with another("named") as (named, of_named), another("reported") as (reported, of_reported):
        peers = Peers(settings(tmp_path, named), "own", lambda: [reported])
        peers.tick()
        assert sorted(peer.state for peer in peers.views()) == ["answers"] * 2
        assert of_named == [("about", f"Bearer {TOKEN}")]
        assert of_reported == [("about", None)]


def test_one_agent_under_two_names(tmp_path: Path) -> None:
    """A second address of the same agent, and of this one, is not asked, so that no rank counts twice."""
    with another("other") as (first, asked), another("own") as (own, of_own):
        second = first.replace("127.0.0.1", "localhost")
        peers = Peers(settings(tmp_path, first, second, own), "own")
        peers.tick()
        assert {peer.url: peer.state for peer in peers.views()} == {
            first: "answers",
            second: "this agent",
            own: "this agent",
        }
        peers.ask("ranks?job=x")
        assert [path for path, _ in asked] == ["about", "about", "ranks?job=x"]
        assert [path for path, _ in of_own] == ["about"]


def test_reported_address_hides_no_named_agent(tmp_path: Path) -> None:
    """An agent in the settings is asked, even if an address that a job has reported answers with its id and comes first."""
    with another("same") as (one, _), another("same") as (two, _):
        reported, named = sorted((one, two))
        peers = Peers(settings(tmp_path, named), "own", lambda: [reported])
        peers.tick()
        assert {peer.url: peer.state for peer in peers.views()} == {named: "answers", reported: "this agent"}


def test_same_question_of_many(tmp_path: Path) -> None:
    """Many clients with the same question at the same time cost another agent one request."""
    with another() as (url, asked):
        peers = Peers(settings(tmp_path, url), "own")
        peers.tick()
        threads = [threading.Thread(target=peers.ask, args=("ranks?job=x",)) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert [path for path, _ in asked] == ["about", "ranks?job=x"]


class Asked(Peers):
    """Peers that record which addresses they ask who they are; those in ``there`` answer."""

    def __init__(self, directory: Path, reported: list[str]) -> None:
        self.asked: list[str] = []
        self.there: set[str] = set()
        self.now = 0.0
        super().__init__(settings(directory), "own", lambda: reported, lambda: self.now)

    def _fetch(self, url: str, path: str, within_s: float = 2.0) -> bytes:
        self.asked.append(url)
        if url not in self.there:
            raise ConnectionRefusedError
        return json.dumps({"id": url, "host": url, "version": "1"}).encode()

    def after(self, seconds: float) -> list[str]:
        """The addresses asked in a tick after some time."""
        self.asked.clear()
        self.now += seconds
        self.tick()
        return sorted(self.asked)


def test_addresses_without_end(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Of tens of thousands of addresses that jobs report a bounded number is known and asked, few at a time; the rest is counted."""
    peers = Asked(tmp_path, [f"http://host{n}:1" for n in range(30_720)])
    asked = {url for _ in range(100) for url in peers.after(5)}
    assert len(peers.views()) == MOST_REPORTED == len(asked)
    assert peers.left == 30_720 - MOST_REPORTED
    assert [record.getMessage() for record in caplog.records] == [
        f"peers: jobs report more than {MOST_REPORTED} agents of other nodes; {peers.left} are not asked"
    ]


def test_few_at_a_time(tmp_path: Path) -> None:
    """A tick asks few addresses that have never answered, and all that have."""
    reported = [f"http://host{n}:1" for n in range(100)]
    peers = Asked(tmp_path, reported)
    peers.there = set(reported)
    most = [len(peers.after(5)) for _ in range(6)]
    assert most == [32, 64, 96, 100, 100, 100]


def test_address_that_never_answers(tmp_path: Path) -> None:
    """An address that never answers is asked ever more seldom; once it has answered, at each tick, also after it fell silent."""
    peers = Asked(tmp_path, ["http://gone:1"])
    asked = [tick for tick in range(400) if peers.after(5)]
    assert asked[:5] == [0, 1, 3, 7, 15]
    assert len(asked) < 12
    peers.there = {"http://gone:1"}
    assert any(peers.after(5) for _ in range(130))
    peers.there.clear()
    assert [len(peers.after(5)) for _ in range(5)] == [1] * 5


def test_ever_new_addresses(tmp_path: Path) -> None:
    """A job that reports other addresses at each tick cannot make the agent search a network."""
    reported: list[str] = []
    peers = Asked(tmp_path, reported)
    asked = set[str]()
    for tick in range(700):
        reported[:] = [f"http://host{tick}-{n}:1" for n in range(200)]
        asked.update(peers.after(5))
    assert len(asked) < 1024 + 700 + 1


def test_list_changes(tmp_path: Path) -> None:
    """A target file is read again and again; while it cannot be read, the agents that were in it remain."""
    file = tmp_path / "agents.json"
    file.write_text("[]")
    with another() as (url, _):
        peers = Peers(settings(tmp_path, str(file)), "own")
        peers.tick()
        assert peers.views() == []
        for text in (json.dumps([{"targets": [url.removeprefix("http://")]}]), "[{"):
            file.write_text(text)
            peers.tick()
            assert [(peer.url, peer.host) for peer in peers.views()] == [(url, "node2")]
        peers.change(settings(tmp_path))
        peers.tick()
        assert peers.views() == []


def test_names_that_cannot_be_looked_up(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A name without an address and a missing file hide none of the other agents; each is one line of the log until it changes."""
    missing = tmp_path / "agents.json"
    with another() as (url, _):
        peers = Peers(settings(tmp_path, "dns+no-such-host.invalid", str(missing), url), "own")
        for _ in range(3):
            peers.tick()
        assert [(peer.url, peer.host) for peer in peers.views()] == [(url, "node2")]
    lines = [record.getMessage() for record in caplog.records]
    assert sorted("invalid" in line for line in lines) == [False, True]
    assert any(line == f"peers: {missing}: No such file or directory" for line in lines)


def test_names_with_several_addresses() -> None:
    """A DNS name stands for the agents at all of its addresses; one that has none, or is none, is named."""
    found = addresses(["dns+localhost:9477"])
    assert "http://127.0.0.1:9477" in found
    assert addresses(["dns+127.0.0.1"], secure=True) == ["https://127.0.0.1:9477"]
    for wrong in ("dns+no-such-host.invalid", "dns+localhost:port"):
        with pytest.raises(BadAddress, match=wrong.removeprefix("dns+").partition(":")[0]):
            addresses([wrong])


def test_no_thread_is_left(tmp_path: Path) -> None:
    """A question leaves no thread once it is answered."""
    with another() as (url, _):
        peers = Peers(settings(tmp_path, url), "own")
        before = threading.active_count()
        for number in range(5):
            peers.tick()
            peers.ask(f"ranks?job={number}")
        wait_for(lambda: threading.active_count() <= before, "the threads to end")
