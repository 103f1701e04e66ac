"""The probe reports which frameworks exchange a job's gradients (tests/e2e/jobs/frameworks.py), and reports none that it cannot know."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.torchjob import digest, run_job
from tests.helpers import BOTH_HOOKS

FRAMEWORKS = {
    "plain": [], "ddp": ["ddp"], "derived": ["ddp"], "fsdp2": ["fsdp2"], "fsdp": ["fsdp"], "late": None,
}  # fmt: skip


@BOTH_HOOKS
@pytest.mark.parametrize("kind", FRAMEWORKS)
def test_frameworks(hook: str, kind: str, tmp_path: Path) -> None:
    """Each rank has the framework of its model, also in the history; of a model made before the probe was installed nothing is known."""
    run_job(tmp_path, "frameworks.py", kind, COMMWATCH_JOB="frameworks", COMMWATCH="0" if kind == "late" else "1")
    queries, _ = digest(tmp_path)
    assert [view.frameworks for view in queries.ranks("frameworks")] == [FRAMEWORKS[kind]] * 2
