"""Helpers of several tests: records made by hand, free ports, processes that are ended in any case."""

from __future__ import annotations

import gc
import json
import os
import re
import shlex
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import cache
from http import HTTPStatus
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from commwatch.wire import events as ev
from commwatch.wire import ring, tokens
from commwatch.wire.ring import RingWriter
from commwatch_agent.analysis import live_ranks
from commwatch_agent.analysis.queries import QueryService
from commwatch_agent.analysis.verdict import Verdict
from commwatch_agent.config import Config
from commwatch_agent.history.chunks import Damaged
from commwatch_agent.history.history import History
from commwatch_agent.history.rows import RingRow
from commwatch_agent.history.store import begin
from commwatch_agent.incidents.judging import judged, seen_here
from commwatch_agent.incidents.lifecycle import Table
from commwatch_agent.ingest.intake import Intake
from commwatch_agent.ingest.jobs import Job, JobTable
from commwatch_agent.ingest.steps import EXPLICIT
from commwatch_agent.model.api_views import Row
from commwatch_agent.notify.bundles import Bundles
from commwatch_agent.notify.incident_watch import IncidentWatch, Plan
from commwatch_agent.notify.look import NodeLook, RankLook
from commwatch_agent.questions.services import Services
from commwatch_agent.questions.worker import Worker
from commwatch_agent.reference.references import References
from commwatch_agent.runtime.peers import Peers
from commwatch_agent.sources.culprits import Culprits
from commwatch_agent.sources.gpus import Gpus
from commwatch_agent.sources.host import HostWatch
from commwatch_agent.sources.inspector import Inspector
from commwatch_agent.sources.nccl import NcclLogs
from commwatch_agent.sources.profiles import Profiles
from commwatch_agent.sources.ras import Ras
from commwatch_agent.web import scrape
from commwatch_alerts.catalogue import read, shipped
from tests import prefork
from tests.bare import opened

MS = 1_000_000
#: Unix time of monotonic 0 in ``identity``.
EPOCH_NS = 1_700_000_000_000_000_000
#: For an agent that looks at once which agents of other nodes there are.
SOON_MET: dict[str, float | str] = {"commwatch_agent.daemon._PEERS_S": 0.5}
#: For an agent to which a wait is a hang after half of the time.
SOON_HUNG: dict[str, float | str] = {
    f"commwatch_agent.analysis.{module}.HANG_S": 5.0
    for module in ("verdicts", "waits.wait_graph", "waits.patience", "waits.outside_waits")
}
#: For an agent that looks at its metrics each second, not each 15 s, and ends incidents from its fifth second on, not from its sixtieth.
SOON_LOOKED: dict[str, float | str] = {
    "commwatch_agent.notify.look.METRICS_S": 1.0,
    "commwatch_agent.notify.incident_watch.SETTLED_S": 5.0,
}
#: For an agent that takes the clock of every trainer for right: rings whose times are those of a test.
ANY_CLOCK = {"commwatch_agent.ingest.rings.clock._AGREE_NS": 1 << 62}
#: Ports that Linux gives to no connection by itself.
_PORTS = range(20_000, 32_768)
#: Everything a loaded two-core machine may need; conditions are waited for, never slept through.
PATIENCE_S = 90.0


def examples(number: int) -> settings:
    """So many examples of a property; how long one takes on a busy machine is no result."""
    return settings(max_examples=number, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def seeds(number: int, daily: int = 1) -> list[Any]:
    """So many seeds of a test; ``make test`` runs it with the first ``daily`` ones, ``make test-long`` with the others."""
    return [pytest.param(seed, marks=pytest.mark.long if seed >= daily else ()) for seed in range(number)]


def identity(job: str = "job", rank: int = 0, world_size: int = 2, **more: Any) -> dict[str, Any]:
    """A ring's identity; monotonic time 0 is Unix time 1,700,000,000 by default."""
    from commwatch.wire.identity import boot_id

    base = {"job": job, "restart": 0, "rank": rank, "world_size": world_size, "local_rank": rank, "host": "host"}
    when = {"pid": 1, "boot_id": boot_id(), "wall_offset_ns": EPOCH_NS, "started_ns": 0}
    return {**base, **when, "hook": "python", **more}


def group_entry(
    small_id: int = 0, ranks: tuple[int, ...] = (0, 1), label: str = "default_pg", **more: Any
) -> dict[str, Any]:
    """A line of the names file for a group."""
    entry = {"group": small_id, "name": str(small_id), "desc": label, "label": label, "group_id": f"{label}-{small_id}"}
    return {**entry, "ranks": list(ranks), "size": len(ranks), "aligned": True, **more}


def operation(
    op: str = "all_reduce", *, start_ns: int, end_ns: int, seq: int = 0, size: int = 4096, group: int = 0, launch_ns: int | None = None,
    flags: int = 0, peer: int = -1, tag: int = 0, waited_us: int = 0, timing: int = ev.BY_FUTURE, dtype: int = 0,
) -> tuple[int, ...]:  # fmt: skip
    """The fields of one operation's record, without the stamps: what ``RingWriter.write`` takes."""
    launch = start_ns if launch_ns is None else launch_ns
    return (ev.OP_CODE[op], dtype, group, peer, tag, size, launch, seq, waited_us, start_ns, end_ns, flags, timing, 0)


def mark(
    seq: int,
    end_ns: int,
    *,
    began_ns: int | None = None,
    optimizer: int = EXPLICIT,
    exposed_ns: int | None = None,
    exposed_by: int = ev.BY_NONE,
    in_flight: int = 0,
) -> tuple[int, ...]:
    """The fields of a step mark, by default of ``commwatch.step()``; without the stamps."""
    began = end_ns if began_ns is None else began_ns
    flags = 0 if exposed_ns is None else ev.EXPOSED
    return (
        ev.STEP_MARK,
        0,
        0,
        optimizer,
        0,
        exposed_ns or 0,
        began,
        seq,
        0,
        began,
        end_ns,
        flags,
        exposed_by,
        in_flight,
    )


def packed(*records: tuple[int, ...], first: int = 0) -> bytes:
    """Whole records, stamped from number ``first`` on."""
    return b"".join(ev.RECORD.pack(n + 1, *fields, n + 1) for n, fields in enumerate(records, start=first))


@cache
def _numbered(n: int) -> bytes:
    return packed(operation(start_ns=n, end_ns=n + 5, seq=n, group=n % 3), first=n)


def numbered(numbers: Iterable[int]) -> bytes:
    """A record for each number, all different."""
    return b"".join(map(_numbered, numbers))


def split_records(data: bytes) -> list[bytes]:
    """Whole records, one by one."""
    return [data[at : at + ev.RECORD_SIZE] for at in range(0, len(data), ev.RECORD_SIZE)]


def stored_records(history: Path, ring: int) -> list[bytes]:
    """Every raw record of a ring in the history, in the order in which they were stored."""
    with History(history) as reader:
        chunks = [split_records(chunk.records) for chunk in reader.chunks(0, 1 << 62) if chunk.ring == ring]
    return [record for chunk in sorted(chunks, key=lambda chunk: chunk[0][:4][::-1]) for record in chunk]


def write_ring(
    directory: Path,
    records: list[tuple[int, ...]],
    names: list[dict[str, Any]] | None = None,
    slots: int = 1024,
    **who: Any,
) -> RingWriter:
    """A ring as a trainer would leave it."""
    about = identity(**who)
    directory.mkdir(parents=True, exist_ok=True)
    writer = RingWriter(directory / f"{about['job']}.r{about['restart']}.{about['rank']}.ring", about, slots)
    for entry in names if names is not None else [group_entry()]:
        writer.name(entry)
    for fields in records:
        writer.write(*fields)
    return writer


@contextmanager
def lost_rank(rings: Path, job: str = "lost") -> Iterator[None]:
    """A job of two ranks, of which rank 1 has been killed and rank 0 lives until the end."""
    alive = write_ring(rings, [], job=job)
    write_ring(rings, [], job=job, rank=1).release()
    try:
        yield
    finally:
        alive.release()


def rewind_ring(path: Path, first: int, until: int, slots: int, end_ns: int = 9) -> None:
    """Write records ``first`` to ``until`` (excluded) into a ring as if its writer had come that far."""
    with open(path, "r+b", buffering=0) as file:
        for n in range(first, until):
            stamp = (n + 1) & ring.STAMP_MASK
            file.seek(ring.RECORDS_AT + n % slots * ev.RECORD_SIZE)
            file.write(ev.RECORD.pack(stamp, *operation(start_ns=0, end_ns=end_ns, seq=1), stamp))
        file.seek(ring.COUNTERS_AT + 8 * ring.CURSOR)
        file.write(until.to_bytes(8, "little"))


def idle_services(queries: QueryService, **parts: Any) -> Services:
    """The parts of an agent that has nothing to watch, but for those that are given."""
    lock, aggregate, nowhere = threading.RLock(), JobTable(), Path("none")
    idle: dict[str, Any] = {
        "worker": idle_worker(queries),
        "logs": NcclLogs(nowhere, aggregate, lock),
        "profiles": Profiles(nowhere, nowhere, queries),
        "gpus": Gpus("off"),
        "inspector": Inspector(None, aggregate, lock),
        "ras": Ras((), aggregate, lock),
        "host": HostWatch(aggregate, lock, lambda: 0),
        "culprits": Culprits(tuple, lambda job: (), lambda incident, items: None),
        "evidence": Bundles(Path("none"), "", lambda job: {}),
        "peers": Peers(Config(nowhere, nowhere), "id"),
        "id": "id",
        "healthy": lambda: None,
        "ready": lambda: None,
        "ending": lambda: False,
    }
    parts = idle | parts
    ranks = RankLook(queries, lambda: parts["ras"].verdicts(None))
    incidents = IncidentWatch(Plan(table()), NodeLook(ranks, tuple), "here")
    watched: dict[str, Any] = {"ranks": ranks, "incidents": incidents}
    return Services(queries=queries, **(watched | parts))


@cache
def table() -> Table:
    """The kinds and alerts as they are shipped."""
    catalogue = read(shipped("rules.yaml"))
    rows = {name: catalogue.rows(name) for name in catalogue.kinds}
    return Table(catalogue.kinds, rows, {each.name: each.value for each in catalogue.thresholds})


def judged_now(jobs: Iterable[Job], now_ns: int) -> list[Verdict]:
    """What the ranks of these jobs do wrong at that moment."""
    held = list(jobs)
    return judged(seen_here(held, now_ns, live_ranks.ended_verdicts(held, live_ranks.groups(held), now_ns)))


def idle_worker(agent: QueryService) -> Worker:
    """Answers questions about an agent's history."""
    return Worker(agent, References(Path("none")), Damaged())


class Trainer:
    """A ring with a separate process behind it, which holds its lock and writes on request."""

    _SCRIPT = """
import json, sys
from pathlib import Path
from commwatch.wire.identity import this_process
from commwatch.wire.ring import RingWriter
path, who, slots = json.loads(sys.argv[1])
writer = RingWriter(Path(path), {**who, **this_process()}, slots)
print("ready", flush=True)
for line in sys.stdin:
    verb, arguments = json.loads(line)
    for fields in arguments:
        getattr(writer, verb)(*fields)
    print("done", flush=True)
"""

    def __init__(self, path: Path, about: dict[str, Any] | None = None, slots: int = 1024) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path, self.written = path, 0
        setup = json.dumps([str(path), about or identity(), slots])
        command = [sys.executable, "-c", self._SCRIPT, setup]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._answer("ready")

    def __enter__(self) -> Trainer:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def call(self, verb: str, arguments: Iterable[tuple[Any, ...]]) -> None:
        """Call a method of its ``RingWriter`` once for each tuple of arguments, and wait until it has."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps([verb, list(arguments)]) + "\n")
        self.process.stdin.flush()
        self._answer("done")

    def write(self, records: Iterable[tuple[int, ...]]) -> None:
        """Write records."""
        records = list(records)
        self.call("write", records)
        self.written += len(records)

    def kill(self) -> None:
        """SIGKILL: no chance to say anything."""
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None and not pipe.closed:
                pipe.close()

    def _answer(self, expected: str) -> None:
        assert self.process.stdout is not None
        assert self.process.stdout.readline().strip() == expected


class HereTrainer:
    """A ring that this process writes: a tenth of a ``Trainer``, for tests in which only the agent dies."""

    def __init__(self, directory: Path, rank: int = 0) -> None:
        self._ring, self.written = write_ring(directory / "rings", [], rank=rank), 0

    def __enter__(self) -> HereTrainer:
        return self

    def __exit__(self, *_: object) -> None:
        end_rank(self._ring)

    def write(self, records: Iterable[tuple[int, ...]]) -> None:
        """Write records."""
        for fields in list(records):
            self._ring.write(*fields)
            self.written += 1


class Watch:
    """An agent without its threads: what it keeps in memory is gone with the object, as in a crash.

    Rings lie in ``directory``/rings. Time is the trainers' monotonic clock, as in ``identity``.
    """

    def __init__(self, directory: Path, looks: int = 1) -> None:
        self.rings, self.path = directory / "rings", directory / "h.sqlite"
        self.damaged, lock = Damaged(), threading.RLock()
        self.store, self.aggregate = begin(self.path, self.damaged), JobTable()
        self.intake = Intake(self.rings, self.aggregate, self.store, lock, looks=looks)
        self.agent = QueryService(self.path, self.aggregate, lock, damaged=self.damaged)

    def tick(self, at_ns: int = 0) -> int:
        """Look at the rings once."""
        return self.intake.tick(at_ns, EPOCH_NS + at_ns)

    def rows(self, *by: str) -> dict[tuple[str | int | None, ...], Row]:
        """The summary of all time."""
        _, rows = self.agent.summary(0, 1 << 62, list(by), {})
        return {tuple(row.by.values()): row for row in rows}

    def count(self) -> int:
        """Operations in the summary."""
        return sum(row.count for row in self.rows("rank").values())

    def ring_rows(self) -> list[RingRow]:
        """The rings in the history."""
        with History(self.path) as history:
            return history.rings()

    def stored(self) -> int:
        """Raw records in the history."""
        return sum(len(stored_records(self.path, row.id)) for row in self.ring_rows())

    def fill_disk(self) -> None:
        """Make the history refuse to grow, as on a full disk."""
        self.store._db.execute("PRAGMA max_page_count = 1")  # which is as much as no more than it has

    def free_disk(self) -> None:
        """Let it grow again."""
        self.store._db.execute("PRAGMA max_page_count = 1073741823")


def wait_for(condition: Callable[[], Any], what: str, patience_s: float = PATIENCE_S) -> Any:
    """Look until ``condition`` is true and return what it returned; fail naming ``what``. An agent that does not know a job yet answers 404."""
    began = time.monotonic()
    while True:
        result = None
        try:
            result = condition()
        except urllib.error.HTTPError as error:
            error.close()
            if error.code != HTTPStatus.NOT_FOUND:
                raise
        if result:
            return result
        waited_s = time.monotonic() - began
        assert waited_s < patience_s, f"waited {patience_s:.0f} s for {what}"
        time.sleep(min(max(0.01, waited_s / 10), 0.5))  # often at first; most questions cost an agent some milliseconds


def free_port() -> int:
    """A port of 127.0.0.1 that is free right now, and that this function returns to no test soon.

    It is below those that Linux gives to connections: another test's would take it before the job or agent that it is for.
    """
    return next(port for port in _ports(os.getpid()) if _is_free(port))


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


@cache
def _ports(process: int) -> Iterator[int]:
    """Ports without end; those of two processes begin far from each other."""
    start = 997 * process % len(_PORTS)
    return cycle([*_PORTS[start:], *_PORTS[:start]])


def descriptors() -> set[str]:
    """The descriptors of this process, without those of garbage, which Python closes at any time."""
    gc.collect()
    return set(os.listdir("/proc/self/fd"))  # noqa: PTH208 - its own has the same number each time


def clean_env(**more: str) -> dict[str, str]:
    """This environment without settings of ours or of a launcher, and without a width; the hook is the one that the test is about.

    All that is recorded is, whatever it costs: many a job of a test does nothing but communicate.
    """
    ours = ("COMMWATCH", "TORCHELASTIC", "SLURM", "RAY_", "XDG_STATE_HOME", "COLUMNS")
    env = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    return {
        **env,
        "COMMWATCH_BUDGET": "0",
        "COMMWATCH_HOOK": env.get("TESTED_HOOK", "python"),
        "OMP_NUM_THREADS": "1",
        "PYTHONUNBUFFERED": "1",
        **more,
    }


def commwatch(
    *arguments: str | Path, env: dict[str, str] | None = None, cwd: Path | None = None, beside: int | None = None
) -> subprocess.CompletedProcess[str]:
    """Run the command line to its end; in the namespaces of a process if one is given."""
    words, env, timeout = list(map(str, arguments)), env or clean_env(), 2 * PATIENCE_S
    if prefork.forks(env):
        return prefork.commwatch(*words, env=env, cwd=cwd, timeout=timeout, beside=beside)
    assert beside is None
    command = [sys.executable, "-m", "commwatch", *words]
    return subprocess.run(command, env=env, cwd=cwd, capture_output=True, text=True, timeout=timeout, check=False)


#: Body and content type of a URL; raises ``HTTPError`` on an error answer.
Fetch = Callable[[str], tuple[bytes, str]]


def fetch(url: str) -> tuple[bytes, str]:
    """From here."""
    with urllib.request.urlopen(url, timeout=30) as response:
        return response.read(), response.headers["Content-Type"]


class RunningAgent:
    """An agent process and how to ask it."""

    def __init__(self, process: subprocess.Popen[bytes] | prefork.Commwatch, directory: Path, fetch: Fetch) -> None:
        self.process, self.directory = process, directory
        self.url: str = ""
        self._fetch = fetch
        self._page_until_s = 0.0

    def get(self, path: str) -> Any:
        """JSON of a path, or text where it is not JSON; raises ``HTTPError`` on an error answer."""
        body, content_type = self._fetch(self.url + path)
        return json.loads(body) if "json" in content_type else body.decode()

    def job_has_ended(self) -> bool:
        """Whether it lists its first job as ended. It may see a short job only after the job's end."""
        jobs = self.get("/api/v1/jobs")
        return bool(jobs) and jobs[0]["state"] == "ended"

    @property
    def token(self) -> str:
        """What it has to be shown."""
        return tokens.read_own(self.directory / tokens.NAME, os.getuid())

    def samples(self) -> dict[str, float]:
        """``/metrics`` as ``name{labels}`` to value, no older than this call: the agent may give the same page for half a second."""
        time.sleep(max(0.0, self._page_until_s - time.monotonic()))
        self._page_until_s = time.monotonic() + scrape.MOST_S
        lines = (line for line in self.get("/metrics").splitlines() if not line.startswith("#"))
        return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines)}

    def kill(self) -> None:
        """SIGKILL: no chance to tidy up."""
        self.process.kill()
        self.process.wait()


@contextmanager
def agent(
    directory: Path,
    *flags: str,
    env: dict[str, str] | None = None,
    there: tuple[str, ...] = (),
    beside: int | None = None,
    said: Path | None = None,
    fetch: Fetch = fetch,
    constants: Mapping[str, float | str] | None = None,
) -> Iterator[RunningAgent]:
    """An agent on a free port that watches ``directory``; ended by SIGTERM at the end, if it still runs.

    Args:
        there: what runs a command where the agent is to be, if not here: it is not forked then.
        beside: a process whose namespaces it gets.
        said: a file to which its standard error is appended.
        fetch: how to ask it.
        constants: as for ``prefork.Commwatch``.
    """
    command, env = ["agent", "--dir", str(directory), "--port", "0", *flags], env or clean_env()
    process: subprocess.Popen[bytes] | prefork.Commwatch
    with said.open("ab") if said else nullcontext() as log:
        if prefork.forks(env) and not there:
            streams = (0, 1, log.fileno() if log else 2)
            process = prefork.Commwatch(*command, env=env, streams=streams, beside=beside, constants=constants)
        else:
            assert beside is None
            assert not constants, "only a fork can have them"
            process = subprocess.Popen([*there, sys.executable, "-m", "commwatch", *command], env=env, stderr=log)
    running = RunningAgent(process, directory, fetch)
    try:

        def announced() -> bool:
            assert running.process.poll() is None, "the agent ended at its start"
            try:
                about = json.loads((directory / "agent.json").read_text())
            except (OSError, ValueError):
                return False
            running.url = about["url"]
            return bool(about["pid"] == running.process.pid)

        wait_for(announced, "the agent to announce itself")
        wait_for(lambda: _answers(running), "the agent to answer")
        yield running
    finally:
        if running.process.poll() is None:
            running.process.terminate()
            try:
                running.process.wait(30)
            except subprocess.TimeoutExpired:
                running.kill()
                raise


def _answers(running: RunningAgent) -> bool:
    try:
        return bool(running.get("/healthz"))
    except (urllib.error.URLError, OSError):
        return False


def end_rank(writer: RingWriter) -> None:
    """What the kernel does when a trainer's process is gone: its lock on the ring falls."""
    writer.release()


def needs(available: object, what: str) -> None:
    """Skip a test for want of ``what``; in CI nothing is skipped."""
    if not available:
        assert os.environ.get("CI") != "true", f"in CI there must be {what}"
        pytest.skip(f"needs {what}; `make parts` installs programs")


def elsewhere(html: str) -> list[str]:
    """What a page would load from, or lead to, another host."""
    links = re.findall(r"""(?:src|href|action|data|srcset)\s*=\s*["']?([^"'\s>]+)""", html, re.IGNORECASE)
    links += re.findall(r"""(?:url\(|@import)\s*["']?([^"')\s;]+)""", html, re.IGNORECASE)
    return [link for link in links if re.match(r"[a-z][a-z0-9+.-]*:|//", link, re.IGNORECASE)]


@contextmanager
def small_tmpfs(at: Path, size: int) -> Iterator[bool]:
    """A file system of ``size`` bytes in memory, mounted at ``at``; False where this process may not mount."""
    at.mkdir(parents=True, exist_ok=True)
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size},mode=700", "tmpfs", str(at)]
    try:
        mounted = os.geteuid() == 0 and subprocess.run(mount, capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        mounted = False
    try:
        yield mounted
    finally:
        if mounted:
            subprocess.run(["umount", "--lazy", str(at)], check=True)


#: For tests of what the hooks do inside the trainer. What they record is compared in tests/e2e/test_hooks.py, for all others.
BOTH_HOOKS = pytest.mark.parametrize("hook", ["native", "python"], indirect=True)

#: A user that no machine has: no home, no name, no rights.
NOBODY = 54_321


def _fifo(path: Path) -> str:
    os.mkfifo(path)
    return "not a file"


def _endless(path: Path) -> str:
    path.symlink_to("/dev/zero")
    return "Too many levels of symbolic links"


def _sparse(path: Path) -> str:
    with path.open("wb") as file:
        file.truncate(20 << 30)
    return "larger than [0-9]+ bytes"


def _folder(path: Path) -> str:
    path.mkdir()
    return "not a file"


#: What a member of COMMWATCH_GROUP may put in the place of a file: a FIFO, a link to an endless device, 20 GB that take no room, a
#: folder. Each returns why the file is refused.
PLANTED: dict[str, Callable[[Path], str]] = {
    "fifo": _fifo,
    "endless": _endless,
    "sparse": _sparse,
    "folder": _folder,
}


def commwatch_as_nobody(*arguments: str | Path, **kwargs: Any) -> subprocess.CompletedProcess[str]:
    """Run the command line as another user; root only. Private folders above Python and the tree are open in mounts of its own."""
    user = ["setpriv", "--reuid", str(NOBODY), "--regid", str(NOBODY), "--clear-groups"]
    return in_the_open(*user, sys.executable, "-m", "commwatch", *arguments, **kwargs)


def in_the_open(*command: str | Path, **kwargs: Any) -> subprocess.CompletedProcess[str]:
    """Run a command of root in mounts of its own, where other users can read the private folders above Python and the tree."""
    needs(os.getuid() == 0, "root, to act as another user")
    words = shlex.join(map(str, command))
    hold = Path("/mnt/hold")
    mounts = f"mount -t tmpfs -o mode=755 tmpfs {hold.parent} && mkdir {hold} && {opened(hold)}"
    kwargs.setdefault("env", clean_env())
    whole = ["unshare", "--mount", "sh", "-c", f"{mounts} && cd / && exec {words}"]
    return subprocess.run(whole, capture_output=True, text=True, timeout=PATIENCE_S * 2, check=False, **kwargs)
