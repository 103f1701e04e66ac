"""``commwatch.cli`` in a folder of ``commwatch probe install``: explains that the probe has no commands."""

from __future__ import annotations

import sys
from pathlib import Path


def main() -> int:
    """Print one line; return the exit code 2."""
    found = Path(__file__).resolve().parents[1]
    print(
        f"commwatch: {found}, which is on PYTHONPATH, has only the probe and hides the commands; "
        "run them without it: env -u PYTHONPATH commwatch ...",
        file=sys.stderr,
    )
    return 2
