"""Real jobs whose collectives are numbered 4,294,967,295, 0, 1: either hook records them, and what the agent makes of them is right."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from commwatch.probe.native import library
from commwatch.wire import events as ev
from commwatch.wire.numbers import NUMBERS
from commwatch_agent.ingest.rank_totals import RankTotals
from tests import prefork
from tests.e2e.torchjob import JOBS, digest, read_rings, run_job
from tests.helpers import BOTH_HOOKS, PATIENCE_S, agent, clean_env, free_port, needs, wait_for

RANKS, FIRST = 2, NUMBERS - 3
#: For an agent that soon wonders about a wait at a place where the job has not been before.
SOON: dict[str, float | str] = {"commwatch_agent.analysis.waits.patience.NEW_S": 10.0}
NUMBERED = [(FIRST + after) % NUMBERS for after in range(6)]


@pytest.fixture(scope="module")
def first_number(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The library with which a job sets the first number of a group."""
    needs(shutil.which("g++"), "g++")
    directory = tmp_path_factory.mktemp("first")
    (directory / "format.h").write_text(library.format_header())
    built, included = directory / "first_number.so", [f"-I{directory}", f"-I{library.HERE}", f"-I{library.PLUGIN}"]
    command = [
        "g++",
        "-std=c++20",
        "-O0",
        "-fPIC",
        "-shared",
        *included,
        str(JOBS / "first_number.cpp"),
        "-o",
        str(built),
    ]
    subprocess.run(command, check=True, timeout=PATIENCE_S)
    return built


def latest(ranks: list[RankTotals], group_id: str) -> list[int]:
    """The number of the latest collective of each rank in a group."""
    return [seq for rank in ranks for group, seq in rank.last_seq.items() if rank.group(group).group_id == group_id]


@BOTH_HOOKS
def test_recorded(hook: str, first_number: Path, tmp_path: Path) -> None:
    """Each collective is recorded once, found by its number, and joined; the latest one is the one after 0."""
    run_job(tmp_path, "numbers_go_on.py", "all", str(first_number), COMMWATCH_HOOK=hook, COMMWATCH_BUDGET="0")
    for rank in read_rings(tmp_path):
        ((number, group),) = [each for each in rank.groups.items() if each[1]["label"] == "data"]
        assert [record.seq for record in rank.operations if record.group == number] == NUMBERED
    query, aggregate = digest(tmp_path)
    (job,) = aggregate.jobs.values()
    assert latest([*job.rank_totals.values()], group["group_id"]) == [2, 2]
    assert (job.joins[group["group_id"]].unjoined, [*job.joins[group["group_id"]].numbers()]) == (0, [])
    for seq in NUMBERED:
        found = query.collective(group["group_id"], seq)
        assert found is not None
        operations, waits = found
        assert [(one.rank, one.seq) for one in operations] == [(0, seq), (1, seq)]
        assert waits is not None
    assert query.collective(group["group_id"], 3) is None


@BOTH_HOOKS
def test_only_counted(hook: str, first_number: Path, tmp_path: Path) -> None:
    """Collectives that are only counted are counted once each, and the number of the latest is the one after 0."""
    arguments = "numbers_go_on.py", "counted", str(first_number)
    run_job(tmp_path, *arguments, COMMWATCH_HOOK=hook, COMMWATCH_BUDGET="0.000000001")
    for rank in read_rings(tmp_path):
        ((number, group),) = [each for each in rank.groups.items() if each[1]["label"] == "data"]
        written = [record for record in rank.operations if record.group == number]
        assert {record.timing for record in written} == {ev.COUNTED}
        assert [record.seq for record in written][:: max(1, len(written) - 1)] == [NUMBERS - 2, 2]
        assert sum(record.waited_us for record in written) == len(NUMBERED)
    (job,) = digest(tmp_path)[1].jobs.values()
    assert latest([*job.rank_totals.values()], group["group_id"]) == [2, 2]


def test_hang(first_number: Path, native: None, tmp_path: Path) -> None:
    """A rank that does not come to the collective after the greatest number is named."""
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(RANKS)}
    probe = {"COMMWATCH": "1", "COMMWATCH_DIR": str(tmp_path), "COMMWATCH_JOB": "hang"}
    command = prefork.command(JOBS / "numbers_go_on.py", "hang", str(first_number))
    with agent(tmp_path, constants=SOON) as running:
        ranks = [
            subprocess.Popen(command, env=clean_env(**where, **probe, RANK=str(rank)), stdout=subprocess.DEVNULL)
            for rank in range(RANKS)
        ]

        def verdicts() -> list[dict[str, Any]]:
            known = any(job["job_id"] == "hang" for job in running.get("/api/v1/jobs"))
            found: list[dict[str, Any]] = running.get("/api/v1/verdicts?job=hang") if known else []
            return found

        try:
            wait_for(lambda: bool(verdicts()), "a verdict")
            (verdict,) = verdicts()
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()
    assert (verdict["cause"], verdict["ranks"], verdict["waiting"], verdict["seq"]) == ("not_joined", [1], [0], 0)
