"""``commwatch query``: one question to one agent, or to many."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import pytest
from starlette.datastructures import QueryParams

from commwatch_agent.cli.query import table
from commwatch_agent.job.merging import Heard
from commwatch_agent.runtime.peers import Peers
from commwatch_agent.web.routes.params import Others
from tests.agent.cli.test_fan_out import Behaviour, strange
from tests.agent.web.routes.test_jobs import populated
from tests.helpers import RunningAgent, agent, commwatch, free_port


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningAgent]:
    """An agent with jobs."""
    with populated(tmp_path_factory.mktemp("query") / "run") as running:
        yield running


def test_agent_of_this_node(watched: RunningAgent) -> None:
    """Without a name the agent of the run directory is queried; the table has its rows, JSON its whole answer."""
    asked = ("query", "summary?job=train&by=op", "--dir", watched.directory)
    done = commwatch(*asked)
    assert (done.returncode, done.stderr) == (0, "")
    head, *lines = done.stdout.splitlines()
    rows = watched.get("/api/v1/summary?job=train&by=op")["rows"]
    assert head.split()[:4] == ["op", "ranks", "group_size", "count"]
    assert [line.split()[0] for line in lines] == [row["by"]["op"] for row in rows]
    said = json.loads(commwatch(*asked, "--json").stdout)
    assert said == {"answers": {watched.url: watched.get("/api/v1/summary?job=train&by=op")}, "silent": {}}
    assert "running" in commwatch("query", "/api/v1/jobs", "--dir", watched.directory).stdout


def test_many_agents(watched: RunningAgent, tmp_path: Path) -> None:
    """All named agents are queried, and each line names its agent; an agent that does not answer is named, and the rest is printed."""
    dead = f"127.0.0.1:{free_port()}"
    with agent(tmp_path / "other") as other:
        done = commwatch("query", "about", watched.url, other.url, dead)
        assert done.returncode == 3
        assert [line.split()[0] for line in done.stdout.splitlines()] == ["agent", watched.url, other.url]
        assert done.stderr.startswith(f"commwatch: query: http://{dead}: ")
        said = json.loads(commwatch("query", "about", watched.url, dead, "--json").stdout)
    assert (list(said["answers"]), list(said["silent"])) == ([watched.url], [f"http://{dead}"])


def test_flags_among_agents(watched: RunningAgent, tmp_path: Path) -> None:
    """Flags may come before, between and behind agents, with their values, and in `diagnose` and `explain` as well."""
    asked = ("summary?job=train&by=op", watched.url)
    expected = json.loads(commwatch("query", *asked, "--json").stdout)
    other = watched.url.replace("127.0.0.1", "localhost")
    nobody = ("--ca-file", tmp_path / "none")
    assert json.loads(commwatch("query", "--json", *asked).stdout) == expected
    assert json.loads(commwatch("query", asked[0], "--json", asked[1]).stdout) == expected
    assert str(nobody[1]) in commwatch("query", asked[0], *nobody, asked[1]).stderr
    both = commwatch("query", asked[0], watched.url, "--json", other)
    assert list(json.loads(both.stdout)["answers"]) == [watched.url, other]
    assert "verdicts" in json.loads(commwatch("diagnose", watched.url, "--json", other).stdout)
    log = tmp_path / "log"
    log.write_text("")
    assert commwatch("explain", log, "--json", log).returncode == 0


def test_parameter_that_is_repeated() -> None:
    """A parameter that is given several times reaches the agents of other nodes with all its values."""
    asked: list[str] = []

    class Agents:
        def ask(self, *questions: str, within_s: float) -> Heard:
            asked.extend(questions)
            return Heard({}, {})

    others = Others(QueryParams("job=train&state=open&state=pending&limit=7"), cast(Peers, Agents()))
    others.ask("incidents?job,state,limit=9,kind")
    assert asked == ["incidents?job=train&state=open&state=pending&limit=9"]


def test_unknown_flag(watched: RunningAgent) -> None:
    """A flag that a command does not have is named below the usage of that command, not of all."""
    for command in (("query", "jobs", "--jsn", watched.url), ("config", "show", "--jsn"), ("agent", "--jsn")):
        done = commwatch(*command)
        assert (done.returncode, done.stdout) == (2, "")
        verb = " ".join(command[: -2 if command[0] == "query" else -1]).removesuffix(" jobs")
        assert done.stderr.startswith(f"usage: commwatch {verb} [-h]")
        assert "unrecognized arguments: --jsn" in done.stderr.splitlines()[-1]


def test_asked_wrongly(watched: RunningAgent, tmp_path: Path) -> None:
    """An agent's objection to a question is printed as it is; a lack of agents is an error, too."""
    done = commwatch("query", "summary?by=colour", watched.url)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith(f"commwatch: query: {watched.url}: by=colour: unknown dimension")
    done = commwatch("query", "nothing/here", "--dir", watched.directory)
    assert done.returncode == 1
    done = commwatch("query", "jobs", "--dir", tmp_path)
    assert (done.returncode, done.stderr) == (
        2, f"commwatch: query: no agent watches {tmp_path}; name one, or give its run directory with --dir\n",
    )  # fmt: skip


def says(content: bytes, head: bytes = b"HTTP/1.1 200 OK\r\n\r\n") -> Behaviour:
    """A server that answers any request with this, and hangs up."""

    def behave(connection: socket.socket, _: threading.Event) -> None:
        asked = b""
        while b"\r\n\r\n" not in asked:
            asked += connection.recv(1 << 16)
        connection.sendall(head + content)

    return behave


CHUNKED = b"Transfer-Encoding: chunked\r\n\r\n"
REFUSED = b"HTTP/1.1 400 Bad\x1b[31m\r\n\r\n"


@pytest.mark.parametrize(
    ("behave", "why"),
    [
        (says(b"", b"220 \x1b[31mhere is mail\r\n\r\n"), "does not answer as an agent of this version: 220 \N{REPLACEMENT CHARACTER}[31m"),
        (says(b"zz\r\n", b"HTTP/1.1 200 OK\r\n" + CHUNKED), "does not answer as an agent of this version: IncompleteRead"),
        (says(b"here is no JSON"), "does not answer as an agent of this version: Expecting value"),
        (says(b"[" * 100_000), "does not answer as an agent of this version: "),
        (says(b"[" * 700 + b"]" * 700), "does not answer as an agent of this version: "),
        (says(b"[" * 100_000, REFUSED), "400 Bad\N{REPLACEMENT CHARACTER}[31m"),
        (says(b"zz\r\n", b"HTTP/1.1 400 Bad\r\n" + CHUNKED), "400 Bad"),
        (says(b"[]", REFUSED), "400 Bad\N{REPLACEMENT CHARACTER}[31m"),
    ],
    ids=["no HTTP", "bad chunks", "no JSON", "deep", "too deep to show", "deep refusal", "refusal in bad chunks", "odd refusal"],
)  # fmt: skip
def test_hostile_answer(watched: RunningAgent, behave: Behaviour, why: str) -> None:
    """A server that is no agent, or no longer one, is named in one line with nothing in it that could harm a terminal; other answers are printed."""
    with strange(behave) as url:
        for form in ((), ("--json",)):
            done = commwatch("query", "jobs", url, watched.url, *form)
            assert done.returncode == 3
            assert "running" in done.stdout
        silent = json.loads(done.stdout)["silent"][url]
        done = commwatch("query", "jobs", url)
    assert done.stderr.startswith(f"commwatch: query: {url}: {why}")
    assert len(done.stderr.splitlines()) == 1
    assert "\x1b" not in done.stderr
    assert (done.returncode, done.stdout, silent.partition(" ")[0]) == (1, "", why.partition(" ")[0])


def test_odd_words(watched: RunningAgent) -> None:
    """A question may have blanks, signs of other alphabets and #; an invalid address is named."""
    done = commwatch("query", "summary?job=no such jöb #1", watched.url)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith(f"commwatch: query: {watched.url}: ")
    assert "'no such jöb #1'" in done.stderr
    done = commwatch("query", "jobs", "no host")
    assert (done.returncode, len(done.stderr.splitlines())) == (2, 1)
    assert done.stderr.startswith("commwatch: query: no host: needs a host")


def test_tables() -> None:
    """Lists give a line a thing, with nothing in a terminal that could do something; what is not known is a dash."""
    said = {"u": [{"a": 1, "b": None, "by": {"op": "x\x1b[31m"}}, {"a": "y" * 100, "c": [1]}]}
    head, first, second = table(said, name_agents=False)
    assert head.split() == ["op", "a", "b", "c"]
    assert "\x1b" not in first
    assert first.split()[1:] == ["1", "–", "–"]
    assert len(second.split()[1]) <= 60
    assert table({"u": {"x": 1}}, name_agents=True) == ["agent  x", "u      1"]
    assert table({"u": [{"group": "数据", "n": 1}, {"group": "dp", "n": 2}]}, name_agents=False)[1:] == [
        "数据   1",
        "dp     2",
    ]
    assert table({"u": []}, name_agents=False) == ["nothing"]
    assert table({"u": "text"}, name_agents=False) == ["answer", "text"]
