"""The live page in Chromium beside real jobs: one with a straggler, and one whose rank 1 is stopped."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from playwright.sync_api import expect

from tests.e2e.test_verdicts import Job
from tests.e2e.torchjob import preforked
from tests.helpers import PATIENCE_S, agent, clean_env

if TYPE_CHECKING:
    from tests.browser import Chromium


def test_straggler_that_ends(chromium: Chromium, tmp_path: Path) -> None:
    """A job appears as it begins, with its late rank named and marked; its steps move on; its end is shown."""
    enough, run = tmp_path / "enough", tmp_path / "run"
    with agent(run) as running, chromium.visit(running.url) as visit:
        expect(visit.page.get_by_role("heading", name="No job here yet")).to_be_visible()
        env = clean_env(COMMWATCH="1", COMMWATCH_DIR=str(run), COMMWATCH_JOB="busy")
        job = subprocess.Popen(preforked("busy.py", 2, str(enough)), env=env, stdout=subprocess.DEVNULL)
        try:
            patience = PATIENCE_S * 1000
            expect(visit.page.locator("#about")).to_contain_text("busy, running", timeout=patience)
            expect(visit.page.locator("#wrong")).to_contain_text("Late rank: rank 1", timeout=patience)
            expect(visit.page.locator("#ranks tbody tr.warn")).to_contain_text("1running, straggler")
            expect(visit.page.locator("#operations")).to_contain_text("pipeline")
            expect(visit.page.locator("#timeline-said")).to_contain_text("of 2 ranks")
            expect(visit.page.locator("#comm")).to_contain_text("%")
            visit.page.locator("#timeline").press("ArrowLeft")
            expect(visit.page.locator("#timeline-said")).to_contain_text(" of ")
            visit.page.locator("#timeline").press("Escape")
            visit.assert_readable()
            visit.picture("live-real-straggler")
            enough.touch()
            job.wait(PATIENCE_S)
            expect(visit.page.locator("#about")).to_contain_text("busy, ended", timeout=patience)
        finally:
            job.kill()
            job.wait()


@pytest.mark.parametrize("width", [400])
def test_hang(chromium: Chromium, tmp_path: Path, width: int) -> None:
    """A rank that is stopped is named, with how long the others have been waiting."""
    with agent(tmp_path) as running, chromium.visit(running.url, width=width, dark=True) as visit:
        job = Job(tmp_path, "stuck", "stop", 1, 20, ranks=2)
        try:
            wrong = visit.page.locator("#wrong li").first
            expect(wrong).to_contain_text("Hang: rank 1", timeout=PATIENCE_S * 1000)
            expect(wrong).to_contain_text("rank 1 has not joined; its process is stopped")
            expect(visit.page.locator("#figures-said")).to_contain_text("Hang: rank 1, since ")
            expect(visit.page.locator("#ranks tbody tr").first).to_contain_text("1stopped, hang")
            expect(visit.page.locator("#flight tbody tr")).to_contain_text("all_reduce")
            expect(visit.page.locator("#timeline-said")).to_contain_text("1 not ended")
            visit.assert_readable()
            visit.picture("live-real-hang")
        finally:
            job.end()
