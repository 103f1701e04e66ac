"""Text that is none, in every parameter of every route that takes text: refused by name, never a 5xx."""

from __future__ import annotations

import inspect
import json
import os
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_type_hints

import pytest
from fastapi import FastAPI
from fastapi.routing import APIRoute
from prometheus_client import CollectorRegistry

from commwatch_agent.analysis.queries import QueryService
from commwatch_agent.questions.worker import Worker
from commwatch_agent.sources.log_requests import LogRequest
from commwatch_agent.web import problems
from commwatch_agent.web.application import application
from commwatch_agent.web.gate import LIVE, line_of
from commwatch_agent.web.routes.params import MOST_CHARACTERS, query_names
from tests.agent.web.routes.test_jobs import populated
from tests.helpers import RunningAgent, agent, idle_services, wait_for

#: As they are sent, and what is said of them.
WRONG = {
    "%ED%A0%80": "it is not UTF-8",
    "a%ED%B3%BFb": "it is not UTF-8",
    "%FF": "it is not UTF-8",
    "caf%E9": "it is not UTF-8",
    "train%00": "it contains a NUL character",
    "x" * (MOST_CHARACTERS + 1): "characters; at most",
}
#: The same in a body of JSON.
WRONG_JSON = {
    r"\ud800": "it is not UTF-8",
    r"a\udcffb": "it is not UTF-8",
    r"train\u0000": "it contains a NUL character",
    "x" * (MOST_CHARACTERS + 1): "characters; at most",
}


@pytest.fixture(scope="module")
def asked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningAgent]:
    """An agent with three jobs in its history."""
    with populated(tmp_path_factory.mktemp("text") / "run") as running:
        yield running


def answered(running: RunningAgent, path: str, body: str | None = None) -> tuple[int, dict[str, Any]]:
    """Status and problem details of an answer; the details are empty where it is none."""
    headers = {"Authorization": f"Bearer {running.token}", "Content-Type": "application/json"}
    request = urllib.request.Request(running.url + path, None if body is None else body.encode(), headers)
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            return answer.status, {}
    except urllib.error.HTTPError as error:
        with error:
            details: dict[str, Any] = json.loads(error.read())
            return details["status"], details


def texts(running: RunningAgent) -> Iterator[tuple[str, str]]:
    """Every parameter in a query or a path that is described as text, or perhaps text: its name, and a path with ``{}`` in its place."""
    for path, methods in running.get("/openapi.json")["paths"].items():
        for parameter in methods.get("get", {}).get("parameters", ()):
            name, kinds = parameter["name"], parameter["schema"].get("anyOf", [parameter["schema"]])
            if not any(kind.get("type") == "string" for kind in kinds):
                continue
            if parameter["in"] == "path":
                yield name, path.replace(f"{{{name}}}", "{}").replace("{seq}", "1")
            else:
                others = path.replace("{group_id}", "world").replace("{seq}", "1")
                yield name, f"{others}?{name}={{}}"


def test_every_text_of_every_route(asked: RunningAgent) -> None:
    """Bytes that are not UTF-8, NUL and text that is too long get a 422 that names the parameter, in any route, query or path."""
    found = dict.fromkeys(texts(asked))
    assert {"job", "group", "op", "since", "cursor", "group_id", "profile_id", "alert_id"} <= {
        name for name, _ in found
    }
    for name, path in found:
        for wrong, why in WRONG.items():
            status, details = answered(asked, path.format(wrong))
            assert (status, why in details["detail"], details["detail"].startswith(f"{name}: ")) == (422, True, True)


def test_numbers(asked: RunningAgent) -> None:
    """The same where a number is wanted is a 422 as well."""
    for wrong in WRONG:
        for path in (f"/api/v1/ops?rank={wrong}", f"/api/v1/ops?min_seconds={wrong}", f"/api/v1/collectives/g/{wrong}"):
            assert answered(asked, path)[0] == 422


def test_names_of_parameters(asked: RunningAgent) -> None:
    """A name of a parameter that is no text is a parameter that does not exist."""
    for wrong in WRONG:
        assert answered(asked, f"/api/v1/ops?{wrong}=1")[0] == 400


@pytest.mark.parametrize("wrong", WRONG_JSON, ids=lambda text: text[:12])
def test_body(asked: RunningAgent, wrong: str) -> None:
    """In the body too, at any depth, as a value or as a key."""
    for body, name in (
        (f'{{"job": "{wrong}"}}', "job"),
        (f'{{"job": "train", "ranks": ["{wrong}"]}}', "ranks"),
        (f'{{"job": {{"a": [{{"{wrong}": 1}}]}}}}', "job"),
        (f'["{wrong}"]', "body"),
        (f'"{wrong}"', "body"),
    ):
        status, details = answered(asked, "/api/v1/profiles", body)
        assert (status, WRONG_JSON[wrong] in details["detail"]) == (422, True)
        assert details["detail"].startswith(f"{name}: ")
    assert answered(asked, "/api/v1/profiles", f'{{"{wrong}": 1}}')[0] == 422


@pytest.mark.parametrize("body", ["", "{", '{"job": "\\ud8"}', "[" * 30_000, '{"job":' * 5_000, "1e999", "9" * 5_000])
def test_bodies_that_are_no_json(asked: RunningAgent, body: str) -> None:
    """What cannot be parsed, however deep it is nested, is refused by the route."""
    assert answered(asked, "/api/v1/profiles", body)[0] in (400, 422)


def test_sound_text(asked: RunningAgent) -> None:
    """Text of any language, a real replacement character, and control characters in the name of a job are passed on unchanged."""
    for text in ("%E8%A8%93", "%EF%BF%BD", "%F0%9F%98%80", "%1B%5B2J", "a+b", "", "%5Cud800"):
        status, details = answered(asked, f"/api/v1/ranks?job={text}")
        assert (status, "in the history" in details["detail"]) == (404, True)
        assert answered(asked, f"/api/v1/ops?group={text}") == (200, {})
    assert answered(asked, "/api/v1/profiles", '{"job": "\\ud83d\\ude00"}')[0] == 404


def test_other_paths(asked: RunningAgent) -> None:
    """Outside the API the same is a 404, and the pages and metrics answer despite such parameters."""
    for wrong in WRONG:
        assert answered(asked, f"/{wrong}")[0] == answered(asked, f"/static/{wrong}")[0] == 404
        for path in ("/metrics", "/healthz", "/docs", "/", "/runbook"):
            assert answered(asked, f"{path}?job={wrong}")[0] == 200


def test_known_parameters(tmp_path: Path) -> None:
    """A request is held against the parameters in the API's description, and its body is read where the description has one."""
    app = application(idle_services(QueryService(tmp_path / "none")), CollectorRegistry())
    described = app.openapi()["paths"]
    routes = [route for route in app.routes if isinstance(route, APIRoute) and route.include_in_schema]
    assert {route.path for route in routes} == described.keys()
    for route in routes:
        for about in described[route.path].values():
            named = [parameter["name"] for parameter in about.get("parameters", ()) if parameter["in"] == "query"]
            assert query_names(route.dependant) == named, route.path
            assert (route.body_field is not None) == ("requestBody" in about), route.path


def test_dependencies_are_functions(tmp_path: Path) -> None:
    """Routes depend on functions only: before 0.124, FastAPI does not find the types of a class's parameters in its module."""
    app = application(idle_services(QueryService(tmp_path / "none")), CollectorRegistry())
    left = [route.dependant for route in app.routes if isinstance(route, APIRoute)]
    calls = set()
    while left:
        dependant = left.pop()
        calls.add(dependant.call)
        left += dependant.dependencies
    assert len(calls) > 30
    assert [call for call in calls if not inspect.isfunction(call)] == []


def test_who_waits_for_the_history(tmp_path: Path) -> None:
    """Requests that the history's process answers wait for their turn there, so that they do not hold up those that need no history."""
    app = application(idle_services(QueryService(tmp_path / "none")), CollectorRegistry())
    routes = [route for route in app.routes if isinstance(route, APIRoute)]
    slow = [route.path for route in routes if get_type_hints(route.endpoint).get("worker") is Worker]
    assert len(slow) > 15
    others = {path.rpartition("/")[2] for path in slow if line_of({"path": path, "query_string": b""}) == LIVE}
    assert others == {
        "jobs",
        "ranks",
        "groups",
        "pipelines",
        "bars",
        "incidents",
        "{incident_id}",
    }  # without parameters, they need no history


def test_the_schema_is_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The description of the API is made once, not by each request for it."""
    app = FastAPI()

    @app.get("/{number}")
    def number(number: int) -> int:
        return number

    problems.answer_problems(app)
    first = app.openapi()
    assert "ProblemDetails" in first["components"]["schemas"]

    def refuse(*_: object) -> None:
        raise AssertionError("made again")

    monkeypatch.setattr(problems, "TypeAdapter", refuse)
    assert app.openapi() is first


def test_names_of_logs(tmp_path: Path) -> None:
    """A log of NCCL's whose name is no UTF-8, and a request for a job whose name is none, cost no answer."""
    logs, run = tmp_path / "logs", tmp_path / "run"
    logs.mkdir()
    odd = os.fsencode(logs) + b"/odd\xff.log"
    with open(odd, "wb") as file:
        file.write(b"h:77:78 [0] net.cc:1 NCCL WARN Call to connect to \xff failed : Connection refused\n")
    with agent(run) as running:
        for name in ("job", "half \ud800"):
            LogRequest(name, [f"{logs}/*"], 0.0, os.getpid()).write(run).rename(run / "logs" / f"{len(name)}.json")
        (message,) = wait_for(lambda: running.get("/api/v1/nccl/messages"), "the message")
        assert (message["job_id"], message["file"]) == ("job", f"{logs}/odd\ufffd.log")
        (topology,) = running.get("/api/v1/topology")
        assert topology["files"] == [message["file"]]
        assert any("commwatch_nccl_messages_total" in sample for sample in running.samples())
