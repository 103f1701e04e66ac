"""Stores the content of a job's NCCL logs beside the history, for reports after its end: one file per job."""

from __future__ import annotations

import contextlib
import hashlib
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from commwatch.core.nccl_views import Topology
from commwatch.watchers.nccl import logs_of

_ADAPTER = TypeAdapter(Topology)


def keep(state: Path, topology: Topology) -> None:
    """Write a job's topology to the state directory; raise ``OSError`` if that fails."""
    path = _path(state, topology.job_id)
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    hidden = path.with_suffix(".new")
    hidden.touch(mode=0o600)
    hidden.write_bytes(_ADAPTER.dump_json(topology))
    hidden.replace(path)


def kept(state: Path, job_id: str) -> Topology | None:
    """Return the stored topology of a job; ``None``: there is none, or it cannot be read."""
    with contextlib.suppress(OSError, ValidationError):
        return _ADAPTER.validate_json(_path(state, job_id).read_bytes())
    return None


def _path(state: Path, job_id: str) -> Path:
    # In the folder of the logs, because old files are removed there.
    return logs_of(state) / "said" / f"{hashlib.sha256(job_id.encode(errors='replace')).hexdigest()[:32]}.json"
