"""The command ``commwatch``, and ``python -m commwatch_agent``."""

from __future__ import annotations

import signal
import sys

from commwatch.wire.errors import ONLY_PROBE, REMEDY
from commwatch_agent.runtime.python_path import folders_of_job

#: Modules of the packages that the agent needs, as in pyproject.toml. Where one is missing, commwatch was installed for trainers only.
NEEDED = (
    "fastapi", "isal", "markdown_it", "numpy", "prometheus_client", "promql_parser", "psutil", "pydantic", "pynvml", "rich", "shtab", "starlette", "tomli",
    "uvicorn", "yaml",
)  # fmt: skip


def main() -> int:
    """Run the command line; where a package that it needs is missing, print the remedy and return 2."""
    _prefer_own_packages()
    if sys.argv[1:2] == ["agent"]:
        # Until the agent has its handler, a request to read the settings again waits: its default effect would end the agent.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP})
    try:
        from commwatch_agent.cli import main as run

        return run()
    except ModuleNotFoundError as error:
        if str(error.name).partition(".")[0] not in NEEDED:
            raise
        print(f"commwatch: {ONLY_PROBE} (no module {error.name}); {REMEDY}", file=sys.stderr)
        return 2


def _prefer_own_packages() -> None:
    """Look into the folders of ``PYTHONPATH`` last: they are those of the job, perhaps for another version of Python."""
    of_job = folders_of_job()
    sys.path.sort(key=lambda path: path in of_job)


if __name__ == "__main__":
    sys.exit(main())
