"""NCCL Inspector's files in the agent: found, followed, joined to ranks and groups, kept apart from what the probe recorded."""

from __future__ import annotations

import json
import os
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest

from commwatch.wire.nccl_debug_file import inspector_dir
from commwatch_agent.ingest.jobs import JobTable
from commwatch_agent.sources import inspector, inspector_sums
from commwatch_agent.sources.inspector import Inspector
from commwatch_agent.sources.inspector_sums import MOST_CELLS
from tests.agent.web.routes.test_jobs import rings_of
from tests.helpers import MS, agent, group_entry, identity, operation, wait_for, write_ring

FIXTURES = Path(__file__).parents[2] / "fixtures/inspector"
#: The processes of the fixtures.
PIDS = {4: 104, 6: 106}
PAIR = group_entry(1, (4, 6), "pair")


class Watched:
    """Ranks 4 and 6 of a job, which dump into ``folder``, and what the agent makes of it."""

    def __init__(self, folder: Path, setting: Path | None = None, told: bool = True) -> None:
        self.now = 1_700_000_000.0
        self.aggregate = JobTable()
        self.inspector = Inspector(setting, self.aggregate, threading.RLock(), lambda: self.now)
        for rank, pid in PIDS.items():
            book = self.aggregate.open(f"ring{rank}", identity("job", rank, pid=pid, host="host.domain"))
            book.owner_uid = os.getuid()
            book.learn([PAIR, *([{"inspector": str(folder)}] if told else [])])

    def tick(self) -> None:
        """Look at the files, a while later."""
        self.now += 10
        self.inspector.tick()


def put(folder: Path, name: str = "nccl-2.28.log", pid: int = 104, host: str = "host.domain") -> Path:
    """A fixture where the process would have dumped it."""
    folder.mkdir(exist_ok=True)
    return Path(shutil.copyfile(FIXTURES / name, folder / f"{host}-pid{pid}.log"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Where Inspector dumps."""
    return tmp_path / "dumps"


def test_off(folder: Path) -> None:
    """Without a word from a probe or the settings it is off, and nothing is read."""
    put(folder)
    watched = Watched(folder, told=False)
    watched.tick()
    view = watched.inspector.view(None)
    assert (view.state, view.files, view.rows) == ("off", [], [])


@pytest.mark.parametrize("by_setting", [False, True])
def test_sums(folder: Path, by_setting: bool) -> None:
    """What each rank timed is added up by group, operation and timing; bus bytes over seconds is its bus bandwidth."""
    put(folder)
    put(folder, "nccl-2.30.log", 106)
    watched = Watched(folder, folder if by_setting else None, told=not by_setting)
    watched.tick()
    view = watched.inspector.view("job")
    assert (view.state, view.records, view.unknown_lines, view.left_out) == ("works", 9, 0, 0)
    found = {(row.rank, row.op, row.timing): row for row in view.rows}
    assert {row.group for row in view.rows} == {"pair"}
    kernel = found[4, "all_reduce", "kernel_gpu"]
    assert kernel.count == 2
    assert kernel.seconds == pytest.approx(4e-3)
    assert kernel.busbw == pytest.approx(4e9)
    assert found[4, "broadcast", "collective_cpu"].count == 1
    assert found[6, "send", "kernel_gpu"].count == 1
    assert found[6, "other", "kernel_gpu"].busbw is None
    row = next(row for row in view.rows if row.op == "all_gather")
    assert (row.rank, row.group_id, row.size_bytes, row.count) == (4, "pair-1", 1 << 21, 1)
    assert row.busbw == pytest.approx(4e9)  # as Inspector itself says
    assert watched.inspector.view("other").rows == []


def test_torn_line_waits(folder: Path) -> None:
    """A line without its end waits for the rest; a foreign one is counted and passed over."""
    whole = put(folder).read_bytes()
    path = folder / "host.domain-pid104.log"
    watched = Watched(folder)
    for end in range(0, len(whole) + 1, 97):
        path.write_bytes(whole[:end])
        watched.tick()
        assert watched.inspector.view(None).unknown_lines == 0
    path.write_bytes(whole + b"Killed\n\n")
    watched.tick()
    view = watched.inspector.view(None)
    assert (view.records, view.unknown_lines) == (5, 1)


def test_strangers(folder: Path) -> None:
    """A file of a process that is no rank in sight is not read; a record of another process in one's own file is left out."""
    put(folder, pid=105)
    path = put(folder)
    path.write_text(path.read_text().replace('"pid":104', '"pid":99'))
    watched = Watched(folder)
    watched.tick()
    view = watched.inspector.view(None)
    assert (view.files, view.records, view.left_out) == ([str(path)], 0, 5)


def test_old_file(folder: Path) -> None:
    """A file that existed before the rank began belongs to an earlier process with the same pid."""
    os.utime(put(folder), (1_600_000_000, 1_600_000_000))
    watched = Watched(folder)
    watched.tick()
    assert watched.inspector.view(None).state == "found"


@pytest.mark.parametrize("version", ["v4.1", "v4.2", "v4.3"])
def test_dropped(folder: Path, version: str) -> None:
    """Operations that Inspector overwrote are counted; formats before v4.1 do not report them."""
    put(folder, "nccl-2.30.log", 106)
    watched = Watched(folder)
    watched.tick()
    assert watched.inspector.view("job").dropped is None
    put(folder, f"{version}.log")
    watched.tick()
    view = watched.inspector.view("job")
    assert (view.records, view.dropped, view.unknown_lines, view.unknown_fields, view.left_out) == (8, 12, 0, 0, 0)
    assert (view.state, view.says) == ("works", f"reads {folder}; Inspector dropped 12 of 20 operations")
    assert sum(row.count for row in view.rows if (row.op, row.rank) == ("all_reduce", 4)) == 2
    chosen = {(row.algorithm, row.protocol) for row in view.rows if (row.op, row.rank) == ("all_reduce", 4)}
    assert chosen == ({(None, None)} if version == "v4.1" else {("RING", "SIMPLE"), ("RING", "LL")})


def test_dumps_of_strangers(folder: Path) -> None:
    """What processes that are not ranks dropped is left out, and so are communicators without end."""
    lines = (FIXTURES / "v4.3.log").read_text().splitlines()
    path = put(folder, "v4.3.log")
    path.write_text(lines[0].replace('"pid":104', '"pid":99') + "\n" + lines[1] + "\n")
    with open(path, "a") as file:
        for number in range(MOST_CELLS + 10):
            file.write(lines[0].replace("0x7f8c496ae9f661", f"0x{number:x}") + "\n")
    watched = Watched(folder)
    for _ in range(10):
        watched.tick()
    view = watched.inspector.view("job")
    assert (view.records, view.left_out, view.dropped) == (0, 12, 3 * MOST_CELLS)


def test_file_that_begins_again(folder: Path) -> None:
    """Records of a truncated file, or after a part that was skipped, do not belong to the dump before."""
    path = put(folder, "v4.3.log")
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:2]))
    watched = Watched(folder)
    watched.tick()
    path.write_text(lines[2])
    watched.tick()
    view = watched.inspector.view("job")
    assert (view.records, view.unknown_lines) == (1, 1)
    path.write_text("")
    watched.tick()
    path.write_text(lines[0])
    watched.tick()
    (files,) = vars(watched.inspector)["_jobs"].values()
    with open(path, "a") as file:
        file.writelines(lines[1:3])
    files.follower.skipped_bytes += 1
    watched.tick()
    view = watched.inspector.view("job")
    assert (view.records, view.unknown_lines) == (1, 3)


def test_later_format(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A format that cannot be read is named in one line of the log and in the state; its readable lines are used."""
    said: list[tuple[str, str]] = []
    monkeypatch.setattr("commwatch_agent.sources.inspector.log.warning", lambda *about: said.append(about[1:]))
    path = put(folder, "v4.3.log")
    later = path.read_text().replace('"v4.3"', '"v5.0"')
    path.write_text(later.replace('"coll_sn"', '"seq"').replace('"p2p_sn"', '"seq"'))
    watched = Watched(folder)
    watched.tick()
    watched.tick()
    reason = "this version of commwatch reads v4.0 to v4.3"
    assert said == [("format v5.0", reason)]
    view = watched.inspector.view("job")
    assert (view.state, view.says) == ("down", f"format v5.0: {reason}")
    assert (view.records, view.unknown_lines, view.unread_versions) == (0, 4, ["v5.0"])
    with open(path, "a") as file:
        file.write(later)
    watched.tick()
    view = watched.inspector.view("job")
    assert (view.state, view.records, view.unknown_lines) == ("works", 4, 4)
    assert view.says.startswith(f"reads {folder}; format v5.0: {reason}")


def test_twins(folder: Path) -> None:
    """Of two groups with the same ranks the one is taken that the communicator is called after; without a name it is unknown."""
    for name, pid, label in (("nccl-2.28.log", 104, "unknown"), ("nccl-2.30.log", 106, "pair")):
        path = put(folder, name, pid)
        watched = Watched(folder)
        for book in watched.aggregate.jobs["job"].rank_totals.values():
            book.learn([group_entry(2, (4, 6), "twin")])
        watched.tick()
        assert {row.group for row in watched.inspector.rows(None)} == {label}
        path.unlink()


def test_bounded(folder: Path) -> None:
    """Communicators without end fill the sums only so far; the rest is counted as left out."""
    record = json.loads((FIXTURES / "nccl-2.28.log").read_text().splitlines()[0])
    folder.mkdir()
    with open(folder / "host.domain-pid104.log", "w") as file:
        for number in range(MOST_CELLS + 10):
            record["header"]["id"] = f"0x{number:x}"
            file.write(json.dumps(record) + "\n")
    watched = Watched(folder)
    for _ in range(10):
        watched.tick()
    view = watched.inspector.view(None)
    assert (view.records, view.left_out, len(view.rows)) == (MOST_CELLS, 10, MOST_CELLS)


def test_ended_job(folder: Path) -> None:
    """A job that is forgotten takes its sums along, and its files are let go of."""
    put(folder)
    watched = Watched(folder)
    watched.tick()
    watched.aggregate.jobs.clear()
    watched.tick()
    view = watched.inspector.view(None)
    assert (view.state, view.rows) == ("off", [])


def test_stuck(folder: Path) -> None:
    """If the files have not been read for a while, for example because a file server hangs, the state is down."""
    watched = Watched(folder)
    watched.tick()
    assert watched.inspector.view(None).state == "found"
    watched.now += 100
    assert watched.inspector.view(None).state == "down"


def test_unreadable(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that cannot be opened is logged once, and the state is down; the others are read on."""
    folder.mkdir()
    loop = folder / "host.domain-pid104.log"
    loop.symlink_to(loop)
    put(folder, "nccl-2.30.log", 106)
    said: list[str] = []
    monkeypatch.setattr("commwatch_agent.sources.inspector.log.warning", lambda *about: said.append(about[1]))
    watched = Watched(folder)
    watched.tick()
    watched.tick()
    assert said == [str(loop)]
    assert watched.inspector.view(None).records == 4
    (folder / "host.domain-pid106.log").unlink()
    alone = Watched(folder)
    alone.tick()
    assert alone.inspector.view(None).state == "down"


@pytest.mark.parametrize(
    ("env", "name"),
    [
        ({}, None),
        ({"NCCL_INSPECTOR_ENABLE": "0", "NCCL_INSPECTOR_DUMP_DIR": "/d"}, None),
        ({"NCCL_INSPECTOR_ENABLE": "yes"}, None),
        ({"NCCL_INSPECTOR_ENABLE": "1", "NCCL_INSPECTOR_DUMP_DIR": "/d/e"}, "/d/e"),
        ({"NCCL_INSPECTOR_ENABLE": "1"}, "nccl-inspector-unknown-jobid"),
        ({"NCCL_INSPECTOR_ENABLE": "1", "SLURM_JOBID": "42"}, "nccl-inspector-42"),
    ],
)
def test_folder_by_environment(env: dict[str, str], name: str | None) -> None:
    """The probe reports the folder that Inspector takes from its environment, and none if Inspector is off."""
    assert inspector_dir(env) == (None if name is None else str(Path.cwd() / name))


def test_in_the_agent(tmp_path: Path, folder: Path) -> None:
    """A probe's names file is enough for the route, beside the probe's own series."""
    for rank, pid in PIDS.items():
        put(folder, "nccl-2.28.log" if rank == 4 else "nccl-2.30.log", pid, host="host")
        names: list[dict[str, Any]] = [PAIR, {"inspector": str(folder)}]
        made = [operation(start_ns=MS, end_ns=2 * MS, group=1)]
        write_ring(rings_of(tmp_path), made, names, job="job", rank=rank, host="host", pid=pid).close(1)
    with agent(tmp_path) as running:
        told = wait_for(
            lambda: view if (view := running.get("/api/v1/witnesses?job=job"))["inspector"]["records"] == 9 else None,
            "all records",
        )
        assert told["inspector"]["state"] == "works"
        assert told["inspector"]["rows"][0]["timing"] == "kernel_gpu"
        of_probe = 'commwatch_collectives_total{group="pair",job_id="job",op="all_reduce",rank="4"}'
        wait_for(lambda: running.samples().get(of_probe) == 1, "the probe's record")
        assert told["ras"] == {"state": "off", "says": "the setting ras is not set", "answers": []}


def test_places_without_end(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The number of ranks kept for a communicator is limited, whatever its files contain; all timed operations are counted."""
    for name in ("MOST_CELLS", "_LEAST_CELLS"):
        monkeypatch.setattr(inspector, name, 8)
    path = put(folder)
    line = path.read_text().splitlines()[0].replace('"n_ranks":2', '"n_ranks":1000')
    path.write_text("".join(line.replace('"rank":0', f'"rank":{rank}') + "\n" for rank in range(100)))
    watched = Watched(folder)
    watched.tick()
    assert watched.inspector.view(None).records == 100
    (files,) = vars(watched.inspector)["_jobs"].values()
    assert [comm.places_taken for comm in files.comms.values()] == [16]


def test_many_jobs(folder: Path) -> None:
    """The sums and files of many jobs have bounded room in all; a job of another user is followed beside them."""
    watched = Watched(folder)
    for number in range(100):
        book = watched.aggregate.open(
            f"many{number}", identity(f"job{number}", 0, pid=number + 500, host="host.domain")
        )
        book.owner_uid = 12345
        book.learn([{"inspector": str(folder)}])
    watched.tick()
    assert "job" in vars(watched.inspector)["_jobs"]
    other = watched.aggregate.open("other", identity("other", 0, pid=400, host="host.domain"))
    other.owner_uid = 54321
    other.learn([{"inspector": str(folder)}])
    watched.tick()
    jobs = vars(watched.inspector)["_jobs"]
    assert "other" in jobs
    assert len(jobs) <= inspector.MOST_JOBS
    assert sum(files.most for files in jobs.values()) <= 16_384 + 256 * inspector.MOST_JOBS
    assert sum(files.follower.most_files for files in jobs.values()) <= 1024


def test_many_runs(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However often a job is restarted, there is room for what the new run times, and the sums of earlier runs go."""
    for name in ("MOST_CELLS", "_LEAST_CELLS"):
        monkeypatch.setattr(inspector, name, 12)
    monkeypatch.setattr(inspector_sums, "_QUIET_LOOKS", 1)
    text = (FIXTURES / "v4.3.log").read_text()
    watched = Watched(folder)
    folder.mkdir()
    for run in range(6):
        pid = 1000 + run
        for totals in watched.aggregate.rank_totals():
            totals.alive, totals.gone_ns = False, 1
        book = watched.aggregate.open(
            f"run{run}", {**identity("job", 4, pid=pid, host="host.domain"), "restart": run + 1, "started_ns": pid}
        )
        book.owner_uid = os.getuid()
        book.learn([PAIR, {"inspector": str(folder)}])
        path = folder / f"host.domain-pid{pid}.log"
        path.write_text(text.replace('"pid":104', f'"pid":{pid}').replace('"id":"0x', f'"id":"0x{run}'))
        for _ in range(4):
            watched.tick()
        view = watched.inspector.view("job")
        assert (view.left_out, view.records, view.dropped) == (0, 4, 12)
        assert {row.comm for row in view.rows} == {f"0x{run}7f8c496ae9f661", f"0x{run}51aa"}
