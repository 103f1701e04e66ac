"""The product of all limits: with all tables of all rings full at once, the agent stays below 512 MB."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from commwatch.wire import events as ev
from commwatch.wire import ring, splits
from commwatch.wire.ring_reader import RingReader
from commwatch_agent.history.store import Writer
from commwatch_agent.ingest.batches import Batch, ingest, ingest_records
from commwatch_agent.ingest.intake import MOST_RINGS
from commwatch_agent.ingest.jobs import JobTable
from commwatch_agent.ingest.rank_totals import RankTotals
from commwatch_agent.ingest.rings.source import Source
from commwatch_agent.ingest.tables.weights import ALL_BYTES, MOST_ENDED
from commwatch_agent.ingest.why_late import MOST_SAMPLES, Sample
from commwatch_agent.model.cells import SLOT_NS
from commwatch_agent.model.names_file import _MOST_PEERS, _MOST_SUMS
from commwatch_agent.model.runs import origin_of
from commwatch_collectors.node.process import Usage
from tests.helpers import EPOCH_NS, MS, group_entry, identity, mark, operation, packed, write_ring

pytestmark = pytest.mark.long

MOST_BYTES = 512_000_000
OWNERS, JOBS = 5, 64
#: Rings that write far more than the others.
LOUD = 20
GROUPS = 256


def hostile_identity(number: int) -> dict[str, Any]:
    """As many values as an identity may have."""
    return identity(f"job{number % JOBS}", number, MOST_RINGS, **{f"x{n}": [] for n in range(50)})


def names(number: int, groups: int) -> Iterator[dict[str, Any]]:
    """All kinds of names, as long as they may be."""
    for code in range(256):
        yield (
            {"op": code, "name": f"op {number} {code} {'x' * 150}"}
            if code > 100
            else {"dtype": code, "name": "d" * 200}
        )
    for n in range(groups):
        ranks = tuple(range(n, n + 3 + (number + n) % 50))
        yield {
            **group_entry(n, ranks, f"{'long' * 100} {number} {n}"),
            "group_id": f"{number % JOBS} {n}",
            "size": 3000,
        }
    yield {"peers": [f"http://host{number}-{n}.example.com:1" for n in range(_MOST_PEERS)]}
    for n in range(1 + groups // 32):
        yield {"replicas": n, "in": 0, "key": f"k{n}", "tensors": [f"layer.{number}.{k}" for k in range(_MOST_SUMS)]}
    yield {"nccl_log": "/log/" + "x" * 4000}
    yield {"inspector": "/dump/" + "x" * 4000}
    for n in range(8):
        yield {"output": f"/out/{n}" + "x" * 4000, "device": number, "inode": n, "size": 1 << 40}


def records(number: int, count: int, at_ns: int) -> Iterator[tuple[int, ...]]:
    """Records that open as many kinds, peers, steps, intervals, waits and pending collectives as there are records."""
    chance = random.Random(number * 1000 + at_ns)
    ops = sorted(ev.OP_CODE)
    for n in range(count):
        begin = at_ns + n * 7 * MS % SLOT_NS
        end = begin + int(10 ** chance.uniform(1, 9))
        group, size, what = chance.randrange(GROUPS), 1 << chance.randrange(60), chance.randrange(8)
        where = {"start_ns": begin, "end_ns": end, "launch_ns": begin}
        if what == 0:
            yield mark(n, begin + 1, optimizer=chance.randrange(1 << 20), exposed_ns=1)
        elif what == 1:
            yield operation(
                chance.choice(("send", "recv")), peer=chance.randrange(1 << 30), group=group, waited_us=9, **where
            )
        elif what == 2:
            yield operation("all_reduce", group=chance.randrange(1 << 16), seq=n, flags=ev.UNTIMED, **where)
        elif what == 3:
            yield operation("broadcast", group=group, seq=n, peer=0, size=size, **where)
        elif what == 4:
            nccl = operation(
                "all_gather", group=group, seq=n, size=size, timing=ev.BY_NCCL, tag=1 + chance.randrange(100), **where
            )
            yield (*nccl[:-1], chance.randrange(1 << 16))
        else:
            yield operation(chance.choice(ops), group=group, seq=n, size=size, dtype=chance.randrange(256), **where)


def checksums(number: int, count: int) -> Iterator[tuple[int, ...]]:
    """Checks of parameters and of collectives that the other ranks never make."""
    for n in range(count):
        for place in range(4):
            tag = n % 8 if n % 2 else -ev.OP_CODE["all_reduce"]
            yield (ev.CHECKSUM, 0, n % GROUPS, place, tag, n, number, n, n, 1 << 40, 0, 0, 0, 0)


class Agent:
    """What an agent keeps of its rings."""

    def __init__(self, directory: Path) -> None:
        self.directory, self.aggregate, self.store = directory, JobTable(), Writer(directory / "h.sqlite")
        self.sources: list[Source] = []
        self.written = 0

    def open(self, number: int) -> None:
        """Open a ring."""
        path = write_ring(self.directory / "rings", [], [], slots=64, **hostile_identity(number)).path
        reader = RingReader(path)
        row = self.store.ring(str(path), reader.identity, EPOCH_NS, number % OWNERS)
        totals = self.aggregate.open(str(path), reader.identity, number % OWNERS)
        totals.ops = dict(totals.ops)
        self.sources.append(Source(reader, row, totals, origin_of(reader.identity, number % OWNERS)))

    def fill(self, source: Source, count: int, at_ns: int) -> None:
        """Count records of a ring and store them, as the intake does."""
        totals, number = source.totals, source.totals.rank
        data = packed(*checksums(number, count // 8), *records(number, count, at_ns), first=self.written)
        self.written += len(data) // ev.RECORD_SIZE
        ingest([Batch(totals, data, self.written)])
        self.store.append(source.row, data, self.written)
        in_flight = [
            ev.Record._make((n, *operation(start_ns=n + (1 << 40), end_ns=0), n)) for n in range(ring.IN_FLIGHT_SLOTS)
        ]
        totals.hold_in_flight(in_flight)
        totals.hold_splits(bytes([number % 256]) * splits.AREA_BYTES)
        for n in range(MOST_SAMPLES):
            totals.add_sample(Sample(n + (1 << 40), Usage(n, n, n, n)))

    def tick(self, at_ns: int) -> None:
        """Hand sums and steps to the history."""
        for source in self.sources:
            source.totals.tick(EPOCH_NS + at_ns)
            self.store.rollups(source.row.id, source.totals.take_closed(), self.written)
            self.store.steps(source.row, source.totals.steps.take(), None)
            if self.store.is_crowded:
                assert self.store.commit()
        assert self.store.commit()
        self.aggregate.retire(at_ns)


def peak_bytes() -> int:
    """The most memory that this program took; ``ru_maxrss`` would include that of the process that started it."""
    status = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) << 10 for line in status if line.startswith("VmHWM:"))


def main(directory: str) -> None:
    """Fill everything, and print what the process took at most."""
    before, agent = peak_bytes(), Agent(Path(directory))
    figures = {"before": before}
    for number in range(MOST_RINGS):
        agent.open(number)
    figures["opened"] = peak_bytes()
    for source in agent.sources:
        source.totals.learn(names(source.totals.rank, GROUPS if source.totals.rank < LOUD else 16))
    figures["names"] = peak_bytes()
    for source in agent.sources:
        agent.fill(source, 96, 0)
    agent.tick(0)
    figures["quiet"] = peak_bytes()
    for slot in range(1, 4):
        for source in agent.sources[:LOUD]:
            agent.fill(source, 4096, slot * SLOT_NS)
        agent.tick(slot * SLOT_NS)
    figures["loud"] = peak_bytes()
    for number in range(MOST_ENDED + 100):
        made = agent.aggregate.open(
            f"ended {number}", identity(f"job{number % JOBS}", MOST_RINGS + number), number % OWNERS
        )
        end(made)
    agent.aggregate.retire(0)
    figures["ended"] = peak_bytes()
    figures["free"] = agent.aggregate.memory.free
    figures["refused"] = agent.aggregate.memory.refused
    print(json.dumps(figures))


def end(totals: RankTotals) -> None:
    """A rank that has lived."""
    ingest_records(totals, packed(*(operation(start_ns=0, end_ns=9 + n, size=1 << n % 40, group=n) for n in range(40))))
    totals.alive = False
    totals.finish()


def test_all_limits(tmp_path: Path) -> None:
    """With as many rings as are read at a time, and all their tables as full as they may be, the agent takes less than 512 MB."""
    code = "import sys; from tests.agent.test_all_limits import main; main(sys.argv[1])"
    command = ["bash", "-c", 'ulimit -n 8192; exec "$0" "$@"', sys.executable, "-c", code, str(tmp_path)]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, cwd=Path(__file__).parents[2], timeout=280
    )
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout.splitlines()[-1])
    assert figures["refused"] > 0, "some tables were not full"
    assert figures["free"] < ALL_BYTES // 10, figures
    assert figures["ended"] < MOST_BYTES, figures
