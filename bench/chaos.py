"""Kills at random: an agent and the trainers it watches, again and again, and every record is accounted for.

``python bench/chaos.py [MINUTES] [SEED]`` (default 5, and a seed by chance, which is printed). Four trainers write into small rings, each at
its own pace. At random moments one is killed and another begins, or the agent is killed (SIGKILL, or now and then SIGTERM) and comes again
after a while, in which rings may be overrun. Meanwhile no counter in ``/metrics`` may be above what was written. When all have ended and
the agent has taken what was left, for each ring the records in the history, each there once and in order, and those counted as lost
are together what was written, exactly.
"""

from __future__ import annotations

import random
import subprocess
import sys
import time
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

sys.path.append(str(Path(__file__).parents[1]))

from bench.agent_load import Agent, running_agent, wait_for
from bench.common import emit, scratch
from commwatch.wire.events import RECORD, RECORD_SIZE, Record
from commwatch.wire.ring import CURSOR
from commwatch.wire.ring_reader import RingReader
from commwatch_agent.history.history import History

MINUTES, TRAINERS = 5.0, 4
#: A ring is overrun after some seconds without an agent.
SLOTS, PER_SECOND = 4096, (200.0, 4000.0)
BETWEEN_S, AWAY_S = (0.05, 1.5), (0.0, 4.0)


def written(reader: RingReader) -> int:
    """Records that a writer which lives no more has put into its ring: those whole beyond its cursor, too."""
    reader.next_n = reader.counter(CURSOR)
    reader.drain(final=True)
    return reader.next_n


class Trainer:
    """A process that writes a ring, seen from outside: its ring stays open here when the agent has removed it."""

    def __init__(self, directory: Path, number: int, chance: random.Random) -> None:
        self.job = f"job{number}"
        self.path, self._count = directory / "run" / "rings" / f"{self.job}.ring", directory / f"{self.job}.count"
        script = str(Path(__file__).with_name("counted_writer.py"))
        pace = (str(SLOTS), str(chance.uniform(*PER_SECOND)))
        command = [sys.executable, script, str(self.path), str(self._count), self.job, *pace]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == b"ready\n"
        self.reader = RingReader(self.path)
        self._process.stdin.write(b"go\n")
        self._process.stdin.flush()

    def kill(self) -> None:
        """SIGKILL, in whatever it is doing."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with suppress(OSError):
                    pipe.close()

    def counted(self) -> int:
        """Records that it says it has written; where it was killed, perhaps one less than there are."""
        return int.from_bytes(self._count.read_bytes(), "little")


class Account(NamedTuple):
    """What became of the records of one ring."""

    written: int
    stored: int
    lost: int


@dataclass
class Done:
    """What was done to them."""

    agents_killed: int = 0
    agents_ended: int = 0
    trainers_killed: int = 0
    looks: int = 0


class Chaos:
    """An agent, trainers, and somebody who kills them.

    Args:
        directory: in memory: for rings and counts.
        state: on disk: for the history.
    """

    def __init__(self, directory: Path, state: Path, seed: int) -> None:
        self._directory, self._run, self._state = directory, directory / "run", state
        self._chance = random.Random(seed)  # noqa: S311 - to be repeated
        self._agent: Agent | None = None
        self._stack = ExitStack()
        self._back_s = 0.0
        self._alive: list[Trainer] = []
        #: All there have been.
        self.trainers: list[Trainer] = []
        self.done = Done()

    def play(self, seconds: float) -> dict[str, Account]:
        """Kill for so long, at least one trainer, then let the agent take what is left; returns what became of each job's records."""
        try:
            for _ in range(TRAINERS):
                self._begin()
            end_s = time.monotonic() + seconds
            while (now := time.monotonic()) < end_s or not (self.done.trainers_killed and self.done.looks):
                if self._agent is None and now >= self._back_s:
                    self._agent = self._stack.enter_context(running_agent(self._run, self._state))
                self._chance.choices((self._kill_trainer, self._kill_agent, self._look), (2, 1, 5))[0]()
                time.sleep(self._chance.uniform(*BETWEEN_S))
        finally:
            for trainer in self._alive:
                trainer.kill()
            self._leave(kill=True)
        with running_agent(self._run, self._state):
            wait_for(lambda: not list((self._run / "rings").glob("*.ring")), "the agent to take what is left")
        return {trainer.job: self._account(trainer) for trainer in self.trainers}

    def _begin(self) -> None:
        trainer = Trainer(self._directory, len(self.trainers), self._chance)
        self._alive.append(trainer)
        self.trainers.append(trainer)

    def _kill_trainer(self) -> None:
        self._alive.pop(self._chance.randrange(len(self._alive))).kill()
        self.done.trainers_killed += 1
        self._begin()

    def _kill_agent(self) -> None:
        if self._agent is not None:
            kill = self._chance.random() < 0.75
            self.done.agents_killed += kill
            self.done.agents_ended += not kill
            self._leave(kill)
            self._back_s = time.monotonic() + self._chance.uniform(*AWAY_S)

    def _leave(self, kill: bool) -> None:
        if self._agent is not None and kill:
            self._agent.kill()
        self._agent = None
        self._stack.close()

    def _look(self) -> None:
        """No counter is above what was written until then."""
        if self._agent is None:
            return
        samples = self._agent.samples()
        for trainer in self.trainers:
            name = f'commwatch_collectives_total{{group="default_pg",job_id="{trainer.job}",op="all_reduce",rank="0"}}'
            exported, there = samples.get(name, 0), trainer.counted() + 1
            assert exported <= there, f"{trainer.job}: {exported:.0f} in /metrics, {there} written"
        self.done.looks += 1

    def _account(self, trainer: Trainer) -> Account:
        count, there = trainer.counted(), written(trainer.reader)
        trainer.reader.close()
        assert count <= there <= count + 1, f"{trainer.job}: counted {count}, {there} in the ring"
        (path,) = self._state.glob("history-*.sqlite")
        with History(path) as history:
            (row,) = history.rings(trainer.job)
            chunks = [chunk for chunk in history.chunks(0, 1 << 62) if chunk.ring == row.id]
        records = [
            Record._make(RECORD.unpack_from(chunk.records, at))
            for chunk in sorted(chunks, key=lambda chunk: chunk.id)
            for at in range(0, len(chunk.records), RECORD_SIZE)
        ]
        numbers = [record.stamp - 1 for record in records]
        assert all(a < b for a, b in pairwise(numbers)), f"{trainer.job}: twice, or out of order"
        assert numbers == [record.seq for record in records], f"{trainer.job}: a record that is not its own"
        found = Account(there, len(records), row.lost)
        assert found.stored + found.lost == found.written, f"{trainer.job}: {found}"
        return found


def main() -> None:
    """Play and print."""
    minutes = float(sys.argv[1]) if len(sys.argv) > 1 else MINUTES
    seed = int(sys.argv[2]) if len(sys.argv) > 2 else random.SystemRandom().randrange(1 << 32)
    print(f"seed {seed}", flush=True)
    with scratch(in_memory=True) as memory, scratch() as disk:
        chaos = Chaos(memory, disk, seed)
        found = chaos.play(minutes * 60).values()
    sums = {name: sum(getattr(each, name) for each in found) for name in Account._fields}
    emit({"seed": seed, "minutes": minutes, "rings": len(found), **sums, **vars(chaos.done)})


if __name__ == "__main__":
    main()
