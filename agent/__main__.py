"""``python -m commwatch``."""

import sys

from commwatch.cli import main

sys.exit(main())
