"""The user's signal handlers may raise, also while our Python runs in the trainer: that reaches the user, at the user's line."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

from commwatch.wire.ring_reader import RingReader
from tests.e2e.torchjob import alone, alone_anew, read_rings, results
from tests.helpers import BOTH_HOOKS, free_port

#: Raising signals of each job of the storm: four jobs, a thousand in all.
STEPS, HITS = 50, 5


def world() -> dict[str, str]:
    """The environment in which one process joins its own group."""
    return {"WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "OMP_NUM_THREADS": "1"}


def said(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    """The output of the job, which has succeeded, without a complaint of the probe."""
    assert done.returncode == 0, done.stderr[-4000:]
    assert "commwatch: " not in done.stderr, done.stderr[-4000:]
    (told,) = results(done.stdout)
    return dict(told)


@pytest.mark.parametrize(
    ("hook", "where"),
    [
        *((hook, where) for hook in ("native", "python") for where in ("group", "dtype")),
        ("native", "ring"),
        pytest.param("python", "ring", marks=pytest.mark.long),
    ],
    indirect=["hook"],
)
def test_exit_in_the_middle(where: str, hook: str, tmp_path: Path) -> None:
    """A handler that calls ``sys.exit(9)`` while the probe makes its ring, or takes in a group or a dtype, ends the job with 9."""
    start = alone_anew if where == "ring" else alone  # Python ends in the same way wherever the handler came
    done = start(tmp_path, "handlers.py", "exit", where, **world())
    assert (done.returncode, results(done.stdout)) == (9, ["killed"]), done.stderr[-4000:]
    assert "commwatch: " not in done.stderr


@pytest.mark.usefixtures("native")
def test_aside(tmp_path: Path) -> None:
    """A thread in which the native hook asks Python waits for no import of the trainer's, and leaves nothing behind."""
    told = said(alone_anew(tmp_path, "handlers.py", "aside", **world(), COMMWATCH_HOOK="native"))
    assert told == {"imported": [], "threads": ["MainThread"]}


@BOTH_HOOKS
def test_communicates_while_the_probe_holds_its_locks(hook: str, tmp_path: Path) -> None:
    """A handler may communicate in a new dtype while the probe writes names for the trainer: that ends, and all is recorded."""
    told = said(alone(tmp_path, "handlers.py", "held", **world()))
    assert told == {"communicated": ["torch.float64", "torch.int64"], "off": False}
    (rank,) = read_rings(tmp_path)
    assert [rank.dtypes[record.dtype] for record in rank.of("all_reduce")] == ["float32", "float64", "int64"]
    (path,) = (tmp_path / "rings").glob("*.names")
    assert all(text in path.read_bytes() for text in (b'"weight"', b'"index": 3'))


@BOTH_HOOKS
def test_every_line(hook: str, tmp_path: Path) -> None:
    """At whatever line of ours a handler raises, its exception reaches the user; the probe continues, and nothing stays in flight."""
    told = said(alone(tmp_path, "handlers.py", "lines", **world()))
    assert told["raised"] > (50 if hook == "native" else 300)
    assert (told["lost"], told["in flight"], told["off"]) == (0, 0, False)


@BOTH_HOOKS
@pytest.mark.long
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_storm(kind: str, hook: str, tmp_path: Path) -> None:
    """Handlers that raise at random moments: the losses are those without the probe, and what is raised reaches the user."""
    told = said(alone(tmp_path, "storm.py", kind, STEPS, HITS, **world()))
    plain = said(alone(tmp_path, "storm.py", kind, STEPS, 0, **world(), COMMWATCH="0"))
    assert told["losses"] == plain["losses"]
    assert told["hit"] == STEPS * HITS
    assert told["in our code"] > 0
    assert told["swallowed in our code"] == 0
    (rank,) = read_rings(tmp_path)
    (path,) = (tmp_path / "rings").glob("*.ring")
    assert RingReader(path).in_flight() == []
    default = next(number for number, group in rank.groups.items() if group["name"] == "0")
    numbers = [record.seq for record in rank.operations if record.group == default]
    assert len(set(numbers)) == len(numbers)
    assert (rank.lost, max(numbers) + 1) == (0, told["launched"])
