"""Which operations both hooks record as beside the training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from commwatch.wire import events as ev
from tests.e2e.torchjob import read_rings, run_job
from tests.helpers import BOTH_HOOKS


def beside(place: Path, hook: str, **env: Any) -> set[int]:
    """The operations of rank 0 beside the training, by their numbers of elements."""
    run_job(place, "beside.py", COMMWATCH_HOOK=hook, COMMWATCH_JOB="beside", **env)
    operations = read_rings(place)[0].operations
    assert {each.size_bytes // 4 for each in operations} >= {2, 3, 4, 6, 7}
    return {each.size_bytes // 4 for each in operations if each.flags & ev.BESIDE}


@BOTH_HOOKS
def test_blocks_another_thread(hook: str, tmp_path: Path) -> None:
    """A collective that blocks a thread which does not train is beside the training; no message, no handle, and none before the first step is."""
    assert beside(tmp_path, hook) == {3}


@BOTH_HOOKS
def test_another_thread_communicates_for_it(hook: str, tmp_path: Path) -> None:
    """Where the thread that marks the steps never communicates, another one may do so for it: nothing is beside the training."""
    assert beside(tmp_path, hook, MARKS_ONLY="1") == set()
