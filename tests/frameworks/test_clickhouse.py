"""The documented way of exports into ClickHouse, in chdb, which is ClickHouse in a process (``make frameworks``)."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.helpers import agent, commwatch
from tests.live import HandMade

pytestmark = pytest.mark.frameworks
DOCUMENT = Path(__file__).parents[2] / "docs" / "runs.md"
STEPS = 20


def test_a_day_of_a_cluster(tmp_path: Path) -> None:
    """The files of two jobs are read at once, and the sums are those of the operations that were written."""
    from chdb.session import Session

    with (
        agent(tmp_path / "run") as running,
        HandMade(tmp_path / "run", "first") as first,
        HandMade(tmp_path / "run", "second") as second,
    ):
        for job, steps in ((first, STEPS), (second, 2 * STEPS)):
            job.run(steps)
            job.read_by(running)
    for name in ("first", "second"):
        out = tmp_path / "day" / name / "node1"
        done = commwatch("export", name, "--dir", tmp_path / "run", "--out", out)
        assert (done.returncode, done.stderr) == (0, "")
    (statements,) = re.findall(r"ClickHouse reads.*?```sql\n(.*?)```", DOCUMENT.read_text(), re.DOTALL)
    create, question = (
        statements.replace("/shared/commwatch/2026-11-26", str(tmp_path / "day")).strip().rstrip(";").split(";")
    )
    session = Session()
    session.query("CREATE DATABASE IF NOT EXISTS test")
    session.query("USE test")
    session.query(create)
    found = [line.split(",")[:3] for line in str(session.query(question, "CSV")).splitlines()]
    assert sorted(found) == sorted(
        [f'"{job}"', f'"{op}"', str(2 * steps * size)]
        for job, steps, op, size in (
            ("second", 2 * STEPS, "all_reduce", 8_000_000), ("second", 2 * STEPS, "all_gather", 4_000_000),
            ("first", STEPS, "all_reduce", 8_000_000), ("first", STEPS, "all_gather", 4_000_000),
        )
    )  # fmt: skip
