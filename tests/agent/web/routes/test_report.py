"""``/api/v1/report``: the report of a job as a file."""

from __future__ import annotations

import urllib.error
import urllib.request
from pathlib import Path

import pytest

from tests.agent.web.routes.test_jobs import populated
from tests.helpers import agent, commwatch


def test_report(tmp_path: Path) -> None:
    """The file is that of `commwatch report --html`, with a name from the job; a job that does not exist is an error."""
    with populated(tmp_path / "run") as running:
        with urllib.request.urlopen(f"{running.url}/api/v1/report?job=eval&format=html", timeout=60) as answer:
            page = answer.read().decode()
            assert answer.headers["Content-Disposition"] == 'attachment; filename="report-eval.html"'
            assert answer.headers["Content-Type"].startswith("text/html")
        written = tmp_path / "report.html"
        commwatch("report", "eval", "--dir", str(tmp_path / "run"), "--html", str(written))
        ours, theirs = (text.partition("<p>History:")[0] for text in (page, written.read_text(encoding="utf-8")))
        assert ours == theirs
        assert "commwatch report eval" in page
        with pytest.raises(urllib.error.HTTPError, match="404"):
            running.get("/api/v1/report?job=no")


def test_no_job(tmp_path: Path) -> None:
    """Without a job there is no report."""
    with agent(tmp_path / "run") as running, pytest.raises(urllib.error.HTTPError, match="404"):
        running.get("/api/v1/report")
