"""``commwatch diagnose`` against real agents: what they answer comes through whole."""

from __future__ import annotations

from pathlib import Path

from commwatch.collectors import events as ev
from commwatch.diagnose import ask, conclude
from tests.agent.test_api import rings_of
from tests.helpers import MS, Trainer, agent, commwatch, group_entry, identity, operation, wait_for


def test_ranks_with_failures(tmp_path: Path) -> None:
    """Operations that raised are judged as those in flight are: a rank that passed another size is named."""
    with agent(tmp_path) as running:
        trainers = [Trainer(rings_of(tmp_path) / f"job.r0.{n}.ring", identity(rank=n)) for n in (0, 1)]
        try:
            for n, trainer in enumerate(trainers):
                trainer.call("name", [(group_entry(),)])
                trainer.write([operation(start_ns=MS, end_ns=2 * MS, seq=3, size=8 << n, flags=ev.FAILED)])
            wait_for(lambda: sum(len(rank["failed"]) for rank in running.get("/api/v1/ranks")) == 2, "the failures")
            seen = ask([running.url], None)
            assert [failed.size_bytes for rank in seen.ranks for failed in rank.failed] == [8, 16]
            assert conclude(seen) == []  # they raised when this machine was started
            done = commwatch("diagnose", "--dir", tmp_path)
            assert (done.returncode, done.stderr) == (0, "")
        finally:
            for trainer in trainers:
                trainer.kill()
