"""Training goes on as without the probe: standard error that cannot be written, an exit amid communication, tensors without memory."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.torchjob import JOBS, alone_anew, read_rings, said
from tests.helpers import BOTH_HOOKS, PATIENCE_S, clean_env, needs

ALONE = """
import torch, torch.distributed as dist
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
dist.all_reduce(torch.ones(4))
dist.destroy_process_group()
print("job done")
"""


@pytest.mark.parametrize(
    "settings",
    [
        {"XDG_CACHE_HOME": "/nowhere", "COMMWATCH_HOOK": "auto"},  # a remark
        {"COMMWATCH_HOOK": "native", "XDG_CACHE_HOME": "/nowhere"},  # the probe is not loaded
        {"COMMWATCH_SLOTS": "5"},  # a wrong setting
    ],
    ids=["remark", "no hook", "wrong setting"],
)
@pytest.mark.parametrize("error", ["full", "closed", "no reader"])
def test_no_standard_error(tmp_path: Path, error: str, settings: dict[str, str]) -> None:
    """A line that cannot be printed is lost: neither an operation nor ``import torch`` fails, nor does the exit."""
    env = clean_env(**{"COMMWATCH": "1", "COMMWATCH_DIR": str(tmp_path), "RANK": "0", **settings})
    reader, pipe = os.pipe()
    os.close(reader)
    full = os.open("/dev/full", os.O_WRONLY)
    redirected = {"full": full, "closed": None, "no reader": pipe}[error]
    closing = "exec 2>&-; " if error == "closed" else ""
    command = ["sh", "-c", f'{closing}exec "$0" -c "$1"', sys.executable, ALONE]
    try:
        done = subprocess.run(
            command, env=env, stdout=subprocess.PIPE, stderr=redirected, text=True, timeout=PATIENCE_S, check=False
        )
    finally:
        os.close(pipe)
        os.close(full)
    assert (done.returncode, done.stdout) == (0, "job done\n")


def checkpoint_of(place: Path, when: str, trouble: str, **settings: str) -> bytes:
    """What a job has in the file that has the number of its standard error."""
    place.mkdir()
    env = clean_env(**{"COMMWATCH_DIR": str(place / "run"), "RANK": "0", **settings})
    command = [sys.executable, str(JOBS / "reused.py"), when, trouble]
    done = subprocess.run(command, env=env, cwd=place, capture_output=True, timeout=2 * PATIENCE_S, check=False)
    assert (done.returncode, done.stdout) == (0, b"job done\n"), done.stderr
    return (place / ("early" if when == "before" else "checkpoint")).read_bytes()


@BOTH_HOOKS
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("trouble", ["no folder", "no threads"])
def test_checkpoint_in_place_of_standard_error(tmp_path: Path, hook: str, trouble: str, when: str) -> None:
    """A file that gets the number of the closed standard error is, byte for byte, what it is without the probe, whichever part of that has a line."""
    needs(os.getuid() == 0 or trouble != "no threads", "root, to become another user")
    plain = checkpoint_of(tmp_path / "plain", when, trouble, COMMWATCH_DISABLE="1")
    wrong = {"COMMWATCH_DIR": "/dev/null"} if trouble == "no folder" else {}
    settings = {"COMMWATCH": "1", "COMMWATCH_HOOK": hook, **wrong}
    assert checkpoint_of(tmp_path / "probed", when, trouble, **settings) == plain


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("hook", ["auto", "native"])
def test_checkpoint_and_a_remark(tmp_path: Path, hook: str, when: str) -> None:
    """The same for the line with the default settings, which reports that the native hook is missing."""
    plain = checkpoint_of(tmp_path / "plain", when, "", COMMWATCH_DISABLE="1")
    settings = {"COMMWATCH": "1", "COMMWATCH_HOOK": hook, "XDG_CACHE_HOME": "/nowhere"}
    assert checkpoint_of(tmp_path / "probed", when, "", **settings) == plain


@BOTH_HOOKS
@pytest.mark.parametrize(("how", "code"), [((), 0), (("raise",), 1)], ids=["exit", "raise"])
def test_exit_with_an_operation_in_flight(tmp_path: Path, hook: str, how: tuple[str, ...], code: int) -> None:
    """A rank that exits amid an operation for which it does not wait ends with its own code once the other rank has joined."""
    about = {"COMMWATCH": "1", "COMMWATCH_HOOK": hook, "COMMWATCH_DIR": str(tmp_path / "run"), "WORLD_SIZE": "2"}
    command = [sys.executable, str(JOBS / "unawaited.py"), str(tmp_path), *how]
    ranks = [
        subprocess.Popen(command, env=clean_env(**about, RANK=str(rank)), stderr=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    errors = [rank.communicate(timeout=2 * PATIENCE_S)[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [code, 0], errors
    assert [len(each.operations) for each in read_rings(tmp_path / "run")] == [2, 2]


@BOTH_HOOKS
def test_tensors_without_memory(tmp_path: Path, hook: str) -> None:
    """Compiling a collective, and waiting for a fake tensor, work while an operation is pending."""
    done = alone_anew(tmp_path, "faked.py", COMMWATCH_HOOK=hook)
    assert said(done) == []
    assert "job done" in done.stdout
