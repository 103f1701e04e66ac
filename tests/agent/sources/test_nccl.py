"""NCCL logs of jobs in sight: found, followed, joined to process groups, served."""

from __future__ import annotations

import glob
import math
import os
import threading
import time
import urllib.error
from pathlib import Path

import pytest

from commwatch_agent.ingest.jobs import JobTable
from commwatch_agent.ingest.rank_totals import RankTotals
from commwatch_agent.model.cells import GroupInfo
from commwatch_agent.model.nccl_views import Topology
from commwatch_agent.sources.log_requests import LogRequest, requests
from commwatch_agent.sources.nccl import NcclLogs, remove_old
from commwatch_agent.sources.nccl_groups import matching
from commwatch_collectors.nccl.account import Account
from commwatch_collectors.nccl.communicators import communicators
from commwatch_collectors.registry import Reading
from tests.agent.web.routes.test_jobs import rings_of
from tests.helpers import MS, PLANTED, RunningAgent, agent, group_entry, identity, operation, wait_for, write_ring

WORLD, PAIR = group_entry(0, (4, 5, 6, 7), "world"), group_entry(1, (4, 6), "pair")


def lines(rank: int, pid: int, comm: str, members: tuple[int, ...], transport: str = "P2P/CUMEM") -> list[str]:
    """What rank ``rank`` of the communicator ``comm`` prints, with a connection to the next rank on two channels."""
    who, size = f"host:{pid}:{pid} [{rank}] NCCL INFO", len(members)
    about = f"ncclCommInitRank comm 0x55{comm} rank {rank} nranks {size} cudaDev 0 nvmlDev 0 busId 1000 commId 0x{comm}"
    links = [f"{who} Channel {c:02d}/0 : {rank}[0] -> {(rank + 1) % size}[1] via {transport}/read" for c in (0, 1)]
    return [f"{who} {about} - Init START", *links, f"{who} {about} - Init COMPLETE"]


def info(small_id: int, members: tuple[int, ...] | None) -> GroupInfo:
    """A group of those global ranks."""
    return GroupInfo(f"id{small_id}", f"label{small_id}", "", "", members, len(members or (0, 0)), True)


def account_of(*texts: str) -> Account:
    """What those lines say."""
    account = Account()
    for number, line in enumerate(texts, 1):
        account.add(line, "log", number)
    return account


# -- the join


def test_communicator_is_its_group() -> None:
    """A communicator is the process group whose ranks are the same processes at the same places."""
    (comm,) = communicators(account_of(*lines(0, 10, "aa", (4, 6)), *lines(1, 12, "aa", (4, 6))))
    ranks = {("host", 10): 4, ("host", 12): 6}
    right, reversed_, larger = info(1, (4, 6)), info(2, (6, 4)), info(3, (4, 6, 8))
    assert matching(comm, ranks, [reversed_, right, larger, info(4, None)]) == [right]
    twin = info(5, (4, 6))
    assert matching(comm, ranks, [right, twin]) == [right, twin]


def test_strangers_are_no_group() -> None:
    """Without knowing every process in sight nothing is joined."""
    (comm,) = communicators(account_of(*lines(0, 10, "aa", (4, 6)), *lines(1, 12, "aa", (4, 6))))
    assert matching(comm, {("host", 10): 4}, [info(1, (4, 6))]) == []
    assert matching(comm, {("elsewhere", 10): 4, ("elsewhere", 12): 6}, [info(1, (4, 6))]) == []


def test_one_rank_in_sight_is_enough() -> None:
    """The ranks of other nodes need not be in sight."""
    (comm,) = communicators(account_of(*lines(1, 12, "aa", (4, 6))))
    assert matching(comm, {("host", 12): 6}, [info(1, (4, 6)), info(2, (6, 4))]) == [info(1, (4, 6))]


# -- requests of ``commwatch run``


def test_requests(tmp_path: Path) -> None:
    """A request holds as long as the process that made it; damaged ones are passed over."""
    mine = LogRequest("job", ["/logs/*"], 5.0, os.getpid())
    mine.write(tmp_path)
    gone = LogRequest("gone", [], 5.0, 1 << 22)
    path = gone.write(tmp_path)
    (tmp_path / "logs" / "torn.json").write_text('{"job": "x"')
    for number, odd in enumerate(('[1]', '{"job": "x", "patterns": 5, "since": 0, "pid": 1}', '{"job": [], "patterns": [], "since": 0, "pid": 1}',
                                  '{"job": "x", "patterns": [3], "since": "0", "pid": 1}', "[" * 100_000)):  # fmt: skip
        (tmp_path / "logs" / f"odd{number}.json").write_text(odd)
    for what, plant in PLANTED.items():
        plant(tmp_path / "logs" / f"{what}.json")
    assert requests(tmp_path) == [(mine, os.getuid())]
    assert not path.exists()
    assert requests(tmp_path / "none") == []


def test_two_requests_for_one_job(tmp_path: Path) -> None:
    """Where each rank of a job has its own ``commwatch run``, the logs of all are followed."""
    logs = NcclLogs(tmp_path, JobTable(), threading.RLock())
    for name, pid in (("one", os.getpid()), ("two", 1)):
        (tmp_path / name).write_text("a line\n")
        LogRequest("job", [str(tmp_path / name)], time.time(), pid).write(tmp_path)
    logs.tick()
    (topology,) = logs.topology("job")
    assert topology.files == [str(tmp_path / name) for name in ("one", "two")]
    logs.close()


def test_requests_of_two_runs(tmp_path: Path) -> None:
    """Where two runs have one name, each request is for the run that its `commwatch run` has started; until that has ranks, for none."""
    aggregate, lock = JobTable(), threading.RLock()
    logs = NcclLogs(tmp_path, aggregate, lock)
    for name, pid in (("first", os.getpid()), ("second", 1)):
        (tmp_path / name).write_text("a line\n")
        LogRequest("job", [str(tmp_path / name)], time.time(), pid, name).write(tmp_path)
    aggregate.open("1", identity(run="first"), os.getuid(), name="job", run="a")
    logs.tick()
    assert [topology.files for topology in logs.topology(None)] == [[str(tmp_path / "first")]]
    aggregate.open("2", identity(run="second"), os.getuid(), name="job#2", run="b")
    logs.tick()
    found = {topology.job_id: topology.files for topology in logs.topology(None)}
    assert found == {"job": [str(tmp_path / "first")], "job#2": [str(tmp_path / "second")]}
    logs.close()


def test_old_logs_are_removed(tmp_path: Path) -> None:
    """Logs last written to before a time go, with the folders they leave empty; the others stay."""
    for job, name, age in (("old", "a", 9), ("mixed", "b", 9), ("mixed", "c", 1)):
        (tmp_path / job).mkdir(exist_ok=True)
        (tmp_path / job / name).touch()
        os.utime(tmp_path / job / name, (1000 - age, 1000 - age))
    for job in ("old", "mixed"):
        os.utime(tmp_path / job, (1, 1))
    remove_old(tmp_path, 995)
    for job in ("old", "mixed"):
        if (tmp_path / job).exists():
            os.utime(tmp_path / job, (1, 1))
    remove_old(tmp_path, 995)
    assert sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*")) == ["mixed", "mixed/c"]


def test_logs_in_use_are_kept(tmp_path: Path) -> None:
    """The logs of a running job stay however long NCCL has been quiet, and so does a folder that it has not used yet."""
    run, aggregate = tmp_path / "run", JobTable()
    logs = NcclLogs(run, aggregate, threading.RLock())
    state = tmp_path / "[state]"
    quiet, named, ended, unused = (state / job / "host.1" for job in ("quiet", "named", "ended", "unused"))
    for log in (quiet, named, ended):
        log.parent.mkdir(parents=True)
        log.touch()
        os.utime(log, (1, 1))
    unused.parent.mkdir()
    for folder in state.iterdir():
        os.utime(folder, (1, 1))
    request = LogRequest(
        "job", [f"{glob.escape(str(log.parent))}/host.*" for log in (quiet, unused)], 0.0, os.getpid()
    ).write(run)
    identity = {"job": "other", "rank": 0, "restart": 0, "wall_offset_ns": 0, "host": "host", "pid": 1}
    totals = aggregate.open("ring", identity)
    totals.owner_uid = os.getuid()
    totals.learn([{"nccl_log": str(named)}])
    logs.tick()
    remove_old(state, 1000.0, logs.used())
    assert not ended.exists()
    assert unused.parent.exists()
    assert quiet.exists()
    assert named.exists()
    request.unlink()
    logs.tick()
    remove_old(state, 1000.0, logs.used())
    assert not quiet.exists()
    assert not unused.parent.exists()
    logs.close()


# -- in the agent


def test_readings(tmp_path: Path) -> None:
    """Channels are there per group and transport only where the join is certain; every class is, once logs are followed; findings as they come up."""
    aggregate, now = JobTable(), [100.0]
    logs = NcclLogs(tmp_path, aggregate, threading.RLock(), lambda: now[0])
    assert logs.readings() == [("nccl_log", [])]
    log = tmp_path / "log"
    LogRequest("job", [str(log)], time.time(), os.getpid()).write(tmp_path)
    log.write_text("\n".join([*lines(0, 10, "aa", (4, 6)), ""]))
    logs.tick()
    ((name, readings),) = logs.readings()
    assert name == "nccl_log"
    assert readings is not None
    assert {reading.metric for reading in readings} == {"nccl_messages_total"}
    assert {reading.labels[1] for reading in readings} >= {"cuda_error", "timeout", "other"}
    book = aggregate.open(
        "ring", {"job": "job", "rank": 4, "restart": 0, "wall_offset_ns": 0, "host": "host.domain", "pid": 10}
    )
    book.learn([PAIR])
    ((_, readings),) = logs.readings()
    assert readings is not None
    assert Reading("nccl_channels", ("job", "pair", "P2P/CUMEM"), 2) in readings
    book.learn([group_entry(2, (4, 6), "twin")])
    ((_, readings),) = logs.readings()
    assert readings is not None
    assert "nccl_channels" not in {reading.metric for reading in readings}
    with open(log, "a") as file:  # a second log line makes a finding; until then there was none
        file.write("host:10:10 [0] misc/x.cc:3 NCCL WARN Cuda failure 'out of memory'\n" * 2)
    logs.tick()
    ((_, readings),) = logs.readings()
    assert readings is not None
    told = [reading for reading in readings if reading.metric == "nccl_finding"]
    assert told == [Reading("nccl_finding", ("job", "cuda_error", "error"), 1)]
    now[0] += 100
    assert logs.readings() == [("nccl_log", None)]
    logs.close()


def _findings(logs: NcclLogs) -> list[str]:
    logs.tick()
    ((_, readings),) = logs.readings()
    assert readings is not None
    return [reading.labels[1] for reading in readings if reading.metric == "nccl_finding"]


def _add(path: Path, texts: list[str]) -> None:
    with path.open("a") as file:
        file.writelines(f"{text}\n" for text in texts)


def _live(logs: Path, aggregate: JobTable, restart: int, pids: tuple[int, int], texts: int) -> None:
    """Run the job's two ranks anew, of whose logs the first ``texts`` lines are there."""
    for totals in aggregate.rank_totals():
        totals.alive, totals.gone_ns = False, 15
    for rank, (place, pid) in enumerate(zip((4, 6), pids, strict=True)):
        _add(logs / f"nccl.{pid}", lines(rank, pid, f"a{restart}", (4, 6))[:texts])
        identity = {"job": "job", "rank": place, "restart": restart, "wall_offset_ns": 0, "host": "host", "pid": pid}
        aggregate.open(f"ring{pid}", {**identity, "started_ns": pid}).learn([PAIR])


def test_init_that_goes_on(tmp_path: Path) -> None:
    """An init is unfinished only once nothing of it has changed for a minute, whatever else is logged; then it is stored, too."""
    now, written = [1000.0], list[Topology]()
    logs = NcclLogs(
        tmp_path, JobTable(), threading.RLock(), lambda: now[0], lambda topology, run: written.append(topology)
    )
    LogRequest("job", [str(tmp_path / "nccl.*")], time.time(), os.getpid()).write(tmp_path)
    first, second = lines(0, 10, "aa", (4, 6)), lines(1, 12, "aa", (4, 6))
    _add(tmp_path / "nccl.10", first[:1])
    assert _findings(logs) == []
    now[0] += 50
    _add(tmp_path / "nccl.12", second[:1])
    assert _findings(logs) == []
    now[0] += 50
    _add(tmp_path / "nccl.12", second[1:2])
    assert _findings(logs) == []
    now[0] += 59
    _add(tmp_path / "nccl.12", ["host:12:12 [1] NCCL INFO NCCL_BUFFSIZE set by environment to 8."])
    assert _findings(logs) == []
    now[0] += 1
    assert _findings(logs) == ["init_incomplete"]
    now[0] += 30
    logs.tick()
    assert [found.name for found in written[-1].findings] == ["init_incomplete"]
    _add(tmp_path / "nccl.12", second[2:])
    assert _findings(logs) == []
    logs.close()


def test_init_of_an_earlier_run(tmp_path: Path) -> None:
    """A run that was killed in its init leaves no finding to the run that follows; one that hangs keeps its own when it ends."""
    aggregate, now = JobTable(), [1000.0]
    logs = NcclLogs(tmp_path, aggregate, threading.RLock(), lambda: now[0])
    LogRequest("job", [str(tmp_path / "nccl.*")], time.time(), os.getpid()).write(tmp_path)

    _live(tmp_path, aggregate, 0, (10, 12), 1)
    assert _findings(logs) == []
    now[0] += 61
    assert _findings(logs) == ["init_incomplete"]
    _live(tmp_path, aggregate, 1, (20, 22), 4)
    assert _findings(logs) == []
    now[0] += 61
    assert _findings(logs) == []
    _live(tmp_path, aggregate, 2, (30, 32), 1)
    now[0] += 61
    assert _findings(logs) == []
    now[0] += 61
    assert _findings(logs) == ["init_incomplete"]
    logs.close()


def test_channels_of_this_run(tmp_path: Path) -> None:
    """Channels are those of the run that goes on, however often the job was restarted."""
    aggregate = JobTable()
    logs = NcclLogs(tmp_path, aggregate, threading.RLock())
    LogRequest("job", [str(tmp_path / "nccl.*")], time.time(), os.getpid()).write(tmp_path)
    for restart in range(3):
        _live(tmp_path, aggregate, restart, (10 + restart, 20 + restart), 4)
        logs.tick()
        ((_, readings),) = logs.readings()
        assert readings is not None
        found = [reading for reading in readings if reading.metric == "nccl_channels"]
        assert found == [Reading("nccl_channels", ("job", "pair", "P2P/CUMEM"), 4)]
    logs.close()


def _train(directory: Path) -> list[Path]:
    """Two ranks of a job whose NCCL writes into files, each into its own."""
    logs = []
    for rank, pid in ((4, 104), (6, 106)):
        log = directory / f"host.{pid}"
        names = [{**PAIR}, {**WORLD}, {"nccl_log": str(log)}]
        made = [operation(start_ns=MS, end_ns=2 * MS, group=1)]
        write_ring(rings_of(directory), made, names, job="job", rank=rank, host="host", pid=pid).close(1)
        logs.append(log)
    return logs


def _channels(running: RunningAgent) -> dict[str, float]:
    return {name: value for name, value in running.samples().items() if name.startswith("commwatch_nccl_channels")}


def test_log_of_a_rank(tmp_path: Path) -> None:
    """The log that a rank's probe names is followed: topology, messages and metrics, by process group and global rank."""
    first, second = _train(tmp_path)
    with agent(tmp_path) as running:
        wait_for(lambda: running.get("/api/v1/jobs"), "the job")
        assert running.get("/api/v1/nccl/messages?job=job") == []
        first.write_text("\n".join([*lines(0, 104, "aa", (4, 6)), ""]))
        second.write_text("\n".join([*lines(1, 106, "aa", (4, 6), "SHM/direct"), ""]))
        wait_for(lambda: len(_channels(running)) == 2, "both logs")
        assert _channels(running) == {
            'commwatch_nccl_channels{group="pair",job_id="job",transport="P2P/CUMEM"}': 2,
            'commwatch_nccl_channels{group="pair",job_id="job",transport="SHM"}': 2,
        }
        (topology,) = running.get("/api/v1/topology?job=job")
        (comm,) = topology["communicators"]
        assert (comm["comm_id"], comm["hosts"], comm["group_ids"]) == ("0xaa", {"host": [0, 1]}, ["pair-1"])
        assert comm["links"][0] == {
            "src": 0,
            "dst": 1,
            "transport": "P2P/CUMEM",
            "device": None,
            "gdr": None,
            "channels": 2,
        }
        assert topology["files"] == [str(first), str(second)]

        with second.open("a") as file:
            file.write("\nhost:106:900 [1] misc/x.cc:3 NCCL WARN Cuda failure 'out of memory'\n")
        (message,) = wait_for(lambda: running.get("/api/v1/nccl/messages"), "the warning")
        assert abs(message.pop("at") - time.time()) < 60
        assert message == {
            "job_id": "job",
            "class": "cuda_error",
            "text": "Cuda failure 'out of memory'",
            "host": "host",
            "pid": 106,
            "rank": 6,
            "file": str(second),
            "line": 6,
        }
        assert running.get("/api/v1/nccl/messages?class=timeout") == []
        assert len(running.get("/api/v1/nccl/messages?class=cuda_error&since=10m")) == 1
        assert running.get("/api/v1/nccl/messages?until=1000") == []
        assert running.samples()['commwatch_nccl_messages_total{class="cuda_error",job_id="job"}'] == 1
        assert running.samples()['commwatch_nccl_messages_total{class="timeout",job_id="job"}'] == 0
        assert running.samples()['commwatch_collector_up{collector="nccl_log"}'] == 1
        (topology,) = running.get("/api/v1/topology")
        assert topology["findings"][0]["name"] == "cuda_error"


def _outputs(*logs: Path) -> list[dict[str, object]]:
    """What a rank names as its output."""
    found = [(log, log.stat()) for log in logs]
    return [
        {"output": str(log), "device": about.st_dev, "inode": about.st_ino, "size": about.st_size}
        for log, about in found
    ]


def _rank(aggregate: JobTable, entries: list[dict[str, object]]) -> RankTotals:
    totals = aggregate.open("ring", identity(), os.getuid())
    totals.owner_uid = os.getuid()
    totals.learn(entries)
    return totals


WARNING = "host:10:10 [0] misc/x.cc:3 NCCL WARN Cuda failure 'out of memory'"
TIMEOUT = (
    "[rank0]:[E1129 10:00:00.000000000 ProcessGroupNCCL.cpp:632] [Rank 0] Watchdog caught collective operation timeout: "
    "WorkNCCL(SeqNum=7, OpType=ALLREDUCE, NumelIn=1, NumelOut=1, Timeout(ms)=600000) ran for 600055 milliseconds before timing out."
)


def test_warning_and_its_copy(tmp_path: Path) -> None:
    """A warning in NCCL's log counts once, also if the output has a copy of it; what only the output has is found there."""
    aggregate, (output, log) = JobTable(), (tmp_path / "job.log", tmp_path / "nccl.10")
    output.write_text("an old line\n")
    _rank(aggregate, [{"nccl_log": str(log)}, *_outputs(output)])
    logs = NcclLogs(tmp_path, aggregate, threading.RLock())
    _add(log, [WARNING])
    _add(output, [WARNING, TIMEOUT])
    assert _findings(logs) == ["cuda_error", "watchdog_timeout"]
    assert [(message.file, message.line) for message in logs.messages(None, None, 0, 1e12, 9)] == [
        (str(output), 3),
        (str(log), 1),
    ]
    assert {name: [error.name for error in errors] for name, errors in logs.errors().items()} == {
        "job": [found.name for found in logs.topology("job")[0].findings if found.severity == "error"]
    }
    logs.close()


def test_output_without_a_fault(tmp_path: Path) -> None:
    """A job whose output has nothing of NCCL or PyTorch has no logs to show; one whose output has, has."""
    aggregate, output, written = JobTable(), tmp_path / "job.log", list[Topology]()
    output.touch()
    _rank(aggregate, _outputs(output))
    logs = NcclLogs(tmp_path, aggregate, threading.RLock(), keep=lambda topology, run: written.append(topology))
    _add(output, ["step 1, loss 2.5", "NCCL is fast"])
    assert _findings(logs) == []
    assert (logs.readings(), logs.topology(None), logs.knows("job"), logs.errors()) == (
        [("nccl_log", [])],
        [],
        False,
        {},
    )
    assert written == []
    _add(output, [TIMEOUT])
    assert _findings(logs) == ["watchdog_timeout"]
    assert (len(logs.topology("job")), logs.knows("job")) == (1, True)
    logs.close()
    assert [found.name for found in written[-1].findings] == ["watchdog_timeout"]


def test_faults_of_others(tmp_path: Path) -> None:
    """A rank that runs out of memory and a fault of a GPU are findings, and no faults of communication: metric and incidents leave them out."""
    aggregate, output = JobTable(), tmp_path / "job.log"
    output.touch()
    _rank(aggregate, _outputs(output))
    logs = NcclLogs(tmp_path, aggregate, threading.RLock())
    _add(output, [
        "[rank0]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.10 GiB",
        "NVRM: Xid (PCI:0000:3b:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.",
    ])  # fmt: skip
    assert (_findings(logs), logs.errors()) == ([], {})
    (topology,) = logs.topology("job")
    assert {finding.name for finding in topology.findings} == {"process_failed", "gpu_fault"}
    logs.close()


def test_what_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All that the logs had at some time is read by the end of the first tick after it that leaves nothing."""
    monkeypatch.setattr("commwatch_collectors.nccl.follow.TICK_BYTES", 50)
    monkeypatch.setattr("commwatch_collectors.nccl.follow._CHUNK", 50)
    monkeypatch.setattr("commwatch_agent.sources.nccl.TICK_BYTES", 50)
    aggregate, log = JobTable(), tmp_path / "nccl.10"
    _rank(aggregate, [{"nccl_log": str(log)}])
    logs = NcclLogs(tmp_path, aggregate, threading.RLock())
    log.write_text("12345\n" * 10)
    since_s = time.monotonic()
    logs.tick()
    assert logs.read_since(since_s) == math.inf
    logs.tick()
    read_s = logs.read_since(since_s)
    assert since_s < read_s <= time.monotonic()
    logs.tick()
    assert logs.read_since(since_s) == read_s
    assert logs.read_since(time.monotonic()) == math.inf
    logs.close()


def test_errors_while_lines_come(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it takes long to look for errors, those of the look before count meanwhile."""
    monkeypatch.setattr("commwatch_agent.sources.job_logs._OF_TIME", 1e-9)
    aggregate, log = JobTable(), tmp_path / "nccl.10"
    _rank(aggregate, [{"nccl_log": str(log)}])
    logs = NcclLogs(tmp_path, aggregate, threading.RLock())
    _add(log, [WARNING])
    logs.tick()
    before = logs.errors()
    assert [error.name for error in before["job"]] == ["cuda_error"]
    _add(log, [WARNING.replace("out of memory", "an illegal memory access was encountered")])
    logs.tick()
    assert logs.errors() == before
    logs.tick()
    assert len(logs.errors()["job"]) == 2, "no line came with the last reading"
    logs.close()


def test_errors_of_an_ended_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The logs of a job that has ended count as read once the errors in its last lines were looked for."""
    monkeypatch.setattr("commwatch_agent.sources.job_logs._OF_TIME", 1e-9)
    aggregate, log = JobTable(), tmp_path / "nccl.10"
    totals = _rank(aggregate, [{"nccl_log": str(log)}])
    logs = NcclLogs(tmp_path, aggregate, threading.RLock())
    _add(log, ["vm:10:10 [0] NCCL INFO Bootstrap: Using eth0"])
    logs.tick()
    assert logs.errors() == {}
    _add(log, [WARNING])
    since_s = time.monotonic()
    logs.tick()
    logs.errors()  # of the look before, as lines come
    assert logs.read_since(since_s) < math.inf, "it runs"
    totals.alive = False
    assert logs.read_since(since_s) == math.inf
    logs.tick()
    assert len(logs.errors()["job"]) == 1
    assert since_s < logs.read_since(since_s) <= time.monotonic()
    logs.close()


def test_log_that_cannot_be_read(tmp_path: Path) -> None:
    """A log that cannot be opened is logged once; the agent continues."""
    logs = NcclLogs(tmp_path, JobTable(), threading.RLock())
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    LogRequest("job", [str(loop)], time.time(), os.getpid()).write(tmp_path)
    with pytest.MonkeyPatch.context() as patch:
        said: list[str] = []
        patch.setattr("commwatch_agent.sources.nccl.log.warning", lambda *about: said.append(about[1]))
        logs.tick()
        logs.tick()
    assert said == [str(loop)]


def test_asked_wrongly(tmp_path: Path) -> None:
    """Unknown jobs and classes are named."""
    with agent(tmp_path) as running:
        assert running.get("/api/v1/topology") == []
        for path, status in (
            ("/api/v1/topology?job=nope", 404),
            ("/api/v1/nccl/messages?job=nope", 404),
            ("/api/v1/nccl/messages?class=nope", 400),
        ):
            with pytest.raises(urllib.error.HTTPError) as error:
                running.get(path)
            assert error.value.code == status
            assert "nope" in error.value.read().decode()
