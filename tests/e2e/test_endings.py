"""Jobs that do not do what is expected of them: how they crashed and which rank first, and that they did not communicate."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests import prefork
from tests.agent.cli.test_cli import started
from tests.e2e.torchjob import preforked, torchrun
from tests.faults.run import TRAIN
from tests.helpers import BOTH_HOOKS, PATIENCE_S, agent, clean_env, commwatch, wait_for


@pytest.mark.parametrize(
    ("hook", "how", "says"),
    [
        ("native", (), r"rank 1 died of signal 9 \(SIGKILL\)"),
        ("python", ("--raise",), r"rank 1 ended with LookupError in \S+ \(\S+:\d+\): no data"),
    ],
    ids=["native-killed", "python-raised"],
    indirect=["hook"],
)
def test_first_rank_is_named(hook: str, tmp_path: Path, how: tuple[str, ...], says: str) -> None:
    """Around a job and beside it: the rank that failed first is named with how and when, around it with the exit code, beside it in a message."""
    title = "raised LookupError" if how else r"ended by signal 9 \(SIGKILL\)"
    arguments = ("500", "--pause", "0.02", "--kill-rank", "1", "--kill-at", "100", *how)
    job = preforked("ops.py", 2, *arguments)
    around = job if how else torchrun("ops.py", 2, *arguments)  # once by the launcher that people use
    done = commwatch("run", "--dir", tmp_path / "run", "--port", "0", "--", *around, env=clean_env(COLUMNS="250"))
    assert done.returncode == 1, done.stderr[-3000:]
    assert re.search(rf"\n  how +exit code 1; {says}, on \S+\n", done.stderr), done.stderr[-3000:]
    assert re.search(
        rf"\n  what happened\n\n  \* ENDED THE JOB  Rank {title}: rank 1, at [\d:]{{8}} UTC\n    {says}", done.stderr
    )
    assert re.search(r"\n  job +\S+ \(failed\), began", done.stderr)
    with agent(tmp_path / "beside") as running:
        env = clean_env(COMMWATCH="1", COMMWATCH_DIR=str(tmp_path / "beside"), COMMWATCH_JOB="crashed")
        subprocess.run(job, env=env, capture_output=True, timeout=2 * PATIENCE_S, check=False)
        wait_for(running.job_has_ended, "the end of the job")
        ends = rf"{says} at [\d:]{{8}} UTC(, first of 2)?"
        wait_for(lambda: re.fullmatch(ends, running.get("/api/v1/jobs")[0]["ending"]), "how it ended")
        (view,) = running.get("/api/v1/jobs")
        assert (view["failed"], view["exit_code"]) == (True, None)
        assert [rank["raised"] for rank in running.get("/api/v1/ranks")][1] == ("LookupError" if how else None)

        def firing() -> list[dict[str, Any]]:
            return [each for each in running.get("/api/v1/alerts")["active"] if each["state"] == "firing"]

        (message,) = wait_for(firing, "the message on the loss that ended the job")
        assert (message["name"], message["labels"]["rank"], message["labels"]["job_id"]) == ("RankLost", "1", "crashed")
        assert re.match(says, message["annotations"]["cause"])
        by = "raised LookupError" if how else "signal 9 (SIGKILL)"
        assert f"failed ({by}): read" in message["annotations"]["summary"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted(number: signal.Signals, tmp_path: Path) -> None:
    """A job that Ctrl-C or SIGTERM ends was interrupted when the signal came, for information: it has not failed, and no rank has died first."""
    run, said = tmp_path / "run", tmp_path / "said"
    command = torchrun("ops.py", 2, "5000", "--pause", "0.02")
    with started("run", "--dir", run, "--port", "0", "--", *command, said=said, start_new_session=True) as process:
        wait_for(lambda: len(list(run.glob("*/rings/*.ring"))) == 2, "both ranks")
        began = time.time()
        os.killpg(process.pid, number)  # as a terminal or a scheduler does
        assert process.wait(PATIENCE_S) != 0
    text = said.read_text()
    (how,) = re.findall(r"\n  how +(.+)\n", text)
    name = "SIGINT (Ctrl-C)" if number == signal.SIGINT else "SIGTERM"
    first, at = how.split(f"; interrupted by {name} at ")
    assert re.fullmatch(r"exit code \d+( \(SIG\w+\))?", first), text[-3000:]
    assert at in {time.strftime("%H:%M:%S %Z", time.localtime(began + late_s)) for late_s in range(3)}
    assert re.search(r"\n  job +\S+ \(ended\), began", text), text[-3000:]
    assert "ENDED THE JOB" not in text
    assert f"also: interrupted by {name}, which ended ranks 0-1, at {at}" in " ".join(text.split())


@BOTH_HOOKS
def test_failed_before_it_came(hook: str, tmp_path: Path) -> None:
    """A rank that an exception ends before it has called init_process_group is named with it, and not a rank that the launcher ended for that."""
    job = preforked("ops.py", 2, "10", "--fail-first", "0")
    done = commwatch("run", "--dir", tmp_path, "--port", "0", "--", *job, env=clean_env(COLUMNS="250"))
    assert done.returncode == 1, done.stderr[-3000:]
    assert re.search(r"\n  how +exit code 1; rank 0 ended with LookupError in main \(ops.py:\d+\)", done.stderr), (
        done.stderr[-3000:]
    )
    assert "rank 1 died" not in done.stderr


def test_probe_without_collectives(tmp_path: Path) -> None:
    """For a job that loads the probe and communicates nothing, the message does not say why the probe might be missing."""
    done = commwatch("run", "--dir", tmp_path, "--port", "0", "--", sys.executable, "-c", "import torch")
    assert done.returncode == 0, done.stderr
    assert "commwatch: the probe was loaded in the job but saw no collective" in done.stderr
    assert "PYTHONPATH" not in done.stderr
    assert not list(tmp_path.glob("probes/*"))


@pytest.mark.long
def test_killed_in_a_hang(tmp_path: Path) -> None:
    """Of a job that is killed in a hang, beside an agent of others, the report names the rank that held it up, and not one that was killed first."""
    run = tmp_path / "run"
    with agent(run, "--quiet") as watching:
        stopped = prefork.command(TRAIN, "ddp4", "stop", "2", "--after", "3", ranks=4)
        env = clean_env(COMMWATCH_JOB="hung", STORE=str(tmp_path / "store"))
        command = [*prefork.commwatch_command(), "run", "--dir", str(run), "--", *stopped]
        with subprocess.Popen(command, env=env, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True) as job:

            def hangs() -> bool:
                jobs = [each["job_id"] for each in watching.get("/api/v1/jobs")]
                return "hung" in jobs and bool(watching.get("/api/v1/incidents?job=hung&kind=hang&state=open"))

            wait_for(hangs, "the hang", 2 * PATIENCE_S)
            for rank in watching.get("/api/v1/ranks?job=hung"):
                os.kill(rank["visible_pid"], signal.SIGKILL)
            _, said = job.communicate(timeout=2 * PATIENCE_S)
    first = said[said.index("commwatch report") : said.index("\n  ranks ")]
    assert re.search(r"\n  how +exit code 1; Hang: rank 2\n", first), first
    assert re.search(
        r"\n  \* ENDED THE JOB  Hang: rank 2, [\d:]{8} UTC, for [\d.]+ s, until the job ended; ?\s*cost ", first
    ), first
    assert "process is stopped" in first
    assert "Rank died" not in first.partition("therefore")[0], first
