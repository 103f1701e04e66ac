"""Incidents of real jobs: kept over a restart of the agent, one for all nodes, and the same in every answer."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from html import unescape
from pathlib import Path
from typing import Any

import pytest

from tests import prefork
from tests.e2e.hosts import Host, joined_hosts
from tests.e2e.torchjob import kill_ranks
from tests.faults.run import TRAIN, Place, began_at, job, ranks
from tests.faults.scenarios import Scenario
from tests.helpers import PATIENCE_S, SOON_HUNG, RunningAgent, agent, clean_env, commwatch, wait_for
from tests.receivers import Server

JOB = "faulty"
#: More than one look after another is waited for.
LONG_S = 2 * PATIENCE_S


def scenario(fault: str, *ranks: int, size: int = 4, after_s: float = 3.0) -> Scenario:
    """A DDP job in which these ranks are at fault soon."""
    return Scenario("ddp4", fault, ranks, frozenset({"hang"}), size, options=("--after", str(after_s)))


@contextmanager
def running(what: Scenario, directory: Path) -> Iterator[float]:
    """The job on this host; the Unix time at which its fault begins."""
    with job(what, [Place(directory)] * what.size, JOB) as told:
        yield began_at(told)


def incidents(of: RunningAgent, kind: str, query: str = "") -> list[dict[str, Any]]:
    """The incidents of a kind of the job that are or were open."""
    if JOB not in {one["job_id"] for one in of.get("/api/v1/jobs")}:  # its rings are not read yet
        return []
    found = of.get(f"/api/v1/incidents?job={JOB}&state=open&state=ended{query}")
    return [one for one in (found if isinstance(found, list) else found["data"]) if one["kind"] == kind]


def settings(directory: Path, *urls: str, more: str = "") -> Path:
    """Settings of an agent with a webhook for each URL, whose alerts fire at once."""
    file = directory / "commwatch.toml"
    receivers = "".join(
        f'[[receivers]]\nname = "to{n}"\nkind = "webhook"\nurl = "{url}"\n' for n, url in enumerate(urls)
    )
    at_once = "".join(f'[kinds.{kind}]\nfor = "0s"\n' for kind in ("hang", "straggler", "rank_lost"))
    at_once += "[thresholds]\nstalled_seconds = 10\n"
    file.write_text(f"{more}{at_once}{receivers}")
    return file


def said(server: Server, name: str) -> list[str]:
    """What a webhook got of an alert, in order."""
    every = [one for asked in list(server.asked) for one in asked.json["alerts"]]
    return [one["status"] for one in every if one["labels"]["alertname"] == name]


def is_noted(run: Path, name: str) -> bool:
    """Return whether an agent has stored that a message was sent: without that, the next one sends it again."""
    found = [file.read_text() for file in run.glob("sent-*.json")]
    return any(f'"name": "{name}"' in text and '"told": null' not in text for text in found)


def test_restart_in_a_hang(tmp_path: Path) -> None:
    """An agent that is killed and started again in the middle of a hang goes on with the incident, and tells of it once; it ends with the job."""
    run = tmp_path / "run"
    run.mkdir(mode=0o700)
    with Server() as server:
        config = settings(tmp_path, server.url)
        flags = ("--config", str(config), "--quiet")
        with running(scenario("stop", 1), run) as began:
            with agent(run, *flags) as first:
                (before,) = wait_for(lambda: incidents(first, "hang"), "the hang", LONG_S)
                wait_for(lambda: said(server, "CollectiveHang") == ["firing"], "the message", LONG_S)
                wait_for(lambda: is_noted(run, "CollectiveHang"), "the record of the message", LONG_S)
                first.kill()
            with agent(run, *flags, constants=SOON_HUNG) as second:
                # Five seconds after its start it sees the wait itself.
                (after,) = wait_for(
                    lambda: [one for one in incidents(second, "hang") if one["last_at"] > before["last_at"] + 7],
                    "the wait",
                    LONG_S,
                )
                same = ("id", "began_at", "seen_at", "ranks", "waiting", "cause", "group", "op", "seq")
                assert [after[name] for name in same] == [before[name] for name in same]
                assert (after["state"], after["ranks"], after["cause"]) == ("open", [1], "stopped")
                assert abs(after["began_at"] - began) < 3
                assert len(incidents(second, "hang")) == 1
                found = second.get(f"/api/v1/incidents/{after['id']}")
                assert {item["source"] for item in found["evidence"]} >= {"probe", "process"}
        with agent(run, *flags) as third:
            (ended,) = wait_for(
                lambda: [one for one in incidents(third, "hang") if one["state"] == "ended"], "its end", 2 * LONG_S
            )
            assert (ended["id"], ended["outcome"]) == (before["id"], "job_ended")
            wait_for(lambda: said(server, "CollectiveHang") == ["firing", "resolved"], "the end's message", LONG_S)
        assert said(server, "CollectiveHang") == ["firing", "resolved"]


def test_killed_before_the_message(tmp_path: Path) -> None:
    """A job that is killed in a hang, before its alert would fire, has a message with the culprit."""
    (run := tmp_path / "run").mkdir(mode=0o700)
    config = tmp_path / "commwatch.toml"
    with Server() as server:
        config.write_text(f'[[receivers]]\nname = "to"\nkind = "webhook"\nurl = "{server.url}"\n')
        with agent(run, "--config", str(config), "--quiet", constants=SOON_HUNG) as watching:
            with running(scenario("stop", 1, size=3, after_s=1.0), run):
                wait_for(lambda: incidents(watching, "hang"), "the hang", LONG_S)
            wait_for(lambda: said(server, "CollectiveHang") == ["firing"], "the message", LONG_S)
        (alert,) = [one for asked in list(server.asked) for one in asked.json["alerts"]]
        assert alert["labels"]["rank"] == "1"


def agrees(watching: RunningAgent, kind: str) -> bool:
    """The verdicts of a kind say the same as its incident."""
    about = ("ranks", "waiting", "cause", "group", "op", "seq")
    (one,) = incidents(watching, kind)
    found = [each for each in watching.get("/api/v1/verdicts") if each["kind"] == kind]
    return all([verdict[each] for each in about] == [one[each] for each in about] for verdict in found)


def explains_the_rest(watching: RunningAgent, cause: str) -> bool:
    """All other open incidents are consequences of this one, or of those."""
    others = [each for each in watching.get(f"/api/v1/incidents?job={JOB}&state=open") if each["id"] != cause]
    return {each["consequence_of"] for each in others} <= {cause, *(each["id"] for each in others)}


#: Jobs with a fault; kind, cause and alert of its incident; and how long before its begin by the evidence it may have begun.
TABLE = [
    (Scenario("ddp4", "stop", (2,)), "hang", "stopped", "CollectiveHang", 3),
    (Scenario("plain", "late", (2,)), "straggler", "late", "StragglerRank", 15),
    pytest.param(Scenario("fsdp", "late", (2,)), "straggler", "late", "StragglerRank", 15, marks=pytest.mark.long),
    (Scenario("plain", "other_size", (1,)), "desync", "sizes", "CollectiveDesync", 3),
    pytest.param(
        Scenario("plain", "other_operation", (1,)), "desync", "ops", "CollectiveDesync", 3, marks=pytest.mark.long
    ),
    pytest.param(
        Scenario("plain", "other_size_and_fail", (1,)), "desync", "sizes", "CollectiveDesync", 3, marks=pytest.mark.long
    ),
    pytest.param(Scenario("ddp4", "destroy", (1,)), "hang", "destroyed", "CollectiveHang", 3, marks=pytest.mark.long),
    pytest.param(Scenario("ddp4", "leave", (2,)), "hang", "gone", "CollectiveHang", 3, marks=pytest.mark.long),
    pytest.param(Scenario("fsdp", "die", (2,)), "rank_lost", "died", "RankLost", 4, marks=pytest.mark.long),
    pytest.param(Scenario("ddp4", "fail", (1,)), "rank_lost", "exception", "RankLost", 4, marks=pytest.mark.long),
    pytest.param(
        Scenario("ddp4", "want_memory", (1,)), "rank_lost", "out_of_memory", "RankLost", 4, marks=pytest.mark.long
    ),
    pytest.param(
        Scenario("ddp4", "asleep", (1,)), "stalled", "not_joined", "CollectiveStalled", 3, marks=pytest.mark.long
    ),
    pytest.param(
        Scenario("fsdp", "late", (2,), options=("--busy",)),
        "straggler",
        "late",
        "StragglerRank",
        20,
        marks=pytest.mark.long,
    ),
    pytest.param(
        Scenario("ddp4", "flip", (2,), checks="replicas"),
        "corruption",
        "weights",
        "DataCorruption",
        5,
        marks=pytest.mark.long,
    ),
]


@pytest.mark.parametrize(
    ("what", "kind", "cause", "name", "early_s"), TABLE, ids=lambda value: getattr(value, "name", None)
)
def test_every_answer_agrees(tmp_path: Path, what: Scenario, kind: str, cause: str, name: str, early_s: float) -> None:
    """REST, metrics, verdicts, alerts, notification and what is stored agree on a fault: kind, culprits, cause and begin; nothing else is open."""
    run = tmp_path / "run"
    run.mkdir(mode=0o700)
    what = replace(what, options=(*what.options, "--after", "3"))
    with Server() as server, agent(run, "--config", str(settings(tmp_path, server.url)), "--quiet") as watching:
        with running(what, run) as began:
            (one,) = wait_for(lambda: incidents(watching, kind), f"the {kind}", LONG_S)
            wait_for(lambda: said(server, name) == ["firing"], "the message", LONG_S)
            assert (one["ranks"], one["cause"], one["consequence_of"]) == (list(what.ranks), cause, None)
            assert began - early_s < one["began_at"] < began + 12
            # Verdicts are of now, incidents of a second ago.
            wait_for(lambda: agrees(watching, kind), "the same in the verdicts")
            wait_for(lambda: explains_the_rest(watching, one["id"]), "no cause but this one")
            page = watching.samples()
            series = [each for each in page if each.startswith("commwatch_incident_open{") and f'kind="{kind}"' in each]
            assert [f'rank="{what.ranks[0]}"' in each and f'job_id="{JOB}"' in each for each in series] == [True]
            (alert,) = [each for each in watching.get("/api/v1/alerts")["active"] if each["name"] == name]
            assert (alert["annotations"]["incident"], alert["labels"]["rank"]) == (one["id"], str(what.ranks[0]))
            sent = [each for asked in list(server.asked) for each in asked.json["alerts"] if each["status"] == "firing"]
            assert {each["annotations"]["incident"] for each in sent if each["labels"]["alertname"] == name} == {
                one["id"]
            }
        stored = wait_for(
            lambda: [each for each in incidents(watching, kind) if each["state"] == "ended"], "its end", LONG_S
        )
        assert [(each["id"], each["ranks"], each["cause"]) for each in stored] == [(one["id"], one["ranks"], cause)]
        wait_for(lambda: said(server, name) == ["firing", "resolved"], "the end's message", LONG_S)
        views_agree(watching, stored[0], tmp_path)


def views_agree(watching: RunningAgent, one: dict[str, Any], directory: Path) -> None:
    """All views of the ended job have its incident: report, diagnosis, ``top``, timeline, comparison, and its own page."""
    place = ("--dir", str(watching.directory))
    of_report = commwatch("report", *place, JOB).stdout
    of_report = of_report[of_report.index("what happened") :]
    assert of_report.index(one["title"]) < of_report.index("to do: ") < of_report.index("\n  cost ")
    commwatch("report", "--html", directory / "report.html", *place, JOB)
    page = unescape((directory / "report.html").read_text(encoding="utf-8"))
    page = page[page.index("What happened") :]
    assert page.index(one["title"]) < page.index("To do: ")
    diagnosed = commwatch("diagnose", *place, JOB)
    assert diagnosed.returncode == (one["kind"] in ("rank_lost", "hang", "desync"))
    shown = commwatch("top", "--once", *place, "--job", JOB, env=clean_env(COLUMNS="400")).stdout
    own = watching.get(f"/incidents/{one['id']}")
    for view in (of_report, diagnosed.stdout, shown, own):
        assert one["title"] in view
        assert one["place"] in unescape(view)
    answers = [commwatch(command, "--json", *place, JOB).stdout for command in ("report", "diagnose")]
    of_page = watching.get(f"/api/v1/moment?job={JOB}")
    for every in (of_page["incidents"], *(json.loads(answer)["incidents"] for answer in answers)):
        (found,) = [each for each in every if each["id"] == one["id"]]
        assert {name: found[name] for name in one} == one
    commwatch("timeline", *place, "--last", "all", "--out", directory / "trace.json", JOB)
    trace = json.loads((directory / "trace.json").read_text(encoding="utf-8"))["traceEvents"]
    assert one["says"] in {each["args"].get("says") for each in trace if each["name"].startswith("incident ")}
    compared = json.loads(commwatch("compare", *place, JOB, JOB, "--json").stdout)["incidents"]
    assert (one["title"], "same") in {(each["title"], each["change"]) for each in compared}


@pytest.mark.parametrize(("fault", "cause"), [("die", "died"), ("fail", "exception")])
def test_lost_rank_explains_the_hang(tmp_path: Path, fault: str, cause: str) -> None:
    """A rank that is killed, or that an exception ends, is the cause; the others' wait for it is its consequence."""
    with agent(tmp_path, "--quiet") as watching, running(scenario(fault, 1), tmp_path) as began:
        (lost,) = wait_for(lambda: incidents(watching, "rank_lost"), "the loss", LONG_S)
        assert (lost["ranks"], lost["cause"], lost["state"], lost["consequence_of"]) == ([1], cause, "open", None)
        assert abs(lost["began_at"] - began) < 4
        wait_for(lambda: incidents(watching, "hang"), "the hang", LONG_S)
        assert {one["consequence_of"] for one in incidents(watching, "hang")} == {lost["id"]}
        every = [one["kind"] for one in watching.get(f"/api/v1/incidents?job={JOB}&state=open")]
        assert every.index("rank_lost") < every.index("hang")


def test_healthy(tmp_path: Path) -> None:
    """A job without a fault has no incident; that all its ranks are killed at once is for information."""
    command = prefork.command(TRAIN, "ddp4", "nothing", "0", "--after", "10")
    with agent(tmp_path, "--quiet") as watching:
        with ranks(command, [Place(tmp_path)] * 2, JOB) as started:
            assert started[0].stdout is not None
            assert started[0].stdout.readline()  # 10 s of steps are over
            assert watching.get(f"/api/v1/incidents?job={JOB}&state=open&state=ended") == []
            kill_ranks([tmp_path], JOB)
        found = wait_for(lambda: watching.get(f"/api/v1/incidents?job={JOB}&state=ended"), "its end")
        assert [(one["kind"], one["cause"], one["severity"]) for one in found] == [("rank_lost", "all", "info")]


def test_four_nodes(tmp_path: Path) -> None:
    """A rank that is stopped on one of four nodes is one incident with one id from each agent, and one message from all of them."""
    with joined_hosts(4) as hosts, Server() as server, ExitStack() as stack:
        agents = [stack.enter_context(joined(host, hosts, tmp_path, server)) for host in hosts]
        places = [Place(tmp_path / host.address, host.there, host.device) for host in hosts]
        with job(scenario("stop", 1), places, JOB) as told:
            began_at(told)
            of_all = "&scope=job&severity=warning"
            for each in agents:  # one after the other, as each asks all others
                wait_for(lambda: incidents(each, "hang", of_all), "the hang", 2 * LONG_S)  # noqa: B023
            found = [incidents(each, "hang", of_all) for each in agents]
            assert [[one["ranks"] for one in of_one] for of_one in found] == [[[1]]] * 4
            assert len({one["id"] for of_one in found for one in of_one}) == 1
            leader = min(agents, key=lambda each: each.get("/api/v1/jobs")[0]["ranks"][0])
            about = f"/api/v1/incidents/{found[0][0]['id']}"
            wait_for(
                lambda: {"process", "stack"} <= {item["source"] for item in leader.get(about)["evidence"]},
                "what the rank on the other node does",
                LONG_S,
            )
            assert [incidents(each, "stalled", of_all) for each in agents] == [[]] * 4


@contextmanager
def joined(host: Host, hosts: list[Host], directory: Path, server: Server) -> Iterator[RunningAgent]:
    """An agent on a host that knows those of the others."""
    place = directory / host.address
    place.mkdir(mode=0o700)
    peers = json.dumps([f"{other.address}:9477" for other in hosts if other is not host])
    config = settings(place, server.url, more=f"peers = {peers}\n")
    flags = (
        "--host",
        host.address,
        "--port",
        "9477",
        "--insecure",
        "--quiet",
        "--config",
        str(config),
        "--state",
        str(place),
    )
    with agent(place, *flags, beside=host.process, fetch=host.fetch, constants=SOON_HUNG) as each:
        yield each
