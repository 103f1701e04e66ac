"""``commwatch.watch`` in a real job: an agent for its duration, the job's own figures, and nothing lost at its end."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

from commwatch.wire.announcement import answering
from commwatch.wire.crossing import own
from commwatch_agent.analysis.queries import QueryService
from tests.e2e.torchjob import preforked
from tests.helpers import PATIENCE_S, clean_env, wait_for


def test_watch(tmp_path: Path) -> None:
    """Each rank sees the job's figures, with the late rank; the agent ends with the job, and its history has every step."""
    env = clean_env(COMMWATCH_DIR=str(tmp_path), COMMWATCH_STATE=str(tmp_path / "state"), COMMWATCH_JOB="watched")
    done = subprocess.run(
        preforked("watched.py", 2), env=env, capture_output=True, text=True, timeout=4 * PATIENCE_S, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert "commwatch" not in done.stderr, done.stderr[-4000:]
    said = dict(json.loads(line.removeprefix("said ")) for line in done.stdout.splitlines() if line.startswith("said "))
    assert said.keys() == {0, 1}
    for rank, found in said.items():
        assert found["metrics"]["comm/straggler_rank"] == 1, rank
        assert 0.5 < found["metrics"]["comm/share"] / 0.5 < 2
        assert found["ops"] == ["all_reduce"]
        assert found["late"] == [[1]]
        assert 0 < found["step"] <= found["steps"]

    wait_for(lambda: answering(tmp_path, own()) is None, "the agent to end with the job")
    (history,) = (tmp_path / "state").glob("history*.sqlite")
    queries = QueryService(history)
    steps = queries.steps(0, 2**62, "watched", None, 100_000)
    # The first mark only begins the first step.
    assert {rank: sum(step.rank == rank for step in steps) for rank in said} == {
        rank: found["steps"] - 1 for rank, found in said.items()
    }
    assert [job.lost for job in queries.jobs()] == [0]
    assert not list((tmp_path / "rings").glob("*.ring"))
