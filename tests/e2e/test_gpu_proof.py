"""``commwatch doctor --gpu-proof`` with real jobs on the CPU, and what it says where it cannot run."""

from __future__ import annotations

import json
import os
import shlex
import sys
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

from commwatch_agent.proof.gpu_proof import SCENES, Proof, as_json, holds, machine
from tests import prefork
from tests.agent.test_config import one_line
from tests.helpers import clean_env, commwatch

#: On a busy machine the times of steps differ by any factor.
ANY = 100.0
#: A Python whose jobs are forks of a process that has imported torch.
FORKS = """#!/bin/sh
if [ "$2" = commwatch.probe.torch_proof ]; then
    shift 2
    exec {job} "$@"
fi
exec {python} "$@"
"""


@pytest.fixture
def forks(tmp_path: Path) -> str:
    """Such a Python."""
    (tmp_path / "job.py").write_text("from commwatch.probe import torch_proof\n\ntorch_proof.main()\n")
    program = tmp_path / "python"
    program.write_text(FORKS.format(job=shlex.join(prefork.command(tmp_path / "job.py")), python=sys.executable))
    program.chmod(0o755)
    return str(program)


@pytest.mark.parametrize("anew", [False, pytest.param(True, marks=pytest.mark.long)], ids=["forks", "anew"])
def test_on_the_cpu(anew: bool, forks: str) -> None:
    """On the CPU with Gloo, every row that does not need a GPU holds, and the result has versions, the hook and each row with its figure."""
    env = {**clean_env(), "COMMWATCH_HOOK": "python", "COMMWATCH_DISABLE": "1"}  # settings of the caller have no effect
    python = sys.executable if anew else forks
    on = machine(python, env, "cpu")
    scenes = (SCENES[0]._replace(rounds=2),)
    proof = Proof(on, python, env, device="cpu", scenes=scenes, steps=5, most=ANY)
    rows = list(proof.rows())
    assert {row.what: row.ok for row in rows} == {
        "ddp: loss": True,
        "ddp: timing": True,
        "ddp: count": True,
        "ddp: step": True,
        "durations: CUDA events": None,
        "durations: torch.profiler": None,
    }, rows
    assert holds(rows)
    result = json.loads(as_json(proof, rows))
    assert (result["holds"], result["hook"], result["gpus"]) == (True, "native", [])
    assert result["torch"] == on.torch
    assert result["rows"] == [asdict(row) for row in rows]
    figures = {row["what"]: row["figure"] for row in result["rows"]}
    assert figures["ddp: count"] > 10 * figures["ddp: timing"] > 0


def test_without_torch(tmp_path: Path) -> None:
    """Without torch in this Python, the command prints one line with the remedy, exits with 2, and writes no file."""
    (tmp_path / "torch.py").write_text("raise ModuleNotFoundError(\"No module named 'torch'\", name='torch')\n")
    env = clean_env(PYTHONPATH=os.pathsep.join(filter(None, (str(tmp_path), os.environ.get("PYTHONPATH")))))
    said = one_line(commwatch("doctor", "--gpu-proof", tmp_path / "result.json", env=env))
    assert "cannot import torch (ModuleNotFoundError: No module named 'torch')" in said
    assert "name the Python of your training jobs with --python" in said
    assert not (tmp_path / "result.json").exists()


def test_without_gpu(tmp_path: Path) -> None:
    """With the CPU build of torch, or no GPU, one line says what to do, the exit code is 2, and no file is written."""
    said = one_line(commwatch("doctor", "--gpu-proof", env=clean_env(CUDA_VISIBLE_DEVICES=""), cwd=tmp_path))
    without_cuda = torch.version.cuda is None
    assert ("is built without CUDA: install the CUDA build" if without_cuda else "finds no NVIDIA GPU (") in said
    assert list(tmp_path.iterdir()) == []
