"""How jobs and ranks ended: what is reported about it, from the ring to the report."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from commwatch.wire import events as ev
from commwatch.wire.identity import make_private_dir
from commwatch_agent.history import job_exit
from commwatch_agent.model.endings import Ending, failed, first_to_fail, interruption, says
from commwatch_agent.report.report import build
from commwatch_agent.report.report_text import heading
from tests.agent.ingest.test_intake import trainer
from tests.helpers import MS, Watch, operation

S = 1000 * MS
AT = 1_700_000_000 * S


def clean(at_s: float, raised: str = "", *, in_operation: bool = False) -> Ending:
    """A rank that recorded its end itself."""
    at = AT + int(at_s * S)
    return Ending(at, at, True, raised, in_operation)


def died(
    since_s: float, until_s: float, *, in_operation: bool = False, is_reported: bool = False, **about: Any
) -> Ending:
    """A rank whose process vanished between two passes."""
    times = AT + int(since_s * S), AT + int(until_s * S)
    return Ending(*times, clean=False, in_operation=in_operation, is_reported=is_reported, **about)


def clock(at_s: float) -> str:
    """That time of day."""
    return time.strftime("%H:%M:%S %Z", time.localtime(AT / S + at_s))


@pytest.mark.parametrize(
    ("endings", "first"),
    [
        ({}, []),
        ({0: clean(1), 1: clean(2)}, []),
        ({0: clean(1), 1: died(5, 5.3), 2: clean(6)}, [1]),
        ({0: died(5.2, 5.5), 1: died(4.9, 5.2), 2: died(5.3, 5.6)}, [0, 1]),
        ({0: died(5.2, 5.5), 1: died(4.7, 5.0)}, [1]),
        ({0: clean(5.1, "RuntimeError", in_operation=True), 1: died(4.9, 5.2)}, [1]),
        ({0: clean(5.1, "ValueError"), 1: died(4.9, 5.2)}, [0]),
        ({0: clean(5.1, "RuntimeError", in_operation=True), 1: died(5.2, 5.4)}, [0]),
        ({0: clean(5.1, "ValueError"), 1: clean(5.0, "KeyError")}, [1]),
        ({0: died(4.9, 5.2), 1: died(4.9, 5.3, in_operation=True)}, [0]),
        ({0: died(4.9, 5.15, is_reported=True), 1: died(4.9, 5.1, is_reported=True)}, [1]),
        ({0: died(4.9, 5.12, is_reported=True), 1: died(4.9, 5.1, is_reported=True)}, [0, 1]),
        (
            {
                0: died(4.9, 5.12, is_reported=True),
                1: died(4.9, 5.1, is_reported=True),
                2: clean(5.11, "RuntimeError", in_operation=True),
            },
            [1],
        ),
        ({0: died(4.9, 5.1, is_reported=True), 1: died(4.9, 5.1, is_reported=True)}, [0, 1]),
        ({0: died(4.9, 5.1, is_reported=True), 1: died(4.9, 5.2)}, [0, 1]),
        ({0: clean(5.0, "RuntimeError", in_operation=True), 1: died(4.9, 5.3, is_reported=True)}, [1]),
    ],
    ids=[
        "none",
        "well",
        "one",
        "cannot tell",
        "one after the other",
        "killed",
        "raised",
        "all it knows",
        "two raised",
        "raised first",
        "reported",
        "by one signal",
        "others raised",
        "reported at once",
        "one is reported",
        "reported late",
    ],
)
def test_first_to_fail(endings: dict[int, Ending], first: list[int]) -> None:
    """The rank that failed first is named: several if the times do not decide, never one that failed only because of another."""
    assert first_to_fail(endings) == first


def test_a_rank_that_lost_its_peer() -> None:
    """A rank whose exception says that it lost a peer is never the first to fail beside another one, even if that one's end was seen later."""
    victim = clean(5.0, "RuntimeError", in_operation=True)._replace(says="Read error: Connection reset by peer")
    assert first_to_fail({0: victim, 1: died(5.1, 5.2, is_reported=True)}) == [1]
    assert first_to_fail({0: victim, 1: clean(6)}) == [0]


def test_says() -> None:
    """The exit code with its signal, the first rank with how and when, and of how many; nothing where all is well."""
    assert says({0: clean(1), 1: clean(2)}, 0) == ""
    assert says({0: clean(1)}, 3) == "exit code 3"
    assert says({}, 137) == "exit code 137 (SIGKILL)"
    assert says({0: clean(9), 2: died(4, 5)}) == f"rank 2 died (no clean end) at {clock(5)}, first of 2"
    assert says({0: died(4, 5), 1: died(4, 5)}) == f"ranks 0-1 died (no clean end) at {clock(5)}"
    assert says({0: clean(5, "ValueError"), 1: died(7, 8)}, 1) == (
        f"exit code 1; rank 0 ended with ValueError at {clock(5)}, first of 2"
    )
    pressed = {0: clean(5, "KeyboardInterrupt"), 1: died(5, 6), 2: clean(6, "KeyboardInterrupt")}
    assert says(pressed, 1) == f"exit code 1; interrupted by SIGINT (Ctrl-C) at {clock(5)}"


def test_failed() -> None:
    """The launcher's exit code decides whether a job failed; without it, its ranks do, else it is unknown. A job that was asked to end has not failed."""
    assert failed({}, None) is None
    assert failed({0: clean(1)}, None) is False
    assert failed({0: clean(1), 1: died(1, 2)}, None) is True
    assert failed({0: died(1, 2)}, 0) is False
    assert failed({0: clean(1)}, 3) is True
    assert failed({0: clean(5, "KeyboardInterrupt"), 1: died(5, 6)}, 130) is False


def by(number: int, at: float, **about: Any) -> Ending:
    """A process that a signal has ended, as its kernel reported; a moment before, it was seen alive."""
    return died(at - 0.25, at, is_reported=True, status=-number, **about)


TERM, INT, KILL, SEGV = signal.SIGTERM, signal.SIGINT, signal.SIGKILL, signal.SIGSEGV


def told(ending: Ending) -> Ending:
    """The same, of a rank whose launcher was asked to end by SIGTERM at 5 s."""
    return ending._replace(stop=int(TERM), stop_ns=AT + 5 * S)


@pytest.mark.parametrize(
    ("endings", "expected"),
    [
        (
            {0: told(by(TERM, 5.1)), 1: told(by(KILL, 35))},
            (TERM, 5.0, True),
        ),  # the launcher has killed the second one
        (
            {0: told(clean(5.2, "RuntimeError", in_operation=True)), 1: told(by(TERM, 5.1))},
            (TERM, 5.0, True),
        ),
        ({0: told(by(TERM, 5.1)), 1: by(KILL, 2)}, None),  # one was lost before
        ({0: told(by(TERM, 5.1)), 1: clean(2, "ValueError")}, None),
        ({0: told(by(TERM, 5.1)), 1: clean(2, "RuntimeError", in_operation=True)}, (TERM, 5.0, True)),
        ({0: clean(5, "KeyboardInterrupt"), 1: by(KILL, 35)}, (INT, 5.0, True)),
        ({0: clean(65, "KeyboardInterrupt"), 1: clean(5, "ValueError")}, None),  # Ctrl-C as the others hang
        ({0: by(TERM, 5), 1: by(TERM, 5.01), 2: by(TERM, 5.02)}, (TERM, 5.0, False)),
        ({0: by(INT, 5), 1: by(INT, 5.01)}, (INT, 5.0, False)),
        ({0: by(TERM, 5), 1: by(TERM, 5.01), 2: by(KILL, 35)}, (TERM, 5.0, False)),
        ({0: by(TERM, 5.2), 1: by(TERM, 5)}, None),  # it was sent to rank 1
        ({0: clean(5.2, "RuntimeError", in_operation=True), 1: by(TERM, 5)}, None),
        ({0: by(KILL, 5), 1: by(KILL, 5.01)}, None),
        ({0: by(SEGV, 5), 1: by(TERM, 5.01)}, None),
        ({0: by(SEGV, 5), 1: by(SEGV, 5.01)}, None),
        ({0: by(TERM, 5)}, None),
        ({0: died(5, 6), 1: died(5, 6)}, None),
        ({0: clean(5), 1: clean(6)}, None),
        ({}, None),
    ],
)
def test_interruption(endings: dict[int, Ending], expected: tuple[int, float, bool] | None) -> None:
    """A job was interrupted if its launcher got a signal to end, or if such a signal ended several ranks at once, unless a rank had failed before."""
    found = interruption(endings)
    assert (found and (found.by, (found.at_ns - AT) / S, found.is_certain)) == expected
    assert failed(endings, 1) is (expected is None)


@pytest.mark.parametrize(
    ("number", "at", "follows"), [(TERM, 5, True), (TERM, 8, False), (TERM, -700, False), (signal.SIGUSR1, 5, False)]
)
def test_stopped(number: int, at: float, follows: bool) -> None:
    """A rank ends by a signal to its launcher from then on, for some minutes; not by one that asks for something else."""
    assert (by(KILL, 6).stopped(number, AT + int(at * S)).stop == number) is follows


def test_asked_to_end_but_ended_well() -> None:
    """A job that was asked to end and ended well is no interrupted one; one that its launcher reports to have failed is."""
    ended = {0: told(clean(6))}
    assert says(ended, 0) == ""
    assert says(ended, 1) == f"exit code 1; interrupted by SIGTERM at {clock(5)}"


def test_from_the_ring(tmp_path: Path) -> None:
    """A rank that vanished, one that raised after it, and one that ended well: live and in the history the job has failed, by the first."""
    watch = Watch(tmp_path)
    failing = operation(start_ns=8 * S, end_ns=9 * S, flags=ev.FAILED)
    with trainer(tmp_path, 0) as well, trainer(tmp_path, 1) as raising, trainer(tmp_path, 2) as vanishing:
        for rank in (well, raising, vanishing):
            rank.write([operation(start_ns=0, end_ns=5)])
        watch.tick(9 * S)
        vanishing.kill()
        watch.tick(10 * S)
        assert [view.ended_at is None for view in watch.agent.ranks(None)] == [True, True, False]
        raising.write([failing])
        raising.call("name", [({"raised": "RuntimeError"},)])
        raising.call("close", [(9 * S,)])
        well.call("close", [(11 * S,)])
    watch.tick(12 * S)
    watch.tick(13 * S)
    for _ in range(2):
        (job,) = watch.agent.jobs()
        assert (job.state, job.failed, job.exit_code) == ("ended", True, None)
        assert job.ending == f"rank 2 died (no clean end) at {clock(10)}, first of 3"
        views = watch.agent.ranks(None)
        assert [(view.state, view.raised) for view in views] == [
            ("ended", None),
            ("ended", "RuntimeError"),
            ("gone", None),
        ]
        assert [view.ended_at for view in views] == [AT / S + at for at in (11, 9, 10)]
        watch.agent = Watch(tmp_path).agent  # what is left is the history's


def test_error_long_before_the_end(tmp_path: Path) -> None:
    """An operation that raised long before a rank's exception is no reason for it: that rank is named, and not one that was killed after it."""
    watch = Watch(tmp_path)
    with trainer(tmp_path, 0) as killed, trainer(tmp_path, 1) as raising:
        killed.write([operation(start_ns=S, end_ns=2 * S)])
        raising.write([operation(start_ns=S, end_ns=2 * S, flags=ev.FAILED)])
        watch.tick(100 * S)
        raising.call("name", [({"raised": "ValueError"},)])
        raising.call("close", [(100 * S + S // 2,)])
        killed.kill()
        watch.tick(101 * S)
    watch.tick(102 * S)
    (job,) = watch.agent.jobs()
    assert job.ending == f"rank 1 ended with ValueError at {clock(100.5)}, first of 2"


def test_exit_code_is_kept(tmp_path: Path) -> None:
    """What a launcher leaves in the run directory goes into the history, once, and comes out in jobs and report."""
    watch = Watch(tmp_path)
    with trainer(tmp_path) as rank:
        rank.write([operation(start_ns=0, end_ns=5)])
        watch.tick()
        rank.call("close", [(9,)])
    left = job_exit.leave(tmp_path, "job", 3)
    watch.tick()
    watch.tick()
    assert not left.exists()
    (job,) = watch.agent.jobs()
    assert (job.state, job.failed, job.exit_code, job.ending) == ("ended", True, 3, "exit code 3")
    report = build(watch.agent, "job", watch.agent.path, "again")
    assert report is not None
    lines = dict(heading(report))
    assert lines["job"].startswith("job (failed), began")
    assert lines["how"] == "exit code 3"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "no JSON",
        "[1]",
        "{}",
        '["job", 3]',
        '["job", -1, 5]',
        '["job", 3, 1e99]',
        '["job", NaN, 5]',
        "[" * 5000,
        '["job", null, 5, "", [15]]',
        '["job", null, 5, "", [15, 1e99]]',
        '["job", null, 5, "", [15, NaN]]',
        '["job", null, 5, "", ["15s", 5]]',
        '["job", 3, 5, "", 7]',
    ],
)
def test_damaged_exit(tmp_path: Path, text: str) -> None:
    """What is no exit code is removed, and nothing comes of it."""
    make_private_dir(tmp_path / "exits", os.environ)
    (tmp_path / "exits" / "1.json").write_text(text)
    taking = job_exit.Exits(tmp_path)
    assert taking.take() == []
    taking.remove()
    assert list((tmp_path / "exits").iterdir()) == []
    assert taking.stop_of({"job": "job"}) is None


def test_signal_to_the_launcher_is_kept(tmp_path: Path) -> None:
    """A launcher that is asked to end leaves the signal at once; ranks that end from then on are interrupted, live and in the history."""
    watch = Watch(tmp_path)
    stop = job_exit.Stop(int(TERM), AT / S + 9.5)
    with trainer(tmp_path, 0) as first, trainer(tmp_path, 1) as second:
        for rank in (first, second):
            rank.write([operation(start_ns=0, end_ns=5)])
        watch.tick(9 * S)
        left = job_exit.leave(tmp_path, "job", None, "", stop)
        watch.tick(9 * S)
        assert not left.exists()
        first.kill()
        watch.tick(10 * S)
        (job,) = watch.agent.jobs()
        assert (job.state, job.exit_code) == ("running", None)
        assert [view.stopped_by for view in watch.agent.ranks(None)] == [TERM, None]
        second.kill()
    watch.tick(40 * S)
    job_exit.leave(tmp_path, "job", 1, "", stop)
    watch.tick(41 * S)
    for _ in range(2):
        (job,) = watch.agent.jobs()
        assert (job.state, job.failed, job.exit_code) == ("ended", False, 1)
        assert job.ending == f"exit code 1; interrupted by SIGTERM at {clock(9.5)}"
        assert [(view.stopped_by, view.stopped_at) for view in watch.agent.ranks(None)] == [(TERM, stop.at)] * 2
        watch.agent = Watch(tmp_path).agent  # what is left is the history's


def test_odd_exits(tmp_path: Path) -> None:
    """Links and pipes are not read; an odd name comes out as text that can be stored."""
    (tmp_path / "secret").write_text('["stolen", 1, 1]')
    make_private_dir(tmp_path / "exits", os.environ)
    (tmp_path / "exits" / "link.json").symlink_to(tmp_path / "secret")
    os.mkfifo(tmp_path / "exits" / "pipe.json")
    (tmp_path / "exits" / "odd.json").write_text(json.dumps(["\ud800", 1, 1]))
    assert job_exit.Exits(tmp_path).take() == [job_exit.Exit("?", 1, 1.0)]
