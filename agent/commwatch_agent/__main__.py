"""``python -m commwatch_agent``: the commands, also where another ``commwatch`` is first on the path."""

import sys

from commwatch_agent.cli import main

sys.exit(main())
