"""Identity of a process in its job, and the paths of its rings, from the environment. Used by trainer and agent."""

from __future__ import annotations

import grp
import hashlib
import os
import re
import socket
import stat
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from commwatch.wire import crossing, files
from commwatch.wire.handlers import raised_by_handler

#: Values that launchers set for every job: not a name.
_NO_NAME = {"", "none"}
#: The id that torchrun generates for a run without a name.
_UUID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
_MOST_SCRIPT = 60
#: Bytes read of a process's environment, at most.
_MOST_ENVIRONMENT = 1 << 20
#: Entry of the agent's announcement (``agent.json``) with the URL at which agents of other nodes reach it.
PEER_ADDRESS = "peer_url"
#: A tick of the times in ``/proc/PID/stat``, in ns.
_TICK_NS = 10**9 // os.sysconf("SC_CLK_TCK")
#: Variable in which ``commwatch run`` names what it starts: a random text that all processes below it inherit.
RUN_VARIABLE = "COMMWATCH_RUN"
#: Characters of a launcher, of what ``commwatch run`` has named, and of a place of rendezvous.
_MOST_PLACE = 300
#: Sources of a job's name, best first.
JOB_VARIABLES = ("COMMWATCH_JOB", "TORCHELASTIC_RUN_ID", "SLURM_JOB_ID", "RAY_JOB_ID")


def job_id(env: Mapping[str, str], program: str | None = None) -> str:
    """Return the job's name; if it was not given, a name that all children of one launcher share.

    Args:
            program: path of the script that this process runs; by default ``sys.argv[0]``.
    """
    for variable in JOB_VARIABLES:
        value = env.get(variable, "").strip()
        if value.lower() not in _NO_NAME:
            made_up = variable == "TORCHELASTIC_RUN_ID" and _UUID.fullmatch(value)
            return f"{_script(program)}-{value[:8]}" if made_up and _script(program) else value
    pid = os.getpid() if _starts_ranks(env) else os.getppid()
    launcher = f"{socket.gethostname()}:{pid}:{_start_ticks(pid)}"
    # All workers of torchrun run one script; children of another launcher may not.
    name = _script(program) if "TORCHELASTIC_RUN_ID" in env else ""
    return f"{name or 'local'}-{hashlib.sha256(launcher.encode()).hexdigest()[:8]}"


def _starts_ranks(env: Mapping[str, str]) -> bool:
    """Return whether a child process is another rank of this job: Lightning's first rank starts the others itself.

    A forked child shows the environment that this process started with, so it does not count as another rank.
    """
    ours, local_rank = f"MASTER_PORT={env.get('MASTER_PORT')}", f"LOCAL_RANK={env.get('LOCAL_RANK', '0')}"
    for task in files.names("/proc/self/task"):
        for child in (files.text(f"/proc/self/task/{task}/children") or "").split():
            given = (files.text(f"/proc/{child}/environ", _MOST_ENVIRONMENT) or "").split("\0")
            if ours in given and local_rank not in given and any(each.startswith("LOCAL_RANK=") for each in given):
                return True
    return False


def _script(program: str | None) -> str:
    """Return a script's name, for a package's ``__main__`` the package's name; empty if there is none."""
    path = Path((sys.argv[0] if sys.argv else "") if program is None else program)
    name = path.parent.name if path.stem == "__main__" else path.stem
    return "" if name.startswith("-") else name[:_MOST_SCRIPT]


def restart_count(env: Mapping[str, str]) -> int:
    """Return how often the elastic launcher has restarted the workers."""
    value = env.get("TORCHELASTIC_RESTART_COUNT", "0")
    return int(value) if value.isdecimal() else 0


def run_dir(env: Mapping[str, str]) -> Path:
    """Return the run directory: ``COMMWATCH_DIR``, else one per user in ``/dev/shm``, or in ``/tmp`` without that."""
    if env.get("COMMWATCH_DIR"):
        return Path(env["COMMWATCH_DIR"])
    memory = Path("/dev/shm")
    return (memory if memory.is_dir() else Path("/tmp")) / f"commwatch-{os.getuid()}"


def working_dir() -> Path:
    """Return this process's directory, where relative paths begin; an empty path if it is gone."""
    try:
        return Path.cwd()
    except OSError as error:
        if raised_by_handler(error):
            raise
        return Path()


def shared_group(env: Mapping[str, str]) -> int | None:
    """Return the number of the group of ``COMMWATCH_GROUP``, ``None`` without one; raise ``OSError`` if this machine has no such group."""
    group = env.get("COMMWATCH_GROUP", "")
    try:
        return int(group) if group.isdecimal() else grp.getgrnam(group).gr_gid if group else None
    except KeyError:
        raise OSError(f"COMMWATCH_GROUP={group}: no such group") from None


def make_private_dir(path: Path, env: Mapping[str, str]) -> int:
    """Create ``path`` for this user (or ``COMMWATCH_GROUP``) only; return the mode for files in it.

    Raises:
        OSError: it cannot be created, or another user owns it (``/dev/shm`` is open to all: another user may have
            created a directory or link of that name first).
    """
    gid = shared_group(env)
    mode = 0o700 if gid is None else 0o2770
    try:
        path.mkdir(parents=True, mode=mode)
    except FileExistsError:
        found = path.lstat()
        if not stat.S_ISDIR(found.st_mode):
            raise OSError(f"{path} is not a directory") from None
        shared = found.st_gid == gid
        if found.st_uid != os.getuid() and not shared and os.getuid() != 0:
            raise OSError(f"{path} belongs to uid {found.st_uid}, not to this user; set COMMWATCH_DIR") from None
    else:
        if gid is not None:
            os.chown(path, -1, gid)
        path.chmod(mode)
    return 0o600 if gid is None else 0o640


def ring_path(directory: Path, job: str, restart: int, rank: int) -> Path:
    """Return a path for this process's ring that no other process has used or will use."""
    return directory / f"{ring_prefix(job)}{restart}.{rank}.{os.getpid()}-{time.monotonic_ns()}.ring"


def ring_prefix(job: str) -> str:
    """Return the prefix of the ring file names of a job."""
    readable = re.sub(r"^\.|[^A-Za-z0-9._-]", "_", job)[:80]
    return f"{readable}.r"


def probe_mark(directory: Path, job: str) -> Path:
    """Return the file to which a loaded probe appends; ``commwatch run`` creates it."""
    return directory / "probes" / f"{ring_prefix(job)}probe"


def mark_probe(env: Mapping[str, str]) -> None:
    """Append to the file of ``probe_mark``; raise ``OSError`` if ``commwatch run`` of this user or of root has not created it."""
    fd = crossing.open_file(probe_mark(run_dir(env), job_id(env)), crossing.own(), flags=os.O_WRONLY | os.O_APPEND)
    try:
        os.write(fd, b"1")
    finally:
        os.close(fd)


def describe(env: Mapping[str, str], rank: int, world_size: int, **more: Any) -> dict[str, Any]:
    """Return the identity for the ring's header."""
    return {
        "job": job_id(env),
        "restart": restart_count(env),
        "rank": rank,
        "world_size": world_size,
        "local_rank": _count(env, "LOCAL_RANK"),
        "local_world_size": _count(env, "LOCAL_WORLD_SIZE"),
        "host": socket.gethostname(),
        **this_process(),
        "network_namespace": _namespace("net"),
        **_origin(env),
        "boot_id": boot_id(),
        "wall_offset_ns": time.time_ns() - time.monotonic_ns(),
        "started_ns": time.monotonic_ns(),
        **more,
    }


def _count(env: Mapping[str, str], variable: str) -> int | None:
    value = env.get(variable, "")
    return int(value) if value.isdecimal() else None


def _origin(env: Mapping[str, str]) -> dict[str, str]:
    """Return the fields of an identity by which an agent tells runs of one name apart; ``describe``'s caller may know a better rendezvous.

    ``launcher``: the parent process; ``run``: what ``commwatch run`` has named; ``rendezvous``: where the ranks meet, host and port.
    """
    parent = os.getppid()
    found = {"launcher": f"{parent}:{_start_ticks(parent)}", "run": env.get(RUN_VARIABLE, "")}
    if env.get("MASTER_PORT"):
        found["rendezvous"] = f"{env.get('MASTER_ADDR', '')}:{env['MASTER_PORT']}"
    return {name: text[:_MOST_PLACE] for name, text in found.items() if text}


#: Required fields of an identity: texts, counts, and times in ns; then optional fields with their types.
_TEXTS, _COUNTS, _TIMES = ("job",), ("restart", "rank", "world_size"), ("wall_offset_ns", "started_ns")
_MAY_TEXTS = ("host", "boot_id", "hook", "nccl", "launcher", "run", "rendezvous")
_MAY = {**dict.fromkeys(_MAY_TEXTS, str), **dict.fromkeys(("pid", "local_rank", "local_world_size"), int)}
#: Fields that may be null.
_NULL = ("local_rank", "local_world_size")
_MOST_COUNT, _MOST_TIME_NS = 1 << 31, 1 << 62


def validate_identity(identity: object) -> str | None:
    """Return what is wrong with an identity read from a ring; ``None`` if it is valid."""
    if not isinstance(identity, dict):
        return "not an object"
    wanted = {**dict.fromkeys(_TEXTS, str), **dict.fromkeys((*_COUNTS, *_TIMES), int)}
    known = {key for key, value in identity.items() if value is not None or key not in _NULL}
    there = {key: kind for key, kind in _MAY.items() if key in known}
    for key, kind in {**wanted, **there}.items():
        value = identity.get(key)
        if type(value) is not kind:  # a bool is not a number
            return f"{key} is {'missing' if value is None else 'of the wrong type'}"
        if isinstance(value, int) and not _in_range(value, key in _TIMES):
            return f"{key} is out of range"
    return None


def _in_range(value: int, time: bool) -> bool:
    return abs(value) < _MOST_TIME_NS if time else 0 <= value < _MOST_COUNT


def this_process() -> dict[str, Any]:
    """Return the fields of an identity by which ``process_of`` finds this process."""
    return {"pid": os.getpid(), "pid_namespace": _namespace("pid"), "started_ticks": _start_ticks(os.getpid())}


def process_of(identity: Mapping[str, Any], uid: int) -> int:
    """Return the pid of the process that wrote an identity; 0 if it has ended or is not visible in this pid namespace.

    Args:
        uid: the user who wrote it; processes of other users do not match.
    """
    pid, here = identity.get("pid"), _namespace("pid")
    if type(pid) is not int or not here or identity.get("pid_namespace") != here:
        return 0
    try:
        of_user = os.stat(f"/proc/{pid}").st_uid == uid  # noqa: PTH116
    except (OSError, ValueError, OverflowError):
        return 0
    return pid if of_user and identity.get("started_ticks") == _start_ticks(pid) else 0


def has_ended(identity: Mapping[str, Any]) -> bool:
    """Return whether the process that wrote an identity has certainly ended: it would be visible in this pid namespace."""
    pid, here = identity.get("pid"), _namespace("pid")
    if type(pid) is not int or pid <= 0 or not here or identity.get("pid_namespace") != here:
        return False
    if ticks := _start_ticks(pid):
        return bool(ticks != identity.get("started_ticks"))
    try:
        os.kill(pid, 0)  # ``/proc`` may hide the processes of other users
    except (OSError, OverflowError) as error:
        if raised_by_handler(error):
            raise
        return not isinstance(error, PermissionError)
    return False


def process_began_ns(identity: Mapping[str, Any]) -> int:
    """Return when the process that wrote an identity began, on the monotonic clock; when its ring did if that is not known.

    The ring is made at ``init_process_group`` or at the first operation, which may be long after that.
    """
    ring_ns, ticks = int(identity.get("started_ns", 0)), identity.get("started_ticks")
    if not isinstance(ticks, str) or not re.fullmatch(r"[0-9]{1,15}", ticks):
        return ring_ns
    return min(ring_ns, int(ticks) * _TICK_NS)  # the ticks also count while the machine sleeps


def network_namespace(identity: Mapping[str, Any]) -> int:
    """Return the inode number of the network namespace of the process that wrote an identity; 0: not known."""
    found = identity.get("network_namespace")
    return found if type(found) is int and found > 0 else 0


def _namespace(kind: str) -> int:
    """Return the inode number of this process's namespace of a kind, ``pid`` or ``net``; 0 if it is not known."""
    try:
        return Path(f"/proc/self/ns/{kind}").stat().st_ino
    except OSError as error:
        if raised_by_handler(error):
            raise
        return 0


def boot_id() -> str:
    """Return the id of this boot, empty if not known. Monotonic times of two boots cannot be compared."""
    return files.text("/proc/sys/kernel/random/boot_id") or ""


def _start_ticks(pid: int) -> str:
    fields = files.of_process(pid)
    return fields[19] if len(fields) > 19 else ""
