"""An agent that pushes: the same series as its page, incidents as they come and go, and what goes wrong."""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests import prefork
from tests.agent.prometheus.test_metrics import Samples
from tests.agent.prometheus.test_metrics import samples as on_page
from tests.helpers import agent, clean_env, commwatch, fetch, free_port, lost_rank, wait_for
from tests.live import HandMade
from tests.otlp import Attribute, Receiver, attributes, samples
from tests.receivers import OK, Handler, certificate, status

#: Series whose values change from moment to moment.
MOVING = (
    "commwatch_host_",
    "commwatch_network_",
    "commwatch_infiniband_",
    "commwatch_gpu_",
    "commwatch_alert_evaluation_",
)
#: Waits two seconds for an answer, not ten.
IMPATIENT = {"commwatch_agent.otlp.push._LIMIT_S": 2.0}


def settings(directory: Path, url: str, *lines: str) -> Path:
    """A settings file with a receiver that gets a push every second."""
    file = directory / "settings.toml"
    file.write_text("\n".join([f'otlp_endpoint = "{url}"', "otlp_interval = 1", *lines]) + "\n")
    return file


def still(page: Samples) -> Samples:
    """The part of a page that does not change by itself."""
    return {series: value for series, value in page.items() if not series[0].startswith(MOVING)}


def quiet(pages: dict[int, Samples]) -> int | None:
    """The number of a push since whose predecessor nothing has changed, going by the page that was read during each."""
    for at, page in list(pages.items()):
        before = pages.get(at - 1, {})
        if before.keys() == page.keys() and still(before) == still(page):
            return at
    return None


def told(receiver: Receiver, change: str, kind: str) -> list[dict[str, Attribute]]:
    """The records of a change of incidents of a kind: their attributes without the prefix, and their text as ``text``."""
    prefix = "commwatch.incident."
    found = [
        {name.removeprefix(prefix): value for name, value in attributes(record.attributes).items()}
        | {"text": record.body.string_value}
        for record in receiver.records()
        if record.event_name == f"{prefix}{change}"
    ]
    return [each for each in found if each["kind"] == kind]


def test_same_as_the_page(tmp_path: Path) -> None:
    """Over TLS, with a header from a file, a push has every series of the page of that moment, with its value."""
    token, pages = tmp_path / "headers", dict[int, Samples]()
    token.write_text("Authorization: Bearer s3cret-t0ken\n")
    with certificate(tmp_path) as (context, ca), Receiver(tls=context) as receiver:

        def answer(handler: Handler) -> None:
            if handler.asked.path == "/v1/metrics" and watched:
                pages[len(receiver.of("/v1/metrics")) - 1] = on_page(fetch(f"{watched[0]}/metrics")[0].decode())
            OK(handler)

        watched: list[str] = []
        receiver._answers = [answer]
        more = [f'otlp_ca_file = "{ca}"', f'otlp_headers_file = "{token}"']
        with (
            agent(tmp_path / "run", "--config", str(settings(tmp_path, receiver.url, *more))) as running,
            HandMade(tmp_path / "run", ranks=4, late=2) as job,
        ):
            job.run(30)
            job.read_by(running)
            watched.append(running.url)
            at = wait_for(lambda: quiet(pages), "a push between two equal pages")
        page, push = pages[at], samples(receiver.metrics()[at])
        assert all(asked.headers["Authorization"] == "Bearer s3cret-t0ken" for asked in receiver.asked)
    assert {name for name, _ in page} == {name for name, _ in push}
    assert page.keys() == push.keys()
    fixed = still(page)
    assert {series: push[series] for series in fixed} == fixed
    assert sum(("job_id", "train") in labels for _, labels in fixed) > 50
    totals = {series for series in page.keys() - fixed if series[0].endswith("_total")}
    assert totals
    assert all(push[series] <= page[series] for series in totals)


def test_incidents(tmp_path: Path) -> None:
    """An incident is a log record when it opens and when it ends, with the words of the API."""
    with Receiver() as receiver, ExitStack() as stack:
        file = settings(tmp_path, receiver.url, "[kinds.rank_lost]", "for = '0s'")
        soon = {
            "commwatch_agent.analysis.waits.patience.NEW_S": 10.0,
            "commwatch_agent.analysis.waits.patience.WORKING_S": 10.0,
        }
        starting = agent(tmp_path / "run", "--config", str(file), constants=soon)
        with starting as running, HandMade(tmp_path / "run") as job:
            stack.enter_context(lost_rank(tmp_path / "run" / "rings"))
            (lost,) = wait_for(lambda: told(receiver, "opened", "rank_lost"), "the lost rank")
            known = running.get(f"/api/v1/incidents/{lost['id']}")
            assert lost["text"] == f"{known['title']}: {known['says']}"
            assert (lost["job_id"], lost["ranks"], lost["remedy"]) == ("lost", [1], known["remedy"])
            job.run(3)
            job.hang(0)
            (stall,) = wait_for(lambda: told(receiver, "opened", "stalled"), "the stall")
            assert (stall["job_id"], stall["ranks"], stall["waiting"]) == ("train", [1], [0])
            job.end()
            (over,) = wait_for(lambda: told(receiver, "ended", "stalled"), "the end of the stall")
            assert (over["id"], over["outcome"]) == (stall["id"], "job_ended")
            assert len(told(receiver, "opened", "rank_lost")) == 1


def state(running: Any) -> dict[str, Any]:
    """The state of the pushes of metrics, as the agent shows it."""
    return dict(running.get("/api/v1/about")["otlp"]["metrics"])


@pytest.mark.parametrize("fault", ["down", "hangs", "busy"])
def test_receiver_that_does_not_work(tmp_path: Path, fault: str) -> None:
    """While the receiver is down, hangs or is busy, the agent reads all records, answers, shows the trouble, and ends when asked."""
    with Receiver() as receiver:
        receiver._answers = [receiver.never if fault == "hangs" else status(503, Retry_After="1")]
        url = f"http://127.0.0.1:{free_port()}" if fault == "down" else receiver.url
        with (
            agent(tmp_path / "run", "--config", str(settings(tmp_path, url)), constants=IMPATIENT) as running,
            HandMade(tmp_path / "run") as job,
        ):
            for _ in range(5):
                job.run(5)
                job.read_by(running)
            assert running.get("/healthz")
            reason = {"down": "connection refused", "hangs": "no answer within 2 s", "busy": "answers 503"}[fault]
            wait_for(lambda: state(running)["trouble"], "the trouble")
            assert state(running)["trouble"] == f"{url}: {reason}"
            lines = commwatch("doctor", "--dir", tmp_path / "run").stdout
            assert f"metrics: {url}: {reason}" in lines
            assert "docs/metrics.md" in lines
        assert running.process.poll() == 0


def test_doctor(tmp_path: Path) -> None:
    """``commwatch doctor`` shows when the receiver got the latest push; then no scrape is needed."""
    with (
        Receiver() as receiver,
        agent(tmp_path / "run", "--config", str(settings(tmp_path, receiver.url))) as running,
    ):
        wait_for(lambda: state(running)["pushes"], "a push")
        lines = commwatch("doctor", "--dir", tmp_path / "run").stdout
        assert f"metrics: pushed to {receiver.url} " in lines
        assert f"logs: nothing pushed to {receiver.url} yet" in lines
        assert "never fetched" not in lines


def test_missing_package(tmp_path: Path) -> None:
    """Without the package, agent and config check end with one line that has the remedy; without the setting nothing needs the package."""
    start = tmp_path / "start" / "sitecustomize.py"
    start.parent.mkdir()
    start.write_text("import sys; sys.modules['opentelemetry.proto'] = None")
    env = clean_env(PYTHONPATH=str(start.parent))
    file = settings(tmp_path, "http://localhost:4318")
    with prefork.started_with("agent", PYTHONPATH=str(start.parent)):
        for command in (("agent", "--dir", tmp_path / "run", "--port", "0"), ("config", "check")):
            done = commwatch(*command, "--config", file, env=env)
            assert (done.returncode, done.stdout) == (2, "")
            assert done.stderr.splitlines() == [
                "commwatch: otlp_endpoint is set, but the package opentelemetry-proto is not installed; "
                "install commwatch with its extra: commwatch[otlp]"
            ]
        with agent(tmp_path / "run", env=env) as running:
            assert running.get("/api/v1/about")["otlp"] == {}


def test_wrong_settings(tmp_path: Path) -> None:
    """A wrong setting is one line and exit code 2, at the start of the agent and for ``config check``."""
    for lines, says in (
        (['otlp_endpoint = "localhost:4318"'], "otlp_endpoint: needs the base URL of an OTLP receiver"),
        (['otlp_endpoint = "http://me:pw@h"'], "otlp_endpoint: needs the base URL of an OTLP receiver"),
        (['otlp_endpoint = "http://h/v1/metrics/"'], "otlp_endpoint: needs the base URL of an OTLP receiver"),
        (
            ['otlp_endpoint = "http://h"', "otlp_interval = 0.1"],
            "otlp_interval: needs a number of seconds from 1 to 3600",
        ),
        (['otlp_endpoint = "http://h"', "otlp_logs = 1"], "otlp_logs: needs true or false"),
        (['otlp_endpoint = "http://h"', 'otlp_headers_file = "/none/here"'], "otlp_headers_file /none/here: No such"),
    ):
        file = tmp_path / "wrong.toml"
        file.write_text("\n".join(lines))
        for command in (("agent", "--dir", tmp_path / "run", "--port", "0"), ("config", "check")):
            done = commwatch(*command, "--config", file)
            assert (done.returncode, done.stdout, len(done.stderr.splitlines())) == (2, "", 1)
            assert says in done.stderr


def test_environment(tmp_path: Path) -> None:
    """The receiver can be set in the environment; the resource has the pod."""
    headers = tmp_path / "headers"
    headers.write_text("A: b\n")
    with Receiver() as receiver:
        of_pod = {"POD_NAME": "train-0", "COMMWATCH_OTLP_ENDPOINT": f"{receiver.url}/"}
        env = clean_env(COMMWATCH_OTLP_HEADERS_FILE=str(headers), **of_pod)
        with agent(tmp_path / "run", env=env) as running:
            wait_for(receiver.metrics, "a push")
            port = running.url.rpartition(":")[2]
        first = attributes(receiver.metrics()[0].resource_metrics[0].resource.attributes)
        assert first["k8s.pod.name"] == "train-0"
        assert str(first["service.instance.id"]).endswith(f":{port}")
        assert receiver.asked[0].headers["A"] == "b"
    shown = json.loads(commwatch("config", "show", "--json", env=env).stdout)
    assert shown["otlp_endpoint"] == {"value": receiver.url, "origin": "COMMWATCH_OTLP_ENDPOINT"}
