"""Readers that are slow or suspended do not keep the write-ahead log of the history growing."""

from __future__ import annotations

import fcntl
import os
import random
import signal
import struct
import subprocess
import sys
import termios
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from itertools import count, islice
from pathlib import Path

import pytest

from commwatch_agent.analysis.queries import QueryService
from commwatch_agent.config import Config
from commwatch_agent.history.chunks import CHUNK_RECORDS
from commwatch_agent.history.history import History
from commwatch_agent.history.operations import Operation, Reader
from commwatch_agent.history.store import Writer
from commwatch_agent.model.cells import GroupInfo, StepRecord
from commwatch_agent.model.node_counters import SENT, CounterSample, NodeCounter
from commwatch_agent.report import table_export
from commwatch_agent.report.timeline_export import Window, own_trace
from tests.helpers import EPOCH_NS, clean_env, identity, operation, packed, wait_for

RANKS, CHUNKS = 2, 12
#: Bytes that the write-ahead log may have at most: SQLite empties it when it has 4 MB, and a commit may come in between.
MOST_LOG_BYTES = 12 << 20


@cache
def chunk(number: int) -> bytes:
    """The records of a chunk, which all ranks and tests share."""
    chance, at = random.Random(number), number * CHUNK_RECORDS
    done = [
        operation(start_ns=n * 1000, end_ns=n * 1000 + chance.randrange(1000), seq=n, size=chance.randrange(1 << 40))
        for n in range(at, at + CHUNK_RECORDS)
    ]
    return packed(*done, first=at)


#: Of the size of all the steps and measurements in the time of a chunk.
_LARGE = NodeCounter(SENT, "x" * 450_000, 1.0)


class Recorded:
    """A history that an agent writes."""

    def __init__(self, path: Path) -> None:
        self.path, self._store = path, Writer(path)
        self._rings = [self._store.ring(str(rank), identity(rank=rank), EPOCH_NS) for rank in range(RANKS)]
        self._numbers = count()
        for ring in self._rings:
            self._store.group(ring.id, 0, GroupInfo("g", "data", "g", "", (0, 1), 2, True, "gloo"))
        self.write(CHUNKS)

    def write(self, chunks: int) -> None:
        """Write chunks of all ranks, and the steps and measurements of the same time, in a commit each."""
        for number in islice(self._numbers, chunks):
            at = number * CHUNK_RECORDS
            steps = [StepRecord(n, n * 1000, n * 1000 + 999, 5, None) for n in range(at, at + CHUNK_RECORDS)]
            for ring in self._rings:
                self._store.append(ring, chunk(number), at + CHUNK_RECORDS)
                self._store.steps(ring, steps, None)
            for n in range(CHUNK_RECORDS):
                self._store.node_sample(CounterSample(EPOCH_NS + (at + n) * 1000, []))
            assert self._store.commit()

    def write_on(self, commits: int) -> None:
        """Write a chunk of all ranks in each commit, and a large measurement, with which the write-ahead log grows by 0.5 MB."""
        for number in islice(self._numbers, commits):
            at = number * CHUNK_RECORDS
            for ring in self._rings:
                self._store.append(ring, chunk(number), at + CHUNK_RECORDS)
                self._store.steps(ring, [StepRecord(at, at * 1000, at * 1000 + 999, 5, None)], None)
            self._store.node_sample(CounterSample(EPOCH_NS + at * 1000, [_LARGE]))
            assert self._store.commit()

    @property
    def log_bytes(self) -> int:
        """Length of the write-ahead log."""
        return self.path.with_name(f"{self.path.name}-wal").stat().st_size

    def close(self) -> None:
        """End the agent."""
        self._store.close()


@pytest.fixture
def recorded(tmp_path: Path) -> Iterator[Recorded]:
    made = Recorded(Config(dir=tmp_path / "run", state=tmp_path / "state").history)
    yield made
    made.close()


def of_export(recorded: Recorded, table: str, stack: ExitStack) -> Iterable[object]:
    """The rows of a table of ``commwatch export``."""
    history = stack.enter_context(History(recorded.path))
    return table_export._tables(QueryService(recorded.path), history, "job", None)[table]


def of_timeline(recorded: Recorded, what: str, stack: ExitStack) -> Iterable[object]:
    """What ``commwatch timeline`` reads."""
    own = stack.enter_context(own_trace(recorded.path, "job", Window(None), (), alone=False))
    found: Iterable[object] = getattr(own, what)
    return found


@pytest.mark.parametrize(
    ("reading", "what"),
    [
        (of_export, "operations"),
        (of_export, "steps"),
        (of_export, "waits"),
        (of_timeline, "operations"),
        (of_timeline, "steps"),
        (of_timeline, "samples"),
    ],
)
def test_slow_reader(recorded: Recorded, reading: object, what: str) -> None:
    """While a reader rests between two rows, the agent empties the write-ahead log; it then reads on, each row once."""
    assert callable(reading)
    with ExitStack() as stack:
        left = iter(reading(recorded, what, stack))
        first = list(islice(left, 5))
        recorded.write_on(60)
        assert recorded.log_bytes < MOST_LOG_BYTES
        rest = list(left)
    if what != "waits":
        number = CHUNKS * CHUNK_RECORDS * (1 if what == "samples" else RANKS)
        assert len({str(each) for each in [*first, *rest]}) == len(first) + len(rest) == number


def test_log_becomes_short_again(recorded: Recorded) -> None:
    """A log that a transaction of a reader kept growing takes 16 MiB at most, once that has ended."""
    with History(recorded.path) as history:
        history.freeze()
        assert history.rings()
        recorded.write_on(60)
        assert recorded.log_bytes > 16 << 20
    recorded.write_on(30)
    assert recorded.log_bytes <= 16 << 20


@contextmanager
def timeline_into_a_pipe(directory: Path) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """``commwatch timeline`` of the job, suspended when the pipe to which it writes is full, and that pipe."""
    os.mkfifo(directory / "pipe")
    pipe = os.open(directory / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    os.set_blocking(pipe, True)
    where = "--dir", str(directory / "run"), "--state", str(directory / "state"), "--out", str(directory / "pipe")
    command = [sys.executable, "-m", "commwatch", "timeline", "job", "--last", "all", *where]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=clean_env()) as writing:
        size = fcntl.fcntl(pipe, fcntl.F_GETPIPE_SZ)
        wait_for(
            lambda: struct.unpack("i", fcntl.ioctl(pipe, termios.FIONREAD, bytes(4)))[0] > size // 2, "a full pipe"
        )
        writing.send_signal(signal.SIGSTOP)
        try:
            yield writing, pipe
        finally:
            writing.send_signal(signal.SIGCONT)
            os.close(pipe)


def test_suspended_timeline(recorded: Recorded, tmp_path: Path) -> None:
    """While ``commwatch timeline`` is suspended, or its pipe is not read, the agent empties the write-ahead log; then it writes all of the job."""
    with timeline_into_a_pipe(tmp_path) as (writing, pipe):
        recorded.write_on(60)
        assert recorded.log_bytes < MOST_LOG_BYTES
        writing.send_signal(signal.SIGCONT)
        while os.read(pipe, 1 << 20):
            pass
        assert writing.stdout is not None
        output = writing.stdout.read()
        assert writing.wait() == 0
    assert f"{RANKS * CHUNKS * CHUNK_RECORDS} operations" in output.decode()


def test_chunks_that_go_and_grow(tmp_path: Path) -> None:
    """Operations that are added to a chunk while it waits to be read are left out, and chunks that are removed are counted."""
    store = Writer(tmp_path / "h.sqlite")
    ring = store.ring("a", identity(), 0)

    def write(begin: int, end: int) -> None:
        sizes = random.Random(begin)
        done = [operation(start_ns=n, end_ns=n * 1000, seq=n, size=sizes.randrange(1 << 40)) for n in range(begin, end)]
        store.append(ring, packed(*done, first=begin), end)
        assert store.commit()

    write(0, 3 * CHUNK_RECORDS)
    write(3 * CHUNK_RECORDS, 3 * CHUNK_RECORDS + 10)
    with History(store.path) as history:
        reader = Reader(history, {each.id: each for each in history.rings()}, in_pieces=True)
        left = reader.newest_first(0, 1 << 62, None, lambda _: True)
        seen = [next(left)]
        write(3 * CHUNK_RECORDS + 10, 3 * CHUNK_RECORDS + 20)
        for _ in store.tidy(0, 8_000, 1 << 40, 1 << 62):
            pass
        assert store.commit()
        seen += left
        gone = history.removed
    store.close()
    assert [each.seq for each in seen] == list(range(3 * CHUNK_RECORDS + 9, 3 * CHUNK_RECORDS + 9 - len(seen), -1))
    assert isinstance(seen[0], Operation)
    assert gone > 0
    assert len(seen) + gone * CHUNK_RECORDS >= 3 * CHUNK_RECORDS + 10
