"""A real job in which each rank but the last does something else: what each does is known while the last one waits, and kept."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests import prefork
from tests.e2e.torchjob import JOBS
from tests.helpers import SOON_HUNG, agent, clean_env, free_port, wait_for

#: By what a rank does: the kind of its activity, and whether it works.
DOES = {"write": ("writing", True), "lock": ("asleep", False), "compute": ("computing", True), "child": ("child", True)}


@contextmanager
def job(directory: Path) -> Iterator[None]:
    """The job; its ranks end with the block."""
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(len(DOES) + 1)}
    watched = {"COMMWATCH": "1", "COMMWATCH_DIR": str(directory), "COMMWATCH_JOB": "job"}
    command = prefork.command(JOBS / "activities.py", ",".join(DOES), str(directory / "checkpoint"))
    ranks = [
        subprocess.Popen(command, env=clean_env(**where, **watched, RANK=str(rank))) for rank in range(len(DOES) + 1)
    ]
    try:
        yield
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()


def test_each_rank(tmp_path: Path) -> None:
    """What each rank does is seen while the last one waits for it, the last one does nothing, and the incident keeps what its culprit does."""
    with agent(tmp_path, constants=SOON_HUNG) as running, job(tmp_path):
        seen: list[set[tuple[str, bool | None]]] = [set() for _ in range(len(DOES) + 1)]

        def all_seen() -> bool:
            for view in running.get("/api/v1/ranks"):
                if view["activity"] is not None:
                    seen[view["rank"]].add((view["activity"]["kind"], view["activity"]["is_working"]))
            return all(expected in of_rank for expected, of_rank in zip(DOES.values(), seen, strict=False))

        wait_for(all_seen, "what each rank does")
        assert not any(works for _, works in seen[1])
        assert seen[-1] == set()

        def kept() -> bool:
            incidents = [running.get(f"/api/v1/incidents/{each['id']}") for each in running.get("/api/v1/incidents")]
            texts = [item["text"] for each in incidents for item in each["evidence"] if item["source"] == "process"]
            return "rank 1 is asleep in a lock" in texts

        wait_for(kept, "the evidence of rank 1")
