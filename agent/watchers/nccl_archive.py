"""What NCCL's logs said of a job, kept beside the history for the report of a job that has ended: a file for each job."""

from __future__ import annotations

import contextlib
import hashlib
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from commwatch.core.nccl_views import Topology
from commwatch.watchers.nccl import logs_of

_ADAPTER = TypeAdapter(Topology)


def keep(state: Path, said: Topology) -> None:
    """Write it down in the state directory; raises ``OSError`` where that cannot be."""
    path = _path(state, said.job_id)
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    hidden = path.with_suffix(".new")
    hidden.touch(mode=0o600)
    hidden.write_bytes(_ADAPTER.dump_json(said))
    hidden.replace(path)


def kept(state: Path, job_id: str) -> Topology | None:
    """What was written down of a job; ``None`` where nothing was, or it cannot be read."""
    with contextlib.suppress(OSError, ValidationError):
        return _ADAPTER.validate_json(_path(state, job_id).read_bytes())
    return None


def _path(state: Path, job_id: str) -> Path:
    # Among the logs, which are removed when they are old.
    return logs_of(state) / "said" / f"{hashlib.sha256(job_id.encode(errors='replace')).hexdigest()[:32]}.json"
