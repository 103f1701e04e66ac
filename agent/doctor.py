"""``commwatch doctor``: does everything that has to work work; each line with its remedy."""

from __future__ import annotations

import errno
import json
import os
import shutil
import socket
import time
import urllib.parse
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from commwatch import __version__
from commwatch.collectors.nccl import debug
from commwatch.collectors.spans import spans
from commwatch.config import DEFAULT_PORT, Config
from commwatch.diagnose import get, local_agents

#: Room that the rings of a node of eight ranks take, with some to spare.
_ROOM_BYTES = 32 << 20
_SCRAPED_S = 300.0
_PASS, _WARN, _FAIL = "pass", "warn", "fail"
Get = Callable[[str], Any]


@dataclass(frozen=True)
class Check:
    """One thing that was looked at."""

    #: ``pass``, ``warn`` or ``fail``.
    result: str
    what: str
    says: str
    #: What to do; empty where nothing is to be done.
    remedy: str = ""


def examine(config: Config, wait_s: float = 2.0) -> list[Check]:
    """Look at this node.

    Args:
        wait_s: how long to watch whether records arrive.
    """
    checks = [Check(_PASS, "version", f"commwatch {__version__}"), _run_directory(config.dir), *_native()]
    urls = local_agents(config.dir)
    if not urls:
        checks += [_no_agent(config), _port(config)]
    for url in urls:
        try:
            checks += _agent(url, partial(get, url), wait_s)
        except (OSError, ValueError, KeyError, TypeError) as error:
            checks.append(Check(_FAIL, "agent", f"{url}: {error}", "look at its log; start it again"))
    return checks


# -- this node --------------------------------------------------------------------------------


def _run_directory(directory: Path) -> Check:
    there = next(path for path in (directory, *directory.parents) if path.exists())
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        remedy = (
            "set COMMWATCH_DIR for trainer and agent to a directory of your own, or COMMWATCH_GROUP to a common group"
        )
        return Check(_FAIL, "run directory", f"{there} is no directory we can write to", remedy)
    free = shutil.disk_usage(there).free
    if free < _ROOM_BYTES:
        remedy = "make it larger (docker --shm-size, an emptyDir with medium Memory), or set COMMWATCH_DIR"
        return Check(_WARN, "run directory", f"{directory}: {free / 1e6:.0f} MB free; a rank's ring takes 1 MB", remedy)
    return Check(_PASS, "run directory", f"{directory}: {free / 1e9:.1f} GB free")


def _native() -> Iterator[Check]:
    if shutil.which(os.environ.get("CXX", "c++")) is None and shutil.which("g++") is None:
        remedy = "put a compiler into the image, or build there: commwatch native build; until then Python's hook records, dearer"
        yield Check(_WARN, "compiler", "there is none for the native hook", remedy)


def _no_agent(config: Config) -> Check:
    return Check(
        _FAIL, "agent", f"none watches {config.dir}", f"commwatch agent --dir {config.dir}, or commwatch run -- ..."
    )


def _port(config: Config) -> Check:
    wanted = config.port or DEFAULT_PORT
    with socket.socket(socket.AF_INET6 if ":" in config.host else socket.AF_INET) as probe:
        try:
            probe.bind((config.host, wanted))
        except OSError as error:
            taken = error.errno == errno.EADDRINUSE
            why = "is taken" if taken else error.strerror
            return Check(_WARN, "port", f"{config.host}:{wanted} {why}", "choose another with --port (0: any free one)")
    return Check(_PASS, "port", f"{config.host}:{wanted} is free")


# -- an agent and its jobs ------------------------------------------------------------------------


def _agent(url: str, get: Get, wait_s: float) -> Iterator[Check]:
    about = get("about")
    other = "" if about["version"] == __version__ else f", this command is {__version__}"
    remedy = "use one version of commwatch in trainer, agent and command" if other else ""
    yield Check(_WARN if other else _PASS, "agent", f"{url}: {about['version']}{other}, pid {about['pid']}", remedy)
    if about["trouble"]:
        yield Check(_FAIL, "history", about["trouble"], "make room, or choose another place with --state")
    else:
        yield Check(_PASS, "history", about["history"])
    yield _scraping(about)
    jobs = [job for job in get("jobs") if job["state"] == "running"]
    if not jobs:
        remedy = "COMMWATCH=1 and the same COMMWATCH_DIR in the trainer; it shows after its first collective"
        yield Check(_WARN, "jobs", "none is running here", remedy)
        return
    before = {job["job_id"]: _records(get, job["job_id"]) for job in jobs}
    time.sleep(wait_s)
    for job in jobs:
        yield from _job(job, get, before[job["job_id"]], wait_s)


def _scraping(about: dict[str, Any]) -> Check:
    age = None if about["scraped_at"] is None else time.time() - about["scraped_at"]
    if age is None or age > _SCRAPED_S:
        since = "never" if age is None else f"not for {age / 60:.0f} min"
        remedy = "add this address to a scrape_config; from another host the agent needs --host 0.0.0.0"
        return Check(_WARN, "prometheus", f"/metrics was {since} fetched", remedy)
    return Check(_PASS, "prometheus", f"/metrics was fetched {age:.0f} s ago by {about['scraper'] or 'somebody'}")


def _records(get: Get, job: str) -> int:
    return sum(int(rank["records"]) for rank in _ranks(get, job))


def _ranks(get: Get, job: str) -> list[dict[str, Any]]:
    ranks: list[dict[str, Any]] = get(f"ranks?job={urllib.parse.quote(job, safe='')}")
    return ranks


def _job(job: dict[str, Any], get: Get, before: int, wait_s: float) -> Iterator[Check]:
    name, ranks = job["job_id"], _ranks(get, job["job_id"])
    missing = set(range(job["world_size"])) - {rank["rank"] for rank in ranks}
    if missing:
        remedy = (
            "fine if they run on other nodes; else see that COMMWATCH=1 reaches them and commwatch is in their Python"
        )
        yield Check(_WARN, "probe", f"{name}: no word of rank {spans(missing)}", remedy)
    else:
        yield Check(_PASS, "probe", f"{name}: on all {len(ranks)} ranks")
    arrived = sum(int(rank["records"]) for rank in ranks) - before
    if arrived:
        yield Check(_PASS, "records", f"{name}: {arrived / wait_s:.0f} a second")
    else:
        yield Check(_WARN, "records", f"{name}: none in {wait_s:.0f} s", "commwatch diagnose says whether it hangs")
    hooks = sorted({rank["hook"] for rank in ranks})
    dear = "python" in hooks
    remedy = "commwatch native build with the trainer's Python makes it cheaper" if dear else ""
    yield Check(_WARN if dear else _PASS, "hook", f"{name}: {', '.join(hooks)}", remedy)
    if job["lost"]:
        remedy = "a larger ring (COMMWATCH_SLOTS), or an agent with more CPU"
        yield Check(_WARN, "losses", f"{name}: {job['lost']} records were lost", remedy)
    if job["steps_unavailable"]:
        yield Check(
            _WARN, "steps", f"{name}: none: {job['steps_unavailable']}", "commwatch.step() at the end of each step"
        )
    yield _nccl(name, get)


def _nccl(name: str, get: Get) -> Check:
    files = [file for each in get(f"topology?job={urllib.parse.quote(name, safe='')}") for file in each["files"]]
    if files:
        return Check(_PASS, "nccl log", f"{name}: {len(files)} files")
    level = debug.in_force(os.environ).get("NCCL_DEBUG")
    says = f"{name}: none is read{f' (NCCL_DEBUG={level} here)' if level else ''}"
    remedy = "NCCL_DEBUG=WARN and NCCL_DEBUG_FILE=/path/%h.%p where the agent can read it; not needed on Gloo"
    return Check(_WARN, "nccl log", says, remedy)


# -- output -----------------------------------------------------------------------------------


def text(checks: list[Check]) -> str:
    """For people."""
    lines = []
    for check in checks:
        lines.append(f"{check.result:<5} {check.what:<14} {check.says}")
        if check.remedy:
            lines.append(f"{'':<20} -> {check.remedy}")
    return "\n".join(lines)


def as_json(checks: list[Check]) -> str:
    """For programs."""
    return json.dumps([asdict(check) for check in checks], indent=2)
