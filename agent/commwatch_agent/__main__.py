"""The command ``commwatch``, and ``python -m commwatch_agent``."""

from __future__ import annotations

import os
import sys

#: Modules of the packages that the agent needs, as in pyproject.toml. Where one is missing, commwatch was installed for trainers only.
NEEDED = (
    "fastapi", "isal", "numpy", "prometheus_client", "promql_parser", "psutil", "pydantic", "pynvml", "rich", "shtab", "starlette", "tomli", "uvicorn",
    "yaml",
)  # fmt: skip
REMEDY = (
    "install commwatch in an environment of its own (`uv tool install`, `pipx install`), and use its commands: `commwatch run` records the jobs "
    "of every environment"
)


def main() -> int:
    """Run the command line; where a package that it needs is missing, print the remedy and return 2."""
    _prefer_own_packages()
    try:
        from commwatch_agent.cli import main as run

        return run()
    except ModuleNotFoundError as error:
        if str(error.name).partition(".")[0] not in NEEDED:
            raise
        print(f"commwatch: only the probe is installed here (no module {error.name}); {REMEDY}", file=sys.stderr)
        return 2


def _prefer_own_packages() -> None:
    """Look into the folders of ``PYTHONPATH`` last: they are those of the job, perhaps for another version of Python."""
    of_job = {os.path.abspath(path) for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path}  # noqa: PTH100
    sys.path.sort(key=lambda path: path in of_job)


if __name__ == "__main__":
    sys.exit(main())
