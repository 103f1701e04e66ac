"""What ``commwatch.cli`` is in a folder of ``commwatch probe install``: it says that the probe has no commands, and what to do."""

from __future__ import annotations

import sys
from pathlib import Path


def main() -> int:
    """One line; the exit code is 2."""
    found = Path(__file__).resolve().parents[1]
    print(
        f"commwatch: {found}, which is on PYTHONPATH, holds the probe alone and hides the commands; "
        "start them without it: env -u PYTHONPATH commwatch ...",
        file=sys.stderr,
    )
    return 2
