"""Stores the content of a run's NCCL logs beside the history, for reports after its end: one file per run and history."""

from __future__ import annotations

import hashlib
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from commwatch.wire import crossing
from commwatch_agent.model.nccl_views import Topology
from commwatch_agent.model.runs import Stored
from commwatch_agent.sources.nccl import logs_of

_MOST_BYTES = 64 << 20
if TYPE_CHECKING:
    from pydantic import TypeAdapter


def keep(history: Path, topology: Topology, run: str) -> None:
    """Write a run's topology to the state directory; raise ``OSError`` if that fails.

    Args:
        history: the node's; nodes may share the directory.
        run: key of the run; empty: none of its ranks is known.
    """
    path = _path(history, run or topology.job_id)
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    crossing.write(path, _adapter().dump_json(topology).decode(), 0o600)


def kept(history: Path, run: Stored) -> Topology | None:
    """Return the topology of a run that is stored beside a history; ``None``: there is none, or it cannot be read."""
    try:
        stored = crossing.read(_path(history, run.key or run.name), _MOST_BYTES, crossing.ANYBODY)
        return _adapter().validate_json(stored)
    except (OSError, ValueError):
        return None


@cache
def _adapter() -> TypeAdapter[Topology]:
    # Here, because it imports pydantic, which `commwatch run` does without where NCCL has logged nothing.
    from pydantic import TypeAdapter

    return TypeAdapter(Topology)


def _path(history: Path, name: str) -> Path:
    # In the folder of the logs, because old files are removed there.
    job = hashlib.sha256(name.encode(errors="replace")).hexdigest()[:32]
    return logs_of(history.parent) / "said" / f"{job}.{history.stem}.json"
