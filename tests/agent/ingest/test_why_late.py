"""Why a straggler is late: the sign that explains its lateness is named with its numbers, and none where nothing does."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from commwatch_agent.analysis import live_ranks
from commwatch_agent.analysis.queries import QueryService
from commwatch_agent.ingest.jobs import JobTable
from commwatch_agent.ingest.processes import Processes
from commwatch_agent.ingest.why_late import (
    ALL_LACK_CORES,
    COMPUTES,
    IDLE,
    MOST_SAMPLES,
    NO_CORE,
    QUOTA,
    Sample,
    common_why,
    waited_for_core,
)
from commwatch_agent.ingest.why_late import reason as why_of
from commwatch_collectors.node.cores import Cores
from commwatch_collectors.node.process import Usage
from tests.agent.analysis.test_ended_operations import EVERY, node
from tests.helpers import Watch, judged_now, write_ring

S = 1_000_000_000


def reason(
    rank: int, late: float, samples: dict[int, list[Sample]], since_ns: int, until_ns: int = 10 * S
) -> str | None:
    """The phrase of why a rank is late."""
    why = why_of(rank, late, samples, since_ns, until_ns)
    return None if why is None else why.says


def looks(
    ran: float = 0.2,
    wanted: float = 0.0,
    throttled: float | None = None,
    faults: float = 0.0,
    held_back: tuple[str, ...] = (),
) -> list[Sample]:
    """Eleven samples, one a second, of a process that has this share of each second."""
    return [
        Sample(
            n * S,
            Usage(
                int(ran * n * S),
                int(wanted * n * S),
                int(faults * n),
                None if throttled is None else int(throttled * n * S),
            ),
            held_back,
        )
        for n in range(11)
    ]


@pytest.mark.parametrize(
    ("mine", "phrase"),
    [
        (looks(ran=0.3, wanted=0.5), "its main thread waited 50% of the time for a core, those of the others 0%"),
        (
            looks(ran=0.25, wanted=0.7, throttled=0.7),
            "its cgroup was stopped 70% of the time because its CPU quota was used up",
        ),
        (looks(ran=0.7), "its main thread ran 70% of the time, those of the others 20%: it computes longer"),
        (
            looks(ran=0.65, wanted=0.31),
            "its main thread ran 65% of the time, those of the others 20%: it computes longer",
        ),
        (looks(faults=400), "it read 400 pages a second from disk (swap, or memory-mapped files)"),
        (
            looks(),
            "meanwhile its main thread neither ran nor was ready to run: it waits for data, a disk, a lock, its GPU or another of its threads",
        ),
        (looks(held_back=("hardware_thermal",)), "its GPU throttles its clock: hardware_thermal"),
        (looks(ran=0.4), None),
        (
            looks(ran=0.7, faults=400),
            "its main thread ran 70% of the time, those of the others 20%: it computes longer",
        ),
        (
            looks(wanted=0.5, throttled=4.0),
            "its cgroup was stopped 100% of the time because its CPU quota was used up",
        ),
        (
            looks(ran=0.9, wanted=0.02),
            "its main thread ran 90% of the time, those of the others 20%: it computes longer",
        ),
    ],
)
def test_reason(mine: list[Sample], phrase: str | None) -> None:
    """One phrase, of the largest sign; none where the sign is too small to explain half of the lateness, here 60% of the time."""
    assert reason(1, 0.6, {0: looks(), 1: mine, 2: looks(), 3: looks(ran=0.21)}, 0) == phrase


def test_code() -> None:
    """Each reason has a code. Several ranks have a common reason only if all of them have the same one."""
    assert why_of(1, 0.6, {0: looks(), 1: looks(wanted=0.5), 2: looks()}, 0, 10 * S).code == NO_CORE  # type: ignore[union-attr]
    assert common_why({1: NO_CORE, 2: NO_CORE, 3: QUOTA}, [1, 2]) == NO_CORE
    assert common_why({1: NO_CORE, 3: QUOTA}, [1, 3]) == common_why({1: NO_CORE}, [1, 2]) == common_why({}, []) == ""


def test_what_all_have_explains_nothing() -> None:
    """A full machine, a quota or page faults of all ranks alike are no reason of one."""
    for all_alike in (
        looks(wanted=0.5),
        looks(wanted=0.5, throttled=0.5),
        looks(faults=300),
        looks(held_back=("software_thermal",)),
    ):
        found = reason(1, 0.6, dict.fromkeys(range(4), all_alike), 0)
        assert found is None or "neither ran nor was ready" in found
        assert "core, those" not in (found or "")


def test_quota_known_now_and_then() -> None:
    """If the quota was unknown at the first sample, or the process has moved to another cgroup, the quota explains nothing."""
    for first, last in ((None, 4 * S), (4 * S, 0), (4 * S, None)):
        mine = [Sample(0, Usage(0, 0, 0, first)), Sample(10 * S, Usage(2 * S, 0, 0, last))]
        assert "quota" not in (reason(1, 0.6, {0: looks(), 1: mine}, 0) or "")


def test_not_known() -> None:
    """No phrase while the process is not seen, is seen once, is another one than before, or has no other rank beside it."""
    for mine in (
        [],
        looks()[:1],
        [Sample(n * S, None) for n in range(11)],
        [*looks(ran=0.5)[5:], *looks(wanted=0.9)[:2]],
    ):
        assert reason(1, 0.6, {0: looks(), 1: mine}, 0) is None
    assert reason(1, 0.6, {1: looks(ran=0.9)}, 0) is None
    assert reason(1, 0.6, {0: looks(), 1: looks(ran=0.9)}, 20 * S) is None


def test_only_the_window_counts() -> None:
    """What the process did before the window, and after it, explains nothing."""
    before = [Sample(n * S, Usage(n * S, 0, 0, None)) for n in range(-20, 0)]
    after = [Sample(n * S, Usage(2 * S + (n - 10) * S, 0, 0, None)) for n in range(11, 30)]
    assert "neither ran" in (reason(1, 0.6, {0: looks(), 1: [*before, *looks(), *after]}, 0) or "")


def test_verdict() -> None:
    """The verdict on a straggler has the reason, in a separate field and in its text."""
    aggregate = node(range(4), late=2, seqs=range(80))
    now = 81 * EVERY
    for book in aggregate.rank_totals():
        wanted = 0.8 if book.rank == 2 else 0.0
        book.samples.extend(
            Sample(now - n * S, Usage(0, int((10 - n) * wanted * S), 0, None)) for n in range(6, -1, -1)
        )
    (verdict,) = judged_now(aggregate.jobs.values(), now)
    assert verdict.why == "its main thread waited 80% of the time for a core, those of the others 0%"
    assert verdict.says.endswith(f"of the time for it; {verdict.why}")
    assert verdict.why_code == NO_CORE
    shares = [view.core_wait_share for view in live_ranks.ranks(aggregate.jobs.values(), now)]
    assert shares == pytest.approx([0.0, 0.0, 0.8, 0.0])


def test_waiting_for_a_core_is_known_after_the_end() -> None:
    """A rank that has ended keeps the share of its last half minute, so that its report has it, too; without samples there is none."""
    aggregate = node(range(2), late=None)
    first, second = aggregate.rank_totals()
    first.samples.extend(looks(wanted=0.5))
    first.alive = second.alive = False
    views = live_ranks.ranks(aggregate.jobs.values(), 81 * EVERY)
    assert [view.core_wait_share for view in views] == [pytest.approx(0.5), None]


def test_waiting_for_a_core_is_stored_at_the_end(tmp_path: Path) -> None:
    """The share of a rank's last half minute is in the history, so that a report has it that is made after the agent; without samples there is none."""
    watch = Watch(tmp_path)
    writers = [write_ring(watch.rings, [], job="job", rank=rank) for rank in (0, 1)]
    watch.tick(0)
    (job,) = watch.aggregate.jobs.values()
    next(totals for totals in job.rank_totals.values() if totals.rank == 1).samples.extend(looks(wanted=0.5))
    for writer in writers:
        writer.release()
    watch.tick(100 * S)
    watch.store.commit()
    assert [view.core_wait_share for view in QueryService(watch.path).ranks("job")] == [None, 0.5]


def test_cores_of_a_rank_that_lacks_them(tmp_path: Path) -> None:
    """Cores and threads are read now and then while a main thread waits for a core, and only then; the history keeps them after the end."""
    watch, asked = Watch(tmp_path), list[int]()
    writers = [write_ring(watch.rings, [], job="job", rank=rank) for rank in (0, 1)]
    watch.tick(0)
    (job,) = watch.aggregate.jobs.values()
    for totals in job.rank_totals.values():
        totals.pid, now = 40 + totals.rank, 0
    known = Cores(2.0, 6, 1)

    def cores(pid: int) -> Cores:
        asked.append(pid)
        return known

    processes = Processes(
        watch.aggregate,
        threading.RLock(),
        state=lambda pid: "running",
        usage=lambda pid: Usage(0, now // 2 if pid == 41 else 0, 0, None),
        cores=cores,
        now_ns=lambda: now,
    )
    for at in range(20):
        now = at * S
        processes.tick()
    assert asked == [41, 41]
    for writer in writers:
        writer.release()
    watch.tick(100 * S)
    watch.store.commit()
    assert [view.cores for view in QueryService(watch.path).ranks("job")] == [None, known]


def test_samples() -> None:
    """Each pass adds a sample to the totals of a living rank, and only the latest samples are kept."""
    aggregate, now = JobTable(), iter(range(1000))
    (book,) = node([0], late=None).rank_totals()
    book.pid = 42
    aggregate.jobs["job"] = next(iter(node([0], late=None).jobs.values()))
    aggregate.jobs["job"].rank_totals = {"ring-0": book}
    watch = Processes(
        aggregate,
        threading.RLock(),
        held_back=lambda place: ["hardware"],
        state=lambda pid: "running",
        usage=lambda pid: Usage(pid, 0, 0, None),
        now_ns=lambda: next(now),
    )
    for _ in range(MOST_SAMPLES + 5):
        watch.tick()
    assert book.process == (42, "running")
    assert len(book.samples) == MOST_SAMPLES
    assert book.samples[-1] == Sample(MOST_SAMPLES + 4, Usage(42, 0, 0, None), ("hardware",))


@pytest.mark.parametrize(
    ("mine", "code"),
    [
        (looks(ran=0.15, wanted=0.77), COMPUTES),  # it runs 1.7 times as long as the others, and waits as much longer
        (looks(ran=0.10, wanted=0.77), NO_CORE),  # as much work, for which it waits twice as long
        (looks(ran=0.12, wanted=0.85), NO_CORE),  # both, the cores more
        (looks(ran=0.10, wanted=0.50), IDLE),
    ],
    ids=["more work", "no core", "both", "neither"],
)
def test_more_work_where_all_wait_for_cores(mine: list[Sample], code: str) -> None:
    """On a busy node, a rank that waits longer for cores because it has more work is named for the work, with the numbers that show it."""
    why = why_of(1, 0.47, {0: looks(ran=0.09, wanted=0.44), 1: mine}, 0, 10 * S)
    assert why is not None
    assert why.code == code
    if code == COMPUTES:
        assert why.says == (
            "its main thread ran 15% of the time, those of the others 9%: it computes longer, on cores for which all ranks wait"
        )


@pytest.mark.parametrize(
    ("late", "mine", "other", "code"),
    [
        (0.08, looks(ran=0.40, wanted=0.38), looks(ran=0.40, wanted=0.30), ALL_LACK_CORES),
        (0.08, looks(ran=0.38, wanted=0.33), looks(ran=0.40, wanted=0.30), IDLE),  # it sleeps for as long as it is late
        (0.08, looks(ran=0.37, wanted=0.29), looks(ran=0.40, wanted=0.30), ALL_LACK_CORES),  # a little less of both
        (0.08, looks(ran=0.30, wanted=0.12, throttled=0.3), looks(ran=0.30, throttled=0.3), ALL_LACK_CORES),
        (0.08, looks(ran=0.40, wanted=0.50), looks(ran=0.40, wanted=0.30), NO_CORE),  # much longer than the others
        (0.08, looks(ran=0.55, wanted=0.35), looks(ran=0.40, wanted=0.30), COMPUTES),
        (0.16, looks(ran=0.30, wanted=0.53), looks(ran=0.30, wanted=0.37), ALL_LACK_CORES),
        (0.28, looks(ran=0.07, wanted=0.85), looks(ran=0.07, wanted=0.59), NO_CORE),  # too late for chance
        (0.08, looks(ran=0.40, wanted=0.15), looks(ran=0.40, wanted=0.10), NO_CORE),  # there are cores
        (0.08, looks(ran=0.37, wanted=0.09), looks(ran=0.40, wanted=0.10), None),
    ],
)
def test_all_lack_cores(late: float, mine: list[Sample], other: list[Sample], code: str | None) -> None:
    """Where all ranks lack cores alike, for longer than the others wait, that is the reason, unless the rank computes longer or does nothing."""
    why = why_of(1, late, {0: other, 1: mine}, 0, 10 * S)
    assert (why and why.code) == code


@pytest.mark.parametrize(
    ("wanted", "named"), [((0.8, 0.8), False), ((0.8, 0.1), True), ((0.0, 0.0), True), (None, True)]
)
def test_no_culprit_where_all_lack_cores(
    wanted: tuple[float, float] | None, named: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No rank is called late for want of cores that all ranks lack alike; it is where only it lacks them, and where that is not known."""
    monkeypatch.setattr("tests.agent.analysis.test_ended_operations.LATE_MS", 8)
    aggregate = node(range(4), late=2, seqs=range(80))
    now = 81 * EVERY
    for book in aggregate.rank_totals() if wanted else ():
        mine, theirs = wanted or (0.0, 0.0)
        share = mine if book.rank == 2 else theirs
        # Of the late rank a little more than of the others, so that neither sign is large enough.
        ran = 0.03 if book.rank == 2 else 0.0
        book.samples.extend(
            Sample(now - n * S, Usage(int((10 - n) * ran * S), int((10 - n) * share * S), 0, None))
            for n in range(6, -1, -1)
        )
    assert bool(judged_now(aggregate.jobs.values(), now)) is named


def test_standstill() -> None:
    """In a standstill the samples of the time before it stay, so that a job that hung until its end keeps its share; with the next operation begin new ones."""
    aggregate = JobTable()
    (book,) = node([0], late=None).rank_totals()
    book.pid = 42
    aggregate.jobs["job"] = next(iter(node([0], late=None).jobs.values()))
    aggregate.jobs["job"].rank_totals = {"ring-0": book}
    now = 0
    watch = Processes(
        aggregate,
        threading.RLock(),
        state=lambda pid: "running",
        usage=lambda pid: Usage(0, min(now, 40 * S) // 2, 0, None),  # it waits for nothing in the standstill
        now_ns=lambda: now,
    )

    def share(*, from_s: int, until_s: int, moves: bool) -> float | None:
        nonlocal now
        for at in range(from_s, until_s):
            now = at * S
            book.recorded_ns = now if moves else book.recorded_ns
            watch.tick()
        return waited_for_core(book.samples)

    book.longest_pause_ns = 2 * S
    assert share(from_s=0, until_s=40, moves=True) == pytest.approx(0.5)
    assert share(from_s=40, until_s=400, moves=False) == pytest.approx(0.5, abs=0.1)
    assert share(from_s=400, until_s=401, moves=True) is None
    assert share(from_s=401, until_s=410, moves=True) == 0.0


def test_nothing_to_explain() -> None:
    """A rank for which the others do not wait has no reason to be late."""
    assert why_of(1, 0.0, {0: looks(), 1: looks(throttled=0.0)}, 0, 10 * S) is None
