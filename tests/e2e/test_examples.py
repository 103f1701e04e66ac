"""The examples run as a user would run them, and the report of each makes sense."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests import prefork
from tests.e2e.torchjob import preforked
from tests.helpers import clean_env, commwatch

EXAMPLES = Path(__file__).parents[2] / "examples"
#: The least to compute.
SMALL = ("--batch", "1")


def run(tmp_path: Path, script: str, ranks: int, *arguments: str, **env: str) -> dict[str, Any]:
    """Run an example under ``commwatch run`` and read its report; the output is in it under ``said``."""
    job = prefork.command(EXAMPLES / script, "--steps", "10", *arguments, ranks=ranks)
    done = commwatch("run", "--dir", tmp_path, "--port", "0", "--", *job, env=clean_env(**env))
    assert done.returncode == 0, done.stderr[-3000:]
    assert "step 10: loss" in done.stdout
    assert "commwatch report" not in done.stdout
    assert "records, none lost" in done.stderr
    report = json.loads(commwatch("report", "--dir", tmp_path, "--json").stdout)
    assert report["steps"] == 9
    assert [rank["rank"] for rank in report["ranks"]] == list(range(ranks))
    assert all(0 < (rank["exposed_share"] or 0) <= rank["comm_share"] <= 1 for rank in report["ranks"])
    assert report["lost"] == 0
    assert not list(tmp_path.glob("run-*"))
    return {**report, "said": done.stderr}


def rows(report: dict[str, Any]) -> dict[tuple[str, str], dict[str, Any]]:
    """The report's operations by group and op."""
    return {(row["by"]["group"], row["by"]["op"]): row for row in report["operations"]}


def test_ddp(tmp_path: Path) -> None:
    """Each step of the DDP example reduces every gradient once: the bytes are those of the parameters."""
    report = run(tmp_path, "train_ddp.py", 2, *SMALL)
    sys.path.insert(0, str(EXAMPLES))
    try:
        from common import Transformer  # type: ignore[import-not-found]
    finally:
        sys.path.pop(0)
    gradients = sum(parameter.nbytes for parameter in Transformer().parameters())
    row = rows(report)["default_pg", "all_reduce"]
    assert row["bytes"] == 2 * 10 * gradients
    assert row["busbw"] == pytest.approx(row["algbw"])
    assert row["untimed"] == row["failed"] == 0


def test_hook_by_default(tmp_path: Path, native: Path) -> None:
    """Where the native hook has been built, or can be, a job has it without a word."""
    report = run(tmp_path, "train_ddp.py", 2, *SMALL, COMMWATCH_HOOK="auto")
    assert report["hooks"] == ["native"]
    assert "hook," not in report["said"]


def test_no_compiler(tmp_path: Path) -> None:
    """Without a compiler a job has the Python hook, and this is printed once, for all ranks and any launcher."""
    (tmp_path / "bin").mkdir()
    for program in ("sh", "uname"):
        (tmp_path / "bin" / program).symlink_to(str(shutil.which(program)))
    env = {
        "PATH": str(tmp_path / "bin"),
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
        "COMMWATCH_HOOK": "auto",
        "CXX": "",
    }
    report = run(tmp_path / "run", "train_ddp.py", 2, *SMALL, **env)
    assert report["hooks"] == ["python"]
    told = [line for line in report["said"].splitlines() if "native" in line]
    assert told == ["commwatch: no native hook, using the Python one: no C++ compiler on PATH (c++, g++, clang++)"]
    # Without `commwatch run`, the first rank says it.
    probe = clean_env(COMMWATCH="1", COMMWATCH_DIR=str(tmp_path / "run"), **env)
    job = prefork.command(EXAMPLES / "train_ddp.py", "--steps", "10", *SMALL, ranks=2)
    done = subprocess.run(job, env=probe, capture_output=True, text=True, check=False)
    assert "step 10: loss" in done.stdout
    told = [line for line in done.stderr.splitlines() if "native" in line]
    assert len(told) == 1
    assert told[0].startswith("commwatch: using the Python hook, the native one costs less: it has not been built")


def test_fsdp(tmp_path: Path) -> None:
    """The FSDP example shows its gathers and scatters with half the algorithm bandwidth on the bus, for two ranks."""
    operations = rows(run(tmp_path, "train_fsdp.py", 2, *SMALL))
    for op in ("all_gather", "reduce_scatter"):
        (row,) = (row for (_, name), row in operations.items() if name == op)
        assert row["busbw"] == pytest.approx(row["algbw"] / 2)
        assert row["untimed"] == 0


def test_tensor_parallel(tmp_path: Path) -> None:
    """The pipeline's sends and receives and the tensor-parallel all_reduces have separate rows."""
    operations = rows(run(tmp_path, "train_tp.py", 4))
    assert operations["mesh_tp", "all_reduce"]["ranks"] == 4
    assert operations["mesh_tp", "all_reduce"]["group_size"] == 2
    assert operations["default_pg", "send"]["count"] == operations["default_pg", "recv"]["count"] == 40
    assert operations["default_pg", "recv"]["p2p_wait_s"] > 0


def recorded(tmp_path: Path, script: str, *arguments: str, ranks: int) -> dict[tuple[str, str], dict[str, Any]]:
    """Run an example that has no steps of its own, and read the operations in its report."""
    job = prefork.command(EXAMPLES / script, *arguments, ranks=ranks)
    done = commwatch("run", "--dir", tmp_path, "--port", "0", "--", *job, env=clean_env())
    assert done.returncode == 0, done.stderr[-3000:]
    return rows(json.loads(commwatch("report", "--dir", tmp_path, "--json").stdout))


def test_serving(tmp_path: Path) -> None:
    """Each request that the serving example gets over HTTP is handed out and costs an all_reduce per layer and new byte."""
    operations = recorded(tmp_path, "serve_tp.py", "--requests", "3", "--longest", "0.5", "--port", "0", ranks=2)
    assert operations["default_pg", "broadcast"]["count"] >= 2 * 3 * 2
    assert operations["default_pg", "all_reduce"]["count"] == 2 * 3 * 24 * 4


def test_rollouts(tmp_path: Path) -> None:
    """In the example of reinforcement learning two ranks train in a group of their own, and all ranks share rollouts and weights."""
    arguments = ("--rounds", "3", "--steps", "4", "--longest", "0.5")
    operations = recorded(tmp_path, "rl_rollouts.py", *arguments, ranks=4)
    assert operations["trainers", "all_reduce"]["ranks"] == 2
    assert operations["default_pg", "all_gather"]["count"] == 4 * 3
    assert operations["default_pg", "broadcast"]["count"] == 4 * 3 * 5


def test_progress_on_a_terminal(tmp_path: Path) -> None:
    """On a terminal a line at the bottom shows the progress of the job, apart from the job's own lines, and is removed at the end."""
    ours, theirs = pty.openpty()
    stop, progress = tmp_path / "stop", b"\x1b[30;1H\x1b[2Kcommwatch: step "
    command = [*prefork.commwatch_command(), "run", "--dir", str(tmp_path), "--port", "0", "--"]
    job = preforked("governed.py", 2, str(stop), "0.05")
    env = clean_env(TERM="xterm", LINES="30", COLUMNS="100")
    with subprocess.Popen([*command, *job], stdout=theirs, stderr=theirs, stdin=theirs, env=env) as process:
        os.close(theirs)
        shown = b""
        with contextlib.suppress(OSError):  # the terminal's other end has closed
            while part := os.read(ours, 4096):
                shown += part
                if progress in shown:
                    stop.touch()
    os.close(ours)
    assert process.returncode == 0
    assert progress in shown
    assert shown.count(b"said [0, ") == 1
    assert shown.rindex(b"\x1b[r\x1b[30;1H\x1b[2K") < shown.index(b"commwatch report")
