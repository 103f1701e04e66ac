"""Processes with unknown operators, estimates or sub-interpreters, or in a changing directory."""

from __future__ import annotations

from pathlib import Path

from tests.e2e.torchjob import alone, alone_anew, read_rings, said
from tests.helpers import BOTH_HOOKS


def test_unknown_operators_in_two_rings(tmp_path: Path) -> None:
    """An operator that is not in the table has its own name in each ring of a process."""
    assert said(alone_anew(tmp_path, "unknown_ops.py", WORLD_SIZE="", COMMWATCH="0")) == ["done"]
    first, second = read_rings(tmp_path)
    assert [first.op(record) for record in first.operations] == ["c10d::one_"]
    assert [second.op(record) for record in second.operations] == ["c10d::other_", "c10d::one_"]


def test_estimates(tmp_path: Path) -> None:
    """Collectives of tensors without data communicate nothing: they get no record and no number."""
    assert said(alone(tmp_path, "estimate.py", WORLD_SIZE="1")) == ["done"]
    (rank,) = read_rings(tmp_path)
    found = [(rank.op(record), record.size_bytes, record.seq) for record in rank.operations]
    assert found == [("all_reduce", size, seq) for seq, size in enumerate((4, 8, 8, 12))]


def test_trainer_changes_its_directory(tmp_path: Path) -> None:
    """A relative run directory begins where the probe was installed, for all worlds; the probe can be installed where there is no directory."""
    run = tmp_path / "run"
    job = alone(tmp_path, "moved.py", tmp_path, COMMWATCH="0", COMMWATCH_DIR="run", WORLD_SIZE="")
    assert said(job) == [*2 * [[str(run / "rings"), str(run / "profiling")]], True]
    assert len(read_rings(run)) == 2


@BOTH_HOOKS
def test_subinterpreter(hook: str, tmp_path: Path) -> None:
    """A sub-interpreter, even one that has ended, changes nothing."""
    assert said(alone_anew(tmp_path, "subinterpreter.py", WORLD_SIZE="1")) == ["done"]
    (rank,) = read_rings(tmp_path)
    assert [rank.op(record) for record in rank.operations] == ["all_reduce"]
