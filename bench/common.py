"""What the benchmarks share: figures out, scratch directories in, and what the kernel says of a process."""

from __future__ import annotations

import json
import os
import resource
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

#: Operations of one training step in all benchmarks that have steps.
OPS_PER_STEP = 200


def emit(figures: dict[str, Any]) -> None:
    """Print what was measured, as the one JSON line of a benchmark."""
    print(json.dumps(figures), flush=True)


def last_json(text: str) -> dict[str, Any]:
    """The figures in a benchmark's output; libraries may have printed lines of their own before them."""
    lines = [line for line in text.splitlines() if line.startswith("{")]
    figures = json.loads(lines[-1])
    assert isinstance(figures, dict)
    return figures


@contextmanager
def scratch(in_memory: bool = False) -> Iterator[Path]:
    """A directory that is removed at the end.

    Args:
        in_memory: where rings lie (``/dev/shm``, if there is one); else where history lies.
    """
    memory = Path("/dev/shm")
    place = memory if in_memory and memory.is_dir() else None
    with tempfile.TemporaryDirectory(prefix="commwatch-bench-", dir=place, ignore_cleanup_errors=True) as name:
        yield Path(name)


def own_cpu_s() -> float:
    """CPU seconds of this process with all its threads, user and system."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def cpu_s(pid: int) -> float:
    """CPU seconds of a process with all its threads, user and system (resolution 10 ms)."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def memory_mb(pid: int | str = "self", field: str = "VmRSS") -> float:
    """Memory of a process in MB (10^6 bytes): ``VmRSS`` now, ``VmHWM`` at its highest."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024 / 1e6
    raise ValueError(f"/proc/{pid}/status has no {field}")
