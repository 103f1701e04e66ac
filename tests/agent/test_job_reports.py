"""Reports and advice on a job on several nodes: each agent gives what one agent over all rings gives."""

from __future__ import annotations

import gzip
import json
import re
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from commwatch.wire.ring import RingWriter
from tests.agent.test_job_wide import ANY_NODE, command_of_all, of_all, states, whole
from tests.agent.web.routes.test_jobs import rings_of
from tests.chrome_trace import Slice, parsed, read
from tests.helpers import (
    ANY_CLOCK,
    MS,
    SOON_MET,
    RunningAgent,
    agent,
    clean_env,
    commwatch,
    end_rank,
    free_port,
    group_entry,
    mark,
    operation,
    wait_for,
    write_ring,
)

#: Which ranks of the job each node has, and how many records each rank.
NODES, STEPS = ((0, 1), (2, 3), (4, 5)), 60
S = 1000 * MS
BASE = int(time.time()) // 10 * 10 - 300
#: What depends on the moment, or on the agent that answers.
MOMENT = ("history", "command", "nodes", "duration_s", "rank_hours", "last_seen_at", "run")


def one_rank(rings: Path, rank: int, job: str) -> RingWriter:
    """A rank of a group on its own node, in which the odd rank is late, and in the job ``train`` of one over all nodes.

    Every 20th step is long.
    """
    first = rank // 2 * 2
    records = [mark(0, 0)]
    for step in range(STEPS):
        begin = 1 + step * 900 * MS
        late = 200 * MS * (rank % 2)
        small = {"group": 1, "seq": step, "size": 1 << 20}
        if job == "train":
            start = begin + 10 * rank * MS
            records.append(operation("all_reduce", start_ns=start, end_ns=begin + 160 * MS, seq=step, size=8 << 20))
        records += [
            operation("all_gather", start_ns=begin + 300 * MS + late, end_ns=begin + 600 * MS, **small),
            mark(step + 1, begin + (899 if step % 20 else 800) * MS, exposed_ns=(250 + rank) * MS),
        ]
    names = [
        group_entry(0, tuple(range(6)), "fsdp", group_id="world"),
        group_entry(1, (first, first + 1), "tp", group_id=f"tp{first}"),
        {"dtype": 1, "name": "bfloat16"},
    ]
    return write_ring(rings, records, names, job=job, rank=rank, world_size=6, wall_offset_ns=BASE * S)


class Site:
    """Agents that are each other's peers, and one that has all rings."""

    def __init__(self, directory: Path, stack: ExitStack) -> None:
        self.peers = directory / "peers.json"
        places = [directory / "whole", *(directory / f"node{number}" for number in range(len(NODES)))]
        self.writers = [
            one_rank(rings, rank, job)
            for rings, ranks in zip(map(rings_of, places), (range(6), *NODES), strict=True)
            for rank in ranks
            for job in ("train", "local")
        ]
        self.peers.write_text("[]")
        env = clean_env(COMMWATCH_PEERS=str(self.peers))
        self.whole = stack.enter_context(agent(places[0], constants=ANY_CLOCK))
        self.nodes = [
            stack.enter_context(agent(place, env=env, constants=SOON_MET | ANY_CLOCK)) for place in places[1:]
        ]
        expected = len(NODES) * [2 * 5 * STEPS + 4]
        every = [sum(expected), *expected]
        wait_for(lambda: [_records(node) for node in (self.whole, *self.nodes)] == every, "the records")
        self.meet()

    def meet(self, *more: str, but_for: str = "") -> None:
        """Make every agent know every agent ``but_for`` one, and the addresses ``more``, and wait until all have tried them."""
        urls = [*(node.url for node in self.nodes if node.url != but_for), *more]
        self.peers.write_text(json.dumps([{"targets": urls}]))
        for node in self.nodes:
            wait_for(partial(_knows, node, set(urls)), "the peers")


def _knows(node: RunningAgent, urls: set[str]) -> bool:
    """Whether an agent has tried these addresses, and knows no others."""
    found = states(node)
    return found.keys() == urls and all(peer["reason"] != "not asked yet" for peer in found.values())


def _records(running: RunningAgent) -> int:
    return sum(rank["records"] for rank in running.get("/api/v1/ranks"))


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """All agents know one another."""
    with ExitStack() as stack:
        made = Site(tmp_path_factory.mktemp("site"), stack)
        yield made
    for writer in made.writers:
        end_rank(writer)


def comparable(found: Any) -> Any:
    """An answer without the fields of ``MOMENT``."""
    if isinstance(found, dict):
        return {name: comparable(value) for name, value in found.items() if name not in MOMENT}
    return [comparable(each) for each in found] if isinstance(found, list) else found


@ANY_NODE
@pytest.mark.parametrize("job", ["local", "train"])
def test_report(site: Site, job: str, number: int) -> None:
    """Steps, shares, ranks, operations, waits, costs and advice are those of one agent over all rings, from whichever agent."""
    expected = site.whole.get(f"/api/v1/report?job={job}")
    assert expected["nodes"] is None
    assert [line["steps"] for line in expected["ranks"]] == [STEPS] * 6
    assert expected["advice"]
    found = of_all(site.nodes[number], f"report?job={job}&scope=job")
    assert of_nodes(job, found["advice"]) == of_nodes(job, expected["advice"])
    assert comparable(found | {"advice": []}) == comparable(expected | {"advice": []})


def of_nodes(job: str, advice: list[Any]) -> list[Any]:
    """Advice as several agents give it: the nodes of ``local`` share no collective by which their clocks could be compared, so gains are bounds there."""
    if job == "train":
        return advice
    return [{name: each[name] for name in ("rule", "title", "because", "do")} for each in advice]


def bound(text: str) -> str:
    """A gain as it is without a replay."""
    alike = r"would save (\d+%) of a step(?: as measured|, by a replay of the latest steps without lateness of ranks? [\d, -]+)"
    return re.sub(alike, r"would save up to \1 of a step", text).partition("; a replay")[0]


def sources(advice: list[Any]) -> set[str]:
    """Where the gains come from; what a replay has confirmed is as measured, and no bound."""
    return {
        "replay" if "as measured" in each["gain"] else each["gain_source"]
        for each in advice
        if each["saves_share"] is not None
    }


@ANY_NODE
@pytest.mark.parametrize(("job", "group"), [("local", "tp"), ("train", "fsdp")])
def test_waits_in_the_page(site: Site, job: str, group: str, number: int) -> None:
    """The page has one matrix of waits by rank and group, with the figures of one agent over all rings, and one by rank and time."""
    expected, _ = waits_in_page(site.whole, f"job={job}")
    assert {f">{group}<", *(f">rank {rank}<" for rank in range(6))} <= set(re.findall(">[^<]+<", expected))
    found, over_time = waits_in_page(site.nodes[number], f"job={job}&scope=job")
    assert found == expected
    assert {f">rank {rank}<" for rank in range(6)} <= set(re.findall(">rank [^<]+<", over_time))


def waits_in_page(running: RunningAgent, query: str) -> tuple[str, str]:
    """The waits in a report's page: by rank and group, and over time."""
    url = f"{running.url}/api/v1/report?format=html&{query}"
    page = wait_for(
        lambda: "no answer within" not in (text := urllib.request.urlopen(url).read().decode()) and text,
        "all nodes to answer",
    )
    by_group, _, over_time = page[page.index("<h2>Waits</h2>") : page.index("<h2>Bandwidth")].partition("<h3>")
    return by_group, over_time


@ANY_NODE
# An agent that reads old records at once counts their waits in the slot of the latest, so there is no "train" of 30 s.
@pytest.mark.parametrize(
    ("job", "last"), [("local", "5m"), ("local", "30s"), ("local", "all"), ("train", "5m"), ("train", "all")]
)
def test_advice(site: Site, job: str, last: str, number: int) -> None:
    """Advice, with the ranks that are late, is that of one agent over all rings, for any part of the job."""
    expected = site.whole.get(f"/api/v1/advice?job={job}&last={last}")
    assert expected[0]["title"] == "ranks 1, 3, 5 are late and the others wait for them"
    found = whole(site.nodes[number], f"advice?job={job}&last={last}&scope=job")
    assert of_nodes(job, found) == of_nodes(job, expected)
    assert (sources(found), sources(expected)) == ({"replay" if job == "train" else "bound"}, {"replay"})


@ANY_NODE
def test_figures_of_jobs(site: Site, number: int) -> None:
    """The figures of all jobs are those of one agent over all rings and of the reports, in the API and from ``commwatch jobs``."""
    expected = by_job(site.whole.get("/api/v1/jobs?figures=true"))
    assert expected.keys() == {"train", "local"}
    node = site.nodes[number]
    found = whole(node, "jobs?figures=true&scope=job")
    assert comparable(by_job(found)) == comparable(expected)
    done = command_of_all("jobs", "--json", "--dir", node.directory)
    assert (done.returncode, done.stderr) == (0, "")
    assert comparable(by_job(json.loads(done.stdout))) == comparable(expected)
    for job, figures in expected.items():
        report = of_all(node, f"report?job={job}&scope=job")
        names = ("steps", "step_p50_s", "comm_share", "exposed_share")
        assert [figures[name] for name in names] == [pytest.approx(report[name]) for name in names]


def by_job(jobs: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Jobs by name; two that began at once are in any order."""
    return {job["job_id"]: job for job in jobs}


def test_list_of_jobs(site: Site) -> None:
    """``commwatch jobs`` shows the jobs of all nodes, how many nodes these are, which agent is silent, and if there are more; ``--node`` those of one."""
    dead, where = f"http://127.0.0.1:{free_port()}", ("--dir", site.nodes[0].directory)
    site.meet(dead)
    done = commwatch("jobs", "--limit", "1", *where)
    site.meet()
    assert done.stderr == f"commwatch: {dead} does not answer: Connection refused\n"
    assert done.stdout.splitlines()[-2:] == ["3 of 4 nodes", "earlier jobs are not listed; use a larger --limit"]
    listed = command_of_all("jobs", *where).stdout.splitlines()
    assert [line.split()[5] for line in listed[1:-1]] == ["6", "6"]
    assert listed[-1] == "3 nodes"
    alone = commwatch("jobs", "--node", *where).stdout.splitlines()
    assert [line.split()[5] for line in alone[1:]] == ["2/6", "2/6"]


@ANY_NODE
def test_command(site: Site, number: int) -> None:
    """``commwatch report`` shows the whole job, from any node, with the lines of one agent over all rings."""
    alone = commwatch(
        "report", "local", "--dir", site.whole.directory, env=clean_env(COLUMNS="250")
    ).stdout.splitlines()
    expected = [bound(line) for line in alone]
    where = site.nodes[number].directory
    done = command_of_all("report", "local", "--dir", where)
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert [line.split() for line in lines if line not in expected and _is_lasting(line)] == [["nodes", "3"]]
    assert [line for line in expected if line not in lines and _is_lasting(line)] == []
    assert f"commwatch report --dir {where} local" in done.stdout


def test_command_as_page_and_json(site: Site, tmp_path: Path) -> None:
    """``commwatch report`` writes the whole job as a page, and as JSON that has how many nodes answered."""
    page = tmp_path / "report.html"
    flags = ("local", "--dir", site.nodes[1].directory)
    assert command_of_all("report", *flags, "--html", page, out=page).returncode == 0
    assert {f">rank {rank}<" for rank in range(6)} <= set(re.findall(">rank \\d<", page.read_text())), (
        "one matrix of waits"
    )
    as_json = json.loads(command_of_all("report", *flags, "--json").stdout)
    assert as_json["nodes"] == {"answered": 3, "silent": {}}


def test_what_if_in_the_page(site: Site, tmp_path: Path) -> None:
    """The page on the whole job answers the usual questions from the steps of all ranks, as that of one agent over all rings does."""
    pages = {}
    for name, running in (("whole", site.whole), ("node", site.nodes[1])):
        pages[name] = tmp_path / f"{name}.html"
        written = ("--html", pages[name], "--dir", running.directory)
        assert command_of_all("report", "train", *written, out=pages[name]).returncode == 0
    texts = {name: page.read_text() for name, page in pages.items()}
    assert "steps of 6 ranks" in texts["node"]
    asked = [re.findall("<tr><t[dh][^>]*>([^<]*)<", _what_if(text)) for text in texts.values()]
    assert {"as recorded", "no rank is late", "four times the ranks"} <= set(asked[0])
    assert asked[0] == asked[1]
    local = tmp_path / "local.html"
    written = ("--html", local, "--dir", site.nodes[1].directory)
    assert command_of_all("report", "local", *written, out=local).returncode == 0
    assert "<h2>What if</h2>" not in local.read_text(), "clocks that cannot be compared"


def _what_if(page: str) -> str:
    """The section of a page with the answers."""
    return page[page.index("<h2>What if</h2>") : page.index("<h3>Scaling</h3>")]


def _is_lasting(line: str) -> bool:
    """Whether a line of a report is the same a second later, and on another agent."""
    return not line.strip().startswith(("job", "cost", "history", "again"))


def test_one_node(site: Site) -> None:
    """``--node`` shows the ranks of this node; so does a report without an agent."""
    found = commwatch("report", "local", "--node", "--json", "--dir", site.nodes[1].directory)
    assert [line["rank"] for line in json.loads(found.stdout)["ranks"]] == [2, 3]
    assert json.loads(found.stdout)["nodes"] is None


def test_silent_agents(site: Site) -> None:
    """An agent that does not answer is named in the report, with the reason, and all others count."""
    dead = f"http://127.0.0.1:{free_port()}"
    site.meet(dead)
    done = commwatch("report", "local", "--dir", site.nodes[0].directory, env=clean_env(COLUMNS="250"))
    assert f"nodes       3 of 4; {dead} does not answer: Connection refused" in done.stdout
    assert site.nodes[0].get("/api/v1/advice?job=local&scope=job")["nodes"]["silent"].keys() == {dead}
    site.meet()


def test_waits_without_a_node(site: Site) -> None:
    """Without the data of a node, the waits of groups with ranks on it are absent, and so are those of the job; the report says of how many."""
    site.meet(but_for=site.nodes[2].url)
    found = site.nodes[0].get("/api/v1/report?job=train&scope=job")
    text = commwatch("report", "train", "--dir", site.nodes[0].directory).stdout
    page = waits_in_page(site.nodes[0], "job=train&scope=job")
    site.meet()
    waits = {row["by"]["op"]: row["wait_s"] is not None for row in found["operations"]}
    assert waits == {"all_reduce": False, "all_gather": True}
    assert (found["wait_hours"], found["wait_share"], found["unjoined_share"]) == (None, None, 0.5)
    assert {line["wait_s"] for line in found["ranks"]} == {None}
    assert "  waiting     not known for 50% of the collectives; see docs/api.md\n" in text
    assert (">fsdp<" in page[0], ">tp<" in page[0], page[1]) == (False, True, "")


def test_wrong_requests(site: Site) -> None:
    """A report on the whole job needs the name of the job, as other answers do; unknown jobs are refused by name."""
    for query, status, detail in (
        ("report?scope=job", 400, "name the job"),
        ("report?scope=job&job=none", 404, "no job 'none'"),
        ("advice?scope=job&job=none", 404, "no job 'none'"),
        ("report_part?job=none", 404, "no job 'none'"),
        ("wait_part?job=none", 404, "no job 'none'"),
        ("wait_part?job=train&most=0", 422, "most"),
        ("report?last=5&job=local", 400, "last=5"),
        ("timeline?scope=job", 400, "name the job"),
        ("timeline_part?job=none", 404, "no job 'none'"),
        ("timeline_part?job=local&cursor=x", 400, "cursor=x: not a cursor"),
    ):
        with pytest.raises(urllib.error.HTTPError) as refused:
            site.nodes[0].get(f"/api/v1/{query}")
        with refused.value as error:
            assert (error.code, detail in json.load(error)["detail"]) == (status, True)


@ANY_NODE
def test_timeline(site: Site, tmp_path: Path, number: int) -> None:
    """``commwatch timeline`` and its route have the operations, steps and arrows of all ranks, as one agent over all rings."""
    expected, node = read(_timeline(site.whole, tmp_path / "whole.json", "")), site.nodes[number]
    found = read(_timeline(node, tmp_path / "node.json.gz", ", 3 nodes"))
    answer = urllib.request.urlopen(f"{node.url}/api/v1/timeline?job=train&last=all&scope=job").read()
    for trace in (found, parsed(gzip.decompress(answer))):
        assert trace.processes == expected.processes
        assert sorted(map(_about, trace.slices)) == sorted(map(_about, expected.slices))
        assert sorted(trace.arrows) == sorted(expected.arrows)
        assert len(trace.about["clocks"]) == 3
        assert trace.about["nodes"] == {"answered": 3, "silent": {}}


def test_timeline_of_a_range(site: Site, tmp_path: Path) -> None:
    """The route has the operations of a range; ``--node`` has the ranks of its node."""
    expected = read(_timeline(site.whole, tmp_path / "whole.json", ""))
    ends = sorted(each.end_ns + expected.about["Unix time of 0, in ns"] for each in expected.of("operation"))
    since_ns, until_ns = ends[len(ends) // 4], ends[-len(ends) // 4]
    query = f"job=train&scope=job&since={since_ns / 1e9:.9f}&until={until_ns / 1e9:.9f}"
    answer = urllib.request.urlopen(f"{site.nodes[0].url}/api/v1/timeline?{query}").read()
    inside = sum(since_ns <= end_ns < until_ns for end_ns in ends)
    assert len(parsed(gzip.decompress(answer)).of("operation")) == pytest.approx(inside, abs=1)
    alone = tmp_path / "alone.json"
    assert commwatch("timeline", "train", "--node", "--dir", site.nodes[1].directory, "--out", alone).returncode == 0
    assert set(read(alone).processes.values()) == {"rank 2", "rank 3"}


def _timeline(node: RunningAgent, out: Path, nodes: str) -> Path:
    done = command_of_all("timeline", "train", "--last", "all", "--dir", node.directory, "--out", out)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.endswith(f" marks{nodes}\n")
    return out


def _about(each: Slice) -> tuple[object, ...]:
    """What a slice is and when, without what depends on the order in which threads are numbered."""
    return each.rank, each.name, each.cat, each.start_ns, each.end_ns, str(each.args.get("seq")), str(each.inside)


def test_timeline_with_silent_agents(site: Site, tmp_path: Path) -> None:
    """An agent that does not answer is named, and the timeline has the ranks of all others."""
    dead = f"http://127.0.0.1:{free_port()}"
    site.meet(dead)
    done = commwatch("timeline", "train", "--dir", site.nodes[0].directory, "--out", tmp_path / "t.json")
    site.meet()
    assert done.stderr == f"commwatch: {dead} does not answer: Connection refused\n"
    assert done.stdout.endswith(", 3 of 4 nodes\n")
    assert len(read(tmp_path / "t.json").processes) == 6
