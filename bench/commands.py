"""How long commands take from start to end, in ms, without an agent: the help, the list of jobs, and the report of a small job.

The job is the synthetic one, some seconds of it, recorded by a real agent that has ended since.
"""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from statistics import median

sys.path.append(str(Path(__file__).parents[1]))

from bench.agent_load import SETTLE_S, USUAL_PER_SECOND, loaded_agent
from bench.common import emit, scratch
from bench.synthetic import JOB

ROUNDS = 10


def took_ms(*arguments: str) -> float:
    """Time of one command."""
    begin = time.perf_counter()
    subprocess.run([sys.executable, *arguments], stdout=subprocess.DEVNULL, check=True)
    return 1e3 * (time.perf_counter() - begin)


def main() -> None:
    """Record the job, measure and print."""
    with scratch(in_memory=True) as run, scratch() as state:
        with loaded_agent(run / "run", state, USUAL_PER_SECOND):
            time.sleep(SETTLE_S)
        where = ("--state", str(state))
        commwatch = ("-m", "commwatch")
        arms = {
            "python": ("-c", "pass"),
            "help": (*commwatch, "--help"),
            "jobs": (*commwatch, "jobs", *where),
            "report": (*commwatch, "report", JOB, *where),
        }
        rounds = [{f"{arm}_ms": took_ms(*command) for arm, command in arms.items()} for _ in range(ROUNDS)]
    emit({name: median(each[name] for each in rounds) for name in rounds[0]})


if __name__ == "__main__":
    main()
