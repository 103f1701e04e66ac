"""``commwatch doctor``: each thing that can be wrong is named with its remedy, and nothing is where all is well."""

from __future__ import annotations

import json
import os
import socket
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from email.message import Message
from http import HTTPStatus
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from urllib.error import HTTPError

import pytest

from commwatch.api.client import get
from commwatch_agent.analysis.traffic import NOT_COUNTED
from commwatch_agent.commands import nccl_debug
from commwatch_agent.commands.doctor import _agent, _cost, _nccl, _witnesses, examine
from commwatch_agent.commands.network_checks import Check, connections, network_checks
from commwatch_agent.config_sources import load
from tests.agent.sources.test_host import Watched
from tests.agent.web.routes.test_jobs import rings_of
from tests.helpers import (
    MS,
    PATIENCE_S,
    RunningAgent,
    Trainer,
    agent,
    commwatch,
    free_port,
    group_entry,
    identity,
    needs,
    operation,
    wait_for,
)


def found(directory: Path, **flags: Any) -> dict[str, Check]:
    """The checks by what they are about."""
    return {check.what: check for check in examine(load({}, None, dir=directory, **flags), wait_s=0.5)}


def trainer(running: RunningAgent, rank: int = 0, **more: Any) -> Trainer:
    """A rank of two, with one operation in its ring."""
    about = identity(rank=rank, **{"hook": "native", **more})
    made = Trainer(rings_of(running.directory) / f"job.r0.{rank}.ring", about)
    made.call("name", [(group_entry(),)])
    made.write([operation(start_ns=MS, end_ns=2 * MS)])
    wait_for(
        lambda: rank in running.get("/api/v1/jobs")[0]["ranks"] if running.get("/api/v1/jobs") else False, "the rank"
    )
    return made


@contextmanager
def in_memory() -> Iterator[Path]:
    """A folder in memory, as a run directory should be."""
    with TemporaryDirectory(dir="/dev/shm") as folder:
        yield Path(folder)


def scraped_by(running: RunningAgent, client: str) -> None:
    """Fetch ``/metrics`` as a client of that name."""
    request = urllib.request.Request(f"{running.url}/metrics", headers={"User-Agent": client})
    with urllib.request.urlopen(request, timeout=PATIENCE_S) as response:
        assert response.status == HTTPStatus.OK


def test_no_agent(tmp_path: Path) -> None:
    """Without an agent, doctor reports that, and whether the port is free."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        checks = found(tmp_path, port=taken.getsockname()[1])
        assert (checks["agent"].result, checks["port"].result) == ("fail", "warn")
        assert "is taken" in checks["port"].says
    assert found(tmp_path, port=free_port())["port"].result == "pass"
    assert "any" in found(tmp_path, port=0)["port"].says
    assert "commwatch agent" in checks["agent"].remedy


def test_port_of_an_agent_that_has_ended(tmp_path: Path) -> None:
    """A port with connections that an earlier agent has closed is free, as it is for the next agent."""
    with socket.socket() as listening, socket.socket() as client:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        port = listening.getsockname()[1]
        client.connect(("127.0.0.1", port))
        accepted, _ = listening.accept()
        accepted.close()  # first: this end waits for a minute
        assert client.recv(1) == b""
    assert found(tmp_path, port=port)["port"].result == "pass"


def test_directory_that_cannot_be_looked_at(tmp_path: Path) -> None:
    """A run directory at which the system refuses to look is no traceback; its parent is examined."""
    check = found(tmp_path / ("x" * 300), port=0)["run directory"]
    assert "does not exist yet" in check.says


def test_all_well(tmp_path: Path) -> None:
    """With all ranks in sight, records coming, and Prometheus there, nothing is to be done but about NCCL's log."""
    with in_memory() as folder, agent(folder) as running, trainer(running, 0) as first, trainer(running, 1):
        scraped_by(running, "Prometheus/3.5.0")
        scraped_by(running, "curl/8.5.0")
        before = iter(range(3, 10_000))

        def more() -> None:
            first.write([operation(start_ns=n * MS, end_ns=n * MS + 1, seq=n) for n in (next(before),)])

        more()
        checks = found(folder)
        done = commwatch("doctor", "--dir", folder, "--json")
    assert {what for what, check in checks.items() if check.result == "fail"} == set()
    for what in ("agent", "history", "prometheus", "probe", "hook", "version", "run directory"):
        assert checks[what].result == "pass", checks[what]
    assert "all 2 ranks" in checks["probe"].says
    assert checks["nccl log"].result == "warn"
    assert checks["fl. recorder"].says == "job: unknown: its processes are not visible from here"
    for what in ("inspector", "ras"):
        assert checks[what].result == "pass"
        assert checks[what].says.startswith("job: off: ")
    assert done.returncode == 0
    assert {entry["what"] for entry in json.loads(done.stdout)} >= {"agent", "probe", "records"}


@pytest.mark.parametrize(
    ("backends", "result"), [(["gloo"], "pass"), (["gloo", "nccl"], "warn"), ([None], "warn"), ([], "warn")]
)
def test_log_of_nccl(backends: list[str | None], result: str) -> None:
    """A job whose groups all use Gloo needs no log of NCCL."""
    answers: dict[str, Any] = {"topology": [], "groups": [{"backend": each} for each in backends]}
    assert _nccl("job", lambda path: answers[path.partition("?")[0]]).result == result


def test_what_is_wrong(tmp_path: Path) -> None:
    """A missing rank, a lack of records, the slower hook and a lack of scrapes are reported, each with a remedy."""
    with agent(tmp_path) as running:
        assert found(tmp_path)["jobs"].result == "warn"
        with trainer(running, 0, hook="python", world_size=(1 << 31) - 1):  # a size that somebody has written
            checks = found(tmp_path)
    for what, says in (
        ("probe", "no data from ranks 1-2147483646"),
        ("records", "none in"),
        ("hook", "python"),
        ("prometheus", "never"),
    ):
        assert checks[what].result == "warn", checks[what]
        assert says in checks[what].says
        assert checks[what].remedy
    assert "COMMWATCH_HOOK=python" in checks["hook"].remedy


def test_hook_that_is_too_dear() -> None:
    """Where Python's hook is above its budget, the native one is the remedy: built already and not wanted, or to be built."""
    rank = {"rank": 0, "state": "running", "probe_s": 1.0, "probe_budget": 0.005, "probe_mode": "counters"}
    of_python, of_native = (_cost("job", [], [{**rank, "hook": hook}], 2.0).remedy for hook in ("python", "native"))
    assert "build it with the trainer's Python: commwatch native build" in of_python
    assert "commwatch native build" not in of_native


def test_witnesses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An Inspector that has not written yet, a RAS that does not answer, and a Flight Recorder without a pipe are named with a remedy."""
    monkeypatch.setenv("TORCH_NCCL_DEBUG_INFO_PIPE_FILE", str(tmp_path / "pipe_"))
    here = socket.gethostname()
    with agent(tmp_path) as running, trainer(running, 0, host=here) as one:
        one.call("name", [({"inspector": str(tmp_path / "dumps")},)])
        one.write([operation(start_ns=3 * MS, end_ns=4 * MS, seq=1)])
        wait_for(lambda: running.get("/api/v1/witnesses")["inspector"]["state"] == "found", "the folder")
        wait_for(lambda: running.get("/api/v1/ranks")[0]["visible_pid"], "its process")
        checks = found(tmp_path)
        os.mkfifo(tmp_path / "pipe_0.pipe")
        assert found(tmp_path)["fl. recorder"].says == "job: works: commwatch diagnose can request a dump"
    for what, says in (("inspector", "job: found: nothing yet in "), ("fl. recorder", "job: down: rank 0 has no pipe")):
        assert checks[what].result == "warn"
        assert checks[what].says.startswith(says)
        assert checks[what].remedy
    inspector: dict[str, Any] = {"state": "works", "says": "", "dropped": None, "unread_versions": []}
    told = {"inspector": inspector, "ras": {"state": "down", "says": "localhost:1: refused"}}
    works, down = _witnesses("job", lambda path: told)
    assert (works.result, works.remedy) == ("pass", "")
    assert (down.result, down.says) == ("warn", "job: down: localhost:1: refused")
    assert "NCCL_RAS_ADDR" in down.remedy


@pytest.mark.parametrize(
    ("more", "result", "remedy"),
    [
        ({"dropped": 0}, "pass", ""),
        ({"dropped": 5}, "warn", "NCCL_INSPECTOR_DUMP_COLL_RING_SIZE"),
        ({"unread_versions": ["v5.0"]}, "warn", "later version of commwatch"),
        ({"unread_versions": ["v5.0"], "state": "down"}, "warn", "later version of commwatch"),
    ],
)
def test_inspector_that_drops(more: dict[str, Any], result: str, remedy: str) -> None:
    """Operations that Inspector dropped, and a format that commwatch cannot read, are warnings with a remedy."""
    inspector = {"state": "works", "says": "reads /d", "dropped": None, "unread_versions": [], **more}
    check, _ = _witnesses("job", lambda path: {"inspector": inspector, "ras": {"state": "off", "says": ""}})
    assert check.result == result
    assert remedy in check.remedy


def test_network(tmp_path: Path) -> None:
    """What is wrong with a network device is a warning with its remedy; where nothing is, the devices are named with their speeds."""
    (slow,) = network_checks(asdict(Watched("infiniband", tmp_path / "a").watch.view()))
    assert (slow.result, slow.what) == ("warn", "network")
    assert slow.says.startswith("mlx5_1:1: 400 Gbit/s behind a PCI Express link of 32 GT/s x8")
    assert "slot" in slow.remedy
    (fine,) = network_checks(asdict(Watched("roce", tmp_path / "b").watch.view()))
    assert fine.result == "pass"
    assert fine.says.startswith("mlx5_0:1 (100 Gbit/s), ens1f0np0 (100 Gbit/s)")


def test_look_that_is_stuck(tmp_path: Path) -> None:
    """A node whose devices have not been read for long, because a driver blocks, is reported."""
    view = {**asdict(Watched("roce", tmp_path).watch.view()), "looked_at": time.time() - 60}
    stuck, *_ = network_checks(view)
    assert (stuck.result, stuck.says) == ("warn", "not read for 60 s")


def test_another_network_namespace(tmp_path: Path) -> None:
    """An agent that sees no device, or none that carries what the collectives send, is in the wrong network namespace."""
    view = asdict(Watched("roce", tmp_path).watch.view())
    empty = {**view, "nics": [], "traffic": {**view["traffic"], "says": NOT_COUNTED}}
    checks = list(network_checks(empty))
    assert [(check.result, check.what) for check in checks] == [("warn", "network"), ("warn", "traffic")]
    assert all("network namespace" in check.remedy for check in checks)


def test_scraped_by_hand(tmp_path: Path) -> None:
    """A look at the metrics by hand is not Prometheus."""
    with agent(tmp_path) as running:
        scraped_by(running, "curl/8.5.0")
        check = found(tmp_path)["prometheus"]
    assert check.result == "warn"
    assert check.says.endswith(" by curl/8.5.0, not by Prometheus")


@pytest.mark.parametrize(
    ("trouble", "remedy"),
    [
        ("/h: the file was removed or replaced; put it back, or start the agent again", "start the agent again"),
        ("/h: database or disk is full", "free disk space"),
        ("cannot read /run/x: Permission denied", "check the agent's log"),
    ],
)
def test_history_in_trouble(tmp_path: Path, trouble: str, remedy: str) -> None:
    """The remedy is for what is wrong with the history, and an agent that cannot read it has not itself failed."""
    with agent(tmp_path) as running:

        def answer(path: str) -> Any:
            if path == "jobs":
                raise HTTPError(running.url, HTTPStatus.SERVICE_UNAVAILABLE, "Service Unavailable", Message(), None)
            answered = get(running.url, path)
            return {**answered, "trouble": trouble} if path == "about" else answered

        checks = list(_agent(running.url, answer, 0.0))
    assert [check.result for check in checks if check.what == "agent"] == ["pass"]
    (history,), (jobs,) = ([check for check in checks if check.what == what] for what in ("history", "jobs"))
    assert (history.result, history.says) == ("fail", trouble)
    assert history.remedy.startswith(remedy)
    assert (jobs.result, jobs.remedy) == ("warn", "mend the history first")


def test_run_directory_on_a_disk(tmp_path: Path) -> None:
    """A run directory on a disk is a warning, because trainers write to it at every collective; one in memory is none."""
    needs(not nccl_debug.in_memory(tmp_path), "a temporary folder on a disk")
    check = found(tmp_path)["run directory"]
    assert (check.result, f"{tmp_path} is on a disk" in check.says) == ("warn", True)
    with in_memory() as folder:
        assert found(folder)["run directory"].result == "pass"


def test_run_directory_that_cannot_be(tmp_path: Path) -> None:
    """A run directory that cannot be used is a failure."""
    (tmp_path / "file").touch()
    assert found(tmp_path / "file" / "below")["run directory"].result == "fail"


def test_run_directory_that_is_not_there() -> None:
    """A run directory that does not exist yet is reported as such; one that exists is not."""
    with in_memory() as folder:
        there, nowhere = (found(path)["run directory"] for path in (folder, folder / "a" / "b"))
    assert f"{folder / 'a' / 'b'} does not exist yet; {folder}: " in nowhere.says
    assert there.says.startswith(f"{folder}: ")


def test_host_that_is_not_of_this_machine(tmp_path: Path) -> None:
    """Where an address cannot be listened on, the remedy is another address, not another port."""
    check = found(tmp_path, host="192.0.2.1", port=0)["port"]
    assert (check.result, check.remedy) == ("warn", "name an address of this machine with --host")


def test_text(tmp_path: Path) -> None:
    """For people: a line for each check, the remedy below it; exit code 1 if something fails."""
    done = commwatch("doctor", "--dir", tmp_path)
    assert (done.returncode, done.stderr) == (1, "")
    assert any(line.startswith("fail  agent") for line in done.stdout.splitlines())
    assert any(line.strip().startswith("-> commwatch agent") for line in done.stdout.splitlines())


def test_connections() -> None:
    """Of a job on several nodes, doctor says whether the connections of its ranks are seen, and if not, why and what to do."""
    rank = {"rank": 3, "state": "running", "host": socket.gethostname(), "visible_pid": os.getpid(), "traffic": None}
    (seen,) = connections("job", 8, [rank])
    assert (seen.result, seen.what) == ("pass", "connections")
    hidden = {**rank, "rank": 4, "traffic": {"peers": [], "unknown": "another network namespace"}}
    (check,) = connections("job", 8, [rank, hidden])
    assert (check.result, check.says) == ("warn", "job: of rank 4 not known: another network namespace")
    assert "as root" in check.remedy
    gone = {**rank, "visible_pid": 2**22 + 1}
    assert [each.result for each in connections("job", 8, [gone])] == ["warn"]
    assert list(connections("job", 1, [rank])) == []
    assert list(connections("job", 8, [{**rank, "host": "elsewhere"}])) == []
