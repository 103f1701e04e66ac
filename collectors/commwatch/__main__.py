"""``python -m commwatch``: the commands, which are those of the agent. It need not be installed beside this package."""

from __future__ import annotations

import sys


def main() -> int:
    """Run the command line of the agent; where the agent is not installed, print the remedy and return 2."""
    try:
        from commwatch_agent.__main__ import main as run
    except ModuleNotFoundError as error:
        if error.name != "commwatch_agent":
            raise
        from commwatch.wire.errors import ONLY_PROBE, REMEDY

        print(f"commwatch: {ONLY_PROBE}; {REMEDY}", file=sys.stderr)
        return 2
    return run()


if __name__ == "__main__":
    sys.exit(main())
