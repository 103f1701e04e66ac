"""The content of NCCL's logs outlives the job: for its report, after the logs are no longer followed."""

from __future__ import annotations

import json
import os
import threading
import time
from functools import partial
from pathlib import Path

from commwatch_agent.ingest.jobs import JobTable
from commwatch_agent.model.nccl_views import Topology
from commwatch_agent.model.runs import Stored
from commwatch_agent.sources.log_requests import LogRequest
from commwatch_agent.sources.nccl import NcclLogs, logs_of, remove_old
from commwatch_agent.sources.nccl_archive import keep, kept
from tests.agent.sources.test_nccl import _train, lines
from tests.helpers import agent, commwatch, identity, wait_for

WARNING = "host:10:10 [0] misc/x.cc:3 NCCL WARN Cuda failure 'out of memory'\n"


def topology(job: str = "job") -> Topology:
    """The topology of a job with little content."""
    return Topology(job, "NCCL", ["2.26"], {}, [], [], [], [], [], 3, 0, 0)


def named(job: str) -> Stored:
    """A run of which only the name is known."""
    return Stored("", job, 0.0, 1.0)


def test_kept_by_job(tmp_path: Path) -> None:
    """Each job has its own file, whatever its name, and the latest counts; another job, or a damaged file, gives none.

    So has each node: nodes may share the directory.
    """
    history, other = tmp_path / "history-a.sqlite", tmp_path / "history-b.sqlite"
    for job in ("job", "../../etc/passwd", "x" * 500, "half \ud800"):
        keep(history, topology(job.encode(errors="replace").decode()), "")
    assert kept(history, named("../../etc/passwd")) == topology("../../etc/passwd")
    assert kept(history, named("other")) is None
    keep(history, topology(), "")
    keep(history, Topology("job", "RCCL", [], {}, [], [], [], [], [], 1, 0, 0), "")
    found = kept(history, named("job"))
    assert found is not None
    assert found.library == "RCCL"
    keep(other, topology(), "")
    assert kept(other, named("job")) == topology()
    assert kept(history, named("job")) == found
    for path in (logs_of(tmp_path) / "said").iterdir():
        assert path.stat().st_mode & 0o777 == 0o600
        path.write_text("{}")
    assert kept(history, named("job")) is None
    remove_old(logs_of(tmp_path), time.time() + 10)
    assert list((logs_of(tmp_path) / "said").glob("*")) == []


def test_when_it_is_kept(tmp_path: Path) -> None:
    """Twice a minute at most while lines come, once they stop not again, and always at the end of the job or the agent."""
    now, written = [1000.0], list[Topology]()
    logs = NcclLogs(
        tmp_path, JobTable(), threading.RLock(), lambda: now[0], lambda topology, run: written.append(topology)
    )
    log = tmp_path / "log"
    request = LogRequest("job", [str(log)], time.time(), os.getpid()).write(tmp_path)

    def look(text: str, later_s: float) -> int:
        now[0] += later_s
        with log.open("a") as file:
            file.write(text)
        logs.tick()
        return len(written)

    assert [look(WARNING, 0), look(WARNING, 1), look("", 10), look("", 30), look("", 100)] == [1, 1, 1, 2, 2]
    assert look(WARNING, 1) == 3
    assert look(WARNING, 1) == 3
    request.unlink()
    assert look("", 1) == 4
    assert written[-1].messages == 4
    logs.close()
    assert len(written) == 4


def test_place_that_cannot_be_written(tmp_path: Path) -> None:
    """Where it cannot be kept the logs are followed all the same."""
    state = tmp_path / "state"
    state.write_text("no directory")
    logs = NcclLogs(tmp_path, JobTable(), threading.RLock(), keep=partial(keep, state / "history.sqlite"))
    log = tmp_path / "log"
    log.write_text(WARNING)
    LogRequest("job", [str(log)], time.time() - 5, os.getpid()).write(tmp_path)
    assert logs.tick() == len(WARNING)
    assert [view.messages for view in logs.topology("job")] == [1]
    logs.close()


def test_report_of_a_job_that_has_ended(tmp_path: Path) -> None:
    """The report of a job has the findings and the topology of its NCCL logs when agent, job and logs are no more."""
    first, second = _train(tmp_path)
    with agent(tmp_path) as running:
        wait_for(lambda: running.get("/api/v1/jobs"), "the job")
        first.write_text("\n".join([*lines(0, 104, "aa", (4, 6)), WARNING]))
        second.write_text("\n".join([*lines(1, 106, "aa", (4, 6), "SHM/direct"), ""]))
        wait_for(
            lambda: any(
                len(view["findings"]) == 2 and view["communicators"] for view in running.get("/api/v1/topology")
            ),
            "both logs",
        )
    for log in (first, second):
        log.unlink()
    said = json.loads(commwatch("report", "job", "--dir", tmp_path, "--json").stdout)
    assert [finding["name"] for finding in said["findings"]] == ["cuda_error", "shared_memory"]
    page = tmp_path / "report.html"
    assert commwatch("report", "job", "--dir", tmp_path, "--html", page).returncode == 0
    text = page.read_text(encoding="utf-8")
    assert "out of memory" in text
    assert "<td>pair<td>2<td>host: 0-1<td>" in text


def test_next_run_of_that_name(tmp_path: Path) -> None:
    """A run that begins under the name of one that has ended has none of its logs, neither live nor in its report, and that one keeps them."""
    state, aggregate = tmp_path / "history.sqlite", JobTable()
    logs = NcclLogs(tmp_path, aggregate, threading.RLock(), keep=partial(keep, state))
    for name, text in (("first", WARNING), ("second", "a line\n")):
        (tmp_path / name).write_text(text)
    ends = aggregate.open("1", identity(), os.getuid(), run="a")
    ends.learn([{"nccl_log": str(tmp_path / "first")}])
    logs.tick()
    assert [view.messages for view in logs.topology("job")] == [1]
    ends.alive, ends.gone_ns = False, 5
    later = aggregate.open("2", identity(started_ns=10), os.getuid(), run="b")
    later.learn([{"nccl_log": str(tmp_path / "second")}])
    logs.tick()
    assert [(view.messages, view.files) for view in logs.topology("job")] == [(0, [str(tmp_path / "second")])]
    logs.close()
    first, second = (kept(state, Stored(run, "job", 0.0, 1.0)) for run in "ab")
    assert first is not None
    assert first.messages == 1
    assert second is None or second.messages == 0


def test_disk_that_is_full_for_a_while(tmp_path: Path) -> None:
    """What could not be written down is written down once it can."""
    log, written, full = tmp_path / "log", list[Topology](), [True]

    def keep_it(said: Topology, run: str) -> None:
        if full[0]:
            raise OSError("no space")
        written.append(said)

    logs = NcclLogs(tmp_path, JobTable(), threading.RLock(), keep=keep_it)
    log.write_text(WARNING)
    LogRequest("job", [str(log)], time.time() - 5, os.getpid()).write(tmp_path)
    logs.tick()
    full[0] = False
    logs.close()
    assert [said.messages for said in written] == [1]
