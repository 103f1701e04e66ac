"""Run a script of ``jobs/`` as a real job of Gloo processes, and read what the probe recorded."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from commwatch.wire import events as ev
from commwatch.wire.identity import ring_prefix
from commwatch.wire.ring_reader import BadRing, RingReader
from commwatch_agent.analysis.queries import QueryService
from commwatch_agent.history.store import Writer
from commwatch_agent.ingest.intake import Intake
from commwatch_agent.ingest.jobs import JobTable
from tests import prefork
from tests.conftest import CACHE
from tests.e2e.hosts import Host
from tests.helpers import PATIENCE_S, clean_env, free_port, needs, wait_for

JOBS = Path(__file__).parent / "jobs"
#: Torch 2.13 on CPU sometimes aborts at interpreter exit, with and without us; the job has done all by then.
UPSTREAM_FLAKE = "terminate called without an active exception"


@dataclass
class RankRecords:
    """The ring of one rank, read to its end."""

    identity: dict[str, Any]
    records: list[ev.Record]
    lost: int
    groups: dict[int, dict[str, Any]] = field(default_factory=dict)
    dtypes: dict[int, str] = field(default_factory=dict)
    ops: dict[int, str] = field(default_factory=dict)

    @property
    def rank(self) -> int:
        """Global rank."""
        return int(self.identity["rank"])

    def op(self, record: ev.Record) -> str:
        """Name of a record's operation."""
        return self.ops.get(record.op) or ev.OPS[record.op - 1]

    @property
    def operations(self) -> list[ev.Record]:
        """All but the step marks, in order of launch."""
        return sorted((r for r in self.records if r.op != ev.STEP_MARK), key=lambda r: r.launch_ns)

    def of(self, *ops: str) -> list[ev.Record]:
        """The operations with one of these names, in order of launch."""
        return [record for record in self.operations if self.op(record) in ops]

    @property
    def marks(self) -> list[ev.Record]:
        """The step marks."""
        return [r for r in self.records if r.op == ev.STEP_MARK]


def read_rings(directory: Path) -> list[RankRecords]:
    """All rings under a run directory, by rank and age."""
    found = []
    for path in sorted((directory / "rings").glob("*.ring")):
        reader = RingReader(path)
        drained = reader.drain(final=True)
        rank = RankRecords(
            reader.identity, [ev.Record._make(f) for f in ev.RECORD.iter_unpack(drained.records)], drained.lost
        )
        for entry in reader.names():
            if "group" in entry:
                rank.groups[entry["group"]] = entry
            elif "dtype" in entry:
                rank.dtypes[entry["dtype"]] = entry["name"]
            elif "op" in entry:
                rank.ops[entry["op"]] = entry["name"]
        reader.close()
        found.append(rank)
    return sorted(found, key=lambda rank: (rank.rank, rank.identity["started_ns"]))


def kill_ranks(directories: Iterable[Path], job: str) -> None:
    """Kill all ranks of a job at once, and wait until none records any more.

    A command of ``prefork`` that is killed ends its rank only after a moment: then the first would be lost to the others.
    """
    rings = [ring for place in {*directories} for ring in (place / "rings").glob(f"{ring_prefix(job)}*.ring")]
    readers = []
    for ring in rings:
        with suppress(BadRing, OSError):  # the agent has just removed it
            readers.append(RingReader(ring))
    pids = [pid for reader in readers if (pid := reader.owner())]
    with _uninterrupted():
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    wait_for(lambda: not any(reader.alive() for reader in readers), "the end of the ranks")
    for reader in readers:
        reader.close()


@contextmanager
def _uninterrupted() -> Iterator[None]:
    """This thread keeps its core, if root runs it: otherwise the first rank may end before another one is killed."""
    policy = os.sched_getscheduler(0)
    with suppress(PermissionError):
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    try:
        yield
    finally:
        os.sched_setscheduler(0, policy, os.sched_param(0))


def preforked(script: str, nproc: int, *arguments: str) -> list[str]:
    """The command that does as ``torchrun`` at a fraction of the cost; for jobs of which a test sees no more than their ranks."""
    return prefork.command(JOBS / script, *arguments, ranks=nproc)


def torchrun(script: str, nproc: int, *arguments: str) -> list[str]:
    """The command that runs ``jobs/script`` with ``nproc`` ranks."""
    launcher = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        str(nproc),
        "--master-port",
        str(free_port()),
    ]
    return [*launcher, str(JOBS / script), *arguments]


def run_job(directory: Path, script: str, *arguments: str, nproc: int = 2, **env: str) -> str:
    """Run a job with the probe on and the run directory ``directory``; returns its standard output."""
    probe = {"COMMWATCH": "1", "COMMWATCH_DIR": str(directory), **env}
    done = subprocess.run(
        preforked(script, nproc, *arguments),
        env=clean_env(**probe),
        capture_output=True,
        text=True,
        timeout=3 * PATIENCE_S,
        check=False,
    )
    finished = done.stdout.count("job done") == nproc and UPSTREAM_FLAKE in done.stderr
    assert done.returncode == 0 or finished, done.stderr[-4000:]
    assert "commwatch: probe" not in done.stderr, done.stderr[-4000:]
    return done.stdout


def alone(directory: Path, script: str, *arguments: object, **env: str) -> subprocess.CompletedProcess[str]:
    """Run a job of one process to its end."""
    return _one_process(prefork.command(JOBS / script, *map(str, arguments)), directory, env)


def alone_anew(directory: Path, script: str, *arguments: object, **env: str) -> subprocess.CompletedProcess[str]:
    """Run it in a new Python: for a test of how Python starts or ends, or of what is imported."""
    return _one_process([sys.executable, str(JOBS / script), *map(str, arguments)], directory, env)


def _one_process(command: list[str], directory: Path, env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command,
        env=clean_env(**{"COMMWATCH": "1", "COMMWATCH_DIR": str(directory), "RANK": "0", **env}),
        capture_output=True,
        text=True,
        timeout=3 * PATIENCE_S,
        check=False,
    )


def said(done: subprocess.CompletedProcess[str]) -> list[Any]:
    """The output of a job of one process, which has succeeded."""
    assert done.returncode == 0, done.stderr[-4000:]
    assert "commwatch: " not in done.stderr
    return results(done.stdout)


def built_for_torch(source_name: str) -> Path:
    """A library of ``jobs/`` in C++, built; kept between runs under the name of its source."""
    compiler = shutil.which("g++")
    needs(compiler, "g++")
    spec = importlib.util.find_spec("torch")
    assert spec is not None
    assert spec.origin is not None
    torch, source = Path(spec.origin).parent, JOBS / source_name
    made_of = source.read_bytes() + (torch / "version.py").read_bytes()
    built = CACHE / f"{source.stem}-{hashlib.sha256(made_of).hexdigest()[:16]}.so"
    if not built.exists():
        CACHE.mkdir(parents=True, exist_ok=True)
        include, new = torch / "include", built.with_suffix(f".{os.getpid()}.new")
        headers = ["-isystem", str(include), "-isystem", str(include / "torch" / "csrc" / "api" / "include")]
        options = ["-std=c++20", "-O0", "-fPIC", "-shared", "-pthread", *headers]
        libraries = [f"-L{torch / 'lib'}", "-ltorch_cpu", "-lc10"]
        command = [str(compiler), *options, str(source), "-o", str(new), *libraries]
        done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
        assert done.returncode == 0, done.stderr
        new.rename(built)
    return built


def run_on(
    hosts: list[Host],
    directory: Path | list[Path],
    script: str,
    *arguments: str,
    per_host: int = 1,
    job: str = "link",
    port: int = 29700,
) -> str:
    """Run a job on hosts with the probe on; returns what its ranks printed.

    Args:
        directory: the run directory, or one for each host.
        per_host: ranks on each host.
        port: of the rendezvous; jobs that run at one time have different ones.
    """
    ranks = []
    for rank in range(per_host * len(hosts)):
        host = hosts[rank // per_host]
        place = directory if isinstance(directory, Path) else directory[rank // per_host]
        where = {
            "MASTER_ADDR": hosts[0].address,
            "MASTER_PORT": str(port),
            "RANK": str(rank),
            "WORLD_SIZE": str(per_host * len(hosts)),
            "GLOO_SOCKET_IFNAME": host.device,
        }
        env = clean_env(COMMWATCH="1", COMMWATCH_DIR=str(place), COMMWATCH_JOB=job, **where)
        command = [*host.there, *prefork.command(JOBS / script, *arguments)]
        ranks.append(subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
    said = ""
    for process in ranks:
        out, err = process.communicate(timeout=2 * PATIENCE_S)
        assert process.returncode == 0 or ("job done" in out and UPSTREAM_FLAKE in err), err[-3000:]
        said += out
    return said


def results(output: str) -> list[Any]:
    """What the ranks of a job printed with ``say``, by rank."""
    lines = [json.loads(line.partition("said ")[2]) for line in output.splitlines() if line.startswith("said ")]
    return [value for _, value in sorted(lines, key=lambda line: line[0])]


def digest(directory: Path) -> tuple[QueryService, JobTable]:
    """Take the rings a job has left through an agent's own parts: what its API and its metrics would say."""
    lock = threading.RLock()
    store, aggregate = Writer(directory / "history.sqlite"), JobTable()
    intake = Intake(directory / "rings", aggregate, store, lock)
    intake.tick(time.monotonic_ns(), time.time_ns())
    store.close()
    return QueryService(directory / "history.sqlite", aggregate, lock, time.monotonic_ns), aggregate
