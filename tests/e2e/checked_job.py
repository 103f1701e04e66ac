"""A real job whose data is checked each time, and what an agent has found in it."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

from tests import prefork
from tests.e2e.torchjob import JOBS
from tests.helpers import RunningAgent, clean_env, free_port


class CheckedJob:
    """The ranks of a job with checks at each step and operation.

    Args:
        variables: further ones of its environment; they override those that every job has.
    """

    def __init__(self, directory: Path, name: str, ranks: int, script: str, *arguments: str, **variables: str) -> None:
        where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(ranks)}
        watched = {"COMMWATCH": "1", "COMMWATCH_DIR": str(directory), "COMMWATCH_JOB": name}
        checks = {"COMMWATCH_CHECKSUM_EVERY": "1", "COMMWATCH_CHECKSUM_BUDGET": "0"}
        env = {**where, **watched, **checks, **variables}
        command = prefork.command(JOBS / script, *arguments)
        self._ranks = [
            subprocess.Popen(command, env=clean_env(**env, RANK=str(rank)), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
            for rank in range(ranks)
        ]  # fmt: skip

    def end(self) -> list[str]:
        """Kill the ranks; return the lines that they have printed to standard error."""
        for rank in self._ranks:
            rank.kill()
        return [line for rank in self._ranks for line in rank.communicate()[1].splitlines()]

    def said(self) -> list[str]:
        """Wait for the end of the ranks; return what they have said, sorted."""
        printed = [rank.communicate(timeout=120)[0] for rank in self._ranks]
        return sorted(line for each in printed for line in each.splitlines() if line.startswith("said"))


def own(printed: list[str]) -> list[str]:
    """The lines of commwatch."""
    return [line for line in printed if line.startswith("commwatch")]


def verdicts_of(running: RunningAgent, job: str) -> list[dict[str, Any]]:
    """The verdicts on a job's data, once the agent knows it."""
    if job not in [each["job_id"] for each in running.get("/api/v1/jobs")]:
        return []
    found: list[dict[str, Any]] = running.get(f"/api/v1/verdicts?job={job}")
    return [each for each in found if each["kind"] == "corruption"]
