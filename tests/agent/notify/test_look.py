"""What an agent looks at to conclude."""

from __future__ import annotations

import getpass
import os
import threading
import time
from pathlib import Path

from commwatch_agent.analysis.queries import QueryService
from commwatch_agent.ingest.jobs import JobTable
from commwatch_agent.notify.look import METRICS_S, NodeLook, RankLook
from commwatch_collectors.node import process
from tests.agent.analysis.test_uneven_work import RANKS, Loop, S, in_turn
from tests.helpers import identity


def test_waits(tmp_path: Path) -> None:
    """How ranks wait for each other is looked up with the metrics, and stays known until it is looked up again."""
    aggregate = JobTable()
    Loop(in_turn, steps=400).run(aggregate, time.monotonic_ns() - 25 * S)
    look = NodeLook(RankLook(QueryService(tmp_path / "h.sqlite", aggregate, threading.RLock())), tuple)
    waits = look(1000.0, 50.0).waits
    assert set(waits["job"].waits) == set(RANKS)
    aggregate.jobs.clear()
    assert look(1001.0, 51.0).waits == waits
    assert not look(1000.0 + METRICS_S, 50.0 + METRICS_S).waits


def test_owner(tmp_path: Path) -> None:
    """A job's user and script are those of a rank's process; of one that the agent does not see, the ring's owner; the setting leaves them out."""
    aggregate = JobTable()
    totals = aggregate.open("a", identity(), os.getuid(), run="key")
    job = aggregate.jobs["job"]
    verdicts = RankLook(QueryService(tmp_path / "h.sqlite", aggregate, threading.RLock()))
    assert verdicts.owner(job) == (getpass.getuser(), "")
    totals.pid = os.getpid()
    user, script = verdicts.owner(job)
    assert user == getpass.getuser()
    assert script == process.script(os.getpid())
    totals.pid = None
    assert verdicts.owner(job) == (user, script)
    verdicts.named = ("script",)
    assert verdicts.owner(job) == ("", script)
    verdicts.named = ()
    assert verdicts.owner(job) == ("", "")
