"""A job that seems to run right now: its records are written by hand, at times of this machine's own clock."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event, Thread
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import quote

from commwatch.wire import events as ev
from commwatch.wire.identity import ring_prefix
from commwatch.wire.ring import HEARTBEAT, RingWriter
from commwatch_agent.model.cells import SLOT_NS
from tests.agent.web.routes.test_jobs import rings_of
from tests.helpers import MS, RunningAgent, agent, end_rank, group_entry, identity, mark, operation, wait_for

if TYPE_CHECKING:
    from tests.browser import Chromium, Visit

#: A step, and when its all_reduce begins and what it takes; the late rank enters so much later than the others.
PERIOD_MS, BEGINS_MS, TRANSFER_MS, LATE_MS = 120, 60, 10, 40
#: Operations of a step in the order of time: what, in which group, of how many bytes, when, and for how long.
STEP: tuple[tuple[str, int, int, int, int], ...] = (
    ("all_gather", 1, 4_000_000, 10, 5),
    ("all_reduce", 0, 8_000_000, BEGINS_MS, TRANSFER_MS),
)


class HandMade:
    """Ranks whose trainers are this process.

    Args:
        directory: the agent's run directory.
        late: the rank that enters each all_reduce late; ``None``: nobody.
        ago_s: how long ago it began.
        group: what the two groups are called.
        here: the ranks that this directory has; ``None``: all.
        who: of the rings' identity.
    """

    def __init__(
        self, directory: Path, job: str = "train", ranks: int = 2, *, late: int | None = None, ago_s: float = 60,
        group: tuple[str, str] = ("dp", "tp"), names: tuple[dict[str, Any], ...] = (), slots: int = 1024,
        here: tuple[int, ...] | None = None, **who: Any,
    ) -> None:  # fmt: skip
        self.job, self.ranks, self.late, self.steps, self.written = job, ranks, late, 0, 0
        self._until_ns = now_ns = time.monotonic_ns()
        self._stuck: list[tuple[RingWriter, int]] = []
        began_ns = now_ns - int(ago_s * 1e9)
        about = {"wall_offset_ns": time.time_ns() - now_ns, "started_ns": began_ns, "world_size": ranks, **who}
        everybody = tuple(range(ranks))
        self.here = everybody if here is None else here
        entries = [group_entry(at, everybody, label, group_id=f"{job}-{at}") for at, label in enumerate(group)]
        self.writers: list[RingWriter] = [
            self._ring(
                rings_of(directory),
                {"job": job, "rank": rank, "pid": self.pid(rank), **about},
                [*entries, *names],
                slots,
            )
            for rank in self.here
        ]
        for writer in self.writers:  # a sign of life that does not age
            writer.counters[HEARTBEAT] = now_ns + 3600 * 1000 * MS

    def __enter__(self) -> HandMade:
        return self

    def __exit__(self, *_: object) -> None:
        for writer in self.writers:
            end_rank(writer)

    def pid(self, rank: int) -> int:
        """The process of a rank, as its ring has it."""
        return 100 + rank

    def _ring(self, rings: Path, about: dict[str, Any], names: list[dict[str, Any]], slots: int) -> RingWriter:
        who = identity(**about)
        writer = RingWriter(rings / f"{ring_prefix(who['job'])}{who['restart']}.{who['rank']}.ring", who, slots)
        for entry in names:
            writer.name(entry)
        return writer

    def run(
        self,
        steps: int,
        until_ns: int | None = None,
        *,
        flags: int = 0,
        marks: bool = True,
        exposed_ms: int | None = 30,
    ) -> None:
        """Write so many steps, of which the last ends at ``until_ns`` (now)."""
        self._until_ns = until_ns = time.monotonic_ns() if until_ns is None else until_ns
        for rank, writer in zip(self.here, self.writers, strict=True):
            for fields in self._records(rank, steps, until_ns, flags, marks, exposed_ms):
                writer.write(*fields)
                self.written += 1
        self.steps += steps

    def _records(
        self, rank: int, steps: int, until_ns: int, flags: int, marks: bool, exposed_ms: int | None
    ) -> Iterator[tuple[int, ...]]:
        waits_ms = LATE_MS if self.late is not None else 0
        begin_ns = until_ns - steps * PERIOD_MS * MS
        exposed_ns = None if exposed_ms is None else exposed_ms * MS
        if marks and not self.steps:
            yield mark(0, begin_ns)
        for n in range(self.steps, self.steps + steps):
            for op, group, size, at_ms, takes_ms in STEP:
                waits = waits_ms if group == 0 else 0
                start_ms = at_ms + (waits if rank == self.late else 0)
                start_ns, end_ns = begin_ns + start_ms * MS, begin_ns + (at_ms + waits + takes_ms) * MS
                timing = ev.BY_NONE if flags & ev.UNTIMED else ev.BY_FUTURE
                yield operation(
                    op, start_ns=start_ns, end_ns=end_ns, seq=n, size=size, group=group, flags=flags, timing=timing
                )
            begin_ns += PERIOD_MS * MS
            if marks:
                yield mark(n + 1, begin_ns, exposed_ns=exposed_ns)

    def go_on(self) -> None:
        """Write the steps that have ended since the last one; no rank is in an operation any longer."""
        for writer, slot in self._stuck:
            writer.end(slot)
        self._stuck.clear()
        steps = (time.monotonic_ns() - self._until_ns) // (PERIOD_MS * MS)
        end_ns = self._until_ns + steps * PERIOD_MS * MS + time.time_ns() - time.monotonic_ns()
        if steps and end_ns % SLOT_NS < PERIOD_MS * MS:
            steps -= 1  # else the latest slot has only a part of a step
        if steps:
            self.run(steps, self._until_ns + steps * PERIOD_MS * MS)

    def read_by(self, running: RunningAgent) -> None:
        """Wait until an agent has read all that was written."""

        def read() -> bool:
            ranks = [rank for rank in running.get("/api/v1/ranks") if rank["job_id"] == self.job]
            return bool(sum(rank["records"] for rank in ranks) == self.written)

        wait_for(read, "the agent to read what was written")

    def hang(self, *ranks: int, age_ms: int = 20_000) -> None:
        """These ranks are in the next all_reduce, and have been for this long."""
        for rank in ranks:
            launch_ns = time.monotonic_ns() - age_ms * MS
            stuck = operation("all_reduce", start_ns=0, end_ns=0, seq=self.steps, launch_ns=launch_ns, size=8_000_000)
            writer = self.writers[self.here.index(rank)]
            self._stuck.append((writer, writer.begin(*stuck)))
            assert self._stuck[-1][1] >= 0

    def end(self) -> None:
        """All ranks say goodbye."""
        for writer in self.writers:
            writer.close(1)
            end_rank(writer)


@contextmanager
def going_on(*parts: HandMade) -> Iterator[None]:
    """Meanwhile the job goes on, on all its nodes: its figures are of now."""
    over = Event()

    def work() -> None:
        while not over.wait(0.5):
            for part in parts:
                part.go_on()

    thread = Thread(target=work)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


@contextmanager
def late_job(directory: Path, steps: int) -> Iterator[RunningAgent]:
    """An agent that has read so many steps of a job of two ranks, of which rank 1 is late."""
    with agent(directory) as running, HandMade(directory, late=1) as job:
        job.run(steps)
        job.read_by(running)
        yield running


@contextmanager
def opened(
    chromium: Chromium, running: RunningAgent, job: HandMade, query: str = "", width: int = 1280, dark: bool = False
) -> Iterator[Visit]:
    """The page of a job, with further parameters of its address; its ranks are shown."""
    from playwright.sync_api import expect  # which is not installed for tests/frameworks

    with chromium.visit(f"{running.url}/?job={quote(job.job)}{query}", width=width, dark=dark) as visit:
        expect(visit.page.locator("#ranks tbody tr")).to_have_count(job.ranks)
        yield visit


def table(visit: Visit, name: str) -> list[dict[str, str]]:
    """The rows of a table of the page as it is now, each cell under its column's head."""
    rows: list[list[str]] = visit.page.locator(f"#{name} tr").evaluate_all(
        "rows => rows.map(row => [...row.cells].map(cell => cell.textContent))"
    )
    return [dict(zip(rows[0], row, strict=True)) for row in rows[1:]]


def number(text: str) -> float:
    """What a cell says, in seconds, bytes, bytes per second, or as a part of one."""
    digits = re.match(r"[\d.]*", text)
    assert digits
    return float(digits[0]) * _UNITS[text[digits.end() :].strip()]


_UNITS = {
    "": 1.0, "%": 0.01, "s": 1.0, "ms": 1e-3, "µs": 1e-6, "B": 1.0, "kB": 1e3, "MB": 1e6, "GB": 1e9,
    "B/s": 1.0, "kB/s": 1e3, "MB/s": 1e6, "GB/s": 1e9, "/s": 1.0,
}  # fmt: skip


class Node(NamedTuple):
    """An agent, and its job."""

    agent: RunningAgent
    job: HandMade


def hear(visit: Visit, topic: str, times: int = 2) -> None:
    """Wait until the agent has sent its pages a topic this many times more."""
    visit.page.evaluate(
        """([topic, times]) => new Promise((done) => {
            const job = new URLSearchParams(location.search).get("job");
            const source = new EventSource(`/api/v1/stream${job === null ? "" : `?job=${encodeURIComponent(job)}`}`);
            source.addEventListener(topic, () => --times || (source.close(), done()));
        })""",
        [topic, times + 1],  # the first is what was told last
    )
