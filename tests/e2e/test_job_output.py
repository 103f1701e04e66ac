"""Findings in the output of real jobs, whose ranks write to files as under ``torchrun --log-dir``."""

from __future__ import annotations

import re
import shlex
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from tests import prefork
from tests.e2e.torchjob import JOBS
from tests.helpers import PATIENCE_S, agent, clean_env, commwatch, free_port, wait_for

JOB = "printed"
FAILURE = """\
node3:77:91 [1] transport/nvls.cc:158 NCCL WARN Some part could not be set up: slot 12 is taken
node3:77:91 [1] NCCL INFO transport/nvls.cc:420 -> 3
node3:77:91 [1] NCCL INFO init.cc:1548 -> 3
[rank1]: Traceback (most recent call last):
[rank1]: torch.distributed.DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:3356, internal error, NCCL version 2.27.3
[rank1]: ncclInternalError: Internal check failed.
[rank1]: Last error:
[rank1]: Some part could not be set up: slot 12 is taken
"""
#: Of a run before, which used the same files.
OLD = """\
node1:5:5 [0] init.cc:1041 NCCL WARN Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 1000
node1:5:5 [0] NCCL INFO init.cc:1358 -> 5
"""


@contextmanager
def running(directory: Path, lines: str) -> Iterator[list[Path]]:
    """A job of two ranks, of which rank 1 writes lines to its error output; the error outputs, to which the ranks append."""
    (directory / "lines").write_text(lines)
    over, port = directory / "over", str(free_port())
    command = prefork.command(JOBS / "printed.py", str(directory / "lines"), str(over))
    errors, ranks = [], []
    with ExitStack() as files:
        for rank in range(2):
            folder = directory / "logs" / "attempt_0" / str(rank)
            folder.mkdir(parents=True, exist_ok=True)
            out, err = (files.enter_context((folder / name).open("ab")) for name in ("stdout.log", "stderr.log"))
            about = {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            env = clean_env(COMMWATCH="1", COMMWATCH_DIR=str(directory / "run"), COMMWATCH_JOB=JOB, **about)
            ranks.append(subprocess.Popen(command, env=env, stdout=out, stderr=err))
            errors.append(folder / "stderr.log")
    try:
        yield errors
    finally:
        over.touch()
        for process in ranks:
            process.wait(PATIENCE_S)


def test_failure_in_the_output(tmp_path: Path) -> None:
    """A failure in a rank's own output is in the topology with its line, in the incident with its words, and in the report after the job's end."""
    old = tmp_path / "logs" / "attempt_0" / "1" / "stderr.log"
    old.parent.mkdir(parents=True)
    old.write_text(OLD)
    with agent(tmp_path / "run") as watching:
        with running(tmp_path, FAILURE) as errors:
            (topology,) = wait_for(lambda: watching.get("/api/v1/topology"), "the findings")
            found = [finding for finding in topology["findings"] if finding["severity"] == "error"]
            (shown, *_) = found[0]["evidence"]
            assert (shown["file"], shown["line"]) == (str(errors[1]), 3)
            assert "slot 12 is taken" in found[0]["says"]

            def fault() -> dict[str, str] | None:
                opened = watching.get(f"/api/v1/incidents?job={JOB}&kind=nccl_fault&state=open")
                return next((each for each in opened if "slot 12 is taken" in each["says"]), None)

            incident = wait_for(fault, "the incident")
            assert incident["remedy"] == found[0]["do"]
            details = watching.get(f"/api/v1/incidents/{incident['id']}")
            texts = [item["text"] for item in details["evidence"]]
            assert f"{errors[1]}:3: {FAILURE.splitlines()[0]}" in texts
            assert found[0]["means"] in texts
        wait_for(watching.job_has_ended, "the end of the job")
        said = commwatch("report", "--dir", tmp_path / "run", JOB).stdout
        assert "slot 12 is taken" in said
        assert "Duplicate GPU" not in said


def test_failure_of_a_run_before(tmp_path: Path) -> None:
    """A failure that the files had before the job is not the job's."""
    old = tmp_path / "logs" / "attempt_0" / "1" / "stderr.log"
    old.parent.mkdir(parents=True)
    old.write_text(FAILURE)
    with agent(tmp_path / "run") as watching:
        with running(tmp_path, "node3:77:91 [1] NCCL INFO comm 0x55aa rank 0 nranks 1 - Destroy COMPLETE\n"):
            (topology,) = wait_for(lambda: watching.get("/api/v1/topology"), "the line")
            assert topology["findings"] == []
        wait_for(watching.job_has_ended, "the end of the job")
        assert watching.get(f"/api/v1/incidents?job={JOB}&kind=nccl_fault") == []


def test_failure_at_once(tmp_path: Path) -> None:
    """The report of a job that fails as it begins has the reason from its output; NCCL's lines are copies of those in its own log, and do not count."""
    (tmp_path / "lines").write_text(FAILURE)
    job = prefork.command(JOBS / "printed.py", str(tmp_path / "lines"), ranks=2)
    to_file = ["sh", "-c", f"exec {shlex.join(job)} >{shlex.quote(str(tmp_path / 'job.log'))} 2>&1"]
    done = commwatch("run", "--dir", tmp_path / "run", "--port", "0", "--", *to_file, env=clean_env())
    assert done.returncode != 0
    causes, _, _ = done.stderr.partition("therefore")
    (fault,) = re.findall(r"Communication fault.*?\n\n", causes, re.DOTALL)
    assert "12 is taken; raised by rank 1" in " ".join(fault.split())
