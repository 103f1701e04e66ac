"""A real job in which each rank but the last does something else: what each does is known while the last one waits, and kept."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests import prefork
from tests.e2e.torchjob import JOBS
from tests.helpers import RunningAgent, agent, clean_env, free_port, wait_for

DOES = {"write": "writing", "lock": "asleep", "compute": "computing", "child": "child"}
WORKS = {"writing": True, "asleep": False, "computing": True, "child": True}


@contextmanager
def job(directory: Path) -> Iterator[None]:
    """The job; its ranks and what they have begun end with the block."""
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(len(DOES) + 1)}
    watched = {"COMMWATCH": "1", "COMMWATCH_DIR": str(directory), "COMMWATCH_JOB": "job"}
    command = prefork.command(JOBS / "activities.py", ",".join(DOES), str(directory / "checkpoint"))
    ranks = [
        subprocess.Popen(command, env=clean_env(**where, **watched, RANK=str(rank)), start_new_session=True)
        for rank in range(len(DOES) + 1)
    ]
    try:
        yield
    finally:
        for rank in ranks:
            os.killpg(rank.pid, signal.SIGKILL)
            rank.wait()


def known(running: RunningAgent) -> list[dict[str, Any] | None]:
    """What each rank does, by rank."""
    return [view["activity"] for view in running.get("/api/v1/ranks")]


def test_each_rank(tmp_path: Path) -> None:
    """Each rank has its activity while the last one waits for it, the last one has none, and the incident keeps what its culprit does."""
    expected = [*DOES.values(), None]
    with agent(tmp_path) as running, job(tmp_path):
        found = list[dict[str, Any] | None]()

        def all_known() -> bool:
            found[:] = known(running)
            return [each and each["kind"] for each in found] == expected

        wait_for(all_known, f"{expected}; there is {found}")
        assert [each["is_working"] for each in found if each] == list(WORKS.values())

        def kept() -> bool:
            incidents = [running.get(f"/api/v1/incidents/{each['id']}") for each in running.get("/api/v1/incidents")]
            texts = [item["text"] for each in incidents for item in each["evidence"] if item["source"] == "process"]
            return "rank 1 is asleep in a lock" in texts

        wait_for(kept, "the evidence of rank 1")
