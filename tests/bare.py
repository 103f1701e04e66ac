"""A Python with torch and all that belongs to it, and without commwatch: a trainer's."""

from __future__ import annotations

import importlib.util
import shlex
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

TREE = Path(__file__).parents[1]


def packages() -> Path:
    """Where this Python has torch."""
    spec = importlib.util.find_spec("torch")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parents[1]


def bare_python(directory: Path) -> Path:
    """The Python of a new virtual environment, with links to what is installed here, but for what is ours."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", directory], check=True)
    (site,) = directory.glob("lib/python*/site-packages")
    for installed in packages().iterdir():
        if "commwatch" not in installed.name and installed.suffix != ".pth":
            (site / installed.name).symlink_to(installed)
    return directory / "bin" / "python"


def opened(hold: Path) -> str:
    """Shell commands for root, in mounts of its own, after which every user can run this Python, though it lies in a private folder.

    Args:
        hold: an empty folder.
    """
    private = defaultdict(list)
    for path in {Path(each).resolve() for each in (sys.base_prefix, sys.prefix, packages(), TREE)}:
        closed = [above for above in reversed(path.parents) if not above.stat().st_mode & 0o001]
        if closed:
            private[closed[0]].append(path)
    commands = ["true"]
    for folder, paths in private.items():
        held = {hold / f"{folder.name}-{n}": path for n, path in enumerate(sorted(paths))}
        commands += [shlex.join(["mkdir", "-p", *map(str, held)])]
        commands += [shlex.join(["mount", "--bind", str(path), str(place)]) for place, path in held.items()]
        commands += [shlex.join(["mount", "-t", "tmpfs", "-o", "mode=755", "tmpfs", str(folder)])]
        for place, path in held.items():
            commands += [shlex.join(["mkdir", "-p", str(path)]), shlex.join(["mount", "--bind", str(place), str(path)])]
    return " && ".join(commands)
