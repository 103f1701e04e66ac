"""Jobs that do not do what is expected of them: how they crashed and which rank first, and that they did not communicate."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.torchjob import preforked, torchrun
from tests.helpers import PATIENCE_S, agent, clean_env, commwatch, wait_for


@pytest.mark.parametrize(
    ("hook", "how", "says"),
    [
        ("native", (), r"rank 1 died \(no clean end\)"),
        ("python", ("--raise",), r"rank 1 ended with LookupError in \S+ \(\S+:\d+\)"),
    ],
    ids=["native-killed", "python-raised"],
    indirect=["hook"],
)
def test_first_rank_is_named(hook: str, tmp_path: Path, how: tuple[str, ...], says: str) -> None:
    """Around a job and beside it: the rank that failed first is named with how and when, and around it the exit code."""
    arguments = ("500", "--pause", "0.005", "--kill-rank", "1", "--kill-at", "100", *how)
    job = preforked("ops.py", 2, *arguments)
    around = job if how else torchrun("ops.py", 2, *arguments)  # once by the launcher that people use
    done = commwatch("run", "--dir", tmp_path / "run", "--port", "0", "--", *around, env=clean_env())
    assert done.returncode == 1, done.stderr[-3000:]
    assert re.search(rf"\n  how +exit code 1; {says}, on \S+\n", done.stderr), done.stderr[-3000:]
    assert re.search(
        rf"\n  what happened\n\n  \* WARNING  Rank lost: rank 1, at [\d:]{{8}} UTC\n    {says}", done.stderr
    )
    assert re.search(r"\n  job +\S+ \(failed\), began", done.stderr)
    with agent(tmp_path / "beside") as running:
        env = clean_env(COMMWATCH="1", COMMWATCH_DIR=str(tmp_path / "beside"), COMMWATCH_JOB="crashed")
        subprocess.run(job, env=env, capture_output=True, timeout=2 * PATIENCE_S, check=False)
        wait_for(lambda: running.get("/api/v1/jobs")[0]["state"] == "ended", "the end of the job")
        (view,) = running.get("/api/v1/jobs")
        assert (view["failed"], view["exit_code"]) == (True, None)
        assert re.fullmatch(rf"{says} at [\d:]{{8}} UTC(, first of 2)?", view["ending"])
        assert [rank["raised"] for rank in running.get("/api/v1/ranks")][1] == ("LookupError" if how else None)


def test_probe_without_collectives(tmp_path: Path) -> None:
    """For a job that loads the probe and communicates nothing, the message does not say why the probe might be missing."""
    done = commwatch("run", "--dir", tmp_path, "--port", "0", "--", sys.executable, "-c", "import torch")
    assert done.returncode == 0, done.stderr
    assert "commwatch: the probe was loaded in the job but saw no collective" in done.stderr
    assert "PYTHONPATH" not in done.stderr
    assert not list(tmp_path.glob("probes/*"))
