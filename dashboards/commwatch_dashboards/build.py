"""Write the dashboards' JSON: ``python -m commwatch_dashboards.build DIR``, run by ``make dashboards``."""

from __future__ import annotations

import sys
from pathlib import Path

from commwatch_dashboards import cluster, job, node
from commwatch_dashboards.common import text

BUILDERS = {"cluster": cluster.build, "job": job.build, "node": node.build}


def main(directory: Path) -> None:
    """Write one JSON file for each dashboard into ``directory``."""
    for name, build in BUILDERS.items():
        (directory / f"{name}.json").write_text(text(build()), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
