"""Runs healthy jobs of ten kinds (``jobs/kinds.py``), two at a time, all of whose steps and collectives are checked for corrupt data; prints a table of
what was compared, and of verdicts. Arguments: for how many seconds each (120), and the kinds (all).
"""

from __future__ import annotations

import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from tests import prefork
from tests.faults.flips import EACH
from tests.faults.run import POLL_S, Place, ranks
from tests.helpers import agent

JOB = Path(__file__).parent / "jobs" / "kinds.py"
RANKS = 4
KINDS = (
    "ddp",
    "hsdp",
    "fsdp2",
    "tensor_parallel",
    "pipeline",
    "experts",
    "accumulated",
    "frozen",
    "two_optimizers",
    "half_gradients",
)


class Compared(NamedTuple):
    """What became of one job."""

    #: Comparisons of weights, and of collectives.
    replicas: float
    collectives: float
    #: Ranks that run at the end.
    running: int
    #: Verdicts at any time, as kind and text.
    verdicts: tuple[str, ...]


def compared(kind: str, seconds: float) -> Compared:
    """Run a job for so long."""
    command, says = prefork.command(JOB, kind), dict[str, None]()
    with (
        tempfile.TemporaryDirectory() as made,
        agent(Path(made)) as running,
        ranks(command, [Place(Path(made))] * RANKS, kind, "all", EACH),
    ):
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            says |= {f"{each['kind']}: {each['says']}": None for each in running.get("/api/v1/verdicts")}
            time.sleep(POLL_S)
        samples = running.samples()
        run = sum(each["state"] == "running" for each in running.get("/api/v1/ranks"))
    replicas, collectives = (
        samples.get(f'commwatch_{what}_checks_total{{job_id="{kind}"}}', 0) for what in ("replica", "collective")
    )
    return Compared(replicas, collectives, run, tuple(says))


def main() -> None:
    """Run those that were asked for; exit code 1 if one has a verdict on corrupt data, or compares nothing."""
    seconds, kinds = float((*sys.argv[1:2], "120")[0]), sys.argv[2:] or KINDS
    right = True
    print(
        "| job | comparisons of weights | of collectives | ranks that run at the end | verdicts |\n|---|---|---|---|---|"
    )
    with ThreadPoolExecutor(2) as pool:
        for kind, found in zip(kinds, pool.map(lambda kind: compared(kind, seconds), kinds), strict=True):
            right &= (
                found.collectives > 0
                and found.running == RANKS
                and not any("corruption" in each for each in found.verdicts)
            )
            print(
                f"| {kind} | {found.replicas:.0f} | {found.collectives:.0f} | {found.running} | {'; '.join(found.verdicts) or '–'} |",
                flush=True,
            )
    sys.exit(not right)


if __name__ == "__main__":
    main()
