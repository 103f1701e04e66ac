"""NCCL's RAS in the agent: when it is queried, what its answers are joined with, and what follows from them."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import uvicorn
from prometheus_client import CollectorRegistry

from commwatch_agent.analysis.verdict import Verdict
from commwatch_agent.commands import diagnose
from commwatch_agent.ingest.batches import ingest_records
from commwatch_agent.ingest.jobs import JobTable
from commwatch_agent.model.cells import GroupInfo
from commwatch_agent.sources.ras import POLL_S, SETTLED_S, Joined, Known, Ras, join, judge
from commwatch_agent.web.application import application
from commwatch_collectors.nccl import ras as client
from commwatch_collectors.nccl.ras import Communicator, Member, parse
from tests.agent.web.routes.test_jobs import rings_of
from tests.helpers import (
    MS,
    Trainer,
    Watch,
    agent,
    commwatch,
    fetch,
    group_entry,
    idle_services,
    operation,
    packed,
    wait_for,
    write_ring,
)
from tests.ras_server import ras_server

FIXTURES = Path(__file__).parents[2] / "fixtures/ras"
WHERE = Joined("job", "pair", "pair-1", (4, 6))


def fixture(name: str) -> str:
    return (FIXTURES / name).read_text()


def first(name: str) -> Communicator:
    """The first communicator of a fixture."""
    return parse(fixture(name)).communicators[0]


def group(small_id: int, members: tuple[int, ...] | None) -> GroupInfo:
    return GroupInfo(f"id{small_id}", f"label{small_id}", "", "", members, len(members or (0, 0)), True)


# -- the join


def test_communicator_is_its_group() -> None:
    """A communicator is the group whose ranks on this node are where the communicator has their processes."""
    right, reversed_, larger = group(1, (4, 6)), group(2, (6, 4)), group(3, (4, 6, 8))
    groups = [reversed_, right, larger, group(4, None)]
    comm = first("healthy.json")
    assert join(comm, [Known("job", {4: 104, 6: 106}, groups)]) == Joined("job", "label1", "id1", (4, 6))
    assert join(comm, [Known("job", {6: 106}, groups)]) == Joined("job", "label1", "id1", (4, 6))  # 4 is elsewhere
    assert join(comm, [Known("job", {4: 104, 6: 107}, groups)]) is None
    assert join(comm, [Known("job", {}, groups)]) is None


def test_communicators_of_two_jobs() -> None:
    """The same pids in two jobs, as in two containers, leave it open which is meant."""
    one = Known("one", {4: 104, 6: 106}, [group(1, (4, 6))])
    assert join(first("healthy.json"), [one, one._replace(job_id="two")]) is None


def test_twins() -> None:
    """Groups with the same members are named together."""
    known = Known("job", {4: 104, 6: 106}, [group(1, (4, 6)), group(2, (4, 6))])
    assert join(first("healthy.json"), [known]) == Joined("job", "label1 or label2", None, (4, 6))


# -- the verdicts


def verdict(name: str, unchanged_s: float = 20.0) -> Verdict | None:
    return judge(first(name), WHERE, unchanged_s)


def test_healthy() -> None:
    """Ranks that have launched the same have nothing wrong, however long ago: they compute."""
    assert verdict("healthy.json", 1e6) is None


def test_behind() -> None:
    """Ranks that have launched less than others, while no rank launches any more, have not joined."""
    found = verdict("behind.json")
    assert found is not None
    assert (found.kind, found.cause, found.ranks, found.waiting, found.source) == (
        "stalled",
        "not_joined",
        [6],
        [4],
        "ras",
    )
    assert (found.job_id, found.group_id, found.group, found.op) == ("job", "pair-1", "pair", "all_reduce")
    assert found.says == (
        "RAS reports: all_reduce launched 42 times by rank 4, 41 times by rank 6; no rank has launched anything for 20.0 s "
        "(group pair)"
    )
    assert verdict("behind.json", 9.0) is None  # they are asked one after the other


def test_crossed() -> None:
    """Where each rank has launched something that the other has not, they are in different operations."""
    found = verdict("crossed.json")
    assert found is not None
    assert (found.kind, found.cause, found.ranks, found.waiting) == ("desync", "ops", [4, 6], [])
    says = "all_reduce launched 42 times by rank 4, 41 times by rank 6; broadcast launched 8 times by rank 6, 7 times by rank 4"
    assert says in found.says


def test_crossed_majority() -> None:
    """The rank that is alone with its operations is the one to blame."""
    counts = [{"all_reduce": 5, "broadcast": 1}, {"all_reduce": 5, "broadcast": 1}, {"all_reduce": 4, "broadcast": 2}]
    members = tuple(Member(rank, 100 + rank, client.RUNNING, each) for rank, each in enumerate(counts))
    found = judge(Communicator("0x1", 3, members), Joined("job", "all", "g", (0, 1, 2)), 30.0)
    assert found is not None
    assert (found.kind, found.ranks, found.waiting) == ("desync", [2], [0, 1])


def test_dead_and_silent() -> None:
    """A dead process is reported at once; one that only does not answer, after a while without a change."""
    dead, silent = verdict("dead.json", 0.0), verdict("silent.json")
    assert dead is not None
    assert (dead.kind, dead.cause, dead.ranks, dead.waiting) == ("hang", "dead", [6], [4])
    assert silent is not None
    assert (silent.kind, silent.cause, silent.ranks) == ("stalled", "silent", [6])
    assert verdict("silent.json", 0.0) is None


def test_in_between() -> None:
    """Communicators that are being made, or taken down, are not judged, nor ones with more ranks than their group."""
    assert verdict("ending.json") is None
    for state in (client.INIT, client.ABSENT, client.ENDING):
        members = (Member(0, 104, state, {}), Member(1, 106, client.DEAD, None))
        assert judge(Communicator("0x1", 2, members), WHERE, 100.0) is None
    assert judge(Communicator("0x1", 2, (Member(7, 104, client.DEAD, None),)), WHERE, 100.0) is None


def test_text_is_judged_alike() -> None:
    """An answer in the text form leads to the same verdict."""
    comm = next(comm for comm in parse(fixture("nccl-2.24.txt")).communicators if comm.size == 4)
    found = judge(comm, Joined("job", "all", "g", (0, 1, 2, 3)), 15.0)
    assert found is not None
    assert (found.kind, found.ranks, found.waiting) == ("stalled", [1], [0, 2, 3])
    assert "collective launched 6650 times by ranks 0, 2-3, 6649 times by rank 1" in found.says


# -- the poller


class Polled:
    """Ranks 4 and 6 of a job that has run one collective, and a RAS whose answers the test sets."""

    def __init__(
        self, addresses: tuple[tuple[str, int], ...] = (("localhost", 28028),), versions: tuple[str, ...] = ()
    ) -> None:
        self.now, self.answer, self.asked = 1_700_000_000.0, fixture("healthy.json"), 0
        self.aggregate = JobTable()
        self.ras = Ras(addresses, self.aggregate, threading.RLock(), lambda: self.now, self.ask)
        for rank, pid in ((4, 104), (6, 106)):
            about = {"job": "job", "rank": rank, "restart": 0, "wall_offset_ns": 0, "host": "host", "pid": pid}
            about |= {"nccl": versions[rank // 2 - 2]} if versions else {}
            book = self.aggregate.open(f"ring{rank}", about)
            book.learn([group_entry(1, (4, 6), "pair")])
            ingest_records(book, packed(operation(start_ns=MS, end_ns=2 * MS, group=1)))

    def ask(self, host: str, port: int) -> str:
        self.asked += 1
        if self.answer == "no name":
            raise UnicodeError("label too long")
        if not self.answer:
            raise ConnectionRefusedError(111, "Connection refused")
        return self.answer

    def tick(self, later_s: float) -> None:
        """Look, a while later."""
        self.now += later_s
        self.ras.tick()

    def settle(self) -> None:
        """Let the job run until RAS may be queried."""
        self.tick(0)
        self.tick(SETTLED_S)


def test_off() -> None:
    """Without an address no query is made and there is no collector."""
    polled = Polled(())
    polled.settle()
    assert (polled.asked, polled.ras.readings(), polled.ras.verdicts(None)) == (0, [], [])
    assert polled.ras.view(None).state == "off"


@pytest.mark.parametrize("version", ["2.24.3", "2.26.2", "2.27.3", "2.27.7", "2.29.7", "2.30.7"])
def test_not_where_it_crashes(version: str) -> None:
    """While a rank of the node runs an NCCL that a query can crash, RAS is not queried, and the reason names the version and the report."""
    polled = Polled(versions=("2.28.9", version))
    polled.settle()
    told = polled.ras.view("job")
    assert (polled.asked, polled.ras.readings(), told.state) == (0, [], "refused")
    assert told.says.startswith(f"localhost:28028: not queried: a query can crash NCCL {version} (NVIDIA/nccl #")
    for totals in polled.aggregate.jobs["job"].rank_totals.values():
        totals.alive = totals.rank == 4
    polled.settle()
    assert (polled.asked, polled.ras.view("job").state) == (1, "works")


@pytest.mark.parametrize("version", ["2.28.0", "2.28.9", "2.31.0", "2.32.1"])
def test_where_no_crash_is_known(version: str) -> None:
    """Other versions are queried."""
    polled = Polled(versions=(version, version))
    polled.settle()
    assert polled.asked == 1


def test_not_while_communicators_are_made() -> None:
    """RAS is queried only once no group has been new for a minute, again after each new group; and never without a job."""
    polled = Polled()
    polled.tick(0)
    polled.tick(SETTLED_S - 1)
    assert polled.asked == 0
    assert polled.ras.view(None).state == "found"
    assert polled.ras.readings() == []
    polled.tick(1)
    assert polled.asked == 1
    books = list(polled.aggregate.jobs["job"].rank_totals.values())
    ingest_records(books[0], packed(operation(start_ns=MS, end_ns=2 * MS, group=2)))
    polled.tick(POLL_S)
    polled.tick(SETTLED_S - 1)
    assert polled.asked == 1
    polled.tick(1)
    assert polled.asked == 2
    assert polled.ras.readings() == [("ras", [])]
    for book in books:
        book.alive = False
    polled.tick(SETTLED_S)
    assert polled.asked == 2
    assert polled.ras.readings() == []  # of a job that is over nothing is said any more


def test_no_more_often() -> None:
    """RAS is queried every ten seconds, whatever it answers."""
    polled = Polled()
    polled.settle()
    for _ in range(20):
        polled.tick(1)
    assert polled.asked == 3
    polled.answer = ""
    for _ in range(20):
        polled.tick(1)
    assert polled.asked == 5


def test_no_progress() -> None:
    """Only what does not change from one answer to the next is a verdict, and one answer later it is none any more."""
    polled = Polled()
    polled.answer = fixture("behind.json")
    polled.settle()
    assert polled.ras.verdicts(None) == []
    polled.tick(POLL_S)
    (found,) = polled.ras.verdicts(None)
    assert (found.ranks, found.since_s) == ([6], POLL_S)
    assert polled.ras.verdicts("other") == []
    polled.answer = fixture("behind.json").replace('"AllReduce": 41', '"AllReduce": 40')
    polled.tick(POLL_S)
    assert polled.ras.verdicts(None) == []
    polled.tick(POLL_S)
    assert polled.ras.verdicts(None)
    polled.now += 1000  # nobody has asked for long
    assert polled.ras.verdicts(None) == []


def test_down() -> None:
    """A RAS that does not answer, or answers wrongly, is logged once and is down; it is up again when it answers."""
    polled = Polled()
    polled.settle()
    assert polled.ras.readings() == [("ras", [])]
    for answer, says in (
        ("", "Connection refused"),
        ("SSH-2.0", "an unknown format"),
        ("{", "not valid JSON"),
        ("no name", "label too long"),
    ):
        polled.answer = answer
        polled.tick(POLL_S)
        assert polled.ras.readings() == [("ras", None)]
        view = polled.ras.view(None)
        assert view.state == "down"
        assert says in view.says
        assert view.says.startswith("localhost:28028")
    polled.answer = fixture("healthy.json")
    polled.tick(POLL_S)
    assert polled.ras.view(None).state == "works"


def test_view() -> None:
    """The view has the latest answer by communicator: the state of each rank, and how many operations it has launched."""
    polled = Polled()
    polled.answer = fixture("behind.json")
    polled.settle()
    (answer,) = polled.ras.view(None).answers
    assert (answer.address, answer.state, answer.nccl_version, answer.form) == (
        "localhost:28028",
        "works",
        "2.29.1",
        "json",
    )
    (comm,) = answer.communicators
    assert (comm.size, comm.job_id, comm.group, comm.ranks, comm.differ) == (2, "job", "pair", {"running": "0-1"}, True)
    assert comm.counts["all_reduce"] == {"42": "0", "41": "1"}
    assert polled.ras.view("other").answers[0].communicators == []


def test_one_of_two_down() -> None:
    """One RAS that fails does not keep the other from being heard."""
    polled = Polled((("localhost", 1), ("localhost", 2)))
    answers = iter(["", fixture("behind.json")] * 2)

    def ask(host: str, port: int) -> str:
        polled.answer = next(answers)
        return Polled.ask(polled, host, port)

    polled.ras._ask = ask
    polled.settle()
    polled.tick(POLL_S)
    assert polled.ras.readings() == [("ras", None)]
    assert [answer.state for answer in polled.ras.view(None).answers] == ["down", "works"]
    assert len(polled.ras.verdicts(None)) == 1


# -- routes and commands


@contextmanager
def served(watch: Watch, ras: Ras) -> Iterator[str]:
    """The web face of an agent with that RAS."""
    app = application(idle_services(watch.agent, ras=ras), CollectorRegistry())
    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = uvicorn.Server(uvicorn.Config(app, log_config=None, lifespan="off"))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join()


def test_routes_and_diagnose(tmp_path: Path) -> None:
    """Verdicts of RAS appear among the verdicts, marked; ``commwatch diagnose`` takes them from there, one for each source."""
    polled = Polled()
    polled.answer = fixture("behind.json")
    polled.settle()
    polled.tick(POLL_S)
    watch = Watch(tmp_path)
    with Trainer(watch.rings / "job.r0.0.ring") as trainer, served(watch, polled.ras) as url:
        trainer.call("name", [(group_entry(),)])
        trainer.write([operation(start_ns=MS, end_ns=2 * MS)])
        watch.tick()
        (told,) = json.loads(fetch(f"{url}/api/v1/verdicts?job=job")[0])
        assert (told["source"], told["ranks"]) == ("ras", [6])
        (found,) = diagnose.ask([url, url.replace("127.0.0.1", "localhost")], None).verdicts
        assert (found.source, found.kind, found.ranks) == ("ras", "stalled", [6])
        assert "RAS reports" in found.says


def test_in_the_agent(tmp_path: Path) -> None:
    """An agent with RAS configured waits until the job has settled, and shows that; nothing else is affected."""
    settings = tmp_path / "commwatch.toml"
    with ras_server(fixture("healthy.json").encode()) as server:
        settings.write_text(f'ras = "127.0.0.1:{server.port}"\n')
        write_ring(rings_of(tmp_path), [operation(start_ns=MS, end_ns=2 * MS)], [group_entry()], job="job").close(1)
        with agent(tmp_path, "--config", str(settings)) as running:
            wait_for(lambda: running.get("/api/v1/jobs"), "the job")
            told = running.get("/api/v1/witnesses")["ras"]
            assert told["state"] == "found"
            assert told["answers"][0]["address"] == f"127.0.0.1:{server.port}"
            assert 'commwatch_collector_up{collector="ras"}' not in running.samples()
        assert server.asked == []


def test_wrong_address(tmp_path: Path) -> None:
    """An address that is none is refused by name."""
    for wrong in ("localhost", "localhost:0", "localhost:x", ":28028", "", "a:1,"):
        (tmp_path / "commwatch.toml").write_text(f'ras = "{wrong}"\n')
        done = commwatch("doctor", "--dir", tmp_path, "--config", tmp_path / "commwatch.toml")
        assert done.returncode == 2
        assert "ras: needs addresses such as localhost:28028" in done.stderr


def test_asks_over_the_network() -> None:
    """The real client and the poller together."""
    with ras_server(fixture("healthy.json").encode()) as server:
        polled = Polled((("127.0.0.1", server.port),))
        polled.ras._ask = client.ask
        polled.settle()
        assert polled.ras.view(None).state == "works"
        assert len(polled.ras.view(None).answers[0].communicators) == 2
