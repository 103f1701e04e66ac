"""A healthy job that runs beside the other tests, and its agent's conclusions about it."""

from __future__ import annotations

import subprocess
import threading
import time
from pathlib import Path
from typing import Any

from tests import prefork
from tests.e2e.torchjob import JOBS
from tests.helpers import PATIENCE_S, RunningAgent, clean_env, free_port

RANKS, PAUSE_S = 3, 0.5


class QuietJob:
    """Three ranks, and a thread that asks for verdicts twice a second."""

    def __init__(self, running: RunningAgent, directory: Path) -> None:
        where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(RANKS)}
        watched = {
            "COMMWATCH": "1",
            "COMMWATCH_DIR": str(directory),
            "COMMWATCH_JOB": "quiet",
        }
        self._agent = running
        self._ranks = [
            subprocess.Popen(prefork.command(JOBS / "healthy.py"), env=clean_env(**where, **watched, RANK=str(rank)), stdin=subprocess.PIPE)
            for rank in range(RANKS)
        ]  # fmt: skip
        self.verdicts: list[Any] = []
        self.asked = 0
        self.began = time.monotonic()
        self._stop = threading.Event()
        self._watch = threading.Thread(target=self._ask, daemon=True)
        self._watch.start()

    @property
    def age_s(self) -> float:
        """For how long it has run."""
        return time.monotonic() - self.began

    def steps(self) -> int:
        """Steps of rank 0 so far."""
        return int(self._agent.samples().get('commwatch_steps_total{job_id="quiet",rank="0"}', 0))

    def is_old(self, age_s: float, steps: int) -> bool:
        """It has run for longer than this, and has made more steps, among them the one with a checkpoint."""
        return self.age_s > age_s and self.steps() > steps

    def running(self) -> bool:
        """No rank has ended."""
        return all(rank.poll() is None for rank in self._ranks)

    def _ask(self) -> None:
        while not self._stop.wait(PAUSE_S):
            self.verdicts += self._agent.get("/api/v1/verdicts")
            self.asked += 1

    def end(self) -> None:
        """Let it come to its end, or make it."""
        self._stop.set()
        self._watch.join()
        for rank in self._ranks:
            assert rank.stdin is not None
            rank.stdin.close()
        for rank in self._ranks:
            try:
                rank.wait(PAUSE_S + PATIENCE_S)
            finally:
                rank.kill()
                rank.wait()
