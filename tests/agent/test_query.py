"""``commwatch query``: one question to one agent, or to many."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from commwatch.query_cli import table
from tests.agent.test_api import populate, rings_of
from tests.helpers import RunningAgent, agent, commwatch, end_rank, free_port, wait_for


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningAgent]:
    """An agent with jobs."""
    directory = tmp_path_factory.mktemp("query") / "run"
    writers = populate(rings_of(directory))
    with agent(directory) as running:
        wait_for(lambda: sum(r["records"] for r in running.get("/api/v1/ranks?job=train")) == 40, "the records")
        yield running
    for writer in writers:
        end_rank(writer)


def test_agent_of_this_node(watched: RunningAgent) -> None:
    """Without a name the agent of the run directory is asked; the table has its rows, JSON its whole answer."""
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
    """All that are named are asked, each line says of whom it is; who does not answer is named, and the rest is told."""
    dead = f"127.0.0.1:{free_port()}"
    with agent(tmp_path / "other") as other:
        done = commwatch("query", "about", watched.url, other.url, dead)
        assert done.returncode == 2
        assert [line.split()[0] for line in done.stdout.splitlines()] == ["agent", watched.url, other.url]
        assert done.stderr.startswith(f"commwatch: query: http://{dead}: ")
        said = json.loads(commwatch("query", "about", watched.url, dead, "--json").stdout)
    assert (list(said["answers"]), list(said["silent"])) == ([watched.url], [f"http://{dead}"])


def test_asked_wrongly(watched: RunningAgent, tmp_path: Path) -> None:
    """What an agent has against a question is said in its words; nobody to ask is said, too."""
    done = commwatch("query", "summary?by=colour", watched.url)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith(f"commwatch: query: {watched.url}: by=colour: unknown dimension")
    done = commwatch("query", "nothing/here", "--dir", watched.directory)
    assert done.returncode == 1
    done = commwatch("query", "jobs", "--dir", tmp_path)
    assert (done.returncode, done.stderr) == (
        2, f"commwatch: query: no agent watches {tmp_path}; name one, or give its run directory with --dir\n",
    )  # fmt: skip


def test_tables() -> None:
    """Lists give a line a thing, with nothing in a terminal that could do something; what is not known is a dash."""
    said = {"u": [{"a": 1, "b": None, "by": {"op": "x\x1b[31m"}}, {"a": "y" * 100, "c": [1]}]}
    head, first, second = table(said, name_agents=False)
    assert head.split() == ["op", "a", "b", "c"]
    assert "\x1b" not in first
    assert first.split()[1:] == ["1", "–", "–"]
    assert len(second.split()[1]) <= 60
    assert table({"u": {"x": 1}}, name_agents=True) == ["agent  x", "u      1"]
    assert table({"u": []}, name_agents=False) == ["nothing"]
    assert table({"u": "text"}, name_agents=False) == ["answer", "text"]
