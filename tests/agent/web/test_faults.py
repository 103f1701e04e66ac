"""Unexpected errors of routes: the client gets problem details, and the log few lines, each of one line."""

from __future__ import annotations

import http.client
import logging
from collections.abc import Iterator
from http import HTTPStatus
from pathlib import Path

import pytest
from fastapi import FastAPI
from fastapi.responses import StreamingResponse

from commwatch_agent.web.problems import answer_problems
from tests.helpers import wait_for
from tests.serving import serving


def faulty() -> FastAPI:
    """An application with two routes that fail, one of them in the middle of its answer."""
    app = FastAPI()
    answer_problems(app)

    @app.get("/api/v1/jobs")
    def jobs() -> None:
        raise KeyError("job\n7")

    @app.get("/api/v1/report")
    def report() -> StreamingResponse:
        def parts() -> Iterator[bytes]:
            yield b"the begin"
            raise ValueError("no end")

        return StreamingResponse(parts())

    return app


def test_unexpected_errors(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Each client gets a 500 that points to the log, which has the 1st, 2nd and 4th error of a kind with its place, and no traceback."""
    with serving(tmp_path / "run", faulty()) as served:
        for _ in range(6):
            answer = served.ask("/api/v1/jobs")
            assert (answer.status, answer.detail) == (
                HTTPStatus.INTERNAL_SERVER_ERROR,
                "a fault of commwatch, which its log has in full; please report it",
            )
        with pytest.raises(http.client.IncompleteRead):
            served.ask("/api/v1/report")
        wait_for(lambda: "no end" in caplog.text, "the fault in the middle")
    of_jobs = [record for record in caplog.records if "/api/v1/jobs" in record.getMessage()]
    assert [record.levelno for record in of_jobs] == [logging.ERROR] * 3
    first, _, last = (record.getMessage() for record in of_jobs)
    assert first.startswith("a fault of commwatch: GET /api/v1/jobs: KeyError: 'job\\n7' at jobs (test_faults.py:")
    assert "called at" in first
    assert last.endswith(" (4 times so far); please report it")
    assert not any(record.exc_info for record in caplog.records)
