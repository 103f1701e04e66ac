"""Probe and agent of different commits, a hundred apart, whose rings have different formats: what each does with the other's, and what is lost."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from commwatch.wire import ring
from tests.e2e.torchjob import JOBS
from tests.earlier import command, unpacked
from tests.helpers import (
    PATIENCE_S,
    Trainer,
    agent,
    clean_env,
    free_port,
    group_entry,
    identity,
    operation,
    wait_for,
)
from tests.helpers import commwatch as today

pytestmark = pytest.mark.long
#: The last commit whose rings have format 2.
LAST_OF_FORMAT_2 = "67f2ef05~1"
STEPS = 20
#: Of a rank of ``steps.py plain``: an operation for each of two parameters and a mark each step, and a barrier.
RECORDS = 3 * STEPS + 1


@pytest.fixture(scope="module")
def earlier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tree of the earlier commit."""
    tree = unpacked(LAST_OF_FORMAT_2, tmp_path_factory.mktemp("earlier") / "tree")
    if tree is None:
        pytest.skip("needs the history of the repository")
    assert f"\nVERSION = {ring.VERSION - 1}\n" in (tree / "collectors" / "commwatch" / "wire" / "ring.py").read_text()
    return tree


def trained(place: Path, probe: Path) -> str:
    """Train on two ranks with the probe in a folder; what they wrote to their standard error."""
    port, ranks = str(free_port()), []
    for rank in ("0", "1"):
        where = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        env = clean_env(
            COMMWATCH="1", COMMWATCH_DIR=str(place / "run"), COMMWATCH_JOB="train", PYTHONPATH=str(probe), **where
        )
        script = [sys.executable, str(JOBS / "steps.py"), "plain", str(STEPS)]
        ranks.append(subprocess.Popen(script, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
    said = ""
    for process in ranks:
        out, err = process.communicate(timeout=4 * PATIENCE_S)
        assert "job done" in out, err[-3000:]
        said += err
    return said


@contextmanager
def running(place: Path, *words: str) -> Iterator[Path]:
    """An agent of another commit on the folders of a test, until it has ended with exit code 0; its log."""
    log = place / "log"
    with log.open("ab") as file:
        flags = ["--dir", str(place / "run"), "--state", str(place / "earlier-state"), "--port", "0"]
        process = subprocess.Popen([*words, "agent", *flags], env=clean_env(), stderr=file)
        try:
            wait_for(lambda: "watching" in log.read_text() or process.poll() is not None, "the agent", 4 * PATIENCE_S)
            yield log
        finally:
            process.terminate()
            code = process.wait(PATIENCE_S)
    assert code == 0, log.read_text()


def job(jobs: list[dict[str, Any]], name: str) -> dict[str, Any]:
    """What is known of a job; empty: nothing yet."""
    return next((each for each in jobs if each["job_id"] == name), {})


def test_earlier_probe(tmp_path: Path, earlier: Path) -> None:
    """Today's agent reads a job with the probe of the earlier commit to its end: every operation, nothing lost, no warning."""
    probe, log = tmp_path / "probe", tmp_path / "agent.log"
    done = subprocess.run(
        [*command(earlier), "probe", "install", str(probe)], env=clean_env(), capture_output=True, check=False
    )
    assert done.returncode == 0, done.stderr
    with agent(tmp_path / "run", said=log) as watching:
        trained(tmp_path, probe)
        found = wait_for(
            lambda: (at := job(watching.get("/api/v1/jobs"), "train")).get("state") == "ended" and at,
            "the end of the job",
        )
    assert (found["records"], found["lost"], found["ranks"]) == (2 * RECORDS, 0, [0, 1])
    assert "WARNING" not in log.read_text()


def test_earlier_agent(tmp_path: Path, earlier: Path) -> None:
    """The earlier agent refuses rings of today's probe by name and format, and leaves them: the job is undisturbed, and today's agent then reads them.

    What a ring has no room for in the meantime is lost, and counted.
    """
    probe = tmp_path / "probe"
    assert today("probe", "install", probe).returncode == 0
    overrun = identity(job="overrun", world_size=1, wall_offset_ns=time.time_ns())
    with Trainer(tmp_path / "run" / "rings" / "overrun.ring", overrun, slots=1024) as rank:
        rank.call("name", [(group_entry(ranks=(0,)),)])
        with running(tmp_path, *command(earlier)) as log:
            said = trained(tmp_path, probe)
            rank.write([operation(start_ns=0, end_ns=9)] * 3000)
            wait_for(lambda: log.read_text().count("ring format 3, this agent reads 2") == 3, "a line on each ring")
        assert "Error" not in said
        assert len(list((tmp_path / "run" / "rings").glob("*.ring"))) == 3
        with agent(tmp_path / "run") as watching:
            found = wait_for(
                lambda: (at := job(watching.get("/api/v1/jobs"), "train")).get("state") == "ended" and at, "the job"
            )
            late = wait_for(
                lambda: (at := job(watching.get("/api/v1/jobs"), "overrun")).get("records") and at, "the other job"
            )
    assert (found["records"], found["lost"]) == (2 * RECORDS, 0)
    assert late["records"] + late["lost"] == 3000
    assert 900 < late["records"] <= 1024
