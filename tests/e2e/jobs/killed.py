"""Processes that flood their ring, killed at random times; argument: how many. They are forked: importing torch takes longer."""

import os
import random
import signal
import sys
import time
from pathlib import Path

import flood
from common import say

import commwatch


def records(rings: Path, job: str) -> int:
    # Where the ring keeps its cursor.
    return sum(int.from_bytes(path.read_bytes()[64:72], "little") for path in rings.glob(f"{job}.*.ring"))


def main() -> None:
    rings = Path(os.environ["COMMWATCH_DIR"]) / "rings"
    after = []
    for n in range(int(sys.argv[1])):
        child = os.fork()
        if child == 0:
            try:
                os.environ["COMMWATCH_JOB"] = f"life{n}"
                commwatch.install()
                flood.run(0, Path("/"))
            finally:
                os._exit(1)
        while records(rings, f"life{n}") < 1000:
            assert os.waitpid(child, os.WNOHANG) == (0, 0), "it has ended by itself"
            time.sleep(0.01)
        after.append(random.uniform(0, 0.1))
        time.sleep(after[-1])
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    say(after)


if __name__ == "__main__":
    main()
