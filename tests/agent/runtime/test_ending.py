"""SIGTERM ends an agent whenever it comes."""

from __future__ import annotations

import subprocess
import sys

from tests.helpers import PATIENCE_S, clean_env

#: Sends SIGTERM before each line that the main thread runs while it waits, those of the standard library included.
AT_EVERY_LINE = """
import signal
import sys
from commwatch_agent.runtime.ending import Ending

def send(*_):
    signal.raise_signal(signal.SIGTERM)
    return send

ending = Ending()
assert not ending.requested(0)
sys.settrace(send)
found = ending.requested(60)
sys.settrace(None)
assert found == "SIGTERM", found
signal.raise_signal(signal.SIGINT)
assert ending.requested(0)
print("over")
"""


def test_at_every_line() -> None:
    """A signal at any line of the waiting thread is a request to end, and does not block it."""
    command = [sys.executable, "-c", AT_EVERY_LINE]
    done = subprocess.run(command, env=clean_env(), capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert (done.returncode, done.stdout) == (0, "over\n"), done.stderr
