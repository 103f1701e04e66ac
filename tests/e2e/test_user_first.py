"""Training goes on as without the probe: standard error that cannot be written, an exit amid communication, tensors without memory."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

import pytest

from tests import prefork
from tests.e2e.torchjob import JOBS, alone, read_rings, said
from tests.helpers import BOTH_HOOKS, PATIENCE_S, clean_env, needs

ALONE = """
import torch, torch.distributed as dist
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
dist.all_reduce(torch.ones(4))
dist.destroy_process_group()
print("job done")
"""


#: What the probe has a line about.
TROUBLES = {
    "remark": {"XDG_CACHE_HOME": "/nowhere", "COMMWATCH_HOOK": "auto"},
    "no hook": {"COMMWATCH_HOOK": "native", "XDG_CACHE_HOME": "/nowhere"},  # the probe is not loaded
    "wrong setting": {"COMMWATCH_SLOTS": "5"},
}


@pytest.mark.parametrize(
    ("error", "trouble", "anew"),
    [
        ("full", "remark", False),
        pytest.param("full", "remark", True, marks=pytest.mark.long),
        ("full", "no hook", False),
        ("full", "wrong setting", False),
        ("closed", "remark", True),
        pytest.param("closed", "no hook", True, marks=pytest.mark.long),
        pytest.param("closed", "wrong setting", True, marks=pytest.mark.long),
        ("no reader", "remark", False),
        ("no reader", "no hook", False),
        pytest.param("no reader", "no hook", True, marks=pytest.mark.long),
        ("no reader", "wrong setting", False),
    ],
)
def test_no_standard_error(tmp_path: Path, error: str, trouble: str, anew: bool) -> None:
    """A line that cannot be printed is lost: neither an operation nor ``import torch`` fails, nor does the exit."""
    env = clean_env(**{"COMMWATCH": "1", "COMMWATCH_DIR": str(tmp_path), "RANK": "0", **TROUBLES[trouble]})
    reader, pipe = os.pipe()
    os.close(reader)
    full = os.open("/dev/full", os.O_WRONLY)
    redirected = {"full": full, "closed": None, "no reader": pipe}[error]
    closing, script = "exec 2>&-; " if error == "closed" else "", tmp_path / "alone.py"
    script.write_text(ALONE)
    start = [sys.executable, str(script)] if anew else prefork.command(script)
    command = ["sh", "-c", f'{closing}exec "$@"', "sh", *start]
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
    script, arguments = JOBS / "reused.py", (when, trouble)
    # Before the import of torch, nothing can be closed in a process that has imported it.
    command = [sys.executable, str(script), *arguments] if when == "before" else prefork.command(script, *arguments)
    done = subprocess.run(command, env=env, cwd=place, capture_output=True, timeout=2 * PATIENCE_S, check=False)
    assert (done.returncode, done.stdout) == (0, b"job done\n"), done.stderr
    return (place / ("early" if when == "before" else "checkpoint")).read_bytes()


@cache
def plain_checkpoint(when: str, trouble: str) -> bytes:
    """What it has there without the probe."""
    with tempfile.TemporaryDirectory() as place:
        Path(place).chmod(0o755)
        return checkpoint_of(Path(place, "plain"), when, trouble, COMMWATCH_DISABLE="1")


#: Before the import of torch, a job starts as a new Python, which takes 2 s of a core.
ANEW = pytest.mark.long


@pytest.mark.parametrize(
    ("hook", "trouble", "when"),
    [
        *((hook, trouble, "after") for hook in ("native", "python") for trouble in ("no folder", "no threads")),
        ("native", "no folder", "before"),
        pytest.param("native", "no threads", "before", marks=ANEW),
        pytest.param("python", "no folder", "before", marks=ANEW),
        pytest.param("python", "no threads", "before", marks=ANEW),
    ],
    indirect=["hook"],
)
def test_checkpoint_in_place_of_standard_error(tmp_path: Path, hook: str, trouble: str, when: str) -> None:
    """A file that gets the number of the closed standard error is, byte for byte, what it is without the probe, whichever part of that has a line."""
    needs(os.getuid() == 0 or trouble != "no threads", "root, to become another user")
    wrong = {"COMMWATCH_DIR": "/dev/null"} if trouble == "no folder" else {}
    settings = {"COMMWATCH": "1", "COMMWATCH_HOOK": hook, **wrong}
    plain = plain_checkpoint(when, trouble if trouble == "no threads" else "")
    assert checkpoint_of(tmp_path / "probed", when, trouble, **settings) == plain


@pytest.mark.parametrize(
    ("hook", "when"),
    [
        ("auto", "after"),
        ("native", "after"),
        ("auto", "before"),
        pytest.param("native", "before", marks=ANEW),
    ],
)
def test_checkpoint_and_a_remark(tmp_path: Path, hook: str, when: str) -> None:
    """The same for the line with the default settings, which reports that the native hook is missing."""
    settings = {"COMMWATCH": "1", "COMMWATCH_HOOK": hook, "XDG_CACHE_HOME": "/nowhere"}
    assert checkpoint_of(tmp_path / "probed", when, "", **settings) == plain_checkpoint(when, "")


@pytest.mark.parametrize(
    ("hook", "how", "code"),
    [
        pytest.param("native", (), 0, id="native-exit"),
        pytest.param("python", ("raise",), 1, id="python-raise"),
        pytest.param("native", ("raise",), 1, id="native-raise", marks=pytest.mark.long),
        pytest.param("python", (), 0, id="python-exit", marks=pytest.mark.long),
    ],
    indirect=["hook"],
)
def test_exit_with_an_operation_in_flight(tmp_path: Path, hook: str, how: tuple[str, ...], code: int) -> None:
    """A rank that exits amid an operation for which it does not wait ends with its own code once the other rank has joined."""
    about = {"COMMWATCH": "1", "COMMWATCH_HOOK": hook, "COMMWATCH_DIR": str(tmp_path / "run"), "WORLD_SIZE": "2"}
    script, arguments = JOBS / "unawaited.py", (str(tmp_path), *how)
    # Only the first one exits amid an operation.
    commands = [sys.executable, str(script), *arguments], prefork.command(script, *arguments)
    ranks = [
        subprocess.Popen(command, env=clean_env(**about, RANK=str(rank)), stderr=subprocess.PIPE, text=True)
        for rank, command in enumerate(commands)
    ]
    errors = [rank.communicate(timeout=2 * PATIENCE_S)[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [code, 0], errors
    assert [len(each.operations) for each in read_rings(tmp_path / "run")] == [2, 2]


@BOTH_HOOKS
def test_tensors_without_memory(tmp_path: Path, hook: str) -> None:
    """Compiling a collective, and waiting for a fake tensor, work while an operation is pending."""
    done = alone(tmp_path, "faked.py", COMMWATCH_HOOK=hook)
    assert said(done) == []
    assert "job done" in done.stdout
