"""Takes over files that trainers have written: reads them with limits, and traces in a separate process."""

from __future__ import annotations

import errno
import json
import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from commwatch.wire import crossing

log = logging.getLogger("commwatch")
#: Bytes of a claim or a result; bytes of a compressed trace: one of 50 steps has some ten megabytes.
_MOST_BYTES, _MOST_TRACE_BYTES = 65_536, 256 << 20


def read(path: Path) -> str | None:
    """Return the text of a rank's file; ``None``: it is missing, or cannot be read."""
    try:
        return crossing.read(path, _MOST_BYTES, crossing.trainers()).decode(errors="replace")
    except OSError:
        return None


def take(left: Path, kept: Path) -> None:
    """Move a trace from ``left`` to ``kept``; raise ``OSError``, also where it is too large or of another user."""
    hidden = kept.with_name(f".{kept.name}")
    try:
        with open(crossing.open_file(left, crossing.trainers()), "rb") as source, open(hidden, "wb") as target:
            about = os.fstat(source.fileno())
            if about.st_size > _MOST_TRACE_BYTES:
                raise crossing.Refused(errno.EFBIG, f"larger than {_MOST_TRACE_BYTES} bytes", str(left))
            for _ in range(_MOST_TRACE_BYTES >> 20):  # it may grow meanwhile
                if not target.write(source.read(1 << 20)):
                    break
        hidden.replace(kept)
    finally:
        hidden.unlink(missing_ok=True)
    with crossing.folder(left.parent) as where:
        where.remove(left.name)


def overlap(trace: Path, from_ns: int, until_ns: int, patience_s: float) -> dict[str, Any]:
    """Return the ``Overlap`` between two Unix times in ns as a dict, or one with ``error``; runs in a process with limits."""
    command = [sys.executable, "-m", "commwatch_agent.sources.trace_overlap", str(trace), str(from_ns), str(until_ns)]
    try:  # from /, because the working directory may hold modules named like ours
        done = subprocess.run(command, cwd="/", capture_output=True, timeout=patience_s, check=True)
        answer: dict[str, Any] = json.loads(done.stdout)
    except subprocess.TimeoutExpired:
        return {"error": f"reading the trace took more than {patience_s:.0f} s"}
    except subprocess.CalledProcessError as error:
        return {"error": f"the trace cannot be read: its reader ended with status {error.returncode}"}
    except (OSError, ValueError) as error:
        return {"error": f"the trace cannot be read: {error}"}
    return answer


def keep_intervals(path: Path, from_ns: int, intervals: list[list[int]]) -> None:
    """Write intervals of an ``Overlap`` in Unix time (ns), for a timeline; log a warning if that fails."""
    try:
        path.write_text(json.dumps([[from_ns + begin, from_ns + end] for begin, end in intervals]), encoding="utf-8")
    except OSError as error:
        log.warning("cannot keep the exposed intervals of a profile: %s", error)
