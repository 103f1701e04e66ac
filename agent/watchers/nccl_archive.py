"""Stores the content of a job's NCCL logs beside the history, for reports after its end: one file per job."""

from __future__ import annotations

import hashlib
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from commwatch.core.nccl_views import Topology
from commwatch.watchers.nccl import logs_of

if TYPE_CHECKING:
    from pydantic import TypeAdapter


def keep(state: Path, topology: Topology) -> None:
    """Write a job's topology to the state directory; raise ``OSError`` if that fails."""
    path = _path(state, topology.job_id)
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    hidden = path.with_suffix(".new")
    hidden.touch(mode=0o600)
    hidden.write_bytes(_adapter().dump_json(topology))
    hidden.replace(path)


def kept(state: Path, job_id: str) -> Topology | None:
    """Return the stored topology of a job; ``None``: there is none, or it cannot be read."""
    try:
        stored = _path(state, job_id).read_bytes()
        return _adapter().validate_json(stored)
    except (OSError, ValueError):
        return None


@cache
def _adapter() -> TypeAdapter[Topology]:
    # Here, because it imports pydantic, which `commwatch run` does without where NCCL has logged nothing.
    from pydantic import TypeAdapter

    return TypeAdapter(Topology)


def _path(state: Path, job_id: str) -> Path:
    # In the folder of the logs, because old files are removed there.
    return logs_of(state) / "said" / f"{hashlib.sha256(job_id.encode(errors='replace')).hexdigest()[:32]}.json"
