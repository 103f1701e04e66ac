"""What the commands print fits the columns of a terminal, whatever jobs, hosts and groups are called; elsewhere a row is one line."""

from __future__ import annotations

import re
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
#: Commands and paths are one line each, so that they can be copied.
WHOLE = ("  history", "  again")


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
    "doctor": ("doctor",),
}


def shown(asked: RunningAgent, name: str, **env: str) -> list[str]:
    """What a command prints, in lines."""
    places = () if name == "explain" else ("--dir", asked.directory)
    done = commwatch(
        COMMANDS[name][0], *places, *COMMANDS[name][1:], env=clean_env(XDG_STATE_HOME=str(asked.directory), **env)
    )
    assert done.stdout, done.stderr
    return done.stdout.splitlines()


@pytest.mark.parametrize("cells", [80, 100, 160])
@pytest.mark.parametrize("name", COMMANDS)
def test_fits(name: str, cells: int, asked: RunningAgent) -> None:
    """No line is wider than the terminal, but one that has a path or an address."""
    wide = [
        line for line in shown(asked, name, COLUMNS=str(cells)) if width(line) > cells and not line.startswith(WHOLE)
    ]
    assert [line for line in wide if "/" not in line] == []


def words(lines: list[str]) -> set[str]:
    """The words of an output, without names and numbers."""
    return {word for line in lines for word in line.split() if re.fullmatch("[a-zA-Z]{2,}[.,;:]?", word)}


@pytest.mark.parametrize("name", ["report", "compare", "whatif"])
def test_no_word_is_lost(name: str, asked: RunningAgent) -> None:
    """In a narrow terminal sentences have the words that they have in a wide one: they are broken, not cut."""
    narrow, wide = (shown(asked, name, COLUMNS=cells) for cells in ("80", "1000"))
    assert words(wide) - words(narrow) <= {"bytes", "GiB"}  # of a column that is left out


def test_sides_of_a_comparison_stay_together(asked: RunningAgent) -> None:
    """A and B of a figure are in one row, and a table has its head once."""
    for cells in ("40", "60", "80", "99"):
        lines = shown(asked, "compare", COLUMNS=cells)
        assert [line.split()[-2:] for line in lines if line.startswith("  figure ")] == [["A", "B"]], lines
        assert sum(line.startswith("  group ") for line in lines) == 1 or cells < "80", lines


def test_what_is_left_out_is_named(asked: RunningAgent) -> None:
    """Columns for which a narrow terminal has no room are named below the table, with the columns that show them: those are enough."""
    lines = shown(asked, "report", COLUMNS="80")
    (at,) = (n for n, line in enumerate(lines) if line.startswith("  Not shown in 80 columns: ") and "algbw" in line)
    (enough,) = re.findall(r"(\d+) columns show", " ".join(lines[at : at + 2]))
    head = next(line for line in shown(asked, "report", COLUMNS=enough) if line.startswith("  group "))
    assert {"ranks", "count", "bytes", "p99", "algbw", "efficiency"} <= set(head.split())
    assert "algbw" in next(line for line in lines[at - 20 :] if "Not shown" in line)


@pytest.mark.parametrize("name", ["report", "compare", "top", "whatif"])
def test_whole_in_a_pipe(name: str, asked: RunningAgent) -> None:
    """Where output is no terminal, tables have all their columns."""
    lines = shown(asked, name)
    assert not [line for line in lines if "ot shown in" in line]
    heads = {"report": "efficiency", "compare": "busbw changes", "top": "host", "whatif": "80% of steps"}
    assert any(heads[name] in line for line in lines), lines


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
