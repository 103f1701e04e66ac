"""``commwatch top`` in a terminal beside a real job of two ranks."""

from __future__ import annotations

from pathlib import Path

from tests.e2e.test_verdicts import Job
from tests.helpers import agent, wait_for
from tests.terminal import terminal


def test_top_of_a_real_job(tmp_path: Path) -> None:
    """It shows the job as it runs, names and marks the rank that is late; after the job was killed, that, and what happened."""
    with agent(tmp_path), terminal("top", "--dir", str(tmp_path), cells=120) as shown:
        wait_for(lambda: "no job yet" in shown.text(), "the empty agent on the screen")
        job = Job(tmp_path, "late", "late", 1, 200, ranks=2)
        try:
            wait_for(lambda: "WARNING Late rank: rank 1 " in shown.text(), "the straggler in words")
            marked = [line.split()[:3] for line in shown.screen() if line.startswith("!")]
            assert marked == [["!", "1", "straggler"]]
            assert "commwatch top: late, running, 2 of 2 ranks" in shown.text()
            (operation,) = [line.split() for line in shown.screen() if line.split()[1:2] == ["all_reduce"]]
            assert operation[0] == "default_pg"
        finally:
            job.end()
        wait_for(lambda: "commwatch top: late, failed at " in shown.text(), "the end of the job on the screen")
        wait_for(lambda: "until the job ended" in shown.text(), "what happened")
        assert "WARNING Late rank: rank 1 " in shown.text()
        shown.press("q")
        assert shown.ended() == 0
        wait_for(shown.as_found, "the terminal as it was")
