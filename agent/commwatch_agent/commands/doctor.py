"""``commwatch doctor``: check that everything works; each fault comes with its remedy."""

from __future__ import annotations

import errno
import json
import os
import shutil
import socket
import ssl
import time
import urllib.parse
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import partial
from http import HTTPStatus
from pathlib import Path
from typing import Any
from urllib.error import HTTPError, URLError

from commwatch import __version__
from commwatch.api.client import get, keys_of, local_agents
from commwatch.wire import nccl_debug_file as debug
from commwatch.wire.addresses import DEFAULT_PORT
from commwatch_agent.analysis.rank_state import shedding
from commwatch_agent.commands.nccl_debug import in_memory
from commwatch_agent.commands.network_checks import FAIL, PASS, WARN, Check, connections, gpu_links, network_checks
from commwatch_agent.config import Config
from commwatch_agent.model.api_views import is_prometheus
from commwatch_agent.runtime.run_lock import bind_remedy
from commwatch_agent.sources import stack_capture
from commwatch_agent.text import terminal_text
from commwatch_agent.text.plain_table import folded
from commwatch_agent.text.terminal_text import MOST_CELLS
from commwatch_agent.text.units import counted, size
from commwatch_collectors.node.gpu import ALARMING
from commwatch_collectors.spans import missing_ranks
from commwatch_collectors.spans import ranks as named

#: Bytes that the ring buffers of a node with eight ranks take, with some to spare.
_ROOM_BYTES = 32 << 20
_SCRAPED_S = 300.0
#: Xids older than this many seconds are ignored.
_XIDS_S = 86400.0
Get = Callable[[str], Any]
_INSPECTOR = (
    "by default it writes when the job ends: set NCCL_INSPECTOR_DUMP_THREAD_INTERVAL_MICROSECONDS=1000000; "
    "the agent must see the folder under the same path"
)
_DROPPED = (
    "raise NCCL_INSPECTOR_DUMP_COLL_RING_SIZE and NCCL_INSPECTOR_DUMP_P2P_RING_SIZE (1024), "
    "or lower NCCL_INSPECTOR_DUMP_THREAD_INTERVAL_MICROSECONDS"
)
_NATIVE = "build it with the trainer's Python: commwatch native build --python PATH (it is off where the trainer has COMMWATCH_HOOK=python)"
_RAS = "use NCCL 2.24 or later; the setting ras must contain the job's NCCL_RAS_ADDR (localhost:28028 unless set)"


def examine(config: Config, wait_s: float = 2.0) -> list[Check]:
    """Check this node and its agents.

    Args:
        wait_s: seconds to watch, for each agent, whether records arrive.
    """
    checks = [Check(PASS, "version", f"commwatch {__version__}"), _run_directory(config.dir), *_native()]
    urls, keys = local_agents(config.dir), keys_of(config)
    if not urls:
        checks += [_no_agent(config), _port(config)]
    for url in urls:
        try:
            checks += _agent(url, partial(get, url, keys=keys), wait_s)
        except (OSError, ValueError, KeyError, TypeError) as error:
            checks.append(Check(FAIL, "agent", f"{url}: {_reason(error)}", _remedy(error)))
    return checks


def _reason(error: Exception) -> object:
    return error.reason if isinstance(error, URLError) else error


def _remedy(error: Exception) -> str:
    if isinstance(_reason(error), ssl.SSLCertVerificationError):
        return (
            "name the certificate of the authority that signed the agent's: --ca-file FILE, or ca_file in the settings"
        )
    if isinstance(error, HTTPError) and error.code == HTTPStatus.UNAUTHORIZED:
        return "give its token: --token-file FILE, or --config with the agent's settings"
    return "check its log, and start it again"


# -- this node --------------------------------------------------------------------------------


def _run_directory(directory: Path) -> Check:
    # Not ``Path.exists``, which raises for a path in a folder that this user may not enter.
    there = next(path for path in (directory, *directory.parents) if os.path.exists(path))  # noqa: PTH110
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        remedy = (
            "set COMMWATCH_DIR for trainer and agent to a directory of your own, or COMMWATCH_GROUP to a common group"
        )
        return Check(FAIL, "run directory", f"{there} is not a writable directory", remedy)
    missing = "" if there == directory else f"{directory} does not exist yet; "
    if not in_memory(there):
        remedy = "set COMMWATCH_DIR for trainer and agent to a folder in memory, such as one in /dev/shm or /run (docs/deploy.md)"
        return Check(
            WARN, "run directory", f"{missing}{there} is on a disk; trainers write to it at every collective", remedy
        )
    free = shutil.disk_usage(there).free
    if free < _ROOM_BYTES:
        remedy = "make it larger (docker --shm-size, an emptyDir with medium Memory), or set COMMWATCH_DIR"
        return Check(WARN, "run directory", f"{directory}: {size(free)} free; a rank's ring takes 1 MiB", remedy)
    return Check(PASS, "run directory", f"{missing}{there}: {size(free)} free")


def _native() -> Iterator[Check]:
    if shutil.which(os.environ.get("CXX", "c++")) is None and shutil.which("g++") is None:
        remedy = (
            "install a C++ compiler, or build the hook with the image (commwatch native build --python PATH); "
            "until then, the Python hook records at a higher cost"
        )
        yield Check(WARN, "compiler", "none found for the native hook", remedy)


def _no_agent(config: Config) -> Check:
    return Check(
        FAIL, "agent", f"none watches {config.dir}", f"commwatch agent --dir {config.dir}, or commwatch run -- ..."
    )


def _port(config: Config) -> Check:
    wanted = DEFAULT_PORT if config.port is None else config.port
    with socket.socket(socket.AF_INET6 if ":" in config.host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the agent
        try:
            probe.bind((config.host, wanted))
        except OSError as error:
            taken = error.errno == errno.EADDRINUSE
            why = "is taken" if taken else error.strerror
            return Check(WARN, "port", f"{config.host}:{wanted}: {why}", bind_remedy(error))
    return Check(PASS, "port", f"{config.host}:{wanted} is free" if wanted else f"{config.host}: any free port is used")


# -- an agent and its jobs ------------------------------------------------------------------------


def _agent(url: str, get: Get, wait_s: float) -> Iterator[Check]:
    about = get("about")
    other = "" if about["version"] == __version__ else f", this command is {__version__}"
    remedy = "use one version of commwatch in trainer, agent and command" if other else ""
    yield Check(WARN if other else PASS, "agent", f"{url}: {about['version']}{other}, pid {about['pid']}", remedy)
    if about["trouble"]:
        yield Check(FAIL, "history", about["trouble"], _history_remedy(about["trouble"]))
    else:
        yield Check(PASS, "history", about["history"])
    if not about.get("otlp") or about["scraped_at"] is not None:
        yield _scraping(about)
    yield from _pushing(about)
    yield from _peers(get("peers"))
    gpus, host = get("gpus"), get("host")
    yield from _gpus(gpus)
    yield from gpu_links(gpus, host)
    yield from network_checks(host)
    try:
        found = get("jobs")
    except HTTPError as error:
        if error.code != HTTPStatus.SERVICE_UNAVAILABLE or not about["trouble"]:
            raise
        error.close()
        yield Check(WARN, "jobs", "not checked, because the agent cannot read its history", "mend the history first")
        return
    jobs = [job for job in found if job["state"] == "running"]
    if not jobs:
        remedy = (
            "set COMMWATCH=1 and the same COMMWATCH_DIR in the trainer; a job appears when it calls init_process_group"
        )
        yield Check(WARN, "jobs", "none is running here", remedy)
        return
    before = {job["job_id"]: _ranks(get, job["job_id"]) for job in jobs}
    time.sleep(wait_s)
    for job in jobs:
        yield from _job(job, get, before[job["job_id"]], wait_s)


def _history_remedy(trouble: str) -> str:
    if "start the agent again" in trouble:
        return "start the agent again: it continues with the file if that is back, and else begins a new one"
    if any(word in trouble for word in ("full", "No space", "quota")):
        return "free disk space, or choose another place with --state"
    return "check the agent's log, and that its user may read and write there"


def _scraping(about: dict[str, Any]) -> Check:
    age = None if about["scraped_at"] is None else time.time() - about["scraped_at"]
    if age is None or age > _SCRAPED_S:
        since = "never fetched" if age is None else f"last fetched {age / 60:.0f} min ago"
        remedy = "add the agent to a scrape_config; it must listen beyond this host (--host, TLS or --insecure) for a Prometheus elsewhere (docs/security.md)"
        return Check(WARN, "prometheus", f"/metrics was {since}", remedy)
    says = f"/metrics was fetched {age:.0f} s ago by {about['scraper'] or 'an unknown client'}"
    if not is_prometheus(about["scraper"]):
        remedy = "fine if that collects your metrics; else add the agent to a scrape_config"
        return Check(WARN, "prometheus", f"{says}, not by Prometheus", remedy)
    return Check(PASS, "prometheus", says)


def _pushing(about: dict[str, Any]) -> Iterator[Check]:
    """Check the pushes over OTLP; an agent of an earlier version has none."""
    for signal, push in about.get("otlp", {}).items():
        dropped = f", {push['dropped']} records dropped" if push["dropped"] else ""
        if push["trouble"] is not None:
            remedy = "check the settings otlp_endpoint, otlp_headers_file and otlp_ca_file (docs/metrics.md); set otlp_logs = false if it takes only metrics"
            yield Check(WARN, "otlp", f"{signal}: {push['trouble']}{dropped}", remedy)
        elif push["pushed_at"] is None:
            yield Check(PASS, "otlp", f"{signal}: nothing pushed to {push['endpoint']} yet{dropped}")
        else:
            age = time.time() - push["pushed_at"]
            yield Check(PASS, "otlp", f"{signal}: pushed to {push['endpoint']} {age:.0f} s ago{dropped}")


def _peers(found: list[dict[str, Any]]) -> Iterator[Check]:
    """Check the agents of other nodes, if this one knows any."""
    others = [peer for peer in found if peer["state"] != "this agent"]
    answering = sum(peer["state"] == "answers" for peer in others)
    if answering:
        yield Check(PASS, "peers", f"{answering} of {len(others)} agents of other nodes answer")
    for peer in others:
        if peer["state"] == "silent":
            remedy = "start it, or take it out of the setting peers; with TLS set ca_file, with require_token a common token_file"
            yield Check(WARN, "peers", f"{peer['url']}: {peer['reason']}", remedy)


def _gpus(view: dict[str, Any]) -> Iterator[Check]:
    """Check the GPUs, their errors, and whether the agent sees the GPU of every rank."""
    cards, driver = view["gpus"], view["driver"]
    placed = sum(len(card["ranks"]) for card in cards)
    if view["state"] == "up":
        version = f"{driver['vendor']} driver {driver['version']}{f', CUDA {cuda}' if (cuda := driver['cuda']) else ''}"
        yield Check(
            PASS, "gpus", f"{len(cards)}, {version}; {placed} of {placed + len(view['elsewhere'])} ranks placed"
        )
    elif view["state"] == "down":
        remedy = "check the driver with nvidia-smi (amd-smi); after an update of the driver start the agent again"
        yield Check(WARN, "gpus", f"cannot be read: {view['says']}", remedy)
    else:
        yield Check(PASS, "gpus", f"none are read: {view['says']}")
    if view["elsewhere"]:
        who = ", ".join(f"{rank['job_id']} rank {rank['rank']}" for rank in view["elsewhere"])
        remedy = "give the agent's container all GPUs: NVIDIA_VISIBLE_DEVICES=all, NVIDIA_DRIVER_CAPABILITIES=utility"
        yield Check(WARN, "gpus", f"the agent does not see the GPU of {who}", remedy)
    for card in cards:
        yield from _gpu(card)


def _gpu(card: dict[str, Any]) -> Iterator[Check]:
    gpu, name = card["gpu"], f"GPU {card['gpu']['card']['index']}"
    if gpu["lost"]:
        remedy = "check nvidia-smi and the kernel's log; reset the GPU or reboot the node"
        yield Check(WARN, "gpus", f"{name} does not answer: {gpu['lost']}", remedy)
    latest = {xid["xid"]: xid for xid in reversed(card["xids"])}
    for number, xid in latest.items():
        age = time.time() - xid["at"]
        if age < _XIDS_S:
            yield Check(WARN, "gpus", f"{name}: Xid {number} {age / 60:.0f} min ago: {xid['title']}", xid["do"])
    reasons = [reason for reason in ALARMING if gpu["measured"]["throttled"].get(reason)]
    if reasons:
        remedy = "check cooling and power supply of the node"
        yield Check(WARN, "gpus", f"{name} is throttled: {', '.join(reasons)}", remedy)


def _ranks(get: Get, job: str) -> list[dict[str, Any]]:
    ranks: list[dict[str, Any]] = get(f"ranks?job={urllib.parse.quote(job, safe='')}")
    return ranks


def _job(job: dict[str, Any], get: Get, before: list[dict[str, Any]], wait_s: float) -> Iterator[Check]:
    name, ranks = job["job_id"], _ranks(get, job["job_id"])
    missing = missing_ranks((rank["rank"] for rank in ranks), job["world_size"])
    if missing:
        remedy = (
            "fine if they run on other nodes; else check that they have COMMWATCH=1, and the probe on their PYTHONPATH, "
            "which python -I and -E ignore"
        )
        yield Check(WARN, "probe", f"{name}: no data from {missing}", remedy)
    else:
        yield Check(PASS, "probe", f"{name}: on all {len(ranks)} ranks")
    arrived = sum(int(rank["records"]) for rank in ranks) - sum(int(rank["records"]) for rank in before)
    if arrived:
        yield Check(PASS, "records", f"{name}: {arrived / wait_s:.0f} a second")
    else:
        yield Check(WARN, "records", f"{name}: none in {wait_s:.0f} s", "commwatch diagnose shows whether it hangs")
    hooks = sorted({rank["hook"] for rank in ranks})
    dear = "python" in hooks
    remedy = f"the native hook costs less: {_NATIVE}" if dear else ""
    yield Check(WARN if dear else PASS, "hook", f"{name}: {', '.join(hooks)}", remedy)
    yield _cost(name, before, ranks, wait_s)
    yield from _gpu_timing(name, ranks)
    if job["lost"]:
        remedy = "use a larger ring (COMMWATCH_SLOTS), or give the agent more CPU"
        yield Check(
            WARN, "losses", f"{name}: {job['lost']} record{'s were' if job['lost'] != 1 else ' was'} lost", remedy
        )
    if job["steps_unavailable"]:
        yield Check(
            WARN, "steps", f"{name}: none: {job['steps_unavailable']}", "call commwatch.step() at the end of each step"
        )
    yield _nccl(name, get)
    yield from _witnesses(name, get)
    yield _recorder(name, ranks)
    yield from connections(name, job["world_size"], ranks)


def _cost(name: str, before: list[dict[str, Any]], ranks: list[dict[str, Any]], wait_s: float) -> Check:
    """Check what share of the trainers' time the probe takes, and whether it records only in part to save time."""
    then = {rank["rank"]: rank["probe_s"] or 0.0 for rank in before}
    most = max(((rank["probe_s"] or 0.0) - then.get(rank["rank"], 0.0) for rank in ranks), default=0.0) / wait_s
    budgets = {rank["probe_budget"] for rank in ranks if rank["probe_budget"]}
    allowed = f" (budget {min(budgets):.2%})" if budgets else ""
    says = f"{name}: {max(0.0, most):.2%} of the time{allowed}, on the rank with the highest cost"
    part = shedding((rank["rank"], rank["probe_mode"]) for rank in ranks if rank["state"] == "running")
    if part is None:
        return Check(PASS, "probe cost", says)
    native = "" if any(rank["hook"] == "native" for rank in ranks) else f"the native hook costs a tenth: {_NATIVE}; or "
    return Check(WARN, "probe cost", f"{says}; {part}", f"{native}COMMWATCH_BUDGET=0.02 in the trainer allows more")


def _gpu_timing(name: str, ranks: list[dict[str, Any]]) -> Iterator[Check]:
    """Report how operations on GPUs are timed, and why; ranks with equal timing and reason share a line."""
    timings = {(rank["gpu_timing"], rank["gpu_timing_reason"]) for rank in ranks if rank["gpu_timing"]}
    for mode, reason in sorted(timings):
        alike = [rank for rank in ranks if (rank["gpu_timing"], rank["gpu_timing_reason"]) == (mode, reason)]
        which = "" if len(timings) == 1 else f" on {named({rank['rank'] for rank in alike})}"
        blind = mode == "off" and any(rank["gpu"] is not None or rank["gpu_uuid"] is not None for rank in alike)
        remedy = (
            "operations on GPUs are counted, not measured: COMMWATCH_TIMING=auto in the trainer measures them"
            if blind
            else ""
        )
        yield Check(WARN if blind else PASS, "gpu timing", f"{name}: {mode}{which}: {reason}", remedy)


def _witnesses(name: str, get: Get) -> Iterator[Check]:
    witnesses = get(f"witnesses?job={urllib.parse.quote(name, safe='')}")
    inspector, ras = witnesses["inspector"], witnesses["ras"]
    for what, seen, remedy in (
        ("inspector", inspector, _inspector_remedy(inspector)),
        ("ras", ras, _RAS if ras["state"] in ("down", "refused") else ""),
    ):
        yield Check(WARN if remedy else PASS, what, f"{name}: {seen['state']}: {seen['says']}", remedy)


def _inspector_remedy(inspector: dict[str, Any]) -> str:
    if inspector["unread_versions"]:
        return "a later version of commwatch may read this format"
    if inspector["state"] in ("found", "down"):
        return _INSPECTOR
    return _DROPPED if inspector["dropped"] else ""


def _recorder(name: str, ranks: list[dict[str, Any]]) -> Check:
    """Check whether ``commwatch diagnose`` can request a dump of PyTorch's Flight Recorder."""
    what, here = "fl. recorder", socket.gethostname()
    near = [rank for rank in ranks if rank["host"] == here and rank["visible_pid"] and rank["state"] == "running"]
    if not near:
        return Check(PASS, what, f"{name}: unknown: its processes are not visible from here")
    states = {rank["rank"]: stack_capture.recorder(rank["rank"], rank["visible_pid"]) for rank in near}
    down = [rank for rank, state in states.items() if state == "down"]
    if down:
        remedy = "only ProcessGroupNCCL creates it; set TORCH_FR_BUFFER_SIZE=2000"
        return Check(WARN, what, f"{name}: down: {named(down)} {'have' if len(down) > 1 else 'has'} no pipe", remedy)
    if "works" in states.values():
        return Check(PASS, what, f"{name}: works: commwatch diagnose can request a dump")
    return Check(PASS, what, f"{name}: off: TORCH_NCCL_DEBUG_INFO_PIPE_FILE is not set")


def _nccl(name: str, get: Get) -> Check:
    files = [file for each in get(f"topology?job={urllib.parse.quote(name, safe='')}") for file in each["files"]]
    if files:
        return Check(PASS, "nccl log", f"{name}: {counted(len(files), 'file')}")
    level = debug.in_force(os.environ).get("NCCL_DEBUG")
    says = f"{name}: none read{f' (NCCL_DEBUG={level} here)' if level else ''}"
    backends = {each["backend"] for each in get(f"groups?job={urllib.parse.quote(name, safe='')}")}
    if backends == {"gloo"}:
        return Check(PASS, "nccl log", f"{name}: none, and none is needed: its groups use Gloo")
    remedy = "set NCCL_DEBUG=WARN and NCCL_DEBUG_FILE=/path/%h.%p where the agent can read it"
    return Check(WARN, "nccl log", says, remedy)


# -- output -----------------------------------------------------------------------------------


def text(checks: list[Check], cells: int = MOST_CELLS) -> str:
    """Return the results as text for people, in lines of at most ``cells`` cells."""
    lines: list[str] = []
    for check in checks:
        lines += folded([f"{check.result:<5} {check.what:<14} {check.says}"], cells, 21)
        lines += folded([f"{'':<20} -> {check.remedy}"] if check.remedy else [], cells)
    return terminal_text.lines(lines)


def as_json(checks: list[Check]) -> str:
    """Return the results as JSON text for programs."""
    return json.dumps([asdict(check) for check in checks], indent=2)
