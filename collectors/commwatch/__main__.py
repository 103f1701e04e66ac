"""``python -m commwatch`` and the command ``commwatch``: the commands are those of the agent, which need not be installed beside this package."""

from __future__ import annotations

import sys


def main() -> int:
    """Run the command line of the agent; where the agent or what it needs is not installed, print the remedy and return 2."""
    try:
        from commwatch_agent.cli import main as run

        return run()
    except ModuleNotFoundError as error:
        if str(error.name).startswith("commwatch."):
            raise
        print(
            f"commwatch: only the probe is installed here (no module {error.name}); install commwatch in an environment of its own, such as "
            "with `uv tool install commwatch`, and use its commands: `commwatch run` records jobs of every environment",
            file=sys.stderr,
        )
        return 2


if __name__ == "__main__":
    sys.exit(main())
