"""The folders that a job's ``PYTHONPATH`` names: the agent inherits it, but its packages are perhaps for another version of Python."""

from __future__ import annotations

import os


def folders_of_job() -> set[str]:
    """Return the folders that ``PYTHONPATH`` of this process names, as ``sys.path`` has them."""
    return {os.path.abspath(path) for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path}  # noqa: PTH100
