"""Who is this process in its job, and where do its rings go: from the environment, for trainer and agent alike."""

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

from commwatch.collectors.wire import files, others
from commwatch.collectors.wire.handlers import raised_by_handler

#: Set by launchers for every job alike: names nothing.
_NO_NAME = {"", "none"}
#: What torchrun makes up where nobody names the run.
_UUID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
_MOST_SCRIPT = 60
#: Bytes that are read of a process's environment.
_MOST_ENVIRONMENT = 1 << 20
#: Where a job's name comes from, best first.
JOB_VARIABLES = ("COMMWATCH_JOB", "TORCHELASTIC_RUN_ID", "SLURM_JOB_ID", "RAY_JOB_ID")


def job_id(env: Mapping[str, str], program: str | None = None) -> str:
    """The job this process belongs to; where nobody named it, a name all children of one launcher share.

    Args:
        program: path of the script that this process runs; by default what Python says.
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
    """Whether a child of this process is another rank of its job: Lightning's first rank starts the others itself.

    A forked child has the environment with which this process began, so its rank is no other one.
    """
    ours, local_rank = f"MASTER_PORT={env.get('MASTER_PORT')}", f"LOCAL_RANK={env.get('LOCAL_RANK', '0')}"
    for task in files.names("/proc/self/task"):
        for child in (files.text(f"/proc/self/task/{task}/children") or "").split():
            given = (files.text(f"/proc/{child}/environ", _MOST_ENVIRONMENT) or "").split("\0")
            if ours in given and local_rank not in given and any(each.startswith("LOCAL_RANK=") for each in given):
                return True
    return False


def _script(program: str | None) -> str:
    """What to call a script: its name, of a package's ``__main__`` the package's; empty where there is none."""
    path = Path((sys.argv[0] if sys.argv else "") if program is None else program)
    name = path.parent.name if path.stem == "__main__" else path.stem
    return "" if name.startswith("-") else name[:_MOST_SCRIPT]


def restart_count(env: Mapping[str, str]) -> int:
    """How often the elastic launcher has restarted the workers."""
    value = env.get("TORCHELASTIC_RESTART_COUNT", "0")
    return int(value) if value.isdecimal() else 0


def run_dir(env: Mapping[str, str]) -> Path:
    """The run directory: ``COMMWATCH_DIR``, else one per user in memory."""
    if env.get("COMMWATCH_DIR"):
        return Path(env["COMMWATCH_DIR"])
    memory = Path("/dev/shm")
    return (memory if memory.is_dir() else Path("/tmp")) / f"commwatch-{os.getuid()}"


def make_private_dir(path: Path, env: Mapping[str, str]) -> int:
    """Create ``path`` for this user (or ``COMMWATCH_GROUP``) alone; returns the mode for files in it.

    Raises:
        OSError: cannot be made, or belongs to somebody else (``/dev/shm`` is open to all: a stranger may
            have put a directory or a link of that name there first).
    """
    group = env.get("COMMWATCH_GROUP", "")
    gid = -1
    if group:
        try:
            gid = int(group) if group.isdecimal() else grp.getgrnam(group).gr_gid
        except KeyError:
            raise OSError(f"COMMWATCH_GROUP={group}: no such group") from None
    mode = 0o2770 if group else 0o700
    try:
        path.mkdir(parents=True, mode=mode)
    except FileExistsError:
        found = path.lstat()
        if not stat.S_ISDIR(found.st_mode):
            raise OSError(f"{path} is not a directory") from None
        shared = bool(group) and found.st_gid == gid
        if found.st_uid != os.getuid() and not shared and os.getuid() != 0:
            raise OSError(f"{path} belongs to uid {found.st_uid}, not to us; set COMMWATCH_DIR") from None
    else:
        if group:
            os.chown(path, -1, gid)
        path.chmod(mode)
    return 0o640 if group else 0o600


def write_whole(path: Path, text: str, mode: int) -> None:
    """Put a file with this text at ``path``, whole or not at all, and whatever the umask with these permissions.

    Raises:
        OSError: no rights, no room.
    """
    hidden = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with os.fdopen(others.create(hidden, mode), "w", encoding="utf-8") as file:
            file.write(text)
        hidden.replace(path)
    finally:
        hidden.unlink(missing_ok=True)


def ring_path(directory: Path, job: str, restart: int, rank: int) -> Path:
    """A name for the ring of this process that no other process has had or will have."""
    return directory / f"{ring_prefix(job)}{restart}.{rank}.{os.getpid()}-{time.monotonic_ns()}.ring"


def ring_prefix(job: str) -> str:
    """What the names of a job's rings begin with."""
    readable = re.sub(r"^\.|[^A-Za-z0-9._-]", "_", job)[:80]
    return f"{readable}.r"


def probe_mark(directory: Path, job: str) -> Path:
    """The file in which the probe leaves word that it was loaded, where ``commwatch run`` has made it."""
    return directory / "probes" / f"{ring_prefix(job)}probe"


def mark_probe(env: Mapping[str, str]) -> None:
    """Leave word that the probe was loaded, if somebody waits for that; raises ``OSError`` where nobody does."""
    flags = os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    fd = os.open(probe_mark(run_dir(env), job_id(env)), flags)
    try:
        os.write(fd, b"1")
    finally:
        os.close(fd)


def describe(env: Mapping[str, str], rank: int, world_size: int, **more: Any) -> dict[str, Any]:
    """The identity that stands in the ring's header."""
    local_rank = env.get("LOCAL_RANK", "")
    return {
        "job": job_id(env),
        "restart": restart_count(env),
        "rank": rank,
        "world_size": world_size,
        "local_rank": int(local_rank) if local_rank.isdecimal() else None,
        "host": socket.gethostname(),
        **this_process(),
        "boot_id": boot_id(),
        "wall_offset_ns": time.time_ns() - time.monotonic_ns(),
        "started_ns": time.monotonic_ns(),
        **more,
    }


#: What an identity must hold: texts, counts, and times in ns; what it may hold beside a name, if it holds it.
_TEXTS, _COUNTS, _TIMES = ("job",), ("restart", "rank", "world_size"), ("wall_offset_ns", "started_ns")
_MAY = {"host": str, "boot_id": str, "hook": str, "pid": int, "local_rank": int}
_MOST_COUNT, _MOST_TIME_NS = 1 << 31, 1 << 62


def validate_identity(identity: object) -> str | None:
    """What is wrong with an identity that somebody has written; ``None``: it is as ``describe`` makes it."""
    if not isinstance(identity, dict):
        return "not an object"
    wanted = {**dict.fromkeys(_TEXTS, str), **dict.fromkeys((*_COUNTS, *_TIMES), int)}
    known = {key for key, value in identity.items() if (key, value) != ("local_rank", None)}
    there = {key: kind for key, kind in _MAY.items() if key in known}
    for key, kind in {**wanted, **there}.items():
        value = identity.get(key)
        if type(value) is not kind:  # True is no number
            return f"{key} is {'missing' if value is None else 'of another kind'}"
        if isinstance(value, int) and not _in_range(value, key in _TIMES):
            return f"{key} is out of range"
    return None


def _in_range(value: int, time: bool) -> bool:
    return abs(value) < _MOST_TIME_NS if time else 0 <= value < _MOST_COUNT


def this_process() -> dict[str, Any]:
    """What an identity says for ``process_of`` to find this process."""
    return {"pid": os.getpid(), "pid_namespace": _pid_namespace(), "started_ticks": _start_ticks(os.getpid())}


def process_of(identity: Mapping[str, Any], uid: int) -> int:
    """The pid of the process that wrote an identity; 0 where it is over, or not to be seen from here.

    Args:
        uid: the user who wrote it. A process of another user is none of its.
    """
    pid, here = identity.get("pid"), _pid_namespace()
    if type(pid) is not int or not here or identity.get("pid_namespace") != here:
        return 0
    try:
        of_user = os.stat(f"/proc/{pid}").st_uid == uid  # noqa: PTH116
    except (OSError, ValueError, OverflowError):
        return 0
    return pid if of_user and identity.get("started_ticks") == _start_ticks(pid) else 0


def _pid_namespace() -> int:
    """Names the namespace in which this process has its pid; 0 where that cannot be known."""
    try:
        return Path("/proc/self/ns/pid").stat().st_ino
    except OSError as error:
        if raised_by_handler(error):
            raise
        return 0


def boot_id() -> str:
    """Names this boot of the machine: monotonic times of two boots do not compare."""
    return files.text("/proc/sys/kernel/random/boot_id") or ""


def _start_ticks(pid: int) -> str:
    fields = files.of_process(pid)
    return fields[19] if len(fields) > 19 else ""
