"""Real jobs in which one rank is late: it is named, with what it costs, and when it is another one's turn, that one."""

from __future__ import annotations

import json
import re
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests import prefork
from tests.e2e.test_verdicts import Job, verdicts_of
from tests.faults.run import Place
from tests.faults.run import ranks as ranks_of
from tests.helpers import PATIENCE_S, RunningAgent, agent, clean_env, commwatch, wait_for

LATE_MS = 50.0
#: Jobs: how many ranks each has, and which one is late at first; then the next one is.
JOBS = {"three": (3, 1), "four": (4, 3)}


def straggler(running: RunningAgent, job: str, rank: int) -> dict[str, Any] | None:
    """The verdict that ``rank`` is the straggler, once its lateness, a mean over the window, is right within 20%."""
    for verdict in verdicts_of(running, job):
        found = re.search(r"late by ([0-9.]+) ms", verdict["says"])
        if verdict["ranks"] == [rank] and found is not None and 0.8 * LATE_MS < float(found[1]) < 1.2 * LATE_MS:
            return verdict
    return None


def test_straggler(tmp_path: Path) -> None:
    """A rank that sleeps 50 ms before each collective is the straggler, its lateness right within 20%; then the next. Two jobs at once."""
    with ExitStack() as stack:
        running = stack.enter_context(agent(tmp_path))
        for name, (ranks, culprit) in JOBS.items():
            job = Job(tmp_path, name, "late", culprit, 200, ranks=ranks)
            stack.callback(job.end)
        for turn in (0, 1):
            for name, (ranks, culprit) in JOBS.items():
                rank = (culprit + turn) % ranks
                verdict = wait_for(partial(straggler, running, name, rank), f"rank {rank} of {name} to be named")
                assert (verdict["kind"], verdict["cause"]) == ("straggler", "late")
                assert verdict["waiting"] == [other for other in range(ranks) if other != rank]
                assert 0 < verdict["cost_share"] < 1


@pytest.mark.parametrize(
    ("shape", "lasts_s"), [("plain", 20), *(pytest.param(each, 20, marks=pytest.mark.long) for each in ("ddp", "pipe"))]
)
def test_report_names_the_same_rank(tmp_path: Path, shape: str, lasts_s: int) -> None:
    """A rank that sleeps 40 ms in each step is named while the job runs, and first in the report of the ended job, in its headline, too."""
    train = Path(__file__).parents[1] / "advice" / "jobs" / "train.py"
    command = prefork.command(train, shape, "--late", "0.04", "--seconds", str(lasts_s))
    with agent(tmp_path) as running:
        with ranks_of(command, [Place(tmp_path)] * 2, "job") as started:
            late = wait_for(lambda: [each["ranks"] for each in verdicts_of(running, "job")], "the verdict")
            for each in started:
                each.communicate(timeout=PATIENCE_S)
        wait_for(running.job_has_ended, "its end")
    built = json.loads(commwatch("report", "job", "--json", "--dir", tmp_path).stdout)
    first = built["advice"][0]
    assert (first["rule"], first["remedies"][0]["whatif"]) == ("straggler", {"no_late_rank": late[0]}), built["advice"]
    assert [int(rank) for rank in built["late"]] == late[0]
    text = commwatch("report", "job", "--dir", tmp_path, env=clean_env(COLUMNS="250")).stdout
    assert re.search(rf"comm share .*waiting for rank {late[0][0]}", text), text
