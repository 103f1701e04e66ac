"""The commands' tables fit 80 columns where they are for no terminal, whatever jobs, hosts and groups are called."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from commwatch_agent.cli.query import table
from commwatch_agent.text.terminal_text import width
from tests.helpers import (
    MS,
    RunningAgent,
    agent,
    clean_env,
    commwatch,
    group_entry,
    mark,
    operation,
    wait_for,
    write_ring,
)

JOB = "pretraining_of_the_model-20261125-193159-be19-again"
HOST = "gpu-node-0001.rack-17.cluster-of-research.example.com"
GROUPS = ("default_pg", "data_parallel_group_of_the_first_pipeline_stage_and_its_replicas")
LOG = Path(__file__).parents[1] / "fixtures" / "nccl" / "findings"
#: Sentences about the job are not broken where a part of a foreign name could begin a line, and pass for one of ours; nor are commands.
SENTENCES = {
    "report": ("  history", "  again"),
    "compare": ("Job B", "  A  ", "  B  ", "  No intervals"),
    "diagnose": ("  ", "not yet certain: ", "no incident yet: "),
}


@pytest.fixture(scope="module")
def asked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningAgent]:
    """An agent with a job of two ranks: steps, two groups with long names, an operation that is far slower than the others."""
    run = tmp_path_factory.mktemp("run")
    now = time.monotonic_ns()
    names = [group_entry(n, (0, 1), label) for n, label in enumerate(GROUPS)]
    who: dict[str, Any] = {"job": JOB, "host": HOST, "wall_offset_ns": time.time_ns() - now}
    writers = []
    for rank in range(2):
        records = []
        for step in range(12):
            at = now + (step - 13) * 100 * MS
            for group in range(2):
                begin = at + (10 + 40 * group) * MS
                records.append(operation(start_ns=begin, end_ns=begin + 30 * MS, seq=step, size=1 << 26, group=group))
            records.append(mark(step, at + 100 * MS, began_ns=at))
        writers.append(write_ring(run / "rings", records, names, **who, rank=rank))
    with agent(run) as running:
        wait_for(lambda: [rank["records"] for rank in running.get("/api/v1/ranks")] == [36, 36], "the records")
        yield running
    del writers


COMMANDS = {
    "jobs": ("jobs",),
    "report": ("report", JOB),
    "compare": ("compare", JOB, JOB),
    "top": ("top", "--once"),
    "diagnose": ("diagnose",),
    "references": ("bench", "--list"),
    "whatif": ("whatif", JOB),
    "explain": ("explain", LOG / "socket_transport.txt"),
}


@pytest.mark.parametrize("name", COMMANDS)
def test_fits(name: str, asked: RunningAgent) -> None:
    """No line is wider than 80 cells, but one that has a path or an address, and sentences about a job."""
    places = () if name == "explain" else ("--dir", asked.directory)
    done = commwatch(
        COMMANDS[name][0], *places, *COMMANDS[name][1:], env=clean_env(XDG_STATE_HOME=str(asked.directory))
    )
    assert done.stdout, done.stderr
    sentences = SENTENCES.get(name, ())
    wide = [line for line in done.stdout.splitlines() if width(line) > 80 and not line.startswith(sentences)]
    assert [line for line in wide if "/" not in line] == []


@pytest.mark.parametrize("route", ["jobs", "ranks", "groups", "summary?by=rank,group,op", "ops"])
def test_answers_fit_a_terminal(route: str, asked: RunningAgent) -> None:
    """In a terminal the table of `commwatch query` fits; in a pipe, where programs read it, a row is one line."""
    answers = {asked.url: asked.get(f"/api/v1/{route}")}
    shown = table(answers, False, 82)
    assert max(map(width, shown)) <= 80
    assert len(table(answers, False)) < len(shown)


def test_wider_where_there_is_room(asked: RunningAgent) -> None:
    """With more columns a table is one block: the bandwidth is beside the count."""
    text = commwatch("report", "--dir", asked.directory, JOB, env=clean_env(COLUMNS="240")).stdout
    assert any({"group", "count", "busbw", "efficiency"} <= set(line.split()) for line in text.splitlines())
