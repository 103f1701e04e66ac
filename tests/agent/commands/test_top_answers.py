"""The requests of ``commwatch top``: how often they are sent, and the message if a server does not respond as an agent."""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import pytest

from commwatch_agent.commands.top_answers import Answers, Asker
from commwatch_agent.sources.gpus import GpuViews
from tests.agent.commands.test_top import NOW, of_job
from tests.helpers import wait_for


class Asked(Counter[str]):
    """How often each path was asked for, and the parameters of each request."""

    def __init__(self) -> None:
        super().__init__()
        self.queries: list[dict[str, str]] = []


@contextmanager
def server(answers: dict[str, Any], status: int = 200) -> Iterator[tuple[str, Asked]]:
    """A server on a free port that answers by path, and how often each was asked for."""
    asked = Asked()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            path = self.path.partition("?")[0].removeprefix("/api/v1/")
            asked[path] += 1
            asked.queries.append(dict(parse_qsl(urlsplit(self.path).query)))
            found = answers.get(path, [])
            if "scope=job" in self.path and not isinstance(found, str):
                found = {"nodes": {"answered": 2, "silent": {"http://node3": "refused"}}, "data": found}
            body = found.encode() if isinstance(found, str) else json.dumps(found).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=http.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{http.server_port}", asked
    finally:
        http.shutdown()
        http.server_close()
        thread.join()


def an_agent() -> dict[str, Any]:
    """Answers of an agent with one job."""
    shown = of_job()
    about = {"version": "1", "pid": 1, "history": "h", "trouble": None, "scraped_at": None, "scraper": None}
    return {
        "jobs": [asdict(shown.job)],
        "about": about,
        "gpus": asdict(GpuViews("none", None, None, None, [], [])),
        "ranks": [asdict(rank) for rank in shown.ranks],
        "summary": asdict(shown.by_operation),
        "steps": [asdict(step) for step in shown.steps],
    }


def test_put_together() -> None:
    """Answers become the values that the API is made of; what a newer agent says beside them is passed over."""
    answers = an_agent()
    answers["ranks"][0]["new"] = 1
    with server(answers) as (url, _):
        found = Asker(lambda: [url], "", None)()
    assert isinstance(found, Answers)
    assert found.shown is not None
    assert (found.shown.job, found.shown.ranks) == (of_job().job, of_job().ranks)
    assert (found.shown.steps, found.shown.by_operation) == (of_job().steps, of_job().by_operation)
    assert (found.shown.nodes.answered, found.shown.nodes.silent) == (2, {"http://node3": "refused"})


def test_time_that_is_shown() -> None:
    """Of a running job the last 30 s are asked for; of an ended one those up to its last step, or without steps up to its end."""
    answers = an_agent()
    with server(answers) as (url, asked):
        Asker(lambda: [url], "", None)()
        assert {query["since"] for query in asked.queries if "since" in query} == {"30s"}
    answers["jobs"][0] |= {"state": "ended", "last_seen_at": NOW + 60}
    for steps, end in ((answers["steps"], NOW), ([], NOW + 60)):
        with server(answers | {"steps": steps}) as (url, asked):
            Asker(lambda: [url], "", None)()
            assert {float(query["since"]) for query in asked.queries if "since" in query} == {end - 30}


def test_slow_answers_are_asked_for_seldom() -> None:
    """Advice and topology are asked for every 30 s, in the background except for the first time; all else is asked for each time."""
    now = 0.0
    with server(an_agent()) as (url, asked):
        ask = Asker(lambda: [url], "", None, lambda: now)
        for at in (0.0, 1.0, 29.0, 31.0):
            now = at
            assert isinstance(ask(), Answers)
            wait_for(lambda: asked["advice"] == 1 + (at > 30), "the request")  # noqa: B023
    assert asked["topology"] == 2
    assert (asked["ranks"], asked["jobs"], asked["summary"]) == (4, 8, 8)


@pytest.mark.parametrize(
    ("answers", "status", "said"),
    [
        ({"jobs": "<html>"}, 200, "does not answer as an agent of this version: "),
        ({"jobs": {"detail": "x"}}, 200, "does not answer as an agent of this version: "),
        ({"jobs": [{"job_id": 7}]}, 200, "does not answer as an agent of this version: "),
        ({**an_agent(), "topology": [1]}, 200, "does not answer as an agent of this version: "),
        ({}, 503, "answers 503 (Service Unavailable) to /api/v1/jobs"),
        ({"jobs": {"detail": "try again"}}, 503, "answers 503 (Service Unavailable) to /api/v1/jobs: try again"),
    ],
)
def test_no_agent(answers: dict[str, Any], status: int, said: str) -> None:
    """Whoever does not answer as an agent does is told of in one line, and ends nothing."""
    with server(answers, status) as (url, _):
        found = Asker(lambda: [url], "", None)()
    assert isinstance(found, str)
    assert found.startswith(f"{url} {said}")
    assert "\n" not in found


def test_which_job() -> None:
    """Of several agents and jobs the latest that runs is shown; one that is asked for, wherever it is."""
    old, new = an_agent(), an_agent()
    old["jobs"] = [{**old["jobs"][0], "job_id": "old", "started_at": 1.0}]
    new["jobs"] = [{**new["jobs"][0], "job_id": "ended", "state": "ended", "started_at": 3.0}]
    with server(old) as (one, _), server(new) as (two, _):
        latest, named = (Asker(lambda: [two, one], "", job)() for job in (None, "ended"))
        assert Asker(lambda: [two, one], "", "x")() == "no job 'x' here yet; there are: ended, old"
    assert isinstance(latest, Answers)
    assert isinstance(named, Answers)
    assert latest.shown is not None
    assert named.shown is not None
    assert (latest.url, latest.shown.job.job_id, latest.others) == (one, "old", [])
    assert (named.url, named.shown.job.job_id, named.others) == (two, "ended", ["old"])
    assert Asker(list, "nobody", None)() == "nobody"
