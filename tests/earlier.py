"""Earlier commits of this repository: their packages, and what runs them with the libraries of today."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
from io import BytesIO
from pathlib import Path

TREE = Path(__file__).parents[1]
PACKAGES = ("agent", "collectors", "alerts", "dashboards")


def unpacked(commit: str, place: Path) -> Path | None:
    """A new folder with the packages of a commit; ``None`` without Git or without this commit, as in an archive or a shallow clone."""
    archive = ["git", "-C", str(TREE), "archive", commit, *PACKAGES]
    done = subprocess.run(archive, capture_output=True, check=False) if shutil.which("git") else None
    if done is None or done.returncode != 0:
        return None
    place.mkdir()
    with tarfile.open(fileobj=BytesIO(done.stdout)) as packed:
        packed.extractall(place, filter="data")
    return place


def command(tree: Path) -> tuple[str, ...]:
    """The beginning of a command line: what takes the place of ``commwatch``, of the commit in this folder."""
    paths = [str(tree / name) for name in PACKAGES]
    start = f"import sys; sys.path[:0] = {paths}; from commwatch_agent.__main__ import main; sys.exit(main())"
    return (sys.executable, "-c", start)
